"""The scan in Triton: any policy whose rule is an expression, on a GPU.

Two kernels. ``_scan_kernel`` has one program per kept set, which goes through the steps of a chunk with the set's state
in registers: softmax of every head over what is held, their mean, records, victims. It reads the logits once, in
whatever dtype they are, and accumulates in float32. ``_rows_kernel``, one program per query, computes the mean weights
of all steps under guessed drops, for :mod:`tova.scan.fixed_point`; the scan kernel then walks through these. Both only
decide: what a query sees is mixed by :mod:`tova.backends.triton`.

What a policy does comes from its rule (:mod:`tova.rules.triton_code`). A rule may hold a few records and features of
one number each, :data:`~tova.rules.triton_code.MOST_NUMBERS` in all, and rings of any width.

Without a GPU the kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` before Triton is imported), slowly.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tova import rules
from tova.kernels.triton_math import (
    INF,
    Slots,
    Softmax,
    load_each,
    mean_over_heads,
    ring_write,
    rings_of_row,
    store_each,
    sum_over_heads,
    tile_of_logits,
    where_each,
)
from tova.policies.base import Policy, Schedule
from tova.policies.contract import is_watched
from tova.rules import triton_code
from tova.scan import fixed_point, oldest_first, reference
from tova.scan.chunk import Chunk, Decision, Scan

MOST_CANDIDATES = 16384
"""Candidates a program takes; a chunk with more (a long prompt in one shot) goes to the reference scan."""
_NEVER = 2**31 - 1


@dataclass
class Launch:
    """How the kernels are launched: what to turn on a new card. Results do not depend on it.

    Attributes:
        tile: logits the scan kernel holds at once (heads times candidates, rounded up to powers of two).
        ahead: whether it asks for the next step's logits early, where all heads fit into a tile; takes registers.
        scan_warps: warps of a program that reads logits.
        walk_warps: warps of a program that walks through mean weights.
        row_warps: warps of a program that works on one query.
        mix_rows, mix_columns, mix_warps, mix_stages: queries and candidates a program of :mod:`tova.backends.triton`
            holds at once, its warps, and how many tiles are on their way at a time.
    """

    tile: int = 32768
    ahead: bool = False
    scan_warps: int = 16
    walk_warps: int = 4
    row_warps: int = 4
    mix_rows: int = 64
    mix_columns: int = 64
    mix_warps: int = 4
    mix_stages: int = 2


launch = Launch()
"""In force for all calls."""


def why_not(policy: Policy, dtype: torch.dtype = torch.float32) -> str | None:
    """Why the kernels cannot take ``policy`` on a model of ``dtype``, a sentence; None if they can."""
    reason = rules.why_not(policy)
    if reason is not None:
        return reason
    if rules.how_heads_combine(policy) == "rounded mean" and dtype != torch.float32:
        return f"it rounds weights to {str(dtype).removeprefix('torch.')} before it combines them"
    rule = rules.rule_of(policy)
    assert isinstance(rule, rules.Rule)
    return triton_code.why_not(rule)


def supports(policy: Policy, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the kernels take ``policy`` on a model of ``dtype``; :func:`why_not` says why not."""
    return why_not(policy, dtype) is None


def fits(policy: Policy, chunk: Chunk) -> bool:
    """Whether the kernels can scan this very chunk."""
    if not supports(policy, chunk.dtype) or chunk.logits.shape[-1] > MOST_CANDIDATES:
        return False
    return all(chunk.slots.features[name].ndim == 2 for name in _rule(policy).features)


def decide(policy: Policy, chunk: Chunk) -> Decision:
    """See :class:`tova.scan.chunk.Scan`; ``last`` alone."""
    if chunk.allowed is None and rules.drops_oldest(policy):
        return Decision(oldest_first.last_seen(policy, chunk))
    if not fits(policy, chunk):
        return reference.decide(policy, chunk.scaled())
    steps = _Steps(policy, chunk)
    steps.go(chunk.logits, given=False)
    if steps.doubtful is not None and bool(steps.doubtful.any()):
        return reference.decide(policy, chunk.scaled())  # which finds out what is wrong, and says so
    steps.store()
    return Decision(steps.last)


