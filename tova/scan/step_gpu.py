"""One decoded token in Triton: three kernels over a layer's fixed slots, in place, with nothing to wait for.

``_place_kernel`` writes the newcomer into a free slot of every kept set, ``_attend_kernel`` attends over what is held
and it, one program per query head, and ``_update_kernel`` averages the weights over heads, updates the record and frees
the slots of those that are dropped. The decisions are those of ``tova.policies``, ties to the lower position included.
What differs from step to step is read from the slots themselves, so a CUDA graph can replay a step.

In half precision the weights that decide come from products rounded as a matrix product rounds them, as in a replay.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from tova import fused
from tova.errors import UsageError
from tova.policies import Policy
from tova.scan import gpu, modes
from tova.scan.gpu import _INF, _LOWEST, FEATURE, OLDEST, _head_average, _heads_at_once, _observed, _scaled

if TYPE_CHECKING:
    from tova.replay import Attention, LayerState

_HIGHEST_POSITION = tl.constexpr(2**62)


def supports(policy: Policy, query: Tensor, value: Tensor, slots: int) -> bool:
    """Whether a step of ``policy`` over ``slots`` slots is one for these kernels; else plain torch takes it."""
    return (
        gpu.supports(policy, query.dtype)
        and modes.MODES[type(policy)][0] != modes.RING  # whose neighbours are those in position order
        and not policy.reindexes
        and slots <= gpu.MOST
        and max(query.shape[-1], value.shape[-1]) <= fused.WIDEST
    )


def step(
    policy: Policy,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LayerState,
    attention: Attention,
    trigger: int,
    remains: int,
    used: int,
    feature: Tensor | None,
) -> Tensor:
    """Attention [B, H, 1, E] of one new token over what is held and itself; the slots of ``state`` move on, in place.

    Args:
        query: [B, H, 1, D], key [B, K, 1, D] and value [B, K, 1, E].
        state: with a free slot in every row. Only its slots, keys, values and log are written.
        trigger: evict once this many would be held, down to ``remains``.
        used: look at this many of the first slots; a free one and all that is held must be among them.
        feature: float32 [R, 1], the new token's, for a policy that has one.
    """
    slots = state.slots
    batch, heads, _, size = query.shape
    groups, room = state.keys.shape[1], state.keys.shape[2]
    width = value.shape[3]
    rows = slots.held.shape[0]
    sets = rows // batch
    mode, record, wanted = modes.MODES[type(policy)]
    for tensor in (state.keys, state.values, slots.positions, slots.held, slots.observed, slots.newest, state.start):
        if not tensor.is_contiguous():
            raise UsageError(f"the kernels need what a layer holds to be contiguous, got strides {tensor.stride()}")
    held = slots.held.view(torch.uint8)
    old = None if wanted is None else slots.features[wanted]
    numbers = None if record is None else slots.records[record]
    log = None if state.log is None else state.log.evicted_at
    sinks = attention.sinks_of(batch, sets)
    sinks = None if sinks is None else sinks.contiguous()
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    slot = torch.empty(rows, dtype=torch.int32, device=query.device)
    block = triton.next_power_of_2(used)
    warps = min(16, max(4, block // 256))
    per_set = groups // sets
    _place_kernel[(rows,)](
        key, value, state.keys, state.values, held, slots.positions, slots.newest, slot,
        query if feature is None else feature.contiguous(), query if old is None else old,
        used, room, per_set, size, width,
        HAS_FEATURE=feature is not None,
        BLOCK=block,
        BLOCK_D=triton.next_power_of_2(per_set * size),
        BLOCK_E=triton.next_power_of_2(per_set * width),
        num_warps=warps,
    )  # fmt: skip
    out = query.new_empty(batch, heads, 1, width)
    logits = query.new_empty(batch * sets, heads // sets, 1, used)
    scale = attention.scaling, 1.0 if attention.softcap is None else attention.softcap
    _attend_kernel[(batch * heads,)](
        query, state.keys, state.values, held, slot, query if sinks is None else sinks, logits, out,
        heads, groups, heads // groups, heads // sets, used, room, size, width, *scale,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=attention.softcap is not None,
        BLOCK_N=32,
        BLOCK_D=triton.next_power_of_2(size),
        BLOCK_E=triton.next_power_of_2(width),
        num_warps=4,
    )  # fmt: skip
    recent = policy.newest_protected
    _update_kernel[(rows,)](
        logits, query if sinks is None else sinks, held, slots.positions, slots.newest, slots.observed, slot,
        query if numbers is None else numbers, query if old is None else old, held if log is None else log, state.start,
        heads // sets, used, room, min(trigger, gpu._NEVER), min(remains, gpu._NEVER), policy.sinks, recent,
        0 if log is None else log.shape[-1], *scale,
        MODE=mode,
        READS=policy.reads_attention,
        OWN=type(policy).admitted is not Policy.admitted,
        HAS_FEATURE=old is not None,
        HAS_LOG=log is not None,
        HAS_SINKS=sinks is not None,
        HAS_SOFTCAP=attention.softcap is not None,
        BLOCK_H=_heads_at_once(heads // sets, block, 8192),
        BLOCK=block,
        num_warps=warps,
    )  # fmt: skip
    return out


@triton.jit
def _place_kernel(  # type: ignore[no-untyped-def]
    key, value, keys, values, held, positions, newest, slot_out, feature, features,
    used, room, per_set, size, width,
    HAS_FEATURE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """The newcomer of one kept set into its first free slot; it is not held yet."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    free = tl.load(held + row * room + n, mask=n < used, other=1) == 0
    slot = tl.min(tl.where(free, n, BLOCK), 0)
    tl.store(slot_out + row, slot)
    tl.store(positions + row * room + slot, tl.load(newest + row) + 1)
    if HAS_FEATURE:
        tl.store(features + row * room + slot, tl.load(feature + row))
    # [B, K, S, D] is [R, heads of a set, S, D]
    d = tl.arange(0, BLOCK_D)
    there = d < per_set * size
    at = (row * per_set + d // size) * room * size + slot * size + d % size
    tl.store(keys + at, tl.load(key + row * per_set * size + d, mask=there), mask=there)
    e = tl.arange(0, BLOCK_E)
    there = e < per_set * width
    at = (row * per_set + e // width) * room * width + slot * width + e % width
    tl.store(values + at, tl.load(value + row * per_set * width + e, mask=there), mask=there)


@triton.jit
def _attend_kernel(  # type: ignore[no-untyped-def]
    query, keys, values, held, slot_in, sinks, logits, out,
    heads, groups, per_group, per_set, used, room, size, width, scaling, softcap,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One query head over what is held and the newcomer; also leaves its raw products in ``logits``."""
    index = tl.program_id(0).to(tl.int64)
    batch = index // heads
    head = index % heads
    group = batch * groups + head // per_group
    row = batch * (heads // per_set) + head // per_set
    d, e = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q = tl.load(query + index * size + d, mask=d < size, other=0.0).to(tl.float32)
    slot = tl.load(slot_in + row)
    top = tl.full([1], _LOWEST, tl.float32)
    total = tl.zeros([1], tl.float32)
    if HAS_SINKS:
        sink = tl.load(sinks + index).to(tl.float32)
        top = tl.maximum(top, sink)
        total += tl.exp(sink - top)
    mixed = tl.zeros([BLOCK_E], tl.float32)
    for first in range(0, used, BLOCK_N):
        n = first + tl.arange(0, BLOCK_N)
        inside = n < used
        seen = inside & ((tl.load(held + row * room + n, mask=inside, other=0) != 0) | (n == slot))
        k = tl.load(
            keys + (group * room + n[:, None]) * size + d[None, :], mask=seen[:, None] & (d < size)[None, :], other=0.0
        )
        x = tl.sum(k.to(tl.float32) * q[None, :], 1)
        tl.store(logits + index * used + n, x.to(logits.dtype.element_ty), mask=inside)
        x = tl.where(seen, _scaled(x, scaling, softcap, HAS_SOFTCAP), -_INF)
        higher = tl.maximum(top, tl.max(x, 0))
        weight = tl.exp(x - higher)
        less = tl.exp(top - higher)
        total = total * less + tl.sum(weight, 0)
        v = tl.load(
            values + (group * room + n[:, None]) * width + e[None, :], mask=seen[:, None] & (e < width)[None, :],
            other=0.0,
        )  # fmt: skip
        mixed = mixed * less + tl.sum(v.to(tl.float32) * weight[:, None], 0)
        top = higher
    tl.store(out + index * width + e, (mixed / total).to(out.dtype.element_ty), mask=e < width)


@triton.jit
def _update_kernel(  # type: ignore[no-untyped-def]
    logits, sinks, held, positions, newest, observed, slot_in, numbers, features, log, start,
    heads, used, room, trigger, remains, sink_tokens, recent, columns, scaling, softcap,
    MODE: tl.constexpr, READS: tl.constexpr, OWN: tl.constexpr, HAS_FEATURE: tl.constexpr, HAS_LOG: tl.constexpr,
    HAS_SINKS: tl.constexpr, HAS_SOFTCAP: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The policy's turn in one kept set: observe, admit, drop."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < used
    at = row * room + n
    alive = tl.load(held + at, mask=inside, other=0) != 0
    position = tl.load(positions + at, mask=inside, other=-1)
    slot = tl.load(slot_in + row)
    now = tl.load(newest + row) + 1
    newcomer = n == slot
    count = tl.sum(alive.to(tl.int32), 0)
    if READS:
        attn = _head_average(
            logits, sinks, row, 0, alive | newcomer, inside, heads, 1, used, scaling, softcap,
            HAS_SINKS, HAS_SOFTCAP, False, BLOCK_H, BLOCK,
        )  # fmt: skip
        number = tl.load(numbers + at, mask=inside, other=0.0)
        number = _observed(number, attn, alive, newcomer, count, MODE, OWN, BLOCK)
        tl.store(numbers + at, number, mask=inside)
        unknown = tl.max((attn != attn).to(tl.int64), 0)
        tl.store(observed + row, tl.load(observed + row) + 1 - unknown)
    if MODE == OLDEST:
        score = position.to(tl.float32)  # equal ones are told apart by position below
    elif MODE == FEATURE:
        score = -tl.load(features + at, mask=inside, other=0.0)
    elif HAS_FEATURE:
        score = number * tl.load(features + at, mask=inside, other=0.0)
    else:
        score = number
    alive = alive | newcomer
    count += 1
    # The last `recent` tokens have been protected since they came, so all of them are held.
    droppable = alive & (position >= sink_tokens) & (position <= now - recent) & (score == score)
    excess = tl.where(count >= trigger, count - remains, 0)
    for _ in range(excess):
        ranked = tl.where(droppable, score, _INF)
        tied = droppable & (ranked == tl.min(ranked, 0))
        if tl.max(droppable.to(tl.int32), 0) == 0:  # nothing to rank by: the oldest goes
            tied = alive & (position >= sink_tokens)
        first = tl.min(tl.where(tied, position, _HIGHEST_POSITION), 0)
        victim = tied & (position == first)
        if HAS_LOG:
            begin = tl.load(start + row)
            tl.store(log + row * columns + begin + position, begin + now + position * 0, mask=victim)
        alive = alive & (victim == 0)
        droppable = droppable & (victim == 0)
    tl.store(held + at, alive.to(tl.uint8), mask=inside)
    tl.store(newest + row, now)
