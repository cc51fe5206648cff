"""One decoded token in Triton: three kernels over a layer's fixed slots, in place, with nothing to wait for.

``_place_kernel`` writes the newcomer into a free slot of every kept set, ``_attention_kernel`` attends over what is
held and it, one program per query head, and ``_update_kernel`` takes the mean of the weights over heads, updates the
records and frees the slots of those that are dropped, as the policy's rule says (:mod:`tova.rules.triton_code`); ties
go to the lower position. What differs from step to step is read from the slots themselves, so a CUDA graph can replay
a step.

In half precision the weights that decide come from products rounded as a matrix product rounds them, as in a replay.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tova import rules
from tova.call import Call
from tova.decode import plain
from tova.errors import UsageError
from tova.kernels.triton_math import (
    INF,
    LAST_POSITION,
    LOWEST,
    Slots,
    Softmax,
    finished,
    load_each,
    mean_over_heads,
    ring_write,
    rings_of_row,
    store_each,
    where_each,
)
from tova.layer import LayerState
from tova.policies.base import Policy
from tova.policies.contract import is_watched
from tova.rules import triton_code
from tova.scan import gpu

WIDEST = 256
"""Numbers of a head at most."""


def supports(policy: Policy, query: Tensor, value: Tensor, slots: int) -> bool:
    """Whether a step of ``policy`` over ``slots`` slots is one for these kernels; else plain torch takes it."""
    return (
        gpu.supports(policy, query.dtype)
        and not policy.reindexes
        and not is_watched(policy)
        and slots <= gpu.MOST_CANDIDATES
        and max(query.shape[-1], value.shape[-1]) <= WIDEST
    )


def step(query: Tensor, key: Tensor, value: Tensor, state: LayerState, call: Call, used: int) -> Tensor:
    """See :func:`tova.decode.plain.step`."""
    policy, attention, slots = call.policy, call.attention, state.slots
    rule = rules.rule_of(policy)
    assert isinstance(rule, rules.Rule)
    features = call.features(key, value, slots.newest + 1, state.kept_sets)
    if any(feature.ndim != 2 for feature in features.values()):
        return plain.step(query, key, value, state, call, used)
    for tensor in (state.keys, state.values, *slots.tensors(), state.start):
        if not tensor.is_contiguous():
            raise UsageError(f"the kernels need what a layer holds to be contiguous, got strides {tensor.stride()}")
    batch, heads, _, size = query.shape
    kept_sets, rows, width = state.kept_sets, len(slots.held), value.shape[-1]
    sizes = _Sizes(heads // kept_sets, key.shape[1] // kept_sets, used, state.keys.shape[2], size, width)
    sink_logits = attention.sink_logits_of(batch, kept_sets)
    softmax = Softmax(attention.scaling, attention.softcap, None if sink_logits is None else sink_logits.contiguous())
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    held, log = gpu.as_bytes(slots.held), None if state.log is None else state.log.evicted_at
    slot = torch.empty(rows, dtype=torch.int32, device=query.device)
    block = triton.next_power_of_2(used)
    warps = min(16, max(4, block // 256))
    _place_kernel[(rows,)](
        _Newcomer(key, value, tuple(feature.contiguous() for feature in features.values())),
        _Newcomer(state.keys, state.values, tuple(slots.features[name] for name in features)),
        held,
        slots.positions,
        slots.newest,
        slot,
        sizes,
        BLOCK=block,
        BLOCK_D=triton.next_power_of_2(sizes.kv_heads * size),
        BLOCK_E=triton.next_power_of_2(sizes.kv_heads * width),
        num_warps=warps,
    )
    out = query.new_empty(batch, heads, 1, width)
    logits = query.new_empty(rows, sizes.heads, 1, used)
    _attention_kernel[(batch * heads,)](
        query,
        state.keys,
        state.values,
        held,
        slot,
        logits,
        out,
        sizes,
        softmax,
        BLOCK_N=32,
        BLOCK_D=triton.next_power_of_2(size),
        BLOCK_E=triton.next_power_of_2(width),
        num_warps=4,
    )
    _update_kernel[(rows,)](
        logits,
        slot,
        _State(
            positions=slots.positions,
            held=held,
            records=tuple(gpu.as_bytes(slots.records[name]) for name in triton_code.plain_records(rule)),
            rings=tuple(gpu.as_bytes(slots.records[name]) for name in triton_code.rings(rule)),
            features=tuple(slots.features[name] for name in rule.features),
            observed=slots.observed,
            newest=slots.newest,
            scratch=gpu.scratch_for(rule, rows, used, query.device),
        ),
        None if log is None else _Log(log, state.start, log.shape[-1]),
        sizes,
        tuple(slots.records[name].shape[1] for name in triton_code.rings(rule)),
        gpu.eviction_of(policy, call.schedule),
        softmax,
        triton_code.kernel_rule(rule, query.device),
        BLOCK_H=gpu.heads_at_once(sizes.heads, block, 8192),
        BLOCK=block,
        num_warps=warps,
        enable_fp_fusion=False,
    )
    return out


class _Sizes(NamedTuple):
    """Query heads and key/value heads of a kept set, slots looked at and slots there are, numbers of a head's key and
    of its value."""

    heads: Any
    kv_heads: Any
    used: Any
    room: Any
    size: Any
    width: Any


class _Newcomer(NamedTuple):
    """Pointers to what a token brings, [B, K, 1, D], [B, K, 1, E] and a tuple of [R, 1], or to where it is held."""

    key: Any
    value: Any
    features: Any


class _State(NamedTuple):
    """Pointers to a layer's slots; all but positions and features are changed in place."""

    positions: Any
    """int64 [R, S]"""
    held: Any
    """uint8 [R, S]"""
    records: Any
    """A tuple, [R, S] each."""
    rings: Any
    """A tuple, [R, W, S] each."""
    features: Any
    """A tuple, float32 [R, S] each."""
    observed: Any
    """int64 [R]"""
    newest: Any
    """int64 [R]"""
    scratch: Any
    """int64 and float64 [R, used], or None"""


