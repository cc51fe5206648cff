"""The figures of a cell that tables and figures show: their columns, names and digits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pandas as pd


@dataclass(frozen=True)
class Measure:
    """One figure of a cell: its column in the frame, its name for people, whether less is better (None: not known),
    its digits (z: no minus before a zero)."""

    column: str
    title: str
    short: str
    low: bool | None
    form: str

    @property
    def last_digit(self) -> float:
        """What its last printed digit is worth."""
        return 10.0 ** -int(self.form.strip("+z.f") or 0)


PERPLEXITY = Measure("perplexity", "perplexity, all tokens", "perplexity", True, "z.3f")
_MODEL = (
    PERPLEXITY,
    Measure("delta_nll", "loss over the full cache, nats per token, t >= k", "delta NLL", True, "+z.4f"),
    Measure("retained_mass", "retained mass, t >= k", "mass", False, "z.4f"),
    Measure("heavy_hitter_recall", "heavy-hitter recall, t >= k", "recall", False, "z.4f"),
)
_MODEL_BESIDE = (
    Measure("delta_nll_all_steps", "loss over the full cache, nats per token, all steps", "NLL, all", True, "+z.4f"),
    Measure("retained_mass_all_steps", "retained mass, all steps", "mass, all", False, "z.4f"),
    Measure("heavy_hitter_recall_all_steps", "heavy-hitter recall, all steps", "recall, all", False, "z.4f"),
)
_TRACE = (
    Measure("retained_mass_all_steps", "retained mass, all steps", "mass", False, "z.6f"),
    Measure("heavy_hitter_recall_all_steps", "heavy-hitter recall, all steps", "recall", False, "z.6f"),
)
_TRACE_BESIDE = (
    Measure("retained_mass", "retained mass, t >= k", "mass, t >= k", False, "z.6f"),
    Measure("heavy_hitter_recall", "heavy-hitter recall, t >= k", "recall, t >= k", False, "z.6f"),
)
_DTYPES = (
    Measure("same_sets", "share of (layer, step) pairs with the same set, t >= k", "same sets", False, "z.4f"),
    Measure("shared", "share of a kept set that both hold, t >= k", "shared", False, "z.4f"),
)
_BY_TASK = {"perplexity": (_MODEL, _MODEL_BESIDE), "trace": (_TRACE, _TRACE_BESIDE), "dtypes": (_DTYPES, ())}


def measures(group: pd.DataFrame, beside: bool = False) -> list[Measure]:
    """The measures the cells of one task have figures for, or the first if none has any.

    ``beside`` adds those that go beside the primary ones.
    """
    task = str(group["task"].iloc[0])
    wanted, besides = _BY_TASK.get(task, (_of_an_unknown_task(group), ()))
    found = [m for m in [*wanted, *(besides if beside else ())] if known(group, m).any()]
    return found or list(wanted[:1]) or [Measure(task, task, task, None, "z.4f")]


def known(group: pd.DataFrame, measure: Measure) -> pd.Series:
    """bool per cell: it has the figure, or would have it had its losses been finite."""
    found = values(group, measure).notna()
    if measure.column not in group or "tokens_not_finite" not in group:
        return found
    return found | (pd.to_numeric(group["tokens_not_finite"]).fillna(0) > 0)


def values(group: pd.DataFrame, measure: Measure) -> pd.Series:
    """The figure of each cell, NaN where there is none.

    Where a budget holds the whole text no step has t >= k, and the figure is that of all steps: the full cache's.
    """
    own = _numbers(group, measure.column)
    return own.where(own.notna() | ~unsaturated(group), _numbers(group, f"{measure.column}_all_steps"))


def unsaturated(group: pd.DataFrame) -> pd.Series:
    """bool per cell: its budget is at least the length of every text."""
    steps = _numbers(group, "saturated_steps")
    longer = _numbers(group, "budget") >= _numbers(group, "tokens") / _numbers(group, "documents").fillna(1)
    return (group["status"] == "done") & _numbers(group, "budget").notna() & (steps == 0).where(steps.notna(), longer)


def show(value: Any, measure: Measure) -> str:
    """A figure as printed; nothing where there is none."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    return f"{value:{measure.form}}"


def _numbers(group: pd.DataFrame, column: str) -> pd.Series:
    if column not in group:
        return pd.Series(math.nan, index=group.index)
    return pd.to_numeric(group[column], errors="coerce").astype(float)


_NO_FIGURES = {
    "budget", "budget_requested", "documents", "tokens", "evict_every", "prompt", "prompt_requested", "seconds",
    "tokens_per_second", "tokens_not_finite", "cache_bytes", "held_mean",
}  # fmt: skip


def _of_an_unknown_task(group: pd.DataFrame) -> tuple[Measure, ...]:
    """Every number in the rows of a task of one's own; which end is the better one is not known."""
    columns = [str(c) for c in group.select_dtypes(include="float")]
    columns = [c for c in columns if "." not in c and c not in _NO_FIGURES]
    return tuple(Measure(c, c.replace("_", " "), c.replace("_", " "), None, "z.4f") for c in columns)
