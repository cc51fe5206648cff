"""Results on disk: a folder per cell, written so that nothing half-written is ever read as a result.

results/runs/<cell>/config.yaml       what determines the result, and the resolved configuration; written first
                    rows/<n>.json     document n, as it finishes; later all of them are
                    documents.jsonl   a row per document
                    arrays/<n>.npz    per-token figures of document n
                    summary.json      written last: a cell that has it is done
                    failed.json       instead of it, where the cell cannot be measured: why
                    claim-<n>.json    while somebody works on it
results/runs/_sweeps/<sweep>/         which cells a sweep is made of, its table and its figure

A document's row is a file that is made once and never again, so however many processes measure a document by mistake,
it counts once.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import shutil
import time
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import claims
from experiments.files import Scratch, sweep_up, write_atomically
from tova.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

    from experiments.cells import Cell

ROOT = Path("results/runs")
SWEEPS = "_sweeps"
FORMAT = 3
"""Of the files; raise it when they change their meaning or their names."""

DONE, FAILED, INTERRUPTED, RUNNING, PENDING = "done", "failed", "interrupted", "running", "pending"
NOT_FINITE = "not finite"
"""Of a cell that was measured to its end, with a loss that is NaN or infinite."""


class CellFolder:
    """The stored results of one cell."""

    def __init__(self, root: Path | str, cell_id: str) -> None:
        self.id = cell_id
        self.path = Path(root) / cell_id

    @property
    def done(self) -> bool:
        return (self.path / "summary.json").exists()

    @property
    def failed(self) -> bool:
        return not self.done and (self.path / "failed.json").exists()

    @property
    def status(self) -> str:
        """done, failed, running (somebody is at it), interrupted (somebody was), or pending (nobody was)."""
        if self.done:
            return DONE
        if self.failed:
            return FAILED
        owner = claims.holder(self.path)
        if owner is not None and owner.alive:
            return RUNNING
        if owner is not None or (self.path / "config.yaml").exists():
            return DONE if self.done else INTERRUPTED
        return PENDING

    def claim(self) -> claims.Claim | claims.Owner:
        """The right to work on it, or who has it."""
        for last in (False,) * 9 + (True,):
            self.path.mkdir(parents=True, exist_ok=True)
            try:
                claim = claims.take(self.path)
                break
            except FileNotFoundError:  # another process gave it up that moment, and removed the empty folder
                if last:
                    raise
        if isinstance(claim, claims.Claim):
            sweep_up(self.path)
        return claim

    def begin(self, cell: Cell) -> None:
        """Write the configuration, unless an earlier attempt has; an earlier failure is forgotten."""
        import yaml

        stored = {"format": FORMAT, "identity": _plain(cell.identity), "config": cell.config}
        if not (self.path / "config.yaml").exists():
            write_atomically(self.path / "config.yaml", yaml.safe_dump(stored, sort_keys=False, allow_unicode=True))
        self.forget_failure()

    def forget_failure(self) -> None:
        """Let it be tried again."""
        (self.path / "failed.json").unlink(missing_ok=True)

    def forget_if_empty(self) -> None:
        """Remove the folder if no document was finished in it, nor its failure kept."""
        if self.path.exists() and not (self.rows() or self.done or self.failed):
            shutil.rmtree(self.path, ignore_errors=True)

    def rows(self) -> list[dict[str, Any]]:
        """One per finished document, in the documents' order."""
        for _ in range(100):
            try:
                return self._rows()
            except FileNotFoundError:  # another process has just finished the cell: all are in one file now
                continue
        return self._rows()

    def _rows(self) -> list[dict[str, Any]]:
        rows: dict[int, dict[str, Any]] = {}
        path = self.path / "documents.jsonl"
        if path.exists():
            for number, line in enumerate(self._text(path).splitlines(), start=1):
                row = self._row(path, line, f"line {number} is")
                if row["index"] in rows:
                    raise self._corrupt(path, f"line {number} is document {row['index']} once more")
                rows[row["index"]] = row
        for path in sorted((self.path / "rows").glob("*.json")):
            row = self._row(path, self._text(path), "it is")
            rows.setdefault(row["index"], row)
        return [rows[index] for index in sorted(rows)]

    def _row(self, path: Path, text: str, what: str) -> dict[str, Any]:
        try:
            row = json.loads(text)
            index, _, cell = row["index"], row["document"], row["cell"]
        except (ValueError, KeyError, TypeError) as e:
            raise self._corrupt(path, f"{what} not a document's row") from e
        if cell != self.id:
            raise self._corrupt(path, f"{what} a row of another cell, {cell}")
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise self._corrupt(path, f"{what} not a document's row")
        assert isinstance(row, dict)
        return row

    def append(self, row: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        """Add a finished document, unless it is there; the row is written after its arrays, so a row means both are."""
        for name in ("arrays", "rows"):
            (self.path / name).mkdir(exist_ok=True)
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        path = self.path / "rows" / f"{row['index']:04d}.json"
        with Scratch(path) as scratch:
            stored = {"cell": self.id, **row, "arrays_sha256": hashlib.sha256(buffer.getvalue()).hexdigest()}
            scratch.write(json.dumps(stored, allow_nan=True) + "\n")
            if path.exists():
                return
            write_atomically(self._arrays(row["index"]), buffer.getvalue())
            try:
                os.link(scratch.path, path)
            except FileExistsError:
                return
            except OSError:  # a file system without hard links
                scratch.replace()

    def arrays(self, index: int) -> dict[str, np.ndarray]:
        """Per-token figures of document ``index``."""
        return self._load_arrays(index, None)

    def _load_arrays(self, index: int, sha256: str | None) -> dict[str, np.ndarray]:
        path = self._arrays(index)
        try:
            data = path.read_bytes()
            if sha256 is not None and hashlib.sha256(data).hexdigest() != sha256:
                raise self._corrupt(path, "its figures are not those of its row")
            with np.load(io.BytesIO(data), allow_pickle=False) as stored:
                return {name: stored[name] for name in stored.files}
        except UsageError:
            raise
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as e:
            raise self._corrupt(path, f"not readable ({type(e).__name__})") from e

    def _arrays(self, index: int) -> Path:
        return self.path / "arrays" / f"{index:04d}.npz"

    def finish(self, summary: dict[str, Any]) -> None:
        """Write the summary: from now on the cell is done."""
        lines = [json.dumps(row, allow_nan=True) for row in self.rows()]
        write_atomically(self.path / "documents.jsonl", "\n".join(lines) + "\n")
        summary = {"format": FORMAT, "cell": self.id, **summary}
        write_atomically(self.path / "summary.json", json.dumps(summary, indent=1) + "\n")
        shutil.rmtree(self.path / "rows", ignore_errors=True)

    def fail(self, reason: str, trace: str, provenance: dict[str, Any], lost: claims.Owner | None = None) -> None:
        """Write that it was not measured, and why.

        Args:
            lost: who was killed while measuring it, if that is why; the same command then tries it again.
        """
        found: dict[str, Any] = {"format": FORMAT, "cell": self.id, "reason": reason, "when": _now(), **provenance}
        if lost is not None:
            found["lost"] = {"job": lost.job, "crew": lost.crew}
        found["traceback"] = trace
        write_atomically(self.path / "failed.json", json.dumps(found, indent=1) + "\n")

    def summary(self) -> dict[str, Any]:
        """The stored summary of a cell that is done."""
        summary = self._object(self.path / "summary.json", "a summary")
        del summary["format"], summary["cell"]
        return summary

    def not_finite(self) -> str:
        """Which losses of a finished cell are NaN or infinite; empty if none is."""
        rows = self.rows()
        lost = [row for row in rows if row.get("tokens_not_finite")]
        if not lost:  # so it is for tasks without losses, whose rows mean other things by the same names
            return ""
        count, steps = sum(row["tokens_not_finite"] for row in lost), sum(row["steps"] for row in rows)
        first = f"document {lost[0]['document']}, token {lost[0]['first_not_finite']:,}"
        return f"{count:,} of {steps:,} losses are not finite, the first at {first}"

    def failure(self) -> dict[str, Any]:
        """Why a cell failed: ``reason``, ``when``, ``traceback`` and where."""
        return self._object(self.path / "failed.json", "a failure")

    @property
    def given_up(self) -> bool:
        """Whether it failed and is not to be tried again unless that is asked for.

        A cell whose process was killed is tried again, though not by the workers that were started with that process,
        which it might kill one after the other: only by the same job, when a cluster has queued it again.
        """
        if not self.failed:
            return False
        try:
            lost = self.failure().get("lost")
        except FileNotFoundError:  # somebody is trying it again
            return False
        if lost is None:
            return True
        sibling = lost["crew"] is not None and lost["crew"] == claims.this_crew()
        return sibling and (lost["job"] is None or lost["job"] != claims.this_job())

    def _object(self, path: Path, what: str) -> dict[str, Any]:
        try:
            found = json.loads(self._text(path))
            if not isinstance(found, dict):
                raise ValueError
        except ValueError as e:
            raise self._corrupt(path, f"not readable as {what}") from e
        self._check_format(path, found)
        if found.get("cell") != self.id or len(found) < 4:
            raise self._corrupt(path, f"not {what} of this cell")
        return found

    def config(self) -> dict[str, Any]:
        """The stored identity and resolved configuration."""
        import yaml

        path = self.path / "config.yaml"
        try:
            stored = yaml.safe_load(self._text(path))
            stored["identity"], stored["config"]
        except (yaml.YAMLError, KeyError, TypeError) as e:
            raise self._corrupt(path, "not readable as a configuration") from e
        self._check_format(path, stored)
        return stored

    def check(self, cell: Cell | None = None) -> None:
        """Read everything there is; raises if anything is corrupt, or another cell's."""
        if (self.path / "config.yaml").exists():
            stored = self.config()
            if cell is not None and stored["identity"] != _plain(cell.identity):
                raise self._corrupt(self.path / "config.yaml", "this is the configuration of another cell")
        rows = self.rows()
        for row in rows:
            self._load_arrays(row["index"], row.get("arrays_sha256", ""))
        if self.done:
            documents = self.summary().get("documents", 1)
            if len(rows) != documents:
                raise self._corrupt(self.path, f"its summary is of {documents} documents, and there are {len(rows)}")
        elif self.failed:
            self.failure()

    def _text(self, path: Path) -> str:
        try:
            return path.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise
        except (OSError, UnicodeDecodeError) as e:
            raise self._corrupt(path, f"not readable ({getattr(e, 'strerror', None) or type(e).__name__})") from e

    def _check_format(self, path: Path, found: dict[str, Any]) -> None:
        there = found.get("format")
        if isinstance(there, int) and there > FORMAT:
            raise UsageError(
                f"{path}: written by a later version (format {there}; this one reads {FORMAT}); use that version, or "
                "another results_dir"
            )
        if there != FORMAT:
            raise self._corrupt(path, f"not of format {FORMAT}")

    def _corrupt(self, path: Path, why: str) -> UsageError:
        return UsageError(f"{path}: {why}; delete the folder {self.path} and run the same command again")


def _plain(identity: dict[str, Any]) -> Any:
    """As it comes back from a file."""
    return json.loads(json.dumps(identity, default=str))


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


class Sweep:
    """A named set of cells: a folder with an entry per cell, so that many processes can add theirs."""

    def __init__(self, root: Path | str, sweep_id: str) -> None:
        self.id = sweep_id
        self.root = Path(root)
        self.path = self.root / SWEEPS / sweep_id

    def begin(self, cells: Sequence[dict[str, Any]], **more: Any) -> None:
        """Say which cells belong to it, in order; an earlier run of the same sweep is replaced.

        Args:
            cells: per cell ``id``, ``name`` (for people), ``options`` (columns of the frame) and ``config``.
            more: what else there is to know: the command, its overrides.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        content = {"format": FORMAT, "started": _now(), **more, "cells": list(cells)}
        write_atomically(self.path / "cells.json", json.dumps(content, indent=1) + "\n")

    def content(self) -> dict[str, Any]:
        """What :meth:`begin` wrote."""
        path = self.path / "cells.json"
        try:
            content = json.loads(path.read_text())
            for entry in content["cells"]:
                entry["id"], entry["options"]
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise UsageError(f"{path}: not readable; run the sweep again to have it written anew") from e
        assert isinstance(content, dict)
        return content

    def cells(self) -> list[CellFolder]:
        return [CellFolder(self.root, entry["id"]) for entry in self.content()["cells"]]


def find_sweep(sweep: str | None = None, root: Path | str | None = None) -> Sweep:
    """The sweep called ``sweep`` (its id, or the name it starts with), by default the latest one.

    By name, a sweep that an experiment's file describes goes before one that other options were given for.
    """
    root = find_root() if root is None else Path(root)
    folder = root / SWEEPS
    there = [p for p in folder.glob("*") if (p / "cells.json").exists()] if folder.exists() else []
    found = there
    if sweep is not None:
        found = [p for p in there if p.name == sweep]
        if not found:
            from experiments.options import sweep_name

            named = [p for p in there if p.name.rpartition("-")[0] in (sweep, sweep_name(sweep))]
            found = [p for p in named if _is_plain(Sweep(root, p.name))] or named
    if not found:
        names = ", ".join(sorted(p.name for p in there)) or "none"
        which = "" if sweep is None else f" {sweep!r}"
        raise UsageError(f"no sweep{which} under {folder.absolute()}; there are: {names}")
    latest = max(found, key=lambda p: (p / "cells.json").stat().st_mtime_ns)
    return Sweep(root, latest.name)


def _is_plain(sweep: Sweep) -> bool:
    """Whether it is what an experiment's file describes, and of a format that can be read."""
    try:
        return not sweep.content().get("overrides")
    except UsageError:
        return False


def find_root() -> Path:
    """Where results are: ``results/runs`` here, in a folder above (a notebook's), or of this checkout."""
    if ROOT.is_dir():
        return ROOT
    here = Path.cwd()
    places = [*here.parents, Path(__file__).resolve().parent.parent]
    return next((p / ROOT for p in places if (p / ROOT / SWEEPS).is_dir()), ROOT)


def frame(sweep: str | None = None, root: Path | str | None = None) -> pd.DataFrame:
    """One row per cell of a sweep, by default the latest: what it is, its status, and its figures once it is done.

    Args:
        sweep: its id or name.
        root: the results folder; by default the one of this folder, of one above it, or of the checkout.

    Returns:
        Columns ``cell``, ``status`` (done, not finite, failed, running, interrupted, pending), ``reason``, what the
        cell is, and its figures; figures of cells that were not measured are NaN. *Not finite* is a cell that was
        measured, with a loss that is NaN or infinite.
    """
    import pandas as pd

    found = find_sweep(sweep, root)
    rows = []
    for entry in found.content()["cells"]:
        folder = CellFolder(found.root, entry["id"])
        status, reason = folder.status, ""
        row: dict[str, Any] = dict(entry["options"])
        if status == DONE:
            # Names as they are now: what is stored may have been measured when they were others.
            row = {**folder.summary(), **{k: v for k, v in row.items() if k != "policy"}}
            if row.get("tokens_not_finite"):
                status, reason = NOT_FINITE, folder.not_finite()
        elif status == FAILED:
            reason = folder.failure()["reason"]
        elif status in (RUNNING, INTERRUPTED):
            reason = _how_far(folder, status)
        rows.append({"cell": folder.id, "status": status, "reason": reason, **row})
    return pd.DataFrame(rows)


def _how_far(folder: CellFolder, status: str) -> str:
    owner = claims.holder(folder.path)
    by = f" by {owner}" if owner is not None else ""
    done = len(folder.rows())
    if status == RUNNING:
        return f"being measured{by}"
    return f"broken off{by} after {done} documents" if done != 1 else f"broken off{by} after 1 document"


def latest_or_published(name: str, root: Path | str | None = None) -> tuple[pd.DataFrame, str]:
    """The frame of the latest sweep called ``name``, or the committed one of ``results/name``; and where it is from."""
    import pandas as pd

    try:
        sweep = find_sweep(name, root)
        return frame(sweep.id, sweep.root), f"{sweep.path}"
    except UsageError:
        published = Path(__file__).resolve().parent.parent / "results" / name / "cells.csv"
        if not published.exists():
            raise
        return pd.read_csv(published), f"results/{name}/cells.csv"


def documents(sweep: str | None = None, root: Path | str | None = None) -> pd.DataFrame:
    """One row per finished document of every cell of a sweep, by default the latest."""
    import pandas as pd

    rows = []
    for folder in find_sweep(sweep, root).cells():
        rows += folder.rows()
    return pd.DataFrame(rows)


def same_figures(a: dict[str, Any], b: dict[str, Any], besides: Iterable[str] = ()) -> list[str]:
    """Names of the figures in which two rows differ; NaN is NaN, times and provenance apart."""
    left_out = {"seconds", "tokens_per_second", "when", *besides}
    return [k for k in sorted({*a, *b} - left_out) if not _equal(a.get(k), b.get(k))]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float) and math.isnan(a) and math.isnan(b):
        return True
    if isinstance(a, dict) and isinstance(b, dict):
        return not same_figures(a, b)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)
