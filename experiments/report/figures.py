"""The figure of a sweep: its first measure against the budget, a line per policy."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pandas as pd

from experiments.report.layout import FULL, NO_LIMIT, groups
from experiments.report.measures import measures
from experiments.report.table import Entry, Grid, footnotes, grid

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, SubFigure

# Okabe and Ito's colours, told apart by colour-blind readers; markers say the same again.
_LOOKS = {
    "full": ("#000000", "o"),
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
_DASHES = ("-", "--", ":", "-.")

_WIDE = 3.0
"""From this ratio of the highest to the lowest figure on, an axis of losses is logarithmic."""
_INCHES = 6.8, 4.4
_LETTER = 0.075
"""Inches a letter of the legend takes."""


def figure(frame: pd.DataFrame) -> Figure:
    """One panel per group of comparable cells; the full cache is a dashed line, the spread over seeds a bar.

    Every figure that is finite is within the axes. Shares and tokens have axes of their own, side by side.
    """
    from matplotlib.figure import Figure

    panels = [(title, group, grid(group, measures(group)[0])) for title, group in groups(frame)]
    entries = max((len(table.rows) for *_, table in panels), default=0)
    letters = max((len(_label(table, row)) for *_, table in panels for row in table.rows), default=0)
    width = _INCHES[0] + _LETTER * letters + 0.6
    height = max(_INCHES[1], 0.18 * entries + 0.7) * max(1, len(panels))
    drawn = Figure(figsize=(width, height), layout="constrained", dpi=min(150, int(60_000 / height)))
    parts = drawn.subfigures(max(1, len(panels)), 1, squeeze=False)[:, 0]
    for part, (title, group, table) in zip(parts, panels, strict=False):
        part.suptitle("\n".join(textwrap.wrap(title, 90)), fontsize=9, x=0.01, ha="left")
        _panel(part, group, table)
    return drawn


def png(drawn: Figure) -> bytes:
    """The figure as a PNG that is the same bytes each time."""
    buffer = io.BytesIO()
    drawn.savefig(buffer, format="png", metadata={"Software": None})
    return buffer.getvalue()


def _panel(part: SubFigure, group: pd.DataFrame, table: Grid) -> None:
    budgets = [at for at in table.columns if at != NO_LIMIT]
    if not table.finite:
        axes = part.subplots()
        axes.set_axis_off()
        axes.text(0.5, 0.5, "\n".join(["no figures yet", *footnotes(group)[:8]]), ha="center", va="center", fontsize=8)
    elif len(budgets) > 1:
        _lines(part, budgets, table)
    else:
        _dots(part, budgets, table)


def _lines(part: SubFigure, budgets: list[str], table: Grid) -> None:
    """Figures against the budget; shares beside tokens where there are both, far figures above near ones."""
    kinds = [kind for kind in ([b for b in budgets if float(b) < 1], [b for b in budgets if float(b) >= 1]) if kind]
    breach = _breach(table)
    sides = part.subplots(
        1 if breach is None else 2,
        len(kinds),
        sharex="col",
        sharey="row",
        squeeze=False,
        width_ratios=[max(len(kind), 0.4 * len(budgets)) for kind in kinds],
        height_ratios=None if breach is None else (1, 2),
    )
    looks = _looks([row for row in table.rows if row != FULL])
    rows = sorted(looks, key=lambda row: -_last(table, row))
    for (level, column), axes in np.ndenumerate(sides):
        for row in rows if breach is None else _of_level(table, rows, level, breach):
            at = [b for b in kinds[column] if table.at(row, b).text]
            _draw(axes, [float(b) for b in at], [table.at(row, b) for b in at], label=_label(table, row), **looks[row])
        _full_line(axes, table)
        _budgets(axes, kinds[column])
    for axes, kind in zip(sides[-1], kinds, strict=True):
        axes.set_xlabel(f"budget ({'share of the text' if float(kind[0]) < 1 else 'positions a layer may keep'})")
    if breach is None:
        _figures(sides[0, 0], table, "y")
    else:
        _break(sides, breach)
    part.supylabel(table.measure.title, fontsize=10)
    _legend(part, sides[:, 0], table, rows)


def _last(table: Grid, row: str) -> float:
    """The figure a policy's line ends with, for the order of the legend."""
    found = [table.at(row, at).mean for at in table.columns]
    return next((mean for mean in reversed(found) if math.isfinite(mean)), -math.inf)


