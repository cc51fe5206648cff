"""What is computed for a chunk, in three ways: by torch, shared among threads, or by kernels that write no weights.

:class:`Alone` runs anywhere. :class:`Shared` is for CPUs: a scan takes steps one by one, on one core, so the values of
a chunk are mixed by helpers while the next chunk is scanned. Parts are cut before they are handed out and are one call
each, since threads that wait for each other's Python would gain nothing; buffers are used again and again, since
fresh ones cost as much as filling them. :class:`Fused` is for GPUs with Triton.
"""

from __future__ import annotations

import math
from concurrent.futures import Future
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from tova.scan import visible
from tova.spans import span
from tova.threads import Team, wait

if TYPE_CHECKING:
    from tova.policies import Policy
    from tova.replay import Attention
    from tova.scan import Chunk, Decide, Scan


def finite(*tensors: Tensor) -> bool:
    """Whether every number of every one is finite. On a GPU the caller waits."""
    # A sum that is finite says so at a tenth of the price; one that is not may just be large.
    sums = [x.detach().sum(dtype=torch.float32 if x.dtype == torch.float16 else None) for x in tensors]
    if all(math.isfinite(total.item()) for total in sums):
        return True
    return all(bool(x.isfinite().all()) for x in tensors)


def mix_of_seen(weights: Tensor, value: Tensor, seen: Tensor) -> Tensor:
    """[B, H, C, E]: values [B, K, N, E] under undivided weights [B, H, C, N], where ``seen`` (bool [R, C, N]).

    For values that are not all finite: a weight of 0 does not undo a NaN, so a plain product would carry it to queries
    before it came and after it was dropped. Where a query sees it, it stays. What is finite is one product as ever.
    """
    batch, heads, steps, candidates = weights.shape
    groups, sets = value.shape[1], seen.shape[0] // batch
    grouped = weights.to(value.dtype).view(batch, groups, heads // groups * steps, candidates)
    each = seen.view(batch, sets, 1, steps, candidates).expand(batch, sets, heads // sets, steps, candidates)
    each = each.reshape(grouped.shape)
    whole = value.isfinite()
    mixed = grouped @ value.masked_fill(~whole, 0.0)
    for n in (~whole).any(-1).any(1).any(0).nonzero()[:, 0].tolist():
        rest = value[:, :, n : n + 1].masked_fill(whole[:, :, n : n + 1], 0.0)
        mixed = mixed + (grouped[..., n : n + 1] * rest).masked_fill(~each[..., n : n + 1], 0.0)
    return mixed.view(batch, heads, steps, value.shape[-1])


def only_seen(values: Tensor, seen: Tensor) -> Tensor:
    """Values [B, K, S, E] of one query, 0 in the slots that are not ``seen`` (bool [R, S])."""
    batch, heads, slots, _ = values.shape
    each = seen.view(batch, -1, 1, slots).expand(batch, -1, heads * batch // len(seen), slots)
    return values.masked_fill(~each.reshape(batch, heads, slots, 1), 0.0)


def attend_where_not_finite(
    query: Tensor, key: Tensor, value: Tensor, seen: Tensor, attention: Attention, out: Tensor
) -> None:
    """Write into ``out`` [B, H, C, E] the attention of queries [B, H, C, D] over those of N keys they have ``seen``.

    For closed forms: torch's fused kernels let what is not finite through their mask (``seen``, bool [C, N]). Only rows
    of the batch with something that is not finite are written.
    """
    for b in range(len(query)):
        q, k, v = query[b : b + 1], key[b : b + 1], value[b : b + 1]
        if not finite(q, k, v):
            weights = attention.logits(q, k).masked_fill_(~seen, float("-inf")).softmax(-1)
            out[b] = mix_of_seen(weights, v, seen.unsqueeze(0))[0]


class Products(Protocol):
    """Shapes as in :mod:`tova.replay`.

    Attributes:
        scaling, softcap: what the logits still have to be put through; see :class:`tova.scan.Chunk`.
    """

    scaling: float
    softcap: float | None

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        """[B, H, C, N]; the memory is used again at the call after next."""
        ...

    def attend(self, policy: Policy, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Tensor:
        """Scan the chunk and write into ``out`` [B, H, C, E], at the latest when :meth:`finish` returns.

        Returns:
            ``last`` int64 [R, N]; see :class:`tova.scan.Scan`.
        """
        ...

    def finish(self) -> None:
        """All of it is written when this returns."""
        ...


class Alone:
    """By torch, at once; on any device.

    Args:
        careful: for a call whose values are not all finite; see :func:`mix_of_seen`.
    """

    scaling: float = 1.0
    softcap: float | None = None

    def __init__(self, attention: Attention, scan: Scan, *, careful: bool = False) -> None:
        self._attention = attention
        self._scan = scan
        self._careful = careful

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        with span("logits"):
            return self._attention.logits(query, key)

    def attend(self, policy: Policy, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Tensor:
        with span("scan"):
            weights, sums, last = self._scan(policy, chunk)
        shape = query.shape[:3]
        weights, sums = weights.view(*shape, -1), sums.view(*shape, 1)
        if self._careful:
            with span("mix"):
                mixed = mix_of_seen(weights, value, visible(last, chunk.kept, 0, shape[2]))
                out.copy_(mixed.float().div_(sums.clamp_min(torch.finfo(torch.float32).tiny)))
        else:
            self.mix(weights, sums, value, out)
        return last

    def mix(self, weights: Tensor, sums: Tensor, value: Tensor, out: Tensor) -> None:
        with span("mix"):
            out.copy_(self._attention.mix(weights, sums, value))

    def finish(self) -> None:
        pass


class Fused:
    """By kernels: the scan only decides, and the masked attention is computed anew from queries, keys and values."""

    def __init__(self, attention: Attention, decide: Decide) -> None:
        self._attention = attention
        self._decide = decide
        self.scaling, self.softcap = attention.scaling, attention.softcap

    @staticmethod
    def supports(query: Tensor, value: Tensor) -> bool:
        from tova.fused import WIDEST

        return max(query.shape[-1], value.shape[-1]) <= WIDEST

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        batch, heads, steps, size = query.shape
        groups, candidates = key.shape[1:3]
        grouped = query.reshape(batch, groups, heads // groups * steps, size)
        with span("logits"):
            return (grouped @ key.transpose(-1, -2)).view(batch, heads, steps, candidates)

    def attend(self, policy: Policy, chunk: Chunk, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> Tensor:
        from tova.fused import attend

        with span("scan"):
            last = self._decide(policy, chunk)
        with span("mix"):
            attend(
                query, key, value, last, chunk.kept, out, scaling=self.scaling, softcap=self.softcap, sinks=chunk.sinks
            )  # fmt: skip
        return last

    def finish(self) -> None:
        pass


class Shared(Alone):
    """By the threads of a team, on the CPU.

    Args:
        overlap: leave the mixing to the helpers meanwhile; without it all threads share it at once.
    """

    def __init__(
        self, attention: Attention, scan: Scan, threads: Team, *, overlap: bool, careful: bool = False
    ) -> None:
        super().__init__(attention, scan, careful=careful)
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
        groups, candidates = key.shape[1:3]
        rows = heads // groups * steps
        grouped = query.reshape(batch * groups, rows, size)
        keys = key.reshape(batch * groups, candidates, size).transpose(1, 2)
        self._calls += 1
        logits = self._logits[self._calls % 2].take(batch * groups, rows, candidates)
        parts = [(grouped[:, part], keys, logits[:, part]) for part in self._threads.parts(rows)]
        with span("logits"):
            self._threads.share(self._attention.product, parts, after=self._mix_beside)
        return logits.view(batch, heads, steps, candidates)

    def mix(self, weights: Tensor, sums: Tensor, value: Tensor, out: Tensor) -> None:
        batch, heads, steps, candidates = weights.shape
        groups, size = value.shape[1], value.shape[3]
        rows = heads // groups * steps
        self.finish()
        mixed = self._mixed.take(batch * groups, rows, size, dtype=value.dtype)
        values = value.reshape(batch * groups, candidates, size)
        self._to_mix = weights.view(batch * groups, rows, candidates), values, mixed
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
            sums = sums.clamp_min(torch.finfo(torch.float32).tiny)
            if mixed.dtype == torch.float32:
                torch.div(mixed, sums, out=out)
            else:
                out.copy_(mixed.float().div_(sums))


def _mix(weights: Tensor, values: Tensor, out: Tensor) -> None:
    with span("mix"):
        torch.bmm(weights.to(values.dtype), values, out=out)


class _Buffer:
    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.float32, device="cpu")

    def take(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory of that shape: the same as the last time, if it was enough."""
        numbers = math.prod(shape)
        if numbers > self._memory.numel() or dtype != self._memory.dtype:
            self._memory = torch.empty(numbers, dtype=dtype, device="cpu")
        return self._memory[:numbers].view(shape)
