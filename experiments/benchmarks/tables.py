"""Markdown tables."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from experiments.tasks import Row


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table: words in the first column, figures in the others."""
    lines = [_line(columns), f"| --- |{' ---: |' * (len(columns) - 1)}"]
    return [*lines, *map(_line, rows)]


def crossed(
    found: Sequence[Row], down: str, across: str, head: Callable[[int], str], cell: Callable[[Row], str]
) -> list[str]:
    """A row for each value of ``down``, as they come, and a column for each number ``across``, ascending.

    Args:
        head: of a column.
        cell: what is said of one of ``found``; where there is none, nothing.
    """
    numbers = sorted({one[across] for one in found})
    said = {(one[down], one[across]): cell(one) for one in found}
    names = dict.fromkeys(one[down] for one in found)
    return table([down, *map(head, numbers)], ([name, *(said.get((name, n), "") for n in numbers)] for name in names))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