def _draw(axes: Axes, x: list[float], entries: list[Entry], **looks: Any) -> None:
    """A policy's line, with a bar where its seeds differ and a gap where there is no figure."""
    mean = [entry.mean if math.isfinite(entry.mean) else math.nan for entry in entries]
    spread = [entry.spread if math.isfinite(entry.spread) else 0.0 for entry in entries]
    axes.errorbar(x, mean, yerr=spread if any(spread) else None, capsize=3, **looks)


def _dots(part: SubFigure, budgets: list[str], table: Grid) -> None:
    """A line per policy where there is one budget or none."""
    axes = part.subplots()
    rows = [row for row in table.rows if row != FULL] or [FULL]
    for place, (row, looks) in enumerate(_looks(rows).items()):
        entry = next((table.at(row, at) for at in [*budgets, NO_LIMIT] if table.at(row, at).text), Entry("", math.nan))
        bar = None if math.isnan(entry.spread) else [entry.spread]
        axes.errorbar([entry.mean], [place], xerr=bar, capsize=3, **{**looks, "linestyle": "none"})
    axes.set_yticks(range(len(rows)), [_label(table, row) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_xlabel(table.measure.title + (f"; budget {budgets[0]}" if budgets else ""))
    axes.grid(True, alpha=0.3)
    if rows != [FULL]:
        _full_line(axes, table, upright=True)
    _figures(axes, table, "x")
    _legend(part, [axes], table, [])


def _legend(part: SubFigure, sides: Iterable[Axes], table: Grid, rows: list[str]) -> None:
    """Beside the plot, since inside it would cover lines; in the order the lines end."""
    handles: dict[str, Any] = {}
    for axes in sides:
        handles |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    labels = [label for label in (_label(table, row) for row in [FULL, *rows]) if label in handles]
    if labels:
        part.legend([handles[label] for label in labels], labels, fontsize=8, loc="outside right upper", frameon=False)


def _looks(rows: list[str]) -> dict[str, dict[str, Any]]:
    """Colour, marker and dashes of each policy, no two alike; variants of one policy share its colour."""
    others = ((colour, marker, dash) for dash in itertools.cycle(_DASHES) for colour, marker in _OTHERS)
    variants: dict[str, int] = {}
    looks = {}
    for row in rows:
        name = row.split()[0]
        variant = variants[name] = variants.get(name, -1) + 1
        own = name in _LOOKS and variant < len(_DASHES)
        colour, marker, dash = (*_LOOKS[name], _DASHES[variant]) if own else next(others)
        fill = "none" if own and variant % 2 else "full"
        looks[row] = {"color": colour, "marker": marker, "linestyle": dash, "fillstyle": fill, "markersize": 6}
    return looks


def _label(table: Grid, row: str) -> str:
    """The policy's name, and where it has no place on the axis: not finite, not done."""
    marks: dict[str, list[str]] = {}
    for at in table.columns:
        entry = table.at(row, at)
        if entry.text and not math.isfinite(entry.mean):
            marks.setdefault(entry.text, []).extend([] if at == NO_LIMIT else [at])
    notes = [f"{mark} at {', '.join(places)}" if places else mark for mark, places in marks.items()]
    return f"{row} ({'; '.join(notes)})" if notes else row


def _full_line(axes: Axes, table: Grid, upright: bool = False) -> None:
    full = table.at(FULL, NO_LIMIT)
    if not full.text:
        return
    looks: dict[str, Any] = {"color": "black", "linestyle": "--", "linewidth": 1, "label": _label(table, FULL)}
    if not math.isfinite(full.mean):
        axes.plot([], [], **looks)
        return
    (axes.axvline if upright else axes.axhline)(full.mean, **looks)
    if math.isfinite(full.spread):
        (axes.axvspan if upright else axes.axhspan)(
            full.mean - full.spread, full.mean + full.spread, color="black", alpha=0.08
        )


def _budgets(axes: Axes, kind: list[str]) -> None:
    """The axis of budgets: one kind of them, with a tick for each that was asked for, as it was asked for."""
    from matplotlib.ticker import NullLocator

    axes.set_xscale("log", base=2)
    axes.set_xticks([float(at) for at in kind], kind, rotation=0 if len(kind) <= 8 else 60)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.grid(True, alpha=0.3)


def _figures(axes: Axes, table: Grid, which: Literal["x", "y"]) -> None:
    """The axis of figures: logarithmic where losses lie far apart, and never so narrow that it shows rounding."""
    low, high = min(table.finite), max(table.finite)
    if table.measure.low and low > 0 and high / low >= _WIDE:
        _logarithmic(axes, which, low, high)
        return
    axes.ticklabel_format(axis=which, useOffset=False)
    least = 40 * table.measure.last_digit
    if high - low < least:
        middle = (low + high) / 2
        (axes.set_ylim if which == "y" else axes.set_xlim)(middle - least / 2, middle + least / 2)


def _logarithmic(axes: Axes, which: Literal["x", "y"], low: float, high: float) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    (axes.set_yscale if which == "y" else axes.set_xscale)("log")
    axis = axes.yaxis if which == "y" else axes.xaxis
    subs = (1, 1.5, 2, 3, 5, 7) if high / low < 100 else (1, 2, 5) if high / low < 10_000 else (1,)
    axis.set_major_locator(LogLocator(subs=subs, numticks=30))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axis.set_minor_locator(NullLocator())


def _breach(table: Grid) -> tuple[float, float] | None:
    """Where to break the axis: the highest figure of the near policies and the lowest beyond it; None for no break.

    It is broken where some policies lose so much more than the others that these could not be told apart: more than
    the whole distance between them.
    """
    worst = sorted(
        max(means)
        for row in table.rows
        if row != FULL and (means := [m for at in table.columns if math.isfinite(m := table.at(row, at).mean)])
    )
    lowest = min(table.finite)
    for number, (near, far) in enumerate(itertools.pairwise(worst), start=1):
        if table.measure.low and number > 1 and near > lowest and far - lowest > 2.5 * (near - lowest):
            return near, min(figure for figure in table.finite if figure > near)
    return None


def _of_level(table: Grid, rows: list[str], level: int, breach: tuple[float, float]) -> list[str]:
    """The policies with a figure beyond the break (level 0) or before it; those with none are drawn all the same."""
    kept = []
    for row in rows:
        found = [m for at in table.columns if math.isfinite(m := table.at(row, at).mean)]
        if (max(found, default=0.0) >= breach[1]) if level == 0 else (min(found, default=0.0) <= breach[0]):
            kept.append(row)
    return kept


def _break(sides: np.ndarray, breach: tuple[float, float]) -> None:
    """Give the upper row the figures beyond the break and the lower row those before it."""
    near, far = breach
    lowest, highest = sides[0, 0].dataLim.y0, sides[0, 0].dataLim.y1
    room = min(0.1 * (highest - far), 0.5 * (far - near)) or 0.5 * (far - near)
    tick: dict[str, Any] = {
        "marker": [(-1, -0.6), (1, 0.6)],
        "markersize": 9,
        "color": "black",
        "linestyle": "none",
        "clip_on": False,
    }
    for upper, lower in sides.T:
        lower.set_ylim(lowest - 0.06 * (near - lowest), near + 0.06 * (near - lowest))
        upper.set_ylim(far - room, highest + max(room, 0.08 * (highest - far)))
        upper.spines.bottom.set_visible(False)
        lower.spines.top.set_visible(False)
        upper.tick_params(axis="x", length=0)
        upper.plot([0, 1], [0, 0], transform=upper.transAxes, **tick)
        lower.plot([0, 1], [1, 1], transform=lower.transAxes, **tick)
