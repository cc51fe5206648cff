"""How a kernel calls a rule: a frame of int64 numbers, and what goes by the ranks that a rule gives.

A rule is two C functions (:mod:`tova.rules.numba_code`), each of the address of a frame that describes one kept set:

    step   what a step makes of the records: they observe it, if it is known, and the newcomer's are set
    rank   float64 scores, NaN for what is no candidate (empty, protected, or without a score), and how many there are

Slots 0 to ``N`` - 1 are looked at, in any order, held or not. ``step`` is called before the newcomer is held, counted
and ``NEWEST``; ``rank`` afterwards.
"""

from __future__ import annotations

from typing import NamedTuple

import numba as nb
import numpy as np

from tova.kernels import numba_math as nm
from tova.kernels.compile import strict
from tova.kernels.numba_math import SORTED, call, oldest, pointer

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
    SCORE,          # float64 [N], written by rank
    SCRATCH,        # 8 bytes x N, as often as the rule asks for
    INTS,           # int64, the rule's numbers
    FLOATS,         # float64
    CANDIDATES,     # written by rank: how many there are
    UNRANKED,       # written by rank: how many are held and unprotected, but have no score
    FIRST,          # written by rank: the first slot of those, -1 if there is none
    MEMORY,         # from here on: three numbers per record, its address, and of a ring how many steps it holds and how
                    # far apart they are; then the addresses of features, float32 [N]
) = range(20)  # fmt: skip


class RuleCall(NamedTuple):
    """A rule as kernels take it.

    Attributes:
        step, rank: addresses of its functions.
        ints, floats: addresses of its numbers.
        scratch: arrays to work in.
        records, features: how many there are.
        reads: whether a step counts as observed.
        weights: whether combined weights are needed.
    """

    step: int
    rank: int
    ints: int
    floats: int
    scratch: int
    records: int
    features: int
    reads: bool
    weights: bool


class When(NamedTuple):
    """When something is dropped, and who is told.

    Attributes:
        evict_at: in the step after which so many would be held.
        leaves: how many remain.
        sinks: positions below are dropped by no default.
        watched: whether to report what is not ranked, and too few candidates; ``first`` is the position of the first
            token that observes a step.
    """

    evict_at: int
    leaves: int
    sinks: int
    watched: bool
    first: int


# A report, int64 [REPORT]: what went wrong (one of these; 0 is nothing) at which step, and numbers for a sentence.
REPORT = 5
UNRANKED_POSITION = 1  # the newest position, the position that is not ranked
TOO_FEW = 2  # the newest position, candidates, how many are held, how many must go


@strict
def new_frame(rule):  # type: ignore[no-untyped-def]
    """A frame with what does not change."""
    frame = np.zeros(MEMORY + 3 * rule.records + rule.features, np.int64)
    frame[INTS] = rule.ints
    frame[FLOATS] = rule.floats
    return frame


@strict
def address_of(frame):  # type: ignore[no-untyped-def]
    """Of a frame."""
    return np.int64(frame.ctypes.data)


@strict
def check(frame, rule, when, positions, held, report):  # type: ignore[no-untyped-def]
    """Rank and report what is held, unprotected and has no score; true if nothing is. ``features`` is how many."""
    n = frame[N]
    call(rule.rank, address_of(frame))
    if frame[UNRANKED] == 0 or excused(frame, rule, when, held):
        return True
    report[0] = UNRANKED_POSITION
    report[1] = frame[NEWEST]
    report[2] = positions[frame[FIRST]]
    return n < 0


@strict
def excused(frame, rule, when, held):  # type: ignore[no-untyped-def]
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


@strict
def drop(frame, rule, when, excess, positions, held, score, victims, report):  # type: ignore[no-untyped-def]
    """Choose and free ``excess`` slots, noted in ``victims``; how many were, or -1 if something is reported.

    Where there are fewer candidates, all of them go, and then the oldest that are no sinks.
    """
    n = frame[N]
    call(rule.rank, address_of(frame))
    if when.watched and frame[CANDIDATES] < excess and not excused(frame, rule, when, held):
        report[0] = TOO_FEW
        report[1] = frame[NEWEST]
        report[2] = frame[CANDIDATES]
        report[3] = frame[COUNT]
        report[4] = excess
        return -1
    sorted = frame[ORDERING] == SORTED
    for dropped in range(excess):
        victim = nm.lowest(score, positions, n, sorted)
        if victim < 0:
            victim = oldest(held, positions, n, when.sinks)
        if victim < 0:
            return dropped
        score[victim] = np.nan
        held[victim] = 0
        victims[dropped] = victim
    return excess
