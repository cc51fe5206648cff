"""One decoded token, compiled with numba from a policy's rule: a layer's fixed slots, float32, on the CPU.

A step of a small cache is so little work that calling a dozen tensor operations costs more than what they do. Here one
call writes the newcomer into its slot, attends, lets the rule's own code update the records and rank
(:mod:`tova.kernels.frame`), and frees the victim's slot, all in place. Tensors are handed over by address, which is a
tenth of the price of an array each.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import torch
from torch import Tensor

from tova.backends.finite import only_seen
from tova.call import Call
from tova.errors import UsageError
from tova.kernels import frame as at
from tova.kernels.compile import jit, strict
from tova.kernels.numba_math import UNSORTED, F, exp, pointer
from tova.layer import LayerState
from tova.policies import contract
from tova.policies.base import Policy
from tova.policies.slots import Slots
from tova.rules.numba_code import Bound
from tova.scan import cpu as scan

# What one call does: everything, on one thread, or, where torch's own products over several threads are faster, what
# comes before and what comes after them. On one thread they take twice as long as those here.
_ALL, _PLACE, _REST = range(3)
_MANY, _THREADS = 1 << 20, 4
"""Numbers in the keys looked at, and torch's threads, from which the two products are left to torch."""


STEP = np.dtype(
    [
        *((size, np.int64) for size in ("batch", "kv_heads", "heads", "size", "width")),  # B, K, H, D and E
        ("room", np.int64),  # slots a layer has room for, and
        ("used", np.int64),  # those that are looked at
        ("kept_sets", np.int64),  # per sequence
        ("step", np.int64),  # the newcomer's column
        # Addresses, 0 for what is not there; float32 in
        *((name, np.int64) for name in ("query", "out")),  # [B, H, D or E]
        *((name, np.int64) for name in ("key", "value")),  # [B, K, D or E]
        *((name, np.int64) for name in ("keys", "values")),  # [B, K, room, D or E]
        ("logits", np.int64),  # [B, H, used], where they are made already
        ("sink_logits", np.int64),  # [H]
        ("held", np.int64),  # uint8 [R, room]
        ("positions", np.int64),  # int64 [R, room], as
        *((name, np.int64) for name in ("start", "observed", "newest")),  # [R]
        ("log", np.int64),  # [R, columns]
        ("columns", np.int64),
        ("scaling", np.float64),
        ("softcap", np.float64),
        ("when", at.WHEN),
    ],
    align=True,
)
"""What one call is told, beside the memory that a rule works in."""


def supports(policy: Policy, dtype: torch.dtype) -> bool:
    """Whether steps of ``policy`` on a model of ``dtype`` are compiled."""
    return dtype == torch.float32 and not policy.reindexes and scan.supports(policy)


def step(query: Tensor, key: Tensor, value: Tensor, state: LayerState, call: Call, used: int) -> Tensor:
    """[B, H, 1, E]: attention of one new token over what is held and itself; the slots move on, in place.

    Args:
        query: float32 [B, H, 1, D], key: [B, K, 1, D], value: [B, K, 1, E].
        state: with a free slot in every row. Only its slots, keys, values and log are written.
        used: look at this many of the first slots; a free one and all that is held must be among them.

    Raises:
        UsageError: what the layer holds is not as its addresses would be read.
    """
    policy, attention, slots = call.policy, call.attention, state.slots
    bound = scan.bound(policy)
    batch, heads, _, size = query.shape
    kv_heads, room = state.keys.shape[1:3]
    width, kept_sets = value.shape[3], state.kept_sets
    query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
    out = query.new_empty(batch, heads, 1, width)
    fresh: tuple[Tensor, ...] = ()
    if bound.features:
        found = call.features(key, value, slots.newest + 1, kept_sets)
        fresh = tuple(found[name].contiguous() for name in bound.features)
    log = None if state.log is None else state.log.evicted_at
    sinks = None if attention.sink_logits is None else attention.sink_logits.detach().float().contiguous()
    _check(torch.float32, query, key, value, state.keys, state.values, sinks, *fresh)
    _check(torch.int64, slots.positions, slots.observed, slots.newest, state.start, log)
    _check(torch.bool, slots.held)
    memory = _memory(slots, bound, fresh)
    watched = policy.watcher is not None
    report = np.zeros(at.REPORT, np.int64)
    told = np.zeros(1, STEP)
    told[0] = (
        batch, kv_heads, heads, size, width, room, used, kept_sets, state.seen,
        query.data_ptr(), out.data_ptr(), key.data_ptr(), value.data_ptr(), state.keys.data_ptr(),
        state.values.data_ptr(), 0, _address(sinks), slots.held.data_ptr(), slots.positions.data_ptr(),
        state.start.data_ptr(), slots.observed.data_ptr(), slots.newest.data_ptr(), _address(log),
        0 if log is None else log.shape[2], attention.scaling, attention.softcap or 0.0,
        (call.schedule.evict_at, call.schedule.leaves, policy.sinks, 0, watched),
    )  # fmt: skip
    logits: Tensor | None = None
    before: Tensor | None = None
    if batch * kv_heads * used * size >= _MANY and torch.get_num_threads() >= _THREADS:
        before = slots.held[:, :used].clone()
        _step(_PLACE, told, bound.call, memory, report)
        logits = attention.logits(query, state.keys[:, :, :used]).contiguous()
        told["logits"] = logits.data_ptr()
    _step(_ALL if logits is None else _REST, told, bound.call, memory, report)
    if watched and report[0]:
        raise contract.reported(policy, report.tolist())
    if logits is not None and before is not None:
        values = state.values[:, :, :used]
        out = attention.mix(logits, None, values)
        if not bool(out.isfinite().all()):
            before |= slots.positions[:, :used] == state.seen - state.start
            out = attention.mix(logits, None, only_seen(values, before))
    return out


