"""Products by Triton: once it is known who sees whom, no weight is ever written to memory.

The scans on a GPU decide from the logits of a chunk, which they read once. The chunk's output is then computed from
queries, keys and values tile by tile with a running maximum and sum (FlashAttention, https://arxiv.org/abs/2205.14135),
each query looking at those columns that a decision's ``last`` lets it see.

Values that are not finite would reach queries that do not see them, since in a tile's product a weight of 0 does not
undo a NaN. So a second kernel looks at each head's values once, and a third, which leaves at once where they are all
finite, computes the others anew without a product.

Without a GPU the kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` before Triton is imported), slowly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tova.kernels.triton_math import INF, LOWEST, Softmax, finished
from tova.layer import Attention
from tova.scan.chunk import Chunk, Decision
from tova.scan.gpu import launch
from tova.spans import span

WIDEST = 256
"""Numbers of a head at most."""
_TILE_BYTES = 2**15
"""Of queries, and of keys and values, that a program holds at once."""
_QUERIES_ONE_BY_ONE = 32
"""Queries that a program of the third kernel takes, one after the other."""
_VALUES_AT_ONCE = 32
"""Entries that a program of the second kernel holds."""


def supports(query: Tensor, value: Tensor) -> bool:
    """Whether heads are small enough."""
    return max(query.shape[-1], value.shape[-1]) <= WIDEST


class TritonBackend:
    """See :class:`tova.backends.base.Backend`; logits are raw products, and the rest is left to the kernels."""

    def __init__(self, attention: Attention) -> None:
        self.scaling, self.softcap = attention.scaling, attention.softcap

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        batch, heads, steps, size = query.shape
        kv_heads, candidates = key.shape[1:3]
        grouped = query.reshape(batch, kv_heads, heads // kv_heads * steps, size)
        with span("logits"):
            return (grouped @ key.transpose(-1, -2)).view(batch, heads, steps, candidates)

    def mix(self, chunk: Chunk, decision: Decision, query: Tensor, key: Tensor, value: Tensor, out: Tensor) -> None:
        with span("mix"):
            softmax = Softmax(self.scaling, self.softcap, chunk.sink_logits)
            masked_attention(query, key, value, decision.last, chunk.kept, softmax, out)

    def finish(self) -> None:
        pass


def masked_attention(
    query: Tensor, key: Tensor, value: Tensor, last: Tensor, kept: int, softmax: Softmax, out: Tensor
) -> None:
    """Write into ``out`` [B, H, C, E] the attention of a chunk's queries [B, H, C, D], in any strides.

    Args:
        key: [B, K, N, D] and value [B, K, N, E]: what was held, and behind it the chunk's own.
        last: int64 [R, N], the last query (0-based) that sees the candidate, see :class:`tova.scan.chunk.Decision`;
            query i sees candidate n if n <= kept + i and last[n] >= i. One that sees nothing gets 0.
        kept: candidates before the chunk's own.
        softmax: what logits are put through; ``sink_logits`` are float32 [R, H_g].
    """
    batch, heads, steps, size = query.shape
    kv_heads, candidates, width = value.shape[1:]
    if softmax.sink_logits is not None:
        softmax = softmax._replace(sink_logits=softmax.sink_logits.contiguous())
    block, block_out = (max(16, triton.next_power_of_2(n)) for n in (size, width))
    # Wide heads and long numbers are taken fewer at a time, so that a tile fits into the shared memory of any card.
    rows = min(launch.mix_rows, max(16, _TILE_BYTES // (block * query.element_size())))
    columns = min(launch.mix_columns, max(16, _TILE_BYTES // ((block + block_out) * key.element_size())))
    last = last.contiguous()
    strided = tuple(_Strided(x, *x.stride()) for x in (query, key, value, out))
    sizes = _Sizes(heads, kv_heads, heads * batch // len(last), steps, candidates, kept, size, width)
    # A batch's heads may be more than a grid's second dimension takes; the first takes any number.
    _attention_kernel[(batch * heads, triton.cdiv(steps, rows))](
        *strided[:3],
        last,
        strided[3],
        sizes,
        softmax,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        BLOCK_C=rows,
        BLOCK_N=columns,
        BLOCK_D=block,
        BLOCK_E=block_out,
        num_warps=launch.mix_warps,
        num_stages=launch.mix_stages,
    )
    is_finite = torch.empty(batch * kv_heads, dtype=torch.int32, device=value.device)
    _finite_kernel[(batch * kv_heads,)](
        strided[2], is_finite, sizes, BLOCK_N=_VALUES_AT_ONCE, BLOCK_E=block_out, num_warps=4
    )
    _one_by_one_kernel[(batch * heads, triton.cdiv(steps, _QUERIES_ONE_BY_ONE))](
        *strided[:3],
        last,
        is_finite,
        strided[3],
        sizes,
        softmax,
        QUERIES=_QUERIES_ONE_BY_ONE,
        BLOCK_N=16,
        BLOCK_D=block,
        BLOCK_E=block_out,
        num_warps=4,
    )


class _Strided(NamedTuple):
    """A pointer to [B, heads, T, numbers of a head], and from one to the next of each."""

    pointer: Any
    batch: Any
    head: Any
    step: Any
    number: Any


class _Sizes(NamedTuple):
    """H, K, H_g, C, N, how many of the N were held before the chunk, D and E."""

    heads: Any
    kv_heads: Any
    heads_per_set: Any
    steps: Any
    candidates: Any
    kept: Any
    size: Any
    width: Any


@triton.jit
def _head(x, batch, head):  # type: ignore[no-untyped-def]
    """A pointer to the [T, numbers] of one head."""
    return x.pointer + batch * x.batch + head * x.head


@triton.jit
def _attention_kernel(  # type: ignore[no-untyped-def]
    query, key, value, last_in, out, sizes, softmax, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``BLOCK_C`` queries of one head."""
    heads, kv_heads, heads_per_set, steps, candidates, kept, size, width = sizes
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    kv_head = head // (heads // kv_heads)
    row = batch * (heads // heads_per_set) + head // heads_per_set
    first_step = tl.program_id(1) * BLOCK_C
    i = first_step + tl.arange(0, BLOCK_C)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    queries, keys = _head(query, batch, head), _head(key, batch, kv_head)
    values, outputs = _head(value, batch, kv_head), _head(out, batch, head)
    last_seen = last_in + row * candidates
    q = tl.load(
        queries + i[:, None] * query.step + d[None, :] * query.number,
        mask=(i < steps)[:, None] & (d < size)[None, :], other=0.0,
    )  # fmt: skip
    top = tl.full([BLOCK_C], LOWEST, tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    if softmax.sink_logits is not None:
        sink = tl.load(softmax.sink_logits + row * heads_per_set + head % heads_per_set).to(tl.float32)
        top = tl.maximum(top, sink)
        total += tl.exp(sink - top)
    mixed = tl.zeros([BLOCK_C, BLOCK_E], tl.float32)
    until = tl.minimum(candidates, kept + first_step + BLOCK_C)
    for first in range(0, until, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < until
        last = tl.load(last_seen + n, mask=inside, other=-1)
        k = tl.load(
            keys + n[None, :] * key.step + d[:, None] * key.number,
            mask=inside[None, :] & (d < size)[:, None], other=0.0,
        )  # fmt: skip
        x = finished(tl.dot(q, k, input_precision=PRECISION), softmax)
        seen = (n[None, :] <= kept + i[:, None]) & (last[None, :] >= i[:, None])
        x = tl.where(seen, x, -INF)
        higher = tl.maximum(top, tl.max(x, 1))
        weight = tl.exp(x - higher[:, None])
        less = tl.exp(top - higher)
        total = total * less + tl.sum(weight, 1)
        v = tl.load(
            values + n[:, None] * value.step + e[None, :] * value.number,
            mask=inside[:, None] & (e < width)[None, :], other=0.0,
        )  # fmt: skip
        mixed = mixed * less[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    # What sees nothing gets 0; what sees itself and yet has no weight at all sees only minus infinity, and gets NaN.
    itself = tl.load(last_seen + kept + i, mask=i < steps, other=-1) >= i
    mixed = mixed / tl.where(itself | (total != 0), total, 1.0)[:, None]
    tl.store(
        outputs + i[:, None] * out.step + e[None, :] * out.number, mixed.to(outputs.dtype.element_ty),
        mask=(i < steps)[:, None] & (e < width)[None, :],
    )  # fmt: skip


@triton.jit
def _finite_kernel(value, is_finite, sizes, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether the values of one head are all finite."""
    index = tl.program_id(0)
    values = _head(value, (index // sizes.kv_heads).to(tl.int64), index % sizes.kv_heads)
    e = tl.arange(0, BLOCK_E)
    others = tl.zeros([BLOCK_N, BLOCK_E], tl.int32)
    for first in range(0, sizes.candidates, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        v = tl.load(
            values + n[:, None] * value.step + e[None, :] * value.number,
            mask=(n < sizes.candidates)[:, None] & (e < sizes.width)[None, :], other=0.0,
        )  # fmt: skip
        others |= (tl.abs(v.to(tl.float32)) < INF).to(tl.int32) ^ 1
    tl.store(is_finite + index, tl.where(tl.sum(tl.sum(others, 1), 0) > 0, 0, 1))


@triton.jit
def _one_by_one_kernel(  # type: ignore[no-untyped-def]
    query, key, value, last_in, is_finite, out, sizes, softmax, QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``QUERIES`` queries of one head whose values are not all finite, one by one: values that one does not see are
    left out instead of weighed by 0."""
    heads, kv_heads, heads_per_set, steps, candidates, kept, size, width = sizes
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    kv_head = head // (heads // kv_heads)
    row = batch * (heads // heads_per_set) + head // heads_per_set
    if tl.load(is_finite + batch * kv_heads + kv_head) == 0:
        d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
        queries, keys = _head(query, batch, head), _head(key, batch, kv_head)
        values, outputs = _head(value, batch, kv_head), _head(out, batch, head)
        last_seen = last_in + row * candidates
        begin = tl.program_id(1) * QUERIES
        for i in range(begin, tl.minimum(begin + QUERIES, steps)):
            q = tl.load(queries + i * query.step + d * query.number, mask=d < size, other=0.0).to(tl.float32)
            top = tl.full([1], LOWEST, tl.float32)
            total = tl.zeros([1], tl.float32)
            if softmax.sink_logits is not None:
                sink = tl.load(softmax.sink_logits + row * heads_per_set + head % heads_per_set).to(tl.float32)
                top = tl.maximum(top, sink)
                total += tl.exp(sink - top)
            mixed = tl.zeros([BLOCK_E], tl.float32)
            for first in range(0, kept + i + 1, BLOCK_N):
                n = first + tl.arange(0, BLOCK_N)
                seen = (n <= kept + i) & (tl.load(last_seen + n, mask=n < candidates, other=-1) >= i)
                k = tl.load(
                    keys + n[:, None] * key.step + d[None, :] * key.number,
                    mask=seen[:, None] & (d < size)[None, :], other=0.0,
                )  # fmt: skip
                x = finished(tl.sum(k.to(tl.float32) * q[None, :], 1), softmax)
                x = tl.where(seen, x, -INF)
                higher = tl.maximum(top, tl.max(x, 0))
                weight = tl.exp(x - higher)
                less = tl.exp(top - higher)
                total = total * less + tl.sum(weight, 0)
                v = tl.load(
                    values + n[:, None] * value.step + e[None, :] * value.number,
                    mask=seen[:, None] & (e < width)[None, :], other=0.0,
                )  # fmt: skip
                mixed = mixed * less + tl.sum(v.to(tl.float32) * weight[:, None], 0)
                top = higher
            itself = tl.load(last_seen + kept + i) >= i
            mixed = mixed / tl.where(itself | (total != 0), total, 1.0)
            tl.store(outputs + i * out.step + e * out.number, mixed.to(outputs.dtype.element_ty), mask=e < width)
