"""Runs cells: skip what is done, continue what is not, store and track what comes out."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import tracking
from experiments.cells import Cell
from experiments.progress import Progress
from experiments.store import CellFolder
from experiments.tasks import Context, Row
from tova.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

    from experiments.data import Document
    from experiments.models import Loaded


@dataclass(frozen=True)
class Runner:
    """What the cells of a process share.

    Args:
        root: where results go.
        progress: told how far things are.
        group: the sweep's id, W&B's group; None for a single cell.
        cells: all cells of the sweep, if this process is to run them: some may be measured beside others.
    """

    root: Path
    progress: Progress
    group: str | None = None
    cells: tuple[Cell, ...] = ()

    def run(self, cell: Cell) -> Row:
        """The cell's summary, from disk if it is done."""
        folder = CellFolder(self.root, cell.id)
        folder.check()
        self.progress.start(cell.title)
        if folder.done:
            summary = folder.summary()
            self.progress.finish(f"done before  {headline(summary)}", worked=False)
            return summary
        if cell.task.uses_model:
            # Whatever cannot be had is found before anything is written.
            _load_documents(cell)
            _load_model(cell)
        begun = bool(folder.rows())
        beside = self._beside(cell)
        if beside:
            self._read_ahead([cell, *beside])
        summary = self._measure(cell, folder)
        self.progress.finish(headline(summary), worked=not begun or bool(beside), cells=1 + len(beside))
        return summary

    def _beside(self, cell: Cell) -> list[Cell]:
        """Cells of the sweep that are still to do and can be rows of one batch with ``cell``."""
        if cell.budget is None:
            return []
        most = cell.task.at_once(cell) - 1
        found: list[Cell] = []
        for other in self.cells:
            alike = other.budget is not None and other.id != cell.id and _shared(other) == _shared(cell)
            if len(found) < most and alike and not CellFolder(self.root, other.id).rows():
                found.append(other)
        return found

    def _read_ahead(self, cells: list[Cell]) -> None:
        """Measure several cells at once and store their rows; each is then finished like one that was interrupted.

        If that fails, nothing is said: each is then run alone, and the one that cannot be says why.
        """
        folders = [CellFolder(self.root, cell.id) for cell in cells]
        reference = self._reference(cells[0])
        contexts = []
        for cell, folder in zip(cells, folders, strict=True):
            folder.check()
            folder.begin(cell)
            contexts.append(self._context(cell, folder, reference))
        try:
            for which, measured, arrays in cells[0].task.run(contexts):
                folders[which].append({**measured, **provenance(cells[which])}, arrays)
                self._say_if_not_finite(cells[which], measured)
        except Exception as e:
            self.progress.say(f"{len(cells)} cells at once did not work ({type(e).__name__}); one by one")
        finally:
            for folder in folders:
                folder.forget_if_empty()

    def _context(self, cell: Cell, folder: CellFolder, reference: Callable[[int], dict[str, np.ndarray]]) -> Context:
        return Context(
            cell=cell,
            done=frozenset(row["document"] for row in folder.rows()),
            load_model=functools.partial(_load_model, cell),
            load_documents=functools.partial(_load_documents, cell),
            reference=reference,
            advance=self.progress.advance,
            expect=self.progress.expect,
        )

    def _measure(self, cell: Cell, folder: CellFolder) -> Row:
        """Run what is left of the cell; a mistake found on the way leaves no folder without a result."""
        try:
            return self._tracked(cell, folder)
        except UsageError:
            folder.forget_if_empty()
            raise

    def _tracked(self, cell: Cell, folder: CellFolder) -> Row:
        reference = self._reference(cell)
        settings = cell.config["tracking"]
        folder.begin(cell)
        with tracking.track(
            settings["mode"],
            settings["project"],
            self.root,
            name=cell.title,
            group=self.group or cell.id,
            config={"cell": cell.id, **cell.config, "identity": cell.identity},
        ) as tracker:
            for row in folder.rows():
                tracker.document(row)
            context = self._context(cell, folder, reference)
            for _, measured, arrays in cell.task.run([context]):
                row = {**measured, **provenance(cell)}
                folder.append(row, arrays)
                self._say_if_not_finite(cell, row)
                tracker.document(row)
            rows = sorted(folder.rows(), key=lambda r: r["index"])
            summary = {**cell.task.summarise(rows), **_what(cell), **provenance(cell)}
            folder.finish(summary)
            tracker.summary(summary)
        return summary

    def _say_if_not_finite(self, cell: Cell, row: Row) -> None:
        """A line about a document whose losses are not all finite; its figures show it, and the sweep goes on."""
        if lost := row.get("tokens_not_finite"):
            self.progress.say(
                f"{cell.title}, document {row['document']}: {lost:,} of {row['steps']:,} losses are not finite, the "
                f"first is that of token {row['first_not_finite']:,}"
            )

    def _reference(self, cell: Cell) -> Callable[[int], dict[str, np.ndarray]]:
        """Per-token figures of the full cache on the same documents, measured first if they are not there."""
        if not cell.task.needs_reference or cell.budget is None:
            return lambda index: {}
        full = cell.with_full_cache()
        folder = CellFolder(self.root, full.id)
        folder.check()
        if not folder.done:
            self.progress.say("first the full cache on the same documents, to compare with")
            self._measure(full, folder)
        return folder.arrays


