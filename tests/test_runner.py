"""The runner as a user meets it: one cell, sweeps, continuing, tracking, and every mistake in one sentence."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from support.commands import PAGE, TINY, command
from support.published import BUDGETS, PUBLISHED
from support.results import left_behind, offline_runs

import experiments
from experiments.store import CellFolder, find_sweep
from tova.compat import cache_argument


def test_one_cell(place, monkeypatch, capsys) -> None:
    code, out, err = command(monkeypatch, capsys, *TINY, "policy=tova", "budget=32")
    assert code == 0, err
    (full, tova) = sorted(p for p in (place / "results/runs").iterdir() if p.name != "_sweeps")
    assert full.name.startswith("full-random_llama-textfiles-")
    assert tova.name.startswith("tova-32-random_llama-textfiles-")
    assert str(tova.relative_to(place)) in out
    assert "perplexity" in err
    rows = CellFolder(place / "results/runs", tova.name).rows()
    assert [row["document"] for row in rows] == ["a", "b"]
    assert f"experiments.frame('{find_sweep().id}')" in out
    assert experiments.frame()["cell"].tolist() == [full.name, tova.name]  # the latest sweep is this one cell
    for row in rows:
        assert row["tokens"] == 120
        assert row["budget"] == 32
        assert row["steps"] == 119
        assert row["saturated_steps"] == 119 - 32
        assert row["held_mean"] == 32
        assert row["seconds"] > 0
        assert row["tokens_per_second"] == pytest.approx(120 / row["seconds"])
        assert {"git", "torch", "transformers", "python", "model_identity", "dataset_identity"} <= row.keys()
        assert len(row["layers"]["retained_mass"]) == 2


def test_figures_of_a_cell_are_those_of_the_library(place, monkeypatch, capsys) -> None:
    """The stored numbers, computed once more with the library alone."""
    from experiments.models import RandomLlama
    from tova import EvictingCache, policies
    from tova.measures import AttentionMeasures, token_nll

    command(monkeypatch, capsys, *TINY, "policy=h2o_half", "budget=0.25")
    (cell,) = [p for p in (place / "results/runs").iterdir() if p.name.startswith("h2o_half")]
    folder = CellFolder(place / "results/runs", cell.name)
    summary, rows = folder.summary(), folder.rows()
    loaded = RandomLlama().load("cpu")
    losses, full, masses, hits, possible = [], [], [], np.zeros(2), np.zeros(2)
    for row, text in zip(rows, (PAGE, PAGE[::-1]), strict=True):
        ids = torch.tensor([loaded.tokenizer(text)["input_ids"][:120]])
        measures = AttentionMeasures()
        cache = EvictingCache(policies.make("h2o_half", budget=30), observers=[measures])
        nll = token_nll(loaded.model, ids, cache)[0].double()
        reference = token_nll(loaded.model, ids)[0].double()
        assert np.allclose(folder.arrays(row["index"])["nll"], nll, atol=1e-5)
        losses.append(nll)
        full.append(reference)
        means = measures.report.over(30)
        masses.append(np.mean(means.retained_mass))
        hits += means.hits
        possible += means.possible
    assert summary["budget"] == 30
    assert summary["budget_requested"] == 0.25
    assert summary["perplexity"] == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-5)
    late = torch.cat([a[30:] - b[30:] for a, b in zip(losses, full, strict=True)])
    assert summary["delta_nll"] == pytest.approx(float(late.mean()), abs=1e-5)
    assert summary["retained_mass"] == pytest.approx(np.mean(masses), abs=1e-5)
    assert summary["heavy_hitter_recall"] == pytest.approx(np.mean(hits / possible), abs=1e-9)


def test_a_sweep_and_its_frame(place, monkeypatch, capsys) -> None:
    words = ["-m", *TINY, "policy=tova,h2o_half", "budget=16,32", "dataset.documents=1"]
    code, out, err = command(monkeypatch, capsys, *words)
    assert code == 0, err
    frame = experiments.frame()
    assert isinstance(frame, pd.DataFrame)
    # The full cache they are compared with is one of the sweep's cells.
    assert list(zip(frame["policy"], frame["budget_requested"].fillna(0), strict=True)) == [
        ("full", 0), ("tova", 16), ("tova", 32), ("h2o_half", 16), ("h2o_half", 32),
    ]  # fmt: skip
    assert frame["status"].tolist() == ["done"] * 5
    assert frame["reason"].tolist() == [""] * 5
    assert frame["perplexity"].notna().all()
    assert len(experiments.documents()) == 5
    sweep = find_sweep("sweep")
    assert {p.name for p in sweep.path.iterdir()} == {"cells.json", "cells.csv", "table.md", "figure.png"}
    for row in frame.itertuples():
        assert f"{row.perplexity:.3f}" in out
        assert f"{row.perplexity:.3f}" in (sweep.path / "table.md").read_text()
    assert str(sweep.path / "figure.png") in out.replace("\n", "")
    # Once more: nothing is run again, and the same five come back.
    stamps = {p: p.stat().st_mtime_ns for p in (place / "results/runs").rglob("summary.json")}
    code, _, err = command(monkeypatch, capsys, *words)
    assert code == 0
    assert err.count("done before") == 5
    assert {p: p.stat().st_mtime_ns for p in stamps} == stamps
    assert len(experiments.frame()) == 5


def test_full_is_one_cell_whatever_the_budgets(place, monkeypatch, capsys) -> None:
    code, out, err = command(monkeypatch, capsys, "-m", *TINY, "policy=full,window", "budget=16,32,64")
    assert code == 0, err
    frame = experiments.frame()
    assert list(frame["policy"]) == ["full", "window", "window", "window"]
    assert frame["budget"].isna().tolist() == [True, False, False, False]
    full = frame.iloc[0]
    assert (full["delta_nll"], full["heavy_hitter_recall"]) == (0.0, 1.0)
    assert "every cell (4)" in out


def test_an_unfinished_cell_continues(place, monkeypatch, capsys) -> None:
    command(monkeypatch, capsys, *TINY, "policy=tova", "budget=32")
    (cell,) = [p for p in (place / "results/runs").iterdir() if p.name.startswith("tova")]
    (cell / "summary.json").unlink()
    lines = (cell / "documents.jsonl").read_text().splitlines()
    (cell / "documents.jsonl").unlink()
    (cell / "rows").mkdir()
    (cell / "rows" / "0000.json").write_text(json.dumps(json.loads(lines[0]) | {"seconds": 123.0}))
    code, _, err = command(monkeypatch, capsys, *TINY, "policy=tova", "budget=32")
    assert code == 0, err
    rows = CellFolder(place / "results/runs", cell.name).rows()
    assert [row["document"] for row in rows] == ["a", "b"]
    assert rows[0]["seconds"] == 123.0  # the first document was not read again
    again = json.loads(lines[1])
    for figure in ("nll", "delta_nll", "retained_mass", "heavy_hitter_recall"):
        assert rows[1][figure] == pytest.approx(again[figure], abs=1e-9)


def test_batches_give_the_same_figures(place, monkeypatch, capsys) -> None:
    """Up to rounding, which is why these options are part of the address."""
    command(monkeypatch, capsys, *TINY, "policy=tova", "budget=32")
    one = experiments_rows(place, "tova")
    shutil.rmtree(place / "results")
    command(monkeypatch, capsys, *TINY, "policy=tova", "budget=32", "task.batch_size=2", "task.chunk=17")
    both = experiments_rows(place, "tova")
    for a, b in zip(one, both, strict=True):
        for figure in ("nll", "delta_nll", "retained_mass", "retained_mass_with_self", "heavy_hitter_recall"):
            assert a[figure] == pytest.approx(b[figure], abs=1e-5)


def experiments_rows(place: Path, policy: str) -> list[dict]:
    (cell,) = [p for p in (place / "results/runs").iterdir() if p.name.startswith(policy)]
    return CellFolder(place / "results/runs", cell.name).rows()


def test_cells_run_together_are_the_cells_alone(place, monkeypatch, capsys) -> None:
    """Rows of one batch, each with its own policy and budget; an interrupted cell continues alone."""
    words = [*TINY, "policy=tova,h2o_half,window", "budget=24,32"]
    code, _, err = command(monkeypatch, capsys, "-m", *words, "task.together=4")
    assert code == 0, err
    assert "did not work" not in err
    together = experiments.frame().set_index("cell")
    rows = experiments.documents()
    shutil.rmtree(place / "results")
    code, _, err = command(monkeypatch, capsys, "-m", *words, "task.together=1")
    assert code == 0, err
    alone = experiments.frame().set_index("cell")
    assert list(alone["policy"]) == list(together["policy"])
    assert len(alone) == 7
    for figure in (
        "nll",
        "delta_nll",
        "perplexity",
        "retained_mass",
        "heavy_hitter_recall",
        "held_mean",
        "cache_bytes",
    ):
        assert together[figure].tolist() == pytest.approx(
            alone[figure].tolist(), abs=1e-5 if figure != "perplexity" else 1e-2
        )
    assert list(rows["document"]) == list(experiments.documents()["document"])
    code, _, err = command(monkeypatch, capsys, *TINY, "policy=tova", "task.together=0")
    assert code == 2
    assert "task.together=0: must be auto, or an integer of at least 1" in err


def test_prompts_at_once_and_intervals(place, monkeypatch, capsys) -> None:
    """One-shot rows are those of a hand-made run; the table says how each cell was run and what it held."""
    words = [*TINY, "policy=tova,snapkv_prefill,full", "budget=40", "prefill=one_shot", "prompt=0.5"]
    code, out, err = command(monkeypatch, capsys, "-m", *words)
    assert code == 0, err
    frame = experiments.frame().set_index("policy")
    assert frame.loc["tova", "prefill"] == "one_shot"
    assert frame.loc["tova", "prompt"] == 60
    assert frame.loc["full", "prompt"] == 0
    assert frame.loc["tova", "held_mean"] == 40
    assert frame.loc["snapkv_prefill", "held_mean"] == 40 + 59  # of 119 tokens read, 59 came after the prompt
    assert "tova one-shot" in out
    assert "prompts of 60" in " ".join(out.split())
    row = experiments_rows(place, "tova")[0]
    assert row["saturated_steps"] == 119 - 60

    import tova
    from experiments.models import RandomLlama

    loaded = RandomLlama().load("cpu")
    name = cache_argument(loaded.model)
    ids = torch.tensor([loaded.tokenizer(PAGE)["input_ids"][:120]])
    cache = tova.EvictingCache(tova.policies.make("tova", budget=40), prefill="one_shot")
    with torch.inference_mode():
        logits = [loaded.model(input_ids=ids[:, :60], use_cache=True, **{name: cache}).logits]
        for t in range(60, 119):
            logits.append(loaded.model(input_ids=ids[:, t : t + 1], use_cache=True, **{name: cache}).logits)
    nll = torch.nn.functional.cross_entropy(torch.cat(logits, 1)[0], ids[0, 1:], reduction="none")
    assert row["nll"] == pytest.approx(float(nll[60:].mean()), abs=1e-5)
    assert row["nll_all_steps"] == pytest.approx(float(nll.mean()), abs=1e-5)

    code, out, err = command(monkeypatch, capsys, "-m", *TINY, "policy=tova", "budget=40", "evict_every=1,8")
    assert code == 0, err
    assert "tova every 8" in out
    assert list(experiments.frame()["evict_every"]) == [1, 1, 8]


def test_measures_can_be_switched_off(place, monkeypatch, capsys) -> None:
    code, _, err = command(monkeypatch, capsys, *TINY, "policy=tova", "budget=32", "task.measures=false")
    assert code == 0, err
    assert "retained_mass" not in experiments_rows(place, "tova")[0]


def test_canonical_trace_experiment(place, monkeypatch, capsys) -> None:
    """21 rows, figure for figure those the trace's own tests pin."""
    code, out, err = command(monkeypatch, capsys, "experiment=canonical_trace", "tracking.mode=disabled")
    assert code == 0, err
    frame = experiments.frame("canonical_trace")
    assert len(frame) == 21
    for policy, figures in PUBLISHED.items():
        for budget, (mass, recall) in zip(BUDGETS, figures, strict=True):
            (row,) = frame[(frame["policy"] == policy) & (frame["budget"] == budget)].to_dict("records")
            assert f"{row['retained_mass_all_steps']:.6f}" == f"{mass:.6f}"
            assert f"{row['heavy_hitter_recall_all_steps']:.6f}" == f"{recall:.6f}"
            assert [f"{mass:.6f}", f"{recall:.6f}"] in [line.split()[2:4] for line in out.splitlines()]


