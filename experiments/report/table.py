"""Tables of a sweep: budgets across and rows down per measure, and every cell in a line."""

from __future__ import annotations

import math
import statistics
import textwrap
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from experiments.report.layout import FULL, NO_LIMIT, groups, repetitions, seeds, text
from experiments.report.measures import Measure, known, measures, show, unsaturated, values

__all__ = ["Grid", "footnotes", "grid", "groups", "long_table", "markdown", "wide_markdown"]

UNFINISHED = {"failed": "failed", "running": "running", "interrupted": "stopped", "pending": "not run"}
"""What stands in the place of a cell that is not done, by its status."""


@dataclass(frozen=True)
class Entry:
    """What stands in one place of a table.

    Attributes:
        text: as printed; NaN where losses that were not finite made it so, ``failed`` and the like where a cell is not
            done.
        mean: over the seeds of the place; NaN where there is no figure.
        spread: their standard deviation; NaN where there is one seed.
        best: of its budget, as printed; the full cache does not compete.
    """

    text: str
    mean: float
    spread: float = math.nan
    best: bool = False


@dataclass(frozen=True)
class Grid:
    """One measure of a group: policies down in the order they were run, ``full`` first; budgets across, ascending."""

    measure: Measure
    rows: list[str]
    columns: list[str]
    entries: dict[tuple[str, str], Entry]

    def at(self, row: str, column: str) -> Entry:
        """An entry, an empty one where nothing was to be measured."""
        return self.entries.get((row, column), Entry("", math.nan))

    @property
    def finite(self) -> list[float]:
        """All figures that have a place on an axis."""
        return [entry.mean for entry in self.entries.values() if math.isfinite(entry.mean)]


def grid(group: pd.DataFrame, measure: Measure) -> Grid:
    """The table of one measure; rows and budgets without any entry are left out."""
    places: dict[tuple[str, str], list[tuple[str, float]]] = {}
    columns = (group["row"], group["at"], group["status"], values(group, measure), known(group, measure))
    for row, at, status, figure, there in zip(*columns, strict=True):
        if there or status != "done":
            places.setdefault((row, at), []).append((status, figure))
    entries = {place: _entry(cells, measure) for place, cells in places.items()}
    rows = sorted(dict.fromkeys(row for row, _ in entries), key=lambda row: row != FULL)
    budgets = sorted(dict.fromkeys(at for _, at in entries), key=_across)
    for place in _best(entries, budgets, measure):
        entries[place] = replace(entries[place], best=True)
    return Grid(measure, rows, budgets, entries)


def _entry(cells: list[tuple[str, float]], measure: Measure) -> Entry:
    """Of the cells of one place, each with its status and its figure."""
    done = [figure for status, figure in cells if status == "done"]
    if not done:
        there = {status for status, _ in cells}
        return Entry(next(mark for status, mark in UNFINISHED.items() if status in there), math.nan)
    mean = sum(done) / len(done)
    spread = statistics.stdev(done) if len(done) > 1 and math.isfinite(mean) else math.nan
    text = show(mean, measure) or "NaN"
    return Entry(text if math.isnan(spread) else f"{text} ± {show(spread, measure).lstrip('+')}", mean, spread)


def _across(at: str) -> tuple[int, float]:
    """Order of the columns: no budget, shares of the text, tokens."""
    if at == NO_LIMIT:
        return 0, 0.0
    return (1 if float(at) < 1 else 2), float(at)


def _best(entries: dict[tuple[str, str], Entry], columns: list[str], measure: Measure) -> list[tuple[str, str]]:
    """The places of the best figures; none where all of a budget are equal."""
    found = []
    for column in columns if measure.low is not None else ():
        means = {p: e.mean for p, e in entries.items() if p[1] == column and p[0] != FULL and not math.isnan(e.mean)}
        printed = {place: show(mean, measure) for place, mean in means.items()}
        if len(set(printed.values())) > 1:
            top = show(min(means.values()) if measure.low else max(means.values()), measure)
            found += [place for place, text in printed.items() if text == top]
    return found


def long_table(group: pd.DataFrame) -> pd.DataFrame:
    """Every cell in a line, figures as printed, primary measures first and those beside them after."""
    chosen = measures(group, beside=True)
    seeded = seeds(group)
    # What is held at the end is said where it is not the budget: shares of layers, windows, bulk drops, prompts.
    held = pd.to_numeric(group["held_mean"]) if "held_mean" in group else pd.Series(math.nan, group.index)
    expected = pd.to_numeric(group["budget"]).clip(upper=_steps(group))
    differs = bool(((held - expected).abs() >= 0.5).any())
    figures = {m.short: values(group, m) for m in chosen}
    rows = []
    for place, (_, cell) in enumerate(group.iterrows()):
        row = {"policy": str(cell["row"]), "budget": "" if cell["at"] == NO_LIMIT else str(cell["at"])}
        row |= {column: "" if pd.isna(cell[column]) else text(cell[column]) for column in seeded}
        if differs:
            row["held"] = "" if pd.isna(held.iloc[place]) else f"{held.iloc[place]:.1f}"
        for m in chosen:
            row[m.short] = show(figures[m.short].iloc[place], m) or ("NaN" if _lost(cell) and m.column in group else "")
        if cell["status"] != "done":
            row[chosen[0].short] = UNFINISHED[cell["status"]]
        speed = cell["tokens_per_second"]
        row["tokens/s"] = "" if pd.isna(speed) else f"{speed:,.0f}"
        rows.append(row)
    return pd.DataFrame(rows)


