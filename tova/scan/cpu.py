"""The scan compiled with numba: the built-in policies, re-expressed, on the CPU.

A row of logits is read once: its maximum over what is held, exponential, sum, head average, record update and the
choice of a victim follow while it is in cache. Records are float32 as in the reference scan; ranking is in float64.
"""

from __future__ import annotations

import numba as nb
import numpy as np
import torch
from llvmlite import ir
from numba.extending import intrinsic
from torch import Tensor

from tova.policies import H2OHead, Policy, Random
from tova.scan import Chunk
from tova.scan import compile as compiled
from tova.scan.modes import FEATURE, LATEST, MODES, OLDEST, RANDOM, RING, SUM, VOTES

_jit, _inline, _strict_jit = compiled.jit, compiled.inline, compiled.strict

_F = np.float32
_INF = np.float64(np.inf)
_U32 = np.int64(0xFFFFFFFF)


def supports(policy: Policy, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the compiled scan knows this very class (a subclass may have changed anything)."""
    return type(policy) in MODES and not (policy.rounds_weights and dtype != torch.float32)


def scan(policy: Policy, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`tova.scan.Scan`; overwrites the logits."""
    logits, slots = chunk.logits.contiguous(), chunk.slots
    rows, heads, steps, candidates = logits.shape
    mode, record, feature = MODES[type(policy)]
    sums = torch.empty(rows, heads, steps, 1, dtype=torch.float32, device=logits.device)
    last = torch.empty(rows, candidates, dtype=torch.int64, device=logits.device)
    # The kernel wants the candidates of a ring next to each other.
    rings = slots["ring"].transpose(1, 2).contiguous().numpy() if mode == RING else _nothing(rows, np.float32)
    if record is not None and mode != RING:
        numbers = slots[record].contiguous().numpy()
    else:
        numbers = np.empty((rows, candidates), dtype=np.float32)
    features = slots.features[feature].contiguous().numpy() if feature else np.empty((rows, 0), dtype=np.float32)
    held = slots.held.contiguous().numpy().view(np.uint8)
    positions = slots.positions.contiguous().numpy()
    steps_are_real = np.ones((rows, steps), np.bool_) if chunk.real is None else chunk.real.contiguous().numpy()
    visible = _nothing(rows, np.bool_) if chunk.allowed is None else chunk.allowed.contiguous().numpy()
    sinks = np.empty((rows, 0), np.float32) if chunk.sinks is None else chunk.sinks.contiguous().numpy()
    observed = slots.observed.numpy().copy()
    newest = slots.newest.numpy().copy()

    def row(r: int) -> None:
        observed[r, 0], newest[r, 0] = _scan_row(
            logits[r].numpy(),
            sums[r, ..., 0].numpy(),
            chunk.kept,
            positions[r],
            held[r],
            visible[r],
            steps_are_real[r],
            last[r].numpy(),
            numbers[r],
            features[r],
            rings[r],
            sinks[r],
            observed[r, 0],
            newest[r, 0],
            mode,
            policy.reads_attention,
            policy.newest_competes or isinstance(policy, H2OHead),
            chunk.trigger,
            chunk.remains,
            policy.sinks,
            policy.newest_protected,
            getattr(policy, "pool_kernel", 1),
            random_key(policy),
        )

    if chunk.threads is None:
        for r in range(rows):
            row(r)
    else:
        chunk.threads.share(row, [(r,) for r in range(rows)])
    slots.held = torch.from_numpy(held.view(np.bool_))
    slots.observed = torch.from_numpy(observed) if policy.reads_attention else slots.observed
    slots.newest = torch.from_numpy(newest)
    if mode == RING:
        slots.records["ring"] = torch.from_numpy(rings).transpose(1, 2).contiguous()
    elif record is not None:
        slots.records[record] = torch.from_numpy(numbers)
    return logits, sums, last


def _nothing(rows: int, dtype: type) -> np.ndarray:
    return np.empty((rows, 0, 0), dtype=dtype)


def random_key(policy: Policy) -> int:
    """The seed and layer of a ``random`` policy, mixed; 0 for others."""
    if not isinstance(policy, Random):
        return 0
    return int(mix.py_func((policy.seed * 0x9E3779B9 + policy.layer) & 0xFFFFFFFF))


@intrinsic
def _float_from_bits(typingctx, bits):  # type: ignore[no-untyped-def]
    """Reinterpret an int32 as a float32."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.FloatType())

    return nb.float32(nb.int32), generate


@intrinsic
def _bits_of_float(typingctx, number):  # type: ignore[no-untyped-def]
    """Reinterpret a float32 as an int32."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.IntType(32))

    return nb.int32(nb.float32), generate


# Added to a whole number n it leaves n + 127, a float32's exponent, in the lowest bits: 1.5 * 2**23 + 127. Unlike a
# conversion to an integer that is defined for NaN too.
_EXPONENT = _F(12583039.0)


@_inline
def _exp(x):  # type: ignore[no-untyped-def]
    """exp of a float32 at most 0, within 2 units in the last place; written so that LLVM vectorises it. NaN of NaN.

    Range reduction to |r| <= ln(2)/2 and the minimax polynomial of Cephes' ``expf``.
    """
    x = max(x, _F(-87.0))  # NaN, coming first, stays NaN
    n = np.floor(x * _F(1.4426950408889634) + _F(0.5))
    r = x - n * _F(0.693359375)
    r = r - n * _F(-2.12194440e-4)
    p = _F(1.9875691500e-4)
    p = p * r + _F(1.3981999507e-3)
    p = p * r + _F(8.3334519073e-3)
    p = p * r + _F(4.1665795894e-2)
    p = p * r + _F(1.6666665459e-1)
    p = p * r + _F(5.0000001201e-1)
    p = p * (r * r) + r + _F(1.0)
    return p * _float_from_bits(_bits_of_float(n + _EXPONENT) << nb.int32(23))


@_jit
def _scan_row(  # type: ignore[no-untyped-def]
    logits, sums, kept, positions, held, visible, real, last, numbers, features, ring, head_sinks, observed, newest,
    mode, reads, own, trigger, remains, sinks, recent, pool, key,
):  # fmt: skip
    """One kept set through one chunk; see :class:`tova.scan.Scan` for the meaning of the arrays."""
    heads, steps, candidates = logits.shape
    alive = np.zeros(candidates, np.float32)
    attn = np.empty(candidates, np.float32)
    score = np.empty(candidates, np.float64)
    scratch = np.empty(candidates, np.float64)
    order = np.empty(candidates, np.int64)
    count = 0
    for j in range(candidates):
        last[j] = -1
        if held[j]:
            alive[j] = _F(1.0)
            last[j] = steps
            count += 1
    for i in range(steps):
        m = kept + i + 1
        if not real[i]:
            for h in range(heads):
                sums[h, i] = _F(0.0)
                for j in range(candidates):
                    logits[h, i, j] = _F(0.0)
            continue
        if len(visible):
            for j in range(m - 1):  # the layer's own sliding window moves on
                if alive[j] > 0 and not visible[i, j]:
                    alive[j] = _F(0.0)
                    last[j] = i - 1
                    count -= 1
        alive[m - 1] = _F(1.0)
        last[m - 1] = steps
        for j in range(m):
            attn[j] = _F(0.0)
        known = True  # whether the row is finite; what is not held may be anything, and is left out
        for h in range(heads):
            row = logits[h, i]
            top = row[m - 1]
            for j in range(m - 1):
                top = max(top, row[j] if alive[j] > 0 else top)
            total = _F(0.0)
            if len(head_sinks):
                top = max(top, head_sinks[h])
                total = np.exp(head_sinks[h] - top)
            for j in range(m):
                x = row[j] - top if alive[j] > 0 else _F(-87.0)
                weight = _exp(x) * alive[j]
                row[j] = weight
                total += weight
            for j in range(m, candidates):
                row[j] = _F(0.0)
            sums[h, i] = total
            known = known and not np.isnan(total)
            if reads:
                share = _F(1.0) / (total * _F(heads))
                for j in range(m):
                    attn[j] += row[j] * share
        # What the policy sees: the weights on what was held before the newest token joined, if they are known.
        if mode == LATEST:
            if known:
                for j in range(m - 1):
                    numbers[j] = attn[j]
            numbers[m - 1] = attn[m - 1] if own and known else _F(np.nan)
        elif mode == SUM:
            if known:
                for j in range(m - 1):
                    numbers[j] += attn[j]
            numbers[m - 1] = attn[m - 1] if own and known else _F(0.0)
        elif mode == VOTES:
            fair_share = 1.0 / max(count, 1)
            if known:
                for j in range(m - 1):
                    if alive[j] > 0 and np.float64(attn[j]) > fair_share:
                        numbers[j] += _F(1.0)
            numbers[m - 1] = _F(0.0)
        elif mode == RING:
            if known:
                slot = ring[observed % ring.shape[0]]
                for j in range(m - 1):
                    slot[j] = attn[j]
            for w in range(ring.shape[0]):
                ring[w, m - 1] = _F(0.0)
        if known:
            observed += 1
        count += 1
        newest = positions[m - 1]
        if count >= trigger:
            if mode == OLDEST:
                for j in range(m):
                    score[j] = np.float64(j)
            elif mode == RING:
                _pooled(ring, alive, m, pool, score, scratch, order)
            elif mode == RANDOM:
                step = mix((newest + key) & _U32)
                for j in range(m):
                    score[j] = np.float64(mix((positions[j] + step) & _U32))
            elif mode == FEATURE:
                for j in range(m):
                    score[j] = -np.float64(features[j])
            elif len(features):
                for j in range(m):
                    score[j] = np.float64(numbers[j] * features[j])
            else:
                for j in range(m):
                    score[j] = np.float64(numbers[j])
            first_recent = m
            left = recent
            while left > 0 and first_recent > 0:
                first_recent -= 1
                if alive[first_recent] > 0:
                    left -= 1
            count -= _drop(score, alive, positions, last, i, first_recent, m, sinks, count - remains)
    for j in range(candidates):
        held[j] = 1 if alive[j] > 0 else 0
    return observed, newest


@_strict_jit
def _drop(score, alive, positions, last, step, end, m, sinks, excess):  # type: ignore[no-untyped-def]
    """Drop the ``excess`` lowest scores among the unprotected before index ``end``; returns how many were.

    A score that is NaN is none. Where there are too few, the oldest of all ``m`` that are no sinks go.
    """
    dropped = 0
    for _ in range(excess):
        lowest = _INF
        for j in range(end):
            candidate = alive[j] > 0 and positions[j] >= sinks
            lowest = min(lowest, score[j] if candidate else _INF)
        victim = -1
        for j in range(end):
            if alive[j] > 0 and positions[j] >= sinks and score[j] == lowest:
                victim = j
                break
        if victim < 0:
            for j in range(m):
                if alive[j] > 0 and positions[j] >= sinks:
                    victim = j
                    break
        if victim < 0:
            break
        alive[victim] = _F(0.0)
        last[victim] = step
        dropped += 1
    return dropped


@_strict_jit
def _pooled(ring, alive, m, kernel, score, total, order):  # type: ignore[no-untyped-def]
    """score[j] of each held candidate: the maximum window sum over ``kernel`` adjacent held candidates."""
    for j in range(m):
        total[j] = 0.0
    for w in range(ring.shape[0]):
        for j in range(m):
            total[j] += np.float64(ring[w, j])
    count = 0
    for j in range(m):
        if alive[j] > 0:
            order[count] = j
            count += 1
    pool_in_order(total, order, count, kernel, score)


@_strict_jit
def pool_in_order(total, order, count, kernel, score):  # type: ignore[no-untyped-def]
    """score[j] of the ``count`` entries in ``order``: the maximum of ``total`` over ``kernel`` neighbours there."""
    radius = kernel // 2
    for a in range(count):
        best = total[order[a]]
        for b in range(max(0, a - radius), min(count, a + radius + 1)):
            best = max(best, total[order[b]])
        score[order[a]] = best


@_strict_jit
def mix(z):  # type: ignore[no-untyped-def]
    """The finaliser of splitmix32, as in ``tova.policies.random``."""
    z ^= z >> 16
    z = (z * 0x21F0AAAD) & 0xFFFFFFFF
    z ^= z >> 15
    z = (z * 0x735A2D97) & 0xFFFFFFFF
    return z ^ (z >> 15)
