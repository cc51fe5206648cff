"""What lasts longer than a cell: the progress display of this process, and the report at the end."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.cells import Cell
from experiments.progress import Progress
from experiments.store import Sweep, frame

_current: Progress | None = None
_cells: list[Cell] = []


@dataclass(frozen=True)
class Failed:
    """What a cell returns that did not come to an end."""

    error: Exception


class CellsFailedError(Exception):
    """Some cells of a sweep failed; the others are done and stored."""


@contextlib.contextmanager
def use(progress: Progress, cells: Iterable[Cell]) -> Iterator[None]:
    """Let cells that run in this process report to ``progress``, and know which others are to be run."""
    global _current, _cells
    _current, _cells = progress, list(cells)
    try:
        yield
    finally:
        _current, _cells = None, []


def run_cell(config: DictConfig) -> dict[str, Any]:
    """Run the cell of a composed configuration; in a sweep it reports to the sweep's progress."""
    from experiments.planning import plan
    from experiments.runner import Runner
    from experiments.tracking import check_mode

    cell = plan(config)
    check_mode(config.tracking.mode)
    root = Path(config.results_dir)
    if _current is not None:
        return Runner(root, _current, config.sweep.id, tuple(_cells)).run(cell)
    with Progress(1) as progress:
        summary = Runner(root, progress, config.sweep.id).run(cell)
    if config.sweep.id is None:
        if (description := cell.task.describe(summary)) is not None:
            print(description)
        print(f"results in {root / cell.id}")
    return summary


def report(sweep: Sweep) -> None:
    """Print the tables of a finished sweep and say where everything is; write them beside it."""
    from rich.console import Console

    from experiments.report import console_table, long_table, write_report
    from experiments.report.table import groups

    cells = frame(sweep.id, sweep.root)
    paths = write_report(cells, sweep.path)
    out = Console(width=None if sys.stdout.isatty() else 120)
    for title, group in groups(cells):
        out.print()
        out.print(console_table(title, group))
        out.print(f"\nevery cell ({len(group)})")
        out.print(long_table(group).to_string(index=False), highlight=False, markup=False, soft_wrap=True)
    wandb = Path(sys.executable).parent / "wandb"
    program = str(wandb.relative_to(Path.cwd())) if wandb.is_relative_to(Path.cwd()) else "wandb"
    lines = [
        ("table", str(paths["table"])),
        ("figure", f"{paths['figure']}  (xdg-open or open)"),
        (
            "pandas",
            f"import experiments; experiments.frame({sweep.id!r})   # one row per cell; also {paths['cells'].name}",
        ),
    ]
    if (sweep.root / "wandb").exists():
        lines.append(("terminal", f"{program} leet {sweep.root}/wandb"))
        lines.append(("account", f"{program} sync {sweep.root}/wandb/offline-run-*   # optional, needs `wandb login`"))
    out.print()
    for name, text in lines:
        out.print(f"{name:<9} {text}", highlight=False, markup=False, soft_wrap=True)
