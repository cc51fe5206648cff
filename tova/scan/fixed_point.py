"""The scan as a fixed point: exact, and parallel over steps where the reference takes them one by one.

What a step decides depends on the earlier drops only through which positions its softmax runs over. So guess the
drops of a whole chunk (at first: none), compute the head-averaged weights of *all* steps at once, with the sums of the
softmax taken under the guess, walk through that one matrix [C, N] picking victims, and take what was picked for the
next guess, until nothing changes.

That is the sequential answer. What the first step sees needs no guess, so its weights and its victim are right. And
if guess and picks drop the same up to step f - 1, then every step up to f was computed over what it really sees, and
its pick is right. A round therefore settles at least one step more, and as the least attended positions hardly move a
softmax, usually many. What the guess has dropped is given its weight all the same: were it left at 0, a position that
turns out to be held would be picked in the next step, and every round would settle just one.

The rounds are plain torch on any device; on CUDA, where Triton is there and knows the policy, a round is two of the
kernels of :mod:`tova.scan.gpu`. Any policy that a cache could run can be scanned, one's own included.

Shape letters as in :mod:`tova.replay`: R kept sets, H_g heads of a set, C steps, N candidates.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tova.policies.base import Policy, admit, choose, observe
from tova.policies.contract import is_watched
from tova.policies.slots import Slots
from tova.scan import Chunk, has_triton, visible
from tova.scan.reference import head_average, known_rows, weights_under

LIMIT = 16
"""Rounds before the rest of a chunk is taken step by step."""
_AT_ONCE = 2**24
"""Logits whose softmax is taken at once; bounds the memory, not the result."""
_HIGHEST = 80.0
"""Logarithm of the largest weight that something not counted in a softmax may get: far from overflow."""
_NOTHING = float("-inf")


@dataclass(frozen=True)
class Solved:
    """How one chunk was solved: its steps, the rounds it took, and how many steps were then taken one by one."""

    steps: int
    rounds: int
    one_by_one: int


_listeners: list[list[Solved]] = []


@contextlib.contextmanager
def counting() -> Iterator[list[Solved]]:
    """Collects a :class:`Solved` for every chunk scanned inside the ``with``, in order."""
    heard: list[Solved] = []
    _listeners.append(heard)
    try:
        yield heard
    finally:
        del _listeners[next(i for i, other in enumerate(_listeners) if other is heard)]


def supports(policy: Policy) -> bool:
    """Whether weights depend on drops at all; a policy that looks at dropped tokens has nothing to guess."""
    return not policy.sees_dropped


def scan(policy: Policy, chunk: Chunk, limit: int = LIMIT) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`tova.scan.Scan`; leaves the logits as they were, unless it runs on kernels.

    Args:
        limit: rounds after which the steps not yet settled are taken one by one; the answer is the same.
    """
    if has_triton(chunk.logits.device):
        from tova.scan import gpu

        if gpu.fits(policy, chunk):
            last = decide(policy, chunk, limit)
            return *gpu.weights_under(chunk, last), last
    last = decide(policy, chunk, limit)
    return *weights_under(chunk, last), last


def decide(policy: Policy, chunk: Chunk, limit: int = LIMIT) -> Tensor:
    """``last`` alone, int64 [R, N]. See :func:`scan`."""
    if chunk.allowed is None and has_closed_form(policy):
        return closed_form(policy, chunk)
    if is_watched(policy):  # under a guess it would be shown what no cache shows it
        limit = 0
    if has_triton(chunk.logits.device):
        from tova.scan import gpu

        if gpu.fits(policy, chunk):
            return solve(policy, chunk, gpu.Walk(policy, chunk), limit)
    chunk = chunk.scaled()
    return solve(policy, chunk, _Walk(policy, chunk), limit)


class Walk(Protocol):
    """What a round consists of. ``last`` is int64 [R, N] as in :class:`tova.scan.Scan`."""

    def look(self, last: Tensor, begin: int) -> None:
        """Compute the head-averaged weights of the steps from ``begin`` on, summed over what ``last`` lets them see."""
        ...

    def pick(self, begin: int) -> Tensor:
        """Walk through these weights, the steps before ``begin`` being settled; returns what comes out as ``last``."""
        ...

    def one_by_one(self, begin: int) -> Tensor:
        """The same, each step's weights computed when it is known what it sees."""
        ...

    def done(self) -> None:
        """Store what the chunk's slots hold after the walk that came last."""
        ...


