"""What the Triton kernels have in common: softmax over heads, and the operations of a rule.

Every function here is called from a kernel. A row is one kept set; a program holds its slots in registers, ``[BLOCK]``
of them, of which those ``inside`` exist. Without a GPU all of it runs in Triton's interpreter (``TRITON_INTERPRET=1``
before Triton is imported), slowly.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
HIGHEST_LOGARITHM = tl.constexpr(80.0)
"""Of the largest weight that something not counted in a softmax may get, as in :mod:`tova.scan.fixed_point`."""
LAST_POSITION = tl.constexpr(torch.iinfo(torch.int64).max)
FIRST_INTEGER = tl.constexpr(torch.iinfo(torch.int64).min)


class Softmax(NamedTuple):
    """What a raw product of queries and keys is put through; see :class:`tova.layer.Attention`."""

    scaling: Any
    softcap: Any
    """None leaves logits as they are."""
    sink_logits: Any
    """Pointer to float32 [R, H_g]; None without."""


class Rule(NamedTuple):
    """A policy's rule as a kernel takes it: functions that :mod:`tova.rules.triton_code` has made, and its numbers."""

    ints: Any
    """Pointer to int64."""
    floats: Any
    """Pointer to float64."""
    numbers: Any
    """``numbers(ints, floats)``: all of them, loaded once."""
    observe: Any
    """``observe(weight, slots, numbers)``: the records and the rings' newest entries after a step. None, as ``admit``,
    if no weight is read."""
    admit: Any
    """``admit(self_weight, numbers)``: the records and the rings' newest entries that a token joins with."""
    fill: Any
    """``fill(numbers)``: the records it joins with if its own weight does not count or is not known."""
    rank: Any
    """``rank(slots, numbers)``: the score, and which slots may go."""


class Slots(NamedTuple):
    """One row as the functions of a rule see it."""

    index: Any
    """int32 [BLOCK]"""
    inside: Any
    """bool [BLOCK]"""
    position: Any
    """int64 [BLOCK]"""
    held: Any
    """bool [BLOCK]"""
    records: Any
    """A tuple of [BLOCK]."""
    features: Any
    """A tuple of [BLOCK]."""
    rings: Any
    """A tuple of pointers to this row's entries [W, S] of each ring."""
    widths: Any
    """A tuple, W of each ring."""
    stride: Any
    """S, from one step's entries to the next's."""
    count: Any
    """int64"""
    newest: Any
    """int64"""
    observed: Any
    """int64"""
    scratch: Any
    """Pointers to an int64 and a float64 per slot, to put them in order; None if the rule does not ask for order."""
    ordered: Any
    """Whether slots are in position order."""


# -- weights ---------------------------------------------------------------------------------------------------------


@triton.jit
def finished(x, softmax):  # type: ignore[no-untyped-def]
    """float32 logits of a raw product."""
    x = x.to(tl.float32) * softmax.scaling
    if softmax.softcap is not None:
        x = softmax.softcap * (1.0 - 2.0 / (tl.exp(2.0 * x / softmax.softcap) + 1.0))  # softcap * tanh(x / softcap)
    return x


@triton.jit
def tile_of_logits(logits, row, step, first, loadable, heads, steps, candidates, BLOCK_H: tl.constexpr):  # type: ignore[no-untyped-def]
    """[BLOCK_H, BLOCK]: the logits [R, H_g, C, N] of one query as they are stored, of the heads from ``first`` on."""
    n = tl.arange(0, loadable.shape[0])
    h = first + tl.arange(0, BLOCK_H)
    at = ((row * heads + h.to(tl.int64)) * steps + step) * candidates
    return tl.load(logits + at[:, None] + n[None, :], mask=(h < heads)[:, None] & loadable[None, :], other=0.0)


@triton.jit
def sum_over_heads(x, row, first, seen, loadable, heads, softmax, OTHERS: tl.constexpr):  # type: ignore[no-untyped-def]
    """float32 [BLOCK]: weights of a :func:`tile_of_logits`, see :func:`mean_over_heads`."""
    h = first + tl.arange(0, x.shape[0])
    there = h < heads
    x = tl.where(there[:, None] & loadable[None, :], finished(x, softmax), -INF)
    if OTHERS:
        top = tl.max(tl.where(seen[None, :], x, -INF), 1)
    else:
        x = tl.where(seen[None, :], x, -INF)
        top = tl.max(x, 1)
    if softmax.sink_logits is not None:
        sink = tl.load(softmax.sink_logits + row * heads + h, mask=there, other=-INF)
        top = tl.maximum(top, sink)
    top = tl.maximum(top, LOWEST)
    if OTHERS:
        above = x - top[:, None]
        # A minimum may be of NaN what is not.
        weight = tl.exp(tl.where(above > HIGHEST_LOGARITHM, HIGHEST_LOGARITHM, above))
        total = tl.sum(tl.where(seen[None, :], weight, 0.0), 1)
    else:
        weight = tl.exp(x - top[:, None])
        total = tl.sum(weight, 1)
    if softmax.sink_logits is not None:
        total += tl.exp(sink - top)
    total = tl.where(there, total, 1.0)  # there it may be NaN or 0, and what is divided by it is NaN
    return tl.sum(weight / total[:, None], 0)


