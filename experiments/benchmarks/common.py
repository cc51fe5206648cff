"""What makes a task of a benchmark, and the checks of its options."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from experiments.files import write_atomically
from experiments.options import one_of, shown
from experiments.tasks import Context, Row
from tova.errors import UsageError

if TYPE_CHECKING:
    from pathlib import Path

    import numpy as np
    from matplotlib.figure import Figure

    from experiments.cells import Cell
    from tova.policies import Policy


@dataclass(frozen=True)
class Benchmark(ABC):
    """A task that gives one row; its table and figure are put beside the cell's results.

    Args:
        started: when; a benchmark is measured anew each time it is asked for.
    """

    started: str

    name: ClassVar[str]
    uses_model: ClassVar[bool] = False
    needs_reference: ClassVar[bool] = False
    takes_prompts: ClassVar[bool] = False

    @property
    def length(self) -> int | None:
        return None

    def check(self, cell: Cell, policy: Policy) -> None:
        """Raise for what would have been ignored."""
        if cell.evict_every > 1:
            raise UsageError(f"evict_every={cell.evict_every}: task={self.name} evicts at every step; leave it out")

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "started": self.started}

    def at_once(self, cell: Cell) -> int:
        return 1

    @abstractmethod
    def measure(self, context: Context) -> tuple[Row, dict[str, np.ndarray]]:
        """The row, which names its ``document``, and every single time by what was timed."""

    @abstractmethod
    def table(self, summary: Row) -> str:
        """The row in Markdown."""

    def figure(self, summary: Row) -> Figure | None:
        """The row drawn; None leaves it at the table."""
        return None

    def run(self, batch: Sequence[Context]) -> Iterator[tuple[int, Row, dict[str, np.ndarray]]]:
        (context,) = batch
        if context.done:
            return
        measured, arrays = self.measure(context)
        row = {"index": 0, **measured, "started": self.started}
        _save(context.folder, self.table(row), self.figure(row))
        yield 0, row, arrays

    def summarise(self, rows: list[Row]) -> Row:
        return {k: v for k, v in rows[0].items() if k not in ("index", "document")}

    def describe(self, summary: Row) -> str | None:
        return self.table(summary)


def _save(folder: Path, text: str, drawn: Figure | None) -> None:
    """Put ``table.md`` and, if there is one, ``figure.png`` into a cell's folder."""
    from experiments.report.figures import png

    write_atomically(folder / "table.md", text + "\n")
    if drawn is not None:
        write_atomically(folder / "figure.png", png(drawn))


def some_of(option: str, values: Any, choices: Sequence[str]) -> None:
    """Raise unless ``values`` is a list of at least one of ``choices``."""
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise UsageError(f"{option}={shown(values)}: must be a list of at least one of {', '.join(choices)}")
    for value in values:
        one_of(option, value, choices)


def some_policies(values: Any) -> None:
    """Raise unless the option ``task.policies`` names policies, at least one."""
    from experiments.benchmarks.own import known

    some_of("task.policies", values, list(known()))