def decide_by_rounds(policy: Policy, chunk: Chunk, limit: int = fixed_point.LIMIT) -> Decision:
    """As :func:`tova.scan.fixed_point.decide`, in kernels where they take the policy."""
    if is_watched(policy) or not fits(policy, chunk) or (chunk.allowed is None and rules.drops_oldest(policy)):
        return fixed_point.decide(policy, chunk, limit)
    return Decision(fixed_point.solve(policy, chunk, KernelRounds(policy, chunk), limit))


SCAN = Scan("gpu", decide, reads_products=True)
FIXED_POINT = Scan("fixed_point", decide_by_rounds, reads_products=True)


class KernelRounds:
    """See :class:`tova.scan.fixed_point.Rounds`; a walk begins anew each time, since it is short."""

    def __init__(self, policy: Policy, chunk: Chunk) -> None:
        rows, _, steps, candidates = chunk.logits.shape
        self._policy, self._chunk = policy, chunk
        self._logits = chunk.logits.contiguous()
        self._rows = torch.zeros(rows, steps, candidates, dtype=torch.float32, device=chunk.logits.device)
        self._taken: _Steps | None = None

    def compute_rows(self, last: Tensor, begin: int) -> None:
        """See :class:`tova.scan.fixed_point.Rounds`."""
        if not _rule(self._policy).reads_weights:
            return
        rows, heads, steps, candidates = self._logits.shape
        block = triton.next_power_of_2(candidates)
        _rows_kernel[(rows * (steps - begin),)](
            self._logits,
            last.contiguous(),
            self._rows,
            begin,
            _Sizes(heads, steps, candidates, self._chunk.kept),
            softmax_of(self._chunk),
            BLOCK_H=heads_at_once(heads, block, 4096),
            BLOCK=block,
            num_warps=launch.row_warps,
        )

    def choose_from_rows(self, begin: int) -> Tensor:
        """See :class:`tova.scan.fixed_point.Rounds`."""
        return self._go(self._rows.unsqueeze(1), given=True)

    def choose_step_by_step(self, begin: int) -> Tensor:
        """See :class:`tova.scan.fixed_point.Rounds`."""
        return self._go(self._logits, given=False)

    def store(self) -> None:
        """See :class:`tova.scan.fixed_point.Rounds`."""
        if self._taken is not None:
            self._taken.store()

    def _go(self, source: Tensor, *, given: bool) -> Tensor:
        self._taken = _Steps(self._policy, self._chunk)
        self._taken.go(source, given=given)
        return self._taken.last


