"""What the compiled scans know of the built-in policies: how each ranks, and by which record or feature."""

from __future__ import annotations

from tova.policies import (
    H2O,
    Full,
    H2OHalf,
    H2OHead,
    L2Norm,
    Policy,
    PyramidKV,
    PyramidKVPrefill,
    Random,
    Scissorhands,
    SnapKV,
    SnapKVPrefill,
    StreamingLLM,
    StreamingLLMReindexed,
    Tova,
    TovaHead,
    TovaOfficial,
    TovaValue,
    Window,
)

OLDEST, LATEST, SUM, VOTES, RING, RANDOM, FEATURE = range(7)
# What a policy does, the record it does it with, and the feature that weighs or replaces it.
MODES: dict[type[Policy], tuple[int, str | None, str | None]] = {
    Full: (OLDEST, None, None),
    Window: (OLDEST, None, None),
    StreamingLLM: (OLDEST, None, None),
    StreamingLLMReindexed: (OLDEST, None, None),
    Tova: (LATEST, "weight", None),
    TovaHead: (LATEST, "weight", None),
    TovaOfficial: (LATEST, "weight", None),
    TovaValue: (LATEST, "weight", "value_norm"),
    H2O: (SUM, "sum", None),
    H2OHalf: (SUM, "sum", None),
    H2OHead: (SUM, "sum", None),
    Scissorhands: (VOTES, "votes", None),
    SnapKV: (RING, "ring", None),
    SnapKVPrefill: (RING, "ring", None),
    PyramidKV: (RING, "ring", None),
    PyramidKVPrefill: (RING, "ring", None),
    L2Norm: (FEATURE, None, "key_norm"),
    Random: (RANDOM, None, None),
}
