"""``python -m experiments.sync [RESULTS]``: send W&B runs that were written offline, on nodes without a network.

Every run is sent once; run it again when more have been written. A cell has one run, whatever node wrote it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from experiments.store import find_root
from tova.errors import UsageError


def waiting(root: Path) -> list[Path]:
    """Folders of offline runs under ``root`` that were not sent, oldest first."""
    return [p for p in sorted(root.glob("wandb/offline-run-*")) if p.is_dir() and not list(p.glob("*.synced"))]


def sync(root: Path, send: Callable[[Path], int]) -> tuple[int, list[Path]]:
    """Send all that wait; how many were, and which could not be."""
    runs = waiting(root)
    failed = [run for run in runs if send(run) != 0]
    return len(runs) - len(failed), failed


def _send(run: Path) -> int:
    beside = Path(sys.executable).parent / "wandb"
    program = str(beside) if beside.exists() else shutil.which("wandb")
    if program is None:
        raise UsageError("the program wandb is not in this environment")
    return subprocess.run([program, "sync", str(run)]).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    """Send what waits in the folder that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m experiments.sync", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", type=Path, help="the results folder (default: results/runs)")
    root = parser.parse_args(arguments).results or find_root()
    try:
        if not root.is_dir():
            raise UsageError(f"{root}: there is no such folder of results")
        if not waiting(root):
            print(f"{root / 'wandb'}: no run waits to be sent")
            return 0
        sent, failed = sync(root, _send)
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    print(f"{sent} runs sent")
    for run in failed:
        print(f"not sent: {run}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
