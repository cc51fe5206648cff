"""Scissorhands in its decode-time form: drop what was above its fair share least often.

Liu et al.: "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test
Time", NeurIPS 2023, https://arxiv.org/abs/2305.17118. The paper counts *low*-attention events over a history window
and drops about half the budget at once; counting high votes, as ``scissorhands`` does, starts a fresh token as the
worst instead of the best. It is another policy under the same idea; ``scissorhands_paper`` is the paper's.
"""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tova.errors import UsageError
from tova.policies.base import WIDEST, Cost, Policy, Record, Ring
from tova.policies.slots import Slots


@dataclass(frozen=True, kw_only=True)
class Scissorhands(Policy):
    """Drops the fewest votes outside the ``recent_window`` newest positions.

    A step votes for each position whose weight is strictly above ``1 / n``, n being how many earlier positions are
    held; the comparison is in float64.

    Args:
        recent_window: at least 1 and below the budget.
    """

    name: ClassVar[str] = "scissorhands"
    least_recent_window: ClassVar[int] = 1

    recent_window: int = 32

    def records(self) -> dict[str, Record]:
        return {"votes": Record()}

    def observe(self, slots: Slots, attn: Tensor) -> dict[str, Tensor]:
        fair_share = 1.0 / slots.count.double()
        return {"votes": slots["votes"] + (attn.double() > fair_share)}

    def score(self, slots: Slots) -> Tensor:
        return slots["votes"]

    def cost(self) -> Cost:
        return Cost(bytes_per_slot=4 + 4 + 1, step="O(k)", eviction="O(k)")


@dataclass(frozen=True, kw_only=True)
class ScissorhandsPaper(Policy):
    """Scissorhands' algorithm as its paper states it: drop, many at once, what was below its fair share most often.

    Over the last ``history`` observed steps a position counts those in which its weight was under ``1 / n``, n being
    how many earlier positions were held. When the budget is exceeded, the highest counts outside the ``recent_window``
    newest positions are dropped until ``drop_share`` of the budget is free again. A token counts nothing before it was
    written, so fresh tokens are safe. Heads have sets of their own in the paper; ``per_head=false`` shares one. The
    paper gives later layers more budget, which ``layer_budgets`` can say with a list; the default is uniform.

    Args:
        recent_window: at least 1; the paper protects about 10.
        history: steps remembered; the paper uses about 400.
        drop_share: share of the budget that is freed at once, above 0 and below 1; the paper frees about half.
    """

    name: ClassVar[str] = "scissorhands_paper"
    least_recent_window: ClassVar[int] = 1

    recent_window: int = 10
    per_head: bool = True
    history: int = 400
    drop_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("history", at_least=1, at_most=WIDEST)
        if not isinstance(self.drop_share, numbers.Real) or not 0 < self.drop_share < 1:
            raise UsageError(f"{self.name}: drop_share must be above 0 and below 1, got {self.drop_share!r}")

    def records(self) -> dict[str, Record]:
        return {"low": Ring(self.history, torch.bool)}

    def observe(self, slots: Slots, attn: Tensor) -> dict[str, Tensor]:
        return {"low": attn.double() < 1.0 / slots.count.double()}

    def score(self, slots: Slots) -> Tensor:
        return -slots.ring_sum("low")

    def evidence(self, slots: Slots) -> Tensor:
        return slots.ring_sum("low")

    def evicts_to(self, asked: int | None = None) -> int:
        least = self.sinks + self.recent_window
        return max(super().evicts_to(asked) - int(self.drop_share * self.layer_budget), least, 1)

    def cost(self) -> Cost:
        bits = -(-self.history // 8)
        return Cost(bytes_per_slot=4 + bits + 4 + 1, step="O(k)", eviction="O(k * history), every drop_share * k steps")
