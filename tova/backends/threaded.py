"""Products by the threads of a team, on the CPU.

A scan takes steps one by one, on one core, so the values of a chunk are mixed by helpers while the next chunk is
scanned. Parts are cut before they are handed out and are one call each, since threads that wait for each other's Python
would gain nothing; buffers are used again and again, since fresh ones cost as much as filling them.
"""

from __future__ import annotations

import math
from concurrent.futures import Future

import torch
from torch import Tensor

from tova.backends.plain import TorchBackend
from tova.layer import Attention
from tova.spans import span
from tova.threads import Team, wait

_TINY = torch.finfo(torch.float32).tiny


class ThreadsBackend(TorchBackend):
    """See :class:`tova.backends.base.Backend`.

    Args:
        overlap: leave the mixing to the helpers meanwhile; without it all threads share it at once.
    """

    def __init__(self, attention: Attention, threads: Team, *, overlap: bool, careful: bool = False) -> None:
        super().__init__(attention, careful=careful)
        self._threads = threads
        self._overlap = overlap
        # Helpers are at the values of one chunk while the next is scanned.
        self._logits = _Buffer(), _Buffer()
        self._mixed = _Buffer()
        self._calls = 0
        self._to_mix: tuple[Tensor, Tensor, Tensor] | None = None
        self._mixing: list[Future] = []
        self._to_divide: tuple[Tensor, Tensor, Tensor] | None = None

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        batch, heads, steps, size = query.shape
        kv_heads, candidates = key.shape[1:3]
        rows = heads // kv_heads * steps
        grouped = query.reshape(batch * kv_heads, rows, size)
        keys = key.reshape(batch * kv_heads, candidates, size).transpose(1, 2)
        self._calls += 1
        logits = self._logits[self._calls % 2].of_shape(batch * kv_heads, rows, candidates)
        parts = [(grouped[:, part], keys, logits[:, part]) for part in self._threads.parts(rows)]
        with span("logits"):
            self._threads.share(self._attention.product, parts, after=self._mix_beside)
        return logits.view(batch, heads, steps, candidates)

    def mix_weights(self, weights: Tensor, sums: Tensor, value: Tensor, out: Tensor) -> None:
        batch, heads, steps, candidates = weights.shape
        kv_heads, size = value.shape[1], value.shape[3]
        rows = heads // kv_heads * steps
        self.finish()
        mixed = self._mixed.of_shape(batch * kv_heads, rows, size, dtype=value.dtype)
        values = value.reshape(batch * kv_heads, candidates, size)
        self._to_mix = weights.view(batch * kv_heads, rows, candidates), values, mixed
        self._to_divide = mixed.view(batch, heads, steps, size), sums, out
        if not self._overlap:
            self.finish()

    def _mix_beside(self) -> None:
        """Called once helpers have their part of the next logits, so that they need not be woken once more."""
        if self._to_mix is not None:
            weights, values, mixed = self._to_mix
            self._to_mix = None
            parts = self._threads.parts(mixed.shape[1], helpers_only=True)
            self._mixing = [self._threads.beside(_mix, weights[:, part], values, mixed[:, part]) for part in parts]

    def finish(self) -> None:
        wait(self._mixing)
        self._mixing = []
        if self._to_mix is not None:
            weights, values, mixed = self._to_mix
            self._to_mix = None
            parts = self._threads.parts(mixed.shape[1])
            self._threads.share(_mix, [(weights[:, part], values, mixed[:, part]) for part in parts])
        if self._to_divide is not None:
            mixed, sums, out = self._to_divide
            self._to_divide = None
            sums = sums.clamp_min(_TINY)
            if mixed.dtype == torch.float32:
                torch.div(mixed, sums, out=out)
            else:
                out.copy_(mixed.float().div_(sums))


def _mix(weights: Tensor, values: Tensor, out: Tensor) -> None:
    with span("mix"):
        torch.bmm(weights.to(values.dtype), values, out=out)


class _Buffer:
    """Memory that is used again and again."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")

    def of_shape(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory of that shape: the same as the last time, if it was enough."""
        numbers = math.prod(shape)
        if numbers > self._memory.numel() or dtype != self._memory.dtype:
            self._memory = torch.empty(numbers, dtype=dtype, device="cpu")
        return self._memory[:numbers].view(shape)
