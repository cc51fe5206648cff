"""Weights & Biases: one run per cell, offline unless asked otherwise, always finished, marked failed if it failed."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tova.errors import UsageError

MODES = ("offline", "online", "disabled")


class Tracker:
    """What a cell reports while it runs; does nothing when tracking is disabled."""

    def __init__(self, run: Any = None) -> None:
        self._run = run

    def document(self, row: dict[str, Any]) -> None:
        """Log a document's figures, ``document/<name>``; the step is the document's index."""
        if self._run is not None:
            figures = {
                k: v for k, v in row.items() if isinstance(v, float) or k in ("document", "tokens", "cache_bytes")
            }
            self._run.log({f"document/{k}": v for k, v in figures.items()})

    def summary(self, figures: dict[str, Any]) -> None:
        """Set the cell's figures as the run's summary."""
        if self._run is not None:
            self._run.summary.update({k: v for k, v in figures.items() if isinstance(v, int | float | str)})


def check_mode(mode: str) -> None:
    if mode not in MODES:
        raise UsageError(f"tracking.mode={mode}: must be one of {', '.join(MODES)}")


@contextlib.contextmanager
def track(
    mode: str, project: str, folder: Path, *, name: str, group: str | None, config: dict[str, Any]
) -> Iterator[Tracker]:
    """A run called ``name`` in ``group``, for the length of the block.

    Args:
        mode: offline writes under ``folder``/wandb and needs no account; online needs ``wandb login``.
    """
    check_mode(mode)
    if mode == "disabled":
        yield Tracker()
        return
    os.environ.setdefault("WANDB_SILENT", "true")
    import wandb

    folder.mkdir(parents=True, exist_ok=True)
    settings = wandb.Settings(silent=True, console="off", disable_git=True, x_disable_stats=True, disable_code=True)
    try:
        run = wandb.init(
            mode=mode,  # type: ignore[arg-type]
            project=project,
            name=name,
            group=group,
            config=config,
            # Absolute: W&B writes from a process of its own, which may stand elsewhere.
            dir=str(folder.resolve()),
            # A run left open by a failed cell would silently be returned with its old configuration.
            reinit="finish_previous",
            settings=settings,
        )
    except (wandb.errors.UsageError, wandb.errors.CommError) as e:
        raise UsageError(f"tracking.mode={mode}: W&B cannot start ({e}); log in, or use tracking.mode=offline") from e
    try:
        yield Tracker(run)
    except BaseException:
        run.finish(exit_code=1)
        raise
    run.finish()
