"""Results on disk: a folder per cell, written so that nothing half-written is ever read as a result.

results/runs/<cell>/config.yaml       the resolved configuration, written first
                    documents.jsonl   a row per document, as it finishes
                    arrays/<n>.npz    per-token figures of document n
                    summary.json      written last: a cell that has it is done
results/runs/_sweeps/<sweep>/         which cells a sweep is made of, its table and its figure
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tova.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from experiments.cells import Cell

ROOT = Path("results/runs")
SWEEPS = "_sweeps"


class CellFolder:
    """The stored results of one cell."""

    def __init__(self, root: Path | str, cell_id: str) -> None:
        self.id = cell_id
        self.path = Path(root) / cell_id

    @property
    def done(self) -> bool:
        return (self.path / "summary.json").exists()

    def begin(self, cell: Cell) -> None:
        """Write the configuration, unless an earlier attempt has."""
        import yaml

        self.path.mkdir(parents=True, exist_ok=True)
        stored = {"identity": cell.identity, "config": cell.config}
        if not (self.path / "config.yaml").exists():
            write_atomically(self.path / "config.yaml", yaml.safe_dump(stored, sort_keys=False))

    def forget_if_empty(self) -> None:
        """Remove the folder if no document was finished in it."""
        if self.path.exists() and not (self.path / "documents.jsonl").exists():
            shutil.rmtree(self.path)

    def rows(self) -> list[dict[str, Any]]:
        """One per finished document, in the order they finished."""
        path = self.path / "documents.jsonl"
        if not path.exists():
            return []
        rows = []
        for number, line in enumerate(path.read_text().splitlines(), start=1):
            try:
                row = json.loads(line)
                row["document"], row["index"]
            except (json.JSONDecodeError, KeyError, TypeError) as e:
                raise self._corrupt(path, f"line {number} is not a document's row") from e
            rows.append(row)
        return rows

    def append(self, row: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Add a finished document; the row is written after its arrays, so a row means both are there."""
        folder = self.path / "arrays"
        folder.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=folder, suffix=".npz", delete=False) as f:
            np.savez(f, allow_pickle=False, **arrays)
        os.replace(f.name, self._arrays(row["index"]))
        lines = [json.dumps(r, allow_nan=True) for r in [*self.rows(), row]]
        write_atomically(self.path / "documents.jsonl", "\n".join(lines) + "\n")

    def arrays(self, index: int) -> dict[str, np.ndarray]:
        """Per-token figures of document ``index``."""
        path = self._arrays(index)
        try:
            with np.load(path) as stored:
                return {name: stored[name] for name in stored.files}
        except Exception as e:
            raise self._corrupt(path, f"not readable ({type(e).__name__})") from e

    def _arrays(self, index: int) -> Path:
        return self.path / "arrays" / f"{index:04d}.npz"

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary: from now on the cell is done."""
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")

    def summary(self) -> dict[str, Any]:
        """The stored summary of a cell that is done."""
        path = self.path / "summary.json"
        try:
            summary = json.loads(path.read_text())
            if not isinstance(summary, dict):
                raise ValueError
        except (OSError, ValueError) as e:
            raise self._corrupt(path, "not readable as a summary") from e
        return summary

    def config(self) -> dict[str, Any]:
        """The stored identity and resolved configuration."""
        import yaml

        path = self.path / "config.yaml"
        try:
            stored = yaml.safe_load(path.read_text())
            stored["identity"], stored["config"]
        except (OSError, yaml.YAMLError, KeyError, TypeError) as e:
            raise self._corrupt(path, "not readable as a configuration") from e
        return stored

    def check(self) -> None:
        """Read everything there is; raises if anything is corrupt."""
        if (self.path / "config.yaml").exists():
            self.config()
        for row in self.rows():
            self.arrays(row["index"])
        if self.done:
            self.summary()

    def _corrupt(self, path: Path, why: str) -> UsageError:
        return UsageError(f"{path}: {why}; delete the folder {self.path} and run the same command again")


def write_atomically(path: Path, text: str) -> None:
    """Write a file whole or not at all, however the process ends."""
    with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}-", delete=False) as f:
        f.write(text)
        f.flush()
        os.fsync(f.fileno())
    os.chmod(f.name, 0o644)
    os.replace(f.name, path)


class Sweep:
    """A named set of cells: a folder with an entry per cell, so that many processes can add theirs."""

    def __init__(self, root: Path | str, sweep_id: str) -> None:
        self.id = sweep_id
        self.root = Path(root)
        self.path = self.root / SWEEPS / sweep_id

    def begin(self, cell_ids: Iterable[str]) -> None:
        """Say which cells belong to it, in order; an earlier run of the same sweep is replaced."""
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"cells": list(dict.fromkeys(cell_ids)), "started": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
        write_atomically(self.path / "cells.json", json.dumps(content, indent=1) + "\n")

    def cells(self) -> list[CellFolder]:
        path = self.path / "cells.json"
        try:
            ids = json.loads(path.read_text())["cells"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UsageError(f"{path}: not readable; run the sweep again to have it written anew") from e
        return [CellFolder(self.root, cell_id) for cell_id in ids]


def find_sweep(sweep: str | None = None, root: Path | str = ROOT) -> Sweep:
    """The sweep called ``sweep`` (its id, or the name it starts with), by default the latest one."""
    folder = Path(root) / SWEEPS
    found = [p for p in folder.glob("*") if (p / "cells.json").exists()] if folder.exists() else []
    if sweep is not None:
        found = [p for p in found if p.name == sweep] or [p for p in found if p.name.rsplit("-", 1)[0] == sweep]
    if not found:
        there = sorted(p.name for p in folder.glob("*")) if folder.exists() else []
        raise UsageError(
            f"no sweep{'' if sweep is None else f' {sweep!r}'} under {folder}; there are: {', '.join(there) or 'none'}"
        )
    latest = max(found, key=lambda p: (p / "cells.json").stat().st_mtime_ns)
    return Sweep(root, latest.name)


def frame(sweep: str | None = None, root: Path | str = ROOT) -> pd.DataFrame:
    """One row per finished cell of a sweep, by default the latest: what it is, and its summary."""
    import pandas as pd

    rows = []
    for folder in find_sweep(sweep, root).cells():
        if folder.done:
            rows.append({"cell": folder.id, **folder.summary()})
    return pd.DataFrame(rows)


def latest_or_published(name: str, root: Path | str = ROOT) -> tuple[pd.DataFrame, str]:
    """The frame of the latest sweep called ``name``, or the committed one of ``results/name``; and where it is from."""
    import pandas as pd

    try:
        sweep = find_sweep(name, root)
        return frame(sweep.id, root), f"{sweep.path}"
    except UsageError:
        published = Path(__file__).resolve().parent.parent / "results" / name / "cells.csv"
        if not published.exists():
            raise
        return pd.read_csv(published), f"results/{name}/cells.csv"


def documents(sweep: str | None = None, root: Path | str = ROOT) -> pd.DataFrame:
    """One row per finished document of every cell of a sweep, by default the latest."""
    import pandas as pd

    rows = []
    for folder in find_sweep(sweep, root).cells():
        rows += [{"cell": folder.id, **row} for row in folder.rows()]
    return pd.DataFrame(rows)
