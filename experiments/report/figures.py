"""The figure of a sweep: its first measure against the budget, a line per policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

from experiments.report.table import FULL, NO_LIMIT, groups, measures, pivot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's colours, told apart by colour-blind readers; markers say the same again.
_LOOKS = {
    "tova": ("#D55E00", "o"),
    "h2o": ("#0072B2", "s"),
    "h2o_half": ("#56B4E9", "D"),
    "snapkv": ("#009E73", "^"),
    "pyramidkv": ("#117733", "P"),
    "scissorhands": ("#CC79A7", "v"),
    "streaming_llm": ("#E69F00", "X"),
    "window": ("#999999", "<"),
    "random": ("#444444", "x"),
}
_OTHERS = (("#882255", "h"), ("#332288", "p"), ("#88CCEE", "*"), ("#AA4499", "8"))


def figure(frame: pd.DataFrame) -> Figure:
    """One panel per group of comparable cells; the full cache is a dashed line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    panels = groups(frame)
    drawn = Figure(figsize=(6.4, 4.2 * len(panels)), layout="constrained", dpi=150)
    for number, (title, group) in enumerate(panels, start=1):
        axes = drawn.add_subplot(len(panels), 1, number)
        measure = measures(group)[0]
        table = pivot(group, measure)
        others = iter(_OTHERS * 8)
        for policy in table.index:
            values = table.loc[policy].drop(labels=NO_LIMIT, errors="ignore").dropna()
            if len(values):
                colour, marker = _LOOKS.get(str(policy)) or next(others)
                axes.plot([float(b) for b in values.index], values, color=colour, marker=marker, label=str(policy))
        if FULL in table.index:
            axes.axhline(float(table[NO_LIMIT][FULL]), color="black", linestyle="--", linewidth=1, label=FULL)
        budgets = sorted(float(b) for b in table.columns if b != NO_LIMIT)
        if budgets:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(budgets))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(ScalarFormatter())
        if measure.low:
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter(ScalarFormatter())
            axes.yaxis.set_minor_formatter(ScalarFormatter())
        axes.set_xlabel("budget (positions a layer may keep)")
        axes.set_ylabel(measure.title)
        axes.set_title(title, fontsize=9)
        axes.grid(True, which="both", alpha=0.3)
        axes.legend(fontsize=8)
    return drawn