class _Steps:
    """What the scan kernel changes, in copies of its own until :meth:`store` puts them into the chunk's slots.

    Attributes:
        last: int64 [R, N], see :class:`tova.scan.chunk.Decision`.
        doubtful: uint8 [R], for a policy that is watched: rows in which something could not be ranked, or in which
            there was too little to choose from. None if it is not watched.
    """

    def __init__(self, policy: Policy, chunk: Chunk) -> None:
        slots = chunk.slots
        self._policy, self._chunk, self._rule = policy, chunk, _rule(policy)
        self._held = slots.held.to(torch.uint8)
        self._missed = torch.zeros_like(slots.observed)
        self._records = {
            name: slots.records[name].clone(memory_format=torch.contiguous_format) for name in self._rule.records
        }
        self.last = torch.empty_like(slots.positions, memory_format=torch.contiguous_format)
        self.doubtful = None
        if is_watched(policy):
            self.doubtful = torch.zeros(len(slots.held), dtype=torch.uint8, device=slots.held.device)

    def go(self, source: Tensor, *, given: bool) -> None:
        """Walk through the chunk over ``source``: logits [R, H_g, C, N], or given weights float32 [R, 1, C, N]."""
        chunk, slots, rule = self._chunk, self._chunk.slots, self._rule
        source = source.contiguous()
        rows, heads, steps, candidates = source.shape
        block = triton.next_power_of_2(candidates)
        at_once = 1 if given else heads_at_once(heads, block, launch.tile)
        _scan_kernel[(rows,)](
            source,
            _Candidates(
                positions=slots.positions.contiguous(),
                held=self._held,
                records=tuple(as_bytes(self._records[name]) for name in triton_code.plain_records(rule)),
                rings=tuple(as_bytes(self._records[name]) for name in triton_code.rings(rule)),
                features=tuple(slots.features[name].contiguous() for name in rule.features),
                observed=slots.observed.contiguous(),
                newest=slots.newest.contiguous(),
                allowed=None if chunk.allowed is None else as_bytes(chunk.allowed.contiguous()),
                not_padding=None if chunk.not_padding is None else as_bytes(chunk.not_padding.contiguous()),
                scratch=scratch_for(rule, rows, candidates, source.device),
            ),
            _Results(self.last, self._missed, self.doubtful),
            _Sizes(heads, steps, candidates, chunk.kept),
            tuple(self._records[name].shape[1] for name in triton_code.rings(rule)),
            eviction_of(self._policy, chunk.schedule),
            softmax_of(chunk),
            triton_code.kernel_rule(rule, source.device),
            GIVEN=given,
            AHEAD=launch.ahead and not given and at_once >= heads,
            COUNTS=triton_code.counts_steps(rule),
            BLOCK_H=at_once,
            BLOCK=block,
            num_warps=launch.walk_warps if given or not rule.reads_weights else launch.scan_warps,
            enable_fp_fusion=False,
        )

    def store(self) -> None:
        """Let the chunk's slots be as they are after the last step."""
        slots = self._chunk.slots
        slots.held = self._held.bool()
        slots.records = dict(self._records)
        self._chunk.count_steps(self._policy)
        if self._policy.reads_attention:
            slots.observed = slots.observed - self._missed


# -- what kernels are given, for this module and the decode step -------------------------------------------------------


class Eviction(NamedTuple):
    """When something is dropped, and down to what."""

    evict_at: Any
    leaves: Any
    sink_tokens: Any
    """First tokens that stay even where nothing can be ranked."""


def eviction_of(policy: Policy, schedule: Schedule) -> Eviction:
    """As kernels take it; numbers that no row reaches are cut to 32 bits, so that they are all of one type."""
    return Eviction(*(min(n, _NEVER) for n in (schedule.evict_at, schedule.leaves, policy.sinks)))


def softmax_of(attention: Any) -> Softmax:
    """How a :class:`Chunk` or an :class:`tova.layer.Attention` makes weights of a product; sink logits [R, H_g]."""
    sink_logits = attention.sink_logits
    return Softmax(attention.scaling, attention.softcap, None if sink_logits is None else sink_logits.contiguous())