def test_more_devices_than_there_are(monkeypatch) -> None:
    from experiments.devices import device_of
    from tova import UsageError

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_of("cuda:1") == "cuda:1"
    assert device_of("auto") == "cuda"
    assert device_of("cpu:0") == "cpu"
    with pytest.raises(UsageError, match="device=cuda:3: this machine has 2 CUDA devices, the last is cuda:1"):
        device_of("cuda:3")


def folder_of(place, model) -> list[str]:
    """A model as a folder, with the tokenizer of bytes that ``random_llama`` has."""
    import transformers

    model.save_pretrained(place / "texts" / "model")
    transformers.ByT5Tokenizer().save_pretrained(place / "texts" / "model")
    return [*TINY, "model=hub", "model.name=texts/model", "policy=full"]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (dict(vocab_size=100), "token 122 is no word of the model, the model's vocabulary has 100: was the text"),
        (dict(n_positions=64), "120 tokens are more than the 64 positions this model has; take dataset.tokens=64 or"),
    ],
)
def test_a_text_the_model_cannot_read(place, monkeypatch, capsys, options: dict, says: str) -> None:
    import transformers

    config = transformers.GPT2Config(**dict(vocab_size=384, n_embd=32, n_layer=1, n_head=2, n_positions=512) | options)
    words = folder_of(place, transformers.GPT2LMHeadModel(config))
    code, _, err = command(monkeypatch, capsys, *words)
    assert code == 2, err
    assert f"error: document a: {says}" in err.splitlines()[-1]
    assert "Traceback" not in err
    assert left_behind(place) == []


