"""The scan as a fixed point: exact, and parallel over steps where the reference takes them one by one.

What a step decides depends on the earlier drops only through which positions its softmax runs over. So guess the
drops of a whole chunk (at first: none), compute the combined weights of *all* steps at once, with the sums of the
softmax taken under the guess, go through that one matrix [C, N] choosing victims, and take what was chosen for the
next guess, until nothing changes.

That is the sequential answer. What the first step sees needs no guess, so its weights and its victim are right. And
if guess and choice drop the same up to step f - 1, then every step up to f was computed over what it really sees, and
its choice is right. A round therefore settles at least one step more, and as the least attended positions hardly move a
softmax, usually many. What the guess has dropped is given its weight all the same: were it left at 0, a position that
turns out to be held would be chosen in the next step, and every round would settle just one.

The rounds here are plain torch, on any device; on CUDA, where Triton is there, :mod:`tova.scan.gpu` has rounds of two
kernels each for policies whose rule is an expression. Any policy that a cache could run can be scanned, one's own
included.

Shape letters as in :mod:`tova.layer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tova.policies.base import Policy
from tova.policies.contract import is_watched
from tova.policies.slots import HeadWeights, Slots
from tova.policies.steps import take_step
from tova.rules import drops_oldest
from tova.scan import oldest_first
from tova.scan.chunk import Chunk, Decision, Scan, known_rows, visible

LIMIT = 16
"""Rounds before the rest of a chunk is taken step by step."""
_LOGITS_AT_ONCE = 2**24
"""Logits whose softmax is taken at once; bounds the memory, not the result."""
_HIGHEST = 80.0
"""Logarithm of the largest weight that something not counted in a softmax may get: far from overflow."""


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
    solved: list[Solved] = []
    _listeners.append(solved)
    try:
        yield solved
    finally:
        del _listeners[next(i for i, other in enumerate(_listeners) if other is solved)]


def supports(policy: Policy) -> bool:
    """Whether weights depend on drops at all; a policy that looks at dropped tokens has nothing to guess."""
    return not policy.sees_dropped


def decide(policy: Policy, chunk: Chunk, limit: int = LIMIT) -> Decision:
    """See :class:`tova.scan.chunk.Scan`; leaves the logits as they were.

    Args:
        limit: rounds after which the steps not yet settled are taken one by one; the answer is the same.
    """
    if chunk.allowed is None and drops_oldest(policy):
        return Decision(oldest_first.last_seen(policy, chunk))
    if is_watched(policy):  # under a guess it would be shown what no cache shows it
        limit = 0
    chunk = chunk.scaled()
    return Decision(solve(policy, chunk, TorchRounds(policy, chunk), limit))


class Rounds(Protocol):
    """What a round consists of. ``last`` is int64 [R, N] as in :class:`tova.scan.chunk.Decision`."""

    def compute_rows(self, last: Tensor, begin: int) -> None:
        """Compute the combined weights of the steps from ``begin`` on, summed over what ``last`` lets them see."""
        ...

    def choose_from_rows(self, begin: int) -> Tensor:
        """Take the steps from ``begin`` on by these weights, those before being settled; what comes out as ``last``."""
        ...

    def choose_step_by_step(self, begin: int) -> Tensor:
        """The same, each step's weights computed when it is known what it sees."""
        ...

    def store(self) -> None:
        """Let the chunk's slots be what they are after the steps taken last."""
        ...


def solve(policy: Policy, chunk: Chunk, rounds: Rounds, limit: int) -> Tensor:
    """Rounds until the guess is what is chosen under it; int64 [R, N]."""
    guess = _nothing_dropped(chunk)
    settled = count = left = 0
    while True:
        if count == limit:
            left = chunk.steps - settled
            guess = rounds.choose_step_by_step(settled)
            break
        count += 1
        rounds.compute_rows(guess, settled)
        chosen = rounds.choose_from_rows(settled)
        first = int(torch.where(chosen != guess, torch.minimum(chosen, guess), chunk.steps).min())
        guess = chosen
        # Up to and including step `first` what each step saw was right, and so is what it chose.
        settled = first + 1
        if settled >= chunk.steps or not policy.reads_attention:
            break
    rounds.store()
    for solved in _listeners:
        solved.append(Solved(chunk.steps, count, left))
    return guess


def _nothing_dropped(chunk: Chunk) -> Tensor:
    """``last`` if the policy dropped nothing: what is there stays until the layer's own window leaves it."""
    present = chunk.present()
    last = torch.where(present, chunk.steps, -1)
    if chunk.allowed is None:
        return last
    index = torch.arange(present.shape[1], device=present.device)
    step = torch.arange(chunk.steps, device=present.device)
    gone = ~chunk.allowed & (index < chunk.kept + step.unsqueeze(1))
    if chunk.not_padding is not None:
        gone = gone & chunk.not_padding.unsqueeze(-1)
    first = gone.to(torch.uint8).argmax(1) - 1
    return torch.where(present & gone.any(1), first, last)