def _memory(slots: Slots, bound: Bound, fresh: tuple[Tensor, ...]) -> np.ndarray:
    """int64 [4 x parts]: address of a record or feature, bytes of a row, and of a ring its steps and how far apart they
    are; of a feature the address of the newcomers'."""
    entries: list[int] = []
    for name in bound.records:
        record = slots.records[name]
        _check(record.dtype, record)
        ring = record.shape[1:] if name in slots.rings else (0, 0)
        entries += (record.data_ptr(), record.stride(0) * record.itemsize, *ring)
    for name, new in zip(bound.features, fresh, strict=True):
        feature = slots.features[name]
        if feature.ndim != 2 or new.ndim != 2:
            raise UsageError(f"the compiled step needs the feature {name!r} as a number for each token")
        _check(torch.float32, feature)
        entries += (feature.data_ptr(), feature.stride(0) * feature.itemsize, new.data_ptr(), 0)
    return np.array(entries, np.int64)


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


@jit
def _step(stage, told, rules, memory, report):  # type: ignore[no-untyped-def]
    """Every kept set through one step; see :func:`step`, :data:`STEP`, :data:`tova.kernels.frame.RULE`."""
    t, rule = told[0], rules[0]
    batch, kv_heads, heads, size, width, room, used = t.batch, t.kv_heads, t.heads, t.size, t.width, t.room, t.used
    kept_sets = t.kept_sets
    rows = batch * kept_sets
    shared = heads // kept_sets  # query heads of a kept set
    each = kv_heads // kept_sets  # key/value heads of a kept set
    per = heads // kv_heads  # query heads of a key/value head
    queries = nb.carray(pointer(t.query), (batch, heads, size), np.float32)
    new_keys = nb.carray(pointer(t.key), (batch, kv_heads, size), np.float32)
    new_values = nb.carray(pointer(t.value), (batch, kv_heads, width), np.float32)
    all_keys = nb.carray(pointer(t.keys), (batch, kv_heads, room, size), np.float32)
    all_values = nb.carray(pointer(t.values), (batch, kv_heads, room, width), np.float32)
    out = nb.carray(pointer(t.out), (batch, heads, width), np.float32)
    all_positions = nb.carray(pointer(t.positions), (rows, room), np.int64)
    all_held = nb.carray(pointer(t.held), (rows, room), np.uint8)
    start = nb.carray(pointer(t.start), (rows,), np.int64)
    observed = nb.carray(pointer(t.observed), (rows,), np.int64)
    newest = nb.carray(pointer(t.newest), (rows,), np.int64)
    sink_logits = nb.carray(pointer(t.sink_logits), (heads if t.sink_logits != 0 else 0,), np.float32)
    log = nb.carray(pointer(t.log), (rows if t.log != 0 else 0, t.columns), np.int64)
    given = nb.carray(pointer(t.logits), (batch if t.logits != 0 else 0, heads, used), np.float32)
    scaling, softcap = F(t.scaling), F(t.softcap)
    weights = np.empty((per, used), np.float32)
    turned = np.empty((per, size), np.float32)
    alive = np.empty(used, np.float32)
    attn = np.empty(used, np.float32)
    own = np.empty(1, np.float32)
    rank = np.empty(used, np.int64)
    victims = np.empty(used, np.int64)
    scratch = np.empty(used * rule.scratch, np.float64)
    frame = at.new_frame(rule, attn, own, rank, scratch, UNSORTED)
    frame[at.N] = used
    for r in range(rows):
        b, first = r // kept_sets, (r % kept_sets) * each
        held, positions = all_held[r], all_positions[r]
        position = t.step - start[r]
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
            alive[j] = F(1.0) if held[j] else F(0.0)
            attn[j] = F(0.0)
        alive[slot] = F(1.0)
        share = F(1.0) / F(shared)
        known = True  # whether the row is finite; what is not held may be anything, and is left out
        for c in range(first, first + each):
            if stage == _ALL:
                for g in range(per):
                    for d in range(size):
                        turned[g, d] = queries[b, c * per + g, d] * scaling
                _products(turned, all_keys[b, c], weights)
                if softcap != F(0.0):
                    for g in range(per):
                        for j in range(used):
                            weights[g, j] = softcap * np.tanh(weights[g, j] / softcap)
            else:
                weights = given[b, c * per : (c + 1) * per]
            for g in range(per):
                row = weights[g]
                top = row[slot]
                for j in range(used):
                    top = max(top, row[j] if alive[j] > 0 else top)
                total = F(0.0)
                if len(sink_logits):
                    top = max(top, sink_logits[c * per + g])
                    total = np.exp(sink_logits[c * per + g] - top)
                for j in range(used):
                    x = row[j] - top if alive[j] > 0 else F(-87.0)
                    weight = exp(x) * alive[j]
                    row[j] = weight
                    total += weight
                known = known and not np.isnan(total)
                total = F(1.0) / total
                for j in range(used):
                    row[j] *= total
                if rule.weights:
                    for j in range(used):
                        attn[j] += row[j] * share
            if stage == _ALL:
                mixed = out[b, c * per : (c + 1) * per]
                _mixed(weights, all_values[b, c], mixed)
                if not _finite(mixed):
                    _mixed_of_seen(weights, all_values[b, c], alive, mixed)
        own[0] = attn[slot]
        attn[slot] = F(0.0)
        frame[at.POSITIONS] = positions.ctypes.data
        frame[at.HELD] = held.ctypes.data
        frame[at.COUNT] = count
        frame[at.NEWEST] = newest[r]
        frame[at.OBSERVED] = observed[r]
        for i in range(rule.records):
            part = memory[4 * i : 4 * i + 4]
            frame[at.MEMORY + 3 * i] = part[0] + r * part[1]
            frame[at.MEMORY + 3 * i + 1] = part[2]
            frame[at.MEMORY + 3 * i + 2] = part[3]
        for i in range(rule.features):
            part = memory[4 * (rule.records + i) :]
            frame[at.MEMORY + 3 * rule.records + i] = part[0] + r * part[1]
            feature = nb.carray(pointer(part[0] + r * part[1]), (used,), np.float32)
            feature[slot] = nb.carray(pointer(part[2]), (rows,), np.float32)[r]
        at.join(frame, rule, slot, position, known, held)
        observed[r] = frame[at.OBSERVED]
        newest[r] = position
        dropped = at.evict(frame, rule, t.when, positions, held, rank, victims, report)
        if dropped < 0:
            return 0
        if len(log):
            for v in range(dropped):
                log[r, positions[victims[v]] + start[r]] = t.step
    return len(scratch)  # an array whose address is known but that is named no more would be freed


