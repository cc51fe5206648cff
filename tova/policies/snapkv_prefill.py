"""SnapKV and PyramidKV as their papers and codes do it: select once, at the end of the prompt.

Both look at the prompt's last ``recent_window`` queries, sum the attention each gave to every earlier position, smooth
the sums over neighbours, and keep the highest ones and the window itself; what is generated afterwards is all kept.
They need ``prefill=one_shot``; fed token by token they never drop anything.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from tova.errors import UsageError
from tova.policies.base import WIDEST, Cost, Policy, Record, Ring
from tova.policies.layer_budgets import LayerBudgets
from tova.policies.slots import HeadWeights, Slots

POOLINGS = ("average", "max")


@dataclass(frozen=True, kw_only=True)
class SnapKVPrefill(Policy):
    """SnapKV's selection (Li et al. 2024, https://arxiv.org/abs/2404.14469; ``snapkv_utils.py`` of its code).

    A kept set per key/value head. The code keeps one per *query* head and repeats keys for it; here heads that share
    keys share the set. Window, kernel and pooling default to the code's (its capacity is 2,048); its LongBench settings
    used max pooling of 7. Weights are rounded to the model's dtype as there, sums and pooling are not.

    Args:
        budget: positions kept of the prompt, the window among them (``max_capacity_prompt``).
        recent_window: the window of queries that vote, which is always kept (``window_size``).
        pool_kernel: odd; 1 is no pooling.
        pooling: ``average`` (ends count as zero) or ``max``.
    """

    name: ClassVar[str] = "snapkv_prefill"
    least_recent_window: ClassVar[int] = 1
    prompt_only: ClassVar[bool] = True

    recent_window: int = 32
    per_head: bool = True
    pool_kernel: int = 5
    pooling: str = "average"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("recent_window", at_least=1, below=self.budget, at_most=WIDEST)
        self.require("pool_kernel", at_least=1, at_most=WIDEST)
        if self.pool_kernel % 2 == 0:
            raise UsageError(f"{self.name}: pool_kernel must be odd, got {self.pool_kernel}")
        if self.pooling not in POOLINGS:
            raise UsageError(f"{self.name}: pooling must be one of {', '.join(POOLINGS)}, got {self.pooling!r}")

    def combine(self, heads: HeadWeights) -> Tensor:
        return heads.rounded.mean(1).float()

    def records(self) -> dict[str, Record]:
        return {"ring": Ring(self.recent_window, torch.float32)}

    def observe(self, slots: Slots, attn: Tensor) -> dict[str, Tensor]:
        return {"ring": attn.float()}

    def score(self, slots: Slots) -> Tensor:
        # The window's own columns are no part of what is smoothed.
        window = slots.newest_held(self.recent_window)
        votes = self.evidence(slots)
        if self.pooling == "max":
            return slots.max_pool(votes.masked_fill(window, float("-inf")), self.pool_kernel)
        return slots.average_pool(votes.masked_fill(window, 0.0), self.pool_kernel)

    def evidence(self, slots: Slots) -> Tensor:
        return slots.ring_sum("ring")

    def cost(self) -> Cost:
        return Cost(bytes_per_slot=4, step="O(1)", eviction="O(n * recent_window), once per prompt of n tokens")


@dataclass(frozen=True, kw_only=True)
class PyramidKVPrefill(SnapKVPrefill):
    """PyramidKV's selection (Cai et al. 2024, https://arxiv.org/abs/2406.02069; ``PyramidKVCluster`` of its code).

    SnapKV's, with layers that keep fewer and fewer. Of the budget beyond the window, b, the first layer keeps
    ``2 b - b // beta`` and each next one ``(2 b - 2 (b // beta)) // (layers - 1)`` fewer; since the step is floored, as
    in the code, the last keeps more than a ``beta``-th and the mean is above the budget (window 8, budget 512, 32
    layers: 991 down to 61, mean 526). Where the first layer's share would be more than the prompt has, it is cut to the
    prompt and the last layer's raised accordingly; prompts shorter than 2 b are cut to the budget in every layer.

    Args:
        beta: at least 1; the code's is 20.
    """

    name: ClassVar[str] = "pyramidkv_prefill"

    beta: int = 20
    layer_budgets: LayerBudgets = field(default="uniform", init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("beta", at_least=1)

    def keeps_of_prompt(self, tokens: int, held: int) -> int:
        return min(held, self._share(tokens))

    def _share(self, tokens: int) -> int:
        """What this layer keeps of a prompt of so many tokens."""
        window, beyond = self.recent_window, self.budget - self.recent_window
        if self.num_layers == 1 or tokens < 2 * beyond:
            return self.budget
        least = beyond // self.beta
        most = 2 * beyond - least
        if most >= tokens - window:
            most = tokens - window
            least = 2 * beyond - most
        return max(window + most - self.layer * ((most - least) // (self.num_layers - 1)), self.sinks + window)
