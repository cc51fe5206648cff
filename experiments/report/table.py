"""Tables of a sweep: budgets across and policies down per measure, and every cell in a line."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

if TYPE_CHECKING:
    from rich.table import Table

FULL = "full"
NO_LIMIT = "all"
"""Heading of the column for a policy without a budget."""


@dataclass(frozen=True)
class Measure:
    """One figure of a cell: its column in the frame, its name for people, whether less is better, its digits."""

    column: str
    title: str
    short: str
    low: bool
    form: str


PERPLEXITY = Measure("perplexity", "perplexity, all tokens", "perplexity", True, ".3f")
_MODEL = (
    PERPLEXITY,
    Measure("delta_nll", "loss over the full cache, nats per token, t >= k", "delta NLL", True, "+.4f"),
    Measure("retained_mass", "retained mass, t >= k", "mass", False, ".4f"),
    Measure("heavy_hitter_recall", "heavy-hitter recall, t >= k", "recall", False, ".4f"),
)
_MODEL_BESIDE = (
    Measure("delta_nll_all_steps", "loss over the full cache, nats per token, all steps", "NLL, all", True, "+.4f"),
    Measure("retained_mass_all_steps", "retained mass, all steps", "mass, all", False, ".4f"),
    Measure("heavy_hitter_recall_all_steps", "heavy-hitter recall, all steps", "recall, all", False, ".4f"),
)
_TRACE = (
    Measure("retained_mass_all_steps", "retained mass, all steps", "mass", False, ".6f"),
    Measure("heavy_hitter_recall_all_steps", "heavy-hitter recall, all steps", "recall", False, ".6f"),
)
_TRACE_BESIDE = (
    Measure("retained_mass", "retained mass, t >= k", "mass, t >= k", False, ".6f"),
    Measure("heavy_hitter_recall", "heavy-hitter recall, t >= k", "recall, t >= k", False, ".6f"),
)
_DTYPES = (
    Measure("same_sets", "share of (layer, step) pairs with the same set, t >= k", "same sets", False, ".4f"),
    Measure("shared", "share of a kept set that both hold, t >= k", "shared", False, ".4f"),
)
_BY_TASK = {"trace": (_TRACE, _TRACE_BESIDE), "dtypes": (_DTYPES, ())}


def measures(frame: pd.DataFrame, beside: bool = False) -> list[Measure]:
    """The measures a frame has figures for; ``beside`` adds those that go beside the primary ones."""
    tasks = set(frame["task"])
    wanted = _BY_TASK.get(tasks.pop(), (_MODEL, _MODEL_BESIDE)) if len(tasks) == 1 else (_MODEL, _MODEL_BESIDE)
    chosen = [*wanted[0], *(wanted[1] if beside else ())]
    return [m for m in chosen if m.column in frame and _known(frame, m).any()]


def _known(frame: pd.DataFrame, measure: Measure) -> pd.Series:
    """bool per cell: it has the figure, or would have it had its losses been finite."""
    known = frame[measure.column].notna()
    return known | (frame["tokens_not_finite"].fillna(0) > 0) if "tokens_not_finite" in frame else known


def prepared(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with a column ``at``, the budget as it was asked for, and how often it evicts in the policy's name."""
    frame = frame.copy()
    frame["at"] = frame["budget_requested"].astype(object).where(frame["budget_requested"].notna(), NO_LIMIT)
    frame["at"] = [int(v) if isinstance(v, float) and v == int(v) else v for v in frame["at"]]
    if "evict_every" in frame:
        often = frame["evict_every"].fillna(1) == 1
        frame["policy"] = frame["policy"].where(often, frame["policy"] + " every " + frame["evict_every"].astype(str))
    if "prefill" in frame:
        frame["policy"] = frame["policy"].where(frame["prefill"] != "one_shot", frame["policy"] + " one-shot")
        prompts = frame["prompt"].fillna(0).astype(int)
        if prompts[prompts > 0].nunique() > 1:
            frame["policy"] = frame["policy"].where(prompts == 0, frame["policy"] + " prompt=" + prompts.astype(str))
    return frame


def groups(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Cells that may be compared, with a title: a group per task, model and dataset."""
    out = []
    for _, group in prepared(frame).groupby(["task", "model", "dataset"], dropna=False, sort=False):
        first = group.iloc[0]
        if first["task"] == "trace":
            title = f"canonical trace, {int(first['tokens']):,} tokens"
        else:
            lengths = int(first["tokens"])
            title = f"{first['model_note']}; {first['dataset']}, {_documents(first)}, {lengths:,} tokens in all"
            prompts = sorted({int(p) for p in group.get("prompt", pd.Series(dtype=float)).dropna() if p > 0})
            if prompts:
                title += f", prompts of {' and '.join(f'{p:,}' for p in prompts)}"
        out.append((title, group))
    return out


def _documents(row: Any) -> str:
    return "1 document" if row["documents"] == 1 else f"{int(row['documents'])} documents"


def pivot(group: pd.DataFrame, measure: Measure) -> pd.DataFrame:
    """Policies down in the order they were run, ``full`` first; budgets across, ascending.

    NaN where there is no figure; see :func:`printed` for where it is one.
    """
    return _spread(group[_known(group, measure)], measure.column)


def printed(group: pd.DataFrame, measure: Measure) -> pd.DataFrame:
    """:func:`pivot` as texts: nothing where there is no figure, NaN where losses that were not finite made it so."""
    figures = pivot(group, measure)
    texts = figures.map(lambda value: show(value, measure)).astype(object)
    if "tokens_not_finite" in group:
        lost = _spread(group[_known(group, measure)], "tokens_not_finite").fillna(0) > 0
        texts = texts.mask(lost & figures.isna(), "NaN")
    return texts


def _spread(group: pd.DataFrame, column: str) -> pd.DataFrame:
    table = group.pivot_table(index="policy", columns="at", values=column, sort=False, aggfunc="first", dropna=False)
    columns = sorted(table.columns, key=lambda v: -1.0 if v == NO_LIMIT else float(v))
    order = sorted(table.index, key=lambda name: name != FULL)
    return table.loc[order, columns]


def best(table: pd.DataFrame, measure: Measure) -> pd.DataFrame:
    """bool, shaped like ``table``: the best figure of each budget, as printed; the full cache does not compete."""
    rivals = table.drop(index=FULL, errors="ignore")
    marks = pd.DataFrame(False, index=table.index, columns=table.columns)
    for column in rivals:
        values = rivals[column].dropna()
        if len(values) > 1:
            top = values.min() if measure.low else values.max()
            marks.loc[values.index, column] = [show(v, measure) == show(top, measure) for v in values]
    return marks


def show(value: Any, measure: Measure) -> str:
    """A figure as printed; nothing where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:{measure.form}}"