def solve(policy: Policy, chunk: Chunk, walk: Walk, limit: int) -> Tensor:
    """Rounds until the guess is what is picked under it; int64 [R, N]."""
    steps = chunk.logits.shape[2]
    guess = _nothing_dropped(chunk)
    settled = rounds = left = 0
    while True:
        if rounds == limit:
            left = steps - settled
            guess = walk.one_by_one(settled)
            break
        rounds += 1
        walk.look(guess, settled)
        picked = walk.pick(settled)
        first = int(torch.where(picked != guess, torch.minimum(picked, guess), steps).min())
        guess = picked
        # Up to and including step `first` what each step saw was right, and so is what it picked.
        settled = first + 1
        if settled >= steps or not policy.reads_attention:
            break
    walk.done()
    for heard in _listeners:
        heard.append(Solved(steps, rounds, left))
    return guess


def _nothing_dropped(chunk: Chunk) -> Tensor:
    """``last`` if the policy dropped nothing: what is held or real stays until the layer's own window leaves it."""
    steps = chunk.logits.shape[2]
    present = _present(chunk)
    last = torch.where(present, steps, -1)
    if chunk.allowed is None:
        return last
    index = torch.arange(present.shape[1], device=present.device)
    step = torch.arange(steps, device=present.device)
    gone = ~chunk.allowed & (index < chunk.kept + step.unsqueeze(1))
    if chunk.real is not None:
        gone = gone & chunk.real.unsqueeze(-1)
    first = gone.to(torch.uint8).argmax(1) - 1
    return torch.where(present & gone.any(1), first, last)


def _present(chunk: Chunk) -> Tensor:
    """bool [R, N]: what is held, and the chunk's own tokens that are no padding."""
    present = chunk.slots.held.clone()
    present[:, chunk.kept :] = True if chunk.real is None else chunk.real
    return present


