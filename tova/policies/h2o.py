"""H2O: drop what has gathered the least attention so far.

Zhang et al.: "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models", NeurIPS 2023,
https://arxiv.org/abs/2306.14048
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from torch import Tensor

from tova.policies.base import Cost, Policy, Record
from tova.policies.slots import Slots


@dataclass(frozen=True, kw_only=True)
class H2O(Policy):
    """Drops the lowest sum of weights outside the ``recent_window`` newest positions.

    Args:
        recent_window: at least 1 and below the budget.
    """

    name: ClassVar[str] = "h2o"
    least_recent_window: ClassVar[int] = 1

    recent_window: int = 32

    def records(self) -> dict[str, Record]:
        return {"sum": Record()}

    def observe(self, slots: Slots, attn: Tensor) -> dict[str, Tensor]:
        return {"sum": slots["sum"] + attn}

    def score(self, slots: Slots) -> Tensor:
        return slots["sum"]

    def cost(self) -> Cost:
        return Cost(bytes_per_slot=4 + 8 + 1, step="O(k)", eviction="O(k)")


@dataclass(frozen=True, kw_only=True)
class H2OHalf(H2O):
    """H2O as its paper splits the budget: half for the recent window, half for the heavy hitters.

    With an odd budget the recent window gets the smaller half. The budget must be at least 2.
    """

    name: ClassVar[str] = "h2o_half"

    recent_window: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.require("budget", at_least=2)
        object.__setattr__(self, "recent_window", self.budget // 2)
        super().__post_init__()
