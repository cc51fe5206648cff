"""Every part in a process of its own, under a time limit, and what it wrote gathered."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.benchmarks.gpu.page import markdown
from experiments.devices import device_of
from experiments.provenance import device_name, versions
from tova.errors import UsageError

SECONDS = {"card": 20, "decisions": 70, "launch": 60, "layer": 120, "long": 50, "rows": 50, "decode": 210}
"""The parts, and the seconds each is given: under 10 minutes in all."""


def measure(
    parts: Sequence[str], device: str, tiny: bool, out: Path, advance: Callable[[float], None] = lambda done: None
) -> dict[str, Any]:
    """Run ``parts`` and write ``bench_gpu.json`` and ``bench_gpu.md`` to ``out`` after each.

    Returns:
        What is in the JSON file: ``made`` (about the run), ``rows`` (one per figure) and ``parts`` (how each ended).

    Raises:
        UsageError: there is no CUDA device, and it is not to be tiny.
    """
    device = _device(device, tiny)
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"made": _made(device, tiny), "rows": [], "parts": {}}
    for done, part in enumerate(parts):
        scratch = out / f".{part}.jsonl"
        scratch.unlink(missing_ok=True)
        began = time.perf_counter()
        ended = _in_a_process(part, device, tiny, scratch)
        found = [json.loads(line) for line in scratch.read_text().splitlines()] if scratch.exists() else []
        scratch.unlink(missing_ok=True)
        result["rows"] += found
        result["parts"][part] = {"ended": ended, "seconds": round(time.perf_counter() - began, 1), "rows": len(found)}
        (out / "bench_gpu.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "bench_gpu.md").write_text(markdown(result) + "\n")
        advance(done + 1)
    return result


def _in_a_process(part: str, device: str, tiny: bool, rows: Path) -> str:
    """``ok``, or what went wrong in a line."""
    root = Path(__file__).parents[3]
    command = [sys.executable, "-m", "experiments.benchmarks.gpu", "--part", part, "--device", device]
    command += ["--rows", str(rows.resolve())] + (["--tiny"] if tiny else [])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    limit = SECONDS[part] * (4 if tiny else 1)  # where it only has to run, on whatever machine
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit} s"
    if done.returncode == 0:
        return "ok"
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return f"exit code {done.returncode}: {lines[-1][:300] if lines else 'no message'}"


def _device(name: str, tiny: bool) -> str:
    device = device_of(name)
    if device == "cpu" and not tiny:
        raise UsageError("bench_gpu needs a CUDA device; with task.tiny=true it goes through everything on the CPU")
    return device


def _made(device: str, tiny: bool) -> dict[str, Any]:
    """On what, with what and when."""
    import torch

    cuda = device.startswith("cuda")
    try:
        triton = metadata.version("triton")
    except metadata.PackageNotFoundError:
        triton = "not installed"
    return {
        "card": device_name(device) if cuda else f"no card ({platform.machine()} CPU)",
        "driver": _driver() if cuda else "none",
        "cuda": torch.version.cuda or "none",
        **versions(),
        "triton": triton,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "tiny": tiny,
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")[0] or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
