"""The scan compiled with numba, made from a policy's rule: one kept set at a time, on the CPU.

A row of logits is read once: its maximum over what is held, exponential, sum and mean over heads follow while it is in
cache; then the rule's own code is called by address (:mod:`tova.kernels.frame`), once to update the records and, where
something must go, once to rank. Records are float32 as in the reference scan; ranking is in float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from tova.errors import UsageError
from tova.kernels import frame as at
from tova.kernels.compile import jit
from tova.kernels.numba_math import SORTED, F, exp
from tova.policies import contract
from tova.policies.base import Policy
from tova.policies.slots import Slots
from tova.rules import Rule, how_heads_combine, remembered, rule_of
from tova.rules.numba_code import Bound, bind
from tova.scan.chunk import Chunk, Decision, Scan


def supports(policy: Policy, dtype: torch.dtype = torch.float32) -> bool:
    """Whether the compiled scan runs ``policy`` on a model of ``dtype``: whether its rule is an expression."""
    return bool(remembered(policy, ("scan.cpu", dtype), lambda p: _supports(p, dtype)))


def _supports(policy: Policy, dtype: torch.dtype) -> bool:
    if policy.sees_dropped or policy.uneven or not isinstance(rule_of(policy), Rule):
        return False
    combine = how_heads_combine(policy)
    return combine == "mean" or (combine == "rounded mean" and dtype == torch.float32)


def bound(policy: Policy) -> Bound:
    """The compiled rule of a policy that is supported."""
    rule = rule_of(policy)
    if not isinstance(rule, Rule):
        raise UsageError(f"{policy.name}: {rule.reason}; scan=reference takes any policy")
    return bind(rule)


class Row(NamedTuple):
    """One kept set in a chunk: H_g heads, C steps, N candidates; see :class:`tova.scan.chunk.Chunk`.

    Attributes:
        logits: float32 [H_g, C, N], become undivided weights; sums: float32 [H_g, C], written.
        positions: int64 [N]; held: uint8 [N], updated; last: int64 [N], written.
        allowed: bool [C, N], or [0, 0] if everything is; not_padding: bool [C]; sink_logits: float32 [H_g], or [0].
        memory: int64 [3 x records + features], what a frame holds of it.
        counts: int64 [2], observed and newest, updated.
        report: int64 [REPORT + 1], what went wrong, and in which step.
    """

    logits: np.ndarray
    sums: np.ndarray
    positions: np.ndarray
    held: np.ndarray
    last: np.ndarray
    allowed: np.ndarray
    not_padding: np.ndarray
    sink_logits: np.ndarray
    memory: np.ndarray
    counts: np.ndarray
    report: np.ndarray


def decide(policy: Policy, chunk: Chunk) -> Decision:
    """See :class:`tova.scan.chunk.Scan`; overwrites the logits with the weights it returns."""
    rule = bound(policy)
    logits, slots = chunk.logits.contiguous(), chunk.slots
    rows, heads, steps, candidates = logits.shape
    sums = torch.empty(rows, heads, steps, 1, dtype=torch.float32, device=logits.device)
    last = torch.empty(rows, candidates, dtype=torch.int64, device=logits.device)
    own_memory(slots, rule)
    memory = memory_of(slots, rule)
    held = slots.held.contiguous().numpy().view(np.uint8)
    positions = slots.positions.contiguous().numpy()
    not_padding = (
        np.ones((rows, steps), np.bool_) if chunk.not_padding is None else chunk.not_padding.contiguous().numpy()
    )
    allowed = np.empty((rows, 0, 0), np.bool_) if chunk.allowed is None else chunk.allowed.contiguous().numpy()
    sinks = np.empty((rows, 0), np.float32) if chunk.sink_logits is None else chunk.sink_logits.contiguous().numpy()
    counts = torch.cat([slots.observed, slots.newest], 1).numpy()
    reports = np.zeros((rows, at.REPORT + 1), np.int64)
    watched = policy.watcher is not None
    when = np.array([(chunk.schedule.evict_at, chunk.schedule.leaves, policy.sinks, 0, watched)], at.WHEN)

    def scan_row(r: int) -> None:
        row = Row(
            logits[r].numpy(), sums[r, ..., 0].numpy(), positions[r], held[r], last[r].numpy(), allowed[r],
            not_padding[r], sinks[r], memory[r], counts[r], reports[r],
        )  # fmt: skip
        _scan_row(row, chunk.kept, rule.call, when)

    if chunk.threads is None:
        for r in range(rows):
            scan_row(r)
    else:
        chunk.threads.share(scan_row, [(r,) for r in range(rows)])
    if watched:
        wrong = [r for r in range(rows) if reports[r, 0]]
        if wrong:
            raise contract.reported(policy, reports[min(wrong, key=lambda r: (reports[r, at.REPORT], r))].tolist())
    slots.held = torch.from_numpy(held.view(np.bool_))
    slots.observed, slots.newest = torch.from_numpy(counts[:, :1].copy()), torch.from_numpy(counts[:, 1:].copy())
    return Decision(last, logits, sums)


def own_memory(slots: Slots, bound: Bound) -> None:
    """Let records and features be contiguous, for their addresses are handed on.

    Raises:
        UsageError: a feature is missing, or is not one float32 a slot; a record is of another shape than its rule's.
    """
    for name in bound.records:
        slots.records[name] = slots.records[name].contiguous()
    for name in bound.features:
        feature = slots.features.get(name)
        if feature is None or feature.dtype != torch.float32 or feature.ndim != 2:
            what = "none" if feature is None else f"{str(feature.dtype).removeprefix('torch.')} {[*feature.shape]}"
            raise UsageError(
                f"the compiled scan needs the feature {name!r} as a number for each token, got {what}; scan=reference "
                "takes any"
            )
        slots.features[name] = feature.contiguous()


def memory_of(slots: Slots, bound: Bound) -> np.ndarray:
    """int64 [R, 3 x records + features]: what a frame holds of the memory of each row."""
    rows = len(slots.positions)
    out = np.zeros((rows, 3 * len(bound.records) + len(bound.features)), np.int64)
    each = np.arange(rows)
    for i, name in enumerate(bound.records):
        record = slots.records[name]
        out[:, 3 * i] = record.data_ptr() + each * (record.stride(0) * record.itemsize)
        if name in slots.rings:
            out[:, 3 * i + 1], out[:, 3 * i + 2] = record.shape[1:]
    for i, name in enumerate(bound.features):
        feature = slots.features[name]
        out[:, 3 * len(bound.records) + i] = feature.data_ptr() + each * (feature.stride(0) * feature.itemsize)
    return out


@jit
def _scan_row(row, kept, rules, when):  # type: ignore[no-untyped-def]
    """One kept set through one chunk; see :class:`Row`, :data:`tova.kernels.frame.RULE` and ``WHEN``."""
    logits, held, last, positions, sink_logits = row.logits, row.held, row.last, row.positions, row.sink_logits
    rule = rules[0]
    heads, steps, candidates = logits.shape
    alive = np.zeros(candidates, np.float32)
    attn = np.empty(candidates, np.float32)
    own = np.empty(1, np.float32)
    rank = np.empty(candidates, np.int64)
    victims = np.empty(candidates, np.int64)
    scratch = np.empty(candidates * rule.scratch, np.float64)
    frame = at.new_frame(rule, attn, own, rank, scratch, SORTED)
    frame[at.POSITIONS] = positions.ctypes.data
    frame[at.HELD] = held.ctypes.data
    frame[at.COUNT] = 0
    frame[at.OBSERVED] = row.counts[0]
    frame[at.NEWEST] = row.counts[1]
    for i in range(len(row.memory)):
        frame[at.MEMORY + i] = row.memory[i]
    for j in range(candidates):
        last[j] = -1
        if held[j]:
            alive[j] = F(1.0)
            last[j] = steps
            frame[at.COUNT] += 1
    for i in range(steps):
        m = kept + i + 1
        if not row.not_padding[i]:
            for h in range(heads):
                row.sums[h, i] = F(0.0)
                for j in range(candidates):
                    logits[h, i, j] = F(0.0)
            continue
        if len(row.allowed):
            for j in range(m - 1):  # the layer's own sliding window moves on
                if held[j] and not row.allowed[i, j]:
                    alive[j] = F(0.0)
                    held[j] = 0
                    last[j] = i - 1
                    frame[at.COUNT] -= 1
        alive[m - 1] = F(1.0)
        last[m - 1] = steps
        for j in range(m):
            attn[j] = F(0.0)
        known = True  # whether the row is finite; what is not held may be anything, and is left out
        for h in range(heads):
            line = logits[h, i]
            top = line[m - 1]
            for j in range(m - 1):
                top = max(top, line[j] if alive[j] > 0 else top)
            total = F(0.0)
            if len(sink_logits):
                top = max(top, sink_logits[h])
                total = np.exp(sink_logits[h] - top)
            for j in range(m):
                x = line[j] - top if alive[j] > 0 else F(-87.0)
                weight = exp(x) * alive[j]
                line[j] = weight
                total += weight
            for j in range(m, candidates):
                line[j] = F(0.0)
            row.sums[h, i] = total
            known = known and not np.isnan(total)
            if rule.weights:
                share = F(1.0) / (total * F(heads))
                for j in range(m):
                    attn[j] += line[j] * share
        own[0] = attn[m - 1]
        attn[m - 1] = F(0.0)
        frame[at.N] = m
        at.join(frame, rule, m - 1, positions[m - 1], known, held)
        dropped = at.evict(frame, rule, when[0], positions, held, rank, victims, row.report)
        if dropped < 0:
            row.report[at.REPORT] = i
            return 0
        for v in range(dropped):
            alive[victims[v]] = F(0.0)
            last[victims[v]] = i
    row.counts[0] = frame[at.OBSERVED]
    row.counts[1] = frame[at.NEWEST]
    return len(scratch)  # an array whose address is known but that is named no more would be freed


SCAN = Scan("cpu", decide)