@triton.jit
def mean_over_heads(  # type: ignore[no-untyped-def]
    logits, row, step, seen, loadable, heads, steps, candidates, softmax, OTHERS: tl.constexpr, BLOCK_H: tl.constexpr
):
    """float32 [BLOCK]: weights of one query beside what is ``seen``, their mean over heads.

    Zero elsewhere, or, with ``OTHERS``, what the other ``loadable`` ones would weigh with the same sums. What is
    loadable is known earlier than what is seen, so loads need not wait. NaN everywhere if what a head sees is not
    finite, or if it sees nothing.
    """
    total = tl.zeros([loadable.shape[0]], tl.float32)
    for first in range(0, heads, BLOCK_H):
        x = tile_of_logits(logits, row, step, first, loadable, heads, steps, candidates, BLOCK_H)
        total += sum_over_heads(x, row, first, seen, loadable, heads, softmax, OTHERS)
    return total / heads


# -- tuples of numbers per slot --------------------------------------------------------------------------------------


@triton.jit
def load_each(pointers, at, mask):  # type: ignore[no-untyped-def]
    """What is at ``pointers + at``, a tuple; bools, which are bytes in memory, as such."""
    out = ()
    for i in tl.static_range(len(pointers)):
        found = tl.load(pointers[i] + at, mask=mask, other=0)
        out += (found,)  # type: ignore[assignment]
    return out


@triton.jit
def store_each(pointers, at, values, mask):  # type: ignore[no-untyped-def]
    for i in tl.static_range(len(pointers)):
        tl.store(pointers[i] + at, values[i].to(pointers[i].dtype.element_ty), mask=mask)


@triton.jit
def where_each(condition, values, others):  # type: ignore[no-untyped-def]
    """``tl.where`` of two tuples; values may be one number, and are stored as what they take the place of."""
    out = ()
    for i in tl.static_range(len(others)):
        out += (tl.where(condition, values[i].to(others[i].dtype), others[i]),)  # type: ignore[assignment]
    return out


@triton.jit
def spread(x, slots):  # type: ignore[no-untyped-def]
    """[BLOCK]: a number of the row at every slot."""
    return tl.where(slots.inside, x, x)


# -- operations of a rule --------------------------------------------------------------------------------------------


@triton.jit
def minimum(a, b):  # type: ignore[no-untyped-def]
    """The lower; NaN if either is."""
    return tl.where((a < b) | (a != a), a, b)


@triton.jit
def maximum(a, b):  # type: ignore[no-untyped-def]
    """The higher; NaN if either is."""
    return tl.where((a > b) | (a != a), a, b)


@triton.jit
def remainder(a, b):  # type: ignore[no-untyped-def]
    """As torch has it: with the sign of the divisor."""
    rest = a % b
    return tl.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)


@triton.jit
def floor_divide(a, b):  # type: ignore[no-untyped-def]
    """Of integers, rounded down."""
    return a // b - ((a % b != 0) & ((a < 0) != (b < 0))).to(tl.int64)


@triton.jit
def divide(a, b):  # type: ignore[no-untyped-def]
    """Of floats, correctly rounded."""
    if a.dtype == tl.float32:
        out = tl.div_rn(a, b)
    else:
        out = a / b
    return out


@triton.jit
def square_root(a):  # type: ignore[no-untyped-def]
    """Of floats, correctly rounded."""
    if a.dtype == tl.float32:
        out = tl.sqrt_rn(a)
    else:
        out = tl.sqrt(a)
    return out


@triton.jit
def row_sum(x, slots):  # type: ignore[no-untyped-def]
    return tl.sum(tl.where(slots.inside, x, 0), 0)


@triton.jit
def row_max(x, slots):  # type: ignore[no-untyped-def]
    """The highest; NaN if any is."""
    if x.dtype == tl.int64:
        out = tl.max(tl.where(slots.inside, x, FIRST_INTEGER), 0)
    else:
        highest = tl.max(tl.where(slots.inside & (x == x), x, -INF), 0)
        strange = tl.max((slots.inside & (x != x)).to(tl.int32), 0)
        out = tl.where(strange != 0, float("nan"), highest)
    return out


