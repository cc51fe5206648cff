"""Weights & Biases: one run per cell and sweep, however often it was begun; no sweep waits for it, or fails by it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from support.commands import SMALL, TINY, command, finish, start, texts, until
from support.results import offline_runs

import experiments
from experiments import sync, tracking
from experiments.store import find_sweep

OFFLINE = [word for word in TINY if not word.startswith("tracking")]


def runs_of(place: Path) -> list[dict]:
    """The offline runs, once W&B's own process has written them to the end."""
    for _ in range(40):
        runs = offline_runs(place / "results/runs/wandb")
        if all(run["exit"] is not None for run in runs):
            break
        time.sleep(0.25)
    return runs


def test_one_run_a_cell_however_often_it_was_killed(tmp_path) -> None:
    texts(tmp_path, 5, 2500)
    words = [word for word in SMALL if not word.startswith("tracking")]
    words = ["-m", *words, "model.layers=3", "policy=tova", "budget=24,48"]
    root = tmp_path / "results/runs"
    for _ in range(2):
        process = start(tmp_path, *words)
        seen = len(list(root.glob("*/rows/*.json"))) + len(list(root.glob("*/summary.json")))
        until(lambda n=seen: len(list(root.glob("*/rows/*")) + list(root.glob("*/summary.json"))) > n, 120)
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    code, _, err = finish(start(tmp_path, *words))
    assert code == 0, err
    runs = runs_of(tmp_path)
    assert sorted(run["name"] for run in runs) == ["full", "tova 24", "tova 48"]
    assert [len(run["history"]) for run in runs] == [5] * 3
    assert [run["exit"] for run in runs] == [0] * 3


def test_a_sweep_s_group_is_complete(place, monkeypatch, capsys) -> None:
    """Cells that an earlier sweep has measured are among the new one's runs, with all their documents, once."""
    command(monkeypatch, capsys, "-m", *OFFLINE, "policy=tova", "budget=16")
    first = find_sweep().id
    words = ["-m", *OFFLINE, "policy=tova", "budget=16,32"]
    for _ in range(2):
        code, _, err = command(monkeypatch, capsys, *words)
        assert code == 0, err
    second = find_sweep().id
    runs = runs_of(place)
    groups = {group: sorted(r["name"] for r in runs if r["group"] == group) for group in (first, second)}
    assert groups == {first: ["full", "tova 16"], second: ["full", "tova 16", "tova 32"]}
    assert len(runs) == 5
    assert [len(run["history"]) for run in runs] == [2] * 5


def test_what_a_run_says(place, monkeypatch, capsys) -> None:
    """Names instead of class paths; the summary is the cell's, and holds no document's figures."""
    command(monkeypatch, capsys, "-m", *OFFLINE, "policy=tova", "budget=16", "policy.sinks=2")
    runs = {run["name"]: run for run in runs_of(place)}
    run = runs["tova sinks=2 16"]
    assert run["config"]["policy"]["name"] == "tova"
    assert run["config"]["policy"]["sinks"] == 2
    assert run["config"]["model"]["name"] == "random_llama"
    assert run["config"]["dataset"]["name"] == "texts"
    assert "_target_" not in str(run["config"])
    assert run["summary"]["status"] == "done"
    assert run["summary"]["perplexity"] == pytest.approx(experiments.frame().loc[1, "perplexity"])
    assert not [name for name in run["summary"] if name.startswith("document/")]


@pytest.mark.timing
def test_online_without_a_network_is_said_at_once(place, monkeypatch, capsys) -> None:
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    began = time.monotonic()
    code, _, err = command(monkeypatch, capsys, "-m", *OFFLINE, "policy=tova", "budget=16", "tracking.mode=online")
    assert code == 2
    assert time.monotonic() - began < 20
    (line,) = err.strip().splitlines()
    assert line.startswith("error: tracking.mode=online: 127.0.0.1 cannot be reached (Connection refused); use ")
    assert not (place / "results").exists()


def test_a_dashboard_that_breaks_stops_no_sweep(place, monkeypatch, capsys) -> None:
    import wandb

    def init(**settings):
        raise wandb.errors.CommError("the disk is full\nand more")

    monkeypatch.setattr(wandb, "init", init)
    code, _, err = command(monkeypatch, capsys, "-m", *OFFLINE, "policy=tova", "budget=16,32")
    assert code == 0, err
    assert err.count("W&B stopped working (the disk is full); the sweep goes on, and its results are stored") == 1
    assert experiments.frame()["status"].tolist() == ["done"] * 3


class FakeRun:
    """What :mod:`wandb` is asked for, kept."""

    def __init__(self, **settings) -> None:
        self.settings, self.step, self.logged, self.summary, self.code = settings, 0, [], {}, None

    def define_metric(self, *args, **more) -> None: ...

    def log(self, figures, step) -> None:
        self.logged.append(step)
        self.step = step + 1

    def finish(self, exit_code) -> None:
        self.code = exit_code


def test_online_a_run_is_watched_and_gone_on_with(tmp_path, monkeypatch) -> None:
    """Opened when the cell begins, ended as interrupted, and continued without the documents it has already."""
    import wandb

    opened: list[FakeRun] = []

    def init(**settings):
        run = FakeRun(**settings)
        if opened:
            run.step = opened[-1].step
        opened.append(run)
        return run

    monkeypatch.setattr(wandb, "init", init)
    rows = [{"index": i, "document": str(i), "nll": 1.0 + i} for i in range(3)]
    shared = tracking.Tracking("online", "p", tmp_path, "sweep-1", tmp_path / "tracked")
    tracker = shared.cell("cell-1", "tova 16", {}, [])
    tracker.document(rows[0])
    tracker.document(rows[1])
    tracker.end("interrupted", {})
    assert opened[0].logged == [0, 1]
    assert opened[0].code == 130
    assert opened[0].summary["status"] == "interrupted"
    assert not shared.complete("cell-1")
    tracker = shared.cell("cell-1", "tova 16", {}, rows[:2])
    tracker.document(rows[2])
    tracker.end("done", {"perplexity": 2.0})
    assert opened[1].logged == [2]
    assert opened[1].code == 0
    assert opened[0].settings["id"] == opened[1].settings["id"]
    assert opened[1].settings["resume"] == "allow"
    assert shared.complete("cell-1")


def test_sync_sends_each_run_once(tmp_path, capsys) -> None:
    folder = tmp_path / "wandb"
    for name in ("offline-run-20260101_000000-a", "offline-run-20260101_000001-b", "run-20260101_000002-c"):
        (folder / name).mkdir(parents=True)
        (folder / name / f"{name[-1]}.wandb").write_text("")
    assert [p.name[-1] for p in sync.waiting(tmp_path)] == ["a", "b"]

    def send(run: Path) -> int:
        if run.name.endswith("b"):
            return 1
        (run / f"{run.name[-1]}.wandb.synced").write_text("")
        return 0

    sent, failed = sync.sync(tmp_path, send)
    assert sent == 1
    assert [p.name[-1] for p in failed] == ["b"]
    assert [p.name[-1] for p in sync.waiting(tmp_path)] == ["b"]
    assert sync.main([str(tmp_path / "nowhere")]) == 2
    assert "there is no such folder of results" in capsys.readouterr().err
