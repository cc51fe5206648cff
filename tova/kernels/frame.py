"""How a kernel calls a rule: a frame of int64 numbers, and what goes by the ranks that a rule gives.

A rule is two C functions (:mod:`tova.rules.numba_code`), each of the address of a frame that describes one kept set:

    step   what a step makes of the records: they observe it, if it is known, and the newcomer's are set
    rank   ranks, the lowest of which goes first, of the slots that may go, and how many these are

Slots 0 to ``N`` - 1 are looked at, in any order, held or not. ``step`` is called before the newcomer is held, counted
and ``NEWEST``; ``rank`` afterwards. A kernel sets what a frame begins with, calls :func:`join` and :func:`evict` once a
step, and reads ``COUNT``, ``NEWEST`` and ``OBSERVED`` in the frame alone.
"""

from __future__ import annotations

import numba as nb
import numpy as np

from tova.kernels.compile import strict
from tova.kernels.numba_math import NOWHERE, SORTED, call, lowest, oldest, pointer

# What is where in a frame. Arrays are addresses; dtype is the rule's working dtype.
(
    N,              # slots that are looked at
    POSITIONS,      # int64 [N]
    HELD,           # uint8 [N]
    WEIGHT,         # dtype [N], what the newcomer's query gave to each slot, 0 where it is empty
    SELF_WEIGHT,    # dtype [1], what it gave to itself; address 0 where tokens do not attend to themselves
    KNOWN,          # 0 if the step's weights are not finite
    SLOT,           # the newcomer's
    COUNT,          # how many are held
    NEWEST,         # position of the newest held
    OBSERVED,       # steps observed so far
    ORDERING,       # UNSORTED, SORTED or LISTED
    ORDER,          # int64 [COUNT], the held slots by position, where ORDERING is LISTED
    RANK,           # int64 [N], written by rank: in order of scores, NOWHERE for what is empty, protected or has none
    SCRATCH,        # 8 bytes x N, as often as the rule asks for
    INTS,           # int64, the rule's numbers
    FLOATS,         # float64
    CANDIDATES,     # written by rank: how many there are
    UNRANKED,       # written by rank: how many are held and unprotected, but have no score
    FIRST,          # written by rank: the first slot of those, -1 if there is none
    MEMORY,         # from here on: three numbers per record, its address, and of a ring how many steps it holds and how
                    # far apart they are; then the addresses of features, float32 [N]
) = range(20)  # fmt: skip


RULE = np.dtype(
    [
        ("step", np.int64),  # address of its functions
        ("rank", np.int64),
        ("ints", np.int64),  # address of its numbers
        ("floats", np.int64),
        ("scratch", np.int64),  # arrays to work in
        ("records", np.int64),  # how many there are
        ("features", np.int64),
        ("reads", np.bool_),  # whether a step counts as observed
        ("weights", np.bool_),  # whether combined weights are needed
    ],
    align=True,
)
"""A rule as kernels take it, in an array of one: numbers in an array are handed over in a tenth of a tuple's time."""

WHEN = np.dtype(
    [
        ("evict_at", np.int64),  # something is dropped in the step after which so many would be held
        ("leaves", np.int64),  # how many remain
        ("sinks", np.int64),  # positions below are dropped by no default
        ("first", np.int64),  # the position of the first token that observes a step
        ("watched", np.bool_),  # whether to report what is not ranked, and too few candidates
    ],
    align=True,
)
"""When something is dropped, and who is told."""

# A report, int64 [REPORT]: what went wrong (one of these; 0 is nothing) at which step, and numbers for a sentence.
REPORT = 5
UNRANKED_POSITION = 1  # the newest position, the position that is not ranked
TOO_FEW = 2  # the newest position, candidates, how many are held, how many must go


@strict
def new_frame(rule, weight, self_weight, rank, scratch, ordering):  # type: ignore[no-untyped-def]
    """A frame with what does not change; the arrays have to live as long."""
    frame = np.zeros(MEMORY + 3 * rule.records + rule.features, np.int64)
    frame[INTS] = rule.ints
    frame[FLOATS] = rule.floats
    frame[WEIGHT] = weight.ctypes.data
    frame[SELF_WEIGHT] = self_weight.ctypes.data if len(self_weight) else 0
    frame[RANK] = rank.ctypes.data
    frame[SCRATCH] = scratch.ctypes.data
    frame[ORDERING] = ordering
    return frame


@strict
def address_of(frame):  # type: ignore[no-untyped-def]
    """Of a frame."""
    return np.int64(frame.ctypes.data)


@strict
def join(frame, rule, slot, position, known, held):  # type: ignore[no-untyped-def]
    """The newcomer in ``slot`` joins: the records observe its step, if that is ``known``, and it is held."""
    frame[KNOWN] = known
    frame[SLOT] = slot
    call(rule.step, address_of(frame))
    frame[OBSERVED] += rule.reads and known
    frame[COUNT] += 1
    frame[NEWEST] = position
    held[slot] = 1


@strict
def evict(frame, rule, when, positions, held, rank, victims, report):  # type: ignore[no-untyped-def]
    """Free what must go now, noted in ``victims``; how many slots that is, or -1 if something is reported.

    Where there are fewer candidates than must go, all of them do, and then the oldest that are no sinks.
    """
    n, excess = frame[N], frame[COUNT] - when.leaves
    due = frame[COUNT] >= when.evict_at
    if not due and not when.watched:
        return 0
    call(rule.rank, address_of(frame))
    if when.watched and not _keeps_contract(frame, rule, when, positions, held, report, excess if due else 0):
        return -1
    if not due:
        return 0
    for dropped in range(excess):
        victim = lowest(rank, positions, n, frame[ORDERING] == SORTED)
        if victim < 0:
            victim = oldest(held, positions, n, when.sinks)
        if victim < 0:
            return dropped
        rank[victim] = NOWHERE
        held[victim] = 0
        victims[dropped] = victim
        frame[COUNT] -= 1
    return excess


@strict
def _keeps_contract(frame, rule, when, positions, held, report, excess):  # type: ignore[no-untyped-def]
    """Whether all that is held and unprotected has a rank, and ``excess`` of them can go; else a report."""
    if (frame[UNRANKED] == 0 and frame[CANDIDATES] >= excess) or _excused(frame, rule, when, held):
        return True
    report[1] = frame[NEWEST]
    if frame[UNRANKED] != 0:
        report[0] = UNRANKED_POSITION
        report[2] = positions[frame[FIRST]]
    else:
        report[0] = TOO_FEW
        report[2] = frame[CANDIDATES]
        report[3] = frame[COUNT]
        report[4] = excess
    return False


@strict
def _excused(frame, rule, when, held):  # type: ignore[no-untyped-def]
    """Whether something about this kept set was not known, so that a policy may not know either."""
    if rule.reads and frame[OBSERVED] < frame[NEWEST] + 1 - when.first:
        return True
    n = frame[N]
    for f in range(rule.features):
        feature = nb.carray(pointer(frame[MEMORY + 3 * rule.records + f]), (n,), np.float32)
        for j in range(n):
            if held[j] and not np.isfinite(feature[j]):
                return True
    return False
