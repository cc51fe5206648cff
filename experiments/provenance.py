"""What it takes to know where a number came from: versions, git hash, machine, model and data."""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from experiments.cells import Cell


def provenance(cell: Cell) -> dict[str, Any]:
    """Of a cell's row: git hash and dirtiness, versions, device, dtype, seeds, identities of model and data, code."""
    row: dict[str, Any] = {"git": git_hash(), **versions(), "code": cell.identity["code"]}
    seeds = {
        f"{group}.seed": options.get("seed") for group, options in cell.config.items() if isinstance(options, dict)
    }
    row |= {name: seed for name, seed in seeds.items() if seed is not None}
    if cell.model is not None:
        row |= {"model_identity": cell.model.identity(), "device": cell.device, "device_name": device_name(cell.device)}
        row["dtype"] = str(getattr(cell.model, "dtype", "")) or None
        if cell.dataset is not None:
            row["dataset_identity"] = cell.dataset.identity()
    return row


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Of Python and of the libraries that make the numbers."""
    found = {"python": sys.version.split()[0]}
    for package in ("tova", "torch", "transformers", "numba", "numpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@lru_cache(maxsize=1)
def git_hash() -> str:
    """Of the project's checkout, with ``-dirty`` if tracked files were changed; ``unknown`` outside one."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude", "*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else "unknown"


@lru_cache(maxsize=8)
def device_name(device: str) -> str:
    """The card's or the processor's name."""
    if device.startswith("cuda"):
        import torch

        return str(torch.cuda.get_device_name(device))
    return processor()


@lru_cache(maxsize=1)
def processor() -> str:
    """The CPU's name."""
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