def console_table(title: str, group: pd.DataFrame) -> Table:
    """Budgets across, policies down, a block per measure, best in bold; for a terminal."""
    from rich.table import Table
    from rich.text import Text

    chosen = measures(group)
    budgets = list(pivot(group, chosen[0]).columns)
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column("budget", no_wrap=True)
    for budget in budgets:
        table.add_column(str(budget), justify="right", no_wrap=True)
    for measure in chosen:
        figures = pivot(group, measure).reindex(columns=budgets)
        texts = printed(group, measure).reindex(columns=budgets, fill_value="")
        marks = best(figures, measure)
        table.add_section()
        table.add_row(Text(measure.title, style="italic"))
        for policy in figures.index:
            cells = [Text(texts.loc[policy, b], style="bold" if marks.loc[policy, b] else "") for b in budgets]
            table.add_row(f"  {policy}", *cells)
    return table


def long_table(group: pd.DataFrame) -> pd.DataFrame:
    """Every cell in a line, figures as printed, primary measures first and those beside them after."""
    rows = []
    # What is held at the end is said where it is not the budget: shares of layers, windows, bulk drops, prompts.
    held = group["held_mean"] if "held_mean" in group else pd.Series(dtype=float)
    limited = group["budget"].notna() & held.notna()
    differs = bool(((held - group["budget"]).abs()[limited] >= 0.5).any()) if len(held) else False
    for _, cell in group.iterrows():
        row = {"policy": cell["policy"], "budget": "" if cell["at"] == NO_LIMIT else str(cell["at"])}
        if differs:
            row["held"] = "" if pd.isna(cell["held_mean"]) else f"{cell['held_mean']:.1f}"
        row |= {m.short: _of_a_cell(cell, m) for m in measures(group, beside=True)}
        row["tokens/s"] = f"{cell['tokens_per_second']:,.0f}"
        rows.append(row)
    return pd.DataFrame(rows)


def _of_a_cell(cell: Any, measure: Measure) -> str:
    lost = cell.get("tokens_not_finite", 0)
    return show(cell[measure.column], measure) or ("NaN" if lost and lost > 0 else "")


def markdown(frame: pd.DataFrame) -> str:
    """All tables of a sweep as Markdown."""
    parts = []
    for title, group in groups(frame):
        parts.append(f"## {title}\n")
        for measure in measures(group):
            figures = pivot(group, measure)
            marks = best(figures, measure)
            parts.append(f"### {measure.title}\n")
            lines = [["policy", *(str(c) for c in figures.columns)]]
            for policy in figures.index:
                texts = list(printed(group, measure).loc[policy])
                bold = [f"**{t}**" if marks.loc[policy, c] else t for t, c in zip(texts, figures.columns, strict=True)]
                lines.append([str(policy), *bold])
            parts.append(_rows(lines) + "\n")
        every = long_table(group)
        parts.append("### every cell\n")
        parts.append(_rows([list(every.columns), *every.values.tolist()]) + "\n")
    return "\n".join(parts)


def wide_markdown(group: pd.DataFrame) -> str:
    """One Markdown table: policies down, the budgets of each measure across, best in bold."""
    header, columns = ["policy"], []
    for measure in measures(group):
        figures = pivot(group, measure)
        marks = best(figures, measure)
        for place, budget in enumerate(c for c in figures.columns if c != NO_LIMIT):
            header.append(f"{measure.short} {budget}" if place == 0 else str(budget))
            columns.append((printed(group, measure), marks, budget))
    lines = [header]
    for policy in pivot(group, measures(group)[0]).index:
        line = [str(policy)]
        for texts, marks, budget in columns:
            if policy == FULL:
                first = budget == next(c for c in texts.columns if c != NO_LIMIT)
                line.append(texts.loc[policy, NO_LIMIT] if first else "")
            else:
                text = texts.loc[policy, budget]
                line.append(f"**{text}**" if marks.loc[policy, budget] else text)
        lines.append(line)
    return _rows(lines)


def _rows(lines: list[list[str]]) -> str:
    rule = ["---"] + ["---:"] * (len(lines[0]) - 1)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [lines[0], rule, *lines[1:]])