class _Log(NamedTuple):
    """Pointers to int64 [R, columns] and int64 [R]; see :class:`tova.eviction_log.EvictionLog`."""

    evicted_at: Any
    start: Any
    columns: Any


@triton.jit
def _place_kernel(  # type: ignore[no-untyped-def]
    newcomer, layer, held, positions, newest, slot_out, sizes,
    BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The newcomer of one kept set into its first free slot; it is not held yet."""
    row = tl.program_id(0).to(tl.int64)
    kv_heads, used, room, size, width = sizes.kv_heads, sizes.used, sizes.room, sizes.size, sizes.width
    n = tl.arange(0, BLOCK)
    free = tl.load(held + row * room + n, mask=n < used, other=1) == 0
    slot = tl.min(tl.where(free, n, BLOCK), 0)
    tl.store(slot_out + row, slot)
    tl.store(positions + row * room + slot, tl.load(newest + row) + 1)
    for i in tl.static_range(len(newcomer.features)):
        tl.store(layer.features[i] + row * room + slot, tl.load(newcomer.features[i] + row))
    # [B, K, S, D] is [R, heads of a set, S, D]
    d = tl.arange(0, BLOCK_D)
    there = d < kv_heads * size
    at = (row * kv_heads + d // size) * room * size + slot * size + d % size
    tl.store(layer.key + at, tl.load(newcomer.key + row * kv_heads * size + d, mask=there), mask=there)
    e = tl.arange(0, BLOCK_E)
    there = e < kv_heads * width
    at = (row * kv_heads + e // width) * room * width + slot * width + e % width
    tl.store(layer.value + at, tl.load(newcomer.value + row * kv_heads * width + e, mask=there), mask=there)


@triton.jit
def _attention_kernel(  # type: ignore[no-untyped-def]
    query, keys, values, held, slot_in, logits, out, sizes, softmax,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One query head over what is held and the newcomer; also leaves its raw products in ``logits``."""
    index = tl.program_id(0).to(tl.int64)
    heads, kv_heads, used, room, size, width = sizes
    row = index // heads
    kv_head = row * kv_heads + index % heads // (heads // kv_heads)
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q = tl.load(query + index * size + d, mask=d < size, other=0.0).to(tl.float32)
    slot = tl.load(slot_in + row)
    top = tl.full([1], LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    if softmax.sink_logits is not None:
        sink = tl.load(softmax.sink_logits + index).to(tl.float32)
        top = tl.maximum(top, sink)
        total += tl.exp(sink - top)
    mixed = tl.zeros([BLOCK_E], tl.float32)
    for first in range(0, used, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < used
        seen = inside & ((tl.load(held + row * room + n, mask=inside, other=0) != 0) | (n == slot))
        k = tl.load(
            keys + (kv_head * room + n[:, None]) * size + d[None, :], mask=seen[:, None] & (d < size)[None, :],
            other=0.0,
        )  # fmt: skip
        x = tl.sum(k.to(tl.float32) * q[None, :], 1)
        tl.store(logits + index * used + n, x.to(logits.dtype.element_ty), mask=inside)
        x = tl.where(seen, finished(x, softmax), -INF)
        higher = tl.maximum(top, tl.max(x, 0))
        weight = tl.exp(x - higher)
        less = tl.exp(top - higher)
        total = total * less + tl.sum(weight, 0)
        v = tl.load(
            values + (kv_head * room + n[:, None]) * width + e[None, :], mask=seen[:, None] & (e < width)[None, :],
            other=0.0,
        )  # fmt: skip
        mixed = mixed * less + tl.sum(v.to(tl.float32) * weight[:, None], 0)
        top = higher
    tl.store(out + index * width + e, (mixed / total).to(out.dtype.element_ty), mask=e < width)


@triton.jit
def _update_kernel(  # type: ignore[no-untyped-def]
    logits, slot_in, state, log, sizes, widths, eviction, softmax, rule, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr
):
    """The policy's turn in one kept set: observe, admit, drop. ``widths`` are the rings', a tuple."""
    row = tl.program_id(0).to(tl.int64)
    heads, used, room = sizes.heads, sizes.used, sizes.room
    n = tl.arange(0, BLOCK)
    inside = n < used
    at = row * room + n
    numbers = rule.numbers(rule.ints, rule.floats)
    alive = tl.load(state.held + at, mask=inside, other=0) != 0
    position = tl.load(state.positions + at, mask=inside, other=-1)
    records = load_each(state.records, at, inside)
    features = load_each(state.features, at, inside)
    rings = rings_of_row(state.rings, widths, room, row)
    scratch = None
    if state.scratch is not None:
        scratch = (state.scratch[0] + row * used, state.scratch[1] + row * used)
    newest = tl.load(state.newest + row)
    observed = tl.load(state.observed + row)
    newcomer = n == tl.load(slot_in + row)
    count = tl.sum(alive.to(tl.int64), 0)
    for i in tl.static_range(len(rings)):
        for first in range(0, widths[i], BLOCK):
            w = first + n
            tl.store(rings[i] + w.to(tl.int64) * room + tl.load(slot_in + row), 0, mask=w < widths[i])
        tl.debug_barrier()
    if rule.observe is not None:
        weight = mean_over_heads(
            logits, row, 0, alive | newcomer, inside, heads, 1, used, softmax, False, BLOCK_H
        )  # fmt: skip
        known = weight == weight
        counts = 1 - tl.max((known == 0).to(tl.int64), 0)
        slots = Slots(
            n, inside, position, alive, records, features, rings, widths, room, count, newest, observed, scratch, False
        )  # fmt: skip
        after, entries = rule.observe(tl.where(alive & known, weight, 0.0), slots, numbers)
        joined, first_entries = rule.admit(weight, numbers)
        ring_write(slots, entries, alive & (n * 0 + counts > 0))
        ring_write(slots, first_entries, newcomer & (n * 0 + counts > 0))
        observed += counts
        tl.store(state.observed + row, observed)
        records = where_each(known, after, records)
        records = where_each(newcomer, rule.fill(numbers), records)
        records = where_each(newcomer & known, joined, records)
    else:
        records = where_each(newcomer, rule.fill(numbers), records)
    store_each(state.records, at, records, inside)
    alive = alive | newcomer
    newest += 1
    count += 1
    excess = tl.where(count >= eviction.evict_at, count - eviction.leaves, 0)
    if excess > 0:
        slots = Slots(
            n, inside, position, alive, records, features, rings, widths, room, count, newest, observed, scratch, False
        )  # fmt: skip
        score, free = rule.rank(slots, numbers)
        droppable = free & (score == score)
        for _ in range(excess):
            ranked = tl.where(droppable, score, INF)
            tied = droppable & (ranked == tl.min(ranked, 0))
            if tl.max(droppable.to(tl.int32), 0) == 0:  # nothing to rank by: the oldest goes
                tied = alive & (position >= eviction.sink_tokens)
            oldest = tl.min(tl.where(tied, position, LAST_POSITION), 0)
            victim = tied & (position == oldest)
            if log is not None:
                begin = tl.load(log.start + row)
                tl.store(
                    log.evicted_at + row * log.columns + begin + position, begin + newest + position * 0, mask=victim
                )
            alive = alive & (victim == 0)
            droppable = droppable & (victim == 0)
    tl.store(state.held + at, alive.to(tl.uint8), mask=inside)
    tl.store(state.newest + row, newest)
