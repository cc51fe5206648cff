"""Tables and figures of a sweep: nothing falls together, nothing is cut off, nothing that failed is silent."""

from __future__ import annotations

import io
import itertools
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from experiments import publish as publishing
from experiments import report
from experiments.report.figures import figure
from experiments.report.table import groups, wide_markdown
from experiments.store import Sweep
from tova.errors import UsageError

ROOT = Path(__file__).parent.parent
NAN = float("nan")
FIGURES = ("perplexity", "delta_nll", "retained_mass", "heavy_hitter_recall")
NUMBER = re.compile(r"[+-]?\d+\.\d+")
POLICIES = (
    "tova", "h2o", "h2o_half", "h2o_head", "h2o_masked", "l2norm", "pyramidkv", "pyramidkv_prefill", "random",
    "scissorhands", "scissorhands_paper", "snapkv", "snapkv_prefill", "streaming_llm", "streaming_llm_reindexed",
    "tova_head", "tova_official", "tova_value", "window",
)  # fmt: skip

_serial = itertools.count()


def cell(policy: str, budget: float | None = None, perplexity: float | None = None, **more: Any) -> dict[str, Any]:
    """A row of a frame as the runner makes it, with a perplexity that no other row has unless one is given."""
    number = next(_serial)
    tokens = NAN if budget is None else budget if budget >= 1 else int(budget * 2048)
    ppl = 20 + number / 7 if perplexity is None else perplexity
    row = {
        "cell": f"{policy}-{number}", "status": "done", "reason": "", "task": "perplexity", "policy": policy,
        "budget": tokens, "budget_requested": budget, "evict_every": 1, "prefill": "every_step", "prompt": 0,
        "prompt_requested": None, "model": "small", "model_note": "a small model", "dataset": "books",
        "device": "cpu", "documents": 2, "tokens": 4096, "perplexity": ppl, "delta_nll": (ppl - 20) / 30,
        "delta_nll_all_steps": (ppl - 20) / 31, "retained_mass": 0.9, "retained_mass_all_steps": 0.91,
        "heavy_hitter_recall": 0.8, "heavy_hitter_recall_all_steps": 0.81, "tokens_per_second": 1234.0,
        "tokens_not_finite": 0, "saturated_steps": 100, "held_mean": tokens, "model.dtype": "float32",
        "dataset.tokens": 2048, "dataset.documents": 2, "dataset.path": "a/letters", "task.measures": True,
        "task.chunk": None, "policy.sinks": None,
    }  # fmt: skip
    if budget is None:
        row |= {"saturated_steps": 4094, "held_mean": 2047.0, "delta_nll": 0.0, "delta_nll_all_steps": 0.0}
        row |= dict.fromkeys(["retained_mass", "heavy_hitter_recall"], 1.0)
    row |= more
    if row["status"] != "done":
        row |= dict.fromkeys([*FIGURES, *(f"{f}_all_steps" for f in FIGURES[1:]), "documents", "tokens", "budget"], NAN)
        row |= dict.fromkeys(["tokens_per_second", "saturated_steps", "held_mean", "tokens_not_finite"], NAN)
    return row


def sweep(policies: tuple[str, ...] | list[str], budgets: list[float], **more: Any) -> list[dict[str, Any]]:
    return [cell("full", **more), *(cell(p, b, **more) for p in policies for b in budgets)]


def printed(frame: pd.DataFrame, width: int) -> str:
    out = Console(file=io.StringIO(), width=width)
    out.print(report.console_report(frame))
    return out.file.getvalue()  # type: ignore[attr-defined]


def published(name: str) -> pd.DataFrame:
    return pd.read_csv(ROOT / "results" / name / "cells.csv")


@pytest.mark.parametrize("name", ["quickstart", "dtypes"])
def test_published_tables_are_made_of_their_frames(name: str) -> None:
    frame = published(name)
    assert report.markdown(frame) == (ROOT / "results" / name / "table.md").read_text()
    tables = "\n\n".join(wide_markdown(group) for _, group in groups(frame))
    assert tables in (ROOT / "README.md").read_text()


