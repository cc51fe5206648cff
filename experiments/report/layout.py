"""What the cells of a sweep differ in, and where each is shown: which table, which row, which column.

Options of task, model and dataset make tables, with the option in the title. Policies, their options, intervals and
prompts make rows; budgets make columns. Cells that differ in nothing but seeds are repetitions of one entry. Two cells
that would still come to one place are an error: no figure is hidden behind another.
"""

from __future__ import annotations

import re
from typing import Any

import pandas as pd

from tova.errors import UsageError

FULL = "full"
NO_LIMIT = "all"
"""Heading of the column for a policy without a budget."""

_PLACE = ("task", "model", "dataset", "policy", "budget_requested", "evict_every", "prefill", "prompt_requested")
_ALWAYS_SAID = ("model.dtype", "device")
"""Said wherever they vary, even if the model's name would tell the cells apart."""
_OF_A_ROW = ("task.against",)
"""Options of a task that stand in the row's name, as those of the policy do."""
_EXPECTED = {
    "cell": "", "status": "done", "reason": "", "task": None, "policy": "", "budget": None, "budget_requested": None,
    "evict_every": 1, "prefill": None, "prompt": None, "prompt_requested": None, "model": None, "model_note": None,
    "dataset": None, "device": None, "documents": None, "tokens": None, "tokens_per_second": None,
    "tokens_not_finite": 0,
}  # fmt: skip


