"""One decoded token, compiled with numba: the built-in policies over a layer's fixed slots, float32, on the CPU.

A step of a small cache is so little work that calling a dozen tensor operations costs more than what they do. Here one
call writes the newcomer into its slot, attends, updates the record, picks the victim and frees its slot, all in place.
Tensors are handed over by address, which is a tenth of the price of an array each. The decisions are those of
``tova.policies``, ties to the lower position included; records are float32 and ranking is in float64, as in
``tova.scan.cpu``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

import numba as nb
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic
from torch import Tensor

from tova.errors import UsageError
from tova.policies import H2OHead, Policy
from tova.products import only_seen
from tova.scan import cpu
from tova.scan.cpu import mix, pool_in_order, random_key
from tova.scan.modes import FEATURE, LATEST, MODES, OLDEST, RANDOM, RING, SUM, VOTES

if TYPE_CHECKING:
    from tova.replay import Attention, LayerState

_F = np.float32
_INF = np.float64(np.inf)
_U32 = np.int64(0xFFFFFFFF)
_NOWHERE = np.int64(np.iinfo(np.int64).max)
_jit, _strict_jit = cpu._jit, cpu._strict_jit

# What one call does: everything, on one thread, or, where torch's own products over several threads are faster, what
# comes before and what comes after them. On one thread they take twice as long as those here.
_ALL, _PLACE, _REST = range(3)
_MANY, _THREADS = 1 << 20, 4
"""Numbers in the keys looked at, and torch's threads, from which the two products are left to torch."""


class Plan(NamedTuple):
    """What a policy comes to in the compiled step."""

    mode: int
    record: str | None
    feature: str | None
    reads: bool
    own: bool
    trigger: int
    remains: int
    sinks: int
    recent: int
    pool: int
    key: int


def supports(policy: Policy, dtype: torch.dtype) -> bool:
    """Whether steps of ``policy`` on a model of ``dtype`` are compiled."""
    return dtype == torch.float32 and cpu.supports(policy, dtype) and not policy.reindexes and not policy.sees_dropped


@lru_cache(maxsize=4096)
def _plan(policy: Policy, every: int) -> Plan:
    """Of a policy that evicts once ``budget + every`` are held."""
    mode, record, feature = MODES[type(policy)]
    return Plan(
        mode,
        record,
        feature,
        policy.reads_attention,
        policy.newest_competes or isinstance(policy, H2OHead),
        int(_NOWHERE) if policy.prompt_only else min(policy.effective_budget + every, int(_NOWHERE)),
        policy.remains(0),
        policy.sinks,
        policy.newest_protected,
        getattr(policy, "pool_kernel", 1),
        random_key(policy),
    )