def test_one_bad_value_of_a_sweep_stops_it_before_it_starts(place, monkeypatch, capsys) -> None:
    code, _, err = command(monkeypatch, capsys, "-m", *TINY, "policy=tova", "budget=16,32,1.0")
    assert code == 2
    assert "budget=1.0" in err
    assert left_behind(place) == []


@pytest.mark.parametrize("file", ["documents.jsonl", "summary.json", "config.yaml", "arrays/0000.npz"])
def test_a_corrupt_file_is_named(place, monkeypatch, capsys, file: str) -> None:
    command(monkeypatch, capsys, *TINY, "policy=tova", "budget=32")
    (cell,) = [p for p in (place / "results/runs").iterdir() if p.name.startswith("tova")]
    (cell / file).write_text("}{ not what it should be")
    before = left_behind(place)
    code, _, err = command(monkeypatch, capsys, *TINY, "policy=tova", "budget=32")
    assert code == 2
    assert file in err
    assert f"delete the folder results/runs/{cell.name} and run the same command again" in err
    assert left_behind(place) == before


def test_a_failing_cell_does_not_stop_the_others(place, monkeypatch, capsys) -> None:
    """A row with its reason, exit code 3, the table of the others; tried again only when asked for."""
    from experiments.tasks.perplexity import Perplexity

    original = Perplexity._measure
    tried = []

    def breaks(self, contexts, loaded, ids):
        tried.extend(c.cell.title for c in contexts)
        if any(c.cell.budget is not None and c.cell.budget.value == 16 for c in contexts):
            raise RuntimeError("out of luck")
        return original(self, contexts, loaded, ids)

    monkeypatch.setattr(Perplexity, "_measure", breaks)
    words = ["-m", *TINY, "policy=tova", "budget=16,32"]
    code, out, err = command(monkeypatch, capsys, *words)
    assert code == 3
    assert "1 of 3 cells failed: tova 16; retry=failed runs them again" in err
    frame = experiments.frame()
    assert frame["status"].tolist() == ["done", "failed", "done"]
    assert frame["reason"].tolist() == ["", "RuntimeError: out of luck", ""]
    assert frame["perplexity"].isna().tolist() == [False, True, False]
    assert f"{frame.loc[2, 'perplexity']:.3f}" in out
    assert "out of luck" in out
    assert "failed" in (find_sweep().path / "table.md").read_text()
    assert "breaks" in CellFolder(place / "results/runs", frame.loc[1, "cell"]).failure()["traceback"]

    tried.clear()
    code, out, err = command(monkeypatch, capsys, *words)
    assert code == 3
    assert tried == []
    assert "tova 16            failed before: RuntimeError: out of luck" in err
    monkeypatch.setattr(Perplexity, "_measure", original)
    code, _, err = command(monkeypatch, capsys, *words, "retry=failed")
    assert code == 0, err
    assert "[2/2] tova 16            perplexity" in err  # the one that had failed, and what it is compared with
    assert "tova 32" not in err
    frame = experiments.frame()
    assert frame["status"].tolist() == ["done"] * 3
    code, _, err = command(monkeypatch, capsys, *words, "retry=failed")
    assert code == 2
    assert "retry=failed: no cell of the sweep" in err
    code, _, err = command(monkeypatch, capsys, *words, "retry=all")
    assert code == 2
    assert "retry=all: must be one of failed" in err