# --- what differs between cells ---------------------------------------------------------------------------------------

OF_GROUPS = {
    "model.dtype": ("float32", "bfloat16"),
    "dataset.tokens": (60, None),
    "dataset.documents": (1, 2),
    "dataset.path": ("a/letters", "b/letters"),
    "task.measures": (True, False),
    "task.chunk": (64, 128),
    "model.layers": (2, 4),
    "device": ("cpu", "cuda"),
    "model": ("one", "other"),
}


@pytest.mark.parametrize("option", OF_GROUPS)
def test_options_of_model_data_and_task_make_tables(option: str) -> None:
    values = OF_GROUPS[option]
    rows = [row for v in values for row in sweep(["tova"], [16], **{option: v})]
    frame = pd.DataFrame(rows)
    found = groups(frame)
    assert len(found) == 2
    as_typed = ["null" if v is None else str(v).lower() if isinstance(v, bool) else str(v) for v in values]
    for (title, _), value in zip(found, as_typed, strict=True):
        assert f"{option}={value}" in title
    text, shown = report.markdown(frame), printed(frame, 80)
    for row in rows:
        assert f"{row['perplexity']:.3f}" in text
        assert f"{row['perplexity']:.3f}" in shown
    assert report.varying(frame) == (
        ["model", "policy", "budget_requested"] if option == "model" else ["policy", "budget_requested", option]
    )
    names = report.names(frame)
    assert names.is_unique
    for name, value in zip(names, np.repeat(as_typed, 2), strict=True):
        assert name.endswith(f" {value}" if option == "model" else f" {option}={value}")


def test_each_table_has_its_panel() -> None:
    frame = pd.DataFrame([row for d in ("float32", "bfloat16") for row in sweep(["tova"], [16], **{"model.dtype": d})])
    titles = [part._suptitle.get_text() for part in figure(frame).subfigs]
    assert [title.rpartition("; ")[2] for title in titles] == ["model.dtype=float32", "model.dtype=bfloat16"]


def test_options_that_cells_do_not_differ_in_are_not_said() -> None:
    frame = pd.DataFrame(sweep(["tova", "h2o"], [16, 32]))
    frame["policy.recent_window"] = [None, None, None, 32, 32]  # h2o's alone
    ((title, _),) = groups(frame)
    assert title == "a small model; books, 2 documents, 4,096 tokens in all"
    assert report.varying(frame) == ["policy", "budget_requested"]
    assert list(report.names(frame)) == ["full", "tova 16", "tova 32", "h2o 16", "h2o 32"]


def test_the_dtype_is_said_beside_models_that_differ_anyway() -> None:
    rows = [*sweep(["tova"], [16], model="a", model_note="A"), *sweep(["tova"], [16], model="b", model_note="B")]
    frame = pd.DataFrame(rows)
    frame["model.dtype"] = ["float32", "float32", "bfloat16", "bfloat16"]
    assert [title.rpartition("; ")[2] for title, _ in groups(frame)] == ["model.dtype=float32", "model.dtype=bfloat16"]


@pytest.mark.parametrize(
    ("changes", "row"),
    [
        ({"evict_every": 8}, "tova every 8"),
        ({"prefill": "one_shot"}, "tova one-shot"),
        ({"policy.sinks": 4}, "tova policy.sinks=4"),
        ({"policy._target_": "mine.Tova"}, "tova policy._target_=mine.Tova"),
        ({"task": "dtypes", "task.against": "float16", "same_sets": 0.5, "shared": 0.25}, "tova task.against=float16"),
        ({"policy": "tova sinks=4", "policy.sinks": 4}, "tova sinks=4"),
    ],
)
def test_options_of_the_policy_make_rows(changes: dict[str, Any], row: str) -> None:
    plain = {k: "-" if k in ("policy._target_", "task.against") else None for k in changes if "." in k}
    plain |= {k: v for k, v in changes.items() if k in ("task", "same_sets", "shared")}
    frame = pd.DataFrame([cell("tova", 16, **plain), cell(**{"policy": "tova", "budget": 16} | changes)])
    ((_, group),) = groups(frame)
    assert group["row"].tolist()[1] == row
    assert group["row"].is_unique
    assert f"| {row} | " in report.markdown(frame)
    assert report.names(frame).is_unique


