"""A policy of one's own beside the built-in ones: the README's example, timed as a user would have it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tova import policies
from tova.policies import Policy, Record, Slots

DECAY = "decay"


@dataclass(frozen=True, kw_only=True)
class Decay(Policy):
    """Drops the lowest sum of attention that fades by a tenth at every step."""

    name: ClassVar[str] = DECAY

    fade: float = 0.9

    def records(self) -> dict[str, Record]:
        return {"sum": Record()}

    def observe(self, slots: Slots, attn: Tensor) -> dict[str, Tensor]:
        return {"sum": self.fade * slots["sum"] + attn}

    def score(self, slots: Slots) -> Tensor:
        return slots["sum"]


def known() -> Mapping[str, type[Policy]]:
    """The policies that a benchmark can time, by name."""
    return {**policies.POLICIES, DECAY: Decay}


def make(name: str, budget: int) -> Policy:
    """A policy that a benchmark times, by name."""
    return Decay(budget=budget) if name == DECAY else policies.make(name, budget=budget)
