"""Runs cells: skips what is done, continues what is not, shares work with other processes, stores what comes out.

A cell's life: *pending* -> claimed by one process -> its documents' rows, as they finish -> *done*, or *failed* with a
reason. Any number of processes may run the same cells on the same folder: each takes the next that nobody has claimed,
and waits for what it needs of the others' (the full cache a cell is compared with is a cell like any other).
"""

from __future__ import annotations

import contextlib
import errno
import functools
import math
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments import claims, memory
from experiments.cells import Cell
from experiments.claims import Claim, LostError
from experiments.loading import Kept, free_memory
from experiments.progress import Progress
from experiments.provenance import provenance
from experiments.store import DONE, FAILED, CellFolder
from experiments.tasks import Context, Row
from experiments.tracking import Tracker, Tracking
from tova.errors import UsageError

if TYPE_CHECKING:
    from experiments.data import Document

POLL = 0.5
"""Seconds between looks at what other processes do."""
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EIO, errno.ENAMETOOLONG}


class StorageError(UsageError):
    """Results cannot be written; what was stored is as it was."""


class OutOfTime(KeyboardInterrupt):
    """A cluster ends this process; its cell is as one that was interrupted."""


@dataclass(frozen=True)
class Outcome:
    """How a cell ended: ``done`` or ``failed``; ``error`` where this process saw it fail."""

    status: str
    error: Exception | None = None


