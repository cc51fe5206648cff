"""Random eviction: what a policy is worth that looks at nothing.

Not a lower bound: on the canonical trace a plain window retains a little less at budget 512.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, TypeVar

from torch import Tensor

from tova.policies.base import Cost, Policy
from tova.policies.slots import Slots

_U32 = 0xFFFFFFFF
_Number = TypeVar("_Number", int, Tensor)


@dataclass(frozen=True, kw_only=True)
class Random(Policy):
    """Drops a position drawn uniformly among the held ones, the newest token excepted.

    The draw is a hash of (seed, layer, step, position), so a run is the same however it is chunked or batched, and
    layers draw independently.

    Args:
        seed: an integer of 64 bits.
    """

    name: ClassVar[str] = "random"
    reads_attention: ClassVar[bool] = False

    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require("seed", at_least=-(2**63), at_most=2**64 - 1)

    def score(self, slots: Slots) -> Tensor:
        key = _mix((self.seed * 0x9E3779B9 + self.layer) & _U32)
        step = _mix((slots.newest + key) & _U32)
        return _mix((slots.positions + step) & _U32).double()

    def cost(self) -> Cost:
        return Cost(bytes_per_slot=4, step="O(1)", eviction="O(k)")


def _mix(z: _Number) -> _Number:
    """The finaliser of splitmix32 on integers below 2**32; in int64 no product overflows."""
    z = z ^ (z >> 16)
    z = (z * 0x21F0AAAD) & _U32
    z = z ^ (z >> 15)
    z = (z * 0x735A2D97) & _U32
    return z ^ (z >> 15)
