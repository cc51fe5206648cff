"""The simulation compiled with numba, made from a policy's rule: a stream of rows, records in float64.

Held positions stay in their slots; a list of the slots by position moves instead. The rule's own code is called by
address once a step, and once more where something must go (:mod:`tova.kernels.frame`).
"""

from __future__ import annotations

import numpy as np
import torch

from tova.errors import UsageError
from tova.kernels import frame as at
from tova.kernels.compile import strict
from tova.kernels.numba_math import LISTED
from tova.policies import contract
from tova.policies.base import Policy
from tova.policies.slots import Slots
from tova.policies.steps import is_own, new_records, ring_names
from tova.rules import Rule, rule_of
from tova.rules.numba_code import bind
from tova.scan.cpu import memory_of

_PROTECTED = -1  # in a report: how many are protected


def supports(policy: Policy) -> bool:
    """Whether ``policy`` is compiled. On a trace tokens have no weight of their own, and no key or value."""
    if policy.wants_features or policy.prompt_only or policy.uneven or type(policy).start is not Policy.start:
        return False
    return isinstance(rule_of(policy, torch.float64), Rule)


def run(
    policy: Policy, budget: int, rows: np.ndarray, heavy: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    """Drive ``policy`` over a trace.

    Args:
        rows: float32, all rows one after the other; step t has t weights.
        heavy: int64 [steps, 32], the most-attended positions of each step, -1 where there are fewer.

    Returns:
        mass float64 [steps], hits int64 [steps], evicted_at int64 [steps + 1], and the number of evictions.

    Raises:
        UsageError: more positions are protected than may remain, or a policy of one's own does not keep the contract.
    """
    rule = rule_of(policy, torch.float64)
    if not isinstance(rule, Rule):
        raise UsageError(f"{policy.name}: {rule.reason}; engine=stepwise takes any policy")
    bound = bind(rule)
    leaves = policy.evicts_to(budget)
    if leaves > budget:
        raise UsageError(f"{policy.name}: an eviction leaves {leaves} positions, more than budget={budget}")
    steps = len(heavy)
    room = min(budget, steps) + 1
    mass, hits = np.zeros(steps), np.zeros(steps, dtype=np.int64)
    evicted_at = np.full(steps + 1, np.iinfo(np.int64).max)
    report = np.zeros(at.REPORT, np.int64)
    zero = torch.zeros(1, room, dtype=torch.int64, device="cpu")
    records = new_records(policy, 1, room, torch.float64, "cpu")
    slots = Slots(zero, zero.bool(), records, zero[:, :1], zero[:, :1], rings=ring_names(policy))
    calm = (budget + 1, leaves, policy.sinks, 1, False)
    when = np.array([calm, (*calm[:4], is_own(policy))], at.WHEN)
    memory = memory_of(slots, bound)[0]
    calls = _run(rows, heavy, mass, hits, evicted_at, bound.call, when, contract.STEPS, memory, report)
    if report[0] == _PROTECTED:
        raise UsageError(f"{policy.name}: {report[1]} positions are protected, more than the {leaves} that may remain")
    if report[0]:
        raise contract.reported(policy, report.tolist())
    return mass, hits, evicted_at, calls


@strict
def _run(  # type: ignore[no-untyped-def]
    rows, heavy, mass, hits, evicted_at, rules, whens, watched_steps, memory, report
):
    """See :func:`run`; ``memory`` is int64 [parts], what a frame holds of the records.

    ``whens`` are of ``frame.WHEN``: the usual, and that of the first steps and of the first eviction.
    """
    rule, calm, watched = rules[0], whens[0], whens[1]
    steps = heavy.shape[0]
    room = min(calm.evict_at - 1, steps) + 1
    positions = np.zeros(room, np.int64)
    held = np.zeros(room, np.uint8)
    order = np.empty(room, np.int64)  # the held slots by position
    free = np.arange(room)[::-1].copy()  # the last of the first room - count is taken next
    attn = np.zeros(room)
    rank = np.empty(room, np.int64)
    victims = np.empty(room, np.int64)
    scratch = np.empty(room * rule.scratch)
    there = np.zeros(steps + 1, np.bool_)  # by position
    frame = at.new_frame(rule, attn, attn[:0], rank, scratch, LISTED)
    frame[at.POSITIONS] = positions.ctypes.data
    frame[at.HELD] = held.ctypes.data
    frame[at.ORDER] = order.ctypes.data
    for i in range(len(memory)):
        frame[at.MEMORY + i] = memory[i]
    order[0] = 0
    held[0] = 1
    there[0] = True
    frame[at.COUNT] = 1
    used = 1  # slots that were ever taken
    calls = 0
    offset = 0
    for t in range(1, steps + 1):
        row = rows[offset : offset + t]
        offset += t
        found = 0
        for j in heavy[t - 1]:
            found += j >= 0 and there[j]
        hits[t - 1] = found
        count = frame[at.COUNT]
        retained = 0.0
        for i in range(count):
            weight = np.float64(row[positions[order[i]]])
            attn[order[i]] = weight
            retained += weight
        mass[t - 1] = retained
        slot = free[room - count - 1]
        used = max(used, slot + 1)
        attn[slot] = 0.0
        positions[slot] = t
        order[count] = slot
        there[t] = True
        frame[at.N] = used
        at.join(frame, rule, slot, t, np.isfinite(retained), held)
        count += 1
        when = watched if t <= watched_steps or calls == 0 else calm
        dropped = at.evict(frame, rule, when, positions, held, rank, victims, report)
        if count >= calm.evict_at:
            calls += 1
            open = frame[at.CANDIDATES] + frame[at.UNRANKED]
            if report[0] != at.UNRANKED_POSITION and open < count - calm.leaves:
                report[0] = _PROTECTED
                report[1] = count - open
        if report[0] != 0:
            return calls
        if dropped == 0:
            continue
        for v in range(dropped):
            position = positions[victims[v]]
            evicted_at[position] = t
            there[position] = False
            attn[victims[v]] = 0.0
            free[room - count + v] = victims[v]
        _close(order, count, held, positions, victims[0], dropped)
    return calls + 0 * len(scratch)  # an array whose address is known but that is named no more would be freed


@strict
def _close(order, count, held, positions, victim, dropped):  # type: ignore[no-untyped-def]
    """Close the gaps that ``dropped`` slots, of which ``victim`` is one, leave among the first ``count`` of a list."""
    if dropped > 1:
        kept = 0
        for i in range(count):
            order[kept] = order[i]
            kept += held[order[i]]
        return
    first, behind = 0, count  # the list is by position: halve it
    while behind - first > 1:
        middle = (first + behind) // 2
        if positions[order[middle]] <= positions[victim]:
            first = middle
        else:
            behind = middle
    for i in range(first, count - 1):
        order[i] = order[i + 1]