@dataclass
class Runner:
    """Runs ``cells``, every one to its end, wherever it is measured; what is stored was checked before.

    Args:
        root: where results go.
        cells: in the order they are tried; with the full-cache cells they are compared with among them.
        names: id -> what people call the cell.
        progress: told how far things are.
        tracking: where figures are shown.
        show_done: show cells that were done before as well, so that the sweep's group there is complete.
    """

    root: Path
    cells: Sequence[Cell]
    names: dict[str, str]
    progress: Progress
    tracking: Tracking
    show_done: bool = True
    kept: Kept = field(default_factory=Kept)

    def __post_init__(self) -> None:
        self._outcomes: dict[str, Outcome] = {}
        self._said: set[str] = set()

    def run(self) -> dict[str, Outcome]:
        """The outcome of every cell, by id.

        Raises:
            StorageError: results cannot be written.
            KeyboardInterrupt: claims are given back; what was finished is stored.
        """
        todo = []
        for cell in self.cells:
            folder = self._folder(cell)
            if folder.given_up:
                self._settle(cell, Outcome(FAILED), f"failed before: {folder.failure()['reason']}", worked=False)
            elif folder.done:
                self._track_done(cell, folder)
                self._settle(cell, Outcome(DONE), f"done before  {headline(folder.summary())}", worked=False)
            else:
                todo.append(cell)
        while todo:
            claimed = self._next(todo)
            if claimed:
                self._run(claimed)
            todo = [cell for cell in todo if cell.id not in self._outcomes]
            if todo and not claimed:
                time.sleep(POLL)
        return self._outcomes

    # -- which cells next --------------------------------------------------------------------------------------

    def _next(self, todo: list[Cell]) -> list[tuple[Cell, Claim]]:
        """Cells that may run now as one batch, claimed; none if all are others' for now."""
        claimed: list[tuple[Cell, Claim]] = []
        for cell in todo:
            if cell.id in self._outcomes or (claimed and not _alike(cell, claimed[0][0])):
                continue
            if not self._may_begin(cell):
                continue
            claim = self._claim(cell)
            if claim is not None:
                claimed.append((cell, claim))
            if claimed and len(claimed) >= claimed[0][0].task.at_once(claimed[0][0]):
                break
        return claimed

    def _may_begin(self, cell: Cell) -> bool:
        """Whether what it is compared with is there; settles a cell that never will have it."""
        full = _compared_with(cell)
        if full is None:
            return True
        folder = CellFolder(self.root, full)
        if folder.done:
            return True
        if folder.given_up:
            reason = f"the full cache it is compared with failed: {folder.failure()['reason']}"
            self._fail(cell, self._folder(cell), reason, "")
            return False
        owner = claims.holder(folder.path)
        if owner is not None and owner.alive:
            self._say_once(f"waiting for {self.names.get(full, 'the full cache')}, which {owner} measures")
        return False

    def _claim(self, cell: Cell) -> Claim | None:
        """The claim, unless somebody else has it, or it turns out to be done."""
        folder = self._folder(cell)
        if (sibling := _dead_sibling(folder)) is not None:
            with storing(self.root):
                folder.fail(f"broken off: {sibling} was killed", "", {}, lost=sibling)
            self._settle(cell, Outcome(FAILED), f"failed elsewhere: {sibling} was killed", worked=False)
            return None
        with storing(self.root):
            claim = folder.claim()
        if isinstance(claim, claims.Owner):
            self._say_once(f"{self._name(cell)} is being measured by {claim}")
            return None
        if folder.done or folder.given_up:
            claim.release()
            if folder.done:
                self._settle(cell, Outcome(DONE), f"done elsewhere  {headline(folder.summary())}", worked=False)
            else:
                self._settle(cell, Outcome(FAILED), f"failed elsewhere: {folder.failure()['reason']}", worked=False)
            return None
        return claim

    # -- running -----------------------------------------------------------------------------------------------

    def _run(self, claimed: list[tuple[Cell, Claim]]) -> None:
        """Measure cells that are claimed, and give the claims back however it ends."""
        trackers: dict[str, Tracker] = {}
        try:
            self._attempt([cell for cell, _ in claimed], {cell.id: claim for cell, claim in claimed}, trackers)
        except LostError as e:
            self.progress.say(f"{e} was taken over by another process; it goes on there")
        except BaseException:
            for tracker in trackers.values():
                tracker.end("interrupted", {})
            raise
        finally:
            for cell, claim in claimed:
                if cell.id not in self._outcomes:
                    with contextlib.suppress(LostError):
                        claim.check()  # the folder may be another's by now
                        self._folder(cell).forget_if_empty()
                claim.release()

    def _attempt(
        self, cells: list[Cell], held: dict[str, Claim], trackers: dict[str, Tracker], smaller: int = 0
    ) -> None:
        """Measure them at once; if that fails, fewer at once, then with less memory, then say why."""
        names = ", ".join(self._name(cell) for cell in cells)
        self.progress.start(names)
        try:
            self._measure(cells, held, trackers, smaller)
            return
        except (LostError, StorageError):
            raise
        except Exception as e:
            if type(e).__module__.startswith("submitit."):  # raised wherever the process was when the job's time was up
                raise OutOfTime(str(e)) from None
            error: Exception = e
            trace = "" if isinstance(e, UsageError) else "".join(traceback.format_exception(e))
            # The traceback's frames hold the tensors of what failed; the next cell needs their memory.
            traceback.clear_frames(e.__traceback__)
            error.__traceback__ = error.__cause__ = error.__context__ = None
        free_memory()
        full = memory.is_exhausted(error)
        if len(cells) > 1:
            half = (len(cells) + 1) // 2 if full else 1
            self.progress.say(f"{len(cells)} cells at once did not work ({type(error).__name__}); {half} at a time")
            left = [cell for cell in cells if cell.id not in self._outcomes]
            for begin in range(0, len(left), half):
                self._attempt(left[begin : begin + half], held, trackers, smaller)
            return
        (cell,) = cells
        if full and smaller < getattr(cell.task, "halvings", 0):
            self.progress.say(f"{names}: out of memory; once more, with chunks half as long")
            self._attempt(cells, held, trackers, smaller + 1)
            return
        reason = memory.exhausted(error, cell) if full else reason_of(error)
        self._fail(cell, self._folder(cell), reason, trace, error, trackers.get(cell.id))

    def _measure(self, cells: list[Cell], held: dict[str, Claim], trackers: dict[str, Tracker], smaller: int) -> None:
        began = time.monotonic()
        folders = [self._folder(cell) for cell in cells]
        contexts = []
        for cell, folder in zip(cells, folders, strict=True):
            if cell.task.uses_model:  # whatever cannot be had is found before anything is written
                _check_rows(folder, self.kept.documents(cell))
                self.kept.model(cell)
            folder.check(cell)  # what an earlier attempt has left
            with storing(self.root):
                folder.begin(cell)
            if cell.id not in trackers:
                trackers[cell.id] = self.tracking.cell(cell.id, self._name(cell), _for_people(cell), folder.rows())
            contexts.append(self._context(cell, folder, smaller))
        here = 0
        for which, measured, arrays in cells[0].task.run(contexts):
            cell, folder = cells[which], folders[which]
            now = time.monotonic()
            row = {**measured, "wall_seconds": now - began, **provenance(cell)}
            began, here = now, here + 1
            held[cell.id].check()
            with storing(self.root):
                folder.append(row, arrays)
            self._say_if_not_finite(cell, row)
            trackers[cell.id].document(row)
        for cell, folder in zip(cells, folders, strict=True):
            rows = folder.rows()
            summary = {**cell.task.summarise(rows), **_what(cell), **_provenances(rows)}
            held[cell.id].check()
            with storing(self.root):
                folder.finish(summary)
            trackers[cell.id].end("done", summary)
            self._settle(cell, Outcome(DONE), headline(summary), worked=here > 0, cells=len(cells))

    def _context(self, cell: Cell, folder: CellFolder, smaller: int) -> Context:
        full = _compared_with(cell)
        return Context(
            cell=cell,
            done=frozenset(row["document"] for row in folder.rows()),
            load_model=functools.partial(self.kept.model, cell),
            load_documents=functools.partial(self.kept.documents, cell),
            reference=(lambda index: {}) if full is None else CellFolder(self.root, full).arrays,
            advance=self.progress.advance,
            expect=self.progress.expect,
            smaller=smaller,
            folder=folder.path,
        )

    # -- what becomes of a cell --------------------------------------------------------------------------------

    def _fail(
        self,
        cell: Cell,
        folder: CellFolder,
        reason: str,
        trace: str,
        error: Exception | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        with storing(self.root):
            folder.path.mkdir(parents=True, exist_ok=True)
            folder.fail(reason, trace, provenance(cell))
        if tracker is not None:
            tracker.end("failed", {"reason": reason})
        self._settle(cell, Outcome(FAILED, error), f"failed: {reason}", worked=False)

    def _settle(self, cell: Cell, outcome: Outcome, line: str, *, worked: bool, cells: int = 1) -> None:
        self._outcomes[cell.id] = outcome
        self.progress.finish(self._name(cell), line, worked=worked, cells=cells)

    def _track_done(self, cell: Cell, folder: CellFolder) -> None:
        """Show a cell that an earlier sweep measured among this one's."""
        if self.show_done and not self.tracking.complete(cell.id):
            tracker = self.tracking.cell(cell.id, self._name(cell), _for_people(cell), folder.rows())
            tracker.end("done", folder.summary())

    def _say_if_not_finite(self, cell: Cell, row: Row) -> None:
        """A line about a document whose losses are not all finite; its figures show it, and the sweep goes on."""
        if lost := row.get("tokens_not_finite"):
            self.progress.say(
                f"{self._name(cell)}, document {row['document']}: {lost:,} of {row['steps']:,} losses are not finite, "
                f"the first is that of token {row['first_not_finite']:,}"
            )

    def _say_once(self, line: str) -> None:
        if line not in self._said:
            self._said.add(line)
            self.progress.say(line)

    def _name(self, cell: Cell) -> str:
        return self.names.get(cell.id, cell.title)

    def _folder(self, cell: Cell) -> CellFolder:
        return CellFolder(self.root, cell.id)


@contextlib.contextmanager
def storing(root: Path) -> Iterator[None]:
    """A block that writes results: what the disk refuses is a sentence, and no cell's failure."""
    try:
        yield
    except OSError as e:
        if e.errno not in _DISK:
            raise
        raise StorageError(
            f"results_dir={root}: cannot be written ({e.strerror}); what was finished is stored, and the same command "
            "goes on from there"
        ) from None


def _dead_sibling(folder: CellFolder) -> claims.Owner | None:
    """Who died on a cell, if it was another worker of this one's crew."""
    crew, owner = claims.this_crew(), claims.holder(folder.path)
    if owner is None or owner.alive or crew is None or owner.crew != crew or folder.done:
        return None
    return None if owner.job is not None and owner.job == claims.this_job() else owner


def _compared_with(cell: Cell) -> str | None:
    """The id of the full-cache cell that ``cell`` is compared with."""
    if not cell.task.needs_reference or cell.budget is None:
        return None
    return cell.full.id


def with_references(cells: Iterable[Cell]) -> list[Cell]:
    """The cells, and before each that needs it the full-cache cell it is compared with; every one once."""
    found: dict[str, Cell] = {}
    given = list(cells)
    asked = {cell.id for cell in given}
    for cell in given:
        if cell.task.needs_reference and cell.budget is not None and cell.full.id not in asked:
            found.setdefault(cell.full.id, cell.full)
        found.setdefault(cell.id, cell)
    return list(found.values())


def _alike(a: Cell, b: Cell) -> bool:
    """Whether two cells can be rows of one batch: all but policy, budget and intervals is the same."""
    if (a.budget is None) != (b.budget is None):
        return False
    apart = ("policy", "budget", "evict_every", "code")
    kept = [{k: v for k, v in c.identity.items() if k not in apart} | {"task": c.config["task"]} for c in (a, b)]
    return kept[0] == kept[1]


def _check_rows(folder: CellFolder, documents: list[Document]) -> None:
    """Stored rows must be of the documents as they are."""
    for row in folder.rows():
        index = row["index"]
        there = documents[index] if index < len(documents) else None
        if there is None or there.name != row["document"] or row.get("text_sha256", there.sha256) != there.sha256:
            raise UsageError(
                f"{folder.path}: holds a row of document {index}, {row['document']}, which is not that document any "
                "more; delete the folder and run the same command again"
            )


def _what(cell: Cell) -> Row:
    """What a table must say of a cell beside its figures."""
    return {
        "task": cell.task.name,
        "budget_requested": None if cell.budget is None else cell.budget.value,
        "prompt_requested": None if cell.prompt is None else cell.prompt.value,
        "model": None if cell.model is None else cell.model.label,
        "model_note": None if cell.model is None else cell.model.note,
        "dataset": None if cell.dataset is None else cell.dataset.label,
    }


def columns(cell: Cell) -> Row:
    """What is known of a cell before it is measured, as columns of a frame; options of groups are dotted."""
    row = {"policy": cell.policy_label, **_what(cell), "evict_every": cell.evict_every, "prefill": cell.prefill}
    if cell.model is not None:
        row["device"] = cell.device
    for group in ("model", "dataset", "policy", "task"):
        options = cell.config.get(group)
        for name, value in options.items() if isinstance(options, dict) else ():
            if name not in ("_target_", "started") and not (group in ("model", "dataset") and not cell.task.uses_model):
                row[f"{group}.{name}"] = value
    return row


def _for_people(cell: Cell) -> dict[str, Any]:
    """The configuration as W&B shows it: names, not class paths."""
    config = {k: v for k, v in cell.config.items() if k not in ("tracking", "results_dir", "launcher", "retry")}
    for group, part in (
        ("policy", cell.policy_class),
        ("model", cell.model),
        ("dataset", cell.dataset),
        ("task", cell.task),
    ):
        if isinstance(config.get(group), dict):
            name = part.name if group in ("policy", "task") else getattr(part, "label", None)  # type: ignore[union-attr]
            options = {k: v for k, v in config[group].items() if k != "_target_"}
            config[group] = {"name": name, **options}
    return {**config, "identity": cell.identity}


def _provenances(rows: list[Row]) -> Row:
    """Where the rows of a cell came from; several values stand beside each other."""
    found: Row = {}
    named = (
        "git",
        "python",
        "tova",
        "torch",
        "transformers",
        "numba",
        "numpy",
        "code",
        "device",
        "device_name",
        "dtype",
    )
    for name in named:
        values = list(dict.fromkeys(str(row[name]) for row in rows if row.get(name) is not None))
        if values:
            found[name] = ", ".join(values)
    for name in ("model_identity", "dataset_identity"):
        if name in rows[0]:
            found[name] = rows[0][name]
    return found


def reason_of(error: BaseException) -> str:
    """Why something failed, in one line."""
    said = " ".join(str(error).split())
    if isinstance(error, UsageError):
        return said
    return f"{type(error).__name__}: {said}"[:500] if said else type(error).__name__


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