def test_prompts_that_differ_are_said_as_asked_for() -> None:
    cells = [cell("tova", 16, prompt=p, prompt_requested=r) for p, r in ((1024, 0.5), (512, 512))]
    ((title, group),) = groups(pd.DataFrame(cells))
    assert group["row"].tolist() == ["tova prompt=0.5", "tova prompt=512"]
    assert "prompts of 512 and 1,024" in title


def test_what_would_fall_together_is_an_error() -> None:
    rows = [cell("tova", 16, model_identity={"weights": w}) for w in "ab"]
    for made in (report.markdown, figure, report.console_report, report.names):
        with pytest.raises(UsageError) as caught:
            made(pd.DataFrame(rows))
        message = str(caught.value)
        assert rows[0]["cell"] in message
        assert rows[1]["cell"] in message
        assert "they differ in model_identity" in message
    with pytest.raises(UsageError, match=r"nothing in the frame tells them apart; give one a label of its own"):
        report.markdown(pd.DataFrame([cell("tova", 16), cell("tova", 16)]))


def test_the_same_cell_in_two_frames_put_together_is_one() -> None:
    full = cell("full")
    frame = pd.concat([pd.DataFrame([full, cell("tova", 16)]), pd.DataFrame([full, cell("h2o", 16)])])
    assert report.markdown(frame).count("| full |") == 5
    assert list(report.names(frame)) == ["full", "tova 16", "full", "h2o 16"]


# --- seeds ------------------------------------------------------------------------------------------------------------


def seeded() -> pd.DataFrame:
    """Tova wins with seed 0, H2O on the mean."""
    ppl = {"full": (20.0, 20.0, 20.0), "tova": (21.0, 25.0, 26.0), "h2o": (22.0, 22.5, 23.0)}
    rows = []
    for seed in range(3):
        rows += [cell(p, None if p == "full" else 16, ppl[p][seed], **{"model.seed": seed}) for p in ppl]
    return pd.DataFrame(rows)


def test_seeds_are_repetitions_and_the_best_is_picked_on_their_means() -> None:
    ((title, _),) = groups(seeded())
    assert title.endswith("; mean ± sd over 3 seeds")
    text = report.markdown(seeded())
    assert "| tova |  | 24.000 ± 2.646 |" in text
    assert "| h2o |  | **22.500 ± 0.500** |" in text
    for ppl in (21, 25, 26, 22, 22.5, 23):
        assert f"| {ppl:.3f} |" in text  # every cell has its line
    assert report.varying(seeded()) == ["policy", "budget_requested", "model.seed"]
    assert report.names(seeded())[4] == "tova 16 model.seed=1"


def test_seeds_of_a_policy_are_no_rows() -> None:
    rows = [cell("full"), cell("tova", 16, 30.0)]
    rows += [cell("random" if s == 0 else f"random seed={s}", 16, 40.0 + s, **{"policy.seed": s}) for s in range(3)]
    for frame in (pd.DataFrame(rows), pd.DataFrame(rows).drop(columns="policy.seed")):
        text = report.markdown(frame)
        assert "| random |  | 41.000 ± 1.000 |" in text
        assert "- random: mean ± sd over 3 seeds" in text
        assert "| tova |  | **30.000** |" in text
        assert list(report.names(frame))[3] == "random seed=1 16"
    ((_, group),) = groups(pd.DataFrame([*rows[:2], cell("random seed=5", 16, 41.0)]))
    assert group["row"].tolist() == ["full", "tova", "random seed=5"]  # one seed is no repetition


