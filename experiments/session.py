"""A command: the cells it asks for, run here or by workers elsewhere, and the report at the end."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from experiments.cells import Cell
from experiments.progress import Progress
from experiments.runner import Outcome, Runner, StorageError, columns, storing, with_references
from experiments.settings import Settings, planned, program, settings
from experiments.store import FAILED, ROOT, CellFolder, Sweep, find_root, frame
from experiments.tracking import Tracking
from tova.errors import UsageError


class CellsFailedError(Exception):
    """Some cells failed; the others are done and stored."""


def run_alone(config: DictConfig, *, plan: bool = False, typed: Sequence[str] = ()) -> dict[str, Any] | None:
    """Run the cell of a composed configuration; its summary."""
    cell = planned(config)
    how = settings(config, (), typed)
    how = dataclasses.replace(how, name="cell" if config.sweep.name == "sweep" else how.name)
    return run([cell], how, lone=True, plan=plan)


def run(
    cells: Sequence[Cell], how: Settings, *, lone: bool = False, plan: bool = False, hydra: Any = None
) -> dict[str, Any] | None:
    """Run cells to their ends and report; a lone cell's summary.

    Args:
        lone: a single cell that was asked for by itself; a line reports it.
        plan: say what would be run and run nothing.
        hydra: a launcher of Hydra's that is to start the workers.

    Raises:
        UsageError: nothing could be measured, for one reason.
        CellsFailedError: some cells failed.
    """
    from experiments import schedule, tracking

    if plan:
        schedule.show(cells, how)
        return None
    tracking.check(how.mode)
    wanted = [cell.id for cell in cells]
    every = with_references(cells)
    for cell in every:
        CellFolder(how.root, cell.id).check(cell)
    sweep = Sweep(how.root, f"{how.name}-{_hash(sorted(wanted))}")
    names = names_of(every)
    todo = _failed(every, how.root, sweep) if how.retry else every
    with _nothing_left_behind(sweep):
        with storing(how.root):
            for cell in todo if how.retry else ():
                CellFolder(how.root, cell.id).forget_failure()
            sweep.begin(
                [
                    {
                        "id": c.id,
                        "name": names[c.id],
                        "asked": c.id in wanted,
                        "options": columns(c),
                        "config": c.config,
                    }
                    for c in every
                ],
                name=how.name,
                overrides=list(how.changed),
                command=how.command,
            )
        try:
            if how.launcher.get("name") == "local" and hydra is None:
                outcomes = _here(todo, names, how, sweep, show_done=not lone)
            else:
                from experiments import launchers

                outcomes = launchers.run(todo, names, how, sweep, hydra)
        except KeyboardInterrupt:
            _say_how_far(every, how)
            raise
        _raise_if_nothing_worked(outcomes, every, how.root)
        if lone and isinstance(error := _error_of(cells[0], outcomes), UsageError):
            shutil.rmtree(CellFolder(how.root, cells[0].id).path, ignore_errors=True)
            raise error
    if lone:
        _report_one(cells[0], how.root, sweep)
        _raise_if_some_failed(every, names, how.root)
        return CellFolder(how.root, cells[0].id).summary()
    report(sweep)
    _raise_if_some_failed(every, names, how.root)
    return None


def _here(
    cells: Sequence[Cell], names: dict[str, str], how: Settings, sweep: Sweep, show_done: bool
) -> dict[str, Outcome]:
    with Progress(len(cells)) as progress:
        tracking = Tracking(how.mode, how.project, how.root, sweep.id, sweep.path / "tracked", progress.say)
        return Runner(how.root, cells, names, progress, tracking, show_done).run()


def names_of(cells: Sequence[Cell]) -> dict[str, str]:
    """Id -> what to call a cell: all that tells it from the others.

    Raises:
        UsageError: two cells could not be told apart in the table of the sweep.
    """
    import pandas as pd

    from experiments.report import groups, names

    if len(cells) <= 2:  # a lone cell and what it is compared with
        return {cell.id: cell.title for cell in cells}
    frame = pd.DataFrame([{"cell": cell.id, **columns(cell)} for cell in cells])
    groups(frame)
    return dict(zip(frame["cell"], names(frame), strict=True))


def _failed(cells: Sequence[Cell], root: Path, sweep: Sweep) -> list[Cell]:
    found = [cell for cell in cells if CellFolder(root, cell.id).failed]
    if not found:
        raise UsageError(f"retry=failed: no cell of the sweep {sweep.id} has failed")
    return with_references(found)


@contextlib.contextmanager
def _nothing_left_behind(sweep: Sweep) -> Iterator[None]:
    """A block whose UsageError leaves no trace of a sweep that was new."""
    new = not sweep.path.exists()
    missing = [p for p in (sweep.path, *sweep.path.parents) if not p.exists()]
    try:
        yield
    except StorageError:
        raise
    except UsageError:
        if new:
            shutil.rmtree(sweep.path, ignore_errors=True)
            with contextlib.suppress(OSError):
                for folder in missing[1:]:
                    folder.rmdir()
        raise


def _raise_if_nothing_worked(outcomes: dict[str, Outcome], cells: Sequence[Cell], root: Path) -> None:
    """One mistake that is the reason for all there is not, is answered like one that was found before."""
    errors = [outcome.error for outcome in outcomes.values() if outcome.error is not None]
    mistakes = {str(e) for e in errors if isinstance(e, UsageError)}
    folders = [CellFolder(root, cell.id) for cell in cells]
    if len(mistakes) != 1 or len(mistakes) != len({str(e) for e in errors}):
        return
    if all(outcome.status == FAILED for outcome in outcomes.values()) and not any(f.done or f.rows() for f in folders):
        for folder in folders:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise next(e for e in errors if isinstance(e, UsageError))


def _error_of(cell: Cell, outcomes: dict[str, Outcome]) -> Exception | None:
    return outcomes[cell.id].error if cell.id in outcomes else None


def _raise_if_some_failed(cells: Sequence[Cell], names: dict[str, str], root: Path) -> None:
    failed, missing, lost = [], [], []
    for cell in cells:
        folder = CellFolder(root, cell.id)
        if folder.given_up:
            failed.append(names[cell.id])
        elif not folder.done:
            missing.append(names[cell.id])
        elif folder.not_finite():
            lost.append(names[cell.id])
    said = []
    if failed:
        said.append(f"{len(failed)} of {len(cells)} cells failed: {_some(failed)}; retry=failed runs them again")
    if missing:
        said.append(f"{len(missing)} of {len(cells)} cells were broken off: {_some(missing)}; the same command goes on")
    if lost:
        said.append(f"{len(lost)} of {len(cells)} cells have losses that are not finite: {_some(lost)}")
    if said:
        raise CellsFailedError(". ".join(said))


def _some(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(f"[{name}]" if "," in name else name for name in names[:most]) + more


def _report_one(cell: Cell, root: Path, sweep: Sweep) -> None:
    folder = CellFolder(root, cell.id)
    if not folder.done:
        failure = folder.failure() if folder.failed else {"reason": "broken off", "traceback": ""}
        if failure["traceback"]:
            print(failure["traceback"], file=sys.stderr)
        raise CellsFailedError(f"{cell.title} failed: {failure['reason']}; retry=failed runs it again")
    if (description := cell.task.describe(folder.summary())) is not None:
        print(description)
    print(f"results in {folder.path}")
    print(f"pandas     {frame_call(sweep)}")


def report(sweep: Sweep) -> None:
    """Print the tables of a sweep and say where everything is; write them beside it."""
    from rich.console import Console

    from experiments.report import console_report, write_report

    cells = frame(sweep.id, sweep.root)
    with storing(sweep.root):
        paths = write_report(cells, sweep.path)
    Console(width=None if sys.stdout.isatty() else 120, highlight=False).print(console_report(cells))
    lines = [
        ("table", str(paths["table"])),
        ("figure", str(paths["figure"])),
        ("frame", str(paths["cells"])),
        ("pandas", frame_call(sweep)),
    ]
    if (sweep.root / "wandb").exists():
        lines.append(("terminal", f"{program('wandb')} leet {shlex.quote(str(sweep.root / 'wandb'))}"))
        where = "" if sweep.root == ROOT else f" {shlex.quote(str(sweep.root))}"
        lines.append(("account", f"{program('python')} -m experiments.sync{where}  (optional)"))
    print()
    for name, text in lines:
        print(f"{name:<9} {text}")


def frame_call(sweep: Sweep) -> str:
    """What to type for a sweep's frame, from anywhere the default would find it; else with the folder."""
    found = find_root().resolve() == sweep.root.resolve()
    root = "" if found else f", root={str(sweep.root.resolve())!r}"
    return f"import experiments; experiments.frame({sweep.id!r}{root})"


def _say_how_far(cells: Sequence[Cell], how: Settings) -> None:
    done = sum(CellFolder(how.root, cell.id).done for cell in cells)
    print(f"interrupted: {done} of {len(cells)} cells are done; to go on:\n{how.command}", file=sys.stderr)


def _hash(ids: list[str]) -> str:
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:8]
