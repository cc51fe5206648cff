"""Eviction policies for transformer key-value caches, replayed exactly.

    import tova
    tova.enable(model)                                              # once, after loading
    cache = tova.EvictingCache(tova.policies.make("tova", budget=256))
    model(ids, cache=cache)                                         # or model.generate(...)

Names are loaded when first used: importing this package is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from tova import attention, cache, measures, observers, policies, replay, scan, simulation, trace
    from tova.attention import enable
    from tova.cache import EvictingCache
    from tova.errors import UsageError
    from tova.graphs import DecodeGraph

_HOMES = {
    "DecodeGraph": "tova.graphs",
    "EvictingCache": "tova.cache",
    "UsageError": "tova.errors",
    "enable": "tova.attention",
}
_MODULES = ("attention", "cache", "measures", "observers", "policies", "replay", "scan", "simulation", "trace")

__all__ = ["DecodeGraph", "EvictingCache", "UsageError", "attention", "cache", "enable", "measures", "observers"]
__all__ += ["policies", "replay", "scan", "simulation", "trace"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"tova.{name}")
    raise AttributeError(f"module 'tova' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES, *_MODULES])