def groups(frame: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Cells that may be compared, with a title.

    Each has the columns ``row`` and ``at`` (where its cells stand in a table) and ``name`` (see :func:`names`).

    Raises:
        UsageError: two cells, repetitions apart, have one place.
    """
    cells = _arranged(frame)
    cells["name"] = _names(cells)
    _refuse_shared_places(cells)
    return [(_title(group), group) for _, group in cells.groupby("group", sort=False)]


def varying(frame: pd.DataFrame) -> list[str]:
    """The columns in which the cells of a sweep differ, as far as they say something new: what tells cells apart."""
    return _varying(_arranged(frame))


def names(frame: pd.DataFrame) -> pd.Series:
    """A short name for each cell of ``frame``, unique, with all that varies: ``tova sinks=4 256 model.dtype=bfloat16``.

    Raises:
        UsageError: nothing tells two of the cells apart.
    """
    cells = _arranged(frame, once=False)
    named = _names(cells)
    _refuse_alike(cells[~cells["cell"].duplicated() | (cells["cell"] == "")], named)
    return named.set_axis(frame.index)


def seeds(cells: pd.DataFrame) -> list[str]:
    """The columns of seeds in which some cells of one place differ."""
    place = cells["group"] + cells["row"] + cells["at"]
    return [c for c in _seed_columns(cells) if _differ(cells[c].map(text), place).any()]


def text(value: Any) -> str:
    """A value of an option as it is typed: ``null``, ``true``, ``64``, ``0.125``."""
    if value is None or value is pd.NA or value != value:
        return "null"
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if str(value) in ("True", "False") else str(value)


def _arranged(frame: pd.DataFrame, once: bool = True) -> pd.DataFrame:
    """The frame with every column there may be, and ``at``, ``how``, ``row`` and ``group``."""
    cells = frame.reset_index(drop=True)
    if once and "cell" in cells:
        cells = cells.drop_duplicates("cell", ignore_index=True)
    for column, default in _EXPECTED.items():
        if column not in cells:
            cells[column] = pd.Series([default] * len(cells), dtype=object)
    cells["status"] = (
        cells["status"].fillna("done").replace("not finite", "done")
    )  # it has its figures, NaN as they are
    requested = cells["budget_requested"].map(text)
    cells["at"] = requested.where(requested != "null", NO_LIMIT)
    if "policy.seed" not in cells:
        cells["policy.seed"] = cells["policy"].astype(str).str.extract(_SEED, expand=False)
    cells["how"] = _how(cells)
    alike = cells[["task", "model_note", "dataset"]].map(text).agg("\0".join, axis=1)
    cells["said"], of_groups = _said(cells, alike, _group_options(cells), "; ")
    cells["group"] = alike + cells["said"]
    cells["row"] = _without_seed(cells) + cells["how"]
    place = cells["group"] + cells["row"] + cells["at"]
    said, of_rows = _said(cells, place, _row_options(cells), " ")
    cells["row"] += said
    cells.attrs["said"] = [*of_groups, *of_rows]
    return cells


_SEED = re.compile(r" seed=(\S+)")


def _how(cells: pd.DataFrame) -> pd.Series:
    """How often a cell evicts and how it takes its prompt, where that is not the usual."""
    every = cells["evict_every"].map(text)
    prompt = cells["prompt_requested"].map(text)
    prompt = prompt.where(prompt != "null", cells["prompt"].map(text).replace("0", "null"))
    how = (" every " + every).where(~every.isin(["1", "null"]), "")
    how += pd.Series(" one-shot", cells.index).where(cells["prefill"] == "one_shot", "")
    several = prompt[prompt != "null"].nunique() > 1
    return how + (" prompt=" + prompt).where(several & (prompt != "null"), "")


def _without_seed(cells: pd.DataFrame) -> pd.Series:
    """Policies' labels; those that differ in the seed alone are one."""
    label = cells["policy"].astype(str)
    bare = label.str.replace(_SEED, "", regex=True)
    several = _differ(cells["policy.seed"].map(text), cells["group"] + bare)
    return bare.where(several, label)


def _said(cells: pd.DataFrame, alike: pd.Series, options: list[str], mark: str) -> tuple[pd.Series, list[str]]:
    """For each cell the options that cells called alike differ in, each after ``mark``; and which options those are."""
    said, used = pd.Series("", index=cells.index), []
    for option in options:
        values = cells[option].map(text)
        if len(set(values)) < 2:
            continue
        apart = _differ(values, alike + said)
        if option in _ALWAYS_SAID and values[~values.isin(["null", ""])].nunique() > 1:
            apart |= ~values.isin(["null", ""])
        if apart.any():
            said = said.where(~apart, said + mark + option + "=" + values)
            used.append(option)
    return said, used


def _differ(values: pd.Series, alike: pd.Series) -> pd.Series:
    """bool per cell: whether there is another value among those called alike."""
    return values.groupby(alike).transform("nunique") > 1


def _group_options(cells: pd.DataFrame) -> list[str]:
    dotted = [c for c in _columns(cells) if "." in c and not c.startswith("policy.") and c not in _OF_A_ROW]
    # Frames from before the options stood in them say at least how long the texts are.
    known = dotted if any(c.startswith("dataset.") for c in dotted) else ["documents", "tokens", *dotted]
    return ["model", "device", *(c for c in _classes_last(known) if not c.endswith(".seed"))]


def _row_options(cells: pd.DataFrame) -> list[str]:
    options = [c for c in _columns(cells) if c.startswith("policy.") or c in _OF_A_ROW]
    return [c for c in _classes_last(options) if not c.endswith(".seed")]


def _seed_columns(cells: pd.DataFrame) -> list[str]:
    return [c for c in _columns(cells) if c.endswith(".seed")]


def _columns(cells: pd.DataFrame) -> list[str]:
    return [str(c) for c in cells]


def _classes_last(options: list[str]) -> list[str]:
    return sorted(options, key=lambda option: option.endswith("._target_"))


def _names(cells: pd.DataFrame) -> pd.Series:
    label = cells["policy"].astype(str) + cells["how"]
    named = label.where(cells["at"] == NO_LIMIT, label + " " + cells["at"])
    for column in ("model", "dataset"):
        if cells[column].nunique() > 1:
            named += (" " + cells[column].astype(str)).where(cells[column].notna(), "")
    rest = ["task", *_group_options(cells), *_row_options(cells), *_seed_columns(cells)]
    return named + _said(cells, named, rest, " ")[0]


def _varying(cells: pd.DataFrame) -> list[str]:
    differs = [c for c in _PLACE if c in cells and cells[c].map(text).nunique() > 1]
    return list(dict.fromkeys([*differs, *cells.attrs["said"], *seeds(cells)]))


def _refuse_shared_places(cells: pd.DataFrame) -> None:
    seeded = cells[_seed_columns(cells)].map(text).agg(" ".join, axis=1) if len(cells) else pd.Series(dtype=str)
    _refuse_alike(cells, cells["group"] + "\0" + cells["row"] + "\0" + cells["at"] + "\0" + seeded)


def _refuse_alike(cells: pd.DataFrame, place: pd.Series) -> None:
    """Raise if two cells have one ``place``; the message says what tells them apart."""
    place = place[cells.index]
    if not place.duplicated().any():
        return
    first, second = place.index[place == place[place.duplicated()].iloc[0]][:2]
    here, there = (cells.loc[i, "cell"] or f"number {i}" for i in (first, second))
    kinds = _columns(
        cells.drop(columns=["cell", "status", "reason", "name"], errors="ignore").select_dtypes(exclude="number")
    )
    apart = [c for c in kinds if text(cells.loc[first, c]) != text(cells.loc[second, c])]
    if apart:
        what = f"they differ in {', '.join(apart)}, which no table can show; make two sweeps of them"
    else:
        what = (
            "nothing in the frame tells them apart; give one a label of its own (model.label, dataset.label, the "
            "policy's name)"
        )
    label = f"{cells.loc[first, 'row']} at budget {cells.loc[first, 'at']}"
    raise UsageError(f"cells {here} and {there} would have one place in the table, {label}: {what}")


def repetitions(group: pd.DataFrame) -> dict[str, int]:
    """How many seeds a row of the table has, for rows that have several."""
    counts = group.groupby(["row", "at"], sort=False).size().groupby("row", sort=False).max()
    return {str(row): int(count) for row, count in counts.items() if count > 1}


def _title(group: pd.DataFrame) -> str:
    title = _text_title(group) + str(group["said"].iloc[0])
    several = repetitions(group)
    if several and set(group["row"]) - {FULL} <= set(several) and len(set(several.values())) == 1:
        title += f"; mean ± sd over {next(iter(several.values()))} seeds"
    return title


def _text_title(group: pd.DataFrame) -> str:
    known = group[group["documents"].notna() | group["tokens"].notna()]
    first = group.iloc[0]
    if len(known):
        first = known.iloc[0]
    tokens = first["tokens"] if pd.notna(first["tokens"]) else None
    if first["task"] == "trace":
        return "canonical trace" + ("" if tokens is None else f", {int(tokens):,} tokens")
    model = first["model_note"] if pd.notna(first["model_note"]) else first["model"]
    parts = ["; ".join(str(part) for part in (model, first["dataset"]) if pd.notna(part)) or str(first["task"])]
    if pd.notna(first["documents"]):
        parts.append("1 document" if first["documents"] == 1 else f"{int(first['documents'])} documents")
    if tokens is not None:
        parts.append(f"{int(tokens):,} tokens in all")
    return ", ".join(parts) + _prompts(group)


def _prompts(group: pd.DataFrame) -> str:
    found = sorted({int(p) for p in pd.to_numeric(group["prompt"]).dropna() if p > 0})
    if found:
        return f", prompts of {' and '.join(f'{p:,}' for p in found)}"
    shares = sorted({text(p) for p in group["prompt_requested"]} - {"null"})
    return f", prompts of {' and '.join(shares)} of a document" if shares else ""
