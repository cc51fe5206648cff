"""Masked attention in Triton: once it is known who sees whom, no weight is ever written to memory.

The scans on a GPU decide from the logits of a chunk, which they read once. The chunk's output is then computed from
queries, keys and values tile by tile with a running maximum and sum (FlashAttention, https://arxiv.org/abs/2205.14135),
each query looking at those columns that a scan's ``last`` lets it see.

Values that are not finite would reach queries that do not see them, since in a tile's product a weight of 0 does not
undo a NaN. So a second kernel looks at each head's values once, and a third, which leaves at once where they are all
finite, computes the others anew without a product.

Without a GPU the kernels run in Triton's interpreter (``TRITON_INTERPRET=1`` before Triton is imported), slowly.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from tova.scan.gpu import _INF, _LOWEST, _scaled, launch

WIDEST = 256
"""Numbers of a head at most."""
_TILE = 2**15
"""Bytes of queries, and of keys and values, that a program holds at once."""
_AT_ONCE = 32
"""Queries that a program of the third kernel takes, one after the other, and entries that one of the second holds."""


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    last: Tensor,
    kept: int,
    out: Tensor,
    *,
    scaling: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> None:
    """Write into ``out`` [B, H, C, E] the attention of a chunk's queries [B, H, C, D], in any strides.

    Args:
        key: [B, K, N, D] and value [B, K, N, E]: what was held, and behind it the chunk's own.
        last: int64 [R, N], the last query (0-based) that sees the candidate, as a :class:`tova.scan.Scan` returns it;
            query i sees candidate n if n <= kept + i and last[n] >= i. One that sees nothing gets 0.
        kept: candidates before the chunk's own.
        sinks: float32 [R, H_g], a logit per head that only adds to the sum.
    """
    batch, heads, steps, size = query.shape
    groups, candidates, width = value.shape[1:]
    sets = last.shape[0] // batch
    block, block_out = (max(16, triton.next_power_of_2(n)) for n in (size, width))
    # Wide heads and long numbers are taken fewer at a time, so that a tile fits into the shared memory of any card.
    rows = min(launch.attend_rows, max(16, _TILE // (block * query.element_size())))
    columns = min(launch.attend_columns, max(16, _TILE // ((block + block_out) * key.element_size())))
    # A batch's heads may be more than a grid's second dimension takes; the first takes any number.
    _attend_kernel[(batch * heads, triton.cdiv(steps, rows))](
        query, key, value, last.contiguous(), query if sinks is None else sinks.contiguous(), out,
        *query.stride(), *key.stride(), *value.stride(), *out.stride(),
        kept, heads, heads // groups, heads // sets, steps, candidates, size, width,
        scaling, 1.0 if softcap is None else softcap,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
        PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
        BLOCK_C=rows,
        BLOCK_N=columns,
        BLOCK_D=block,
        BLOCK_E=block_out,
        num_warps=launch.attend_warps,
        num_stages=launch.attend_stages,
    )  # fmt: skip
    whole = torch.empty(batch * groups, dtype=torch.int32, device=value.device)
    _whole_kernel[(batch * groups,)](
        value, whole, *value.stride(), groups, candidates, width, BLOCK_N=_AT_ONCE, BLOCK_E=block_out, num_warps=4
    )
    _careful_kernel[(batch * heads, triton.cdiv(steps, _AT_ONCE))](
        query, key, value, whole, last.contiguous(), query if sinks is None else sinks.contiguous(), out,
        *query.stride(), *key.stride(), *value.stride(), *out.stride(),
        kept, heads, heads // groups, heads // sets, steps, candidates, size, width,
        scaling, 1.0 if softcap is None else softcap,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=softcap is not None,
        QUERIES=_AT_ONCE,
        BLOCK_N=16,
        BLOCK_D=block,
        BLOCK_E=block_out,
        num_warps=4,
    )  # fmt: skip


@triton.jit
def _attend_kernel(  # type: ignore[no-untyped-def]
    query, key, value, last_in, sinks, out,
    q_batch, q_head, q_step, q_size, k_batch, k_head, k_step, k_size, v_batch, v_head, v_step, v_size,
    o_batch, o_head, o_step, o_size,
    kept, heads, per_group, per_set, steps, candidates, size, width, scaling, softcap,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``BLOCK_C`` queries of one head."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    group = head // per_group
    row = batch * (heads // per_set) + head // per_set
    first_step = tl.program_id(1) * BLOCK_C
    i = first_step + tl.arange(0, BLOCK_C)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    query += batch * q_batch + head * q_head
    key += batch * k_batch + group * k_head
    value += batch * v_batch + group * v_head
    out += batch * o_batch + head * o_head
    last_in += row * candidates
    q = tl.load(
        query + i[:, None] * q_step + d[None, :] * q_size, mask=(i < steps)[:, None] & (d < size)[None, :], other=0.0
    )
    top = tl.full([BLOCK_C], _LOWEST, tl.float32)
    total = tl.zeros([BLOCK_C], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + row * per_set + head % per_set).to(tl.float32)
        top = tl.maximum(top, sink)
        total += tl.exp(sink - top)
    mixed = tl.zeros([BLOCK_C, BLOCK_E], tl.float32)
    until = tl.minimum(candidates, kept + first_step + BLOCK_C)
    for first in range(0, until, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < until
        last = tl.load(last_in + n, mask=inside, other=-1)
        k = tl.load(
            key + n[None, :] * k_step + d[:, None] * k_size, mask=inside[None, :] & (d < size)[:, None], other=0.0
        )
        x = _scaled(tl.dot(q, k, input_precision=PRECISION), scaling, softcap, HAS_SOFTCAP)
        seen = (n[None, :] <= kept + i[:, None]) & (last[None, :] >= i[:, None])
        x = tl.where(seen, x, -_INF)
        higher = tl.maximum(top, tl.max(x, 1))
        weight = tl.exp(x - higher[:, None])
        less = tl.exp(top - higher)
        total = total * less + tl.sum(weight, 1)
        v = tl.load(
            value + n[:, None] * v_step + e[None, :] * v_size, mask=inside[:, None] & (e < width)[None, :],
            other=0.0,
        )  # fmt: skip
        mixed = mixed * less[:, None] + tl.dot(weight.to(v.dtype), v, input_precision=PRECISION)
        top = higher
    # What sees nothing gets 0; what sees itself and yet has no weight at all sees only minus infinity, and gets NaN.
    itself = tl.load(last_in + kept + i, mask=i < steps, other=-1) >= i
    mixed = mixed / tl.where(itself | (total != 0), total, 1.0)[:, None]
    tl.store(
        out + i[:, None] * o_step + e[None, :] * o_size, mixed.to(out.dtype.element_ty),
        mask=(i < steps)[:, None] & (e < width)[None, :],
    )  # fmt: skip


@triton.jit
def _whole_kernel(  # type: ignore[no-untyped-def]
    value, whole, v_batch, v_head, v_step, v_size, groups, candidates, width, BLOCK_N: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Whether the values of one head are all finite."""
    group = tl.program_id(0)
    value += (group // groups).to(tl.int64) * v_batch + (group % groups) * v_head
    e = tl.arange(0, BLOCK_E)
    others = tl.zeros([BLOCK_N, BLOCK_E], tl.int32)
    for first in range(0, candidates, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        v = tl.load(
            value + n[:, None] * v_step + e[None, :] * v_size, mask=(n < candidates)[:, None] & (e < width)[None, :],
            other=0.0,
        )  # fmt: skip
        others |= (tl.abs(v.to(tl.float32)) < _INF).to(tl.int32) ^ 1
    tl.store(whole + group, tl.where(tl.sum(tl.sum(others, 1), 0) > 0, 0, 1))


@triton.jit
def _careful_kernel(  # type: ignore[no-untyped-def]
    query, key, value, whole, last_in, sinks, out,
    q_batch, q_head, q_step, q_size, k_batch, k_head, k_step, k_size, v_batch, v_head, v_step, v_size,
    o_batch, o_head, o_step, o_size,
    kept, heads, per_group, per_set, steps, candidates, size, width, scaling, softcap,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, QUERIES: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """``QUERIES`` queries of one head whose values are not all finite, one by one: values that one does not see are
    left out instead of weighed by 0."""
    batch = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    group = head // per_group
    row = batch * (heads // per_set) + head // per_set
    if tl.load(whole + batch * (heads // per_group) + group) == 0:
        d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
        query += batch * q_batch + head * q_head
        key += batch * k_batch + group * k_head
        value += batch * v_batch + group * v_head
        out += batch * o_batch + head * o_head
        last_in += row * candidates
        begin = tl.program_id(1) * QUERIES
        for i in range(begin, tl.minimum(begin + QUERIES, steps)):
            q = tl.load(query + i * q_step + d * q_size, mask=d < size, other=0.0).to(tl.float32)
            top = tl.full([1], _LOWEST, tl.float32)
            total = tl.zeros([1], tl.float32)
            if HAS_SINKS:
                sink = tl.load(sinks + row * per_set + head % per_set).to(tl.float32)
                top = tl.maximum(top, sink)
                total += tl.exp(sink - top)
            mixed = tl.zeros([BLOCK_E], tl.float32)
            for first in range(0, kept + i + 1, BLOCK_N):
                n = first + tl.arange(0, BLOCK_N)
                seen = (n <= kept + i) & (tl.load(last_in + n, mask=n < candidates, other=-1) >= i)
                k = tl.load(
                    key + n[:, None] * k_step + d[None, :] * k_size, mask=seen[:, None] & (d < size)[None, :], other=0.0
                )
                x = _scaled(tl.sum(k.to(tl.float32) * q[None, :], 1), scaling, softcap, HAS_SOFTCAP)
                x = tl.where(seen, x, -_INF)
                higher = tl.maximum(top, tl.max(x, 0))
                weight = tl.exp(x - higher)
                less = tl.exp(top - higher)
                total = total * less + tl.sum(weight, 0)
                v = tl.load(
                    value + n[:, None] * v_step + e[None, :] * v_size, mask=seen[:, None] & (e < width)[None, :],
                    other=0.0,
                )  # fmt: skip
                mixed = mixed * less + tl.sum(v.to(tl.float32) * weight[:, None], 0)
                top = higher
            itself = tl.load(last_in + kept + i) >= i
            mixed = mixed / tl.where(itself | (total != 0), total, 1.0)
            tl.store(out + i * o_step + e * o_size, mixed.to(out.dtype.element_ty), mask=e < width)
