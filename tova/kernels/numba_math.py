"""Small functions that numba kernels share: of numbers, of addresses, and of slots in any order."""

from __future__ import annotations

import numba as nb
import numpy as np
from llvmlite import ir
from numba.extending import intrinsic

from tova.kernels.compile import inline, strict

F = np.float32
NOWHERE = np.int64(np.iinfo(np.int64).max)
"""Above every position."""
UNSORTED, SORTED, LISTED = range(3)
"""Slots are in no order; in position order, empty ones between them; or there is a list of them in that order."""


# -- addresses -----------------------------------------------------------------------------------------------------


@intrinsic
def pointer(typingctx, address):  # type: ignore[no-untyped-def]
    """An integer address as a pointer, for ``carray``."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.inttoptr(args[0], ir.IntType(8).as_pointer())

    return nb.types.voidptr(nb.int64), generate


@intrinsic
def call(typingctx, function, argument):  # type: ignore[no-untyped-def]
    """The C function at an address, int64 of int64, called."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        kind = ir.FunctionType(ir.IntType(64), [ir.IntType(64)])
        return builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])

    return nb.int64(nb.int64, nb.int64), generate


# -- numbers -------------------------------------------------------------------------------------------------------


@intrinsic
def float_from_bits(typingctx, bits):  # type: ignore[no-untyped-def]
    """Reinterpret an int32 as a float32."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.FloatType())

    return nb.float32(nb.int32), generate


@intrinsic
def bits_of_float(typingctx, number):  # type: ignore[no-untyped-def]
    """Reinterpret a float32 as an int32."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.IntType(32))

    return nb.int32(nb.float32), generate


@intrinsic
def bits_of_double(typingctx, number):  # type: ignore[no-untyped-def]
    """Reinterpret a float64 as an int64."""

    def generate(context, builder, signature, args):  # type: ignore[no-untyped-def]
        return builder.bitcast(args[0], ir.IntType(64))

    return nb.int64(nb.float64), generate


# Added to a whole number n it leaves n + 127, a float32's exponent, in the lowest bits: 1.5 * 2**23 + 127. Unlike a
# conversion to an integer that is defined for NaN too.
_EXPONENT = F(12583039.0)


@inline
def exp(x):  # type: ignore[no-untyped-def]
    """exp of a float32 at most 0, within 2 units in the last place; written so that LLVM vectorises it. NaN of NaN.

    Range reduction to |r| <= ln(2)/2 and the minimax polynomial of Cephes' ``expf``.
    """
    x = max(x, F(-87.0))  # NaN, coming first, stays NaN
    n = np.floor(x * F(1.4426950408889634) + F(0.5))
    r = x - n * F(0.693359375)
    r = r - n * F(-2.12194440e-4)
    p = F(1.9875691500e-4)
    p = p * r + F(1.3981999507e-3)
    p = p * r + F(8.3334519073e-3)
    p = p * r + F(4.1665795894e-2)
    p = p * r + F(1.6666665459e-1)
    p = p * r + F(5.0000001201e-1)
    p = p * (r * r) + r + F(1.0)
    return p * float_from_bits(bits_of_float(n + _EXPONENT) << nb.int32(23))


@strict
def maximum(a, b):  # type: ignore[no-untyped-def]
    """The larger, NaN if either is."""
    return a if a > b or a != a else b


@strict
def minimum(a, b):  # type: ignore[no-untyped-def]
    """The smaller, NaN if either is."""
    return a if a < b or a != a else b


@strict
def remainder(a, b):  # type: ignore[no-untyped-def]
    """Of floats, with the sign of the divisor, as torch has it."""
    rest = np.fmod(a, b)
    return rest + b if rest != 0 and (rest < 0) != (b < 0) else rest


# -- slots in any order --------------------------------------------------------------------------------------------


@strict
def rank_of(score):  # type: ignore[no-untyped-def]
    """An int64 in the order of float64 scores, below ``NOWHERE``; -0.0 and 0.0 are one, NaN has no order.

    The smallest of many integers is found in vectors, that of floats only one by one.
    """
    bits = bits_of_double(score + 0.0)
    return bits ^ ((bits >> 63) & NOWHERE)


_BLOCK = 64


@strict
def lowest(rank, positions, n, sorted):  # type: ignore[no-untyped-def]
    """The slot of the lowest rank, of equal ones that of the lower position; -1 if all are ``NOWHERE``.

    ``sorted`` says that slots are in position order.
    """
    least, begin, end = NOWHERE, 0, 0
    for block in range(0, n, _BLOCK):
        low = NOWHERE
        for j in range(block, min(block + _BLOCK, n)):
            low = min(low, rank[j])
        if low < least:
            least, begin, end = low, block, min(block + _BLOCK, n)
        elif low == least and not sorted:
            end = min(block + _BLOCK, n)
    slot, at = np.int64(-1), NOWHERE
    if least < NOWHERE:
        for j in range(begin, end):
            if rank[j] == least and positions[j] < at:
                slot, at = np.int64(j), positions[j]
    return slot


