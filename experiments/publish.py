"""``python -m experiments.publish NAME``: copy the latest sweep or benchmark of that name to ``results/NAME``.

It is then there to be committed; README.md shows the table where it has a place for it.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from experiments.report import write_report
from experiments.report.table import groups, wide_markdown
from experiments.store import ROOT, documents, find_sweep, frame
from tova.errors import UsageError

PUBLISHED = Path(__file__).resolve().parent.parent / "results"


def publish(name: str) -> list[Path]:
    """Write the sweep's table, figure, cells and documents, or what a benchmark left; returns the files."""
    if name.startswith("bench_"):
        return _benchmark(name)
    sweep = find_sweep(name)
    cells = frame(sweep.id, sweep.root)
    unfinished = len(sweep.cells()) - len(cells)
    if unfinished:
        raise UsageError(
            f"sweep {sweep.id}: {unfinished} of {len(sweep.cells())} cells are not done; run it to its end"
        )
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


def _benchmark(name: str) -> list[Path]:
    """The latest run of a benchmark: its table and figure, and all its figures as JSON."""
    runs = [p for p in ROOT.glob("*/summary.json") if json.loads(p.read_text()).get("task") == name]
    if not runs:
        raise UsageError(f"no finished {name} under {ROOT}; run `python -m experiments.run experiment={name}` first")
    latest = max(runs, key=lambda p: p.stat().st_mtime_ns).parent
    folder = PUBLISHED / name
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / file for file in ("table.md", "figure.png", "summary.json")]
    for path in paths:
        shutil.copyfile(latest / path.name, path)
    if (readme := _into_readme(name, (folder / "table.md").read_text().strip())) is not None:
        paths.append(readme)
    return paths


def _into_readme(name: str, tables: str) -> Path | None:
    """Put a table where README.md has a place for it (between two comments that name it)."""
    path = PUBLISHED.parent / "README.md"
    begin, end = f"<!-- table {name} -->\n", f"<!-- /table {name} -->"
    text = path.read_text()
    if begin not in text:
        return None
    before, rest = text.split(begin)
    path.write_text(f"{before}{begin}\n{tables}\n\n{end}{rest.split(end)[1]}")
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
