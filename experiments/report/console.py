"""A sweep's tables for a terminal of any width: columns that do not fit go into a further block, numbers stay whole."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pandas as pd

from experiments.report.layout import FULL, NO_LIMIT, groups
from experiments.report.measures import measures
from experiments.report.table import Grid, footnotes, grid, long_table

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.table import Table
    from rich.text import Text

_GAP = 2
"""Blanks between columns."""


def console_report(frame: pd.DataFrame) -> RenderableType:
    """Everything a sweep prints at its end: for each group of comparable cells its tables, notes and lines."""
    from rich.console import Group

    parts: list[RenderableType] = []
    for title, group in groups(frame):
        parts += ["", console_table(title, group), _heading(f"every cell ({len(group)})"), cell_lines(group)]
    return Group(*parts)


def console_table(title: str, group: pd.DataFrame) -> RenderableType:
    """Budgets across, policies down, a table per measure, best in bold; what must be said beside them below."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    tables = [_measured(grid(group, measure)) for measure in measures(group)]
    notes = Table.grid(padding=(0, 1, 0, 0))
    for note in footnotes(group):
        notes.add_row("-", Text(note))
    below: list[RenderableType] = ["", notes] if notes.rows else []
    return Group(Text(title, style="bold"), *tables, *below)


def cell_lines(group: pd.DataFrame) -> RenderableType:
    """Every cell in a line."""
    from rich.text import Text

    table = long_table(group)
    headings = [str(c) for c in table]
    first = sum(c in ("policy", "budget") or "." in c for c in headings)
    lines = [[Text(cell) for cell in line] for line in table.to_numpy().tolist()]
    return Blocks(headings[:first], headings[first:], lines)


def _measured(table: Grid) -> RenderableType:
    """One measure: its name and, beside it, the full cache's figure where that is all there is without a budget."""
    from rich.console import Group
    from rich.text import Text

    title, rows, columns = table.measure.title, table.rows, table.columns
    full = table.at(FULL, NO_LIMIT).text
    if full and len(rows) > 1 and not any(table.at(row, NO_LIMIT).text for row in rows if row != FULL):
        title += f"   (full cache {full})"
        rows, columns = [row for row in rows if row != FULL], [at for at in columns if at != NO_LIMIT]
    lines = []
    for row in rows:
        entries = [table.at(row, at) for at in columns]
        lines.append([Text(row), *(Text(entry.text, "bold" if entry.best else "") for entry in entries)])
    return Group(_heading(title), Blocks(["budget"], columns, lines))


def _heading(title: str) -> Text:
    from rich.text import Text

    return Text(f"\n{title}", style="italic")


@dataclass(frozen=True)
class Blocks:
    """A table that is split where it is wider than the terminal: its first columns, and as many others as fit, below
    each other.

    Args:
        lead: headings of the columns that every block begins with; the first is of names, which may wrap at blanks.
        rest: headings of the others.
        lines: a text per column.
    """

    lead: Sequence[str]
    rest: Sequence[str]
    lines: Sequence[Sequence[Text]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        headings = [*self.lead, *self.rest]
        widths = [
            max(len(heading), *(line[i].cell_len for line in self.lines), 0) for i, heading in enumerate(headings)
        ]
        first = len(self.lead)
        beside = sum(w + _GAP for w in widths[1:first])
        # Names give way first, at their blanks, as far as two of the others find room beside them.
        room = options.max_width - beside - 2 * (max(widths[first:], default=0) + _GAP)
        longest_word = max((len(word) for line in self.lines for word in line[0].plain.split()), default=0)
        widths[0] = min(widths[0], max(room, longest_word, len(headings[0])))
        for number, block in enumerate(_split(widths[first:], options.max_width - widths[0] - beside)):
            if number:
                yield ""
            yield self._table([*range(first), *(first + i for i in block)], widths)

    def _table(self, columns: list[int], widths: list[int]) -> Table:
        from rich import box
        from rich.table import Table

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, _GAP - 1, 0, 0), show_edge=False)
        headings = [*self.lead, *self.rest]
        for i in columns:
            justify = "left" if i == 0 else "right"
            table.add_column(headings[i], justify=justify, width=widths[i], overflow="fold", no_wrap=i > 0)  # type: ignore[arg-type]
        for line in self.lines:
            if any(line[i].plain for i in columns[len(self.lead) :]) or not self.rest:
                table.add_row(*(line[i] for i in columns))
        return table


def _split(widths: list[int], room: int) -> list[range]:
    """Columns of these widths in as few blocks as fit into ``room``, about equally many in each."""
    columns = len(widths)
    blocks = [range(columns)]
    for count in range(1, columns + 1):
        blocks = [range(n * columns // count, (n + 1) * columns // count) for n in range(count)]
        if all(sum(widths[i] + _GAP for i in block) <= room for block in blocks):
            break
    return blocks
