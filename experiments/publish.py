"""``python -m experiments.publish NAME``: copy the latest sweep of that name to ``results/NAME``, to be committed."""

from __future__ import annotations

import sys
from pathlib import Path

import pandas as pd

from experiments.report import write_report
from experiments.report.table import groups, wide_markdown
from experiments.store import documents, find_sweep, frame
from tova.errors import UsageError

PUBLISHED = Path(__file__).resolve().parent.parent / "results"


def publish(name: str) -> list[Path]:
    """Write the sweep's table, figure, cells and documents; returns the files."""
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
    if (readme := _into_readme(name, cells)) is not None:
        paths.append(readme)
    return paths


def _into_readme(name: str, cells: pd.DataFrame) -> Path | None:
    """Put the sweep's table where README.md has a place for it (between two comments that name it)."""
    path = PUBLISHED.parent / "README.md"
    begin, end = f"<!-- table {name} -->\n", f"<!-- /table {name} -->"
    text = path.read_text()
    if begin not in text:
        return None
    before, rest = text.split(begin)
    tables = "\n\n".join(wide_markdown(group) for _, group in groups(cells))
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