@pytest.fixture
def spoilt(monkeypatch):
    """Lets a function change the logits [1, T, V] of a text that begins with a given token."""
    from experiments.models import RandomLlama

    original = RandomLlama.load

    def by(first: str | None, change) -> None:
        def load(self, device):
            loaded = original(self, device)

            def hook(module, args, kwargs, out):
                if first is None or int(kwargs["input_ids"][0, 0]) == ord(first) + 3:  # bytes come after three others
                    change(out.logits)

            loaded.model.register_forward_hook(hook, with_kwargs=True)
            return loaded

        monkeypatch.setattr(RandomLlama, "load", load)

    return by


def test_losses_that_are_not_finite_are_shown(place, monkeypatch, capsys, spoilt) -> None:
    """The document is marked and named, the sweep goes on, and the closing table says NaN, not nothing."""
    (place / "texts" / "c.txt").write_text("quite fine. " * 40)

    def change(logits):
        logits[:, 49:60] = float("nan")
        logits[:, 70] = float("-inf")

    spoilt(PAGE[::-1][0], change)
    words = ["-m", *TINY, "policy=full,tova,window", "budget=16,32"]
    for together in ("task.together=1", "task.together=4"):
        code, out, err = command(monkeypatch, capsys, *words, together)
        assert code == 3, err
        assert "5 of 5 cells have losses that are not finite: full, tova 16, tova 32, window 16, window 32" in err
        assert "did not work" not in err
        assert "full, document b: 12 of 119 losses are not finite, the first is that of token 50" in err
        assert "tova 16, document b: 12 of 119 losses are not finite, the first is that of token 50" in err
        assert "perplexity nan" in err
        rows = experiments.documents()
        assert rows["tokens_not_finite"].tolist() == [0, 12, 0] * 5
        assert rows.loc[rows["document"] == "b", "first_not_finite"].tolist() == [50.0] * 5
        assert rows.loc[rows["document"] != "b", "perplexity"].notna().all()
        frame = experiments.frame()
        assert frame["tokens_not_finite"].tolist() == [12] * 5
        assert frame["status"].tolist() == ["not finite"] * 5
        why = "12 of 357 losses are not finite, the first at document b, token 50"
        assert frame["reason"].tolist() == [why] * 5
        assert why in " ".join(out.split())
        assert frame["perplexity"].isna().all()
        table = (find_sweep("sweep").path / "table.md").read_text()
        assert "### perplexity, all tokens\n\n| policy | all | 16 | 32 |" in table
        assert "| tova |  | NaN | NaN |" in table
        assert "| full | NaN |  |  |" in table
        assert "perplexity, all tokens" in out
        assert out.count("NaN") >= 10
        shutil.rmtree(place / "results")


