"""The scan in Triton: the built-in policies, re-expressed, on a GPU.

Two kernels, and a third that makes one of them parallel. ``_scan_kernel`` has one program per kept set, which goes
through the steps of a chunk with the set's state in registers: softmax of every head over what is held, head average,
record, victim. It reads the logits once, in whatever dtype they are, and accumulates in float32. ``_weights_kernel``,
with a program for every query and head, turns logits into undivided weights once it is known who saw whom; policies
that drop the oldest need nothing else. ``_rows_kernel`` computes the head-averaged weights of all steps under guessed
drops, for :mod:`tova.scan.fixed_point`; the scan kernel then walks through these.

Without a GPU the kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` before Triton is imported), slowly.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from tova.policies import Policy
from tova.scan import Chunk, fixed_point, modes, reference

OLDEST, LATEST, SUM, VOTES, RING, FEATURE = (
    tl.constexpr(mode) for mode in (modes.OLDEST, modes.LATEST, modes.SUM, modes.VOTES, modes.RING, modes.FEATURE)
)
MODES = {policy: mode for policy, mode in modes.MODES.items() if mode[0] != modes.RANDOM}

MOST = 16384
"""Candidates a program takes; a chunk with more (a long prompt in one shot) goes to the reference scan."""
_NEVER = 2**31 - 1
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
_INF = tl.constexpr(float("inf"))
_HIGHEST = tl.constexpr(80.0)  # as in tova.scan.fixed_point


@dataclass
class Launch:
    """How the kernels are launched: what to turn on a new card. Results do not depend on it.

    Attributes:
        tile: logits the scan kernel holds at once (heads times candidates, rounded up to powers of two).
        ahead: whether it asks for the next step's logits early, where all heads fit into a tile; takes registers.
        scan_warps: warps of a program that reads logits.
        walk_warps: warps of a program that walks through head-averaged weights.
        row_warps: warps of a program that works on one query.
        attend_rows, attend_columns, attend_warps, attend_stages: queries and candidates a program of :mod:`tova.fused`
            holds at once, its warps, and how many tiles are on their way at a time.
    """

    tile: int = 32768
    ahead: bool = False
    scan_warps: int = 16
    walk_warps: int = 4
    row_warps: int = 4
    attend_rows: int = 64
    attend_columns: int = 64
    attend_warps: int = 4
    attend_stages: int = 2


launch = Launch()
"""In force for all calls."""


def supports(policy: Policy, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels know this very class (a subclass may have changed anything) on a model of ``dtype``."""
    return type(policy) in MODES and not (policy.rounds_weights and dtype != torch.float32)


def fits(policy: Policy, chunk: Chunk) -> bool:
    """Whether the kernels can scan this very chunk."""
    return supports(policy, chunk.dtype) and chunk.logits.shape[-1] <= MOST


