"""PyramidKV: SnapKV with a budget that shrinks from the first layer to the last.

Cai et al.: "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
https://arxiv.org/abs/2406.02069. The paper's code uses another slope (a parameter beta of 20) and selects once, at
the end of the prompt; here the shares are linear with a stated ratio and layers re-select at every step.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from tova.policies.layer_budgets import LayerBudgets
from tova.policies.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV whose layer ``layer`` of ``num_layers`` holds its share of the pyramid instead of ``budget``.

    The first layer's share is about ``pyramid_ratio`` times the last one's, their mean is ``budget`` (a little less,
    since shares are floored), and no share is below ``recent_window + 1``: ``layer_budgets=linear:<pyramid_ratio>``.

    Args:
        pyramid_ratio: at least 1; 1 is uniform.
    """

    name: ClassVar[str] = "pyramidkv"

    pyramid_ratio: int = 4
    layer_budgets: LayerBudgets = field(default="linear:4", init=False)

    def __post_init__(self) -> None:
        self.require("pyramid_ratio", at_least=1)
        object.__setattr__(self, "layer_budgets", f"linear:{self.pyramid_ratio}")
        super().__post_init__()