@triton.jit
def row_min(x, slots):  # type: ignore[no-untyped-def]
    """The lowest; NaN if any is."""
    if x.dtype == tl.int64:
        out = tl.min(tl.where(slots.inside, x, LAST_POSITION), 0)
    else:
        out = -row_max(-x, slots)
    return out


@triton.jit
def recent_floor(n, slots, JOINED: tl.constexpr):  # type: ignore[no-untyped-def]
    """int64: a position with the ``n`` newest held at or above it and no others; the last there is if ``n`` <= 0.

    ``JOINED``: the newest token is held.
    """
    floor = tl.where(n > 0, slots.newest - n + 1, LAST_POSITION)
    if JOINED:
        search = n > 1
    else:
        search = n > 0
    if search:
        wanted = tl.minimum(n, slots.count)
        found = tl.sum((slots.held & (slots.position >= floor)).to(tl.int64), 0)
        while found < wanted:  # so many more are at least as many positions lower, and none of them is in a gap
            below = tl.max(tl.where(slots.held & (slots.position < floor), slots.position, -1), 0)
            floor = tl.minimum(floor - (wanted - found), below)
            found = tl.sum((slots.held & (slots.position >= floor)).to(tl.int64), 0)
    return floor


@triton.jit
def ranks(slots):  # type: ignore[no-untyped-def]
    """int32 [BLOCK]: how many held positions are lower, of the held ones."""
    if slots.ordered:
        rank = tl.cumsum(slots.held.to(tl.int32), 0) - 1
    else:
        placed = slots.scratch[0]
        tl.store(placed + slots.index, tl.where(slots.held, slots.position, LAST_POSITION), mask=slots.inside)
        tl.debug_barrier()
        rank = tl.zeros_like(slots.index)
        for n in tl.range(0, tl.sum(slots.inside.to(tl.int32), 0), loop_unroll_factor=8):
            rank += (tl.load(placed + n) < slots.position).to(tl.int32)
        tl.debug_barrier()
    return rank


@triton.jit
def max_pool(x, kernel, rank, slots):  # type: ignore[no-untyped-def]
    """The highest of the ``kernel`` adjacent held positions centred on each; NaN if one is."""
    dense = slots.scratch[1]
    tl.store(dense + rank, x.to(tl.float64), mask=slots.held)
    tl.debug_barrier()
    out = tl.full(x.shape, -INF, tl.float64)
    for d in range(kernel.to(tl.int32)):
        near = rank + (d - kernel.to(tl.int32) // 2)
        there = slots.held & (near >= 0) & (near < slots.count)
        out = maximum(out, tl.load(dense + near, mask=there, other=-INF))
    tl.debug_barrier()
    return out.to(x.dtype)


@triton.jit
def average_pool(x, kernel, rank, slots):  # type: ignore[no-untyped-def]
    """The sum over ``kernel`` adjacent held positions centred on each, by ``kernel``: beyond the ends is 0."""
    dense = slots.scratch[1]
    tl.store(dense + rank, x.to(tl.float64), mask=slots.held)
    tl.debug_barrier()
    out = tl.zeros_like(x)
    for d in range(kernel.to(tl.int32)):
        near = rank + (d - kernel.to(tl.int32) // 2)
        there = slots.held & (near >= 0) & (near < slots.count)
        out += tl.load(dense + near, mask=there, other=0.0).to(x.dtype)
    tl.debug_barrier()
    return divide(out, tl.zeros_like(out) + kernel.to(x.dtype))


@triton.jit
def ring_sum(entries, width, slots):  # type: ignore[no-untyped-def]
    """float64 [BLOCK]: the sum over a ring, entry 0 upward."""
    # Other threads have written what is read now, and will write again what was read.
    tl.debug_barrier()
    total = tl.zeros(slots.index.shape, tl.float64)
    for _ in tl.range(0, width, loop_unroll_factor=8):
        total += tl.load(entries + slots.index, mask=slots.inside, other=0).to(tl.float64)
        entries += slots.stride
    tl.debug_barrier()
    return total


@triton.jit
def rings_of_row(rings, widths, stride, row):  # type: ignore[no-untyped-def]
    """A tuple of pointers to one row of each of ``rings``, a tuple of [R, W, S]."""
    out = ()
    for i in tl.static_range(len(rings)):
        out += (rings[i] + row * widths[i] * stride,)  # type: ignore[assignment]
    return out


@triton.jit
def ring_write(slots, entries, mask):  # type: ignore[no-untyped-def]
    """Let ``entries``, [BLOCK] or a number of each ring, be what the step adds that is counted next."""
    for i in tl.static_range(len(slots.rings)):
        place = slots.rings[i] + (slots.observed % slots.widths[i]) * slots.stride + slots.index
        tl.store(place, entries[i].to(slots.rings[i].dtype.element_ty), mask=mask)
