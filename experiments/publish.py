"""``python -m experiments.publish NAME``: copy the latest sweep or benchmark of that name to ``results/NAME``.

It is then there to be committed; README.md shows the table where it has a place for it. Published is what
``experiment=NAME`` alone gives, complete: a sweep with other options beside it, or with cells that are not done, is
refused.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path

import pandas as pd

from experiments.files import write_atomically
from experiments.report import groups, wide_markdown, write_report
from experiments.store import Sweep, documents, find_root, find_sweep, frame
from tova.errors import UsageError

PUBLISHED = Path(__file__).resolve().parent.parent / "results"


def publish(name: str) -> list[Path]:
    """Write the sweep's table, figure, cells and documents, or what a benchmark left; returns the files."""
    if name.startswith("bench_"):
        return _benchmark(name)
    sweep = find_sweep(name)
    _refuse_another_grid(name, sweep)
    cells = frame(sweep.id, sweep.root)
    _refuse_unfinished(sweep, cells)
    folder = PUBLISHED / name
    paths = list(write_report(cells, folder).values())
    rows = documents(sweep.id, sweep.root)
    path = folder / "documents.csv"
    rows.drop(columns=["layers"], errors="ignore").to_csv(path, index=False)
    paths.append(path)
    tables = "\n\n".join(wide_markdown(group) for _, group in groups(cells))
    if (readme := _into_readme(name, tables)) is not None:
        paths.append(readme)
    return paths


def _refuse_another_grid(name: str, sweep: Sweep) -> None:
    """Raise unless the sweep is the experiment's own, with nothing else asked for."""
    content = sweep.content()
    again = f"run `python -m experiments.run experiment={name}` first"
    if others := content.get("overrides"):
        raise UsageError(f"sweep {sweep.id}: was run with {' '.join(others)} beside experiment={name}; {again}")
    command = content.get("command")
    if command is not None and f"experiment={name}" not in shlex.split(command):
        raise UsageError(f"sweep {sweep.id}: bears the name but was not run as experiment={name}; {again}")


def _refuse_unfinished(sweep: Sweep, cells: pd.DataFrame) -> None:
    missing = cells["status"][cells["status"] != "done"].value_counts()
    if len(missing):
        which = ", ".join(f"{count} {status}" for status, count in missing.items())
        raise UsageError(
            f"sweep {sweep.id}: {int(missing.sum())} of {len(cells)} cells are not done ({which}); run it to its end"
        )


def _benchmark(name: str) -> list[Path]:
    """The latest run of a benchmark: its table and figure, and all its figures as JSON."""
    root = find_root()
    runs = [p for p in root.glob("*/summary.json") if _task(p) == name]
    if not runs:
        raise UsageError(f"no finished {name} under {root}; run `python -m experiments.run experiment={name}` first")
    latest = max(runs, key=lambda p: p.stat().st_mtime_ns).parent
    folder = PUBLISHED / name
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / file for file in ("table.md", "figure.png", "summary.json")]
    for path in paths:
        shutil.copyfile(latest / path.name, path)
    if (readme := _into_readme(name, (folder / "table.md").read_text().strip())) is not None:
        paths.append(readme)
    return paths


def _task(summary: Path) -> str | None:
    """Of a stored summary; None where it cannot be read: that is for its own cell to say."""
    try:
        return str(json.loads(summary.read_text())["task"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _into_readme(name: str, tables: str) -> Path | None:
    """Put a table where README.md has a place for it (between two comments that name it)."""
    path = PUBLISHED.parent / "README.md"
    begin, end = f"<!-- table {name} -->\n", f"<!-- /table {name} -->"
    text = path.read_text()
    if begin not in text:
        return None
    before, rest = text.split(begin)
    write_atomically(path, f"{before}{begin}\n{tables}\n\n{end}{rest.split(end)[1]}")
    return path


def main() -> None:
    if len(sys.argv) != 2:
        print("usage: python -m experiments.publish NAME", file=sys.stderr)
        sys.exit(2)
    try:
        for path in publish(sys.argv[1]):
            print(path)
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
