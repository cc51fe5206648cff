"""SnapKV in its decode-time form: drop what the last few steps, smoothed over neighbours, looked at least.

Li et al.: "SnapKV: LLM Knows What You are Looking for Before Generation", NeurIPS 2024,
https://arxiv.org/abs/2404.14469. The paper selects once, at the end of the prompt; this form re-selects at every
step from the last ``obs_window`` observed steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from tova.errors import UsageError
from tova.policies.base import WIDEST, Cost, Policy, Record, Ring
from tova.policies.slots import Slots


@dataclass(frozen=True, kw_only=True)
class SnapKV(Policy):
    """Drops the lowest max-pooled window sum outside the ``recent_window`` newest positions.

    Each position keeps its weights of the last ``obs_window`` observed steps in a float32 ring. At an eviction the
    ring is summed in float64, slot 0 upward, and max-pooled over ``pool_kernel`` adjacent held positions.

    Args:
        recent_window: at least 1 and below the budget.
        obs_window: steps remembered, at least 1.
        pool_kernel: odd; 1 is no pooling.
    """

    name: ClassVar[str] = "snapkv"
    least_recent_window: ClassVar[int] = 1

    recent_window: int = 32
    obs_window: int = 16
    pool_kernel: int = 7

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("obs_window", at_least=1, at_most=WIDEST)
        self.require("pool_kernel", at_least=1, at_most=WIDEST)
        if self.pool_kernel % 2 == 0:
            raise UsageError(f"{self.name}: pool_kernel must be odd, got {self.pool_kernel}")

    def records(self) -> dict[str, Record]:
        return {"ring": Ring(self.obs_window, torch.float32)}

    def observe(self, slots: Slots, attn: Tensor) -> dict[str, Tensor]:
        return {"ring": attn.float()}

    def score(self, slots: Slots) -> Tensor:
        return slots.max_pool(self.evidence(slots), self.pool_kernel)

    def evidence(self, slots: Slots) -> Tensor:
        return slots.ring_sum("ring")

    def cost(self) -> Cost:
        return Cost(bytes_per_slot=4 + 4 * self.obs_window + 8 + 8 + 1, step="O(k)", eviction="O(k * obs_window)")