def step(
    policy: Policy,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LayerState,
    attention: Attention,
    every: int,
    used: int,
    feature: Tensor | None,
) -> Tensor:
    """Attention of one new token over what is held and itself; the slots of ``state`` move on, in place.

    Args:
        query: float32 [B, H, 1, D], key and value: [B, K, 1, D].
        state: with a free slot in every row. Only its slots, keys, values and log are written.
        every: evict once ``budget + every`` are held.
        used: look at this many of the first slots; a free one and all that is held must be among them.
        feature: float32 [R, 1], the new token's, for a policy that has one.

    Returns:
        [B, H, 1, D].
    """
    plan = _plan(policy, every)
    slots = state.slots
    batch, heads, _, size = query.shape
    groups, room = state.keys.shape[1], state.keys.shape[2]
    width = value.shape[3]
    sets = state.sets
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = query.new_empty(batch, heads, 1, width)
    record = None if plan.record is None else slots.records[plan.record]
    old = None if plan.feature is None else slots.features[plan.feature]
    log = None if state.log is None else state.log.evicted_at
    sinks = None if attention.sinks is None else attention.sinks.detach().float().contiguous()
    feature = None if feature is None else feature.contiguous()
    _check(torch.float32, query, key, value, state.keys, state.values, record, old, feature, sinks)
    _check(torch.int64, slots.positions, slots.observed, slots.newest, state.start, log)
    _check(torch.bool, slots.held)
    split = batch * groups * used * size >= _MANY and torch.get_num_threads() >= _THREADS
    before = slots.held[:, :used].clone() if split else None
    logits: Tensor | None = None
    for stage in (_PLACE, _REST) if split else (_ALL,):
        if stage == _REST:
            logits = attention.logits(query, state.keys[:, :, :used]).contiguous()
        _step(
            stage, used, batch, groups, heads, size, width, room, sets,
            query.data_ptr(), key.data_ptr(), value.data_ptr(), state.keys.data_ptr(), state.values.data_ptr(),
            out.data_ptr(), _address(logits),
            slots.positions.data_ptr(), slots.held.data_ptr(), state.start.data_ptr(), slots.observed.data_ptr(),
            slots.newest.data_ptr(), _address(record), 0 if record is None or record.ndim < 3 else record.shape[2],
            _address(old), _address(feature), _address(sinks), _address(log), 0 if log is None else log.shape[2],
            attention.scaling, attention.softcap or 0.0, state.seen,
            plan.mode, plan.reads, plan.own, plan.trigger, plan.remains, plan.sinks, plan.recent, plan.pool, plan.key,
        )  # fmt: skip
    if logits is not None and before is not None:
        values = state.values[:, :, :used]
        out = attention.mix(logits, None, values)
        if not bool(out.isfinite().all()):
            before |= slots.positions[:, :used] == state.seen - state.start
            out = attention.mix(logits, None, only_seen(values, before))
    return out


def _check(dtype: torch.dtype, *tensors: Tensor | None) -> None:
    """Addresses are handed on: anything else would be read and written as if it were this."""
    for tensor in tensors:
        if tensor is not None and not (tensor.dtype == dtype and tensor.is_contiguous()):
            raise UsageError(
                f"the compiled step needs what a layer holds as contiguous {str(dtype).removeprefix('torch.')}, got "
                f"{str(tensor.dtype).removeprefix('torch.')} in strides {tensor.stride()}; scan=reference takes any"
            )


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


