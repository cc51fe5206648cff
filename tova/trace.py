"""The canonical trace ``decode-4096``: a synthetic attention workload, generated and never stored.

4,096 tokens; at step ``t`` (1..4095) the token at position ``t`` attends over positions ``0..t-1``. A row mixes
four components, added in float64 in this order, divided by their total and rounded once to float32:

=========  ====  ==============================  =====================================================
component  mass  where                           shape
=========  ====  ==============================  =====================================================
sinks      0.15  positions 0..3                  0.06, 0.045, 0.03, 0.015 (scaled up while fewer exist)
local      0.55  offsets 1..64 back from ``t``   proportional to ``65 - offset``
heavy      0.25  32 positions in [4, t - 65]     the k-th drawn gets weight proportional to ``1 / k``
noise      0.05  all of 0..t-1                   uniform
=========  ====  ==============================  =====================================================

The heavy set is drawn at ``t = 128`` and redrawn at every later multiple of 512; before 128 its mass belongs to
the local component. The redraws cannot be foreseen by any policy, which is why the best possible kept set
(:func:`tova.simulation.bound_topk`) lies far above every policy on this trace.

The same rows come out on every platform: the random integers are xoshiro128** (Blackman and Vigna,
https://prng.di.unimi.it/xoshiro128starstar.c) seeded by splitmix32, and :attr:`Trace.fnv1a32` is a checksum.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from tova.errors import UsageError

_U32 = 0xFFFFFFFF
_SINK_MASSES = (0.06, 0.045, 0.03, 0.015)
_SINKS, _LOCAL, _HEAVY, _NOISE = 0.15, 0.55, 0.25, 0.05
_WINDOW = 64
_HEAVY_COUNT, _HEAVY_FROM, _HEAVY_EVERY = 32, 128, 512


class Xoshiro128:
    """The xoshiro128** generator of 32-bit integers, its four words of state filled by splitmix32."""

    def __init__(self, seed: int) -> None:
        self._state = []
        word = seed & _U32
        for _ in range(4):
            word = (word + 0x9E3779B9) & _U32
            self._state.append(self._mix(word))

    @staticmethod
    def _mix(z: int) -> int:
        z ^= z >> 16
        z = (z * 0x21F0AAAD) & _U32
        z ^= z >> 15
        z = (z * 0x735A2D97) & _U32
        return z ^ (z >> 15)

    def next(self) -> int:
        """The next integer in ``[0, 2**32)``."""
        s = self._state
        result = (_rotl((s[1] * 5) & _U32, 7) * 9) & _U32
        shifted = (s[1] << 9) & _U32
        s[2] ^= s[0]
        s[3] ^= s[1]
        s[1] ^= s[2]
        s[0] ^= s[3]
        s[2] ^= shifted
        s[3] = _rotl(s[3], 11)
        return result

    def below(self, n: int) -> int:
        """A uniform integer in ``[0, n)``, without modulo bias: draws below ``2**32 mod n`` are rejected."""
        threshold = ((1 << 32) - n) % n
        while (value := self.next()) < threshold:
            pass
        return value % n


def _rotl(x: int, k: int) -> int:
    return ((x << k) | (x >> (32 - k))) & _U32


@dataclass(frozen=True)
class Trace:
    """A stream of attention rows, one per decode step.

    ``rows[t - 1]`` is step ``t``: float32 weights ``[t]`` over positions ``0..t-1``. They need not sum to one.

    Raises:
        UsageError: a step has not as many weights as positions, or one that is not finite.
    """

    name: str
    rows: Sequence[np.ndarray]

    def __post_init__(self) -> None:
        for t, row in enumerate(self.rows, start=1):
            if np.shape(row) != (t,):
                raise UsageError(f"{self.name}: step {t} must have {t} weights, got an array of shape {np.shape(row)}")
            if not np.isfinite(row).all():
                worst = int(np.flatnonzero(~np.isfinite(row))[0])
                raise UsageError(
                    f"{self.name}: step {t} has weight {row[worst]} at position {worst}; a trace needs finite ones"
                )

    def __len__(self) -> int:
        """Number of steps; the number of tokens is one more."""
        return len(self.rows)

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        return enumerate(self.rows, start=1)

    @cached_property
    def heavy_hitters(self) -> list[np.ndarray]:
        """Per step the ``min(32, t)`` most-attended positions, most-attended first, ties to the lower position."""
        return [np.argsort(-row, kind="stable")[:_HEAVY_COUNT] for row in self.rows]

    @cached_property
    def heavy_table(self) -> np.ndarray:
        """int64 [steps, 32]: :attr:`heavy_hitters` as a table, -1 where a step has fewer."""
        table = np.full((len(self.rows), _HEAVY_COUNT), -1, dtype=np.int64)
        for step, top in enumerate(self.heavy_hitters):
            table[step, : len(top)] = top
        return table

    @cached_property
    def flat(self) -> np.ndarray:
        """float32: all rows one after the other."""
        return np.concatenate(self.rows)

    @property
    def fnv1a32(self) -> int:
        """FNV-1a, 32 bits, over the little-endian bytes of all rows in order."""
        value = 0x811C9DC5
        for byte in self.flat.astype("<f4").tobytes():
            value = ((value ^ byte) * 0x01000193) & _U32
        return value


def canonical_trace(seed: int = 7, tokens: int = 4096) -> Trace:
    """Generate the trace ``decode-<tokens>``; the published figures are of the defaults, seed 7 and 4,096 tokens."""
    if tokens < 2:
        raise ValueError(f"tokens must be at least 2 (one step), got {tokens}")
    rng = Xoshiro128(seed)
    harmonic = np.cumsum(1.0 / np.arange(1, _HEAVY_COUNT + 1))[-1]
    heavy: list[int] = []
    rows = []
    for t in range(1, tokens):
        if t == _HEAVY_FROM or (t > _HEAVY_FROM and t % _HEAVY_EVERY == 0):
            drawn: dict[int, None] = {}
            while len(drawn) < _HEAVY_COUNT:
                drawn[rng.below(t - _WINDOW - 4) + 4] = None
            heavy = list(drawn)
        rows.append(_row(t, heavy, harmonic))
    return Trace(f"decode-{tokens}", rows)


def _row(t: int, heavy: list[int], harmonic: float) -> np.ndarray:
    weights = np.zeros(t)
    present = _SINK_MASSES[:t]
    scale = _SINKS / sum(present)
    for position, mass in enumerate(present):
        weights[position] += mass * scale
    reach = min(_WINDOW, t)
    local = _LOCAL if t >= _HEAVY_FROM else _LOCAL + _HEAVY
    offsets = np.arange(1, reach + 1)
    shape = (_WINDOW + 1 - offsets).astype(np.float64)
    weights[t - offsets] += local * shape / shape.sum()
    if heavy:
        for k, position in enumerate(heavy, start=1):
            weights[position] += _HEAVY / k / harmonic
    weights += _NOISE / t
    return (weights / weights.sum()).astype(np.float32)
