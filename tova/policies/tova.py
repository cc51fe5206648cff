"""TOVA: drop the token the model just stopped looking at.

Oren, Hassid, Yarden, Adi, Schwartz: "Transformers are Multi-State RNNs", EMNLP 2024, https://arxiv.org/abs/2401.06104
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tova.policies.base import Cost, Policy, Record
from tova.policies.slots import Slots


@dataclass(frozen=True, kw_only=True)
class Tova(Policy):
    """Drops the position with the lowest weight of the latest step, whatever earlier steps said.

    A position nothing has attended to yet (the newest token, or one admitted during steps without attention) is
    unobserved: there is no weight to rank it by, so it is not a candidate.
    """

    name: ClassVar[str] = "tova"

    def records(self) -> dict[str, Record]:
        return {"weight": Record(fill=float("nan"))}

    def observe(self, slots: Slots, attn: Tensor) -> dict[str, Tensor]:
        return {"weight": attn}

    def score(self, slots: Slots) -> Tensor:
        return slots["weight"]

    def protected(self, slots: Slots) -> Tensor:
        return super().protected(slots) | slots["weight"].isnan()

    def cost(self) -> Cost:
        return Cost(bytes_per_slot=4 + 8 + 1, step="O(k)", eviction="O(k)")
