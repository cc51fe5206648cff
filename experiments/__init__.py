"""The runner: Hydra configurations in, one cell a run, results on disk and in W&B.

``experiments.frame()`` gives the cells of a sweep to pandas, one row each; ``experiments.documents()`` one row per
document.

Threads that wait for each other sleep here, unless ``OMP_WAIT_POLICY`` or ``GOMP_SPINCOUNT`` is set already: where
cores are shared, threads that spin cost several times what they gain (docs/numerics.md). It has to be said before
torch is loaded, hence here; jobs on a cluster inherit it.
"""

from __future__ import annotations

import os
from typing import Any

if "GOMP_SPINCOUNT" not in os.environ:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


def __getattr__(name: str) -> Any:
    if name in ("frame", "documents"):
        from experiments import store

        return getattr(store, name)
    raise AttributeError(f"module 'experiments' has no attribute {name!r}")
