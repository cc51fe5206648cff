"""What can be measured in a cell; each task is named by ``_target_`` in a file of ``conf/task``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from experiments.cells import Cell
    from experiments.data import Document
    from experiments.models import Loaded

Row = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """What a task is given to work with.

    Attributes:
        cell: what is run.
        done: names of the documents already measured.
        load_model: the model, loaded on first use and shared by the cells of a process.
        load_documents: the texts, likewise.
        reference: per-token figures of the model that forgets nothing, by a document's index.
        advance: report progress, in tokens out of ``expect``'s.
        expect: say how many tokens there are to do.
        smaller: halve what is optional about the memory needed so many times: it was too much before.
        folder: where the cell's results are; a task may leave files of its own there.
    """

    cell: Cell
    done: frozenset[str]
    load_model: Callable[[], Loaded]
    load_documents: Callable[[], list[Document]]
    reference: Callable[[int], dict[str, np.ndarray]]
    advance: Callable[[float], None]
    expect: Callable[[float], None]
    smaller: int = 0
    folder: Path = Path()


class Task(Protocol):
    """One kind of measurement."""

    @property
    def name(self) -> str: ...

    @property
    def uses_model(self) -> bool:
        """False for a task that needs neither a model nor a dataset."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether other policies are compared with the full cache on the same documents."""
        ...

    @property
    def length(self) -> int | None:
        """Tokens of its own input, if it brings one."""
        ...

    def identity(self) -> dict[str, Any]:
        """Everything about the task that determines a result."""
        ...

    def at_once(self, cell: Cell) -> int:
        """How many cells that share model and text it would take at once, ``cell`` among them; at least 1."""
        ...

    def run(self, batch: Sequence[Context]) -> Iterator[tuple[int, Row, dict[str, np.ndarray]]]:
        """Yield which cell of the batch, its row and its per-token arrays, as each document finishes.

        Documents a cell has done are left out. A lone cell is a batch of one.
        """
        ...

    def summarise(self, rows: list[Row]) -> Row:
        """The cell's figures from its documents'."""
        ...

    def describe(self, summary: Row) -> str | None:
        """A table of its own for a single cell; None if the one line the runner prints says it all."""
        ...
