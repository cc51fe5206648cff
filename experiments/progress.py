"""Progress of a sweep and of its cell: bars with the time left on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self, TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars


class Progress:
    """A sweep of ``cells`` cells; use as a context manager.

    Args:
        cells: how many there are.
        log: where lines go; standard error by default, with bars if it is a terminal.
    """

    def __init__(self, cells: int, log: TextIO | None = None) -> None:
        self._log = log
        self._cells = cells
        self._finished = 0
        self._started = time.monotonic()
        self._worked = 0.0
        self._worked_cells = 0
        self._cell_started = self._started
        self._console = Console(stderr=True)
        self._bars: Bars | None = None
        if self._console.is_terminal and log is None:
            self._bars = Bars(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[unit]}"),
                TimeRemainingColumn(),
                console=self._console,
                transient=True,
            )

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
            self._sweep = self._bars.add_task("sweep", total=self._cells, unit="cells", visible=self._cells > 1)
            self._cell = self._bars.add_task("", total=None, unit="tokens", visible=False)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._bars is not None:
            self._bars.stop()

    def start(self, title: str) -> None:
        """A batch of cells begins."""
        self._expected, self._advanced = 0.0, 0.0
        self._cell_started = time.monotonic()
        if self._bars is not None:
            self._bars.reset(self._cell, description=title, total=None, completed=0, visible=True)

    def expect(self, tokens: float) -> None:
        """The cell has this many tokens to do; from here on its time counts (what came before is done once)."""
        if self._expected == 0:
            self._cell_started = time.monotonic()
        self._expected += tokens
        if self._bars is not None:
            self._bars.update(self._cell, total=int(self._expected))

    def advance(self, tokens: float) -> None:
        """So many of them are done."""
        self._advanced += tokens
        if self._bars is not None:
            self._bars.update(self._cell, completed=int(self._advanced))

    def finish(self, name: str, outcome: str, worked: bool, cells: int = 1) -> None:
        """A cell is over; ``worked`` is False if its result was there before, or there is none.

        ``cells`` is how many were measured beside each other, it among them.
        """
        self._finished += 1
        seconds = (time.monotonic() - self._cell_started) / cells if worked else 0.0
        if worked:
            self._worked += seconds
            self._worked_cells += 1
        if self._bars is not None:
            self._bars.update(self._sweep, completed=self._finished)
            self._bars.update(self._cell, visible=False)
        width = len(str(self._cells))
        took = f"  ({seconds:.0f} s{self._left()})" if worked else ""
        parts = outcome.split("  ")
        line = f"[{self._finished:{width}d}/{self._cells}] {name:<18} "
        # What does not fit into a terminal's line is in the table.
        while self._bars is not None and len(parts) > 1 and len(line + "  ".join(parts) + took) > self._console.width:
            parts.pop()
        self.say(line + "  ".join(parts) + took)

    def _left(self) -> str:
        rest = self._cells - self._finished
        if rest <= 0 or not self._worked_cells:
            return ""
        left = rest * self._worked / self._worked_cells
        return f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"

    def say(self, line: str) -> None:
        """A line that stays."""
        if self._bars is not None:
            self._bars.console.print(line, highlight=False, markup=False)
        else:
            print(line, file=self._log or sys.stderr, flush=True)
