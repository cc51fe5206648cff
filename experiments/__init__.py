"""The runner: Hydra configurations in, one cell a run, results on disk and in W&B.

``experiments.frame()`` gives the cells of a sweep to pandas, one row each; ``experiments.documents()`` one row per
document.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name in ("frame", "documents"):
        from experiments import store

        return getattr(store, name)
    raise AttributeError(f"module 'experiments' has no attribute {name!r}")
