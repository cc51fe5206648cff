"""Products by torch, at once; on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from tova.backends.finite import mix_of_seen
from tova.layer import Attention
from tova.scan.chunk import Chunk, Decision, visible, weights_under
from tova.spans import span

_TINY = torch.finfo(torch.float32).tiny


class TorchBackend:
    """See :class:`tova.backends.base.Backend`.

    Args:
        careful: for a call whose values are not all finite; see :func:`~tova.backends.finite.mix_of_seen`.
    """

    scaling: float = 1.0
    softcap: float | None = None

    def __init__(self, attention: Attention, *, careful: bool = False) -> None:
        self._attention = attention
        self._careful = careful

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        with span("logits"):
            return self._attention.logits(query, key)

    def mix(self, chunk: Chunk, decision: Decision, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        with span("mix"):
            weights, sums = decision.weights, decision.sums
            if weights is None or sums is None:
                weights, sums = weights_under(chunk, decision.last)
            weights, sums = weights.view(*query.shape[:3], -1), sums.view(*query.shape[:3], 1)
            if self._careful:
                mixed = mix_of_seen(weights, value, visible(decision.last, chunk.kept, 0, chunk.steps))
                out.copy_(mixed.float().div_(sums.clamp_min(_TINY)))
            else:
                self.mix_weights(weights, sums, value, out)

    def mix_weights(self, weights: Tensor, sums: Tensor, value: Tensor, out: Tensor) -> None:
        """Values under undivided weights [B, H, C, N] and their sums [B, H, C, 1]."""
        out.copy_(self._attention.mix(weights, sums, value))

    def finish(self) -> None:
        pass
