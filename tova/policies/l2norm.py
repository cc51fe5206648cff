"""Eviction by the norm of keys: no attention needed.

Devoto, Zhao, Scardapane, Minervini: "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression", EMNLP
2024, https://arxiv.org/abs/2406.11430.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tova.policies.base import Cost, Policy
from tova.policies.slots import Slots, Tokens


@dataclass(frozen=True, kw_only=True)
class L2Norm(Policy):
    """Drops the key of the *highest* L2 norm: a low norm goes with high attention.

    A rotation does not change a norm, so it is taken of the keys as they are stored. A set per key/value head, as in
    the paper, which also leaves the first layers whole (say so with ``layer_budgets``). Its code may drop the newest
    token.
    """

    name: ClassVar[str] = "l2norm"
    reads_attention: ClassVar[bool] = False

    per_head: bool = True

    def features(self, tokens: Tokens) -> dict[str, Tensor]:
        return {"key_norm": tokens.key.float().norm(dim=-1)}

    def score(self, slots: Slots) -> Tensor:
        return -slots.features["key_norm"]

    def cost(self) -> Cost:
        return Cost(bytes_per_slot=4 + 4, step="O(1)", eviction="O(k)")