def _shared(cell: Cell) -> dict[str, Any]:
    """What cells must have in common to be rows of one batch: everything but policy, budget and intervals."""
    apart = ("policy", "budget", "evict_every")
    return {k: v for k, v in cell.identity.items() if k not in apart} | {"task": cell.config["task"]}


_KEPT_LOADED: dict[str, Any] = {}
_KEPT_DOCUMENTS: dict[str, list[Document]] = {}


def _load_model(cell: Cell) -> Loaded:
    """The cell's model; one at a time is kept, for the next cell."""
    assert cell.model is not None
    key = f"{cell.model.identity()} {cell.device}"
    if key not in _KEPT_LOADED:
        _KEPT_LOADED.clear()
        _KEPT_LOADED[key] = cell.model.load(cell.device)
        _warm_up(_KEPT_LOADED[key])
    loaded: Loaded = _KEPT_LOADED[key]
    return loaded


def _warm_up(loaded: Loaded) -> None:
    """A few tokens through the machinery, so that the first cell's speed is not that of compiling the scan."""
    import torch

    from tova import EvictingCache, policies
    from tova.limits import positions, vocabulary
    from tova.measures import AttentionMeasures, token_nll

    ids = torch.arange(2, 18)[: positions(loaded.model)].unsqueeze(0) % (vocabulary(loaded.model) or 18)
    token_nll(loaded.model, ids, EvictingCache(policies.Tova(budget=4), observers=[AttentionMeasures()]))


def _load_documents(cell: Cell) -> list[Document]:
    """The cell's documents; kept likewise."""
    assert cell.dataset is not None
    key = str(cell.dataset.identity())
    if key not in _KEPT_DOCUMENTS:
        _KEPT_DOCUMENTS.clear()
        _KEPT_DOCUMENTS[key] = cell.dataset.load()
    return _KEPT_DOCUMENTS[key]


def _what(cell: Cell) -> Row:
    """What a table must say of a cell beside its figures."""
    return {
        "task": cell.task.name,
        "budget_requested": None if cell.budget is None else cell.budget.value,
        "model": None if cell.model is None else cell.model.label,
        "model_note": None if cell.model is None else cell.model.note,
        "dataset": None if cell.dataset is None else cell.dataset.label,
    }


def provenance(cell: Cell) -> Row:
    """Versions, git hash, model and data identity: what it takes to know where a number came from."""
    row: Row = {"git": git_hash(), **versions()}
    if cell.model is not None:
        row |= {"model_identity": cell.model.identity(), "device": cell.device}
        if cell.dataset is not None:
            row["dataset_identity"] = cell.dataset.identity()
    return row


@lru_cache(maxsize=1)
def versions() -> dict[str, str]:
    """Of Python and of the libraries that make the numbers."""
    found = {"python": sys.version.split()[0]}
    for package in ("tova", "torch", "transformers", "numba"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


@lru_cache(maxsize=1)
def git_hash() -> str:
    """Of the project's checkout, with ``-dirty`` if tracked files were changed; ``unknown`` outside one."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty", "--exclude", "*"],
            cwd=here,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() if done.returncode == 0 and done.stdout.strip() else "unknown"


def headline(summary: Row) -> str:
    """A cell in one line."""
    parts = []
    for name, figure, form in (
        ("perplexity", "perplexity", ".3f"),
        ("delta NLL", "delta_nll", "+.4f"),
        ("mass", "retained_mass", ".4f"),
        ("recall", "heavy_hitter_recall", ".4f"),
        (str(summary.get("against")), "shared", ".4f"),
    ):
        known = isinstance(summary.get(figure), float) and not math.isnan(summary[figure])
        if known or (figure == "perplexity" and summary.get("tokens_not_finite")):
            parts.append(f"{name} {summary[figure]:{form}}")
    if lost := summary.get("tokens_not_finite"):
        parts.append(f"{lost:,} losses not finite")
    return "  ".join(parts)
