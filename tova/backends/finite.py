"""What is not finite must reach only those queries that see it: a weight of 0 does not undo a NaN."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from tova.layer import Attention


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
    kv_heads, kept_sets = value.shape[1], seen.shape[0] // batch
    grouped = weights.to(value.dtype).view(batch, kv_heads, heads // kv_heads * steps, candidates)
    by_head = seen.view(batch, kept_sets, 1, steps, candidates)
    by_head = by_head.expand(batch, kept_sets, heads // kept_sets, steps, candidates).reshape(grouped.shape)
    is_finite = value.isfinite()
    mixed = grouped @ value.masked_fill(~is_finite, 0.0)
    for n in (~is_finite).any(-1).any(1).any(0).nonzero()[:, 0].tolist():
        rest = value[:, :, n : n + 1].masked_fill(is_finite[:, :, n : n + 1], 0.0)
        mixed = mixed + (grouped[..., n : n + 1] * rest).masked_fill(~by_head[..., n : n + 1], 0.0)
    return mixed.view(batch, heads, steps, value.shape[-1])


def only_seen(values: Tensor, seen: Tensor) -> Tensor:
    """Values [B, K, S, E] of one query, 0 in the slots that are not ``seen`` (bool [R, S])."""
    batch, kv_heads, slots, _ = values.shape
    by_head = seen.view(batch, -1, 1, slots).expand(batch, -1, kv_heads * batch // len(seen), slots)
    return values.masked_fill(~by_head.reshape(batch, kv_heads, slots, 1), 0.0)


def redo_not_finite(query: Tensor, key: Tensor, value: Tensor, seen: Tensor, attention: Attention, out: Tensor) -> None:
    """Write into ``out`` [B, H, C, E] the attention of queries [B, H, C, D] over those of N keys they have ``seen``.

    For closed forms: torch's fused kernels let what is not finite through their mask (``seen``, bool [C, N]). Only rows
    of the batch with something that is not finite are written.
    """
    for b in range(len(query)):
        q, k, v = query[b : b + 1], key[b : b + 1], value[b : b + 1]
        if not finite(q, k, v):
            weights = attention.logits(q, k).masked_fill_(~seen, float("-inf")).softmax(-1)
            out[b] = mix_of_seen(weights, v, seen.unsqueeze(0))[0]