@strict
def oldest(held, positions, n, sinks):  # type: ignore[no-untyped-def]
    """The slot of the lowest position held that is not among the first ``sinks``; -1 if there is none."""
    slot = np.int64(-1)
    at = NOWHERE
    for j in range(n):
        if held[j] and sinks <= positions[j] < at:
            at = positions[j]
            slot = np.int64(j)
    return slot


@strict
def in_position_order(held, positions, n, order, other):  # type: ignore[no-untyped-def]
    """Fill ``order`` with the held slots by ascending position, a byte of the position at a time; returns how many.

    ``other`` is int64 [n] to work in.
    """
    count = 0
    least, most = NOWHERE, np.int64(0)
    for j in range(n):
        if held[j]:
            order[count] = j
            count += 1
            least = min(least, positions[j])
            most = max(most, positions[j])
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
        order[:count] = other[:count]
        shift += 8
    return count


@strict
def nth_newest(held, positions, n, nth):  # type: ignore[no-untyped-def]
    """The position of the ``nth`` newest held, -1 if there are fewer."""
    found = np.empty(n, np.int64)
    count = 0
    for j in range(n):
        if held[j]:
            found[count] = positions[j]
            count += 1
    if count < nth:
        return np.int64(-1)
    found[:count].sort()
    return found[count - nth]


@strict
def recent_floor(recent, ordering, held, positions, order, n, count, newest):  # type: ignore[no-untyped-def]
    """The lowest position among the ``recent`` newest held; above all if there are to be none, -1 if fewer are held."""
    if recent <= 0:
        return NOWHERE
    if count < recent:
        return np.int64(-1)
    if ordering == LISTED:
        return positions[order[count - recent]]
    if ordering == SORTED:
        j = n
        while recent > _BLOCK and j > _BLOCK:  # no more than a block of slots holds
            there = 0
            for i in range(j - _BLOCK, j):
                there += held[i]
            recent -= there
            j -= _BLOCK
        while recent > 0:
            j -= 1
            recent -= held[j]
        return positions[j]
    floor = newest - recent + 1
    there = 0
    for j in range(n):
        there += (held[j] != 0) & (positions[j] >= floor)
    # Some of them may have gone with the layer's own window: look further back.
    return floor if there == recent else nth_newest(held, positions, n, recent)


@strict
def list_held(ordering, held, positions, order, n, count, found, other):  # type: ignore[no-untyped-def]
    """Fill ``found`` with the ``count`` held slots by position; ``other`` is int64 [n] to work in."""
    if ordering == LISTED:
        for a in range(count):
            found[a] = order[a]
    elif ordering == SORTED:
        a = 0
        for j in range(n):  # without a branch: what is empty is written over
            found[a] = j
            a += held[j]
    else:
        in_position_order(held, positions, n, found, other)


@strict
def ring_sum(ring, steps, apart, n, out):  # type: ignore[no-untyped-def]
    """out[j]: the sum of ring[w * apart + j] over ``steps``, step 0 first, in float64."""
    for j in range(n):
        out[j] = 0.0
    for w in range(steps):
        for j in range(n):
            out[j] += np.float64(ring[w * apart + j])


@strict
def max_pool(x, order, count, kernel, dense, out):  # type: ignore[no-untyped-def]
    """x[order[a]] becomes the maximum over the ``kernel`` entries centred on a in that order; NaN if one of them is.

    ``dense`` and ``out`` are like ``x``, to work in.
    """
    for a in range(count):
        dense[a] = x[order[a]]
        out[a] = dense[a]
    for d in range(1, min(kernel // 2, count - 1) + 1):
        for a in range(count - d):
            out[a] = maximum(out[a], dense[a + d])
        for a in range(d, count):
            out[a] = maximum(out[a], dense[a - d])
    for a in range(count):
        x[order[a]] = out[a]


@strict
def average_pool(x, order, count, kernel, dense, out):  # type: ignore[no-untyped-def]
    """x[order[a]] becomes the sum over the ``kernel`` entries centred on a, the first one first, over ``kernel``."""
    if kernel == 1:
        return
    for a in range(count):
        dense[a] = x[order[a]]
        out[a] = 0
    radius = min(kernel // 2, count)
    for d in range(-radius, radius + 1):
        for a in range(max(0, -d), count - max(0, d)):
            out[a] += dense[a + d]
    for a in range(count):
        x[order[a]] = out[a] / x.dtype.type(kernel)