@jit
def _products(queries, keys, out):  # type: ignore[no-untyped-def]
    """out[g, j] = queries[g] . keys[j]; keys [S, D] may have more slots than ``out`` [per, used]."""
    per, used = out.shape
    size = queries.shape[1]
    for j in range(used):
        entry = keys[j]
        for g in range(per):
            total = F(0.0)
            for d in range(size):
                total += queries[g, d] * entry[d]
            out[g, j] = total


@jit
def _mixed(weights, values, out):  # type: ignore[no-untyped-def]
    """out[g] = sum over j of weights[g, j] values[j]; four entries at a time, since ``out`` is read and written."""
    per, used = weights.shape
    size = values.shape[1]
    out[:] = F(0.0)
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


@strict
def _finite(out):  # type: ignore[no-untyped-def]
    """Whether all of ``out`` [per, width] is finite."""
    others = 0  # counted, since a sum may be reassociated until what is not finite cancels
    for g in range(out.shape[0]):
        for i in range(out.shape[1]):
            others += not np.isfinite(out[g, i])
    return others == 0


@jit
def _mixed_of_seen(weights, values, alive, out):  # type: ignore[no-untyped-def]
    """As :func:`_mixed` of those slots alone that are ``alive``: a weight of 0 does not undo a NaN."""
    per, used = weights.shape
    out[:] = F(0.0)
    for j in range(used):
        if alive[j] > 0:
            for g in range(per):
                a = weights[g, j]
                for i in range(values.shape[1]):
                    out[g, i] += a * values[j, i]