def heads_at_once(heads: int, block: int, tile: int) -> int:
    """How many heads a program takes at once if it holds ``tile`` numbers of ``block`` candidates each."""
    return max(1, min(triton.next_power_of_2(heads), tile // block))


def as_bytes(tensor: Tensor) -> Tensor:
    """The same memory; Triton reads bools as bytes."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.bool else tensor


def scratch_for(rule: rules.Rule, rows: int, slots: int, device: torch.device) -> tuple[Tensor, Tensor] | None:
    """Memory to put slots in order, int64 and float64 [R, S]; None if the rule does not ask for order."""
    if not triton_code.needs_order(rule):
        return None
    return (
        torch.empty(rows, slots, dtype=torch.int64, device=device),
        torch.empty(rows, slots, dtype=torch.float64, device=device),
    )


def _rule(policy: Policy) -> rules.Rule:
    rule = rules.rule_of(policy)
    assert isinstance(rule, rules.Rule)
    return rule


# -- kernels ---------------------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """H_g, C, N, and how many of the N were held before the chunk."""

    heads: Any
    steps: Any
    candidates: Any
    kept: Any


class _Candidates(NamedTuple):
    """Pointers to a chunk's slots; ``held``, records and rings are changed in place."""

    positions: Any
    """int64 [R, N]"""
    held: Any
    """uint8 [R, N]"""
    records: Any
    """A tuple, [R, N] each."""
    rings: Any
    """A tuple, [R, W, N] each."""
    features: Any
    """A tuple, float32 [R, N] each."""
    observed: Any
    """int64 [R]"""
    newest: Any
    """int64 [R]"""
    allowed: Any
    """uint8 [R, C, N], or None"""
    not_padding: Any
    """uint8 [R, C], or None"""
    scratch: Any
    """int64 and float64 [R, N], or None"""


class _Results(NamedTuple):
    """Pointers to what comes out."""

    last: Any
    """int64 [R, N]"""
    missed: Any
    """int64 [R]: steps whose weights were not finite."""
    doubtful: Any
    """uint8 [R], or None; see :class:`_Steps`."""


@triton.jit
def _given(source, row, step, sizes, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 [BLOCK]: the given weights of one step; nothing past the last."""
    n = tl.arange(0, BLOCK)
    # The step may be a plain number.
    mask = (n < sizes.candidates) & (n <= sizes.kept + step) & (n * 0 + step < sizes.steps)
    return tl.load(source + (row * sizes.steps + step) * sizes.candidates + n, mask=mask, other=0.0)


@triton.jit
def _scan_kernel(  # type: ignore[no-untyped-def]
    source, chunk, results, sizes, widths, eviction, softmax, rule,
    GIVEN: tl.constexpr, AHEAD: tl.constexpr, COUNTS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One kept set through one chunk. Candidates are in position order, so ties go to the lower index.

    ``widths`` are the rings', a tuple.

    What a step reads does not depend on what was dropped before, so it is asked for while earlier steps are at work:
    given weights two steps ahead, and with ``AHEAD``, where all heads fit at once, logits one step ahead. ``COUNTS``:
    the rule, or a ring, asks how many steps were observed.
    """
    row = tl.program_id(0).to(tl.int64)
    heads, steps, candidates, kept = sizes
    n = tl.arange(0, BLOCK)
    inside = n < candidates
    at = row * candidates + n
    numbers = rule.numbers(rule.ints, rule.floats)
    alive = tl.load(chunk.held + at, mask=inside, other=0) != 0
    last = tl.where(alive, steps, -1)
    position = tl.load(chunk.positions + at, mask=inside, other=-1)
    records = load_each(chunk.records, at, inside)
    features = load_each(chunk.features, at, inside)
    rings = rings_of_row(chunk.rings, widths, candidates, row)
    scratch = None
    if chunk.scratch is not None:
        scratch = (chunk.scratch[0] + row * candidates, chunk.scratch[1] + row * candidates)
    observed = tl.load(chunk.observed + row)
    newest = tl.load(chunk.newest + row)
    count = tl.sum(alive.to(tl.int64), 0)
    missed = tl.zeros([BLOCK], tl.int32)
    doubtful = 0
    if GIVEN and rule.observe is not None:
        next_given = _given(source, row, 0, sizes, BLOCK)
        after_next = _given(source, row, 1, sizes, BLOCK)
    if AHEAD and rule.observe is not None:
        next_tile = tile_of_logits(source, row, 0, 0, inside & (n <= kept), heads, steps, candidates, BLOCK_H)
    for i in range(steps):
        m = kept + i
        joins = True
        if chunk.not_padding is not None:
            joins = tl.load(chunk.not_padding + row * steps + i) != 0
        newcomer = n == tl.where(joins, m, BLOCK)
        if chunk.allowed is not None:  # the layer's own sliding window moves on
            may = tl.load(chunk.allowed + (row * steps + i) * candidates + n, mask=inside, other=0) != 0
            gone = alive & (may == 0) & (n < tl.where(joins, BLOCK, 0))
            last = tl.where(gone, i - 1, last)
            alive = alive & (gone == 0)
            count = tl.sum(alive.to(tl.int64), 0)
        if rule.observe is not None:
            if GIVEN:
                weight = tl.where(alive | newcomer, next_given, 0.0)
                next_given = after_next
                after_next = _given(source, row, i + 2, sizes, BLOCK)
            elif AHEAD:
                tile = next_tile
                following = inside & (n <= m + 1) & (n * 0 + i + 1 < steps)
                next_tile = tile_of_logits(source, row, i + 1, 0, following, heads, steps, candidates, BLOCK_H)
                weight = sum_over_heads(
                    tile, row, 0, alive | newcomer, inside & (n <= m), heads, softmax, False
                ) / heads  # fmt: skip
            else:
                weight = mean_over_heads(
                    source, row, i, alive | newcomer, inside & (n <= m), heads, steps, candidates, softmax,
                    False, BLOCK_H,
                )  # fmt: skip
            known = weight == weight  # NaN are all that the query sees, or none
            unknown = (newcomer & (known == 0)).to(tl.int32)
            missed += unknown
            slots = Slots(
                n, inside, position, alive, records, features, rings, widths, candidates, count, newest, observed,
                scratch, True,
            )  # fmt: skip
            after, entries = rule.observe(tl.where(alive & known, weight, 0.0), slots, numbers)
            joined, first_entries = rule.admit(weight, numbers)
            if COUNTS:
                counts = tl.where(joins, 1 - tl.max(unknown, 0), 0)
                ring_write(slots, entries, alive & (n * 0 + counts > 0))
                ring_write(slots, first_entries, newcomer & (n * 0 + counts > 0))
                observed += counts
            records = where_each(known & (n < tl.where(joins, BLOCK, 0)), after, records)
            records = where_each(newcomer, rule.fill(numbers), records)
            records = where_each(newcomer & known, joined, records)
        alive = alive | newcomer
        last = tl.where(newcomer, steps, last)
        newest = tl.where(joins, tl.load(chunk.positions + row * candidates + m), newest)
        count += tl.where(joins, 1, 0)
        excess = tl.where(count >= eviction.evict_at, count - eviction.leaves, 0)
        to_rank = excess > 0
        if results.doubtful is not None:
            to_rank = excess >= 0
        if to_rank:
            slots = Slots(
                n, inside, position, alive, records, features, rings, widths, candidates, count, newest, observed,
                scratch, True,
            )  # fmt: skip
            score, free = rule.rank(slots, numbers)
            droppable = free & (score == score)
            if results.doubtful is not None:
                short = tl.sum(droppable.to(tl.int64), 0) < excess
                doubtful += tl.max((free & (score != score)).to(tl.int32), 0) + short.to(tl.int32)
            for _ in range(excess):
                ranked = tl.where(droppable, score, INF)
                low, lowest = tl.min(ranked, 0, return_indices=True, return_indices_tie_break_left=True)
                if low == INF:  # infinite scores come last, then the oldest of what has none
                    others = alive & (position >= eviction.sink_tokens)
                    turn_of = tl.where(droppable, n, tl.where(others, BLOCK + n, 2 * BLOCK))
                    first_turn = tl.min(turn_of, 0)
                    lowest = tl.where(first_turn < 2 * BLOCK, first_turn % BLOCK, BLOCK)
                victim = n == lowest
                last = tl.where(victim, i, last)
                alive = alive & (victim == 0)
                droppable = droppable & (victim == 0)
                count -= tl.where(lowest < BLOCK, 1, 0)
    tl.store(chunk.held + at, alive.to(tl.uint8), mask=inside)
    tl.store(results.last + at, last.to(tl.int64), mask=inside)
    tl.store(results.missed + row, tl.sum(missed, 0).to(tl.int64))
    if results.doubtful is not None:
        tl.store(results.doubtful + row, tl.where(doubtful > 0, 1, 0))
    store_each(chunk.records, at, records, inside)


@triton.jit
def _rows_kernel(  # type: ignore[no-untyped-def]
    logits, last_in, out, begin, sizes, softmax, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr
):
    """One step of one kept set: its weights, summed under guessed drops, averaged over heads."""
    heads, steps, candidates, kept = sizes
    span = steps - begin
    row = (tl.program_id(0) // span).to(tl.int64)
    i = begin + tl.program_id(0) % span
    n = tl.arange(0, BLOCK)
    known = (n < candidates) & (n <= kept + i)
    last = tl.load(last_in + row * candidates + n, mask=known, other=-1)
    mean = mean_over_heads(
        logits, row, i, known & (last >= i), known, heads, steps, candidates, softmax, True, BLOCK_H
    )  # fmt: skip
    tl.store(out + (row * steps + i) * candidates + n, mean, mask=n < candidates)