def test_a_loss_too_large_for_a_perplexity(place, monkeypatch, capsys, spoilt) -> None:
    spoilt(None, lambda logits: logits.mul_(1e4))
    code, _, err = command(monkeypatch, capsys, "-m", *TINY, "policy=full,tova", "budget=16")
    assert code == 0, err
    assert experiments.frame()["perplexity"].tolist() == [float("inf")] * 2
    assert "| tova |  | inf |" in (find_sweep("sweep").path / "table.md").read_text()
    assert experiments.frame()["tokens_not_finite"].tolist() == [0, 0]


def test_tables_of_figures_that_are_partly_not_finite() -> None:
    """Blank where nothing was measured, NaN where it was and is none, and best among the others."""
    from experiments.report import groups, markdown, wide_markdown
    from experiments.report.figures import figure, png

    nan, inf = float("nan"), float("inf")
    same = dict(task="perplexity", model="m", model_note="m", dataset="d", documents=1, tokens=9, tokens_per_second=1.0)
    cells = [
        ("full", nan, 5.0, 0),
        ("tova", 16, 8.0, 0),
        ("tova", 32, nan, 3),
        ("window", 16, inf, 0),
        ("h2o", 32, 7.0, 0),
    ]
    frame = pd.DataFrame(
        [
            dict(**same, policy=p, budget=b, budget_requested=b, perplexity=x, tokens_not_finite=n)
            for p, b, x, n in cells
        ]
    )
    text = markdown(frame)
    for line in (
        "| full | 5.000 |  |  |",
        "| tova |  | **8.000** | NaN |",
        "| window |  | inf |  |",
        "| h2o |  |  | 7.000 |",
    ):
        assert line in text, text
    ((_, group),) = groups(frame)
    assert "| tova | **8.000** | NaN |" in wide_markdown(group)
    assert png(figure(frame))
    assert png(figure(frame.assign(perplexity=nan, tokens_not_finite=1)))
    earlier = frame.drop(columns="tokens_not_finite")
    assert "| tova |  | **8.000** |  |" in markdown(earlier)


