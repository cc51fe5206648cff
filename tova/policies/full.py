"""No eviction: the full cache."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Self

from torch import Tensor

from tova.policies.base import MOST, Cost, Policy
from tova.policies.layer_budgets import UNIFORM, LayerBudgets
from tova.policies.slots import Slots

UNBOUNDED = MOST
"""The budget of a cache that never evicts."""


@dataclass(frozen=True, kw_only=True)
class Full(Policy):
    """Keeps everything; takes no budget."""

    name: ClassVar[str] = "full"
    reads_attention: ClassVar[bool] = False

    budget: int = field(default=UNBOUNDED, init=False)
    sinks: int = field(default=0, init=False)
    recent_window: int = field(default=0, init=False)
    per_head: bool = field(default=False, init=False)
    layer_budgets: LayerBudgets = field(default=UNIFORM, init=False)

    def score(self, slots: Slots) -> Tensor:
        return slots.positions.double()

    def with_budget(self, budget: int) -> Self:
        return self

    def cost(self) -> Cost:
        return Cost(bytes_per_slot=4, step="O(1)", eviction="never")
