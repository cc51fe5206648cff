"""PyramidKV: SnapKV with a budget that shrinks from the first layer to the last.

Cai et al.: "PyramidKV: Dynamic KV Cache Compression based on Pyramidal Information Funneling",
https://arxiv.org/abs/2406.02069. The paper's code uses another slope (a parameter beta of 20) and selects once, at
the end of the prompt; here the shares are linear with a stated ratio and layers re-select at every step.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Self

from tova.policies.snapkv import SnapKV


@dataclass(frozen=True, kw_only=True)
class PyramidKV(SnapKV):
    """SnapKV whose layer ``layer`` of ``num_layers`` holds its share of the pyramid instead of ``budget``.

    The first layer's share is about ``pyramid_ratio`` times the last one's, their mean is ``budget`` (a little less,
    since shares are floored), and no share is below ``recent_window + 1``. A cache sets ``layer`` and ``num_layers``
    itself.

    Args:
        pyramid_ratio: at least 1; 1 is uniform.
    """

    name: ClassVar[str] = "pyramidkv"

    layer: int = 0
    num_layers: int = 1
    pyramid_ratio: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("num_layers", at_least=1)
        self.require("layer", at_least=0, below=self.num_layers)
        self.require("pyramid_ratio", at_least=1)

    @property
    def effective_budget(self) -> int:
        if self.num_layers == 1:
            return self.budget
        ratio, last = self.pyramid_ratio, self.num_layers - 1
        share = 2 * self.budget * (ratio * last - self.layer * (ratio - 1)) // ((ratio + 1) * last)
        return max(share, self.recent_window + 1)

    def keeps(self, asked: int) -> int:
        return min(asked, self.effective_budget)

    def for_layer(self, layer: int, layers: int) -> Self:
        return dataclasses.replace(self, layer=layer, num_layers=layers)
