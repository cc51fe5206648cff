"""The simulation compiled with numba: the built-in policies over a stream of rows, records in float64.

What a policy remembers is kept by position, so nothing moves but the ascending list of held positions.
"""

from __future__ import annotations

import numpy as np

from tova.policies import Policy
from tova.scan import compile as compiled
from tova.scan.cpu import mix, random_key
from tova.scan.modes import LATEST, MODES, OLDEST, RANDOM, RING, SUM, VOTES

_jit = compiled.strict


def supports(policy: Policy) -> bool:
    """Whether this very class is compiled. On a trace tokens have no weight of their own, and no key or value."""
    known = MODES.get(type(policy))
    return known is not None and known[2] is None and not policy.prompt_only and not policy.newest_competes


def run(
    policy: Policy, budget: int, rows: np.ndarray, heavy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Drive ``policy`` over a trace.

    Args:
        rows: float32, all rows one after the other; step t has t weights.
        heavy: int64 [steps, 32], the most-attended positions of each step, -1 where there are fewer.

    Returns:
        mass float64 [steps], hits int64 [steps], evicted_at int64 [steps + 1], and the number of evictions.
    """
    steps = len(heavy)
    mass = np.zeros(steps)
    hits = np.zeros(steps, dtype=np.int64)
    evicted_at = np.full(steps + 1, np.iinfo(np.int64).max)
    calls = _run(
        rows,
        heavy,
        mass,
        hits,
        evicted_at,
        MODES[type(policy)][0],
        budget,
        policy.sinks,
        policy.newest_protected,
        getattr(policy, "obs_window", 1),
        getattr(policy, "pool_kernel", 1),
        random_key(policy),
    )
    return mass, hits, evicted_at, calls


@_jit
def _run(  # type: ignore[no-untyped-def]
    rows, heavy, mass, hits, evicted_at, mode, budget, sinks, recent, window, pool, key
):
    steps = heavy.shape[0]
    record = np.zeros(steps + 1)
    ring = np.zeros((steps + 1 if mode == RING else 0, window), np.float32)
    kept = np.empty(min(budget, steps) + 1, np.int64)
    held = np.zeros(steps + 1, np.bool_)
    score = np.empty(len(kept))
    total = np.empty(len(kept))
    kept[0] = 0
    held[0] = True
    count = 1
    calls = 0
    offset = 0
    for t in range(1, steps + 1):
        row = rows[offset : offset + t]
        offset += t
        found = 0
        for j in heavy[t - 1]:
            found += j >= 0 and held[j]
        hits[t - 1] = found
        retained = 0.0
        for i in range(count):
            retained += row[kept[i]]
        mass[t - 1] = retained
        if mode == LATEST:
            for i in range(count):
                record[kept[i]] = row[kept[i]]
        elif mode == SUM:
            for i in range(count):
                record[kept[i]] += row[kept[i]]
        elif mode == VOTES:
            fair_share = 1.0 / count
            for i in range(count):
                record[kept[i]] += np.float64(row[kept[i]]) > fair_share
        elif mode == RING:
            slot = (t - 1) % window
            for i in range(count):
                ring[kept[i], slot] = row[kept[i]]
        kept[count] = t
        held[t] = True
        count += 1
        if count <= budget:
            continue
        calls += 1
        # At most one position is over the budget, so one victim restores it.
        end = count - recent
        begin = 0
        while begin < end and kept[begin] < sinks:
            begin += 1
        if mode == OLDEST:
            victim = begin
        else:
            if mode == RING:
                _pooled(ring, kept, count, pool, total, score)
            elif mode == RANDOM:
                step = mix((t + key) & 0xFFFFFFFF)
                for i in range(count):
                    score[i] = np.float64(mix((kept[i] + step) & 0xFFFFFFFF))
            else:
                for i in range(count):
                    score[i] = record[kept[i]]
            victim = begin
            for i in range(begin + 1, end):
                if score[i] < score[victim]:
                    victim = i
        position = kept[victim]
        evicted_at[position] = t
        held[position] = False
        count -= 1
        for i in range(victim, count):
            kept[i] = kept[i + 1]
    return calls


@_jit
def _pooled(ring, kept, count, kernel, total, score):  # type: ignore[no-untyped-def]
    for i in range(count):
        entries = ring[kept[i]]
        value = 0.0
        for w in range(len(entries)):
            value += np.float64(entries[w])
        total[i] = value
    radius = kernel // 2
    for i in range(count):
        best = total[i]
        for j in range(max(0, i - radius), min(count, i + radius + 1)):
            best = max(best, total[j])
        score[i] = best