def test_tracking_offline_holds_the_same_numbers(place, monkeypatch, capsys) -> None:
    words = [w for w in TINY if not w.startswith("tracking")]
    code, out, err = command(monkeypatch, capsys, "-m", *words, "policy=full,tova", "budget=32")
    assert code == 0, err
    assert "wandb" not in err.lower()
    assert "leet results/runs/wandb" in out
    runs = {run["name"]: run for run in offline_runs(place / "results/runs/wandb")}
    assert set(runs) == {"full", "tova 32"}
    frame = experiments.frame().set_index("policy")
    documents = experiments.documents()
    for name, policy in (("full", "full"), ("tova 32", "tova")):
        run = runs[name]
        assert run["exit"] == 0
        assert run["group"] == find_sweep().id
        assert run["config"]["cell"] == frame.loc[policy, "cell"]
        assert run["config"]["dataset"]["tokens"] == 120
        for figure in ("perplexity", "delta_nll", "retained_mass", "heavy_hitter_recall"):
            assert run["summary"][figure] == pytest.approx(frame.loc[policy, figure], abs=1e-12)
        rows = documents[documents["policy"] == policy].to_dict("records")
        assert len(run["history"]) == len(rows) == 2
        for logged, row in zip(run["history"], rows, strict=True):
            for figure in ("nll", "retained_mass", "tokens_per_second"):
                assert logged[f"document/{figure}"] == pytest.approx(row[figure], abs=1e-12)


def test_tracking_marks_failures(place, monkeypatch, capsys) -> None:
    from experiments.tasks.perplexity import Perplexity

    def breaks(self, rows):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(Perplexity, "summarise", breaks)
    words = [w for w in TINY if not w.startswith("tracking")]
    code, _out, err = command(monkeypatch, capsys, *words, "policy=full")
    assert code == 3
    assert "in breaks" in err  # a lone cell shows the whole traceback
    assert "error: full failed: RuntimeError: out of luck; retry=failed runs it again" in err
    run = ended_run(place)
    assert run["exit"] == 1
    assert run["summary"]["status"] == "failed"
    assert run["summary"]["reason"] == "RuntimeError: out of luck"
    assert len(run["history"]) == 2