def test_a_seed_that_failed_is_said() -> None:
    frame = seeded()
    frame.loc[4, ["status", "reason", "perplexity"]] = ["failed", "out of memory", NAN]
    text = report.markdown(frame)
    assert "| tova |  | 23.500 ± 3.536 |" in text
    assert "- tova 16: 2 of 3 seeds are done" in text
    assert "- tova 16 model.seed=1: failed, out of memory" in text


# --- cells that are not done ------------------------------------------------------------------------------------------


def unfinished() -> pd.DataFrame:
    return pd.DataFrame(
        [
            cell("full"),
            cell("tova", 16, 31.0),
            cell("tova", 32, status="failed", reason="out of memory:\nneeds 3 GB " + "and more " * 50),
            cell("h2o", 16, status="pending"),
            cell("h2o", 32, status="interrupted", reason="after 1 document"),
            cell("window", 16, math.inf),
            cell("window", 32, NAN, tokens_not_finite=7),
        ]
    )


def test_cells_that_are_not_done_keep_their_place_and_say_why() -> None:
    text = report.markdown(unfinished())
    for line in (
        "| tova |  | **31.000** | failed |", "| h2o |  | not run | stopped |", "| window |  | inf | NaN |",
        "| tova | 32 | failed |", "- h2o 32: stopped, after 1 document", "- not run yet: h2o 16",
    ):  # fmt: skip
        assert line in text, text
    (note,) = [line for line in text.splitlines() if line.startswith("- tova 32: failed, out of memory: needs 3 GB")]
    assert len(note) < 180
    shown = printed(unfinished(), 80)
    assert "- tova 32: failed, out of memory: needs 3 GB" in shown
    assert re.search(r"tova +31\.000 +failed", shown)
    labels = legend(figure(unfinished()))
    assert {"tova (failed at 32)", "h2o (not run at 16; stopped at 32)", "window (inf at 16; NaN at 32)"} <= labels


@pytest.mark.parametrize("status", ["failed", "interrupted", "pending", "running"])
@pytest.mark.parametrize("columns", [True, False])
def test_a_sweep_of_which_nothing_is_done_has_its_table_and_figure(status: str, columns: bool, tmp_path: Path) -> None:
    frame = pd.DataFrame([cell(p, 16, status=status, reason="boom") for p in ("tova", "h2o")])
    if not columns:  # as when no summary says which figures there are
        frame = frame[["cell", "status", "reason", "task", "policy", "budget_requested", "model_note", "dataset"]]
    paths = report.write_report(frame, tmp_path)
    assert {"table", "figure"} <= set(paths)
    assert all(path.stat().st_size for path in paths.values())
    assert "a small model; books" in paths["table"].read_text()
    assert "tova 16" in printed(frame, 80)
    assert "tova" in wide_markdown(groups(frame)[0][1])


def test_many_cells_that_were_not_run_are_counted() -> None:
    frame = pd.DataFrame([cell("tova", b, status="pending") for b in range(16, 36)])
    assert "- not run yet: tova 16, tova 17, tova 18, tova 19, tova 20, tova 21 and 14 more" in report.markdown(frame)


# --- terminals --------------------------------------------------------------------------------------------------------

FRAMES = {
    "quickstart": lambda: published("quickstart"),
    "dtypes": lambda: published("dtypes"),
    "10 policies x 7 budgets": lambda: pd.DataFrame(sweep(POLICIES[-10:], [16, 32, 64, 128, 256, 512, 1024])),
    "19 policies": lambda: pd.DataFrame(sweep(POLICIES, [16, 64])),
    "one policy": lambda: pd.DataFrame(sweep(["tova"], [64])),
    "seeds": seeded,
    "unfinished": unfinished,
    "long names": lambda: pd.DataFrame(sweep(["h2o recent_window=64 sinks=4 layer_budgets=linear:4"], [64, 128, 256])),
}


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.parametrize("name", FRAMES)
def test_every_number_is_whole_in_a_terminal(name: str, width: int) -> None:
    frame = FRAMES[name]()
    shown = printed(frame, width)
    assert max(len(line.rstrip()) for line in shown.splitlines()) <= width
    assert "…" not in shown
    wanted = [
        n for _, group in groups(frame) for n in NUMBER.findall(" ".join(report.long_table(group).to_numpy().flat))
    ]
    assert wanted
    assert set(wanted) <= set(NUMBER.findall(shown))
    words = {word for row in pd.concat([group for _, group in groups(frame)])["row"] for word in row.split()}
    assert words <= set(shown.split()) | {"full"}


