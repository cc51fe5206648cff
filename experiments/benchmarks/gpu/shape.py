"""The shapes that are measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """What is measured. Batches of ``decode`` are those of TOVA's paper; None is the full cache.

    Attributes:
        hidden, heads, intermediate, layers, vocabulary, dtype: the model's.
        budget, tokens, batches: of the layer's replay.
        long: tokens of the single long sequence.
        chunks: queries per block of a replay, each tried.
        rows: kept sets in the comparison of decisions.
        decode: (budget, batch) of each decoding run.
        length: tokens that are decoded.
        places, steps: places along the length at which decoding is timed, and steps at each.
        repetitions: of what is timed, after one that is not counted.
    """

    hidden: int = 4096
    heads: int = 32
    intermediate: int = 11008
    layers: int = 32
    vocabulary: int = 32000
    dtype: str = "bfloat16"
    budget: int = 512
    tokens: int = 4096
    batches: tuple[int, ...] = (1, 32)
    long: int = 65536
    chunks: tuple[int, ...] = (128, 512)
    rows: int = 4
    decode: tuple[tuple[int | None, int], ...] = ((None, 8), (256, 139), (512, 70), (1024, 35), (2048, 17))
    length: int = 4096
    places: int = 4
    steps: int = 6
    repetitions: int = 3


LLAMA_2_7B = Shape()
TINY = Shape(
    hidden=32, heads=4, intermediate=64, layers=2, vocabulary=100, dtype="float32", budget=8, tokens=40, batches=(1, 2),
    long=64, chunks=(16,), rows=2, decode=((None, 2), (8, 3)), length=24, places=2, steps=2, repetitions=1,
)  # fmt: skip