def ended_run(place: Path) -> dict:
    """The only run; W&B writes from a process of its own, which may be a little behind on a busy machine."""
    for _ in range(40):
        (run,) = offline_runs(place / "results/runs/wandb")
        if run["exit"] is not None:
            break
        time.sleep(0.5)
    return run


def test_help_is_quick_and_names_the_choices(place) -> None:
    """No heavy library is imported to print it."""
    script = (
        "import sys\nsys.argv = ['experiments.run', '--help']\nfrom experiments import run\n"
        "try:\n    run.main()\nexcept SystemExit:\n    pass\n"
        "heavy = [m for m in ('torch', 'transformers', 'datasets', 'wandb', 'pandas', 'numba') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    for choice in ("full, h2o, h2o_half,", "books, pg19, text", "quickstart"):
        assert choice in done.stdout


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, "passive"),
        ({"OMP_WAIT_POLICY": "active"}, "active"),
        ({"GOMP_SPINCOUNT": "100"}, "None"),
    ],
)
def test_waiting_threads_sleep_unless_the_user_says_otherwise(place, given: dict, expected: str) -> None:
    """In place before torch is loaded, whichever module of the runner comes first; what the user set stands."""
    script = (
        "import os, sys\n"
        "class Watch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            print(os.environ.get('OMP_WAIT_POLICY'), flush=True)\n"
        "            os._exit(0)\n"
        "sys.meta_path.insert(0, Watch())\n"
        "import {module}\n"
        "import torch\n"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")} | given
    for module in ("experiments", "experiments.run", "experiments.tasks.perplexity"):
        done = subprocess.run(
            [sys.executable, "-c", script.format(module=module)],
            capture_output=True, text=True, timeout=120, env=environment,
        )  # fmt: skip
        assert done.stdout.split() == [expected], (module, done.stderr)


@pytest.mark.timing
def test_a_hub_that_cannot_be_reached_costs_seconds(place) -> None:
    """With the network allowed but nobody there: the real wait, in a process of its own."""
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(place / "hf")}
    environment.pop("HF_HUB_OFFLINE")
    started = time.monotonic()
    done = subprocess.run(
        [
            sys.executable, "-m", "experiments.run", "model=hub", "model.name=org/model", "dataset=text",
            "dataset.path=texts", "tracking.mode=disabled", "policy=full",
        ],
        capture_output=True, text=True, timeout=120, env=environment,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert "model.name=org/model is not on this machine and the hub cannot be reached" in last
    assert time.monotonic() - started < 30


def test_half_precision_against_float32(place, monkeypatch, capsys) -> None:
    """What two runs hold in common, counted once more with sets."""
    from experiments.tasks.dtypes import agreement

    words = [*TINY, "dataset.documents=1", "task=dtypes", "policy=tova", "budget=32"]
    code, out, err = command(monkeypatch, capsys, "-m", *words, "task.against=bfloat16,float16")
    assert code == 0, err
    frame = experiments.frame().set_index("policy")
    assert list(frame.index) == ["tova bfloat16", "tova float16"]
    assert frame.loc["tova bfloat16", "shared"] < frame.loc["tova float16", "shared"] <= 1
    assert "share of a kept set that both hold" in out
    code, _, err = command(monkeypatch, capsys, *words, "task.against=float32")
    assert code == 2
    assert "task.against=float32: must be one of bfloat16, float16" in err

    never = torch.iinfo(torch.int64).max
    generator = np.random.default_rng(0)
    ours = np.where(generator.random((2, 40)) < 0.3, never, np.arange(40) + generator.integers(0, 9, (2, 40)))
    theirs = np.where(generator.random((2, 40)) < 0.3, never, np.arange(40) + generator.integers(0, 9, (2, 40)))
    theirs[1] = ours[1]
    same, shared = agreement(ours, theirs, 5, block=7)
    for layer in range(2):
        for t in range(5, 40):
            a, b = ({j for j in range(t + 1) if log[layer, j] > t} for log in (ours, theirs))
            assert same[layer, t - 5] == (a == b)
            assert shared[layer, t - 5] == pytest.approx(len(a & b) / max(len(a), len(b), 1))
    assert same[1].all()
    assert not same[0].all()