def test_the_quickstart_of_80_columns_needs_no_second_block() -> None:
    lines = printed(published("quickstart"), 80).splitlines()
    assert [line.split() for line in lines].count(["budget", "64", "128", "256"]) == 4
    assert "perplexity, all tokens   (full cache 20.658)" in lines
    out = Console(file=io.StringIO(), width=80, force_terminal=True, color_system="standard")
    out.print(report.console_report(published("quickstart")))
    assert re.search(r"tova +\x1b\[0?m? *\x1b\[1m28\.730|\x1b\[1m *28\.730", out.file.getvalue())  # type: ignore[attr-defined]


def test_labels_with_brackets_are_printed_as_they_are() -> None:
    frame = pd.DataFrame(sweep(["tova layer_budgets=[64,32]"], [64], model_note="a [bold] model"))
    assert "tova layer_budgets=[64,32]" in printed(frame, 100)
    assert "a [bold] model" in printed(frame, 100)


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_shares_and_tokens_are_headed_as_asked_for_and_have_axes_of_their_own() -> None:
    frame = pd.DataFrame(sweep(["tova", "h2o"], [0.125, 0.25, 32, 256]))
    assert "| policy | all | 0.125 | 0.25 | 32 | 256 |" in report.markdown(frame)
    csv = io.StringIO(frame.to_csv(index=False))
    assert report.markdown(pd.read_csv(csv)) == report.markdown(frame)
    drawn = figure(frame)
    ticks = [[label.get_text() for label in axes.get_xticklabels()] for axes in drawn.subfigs[0].axes]
    assert ticks == [["0.125", "0.25"], ["32", "256"]]
    for axes in drawn.subfigs[0].axes:
        there = [x for line in axes.lines for x in line.get_xdata() if x not in (0, 1)]
        low, high = axes.get_xlim()
        assert 0 < low <= min(there) <= max(there) <= high


def test_a_budget_that_holds_the_text_shows_the_full_cache_and_says_so() -> None:
    blank = dict.fromkeys(["delta_nll", "retained_mass", "heavy_hitter_recall"], NAN)
    over = {"saturated_steps": 0, "held_mean": 2047.0, "retained_mass_all_steps": 1.0, "delta_nll_all_steps": -1e-9}
    over["heavy_hitter_recall_all_steps"] = 1.0
    rows = [*sweep(["tova"], [64]), cell("tova", 4096, 20.0, **blank, **over)]
    text = report.markdown(pd.DataFrame(rows))
    assert "- nothing dropped: budget 4,096 holds all 2,048 tokens of every document" in text
    assert "| tova | 4096 | 20.000 | +0.0000 | 1.0000 | 1.0000 | +0.0000 | 1.0000 | 1.0000 |" in text
    assert "nothing dropped: budget 4,096" in " ".join(printed(pd.DataFrame(rows), 80).split())
    rows[-1]["held_mean"] = 1500.0  # layers with a smaller share did drop
    text = report.markdown(pd.DataFrame(rows))
    assert "nothing dropped" not in text
    assert "| tova | 4096 | 1500.0 | 20.000 |" in text
    assert "budget 4,096 would hold all 2,048 tokens of every document: no step has t >= k" in text


