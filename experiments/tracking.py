"""Weights & Biases: one run per cell and sweep, however often it was resumed; offline unless asked otherwise.

Offline a run is written in one go when its cell has ended, from what is stored, so that nothing half-written is left
by a process that was killed. Online it is opened when the cell begins and can be watched; a resumed cell goes on in it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from experiments.files import write_atomically
from tova.errors import UsageError

MODES = ("offline", "online", "disabled")
_SECONDS = 5
"""That W&B's server is waited for before a sweep."""


def check(mode: str) -> None:
    """Raises where W&B cannot be used as ``tracking.mode`` says, within seconds and before anything is run."""
    from experiments.options import one_of

    one_of("tracking.mode", mode, MODES)
    if mode != "online":
        return
    import wandb

    settings = wandb.Settings()
    settings.update_from_env_vars(os.environ)
    address = urlsplit(settings.base_url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((address.hostname or "", port), timeout=_SECONDS).close()
    except OSError as e:
        raise UsageError(
            f"tracking.mode=online: {address.hostname} cannot be reached ({e.strerror or type(e).__name__}); use "
            "tracking.mode=offline and send the runs later with `python -m experiments.sync`"
        ) from e
    if not wandb.api.api_key:
        raise UsageError("tracking.mode=online: nobody is logged in; run `wandb login`, or use tracking.mode=offline")


class Tracking:
    """What the cells of a sweep have in common in W&B.

    Args:
        mode, project: as in the configuration.
        root: the results folder; offline runs go to ``wandb`` in it.
        group: the sweep's id.
        marks: a folder for a mark per cell whose run is complete.
        say: told, once, if W&B stops working; the sweep goes on without it.
    """

    def __init__(
        self, mode: str, project: str, root: Path, group: str, marks: Path, say: Callable[[str], None] = print
    ) -> None:
        self._mode, self._project, self._root, self._group, self._marks = mode, project, root, group, marks
        self._say = say
        self._broken = mode == "disabled"

    def cell(self, cell_id: str, name: str, config: dict[str, Any], rows: list[dict[str, Any]]) -> Tracker:
        """The run of a cell that begins, or goes on after ``rows``."""
        tracker = Tracker(self, cell_id, name, config)
        for row in rows:
            tracker.document(row)
        if self._mode == "online":
            tracker.open()
        return tracker

    def complete(self, cell_id: str) -> bool:
        """Whether the cell's run of this sweep was written to its end."""
        return self._broken or (self._marks / cell_id).exists()

    def attempt(self, work: Callable[[], None]) -> None:
        """Do it; if W&B fails, say so once and leave it out from then on. A sweep is not stopped by its dashboard."""
        if self._broken:
            return
        try:
            work()
        except Exception as e:
            self._broken = True
            said = (str(e).strip() or type(e).__name__).splitlines()[0]
            self._say(f"W&B stopped working ({said[:200]}); the sweep goes on, and its results are stored as ever")


class Tracker:
    """The run of one cell."""

    def __init__(self, tracking: Tracking, cell_id: str, name: str, config: dict[str, Any]) -> None:
        self._tracking, self._cell, self._name, self._config = tracking, cell_id, name, config
        self._id = hashlib.sha256(f"{tracking._group} {cell_id}".encode()).hexdigest()[:16]
        self._rows: list[dict[str, Any]] = []
        self._run: Any = None

    def document(self, row: dict[str, Any]) -> None:
        """A document's figures, ``document/<name>``; the step is the document's index."""
        self._rows.append(row)
        if self._run is not None:
            self._tracking.attempt(lambda: self._log(row))

    def open(self) -> None:
        """Begin the run, and log what there is of it."""
        self._tracking.attempt(self._open)

    def end(self, status: str, summary: dict[str, Any]) -> None:
        """The cell has ended: ``done``, ``failed`` or ``interrupted``; offline, that is when its run is written."""
        if status == "interrupted" and self._run is None:
            return  # nothing was begun; whoever goes on writes it
        self._tracking.attempt(lambda: self._end(status, summary))

    def _open(self) -> None:
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        tracking = self._tracking
        folder = tracking._root.resolve()  # absolute: W&B writes from a process of its own, which may stand elsewhere
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(f"wandb/offline-run-*-{self._id}"):
            shutil.rmtree(left)  # of the same cell and sweep, from a process that was killed: all of it is logged again
        settings = wandb.Settings(
            silent=True, console="off", disable_git=True, x_disable_stats=True, disable_code=True, init_timeout=30
        )
        self._run = wandb.init(
            mode=tracking._mode,  # type: ignore[arg-type]
            project=tracking._project,
            id=self._id,
            name=self._name,
            group=tracking._group,
            config={"cell": self._cell, **self._config},
            dir=str(folder),
            resume="allow" if tracking._mode == "online" else None,
            # Cells that are measured beside each other have a run each.
            reinit="create_new",
            settings=settings,
        )
        self._run.define_metric("document/*", summary="none")
        for row in self._rows:
            self._log(row)

    def _log(self, row: dict[str, Any]) -> None:
        if row["index"] < self._run.step:
            return  # logged before the cell was interrupted
        figures = {k: v for k, v in row.items() if isinstance(v, float) or k in ("document", "tokens", "cache_bytes")}
        self._run.log({f"document/{k}": v for k, v in figures.items()}, step=row["index"])

    def _end(self, status: str, summary: dict[str, Any]) -> None:
        if self._run is None:
            self._open()
        self._run.summary.update({k: v for k, v in summary.items() if isinstance(v, int | float | str)})
        self._run.summary["status"] = status
        self._run.finish(exit_code={"done": 0, "failed": 1}.get(status, 130))
        if status == "done":
            self._tracking._marks.mkdir(parents=True, exist_ok=True)
            write_atomically(self._tracking._marks / self._cell, self._id)
