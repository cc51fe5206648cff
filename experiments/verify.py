"""``python -m experiments.verify [RESULTS]``: measure a random sample of stored cells again and compare.

Every figure of every document is compared, bit for bit, with those that are stored; so are the arrays per token. Where
they differ it says by how much, and what was otherwise when they were stored: another machine, other versions.

Exit codes: 0 all are the same, 1 some are not, 2 something asked for cannot be.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cells import Cell
from experiments.progress import Progress
from experiments.provenance import provenance
from experiments.runner import Runner, with_references
from experiments.store import SWEEPS, CellFolder, find_root, same_figures
from experiments.tracking import Tracking
from tova.errors import UsageError

_ABOUT = ("wall_seconds", "git", "device_name", "python", "tova", "torch", "transformers", "numba", "numpy", "code")
"""What a row says of where it came from; compared apart from its figures."""


@dataclass(frozen=True)
class Verdict:
    """What came of a cell.

    Attributes:
        same: whether all figures and arrays are equal to the last bit; None where it could not be measured again.
        largest: the largest difference of a loss, in nats.
        figures: names of those that differ.
        why: what was otherwise, or why it could not be measured.
    """

    cell: str
    documents: int
    same: bool | None
    largest: float
    figures: tuple[str, ...]
    why: str


def verify(root: Path, cells: int, seed: int) -> list[Verdict]:
    """Measure ``cells`` of the finished cells under ``root`` again, chosen by ``seed``.

    Raises:
        UsageError: there are none.
    """
    folders = [p for p in root.glob("*") if p.name != SWEEPS and CellFolder(root, p.name).done] if root.is_dir() else []
    if not folders:
        raise UsageError(f"{root}: holds no finished cell")
    chosen = random.Random(seed).sample(sorted(p.name for p in folders), min(cells, len(folders)))
    return [_verify(CellFolder(root, name)) for name in chosen]


def _verify(folder: CellFolder) -> Verdict:
    from experiments.settings import stored

    folder.check()
    rows = folder.rows()
    try:
        cell = stored(folder.config()["config"])
        if cell.id != folder.id:
            raise UsageError(f"is {cell.id} now: {_changed(folder.config()['identity'], cell.identity)}")
        again, arrays = _measure(cell)
    except UsageError as e:
        return Verdict(folder.id, len(rows), None, float("nan"), (), str(e))
    figures: set[str] = set()
    largest = 0.0
    for before, after in zip(rows, again, strict=True):
        figures |= set(same_figures(before, after, (*_ABOUT, "arrays_sha256")))
        largest = max(largest, _difference(folder.arrays(before["index"]), arrays[before["index"]]))
    same = not figures and largest == 0.0
    why = "" if same else _otherwise(rows[0], provenance(cell))
    return Verdict(folder.id, len(rows), same, largest, tuple(sorted(figures)), why)


def _changed(before: dict[str, Any], after: dict[str, Any]) -> str:
    names = [name for name in sorted({*before, *after}) if before.get(name) != after.get(name)]
    return f"its {' and '.join(names) or 'label'} changed since it was stored"


def _measure(cell: Cell) -> tuple[list[dict[str, Any]], dict[int, dict[str, np.ndarray]]]:
    """The cell's rows and arrays, measured now, in a folder of their own."""
    with tempfile.TemporaryDirectory(prefix="tova-verify-") as scratch:
        root = Path(scratch)
        every = with_references([cell])
        with Progress(len(every)) as progress:
            tracking = Tracking("disabled", "", root, "", root)
            outcome = Runner(root, every, {c.id: c.title for c in every}, progress, tracking).run()[cell.id]
        if outcome.error is not None:
            raise UsageError(f"fails now: {outcome.error}")
        folder = CellFolder(root, cell.id)
        rows = folder.rows()
        return rows, {row["index"]: folder.arrays(row["index"]) for row in rows}


def _difference(before: dict[str, np.ndarray], after: dict[str, np.ndarray]) -> float:
    """The largest of all values; infinite where their shapes differ or one of them alone is NaN."""
    if before.keys() != after.keys():
        return math.inf
    largest = 0.0
    for name, a in before.items():
        b = after[name]
        if a.shape != b.shape:
            return math.inf
        if np.array_equal(a, b, equal_nan=a.dtype.kind == "f"):
            continue
        gap = np.abs(a.astype(np.float64) - b.astype(np.float64))
        largest = max(largest, math.inf if np.isnan(gap[~(np.isnan(a) & np.isnan(b))]).any() else float(np.nanmax(gap)))
    return largest


def _otherwise(row: dict[str, Any], now: dict[str, Any]) -> str:
    changed = [f"{k} {row.get(k)}, now {now.get(k)}" for k in _ABOUT if k in row and row.get(k) != now.get(k)]
    return f"stored with {'; '.join(changed)}" if changed else "with the same versions, on a machine of the same name"


def main(arguments: Sequence[str] | None = None) -> int:
    """Verify what the command line names and print a line per cell."""
    parser = argparse.ArgumentParser(prog="python -m experiments.verify", description=__doc__.splitlines()[0])
    parser.add_argument("results", nargs="?", type=Path, help="the results folder (default: results/runs)")
    parser.add_argument("--cells", type=int, default=3, help="how many to measure again (default: 3)")
    parser.add_argument("--seed", type=int, default=0, help="chooses them (default: 0)")
    given = parser.parse_args(arguments)
    try:
        if given.cells < 1:
            raise UsageError(f"--cells={given.cells}: must be at least 1")
        verdicts = verify(given.results or find_root(), given.cells, given.seed)
    except UsageError as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    for v in verdicts:
        if v.same is None:
            print(f"{v.cell}: cannot be measured again, {v.why}")
        elif v.same:
            print(f"{v.cell}: {v.documents} documents, every figure the same to the last bit")
        else:
            differ = f"{', '.join(v.figures)} differ" if v.figures else "no figure of a row differs"
            print(f"{v.cell}: NOT THE SAME: {differ}; per token by {v.largest:.1e} at most; {v.why}")
    bad = sum(v.same is False for v in verdicts)
    skipped = sum(v.same is None for v in verdicts)
    print(
        f"{len(verdicts) - bad - skipped} of {len(verdicts)} cells are the same"
        + (f", {skipped} cannot be measured again" if skipped else "")
    )
    return 1 if bad or skipped else 0


if __name__ == "__main__":
    sys.exit(main())