def test_where_all_are_equal_none_is_the_best() -> None:
    rows = [cell("full"), *(cell(p, 4096, 20.0) for p in ("tova", "h2o"))]
    assert "**" not in report.markdown(pd.DataFrame(rows)).split("### loss")[0]


# --- figures ----------------------------------------------------------------------------------------------------------


def legend(drawn: Any) -> set[str]:
    return {text.get_text() for part in drawn.subfigs for found in part.legends for text in found.get_texts()}


def two() -> pd.DataFrame:
    wide = [cell("window", b, p) for b, p in ((64, 178.5), (128, 103.7), (256, 41.9))]
    return pd.DataFrame([cell("full", None, 20.7), *wide, *(cell("tova", b, 25.0 - b / 64) for b in (64, 128, 256))])


@pytest.mark.parametrize("frame", [published("quickstart"), two()], ids=["quickstart", "two"])
def test_every_figure_is_within_the_axes(frame: pd.DataFrame) -> None:
    drawn = figure(frame)
    drawn.draw_without_rendering()
    for row in frame[frame["policy"] != "full"].itertuples():
        inside = [
            axes
            for axes in [*drawn.axes, *(a for part in getattr(drawn, "subfigs", []) for a in part.axes)]
            if axes.get_ylim()[0] < row.perplexity < axes.get_ylim()[1]
            for line in axes.lines
            if any(x == row.budget and y == row.perplexity for x, y in zip(*line.get_data(), strict=True))
        ]
        assert inside, (row.policy, row.budget)


@pytest.mark.parametrize("name", ["19 policies", "quickstart", "unfinished", "long names"])
def test_the_legend_covers_nothing(name: str) -> None:
    drawn = figure(FRAMES[name]())
    drawn.draw_without_rendering()
    boxes = [found.get_window_extent() for part in drawn.subfigs for found in part.legends]
    assert boxes
    for box in boxes:
        assert box.x0 >= 0
        assert box.x1 <= drawn.bbox.x1
        assert box.y0 >= 0
        assert not any(box.overlaps(axes.get_window_extent()) for axes in drawn.axes)
        assert not any(box.overlaps(part._suptitle.get_window_extent()) for part in drawn.subfigs if part._suptitle)
    assert min(axes.get_window_extent().width for axes in drawn.axes) > 0.4 * drawn.bbox.width


def test_no_two_policies_look_alike() -> None:
    drawn = figure(FRAMES["19 policies"]())
    (found,) = drawn.subfigs[0].legends
    looks = [
        (handle.get_color(), handle.get_marker(), handle.get_linestyle())
        for handle in (h.lines[0] if hasattr(h, "lines") else h for h in found.legend_handles)
    ]
    assert len(looks) == len(set(looks)) == 20


@pytest.mark.parametrize("budgets", [[2048, 4096], [4096]])
def test_rounding_noise_is_not_drawn_as_a_difference(budgets: list[int]) -> None:
    rows = [cell("full", None, 20.657)]
    rows += [cell(p, b, 20.657 + n * 1e-9) for n, (p, b) in enumerate(itertools.product(["tova", "h2o"], budgets))]
    drawn = figure(pd.DataFrame(rows))
    axes = drawn.subfigs[0].axes[0]
    low, high = axes.get_ylim() if len(budgets) > 1 else axes.get_xlim()
    assert high - low > 0.01
    drawn.draw_without_rendering()
    axis = axes.yaxis if len(budgets) > 1 else axes.xaxis
    assert axis.get_offset_text().get_text() == ""
    assert not any("scale" in label for label in legend(drawn))


def test_the_spread_over_seeds_is_drawn() -> None:
    rows = [cell("full", None, 20.0)]
    for seed, ppl in enumerate((21.0, 25.0, 26.0)):
        rows += [cell("tova", b, ppl - b / 64, **{"policy.seed": seed}) for b in (16, 32)]
    axes = figure(pd.DataFrame(rows)).subfigs[0].axes[0]
    (bars,) = [bar for bar in axes.containers if bar.has_yerr]
    (segment, *_) = bars.lines[2][0].get_segments()
    assert segment[1][1] - segment[0][1] == pytest.approx(2 * np.std([21, 25, 26], ddof=1))


