"""Scissorhands in its decode-time form: drop what was above its fair share least often.

Liu et al.: "Scissorhands: Exploiting the Persistence of Importance Hypothesis for LLM KV Cache Compression at Test
Time", NeurIPS 2023, https://arxiv.org/abs/2305.17118. The paper counts *low*-attention events over a history window
and drops about half the budget at once; counting high votes, as here, starts a fresh token as the worst instead of
the best. It is another policy under the same idea.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tova.policies.base import Cost, Policy, Record
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
