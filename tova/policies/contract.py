"""What a policy must do, checked as it is put to work: the cheap half of what :mod:`tova.check` checks.

A policy that is not built in is watched through the first chunk of a text, its first decoded token, its first eviction
and its first steps in a simulation: :class:`Watched` stands in its place and looks at what its functions return. From
there on it is on its own, and costs what a built-in one costs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from tova.errors import UsageError
from tova.policies.base import Policy, Ring
from tova.policies.slots import Slots, Tokens
from tova.policies.steps import ask, named

STEPS = 128
"""Steps of a stepwise policy that are watched, the first eviction apart."""


class ContractError(UsageError):
    """A policy does not keep the contract; the message says what it did, where."""


def watched(policy: Policy, first: int = 0) -> Policy:
    """``policy`` with its functions looked at. ``first`` is the position of the first token that observes a step."""
    return cast(Policy, Watched(policy, first))


def is_watched(policy: Policy) -> bool:
    return policy.watcher is not None


def unwatched(policy: Policy) -> Policy:
    """The policy that ``policy`` stands for; itself if nobody watches."""
    return policy.watcher._policy if isinstance(policy.watcher, Watched) else policy


def reported(policy: Policy, report: Sequence[int]) -> ContractError:
    """What a compiled engine found (see :mod:`tova.kernels.frame`), as watching would have said it."""
    what, *numbers = report
    if what == 1:
        return _unranked(policy, *numbers[:2])
    return _too_few(policy, *numbers[:4])


def _unranked(policy: Policy, step: int, position: int) -> ContractError:
    return ContractError(
        f"{named(policy)}: score returned NaN for position {position} at step {step}; what cannot be ranked must be "
        "protected"
    )


def _too_few(policy: Policy, step: int, candidates: int, held: int, excess: int) -> ContractError:
    return ContractError(
        f"{named(policy)}: protected leaves {candidates} of {held} positions to choose from at step {step}, and "
        f"{excess} must go to keep the budget"
    )


class Watched:
    """Stands in for a policy, and raises a :class:`ContractError` at the first thing that one does wrong."""

    def __init__(self, policy: Policy, first: int = 0) -> None:
        self.policy = self._policy = policy
        self._first = first
        self.watcher = self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)

    def observe(self, slots: Slots, attn: Tensor) -> dict[str, Tensor]:
        step = _step(slots) + 1
        changed = self._asked("observe", step, slots, attn)
        for name, value in self._mapping("observe", changed, step).items():
            old = slots.records.get(name)
            if old is None:
                raise self._wrong(f"observe returned {name!r}, which records() does not name", step)
            shape = slots.held.shape if name in slots.rings else old.shape
            self._fits("observe", name, value, shape, old.dtype, step)
        return changed

    def admitted(self, self_weight: Tensor) -> dict[str, Tensor]:
        joined = ask(self._policy, "admitted", None, self_weight)
        records = self._policy.records()
        for name, value in self._mapping("admitted", joined).items():
            if name not in records:
                raise self._wrong(f"admitted returned {name!r}, which records() does not name")
            record = records[name]
            one = (len(self_weight), 1)
            shape = one if isinstance(record, Ring) else (*one, *record.width)
            self._fits("admitted", name, value, shape, record.dtype or torch.float32)
        return joined

    def features(self, tokens: Tokens) -> dict[str, Tensor]:
        found = ask(self._policy, "features", None, tokens)
        for name, value in self._mapping("features", found).items():
            right = isinstance(value, Tensor) and value.ndim in (3, 4) and value.shape[:3] == tokens.key.shape[:3]
            if not right or value.is_complex():
                raise self._wrong(
                    f"features returned {name!r}, which must be [rows, heads, tokens] = {[*tokens.key.shape[:3]]}, or "
                    f"have numbers per token behind that, as {_what(value)}"
                )
        return found

    def score(self, slots: Slots) -> Tensor:
        step = _step(slots)
        found = self._asked("score", step, slots)
        wrong = not isinstance(found, Tensor) or found.shape != slots.held.shape
        if wrong or found.dtype == torch.bool or found.is_complex():
            raise self._wrong(
                f"score must return [rows, slots] = {[*slots.held.shape]}, of floats or integers, got {_what(found)}",
                step,
            )
        return cast(Tensor, found)

    def protected(self, slots: Slots) -> Tensor:
        step = _step(slots)
        found = self._asked("protected", step, slots)
        if not isinstance(found, Tensor) or found.shape != slots.held.shape or found.dtype != torch.bool:
            raise self._wrong(
                f"protected must return bool [rows, slots] = {[*slots.held.shape]}, got {_what(found)}", step
            )
        return found

    def joined(self, slots: Slots) -> None:
        """The newest token has joined: can what is held be ranked?"""
        score, protected = self.score(slots), self.protected(slots)
        unranked = slots.held & ~protected & score.isnan() & ~self._excused(slots)
        if bool(unranked.any()):
            row, slot = unranked.nonzero()[0].tolist()
            raise _unranked(self._policy, int(slots.newest[row, 0]), int(slots.positions[row, slot]))

    def chosen(self, slots: Slots, candidates: Tensor, excess: Tensor | int) -> None:
        """So many must go: are there as many to choose from?"""
        count = candidates.sum(-1, keepdim=True)
        short = (count < excess) & ~self._excused(slots)
        if bool(short.any()):
            row = int(short[:, 0].nonzero()[0, 0])
            most = int(excess if isinstance(excess, int) else excess[row, 0])
            step, held = int(slots.newest[row, 0]), int(slots.count[row, 0])
            raise _too_few(self._policy, step, int(count[row, 0]), held, most)

    def _excused(self, slots: Slots) -> Tensor:
        """bool [R, 1]: rows about which something was not known, so that a policy may not know either."""
        out = torch.zeros_like(slots.held[:, :1])
        if self._policy.reads_attention:
            out = slots.observed < slots.newest + 1 - self._first
        for feature in slots.features.values():
            known = feature.isfinite().view(*slots.held.shape, -1).all(-1)
            out = out | (slots.held & ~known).any(-1, keepdim=True)
        return out

    def _asked(self, function: str, step: int, slots: Slots, *more: Tensor) -> Any:
        """What the policy's function returns; it must not change anything in place."""
        before = _tensors(slots) | {f"attn{i or ''}": x for i, x in enumerate(more)}
        copies = {name: x.clone() for name, x in before.items()}
        found = ask(self._policy, function, step, slots, *more)
        for name, x in (_tensors(slots) | {f"attn{i or ''}": x for i, x in enumerate(more)}).items():
            if x is not before.get(name) or not _same(x, copies[name]):
                raise self._wrong(f"{name} was changed in place by {function}", step, "; return new values instead")
        return found

    def _mapping(self, function: str, found: Any, step: int | None = None) -> Mapping[str, Any]:
        if not isinstance(found, Mapping):
            raise self._wrong(f"{function} must return a dict of tensors by name, got {_what(found)}", step)
        return found

    def _fits(
        self, function: str, name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype, step: int | None = None
    ) -> None:
        if not isinstance(value, Tensor) or value.shape != shape or not torch.can_cast(value.dtype, dtype):
            raise self._wrong(
                f"{function} returned {name!r} as {_what(value)}, its record is {_name(dtype)} {[*shape]}", step
            )

    def _wrong(self, what: str, step: int | None = None, then: str = "") -> ContractError:
        at = "" if step is None else f" at step {step}"
        return ContractError(f"{named(self._policy)}: {what}{at}{then}")


def _step(slots: Slots) -> int:
    return int(slots.newest.max())


def _tensors(slots: Slots) -> dict[str, Tensor]:
    plain = {name: getattr(slots, name) for name in ("positions", "held", "observed", "newest")}
    return plain | slots.features | slots.records


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _what(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{_name(value.dtype)} {[*value.shape]}"
    return type(value).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