class _Walk:
    """In plain torch, by the policy's own functions. What is held after each step is kept, to go on from there."""

    def __init__(self, policy: Policy, chunk: Chunk) -> None:
        rows, _, steps, candidates = chunk.logits.shape
        device = chunk.logits.device
        self.policy, self.chunk = policy, chunk
        self.index = torch.arange(candidates, device=device)
        self.weights = torch.zeros(rows, steps, candidates, dtype=torch.float32, device=device)
        self.before = [(_copy(chunk.slots), torch.where(chunk.slots.held, steps, -1))]

    def look(self, last: Tensor, begin: int) -> None:
        if not self.policy.reads_attention:
            return
        _, heads, steps, candidates = self.chunk.logits.shape
        size = max(1, _AT_ONCE // (len(last) * heads * candidates))
        for at in range(begin, steps, size):
            until = min(at + size, steps)
            self.weights[:, at:until] = self._row(at, until, visible(last, self.chunk.kept, at, until))

    def pick(self, begin: int) -> Tensor:
        return self._go(begin, known=True)

    def one_by_one(self, begin: int) -> Tensor:
        return self._go(begin, known=False)

    def done(self) -> None:
        slots, _ = self.before[-1]
        for name in ("held", "records", "observed", "newest", "positions"):
            setattr(self.chunk.slots, name, getattr(slots, name))

    def _go(self, begin: int, *, known: bool) -> Tensor:
        del self.before[begin + 1 :]
        for i in range(begin, self.chunk.logits.shape[2]):
            slots, last = self.before[-1]
            self.before.append(self._step(i, _copy(slots), last, known))
        return self.before[-1][1]

    def _step(self, i: int, slots: Slots, last: Tensor, known: bool) -> tuple[Slots, Tensor]:
        chunk, policy = self.chunk, self.policy
        newcomer = chunk.kept + i
        active = None if chunk.real is None else chunk.real[:, i : i + 1]
        if chunk.allowed is not None:
            gone = slots.held & ~chunk.allowed[:, i]
            gone = gone if active is None else gone & active
            slots.held = slots.held & ~gone
            last = torch.where(gone, i - 1, last)
        joins = self.index == newcomer
        joins = joins if active is None else joins & active
        seen = slots.held | joins
        if known or not policy.reads_attention:
            row = self.weights[:, i]
        else:
            row = self._row(i, i + 1, seen.unsqueeze(1))[:, 0]
        row, finite = known_rows(row.masked_fill(~seen, 0.0))
        position = slots.positions[:, newcomer : newcomer + 1]
        own = row[:, newcomer : newcomer + 1]
        observe(policy, slots, row.masked_fill(~slots.held, 0.0), active, finite)
        admit(policy, slots, newcomer, position, active, own=own, known=finite)
        last = torch.where(joins, chunk.logits.shape[2], last)
        count = slots.count
        excess = torch.where(count >= chunk.trigger, count - chunk.remains, 0)
        if last.device.type == "cpu" and not bool(excess.any()):
            return slots, last
        dropped = choose(policy, slots, excess, most=max(chunk.trigger - chunk.remains, 1))
        slots.held = slots.held & ~dropped
        return slots, torch.where(dropped, i, last)

    def _row(self, begin: int, end: int, seen: Tensor) -> Tensor:
        """float32 [R, end - begin, N]: weights beside what is ``seen``, averaged over heads."""
        chunk = self.chunk
        seen = seen.unsqueeze(1)
        logits = chunk.logits[:, :, begin:end].float()
        counted = logits.masked_fill(~seen, _NOTHING)
        if chunk.sinks is None:
            weights = counted.softmax(-1)
        else:
            beside = chunk.sinks[:, :, None, None].expand(*logits.shape[:3], 1)
            counted = torch.cat([counted, beside], -1)
            weights = counted.softmax(-1)[..., :-1]
        others = (logits - counted.logsumexp(-1, keepdim=True)).clamp_max_(_HIGHEST).exp_()
        return head_average(self.policy, torch.where(seen, weights, others), chunk.dtype)


def _copy(slots: Slots) -> Slots:
    """The same tensors in a Slots of its own: a step replaces tensors and changes none."""
    return dataclasses.replace(slots, records=dict(slots.records))


def has_closed_form(policy: Policy) -> bool:
    """Whether this very class drops the oldest first, so that counting says what is dropped when."""
    from tova.policies import Full, StreamingLLM, StreamingLLMReindexed, Window

    return type(policy) in (Full, Window, StreamingLLM, StreamingLLMReindexed)


def closed_form(policy: Policy, chunk: Chunk) -> Tensor:
    """``last`` int64 [R, N] of a policy that drops the oldest, without a scan; the chunk's slots move on.

    Where the layer has a window of its own (``chunk.allowed``), counts depend on it and this does not apply.
    """
    slots, trigger, remains = chunk.slots, chunk.trigger, chunk.remains
    steps = chunk.logits.shape[2]
    device = slots.held.device
    real = torch.ones(len(slots.held), steps, dtype=torch.bool, device=device) if chunk.real is None else chunk.real
    joined = real.cumsum(1)
    # The first eviction leaves `remains`, and each later one takes as many as have come since.
    first = (trigger - slots.count).clamp_min(1)
    since = joined - first
    every = trigger - remains
    dropped = torch.where(since >= 0, slots.count + first - remains + since.clamp_min(0) // every * every, 0)
    present = _present(chunk)
    droppable = present & (slots.positions >= policy.sinks)
    rank = droppable.cumsum(1) - 1
    last = torch.searchsorted(dropped, rank, right=True)
    last = torch.where(droppable, last, torch.where(present, steps, -1))
    slots.held = last == steps
    advance(policy, chunk)
    return last


def advance(policy: Policy, chunk: Chunk) -> None:
    """Note in the chunk's slots which token is the newest now, and how many steps the policy has observed."""
    slots = chunk.slots
    own = slots.positions[:, chunk.kept :]
    steps = own.shape[1]
    if chunk.real is None:
        slots.newest = own[:, -1:].clone()
        observed: Tensor | int = steps
    else:
        latest = torch.where(chunk.real, torch.arange(steps, device=own.device), -1).amax(1, keepdim=True)
        slots.newest = torch.where(latest >= 0, own.gather(1, latest.clamp_min(0)), slots.newest)
        observed = chunk.real.sum(1, keepdim=True)
    if policy.reads_attention:
        slots.observed = slots.observed + observed
