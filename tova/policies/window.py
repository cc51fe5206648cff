"""A plain sliding window: drop the oldest position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tova.policies.base import Cost, Policy
from tova.policies.slots import Slots


@dataclass(frozen=True, kw_only=True)
class Window(Policy):
    """Drops the oldest position. Attention is ignored and nothing is recorded."""

    name: ClassVar[str] = "window"
    reads_attention: ClassVar[bool] = False

    def score(self, slots: Slots) -> Tensor:
        return slots.positions.double()

    def cost(self) -> Cost:
        return Cost(bytes_per_slot=4, step="O(1)", eviction="O(1)")