@intrinsic
def _pointer(typingctx, address):  # type: ignore[no-untyped-def]
    """An integer address as a pointer, for ``carray``."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return nb.types.voidptr(nb.int64), generate


@_jit
def _step(  # type: ignore[no-untyped-def]
    stage, used, batch, groups, heads, size, width, room, sets,
    query_at, key_at, value_at, keys_at, values_at, out_at, logits_at,
    positions_at, held_at, start_at, observed_at, newest_at, record_at, ring_width,
    feature_at, fresh_at, head_sinks_at, log_at, columns,
    scaling, softcap, step, mode, reads, own, trigger, remains, sinks, recent, pool, key,
):  # fmt: skip
    """Every kept set through one step; see :func:`step`. Arrays that are not there have address 0."""
    rows = batch * sets
    shared = heads // sets  # query heads of a kept set
    each = groups // sets  # key/value heads of a kept set
    per = heads // groups  # query heads of a key/value head
    queries = nb.carray(_pointer(query_at), (batch, heads, size), np.float32)
    new_keys = nb.carray(_pointer(key_at), (batch, groups, size), np.float32)
    new_values = nb.carray(_pointer(value_at), (batch, groups, width), np.float32)
    all_keys = nb.carray(_pointer(keys_at), (batch, groups, room, size), np.float32)
    all_values = nb.carray(_pointer(values_at), (batch, groups, room, width), np.float32)
    out = nb.carray(_pointer(out_at), (batch, heads, width), np.float32)
    all_positions = nb.carray(_pointer(positions_at), (rows, room), np.int64)
    all_held = nb.carray(_pointer(held_at), (rows, room), np.uint8)
    start = nb.carray(_pointer(start_at), (rows,), np.int64)
    observed = nb.carray(_pointer(observed_at), (rows,), np.int64)
    newest = nb.carray(_pointer(newest_at), (rows,), np.int64)
    there = record_at != 0
    all_numbers = nb.carray(_pointer(record_at), (rows if there and mode != RING else 0, room), np.float32)
    rings = nb.carray(_pointer(record_at), (rows if there and mode == RING else 0, room, ring_width), np.float32)
    all_features = nb.carray(_pointer(feature_at), (rows if feature_at != 0 else 0, room), np.float32)
    fresh = nb.carray(_pointer(fresh_at), (rows if feature_at != 0 else 0,), np.float32)
    head_sinks = nb.carray(_pointer(head_sinks_at), (heads if head_sinks_at != 0 else 0,), np.float32)
    log = nb.carray(_pointer(log_at), (rows if log_at != 0 else 0, columns), np.int64)
    given = nb.carray(_pointer(logits_at), (batch if logits_at != 0 else 0, heads, used), np.float32)
    weights = np.empty((per, used), np.float32)
    turned = np.empty((per, size), np.float32)
    alive = np.empty(used, np.float32)
    attn = np.empty(used, np.float32)
    score = np.empty(used, np.float64)
    dropped = 0
    for r in range(rows):
        b, first = r // sets, (r % sets) * each
        held, positions = all_held[r], all_positions[r]
        position = step - start[r]
        # The newcomer takes the first free slot; after the first of two stages that is where it already is.
        count = 0
        slot = -1
        if stage == _REST:
            for j in range(used):
                count += held[j]
                if held[j] == 0 and positions[j] == position:
                    slot = j
        else:
            for j in range(used):
                count += held[j]
                if held[j] == 0 and slot < 0:
                    slot = j
            positions[slot] = position
            for c in range(first, first + each):
                all_keys[b, c, slot] = new_keys[b, c]
                all_values[b, c, slot] = new_values[b, c]
        if stage == _PLACE:
            continue
        for j in range(used):
            alive[j] = _F(1.0) if held[j] else _F(0.0)
            attn[j] = _F(0.0)
        alive[slot] = _F(1.0)
        share = _F(1.0) / _F(shared)
        known = True  # whether the row is finite; what is not held may be anything, and is left out
        for c in range(first, first + each):
            if stage == _ALL:
                for g in range(per):
                    for d in range(size):
                        turned[g, d] = queries[b, c * per + g, d] * _F(scaling)
                _products(turned, all_keys[b, c], weights)
                if softcap != 0.0:
                    for g in range(per):
                        for j in range(used):
                            weights[g, j] = _F(softcap) * np.tanh(weights[g, j] / _F(softcap))
            else:
                weights = given[b, c * per : (c + 1) * per]
            for g in range(per):
                row = weights[g]
                top = row[slot]
                for j in range(used):
                    top = max(top, row[j] if alive[j] > 0 else top)
                total = _F(0.0)
                if len(head_sinks):
                    top = max(top, head_sinks[c * per + g])
                    total = np.exp(head_sinks[c * per + g] - top)
                for j in range(used):
                    x = row[j] - top if alive[j] > 0 else _F(-87.0)
                    weight = cpu._exp(x) * alive[j]
                    row[j] = weight
                    total += weight
                known = known and not np.isnan(total)
                total = _F(1.0) / total
                for j in range(used):
                    row[j] *= total
                if reads:
                    for j in range(used):
                        attn[j] += row[j] * share
            if stage == _ALL:
                mixed = out[b, c * per : (c + 1) * per]
                _mixed(weights, all_values[b, c], mixed)
                if not _finite(mixed):
                    _mixed_of_seen(weights, all_values[b, c], alive, mixed)
        # What the policy sees: the weights on what was held before the newcomer joined, if they are known.
        if mode == LATEST:
            numbers = all_numbers[r]
            if known:
                for j in range(used):
                    numbers[j] = attn[j]
            if not (own and known):
                numbers[slot] = _F(np.nan)
        elif mode == SUM:
            numbers = all_numbers[r]
            if known:
                for j in range(used):
                    numbers[j] += attn[j]
            numbers[slot] = attn[slot] if own and known else _F(0.0)
        elif mode == VOTES:
            numbers = all_numbers[r]
            fair_share = 1.0 / max(count, 1)
            if known:
                for j in range(used):
                    if held[j] and np.float64(attn[j]) > fair_share:
                        numbers[j] += _F(1.0)
            numbers[slot] = _F(0.0)
        elif mode == RING:
            turn = observed[r] % ring_width
            if known:
                for j in range(used):
                    rings[r, j, turn] = attn[j]
            for w in range(ring_width):
                rings[r, slot, w] = _F(0.0)
        if len(all_features):
            all_features[r, slot] = fresh[r]
        if reads and known:
            observed[r] += 1
        newest[r] = position
        held[slot] = 1
        count += 1
        if count < trigger:
            continue
        if mode == RING:
            _pooled(rings[r], held, positions, used, pool, score)
        elif mode == OLDEST:
            for j in range(used):
                score[j] = np.float64(positions[j])
        elif mode == RANDOM:
            mixed = mix((position + key) & _U32)
            for j in range(used):
                score[j] = np.float64(mix((positions[j] + mixed) & _U32))
        elif mode == FEATURE:
            for j in range(used):
                score[j] = -np.float64(all_features[r, j])
        elif len(all_features):
            for j in range(used):
                score[j] = np.float64(all_numbers[r, j] * all_features[r, j])
        else:
            for j in range(used):
                score[j] = np.float64(all_numbers[r, j])
        _forbid(score, held, positions, used, sinks, recent, position)
        for _ in range(count - remains):
            victim = _lowest(score, positions, used)
            if victim < 0:
                victim = _oldest(held, positions, used, sinks)
            if victim < 0:
                break
            score[victim] = np.nan
            held[victim] = 0
            dropped += 1
            if len(log):
                log[r, positions[victim] + start[r]] = step
    return dropped


@_jit
def _products(queries, keys, out):  # type: ignore[no-untyped-def]
    """out[g, j] = queries[g] . keys[j]; keys [S, D] may have more slots than ``out`` [per, used]."""
    per, used = out.shape
    size = queries.shape[1]
    for j in range(used):
        entry = keys[j]
        for g in range(per):
            total = _F(0.0)
            for d in range(size):
                total += queries[g, d] * entry[d]
            out[g, j] = total


@_jit
def _mixed(weights, values, out):  # type: ignore[no-untyped-def]
    """out[g] = sum over j of weights[g, j] values[j]; four entries at a time, since ``out`` is read and written."""
    per, used = weights.shape
    size = values.shape[1]
    out[:] = _F(0.0)
    whole = used - used % 4
    for j in range(0, whole, 4):
        for g in range(per):
            a, b, c, d = weights[g, j], weights[g, j + 1], weights[g, j + 2], weights[g, j + 3]
            for i in range(size):
                out[g, i] += a * values[j, i] + b * values[j + 1, i] + c * values[j + 2, i] + d * values[j + 3, i]
    for j in range(whole, used):
        for g in range(per):
            a = weights[g, j]
            for i in range(size):
                out[g, i] += a * values[j, i]


@_strict_jit
def _finite(out):  # type: ignore[no-untyped-def]
    """Whether all of ``out`` [per, width] is finite."""
    others = 0  # counted, since a sum may be reassociated until what is not finite cancels
    for g in range(out.shape[0]):
        for i in range(out.shape[1]):
            others += not np.isfinite(out[g, i])
    return others == 0


@_jit
def _mixed_of_seen(weights, values, alive, out):  # type: ignore[no-untyped-def]
    """As :func:`_mixed` of those slots alone that are ``alive``: a weight of 0 does not undo a NaN."""
    per, used = weights.shape
    out[:] = _F(0.0)
    for j in range(used):
        if alive[j] > 0:
            for g in range(per):
                a = weights[g, j]
                for i in range(values.shape[1]):
                    out[g, i] += a * values[j, i]


@_strict_jit
def _forbid(score, held, positions, used, sinks, recent, newest):  # type: ignore[no-untyped-def]
    """NaN for what is no candidate: empty slots, sinks, the ``recent`` newest held; so it is where nothing is known."""
    floor = _NOWHERE
    if recent > 0:
        floor = newest - recent + 1
        there = 0
        for j in range(used):
            there += held[j] != 0 and positions[j] >= floor
        if there < recent:  # some of them went with the layer's own window: look further back
            floor = _nth_newest(held, positions, used, recent)
    for j in range(used):
        if held[j] == 0 or positions[j] < sinks or positions[j] >= floor:
            score[j] = np.nan


@_strict_jit
def _nth_newest(held, positions, used, n):  # type: ignore[no-untyped-def]
    """The position of the ``n``-th newest held, -1 if there are fewer."""
    found = np.empty(used, np.int64)
    count = 0
    for j in range(used):
        if held[j]:
            found[count] = positions[j]
            count += 1
    if count < n:
        return np.int64(-1)
    found[:count].sort()
    return found[count - n]


@_strict_jit
def _lowest(score, positions, used):  # type: ignore[no-untyped-def]
    """The slot of the lowest score, of equal ones that of the lower position; -1 if all are NaN."""
    lowest = _INF
    for j in range(used):
        lowest = min(lowest, score[j])  # which is ``lowest`` where the other is NaN
    victim = -1
    at = _NOWHERE
    for j in range(used):
        if score[j] == lowest and positions[j] < at:
            at = positions[j]
            victim = j
    return victim


@_strict_jit
def _oldest(held, positions, used, sinks):  # type: ignore[no-untyped-def]
    """The slot of the lowest position held that is no sink; -1 if there is none."""
    victim = -1
    at = _NOWHERE
    for j in range(used):
        if held[j] and sinks <= positions[j] < at:
            at = positions[j]
            victim = j
    return victim


@_strict_jit
def _pooled(ring, held, positions, used, kernel, score):  # type: ignore[no-untyped-def]
    """score[j] of each held slot: the maximum window sum over ``kernel`` held positions adjacent in order."""
    total = np.empty(used, np.float64)
    for j in range(used):
        total[j] = 0.0
        for w in range(ring.shape[1]):
            total[j] += np.float64(ring[j, w])
    if kernel == 1:
        for j in range(used):
            score[j] = total[j]
        return
    order = np.empty(used, np.int64)
    count = _in_position_order(held, positions, used, order)
    pool_in_order(total, order, count, kernel, score)


@_strict_jit
def _in_position_order(held, positions, used, order):  # type: ignore[no-untyped-def]
    """Fill ``order`` with the held slots by ascending position, a byte of the position at a time; returns how many."""
    count = 0
    least, most = _NOWHERE, np.int64(0)
    for j in range(used):
        if held[j]:
            order[count] = j
            count += 1
            least = min(least, positions[j])
            most = max(most, positions[j])
    other = np.empty(count, np.int64)
    first = np.empty(257, np.int64)
    shift = 0
    while count and (most - least) >> shift > 0:
        first[:] = 0
        for a in range(count):
            first[(((positions[order[a]] - least) >> shift) & 255) + 1] += 1
        for digit in range(256):
            first[digit + 1] += first[digit]
        for a in range(count):
            digit = ((positions[order[a]] - least) >> shift) & 255
            other[first[digit]] = order[a]
            first[digit] += 1
        order[:count] = other
        shift += 8
    return count
