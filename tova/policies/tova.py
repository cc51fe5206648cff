"""TOVA: drop the token the model just stopped looking at.

Oren, Hassid, Yarden, Adi, Schwartz: "Transformers are Multi-State RNNs", EMNLP 2024, https://arxiv.org/abs/2401.06104
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from tova.policies.base import Cost, Policy, Record
from tova.policies.slots import HeadWeights, Slots, Tokens


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


@dataclass(frozen=True, kw_only=True)
class TovaHead(Tova):
    """The paper's ablation: a kept set for each key/value head, by the query heads that share it."""

    name: ClassVar[str] = "tova_head"

    per_head: bool = True


@dataclass(frozen=True, kw_only=True)
class TovaOfficial(Tova):
    """TOVA as its authors' code decides (github.com/schwartz-lab-NLP/TOVA, ``reduce`` in ``src/tova_cache.py``).

    The newest token competes by the weight it gave itself, nothing is protected, and weights are rounded to the
    model's dtype before they are averaged over heads and ranked, so that in half precision ties decide. Where the code
    leaves ties to ``topk``, here they drop the lower position.
    """

    name: ClassVar[str] = "tova_official"
    newest_competes: ClassVar[bool] = True

    def combine(self, heads: HeadWeights) -> Tensor:
        return heads.rounded.mean(1).float()

    def admitted(self, self_weight: Tensor) -> dict[str, Tensor]:
        return {"weight": self_weight}


@dataclass(frozen=True, kw_only=True)
class TovaValue(Tova):
    """TOVA by weight times the L1 norm of the value: attention to a token that carries little is worth little.

    After Guo et al.: "Attention Score is not All You Need for Token Importance Indicator in KV Cache Reduction: Value
    Also Matters" (VATP), EMNLP 2024, https://arxiv.org/abs/2406.12335, which multiplies accumulated scores head by
    head, and protects the first 20 tokens in its examples: ``sinks=20``. Where heads share a kept set, the mean weight
    is multiplied by the mean norm.
    """

    name: ClassVar[str] = "tova_value"

    def features(self, tokens: Tokens) -> dict[str, Tensor]:
        return {"value_norm": tokens.value.float().abs().sum(-1)}

    def score(self, slots: Slots) -> Tensor:
        return slots["weight"] * slots.features["value_norm"]
