"""What wants to see queries and keys go by: handed to a cache, told of every call of every layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tova.layer import Attention, Visibility


@dataclass(frozen=True)
class Seen:
    """One call of one layer, after its attention.

    Shape letters as in :mod:`tova.layer`.

    Attributes:
        layer: index of the layer.
        first: column of the first new token.
        query: [B, H, T, D] of the new tokens, and key [B, K, T, D] likewise, rotated.
        attention: how logits become weights.
        evicted_at: int64 [B, G, first + T], as known so far; -1 for padding.
        visibility: what the model itself lets queries look at beside causality; None if everything.
    """

    layer: int
    first: int
    query: Tensor
    key: Tensor
    attention: Attention
    evicted_at: Tensor
    visibility: Visibility | None


class Observer(Protocol):
    """Anything with ``see(seen)``; it must not change the tensors it is shown, and copies what it wants to keep."""

    def see(self, seen: Seen) -> None: ...