def test_no_line_bridges_a_cell_that_is_not_done() -> None:
    rows = [cell("full"), cell("tova", 16, 31.0), cell("tova", 32, status="failed"), cell("tova", 64, 30.0)]
    axes = figure(pd.DataFrame(rows)).subfigs[0].axes[0]
    (line,) = [line for line in axes.lines if len(line.get_xdata()) == 3]
    assert list(line.get_xdata()) == [16, 32, 64]
    assert math.isnan(line.get_ydata()[1])


def test_a_task_of_ones_own_has_tables_of_its_numbers() -> None:
    rows = [{**cell(p, 16), "task": "mine", "bits_per_byte": x} for p, x in (("tova", 1.25), ("h2o", 1.5))]
    kept = [c for c in rows[0] if c not in FIGURES and not c.endswith("_all_steps") and c != "saturated_steps"]
    text = report.markdown(pd.DataFrame(rows)[kept])
    assert "### bits per byte" in text
    assert "| tova | 1.2500 |" in text


# --- publishing -------------------------------------------------------------------------------------------------------


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A checkout's results and README, and a folder of sweeps."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(publishing, "PUBLISHED", tmp_path / "checkout" / "results")
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "README.md").write_text(
        "a\n<!-- table quickstart -->\nold\n<!-- /table quickstart -->\nb\n"
    )
    monkeypatch.setattr(publishing, "frame", lambda *_: pd.DataFrame(sweep(["tova"], [64])))
    monkeypatch.setattr(publishing, "documents", lambda *_: pd.DataFrame([{"document": "a", "layers": {}}]))
    return tmp_path


def begin(place: Path, **more: Any) -> None:
    cells = [{"id": "x", "name": "x", "options": {}}]
    command = "python -m experiments.run experiment=quickstart"
    Sweep(place / "results/runs", "quickstart-0").begin(cells, **{"overrides": [], "command": command} | more)


def test_publish_takes_what_the_experiment_alone_gives(place) -> None:
    begin(place)
    paths = publishing.publish("quickstart")
    assert {p.name for p in paths} == {"table.md", "figure.png", "cells.csv", "documents.csv", "README.md"}
    readme = (place / "checkout" / "README.md").read_text()
    assert "| policy | perplexity 64 | delta NLL 64 | mass 64 | recall 64 |" in readme
    assert "old" not in readme


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"overrides": ["dataset.tokens=64"]},
            "was run with dataset.tokens=64 beside experiment=quickstart; run `python",
        ),
        ({"command": "python -m experiments.run -m sweep.name=quickstart"}, "was not run as experiment=quickstart"),
    ],
)
def test_publish_refuses_another_grid(place, more: dict[str, Any], sentence: str) -> None:
    begin(place, **more)
    with pytest.raises(UsageError, match=re.escape(sentence)):
        publishing.publish("quickstart")
    assert not (place / "checkout" / "results").exists()


def test_publish_refuses_cells_that_are_not_done(place, monkeypatch) -> None:
    begin(place)
    monkeypatch.setattr(publishing, "frame", lambda *_: unfinished())
    with pytest.raises(UsageError, match=r"3 of 7 cells are not done \(1 failed, 1 pending, 1 interrupted\)"):
        publishing.publish("quickstart")
    assert "old" in (place / "checkout" / "README.md").read_text()


def test_publish_of_a_benchmark_passes_over_what_cannot_be_read(place) -> None:
    for name, content in (("a", "{"), ("b", json.dumps({"task": "bench_decode"}))):
        folder = place / "results/runs" / name
        folder.mkdir(parents=True)
        (folder / "summary.json").write_text(content)
        (folder / "table.md").write_text("t")
        (folder / "figure.png").write_bytes(b"f")
    assert len(publishing.publish("bench_decode")) == 3
