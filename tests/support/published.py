"""Figures that never change, which several tests hold to."""

from __future__ import annotations

BUDGETS = (256, 512, 1024)
"""Budgets of the canonical trace's table."""
# Per policy, at budgets 256, 512 and 1024: mean retained mass and heavy-hitter recall over all 4,095 steps.
PUBLISHED = {
    "tova": ((0.778128, 0.882339), (0.824012, 0.909793), (0.885888, 0.937247)),
    "h2o": ((0.643895, 0.886261), (0.714859, 0.913715), (0.784413, 0.945091)),
    "scissorhands": ((0.641318, 0.882339), (0.711377, 0.906047), (0.784746, 0.945091)),
    "snapkv": ((0.783378, 0.890183), (0.821190, 0.901949), (0.888049, 0.941169)),
    "pyramidkv": ((0.783378, 0.890183), (0.821190, 0.901949), (0.888049, 0.941169)),
    "streaming_llm": ((0.736691, 0.859419), (0.786153, 0.883480), (0.866203, 0.927572)),
    "window": ((0.596637, 0.742171), (0.655518, 0.774107), (0.754149, 0.833734)),
}