def _lost(cell: Any) -> bool:
    lost = cell["tokens_not_finite"]
    return bool(pd.notna(lost) and lost > 0)


def footnotes(group: pd.DataFrame) -> list[str]:
    """What a reader of a group's tables must know beside them, a sentence each."""
    return [*_of_seeds(group), *_of_budgets(group), *_of_cells(group)]


def _of_seeds(group: pd.DataFrame) -> list[str]:
    counts = repetitions(group)
    notes = []
    if len(set(counts.values())) > 1 or set(group["row"]) - {FULL} - set(counts):
        notes += [f"{row}: mean ± sd over {count} seeds" for row, count in counts.items()]
    for (row, at), cells in group.groupby(["row", "at"], sort=False):
        done = int((cells["status"] == "done").sum())
        if 0 < done < len(cells):
            notes.append(f"{row}{'' if at == NO_LIMIT else f' {at}'}: {done} of {len(cells)} seeds are done")
    return notes


def _of_budgets(group: pd.DataFrame) -> list[str]:
    """Budgets that are longer than the text: no step has t >= k."""
    notes = []
    for _, cells in group[unsaturated(group)].groupby("at", sort=False):
        documents, tokens = cells["documents"].iloc[0], cells["tokens"].iloc[0]
        text_of = "every document"
        if pd.notna(tokens) and (pd.isna(documents) or documents == 1):
            text_of = f"all {int(tokens):,} tokens"
        elif "dataset.tokens" in cells and pd.notna(cells["dataset.tokens"].iloc[0]):
            text_of = f"all {int(cells['dataset.tokens'].iloc[0]):,} tokens of every document"
        budget = f"{int(cells['budget'].iloc[0]):,}"
        if _nothing_dropped(cells):
            notes.append(f"nothing dropped: budget {budget} holds {text_of}")
        else:
            notes.append(f"budget {budget} would hold {text_of}: no step has t >= k, the figures are over all steps")
    return notes


def _nothing_dropped(cells: pd.DataFrame) -> bool:
    if "held_mean" not in cells:
        return True
    return bool((pd.to_numeric(cells["held_mean"]) >= _steps(cells) - 0.5).all())


def _steps(cells: pd.DataFrame) -> pd.Series:
    """Of a document, on average: its last token is predicted and never read."""
    return pd.to_numeric(cells["tokens"]) / pd.to_numeric(cells["documents"]).fillna(1) - 1


def _of_cells(group: pd.DataFrame) -> list[str]:
    """Cells that are not done: why not."""
    notes = []
    for _, cell in group[(group["status"] == "done") & (group["reason"].fillna("") != "")].iterrows():
        notes.append(f"{cell['name']}: {cell['reason']}")
    for _, cell in group[~group["status"].isin(["done", "pending"])].iterrows():
        reason = textwrap.shorten(str(cell["reason"] or ""), 140, placeholder=" ...") if cell["reason"] else ""
        notes.append(f"{cell['name']}: {UNFINISHED[cell['status']]}{f', {reason}' if reason else ''}")
    pending = list(group["name"][group["status"] == "pending"])
    if pending:
        more = f" and {len(pending) - 6} more" if len(pending) > 7 else ""
        notes.append(f"not run yet: {', '.join(pending[:6] if more else pending)}{more}")
    return notes


def markdown(frame: pd.DataFrame) -> str:
    """All tables of a sweep as Markdown."""
    parts = []
    for title, group in groups(frame):
        parts.append(f"## {title}\n")
        for measure in measures(group):
            table = grid(group, measure)
            lines = [[row, *(_marked(table.at(row, at)) for at in table.columns)] for row in table.rows]
            parts += [f"### {measure.title}\n", _rows([["policy", *table.columns], *lines]) + "\n"]
        if notes := footnotes(group):
            parts.append("\n".join(f"- {note}" for note in notes) + "\n")
        every = long_table(group)
        parts += ["### every cell\n", _rows([list(every.columns), *every.values.tolist()]) + "\n"]
    return "\n".join(parts)


def _marked(entry: Entry) -> str:
    return f"**{entry.text}**" if entry.best else entry.text


def wide_markdown(group: pd.DataFrame) -> str:
    """One Markdown table: policies down, the budgets of each measure across, best in bold.

    A figure without a budget stands in its measure's first column.
    """
    header, columns = ["policy"], []
    tables = [grid(group, measure) for measure in measures(group)]
    for table in tables:
        budgets = [at for at in table.columns if at != NO_LIMIT] or [NO_LIMIT]
        header += [f"{table.measure.short} {budgets[0]}", *budgets[1:]]
        columns += [(table, [at, NO_LIMIT] if at == budgets[0] else [at]) for at in budgets]
    lines = [header]
    for row in tables[0].rows:
        lines.append(
            [row, *(next((_marked(t.at(row, at)) for at in places if t.at(row, at).text), "") for t, places in columns)]
        )
    return _rows(lines)


def _rows(lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(lines[0]) - 1)
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [escaped[0], rule, *escaped[1:]])
