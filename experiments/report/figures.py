"""The figure of a sweep: its first measure against the budget, a line per policy."""

from __future__ import annotations

import io
import itertools
from typing import TYPE_CHECKING

import numpy as np
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
_OTHERS = (
    ("#882255", "h"), ("#332288", "p"), ("#88CCEE", "*"), ("#AA4499", "8"),
    ("#999933", "d"), ("#661100", ">"), ("#44AA99", "H"), ("#DDCC77", "P"),
)  # fmt: skip


def figure(frame: pd.DataFrame) -> Figure:
    """One panel per group of comparable cells; the full cache is a dashed line."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    panels = groups(frame)
    drawn = Figure(figsize=(6.4, 4.2 * len(panels)), layout="constrained", dpi=150)
    for number, (title, group) in enumerate(panels, start=1):
        axes = drawn.add_subplot(len(panels), 1, number)
        measure = measures(group)[0]
        table = pivot(group, measure).replace([np.inf, -np.inf], np.nan)  # what is not finite has no place on an axis
        others = iter(_OTHERS * 8)
        ceiling = _ceiling(table) if measure.low else None
        for policy in table.index:
            values = table.loc[policy].drop(labels=NO_LIMIT, errors="ignore").dropna()
            if len(values):
                colour, marker = _LOOKS.get(str(policy)) or next(others)
                label = str(policy)
                if ceiling is not None and values.max() > ceiling:
                    label += f" (to {values.max():.0f}, off the scale)"
                axes.plot([float(b) for b in values.index], values, color=colour, marker=marker, label=label)
        if FULL in table.index and not np.isnan(table[NO_LIMIT][FULL]):
            axes.axhline(float(table[NO_LIMIT][FULL]), color="black", linestyle="--", linewidth=1, label=FULL)
        if ceiling is not None:
            lowest = float(table.min().min())
            axes.set_ylim(lowest - 0.05 * (ceiling - lowest), ceiling)
        budgets = sorted(float(b) for b in table.columns if b != NO_LIMIT)
        if budgets:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_locator(FixedLocator(budgets))
            axes.xaxis.set_minor_locator(NullLocator())
            axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.set_xlabel("budget (positions a layer may keep)")
        axes.set_ylabel(measure.title)
        axes.set_title(title, fontsize=9)
        axes.grid(True, alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    return drawn


def png(drawn: Figure) -> bytes:
    """The figure as a PNG that is the same bytes each time."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _ceiling(table: pd.DataFrame) -> float | None:
    """Where to cut the axis when one policy is so bad that the others could not be told apart; None if none is.

    A policy is cut that is worse than all others by more than the whole distance between them.
    """
    worst = table.drop(index=FULL, errors="ignore").max(axis=1).dropna().sort_values()
    lowest = float(table.min().min())
    for better, worse in itertools.pairwise(worst):
        if worse - lowest > 2.5 * (better - lowest) and better > lowest:
            return float(better + 0.08 * (better - lowest))
    return None
