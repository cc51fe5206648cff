"""What a backend does."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from tova.scan.chunk import Chunk, Decision


class Backend(Protocol):
    """Products of queries, keys and values. Shapes as in :mod:`tova.layer`.

    Attributes:
        scaling, softcap: what the logits still have to be put through; see :class:`tova.scan.chunk.Chunk`.
    """

    scaling: float
    softcap: float | None

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        """[B, H, C, N]; the memory is used again at the call after next."""
        ...

    def mix(self, chunk: Chunk, decision: Decision, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        """Write into ``out`` [B, H, C, E] the attention under ``decision``, at the latest when :meth:`finish` returns.

        Args:
            query: [B, H, C, D], key: [B, K, N, D], value: [B, K, N, E] of the chunk.
        """
        ...

    def finish(self) -> None:
        """All of it is written when this returns."""
        ...