def scan(policy: Policy, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`tova.scan.Scan`; overwrites the logits. Weights come in the model's dtype, sums in float32."""
    if not fits(policy, chunk) and needs_logits(policy, chunk):
        return reference.scan(policy, chunk.scaled())
    last = decide(policy, chunk)
    return *weights_under(chunk, last), last


def decide(policy: Policy, chunk: Chunk) -> Tensor:
    """``last`` alone, int64 [R, N]. See :class:`tova.scan.Scan`."""
    if not needs_logits(policy, chunk):
        return fixed_point.closed_form(policy, chunk)
    if not fits(policy, chunk):
        return reference.scan(policy, chunk.scaled())[2]
    state = _State(policy, chunk)
    state.go(chunk.logits, given=False)
    state.store()
    return state.last


def needs_logits(policy: Policy, chunk: Chunk) -> bool:
    """Whether counting alone does not say what is dropped when."""
    return chunk.allowed is not None or not fixed_point.has_closed_form(policy)


def weights_under(chunk: Chunk, last: Tensor) -> tuple[Tensor, Tensor]:
    """Undivided weights [R, H_g, C, N] in the model's dtype, and their sums float32 [R, H_g, C, 1].

    ``last`` is int64 [R, N]. The weights take the place of the logits if the dtypes agree.
    """
    logits = chunk.logits.contiguous()
    rows, heads, steps, candidates = logits.shape
    weights = logits if logits.dtype == chunk.dtype else torch.empty_like(logits, dtype=chunk.dtype)
    sums = torch.empty(rows, heads, steps, 1, dtype=torch.float32, device=logits.device)
    _weights_kernel[(rows * heads * steps,)](
        logits,
        last,
        _or(chunk.sinks, sums),
        weights,
        sums,
        chunk.kept,
        heads,
        steps,
        candidates,
        *_scale(chunk),
        HAS_SINKS=chunk.sinks is not None,
        HAS_SOFTCAP=chunk.softcap is not None,
        BLOCK=min(triton.next_power_of_2(candidates), 2048),
        num_warps=launch.row_warps,
    )
    return weights, sums


class Walk:
    """The rounds of :func:`tova.scan.fixed_point.solve` as kernels; a walk begins anew each time, since it is short."""

    def __init__(self, policy: Policy, chunk: Chunk) -> None:
        rows, _, steps, candidates = chunk.logits.shape
        self.policy, self.chunk = policy, chunk
        self.logits = chunk.logits.contiguous()
        self.weights = torch.zeros(rows, steps, candidates, dtype=torch.float32, device=self.logits.device)
        self.state: _State | None = None

    def look(self, last: Tensor, begin: int) -> None:
        """See :class:`tova.scan.fixed_point.Walk`."""
        if not self.policy.reads_attention:
            return
        chunk = self.chunk
        rows, heads, steps, candidates = self.logits.shape
        block = triton.next_power_of_2(candidates)
        _rows_kernel[(rows * (steps - begin),)](
            self.logits,
            last,
            _or(chunk.sinks, self.weights),
            self.weights,
            begin,
            chunk.kept,
            heads,
            steps,
            candidates,
            *_scale(chunk),
            HAS_SINKS=chunk.sinks is not None,
            HAS_SOFTCAP=chunk.softcap is not None,
            BLOCK_H=_heads_at_once(heads, block, 4096),
            BLOCK=block,
            num_warps=launch.row_warps,
        )

    def pick(self, begin: int) -> Tensor:
        """See :class:`tova.scan.fixed_point.Walk`."""
        return self._go(self.weights.unsqueeze(1), given=True)

    def one_by_one(self, begin: int) -> Tensor:
        """See :class:`tova.scan.fixed_point.Walk`."""
        return self._go(self.logits, given=False)

    def done(self) -> None:
        """See :class:`tova.scan.fixed_point.Walk`."""
        assert self.state is not None
        self.state.store()

    def _go(self, source: Tensor, *, given: bool) -> Tensor:
        self.state = _State(self.policy, self.chunk)
        self.state.go(source, given=given)
        return self.state.last


class _State:
    """What the scan kernel changes, in copies of its own until :meth:`store` puts them into the chunk's slots."""

    def __init__(self, policy: Policy, chunk: Chunk) -> None:
        slots = chunk.slots
        self.policy, self.chunk = policy, chunk
        self.mode, self.record, self.feature = MODES[type(policy)]
        self.held = slots.held.to(torch.uint8)
        self.last = torch.empty_like(slots.positions)
        self.blind = torch.zeros_like(slots.observed)
        self.numbers = self.scratch = None
        if self.record == "ring":
            # The kernel wants the candidates of one step next to each other; newcomers begin at nothing.
            self.numbers = slots["ring"].transpose(1, 2).contiguous()
            self.numbers[..., chunk.kept :] = 0.0
            self.scratch = torch.empty(slots.held.shape, dtype=torch.float64, device=slots.held.device)
        elif self.record is not None:
            self.numbers = slots[self.record].clone(memory_format=torch.contiguous_format)

    def go(self, source: Tensor, *, given: bool) -> None:
        """Walk through the chunk over ``source``: logits [R, H_g, C, N], or given weights float32 [R, 1, C, N]."""
        policy, chunk, slots = self.policy, self.chunk, self.chunk.slots
        source = source.contiguous()
        rows, heads, steps, candidates = source.shape
        recent = policy.newest_protected
        block = triton.next_power_of_2(candidates)
        at_once = 1 if given else _heads_at_once(heads, block, launch.tile)
        feature = None if self.feature is None else slots.features[self.feature].contiguous()
        _scan_kernel[(rows,)](
            source,
            slots.positions.contiguous(),
            self.held,
            self.last,
            _or(self.numbers, source),
            _or(self.scratch, source),
            _or(feature, source),
            _or(chunk.allowed, self.held),
            _or(chunk.real, self.held),
            _or(chunk.sinks, source),
            slots.observed.contiguous(),
            self.blind,
            chunk.kept,
            min(chunk.trigger, _NEVER),
            min(chunk.remains, _NEVER),
            policy.sinks,
            recent,
            heads,
            steps,
            candidates,
            *_scale(chunk),
            MODE=self.mode,
            IN_NUMBERS=self.record not in (None, "ring"),
            READS=policy.reads_attention,
            GIVEN=given,
            OWN=type(policy).admitted is not Policy.admitted,
            HAS_FEATURE=feature is not None,
            HAS_ALLOWED=chunk.allowed is not None,
            HAS_REAL=chunk.real is not None,
            HAS_SINKS=chunk.sinks is not None,
            HAS_SOFTCAP=chunk.softcap is not None,
            RECENT=min(recent, 2),
            WIDTH=slots["ring"].shape[-1] if self.record == "ring" else 1,
            POOL=getattr(policy, "pool_kernel", 1),
            BLOCK_H=at_once,
            BLOCK=block,
            AHEAD=launch.ahead and not given and at_once >= heads,
            num_warps=launch.walk_warps if given or not policy.reads_attention else launch.scan_warps,
        )

    def store(self) -> None:
        """Let the chunk's slots be as they are after the last step."""
        slots = self.chunk.slots
        slots.held = self.held.bool()
        if self.record == "ring":
            assert self.numbers is not None
            slots.records["ring"] = self.numbers.transpose(1, 2).contiguous()
        elif self.record is not None:
            assert self.numbers is not None
            slots.records[self.record] = self.numbers
        fixed_point.advance(self.policy, self.chunk)
        if self.policy.reads_attention:
            slots.observed = slots.observed - self.blind


def _or(tensor: Tensor | None, instead: Tensor) -> Tensor:
    """A kernel's optional argument: any pointer does where it is not read."""
    return instead if tensor is None else tensor.contiguous()


def _scale(chunk: Chunk) -> tuple[float, float]:
    return chunk.scaling, 1.0 if chunk.softcap is None else chunk.softcap


def _heads_at_once(heads: int, block: int, tile: int) -> int:
    return max(1, min(triton.next_power_of_2(heads), tile // block))


@triton.jit
def _scaled(x, scaling, softcap, HAS_SOFTCAP: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 logits of a raw product."""
    x = x.to(tl.float32) * scaling
    if HAS_SOFTCAP:
        x = softcap * (1.0 - 2.0 / (tl.exp(2.0 * x / softcap) + 1.0))  # softcap * tanh(x / softcap)
    return x


@triton.jit
def _head_average(  # type: ignore[no-untyped-def]
    logits, sinks, row, step, seen, loadable, heads, steps, candidates, scaling, softcap,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, OTHERS: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK]: weights of one query beside what is ``seen``, averaged over heads.

    Zero elsewhere, or, with ``OTHERS``, what the other ``loadable`` ones would weigh with the same sums. What is
    loadable is known earlier than what is seen, so loads need not wait. NaN everywhere if what a head sees is not
    finite, or if it sees nothing.
    """
    average = tl.zeros([BLOCK], tl.float32)
    for first in range(0, heads, BLOCK_H):
        x = _tile(logits, row, step, first, loadable, heads, steps, candidates, BLOCK_H, BLOCK)
        average += _sum_over_heads(
            x, sinks, row, first, seen, loadable, heads, scaling, softcap, HAS_SINKS, HAS_SOFTCAP, OTHERS, BLOCK_H
        )
    return average / heads


@triton.jit
def _tile(  # type: ignore[no-untyped-def]
    logits, row, step, first, loadable, heads, steps, candidates, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr
):
    """[BLOCK_H, BLOCK]: the logits of one query as they are stored, of the heads from ``first`` on."""
    n = tl.arange(0, BLOCK)
    h = first + tl.arange(0, BLOCK_H)
    at = ((row * heads + h.to(tl.int64)) * steps + step) * candidates
    return tl.load(logits + at[:, None] + n[None, :], mask=(h < heads)[:, None] & loadable[None, :], other=0.0)


@triton.jit
def _sum_over_heads(  # type: ignore[no-untyped-def]
    x, sinks, row, first, seen, loadable, heads, scaling, softcap,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, OTHERS: tl.constexpr, BLOCK_H: tl.constexpr,
):  # fmt: skip
    """float32 [BLOCK]: weights of a :func:`_tile`, see :func:`_head_average`."""
    h = first + tl.arange(0, BLOCK_H)
    there = h < heads
    x = tl.where(there[:, None] & loadable[None, :], _scaled(x, scaling, softcap, HAS_SOFTCAP), -_INF)
    if OTHERS:
        top = tl.max(tl.where(seen[None, :], x, -_INF), 1)
    else:
        x = tl.where(seen[None, :], x, -_INF)
        top = tl.max(x, 1)
    if HAS_SINKS:
        sink = tl.load(sinks + row * heads + h, mask=there, other=-_INF)
        top = tl.maximum(top, sink)
    top = tl.maximum(top, _LOWEST)
    if OTHERS:
        above = x - top[:, None]
        weight = tl.exp(tl.where(above > _HIGHEST, _HIGHEST, above))  # a minimum may be of NaN what is not
        total = tl.sum(tl.where(seen[None, :], weight, 0.0), 1)
    else:
        weight = tl.exp(x - top[:, None])
        total = tl.sum(weight, 1)
    if HAS_SINKS:
        total += tl.exp(sink - top)
    total = tl.where(there, total, 1.0)  # there it may be NaN or 0, and what is divided by it is NaN
    return tl.sum(weight / total[:, None], 0)


@triton.jit
def _observed(  # type: ignore[no-untyped-def]
    number, attn, alive, newcomer, count, MODE: tl.constexpr, OWN: tl.constexpr, BLOCK: tl.constexpr
):
    """float32 [BLOCK]: the record after a step whose weights were ``attn``, the newcomer's own included.

    A policy sees the weights on the ``count`` that were held before the newest token joined; where they are NaN, which
    is everywhere or nowhere, records stay and the newcomer's is as at any admission.
    """
    known = attn == attn
    shown = tl.where(alive & known, attn, 0.0)
    own = tl.where(known, attn, 0.0) if OWN else tl.zeros([BLOCK], tl.float32)
    if MODE == LATEST:
        unobserved = tl.full([BLOCK], float("nan"), tl.float32)
        fresh = attn if OWN else unobserved
        number = tl.where(newcomer, fresh, tl.where(known, shown, number))
    if MODE == SUM:
        number = tl.where(newcomer, own, number + shown)
    if MODE == VOTES:
        # Double precision, as the policy is defined.
        fair = tl.full([1], 1.0, tl.float64) / tl.maximum(count, 1).to(tl.float64)
        vote = alive & (attn.to(tl.float64) > fair)
        number = tl.where(newcomer, 0.0, number + vote.to(tl.float32))
    return number


@triton.jit
def _given(source, row, step, kept, steps, candidates, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 [BLOCK]: the given weights of one step; nothing past the last."""
    n = tl.arange(0, BLOCK)
    mask = (n < candidates) & (n <= kept + step) & (n * 0 + step < steps)  # step may be a plain number
    return tl.load(source + (row * steps + step) * candidates + n, mask=mask, other=0.0)


@triton.jit
def _scan_kernel(  # type: ignore[no-untyped-def]
    source, positions, held, last_out, numbers, scratch, feature, allowed, real, sinks, observed_at, blind_out,
    kept, trigger, remains, sink_tokens, recent, heads, steps, candidates, scaling, softcap,
    MODE: tl.constexpr, IN_NUMBERS: tl.constexpr, READS: tl.constexpr, GIVEN: tl.constexpr, OWN: tl.constexpr,
    HAS_FEATURE: tl.constexpr, HAS_ALLOWED: tl.constexpr, HAS_REAL: tl.constexpr, HAS_SINKS: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, RECENT: tl.constexpr, WIDTH: tl.constexpr, POOL: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One kept set through one chunk. Candidates are in position order, so ties go to the lower index.

    ``blind_out`` takes how many real steps had weights that were not finite.

    What a step reads does not depend on what was dropped before, so it is asked for while earlier steps are at work:
    given weights two steps ahead, and with ``AHEAD``, where all heads fit at once, logits one step ahead.
    """
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < candidates
    alive = tl.load(held + row * candidates + n, mask=inside, other=0) != 0
    last = tl.where(alive, steps, -1)
    free = tl.load(positions + row * candidates + n, mask=inside, other=0) >= sink_tokens
    number = tl.zeros([BLOCK], tl.float32)
    if IN_NUMBERS:
        number = tl.load(numbers + row * candidates + n, mask=inside, other=0.0)
    if HAS_FEATURE:
        value = tl.load(feature + row * candidates + n, mask=inside, other=0.0)
    ring = numbers + row * WIDTH * candidates
    dense = scratch + row * candidates
    observed = tl.load(observed_at + row)
    blind = tl.zeros([BLOCK], tl.int32)
    count = tl.sum(alive.to(tl.int32), 0)
    if READS and GIVEN:
        next_given = _given(source, row, 0, kept, steps, candidates, BLOCK)
        after_next = _given(source, row, 1, kept, steps, candidates, BLOCK)
    if READS and AHEAD:
        next_tile = _tile(source, row, 0, 0, inside & (n <= kept), heads, steps, candidates, BLOCK_H, BLOCK)
    for i in range(steps):
        m = kept + i
        is_real = True
        if HAS_REAL:
            is_real = tl.load(real + row * steps + i) != 0
        newcomer = n == tl.where(is_real, m, BLOCK)
        if HAS_ALLOWED:  # the layer's own sliding window moves on
            may = tl.load(allowed + (row * steps + i) * candidates + n, mask=inside, other=0) != 0
            gone = alive & (may == 0) & (n < tl.where(is_real, BLOCK, 0))
            last = tl.where(gone, i - 1, last)
            alive = alive & (gone == 0)
            count = tl.sum(alive.to(tl.int32), 0)
        if READS:
            if GIVEN:
                attn = tl.where(alive | newcomer, next_given, 0.0)
                next_given = after_next
                after_next = _given(source, row, i + 2, kept, steps, candidates, BLOCK)
            elif AHEAD:
                tile = next_tile
                following = inside & (n <= m + 1) & (n * 0 + i + 1 < steps)
                next_tile = _tile(source, row, i + 1, 0, following, heads, steps, candidates, BLOCK_H, BLOCK)
                attn = _sum_over_heads(
                    tile, sinks, row, 0, alive | newcomer, inside & (n <= m), heads, scaling, softcap,
                    HAS_SINKS, HAS_SOFTCAP, False, BLOCK_H,
                ) / heads  # fmt: skip
            else:
                attn = _head_average(
                    source, sinks, row, i, alive | newcomer, inside & (n <= m), heads, steps, candidates,
                    scaling, softcap, HAS_SINKS, HAS_SOFTCAP, False, BLOCK_H, BLOCK,
                )  # fmt: skip
            # The newcomer is seen by every row, so its weight is NaN if and only if the row is not finite.
            unknown = (newcomer & (attn != attn)).to(tl.int32)
            blind += unknown
            if MODE == RING:
                lost = tl.max(unknown, 0)
                if HAS_REAL:
                    lost = tl.where(is_real, lost, 1)
                turn = observed % WIDTH
                tl.store(ring + turn * candidates + n, tl.where(alive, attn, 0.0), mask=inside & (n * 0 + lost == 0))
                observed += 1 - lost
            else:
                number = tl.where(is_real, _observed(number, attn, alive, newcomer, count, MODE, OWN, BLOCK), number)
        alive = alive | newcomer
        last = tl.where(newcomer, steps, last)
        count += tl.where(is_real, 1, 0)
        excess = tl.where(count >= trigger, count - remains, 0)
        if excess > 0:
            droppable = alive & free
            if RECENT == 1:
                droppable = droppable & (n != m)
            if RECENT == 2:
                after = count - tl.cumsum(alive.to(tl.int32), 0)
                droppable = droppable & (after >= recent)
            if MODE == OLDEST:
                score = n.to(tl.float32)
            elif MODE == FEATURE:
                score = -value
            elif MODE == RING:
                # Other threads have written what is read now, and will write again what was read.
                tl.debug_barrier()
                score = tl.zeros([BLOCK], tl.float64)
                for w in tl.static_range(WIDTH):
                    score += tl.load(ring + w * candidates + n, mask=inside, other=0.0).to(tl.float64)
                if POOL > 1:
                    rank = tl.cumsum(alive.to(tl.int32), 0) - 1
                    tl.store(dense + rank, score, mask=alive)
                    tl.debug_barrier()
                    for d in tl.static_range(POOL):
                        near = rank + (d - POOL // 2)
                        there = alive & (near >= 0) & (near < count)
                        other = tl.load(dense + near, mask=there, other=-_INF)
                        score = tl.maximum(score, other)
                tl.debug_barrier()
            elif HAS_FEATURE:
                score = number * value
            else:
                score = number
            droppable = droppable & (score == score)
            for _ in range(excess):
                ranked = tl.where(droppable, score, _INF)
                low, lowest = tl.min(ranked, 0, return_indices=True, return_indices_tie_break_left=True)
                if low == _INF:  # infinite scores come last, then the oldest of what has none
                    turn_of = tl.where(droppable, n, tl.where(alive & free, BLOCK + n, 2 * BLOCK))
                    first_turn = tl.min(turn_of, 0)
                    lowest = tl.where(first_turn < 2 * BLOCK, first_turn % BLOCK, BLOCK)
                victim = n == lowest
                last = tl.where(victim, i, last)
                alive = alive & (victim == 0)
                droppable = droppable & (victim == 0)
                count -= tl.where(lowest < BLOCK, 1, 0)
    tl.store(held + row * candidates + n, alive.to(tl.uint8), mask=inside)
    tl.store(last_out + row * candidates + n, last.to(tl.int64), mask=inside)
    tl.store(blind_out + row, tl.sum(blind, 0).to(tl.int64))
    if IN_NUMBERS:
        tl.store(numbers + row * candidates + n, number, mask=inside)


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    logits, last_in, sinks, out, begin, kept, heads, steps, candidates, scaling, softcap,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One step of one kept set: its weights, summed under guessed drops, averaged over heads."""
    span = steps - begin
    row = (tl.program_id(0) // span).to(tl.int64)
    i = begin + tl.program_id(0) % span
    n = tl.arange(0, BLOCK)
    known = (n < candidates) & (n <= kept + i)
    last = tl.load(last_in + row * candidates + n, mask=known, other=-1)
    average = _head_average(
        logits, sinks, row, i, known & (last >= i), known, heads, steps, candidates, scaling, softcap,
        HAS_SINKS, HAS_SOFTCAP, True, BLOCK_H, BLOCK,
    )  # fmt: skip
    tl.store(out + (row * steps + i) * candidates + n, average, mask=n < candidates)


@triton.jit
def _weights_kernel(  # type: ignore[no-untyped-def]
    logits, last_in, sinks, out, sums, kept, heads, steps, candidates, scaling, softcap,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One query of one head: logits into undivided weights on what it saw, and their sum."""
    query = tl.program_id(0).to(tl.int64)
    i = query % steps
    row = query // (heads * steps)
    logits += query * candidates
    out += query * candidates
    last_in += row * candidates
    top = tl.full([BLOCK], -_INF, tl.float32)
    for first in range(0, candidates, BLOCK):
        n = first + tl.arange(0, BLOCK)
        known = (n < candidates) & (n <= kept + i)
        seen = known & (tl.load(last_in + n, mask=known, other=-1) >= i)
        x = _scaled(tl.load(logits + n, mask=seen, other=0.0), scaling, softcap, HAS_SOFTCAP)
        top = tl.maximum(top, tl.where(seen, x, -_INF))
    top = tl.max(top, 0)
    if HAS_SINKS:
        sink = tl.load(sinks + query // steps)
        top = tl.maximum(top, sink)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, candidates, BLOCK):
        n = first + tl.arange(0, BLOCK)
        known = (n < candidates) & (n <= kept + i)
        seen = known & (tl.load(last_in + n, mask=known, other=-1) >= i)
        x = _scaled(tl.load(logits + n, mask=seen, other=0.0), scaling, softcap, HAS_SOFTCAP)
        weight = tl.where(seen, tl.exp(x - top), 0.0)
        total += weight
        tl.store(out + n, weight.to(out.dtype.element_ty), mask=n < candidates)
    total = tl.sum(total, 0)
    if HAS_SINKS:
        total += tl.exp(sink - top)
    tl.store(sums + query, total)
