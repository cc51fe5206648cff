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


@dataclass(frozen=True, kw_only=True)
class H2OHead(H2OHalf):
    """H2O as its authors' code that drops for real (``utils_real_drop`` in github.com/FMInference/H2O).

    A kept set per key/value head, half the budget for the recent window, and a token's own weight counts from its
    admission on. The code keeps a set per *query* head and sums the batch into one score; with grouped-query attention
    the keys would have to be repeated for that, so here heads that share keys share the set, and rows of a batch are
    independent. Sums are float32, where the code adds up in the model's dtype.
    """

    name: ClassVar[str] = "h2o_head"

    per_head: bool = True

    def admitted(self, self_weight: Tensor) -> dict[str, Tensor]:
        return {"sum": self_weight}


@dataclass(frozen=True, kw_only=True)
class H2OMasked(H2OHead):
    """H2O scored as its authors' evaluation does it, by masks inside one forward (``utils_lm_eval``): unfaithful.

    The scores it accumulates are of a softmax over *all* tokens, dropped ones included, which a cache that forgot them
    could not compute. Kept to measure how far off its figures are; nothing is saved, since dropped keys are needed.
    That is all it takes from that code, which also zeroes the sum of every token outside its heavy set and lets the
    heavy set and the recent window overlap, so that it holds fewer than it was given (see FIDELITY.md).
    """

    name: ClassVar[str] = "h2o_masked"
    sees_dropped: ClassVar[bool] = True