class TorchRounds:
    """In plain torch, by the policy's own functions. What is held after each step is kept, to go on from there."""

    def __init__(self, policy: Policy, chunk: Chunk) -> None:
        rows, _, steps, candidates = chunk.logits.shape
        device = chunk.logits.device
        self._policy, self._chunk = policy, chunk
        self._index = torch.arange(candidates, device=device)
        self._rows = torch.zeros(rows, steps, candidates, dtype=torch.float32, device=device)
        self._before = [(_copy(chunk.slots), torch.where(chunk.slots.held, steps, -1))]

    def compute_rows(self, last: Tensor, begin: int) -> None:
        """See :class:`Rounds`."""
        if not self._policy.reads_attention:
            return
        _, heads, steps, candidates = self._chunk.logits.shape
        size = max(1, _LOGITS_AT_ONCE // (len(last) * heads * candidates))
        for at in range(begin, steps, size):
            until = min(at + size, steps)
            self._rows[:, at:until] = self._row(at, until, visible(last, self._chunk.kept, at, until))

    def choose_from_rows(self, begin: int) -> Tensor:
        """See :class:`Rounds`."""
        return self._go(begin, lambda i, seen: self._rows[:, i])

    def choose_step_by_step(self, begin: int) -> Tensor:
        """See :class:`Rounds`."""
        if not self._policy.reads_attention:
            return self.choose_from_rows(begin)
        return self._go(begin, lambda i, seen: self._row(i, i + 1, seen.unsqueeze(1))[:, 0])

    def store(self) -> None:
        """See :class:`Rounds`."""
        slots, _ = self._before[-1]
        for name in ("held", "records", "observed", "newest", "positions"):
            setattr(self._chunk.slots, name, getattr(slots, name))

    def _go(self, begin: int, row_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        """All steps from ``begin``; ``row_of(i, seen)`` gives [R, N], the weights of step i if it sees ``seen``."""
        del self._before[begin + 1 :]
        for i in range(begin, self._chunk.steps):
            slots, last = self._before[-1]
            self._before.append(self._step(i, _copy(slots), last, row_of))
        return self._before[-1][1]

    def _step(
        self, i: int, slots: Slots, last: Tensor, row_of: Callable[[int, Tensor], Tensor]
    ) -> tuple[Slots, Tensor]:
        chunk = self._chunk
        newcomer = chunk.kept + i
        active = None if chunk.not_padding is None else chunk.not_padding[:, i : i + 1]
        if chunk.allowed is not None:
            gone = slots.held & ~chunk.allowed[:, i]
            gone = gone if active is None else gone & active
            slots.held = slots.held & ~gone
            last = torch.where(gone, i - 1, last)
        joins = self._index == newcomer
        joins = joins if active is None else joins & active
        seen = slots.held | joins
        row, known = known_rows(row_of(i, seen).masked_fill(~seen, 0.0))
        position = slots.positions[:, newcomer : newcomer + 1]
        dropped = take_step(self._policy, slots, newcomer, position, row, chunk.schedule, active=active, known=known)
        last = torch.where(joins, chunk.steps, last)
        return slots, last if dropped is None else torch.where(dropped, i, last)

    def _row(self, begin: int, end: int, seen: Tensor) -> Tensor:
        """float32 [R, end - begin, N]: weights beside what is ``seen``, combined over heads."""
        chunk = self._chunk
        seen = seen.unsqueeze(1)
        logits = chunk.logits[:, :, begin:end].float()
        masked = counted = logits.masked_fill(~seen, float("-inf"))
        if chunk.sink_logits is not None:
            beside = chunk.sink_logits[:, :, None, None].expand(*logits.shape[:3], 1)
            counted = torch.cat([masked, beside], -1)
        weights = counted.softmax(-1)[..., : logits.shape[-1]]
        others = (logits - counted.logsumexp(-1, keepdim=True)).clamp_max_(_HIGHEST).exp_()
        heads = HeadWeights(torch.where(seen, weights, others), masked, chunk.sink_logits, chunk.dtype)
        return self._policy.combine(heads)


def _copy(slots: Slots) -> Slots:
    """The same tensors in a Slots of its own: a step replaces tensors and changes none."""
    return dataclasses.replace(slots, records=dict(slots.records))


SCAN = Scan("fixed_point", decide)
