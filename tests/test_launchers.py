"""Sweeps that other processes run: workers of this machine, jobs of a real SLURM, and what becomes of them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
from support.commands import SMALL, finish, start, texts, until
from support.results import assert_same, cell, frames
from support.slurm import missing, slurm

import experiments
from experiments import schedule
from experiments.store import CellFolder


def test_workers_on_this_machine(tmp_path) -> None:
    """The same bits as one process, each cell once."""
    grid = ("-m", *SMALL, "policy=tova,window", "budget=24,48")
    (tmp_path / "many").mkdir()
    (tmp_path / "one").mkdir()
    for place in (tmp_path / "many", tmp_path / "one"):
        texts(place, 3, 500)
    code, out, err = finish(start(tmp_path / "many", *grid, "launcher=joblib", "launcher.workers=2"))
    assert code == 0, err
    assert "[5/5]" in err
    assert "2 workers at it; their logs: results/runs/_sweeps/" in err
    logs = list((tmp_path / "many/results/runs/_sweeps").glob("*/logs/worker-*.log"))
    measured = [line for log in logs for line in log.read_text().splitlines() if re.search(r"\(\d+ s", line)]
    assert len(logs) == 2
    assert len(measured) == 5
    code, _, err = finish(start(tmp_path / "one", *grid))
    assert code == 0, err
    many, one = frames(tmp_path / "many"), frames(tmp_path / "one")
    assert_same(many[0], one[0])
    assert_same(many[1], one[1])
    assert f"{one[0].loc[1, 'perplexity']:.3f}" in out


@pytest.mark.slow
def test_a_worker_that_is_killed_takes_no_other_with_it(tmp_path) -> None:
    """Its cell is a failed row with a reason; the pool is started again; the same command ends it."""
    texts(tmp_path, 6, 2500)
    grid = (
        "-m",
        *SMALL,
        "model.layers=4",
        "policy=tova,window",
        "budget=24,48",
        "launcher=joblib",
        "launcher.workers=2",
    )
    process = start(tmp_path, *grid)
    root = tmp_path / "results/runs"
    until(lambda: list(root.glob("tova*/rows/*.json")), 120)
    (claim,) = root.glob("tova-24-*/claim-*.json") or root.glob("tova-48-*/claim-*.json")
    import json

    os.kill(json.loads(claim.read_text())["pid"], signal.SIGKILL)
    code, _out, err = finish(process)
    assert code == 3, err
    frame = experiments.frame(root=root)
    assert frame["status"].value_counts().to_dict() == {"done": 4, "failed": 1}
    assert "was killed" in frame.loc[frame["status"] == "failed", "reason"].item()
    assert "1 of 5 cells were broken off: tova" in err
    assert "the same command goes on" in err
    code, _, err = finish(start(tmp_path, *grid))
    assert code == 0, err
    assert experiments.frame(root=root)["status"].tolist() == ["done"] * 5


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["launcher=slurm"], "launcher=slurm: there is no sbatch here; run it where jobs are submitted"),
        (["launcher=joblib", "launcher.workers=0"], "launcher.workers=0: must be an integer of at least 1"),
        (["launcher=slrm"], "launcher=slrm: there is no such launcher (did you mean slurm?)"),
    ],
)
def test_launchers_that_cannot_start(tmp_path, words, says) -> None:
    texts(tmp_path, 1, 200)
    path = os.pathsep.join(p for p in os.environ["PATH"].split(os.pathsep) if not (Path(p) / "sbatch").exists())
    code, _, err = finish(start(tmp_path, "-m", *SMALL, "policy=tova", "budget=16,24", *words, PATH=path or "/nowhere"))
    assert code == 2, err
    assert says in err
    assert not (tmp_path / "results").exists()


# -- SLURM ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A running SLURM of one node."""
    if why := missing():
        pytest.skip(why)
    with slurm(tmp_path_factory.mktemp("slurm")) as environment:
        yield environment


HUNGRY = '''
from dataclasses import dataclass
import torch
from tova.policies import Tova

@dataclass(frozen=True, kw_only=True)
class Hungry(Tova):
    """Takes all the memory there is, at one budget."""
    name = "hungry"

    def score(self, slots):
        if self.budget == 48:
            self.__dict__["held"] = [torch.ones(2**28) for _ in range(64)]
        return super().score(slots)
'''


def ask(environment, *command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}).stdout


def owners(root: Path) -> dict[str, str]:
    """Job -> cell, for those being measured."""
    import json

    found = {}
    for path in root.glob("*/claim-*.json"):
        try:
            found[json.loads(path.read_text())["job"]] = path.parent.name
        except (OSError, ValueError):
            continue
    return found


@pytest.mark.slow
def test_a_sweep_of_six_cells_with_a_job_cancelled(tmp_path, cluster, capsys) -> None:
    """What is lost is a failed row that names the job, its end and its log; the same command completes the sweep."""
    (tmp_path / "jobs").mkdir()
    (tmp_path / "quiet").mkdir()
    for place in (tmp_path / "jobs", tmp_path / "quiet"):
        texts(place, 10, 4000)
    grid = ("-m", *SMALL, "model.layers=4", "policy=tova,h2o_half", "budget=64,96,128")
    by_jobs = (
        *grid,
        "launcher=slurm",
        "launcher.jobs=2",
        "launcher.cpus=1",
        "launcher.memory_gb=3",
        "launcher.minutes=30",
    )
    process = start(tmp_path / "jobs", *by_jobs, **cluster)
    root = tmp_path / "jobs/results/runs"

    def second_at_it() -> bool:
        return any(job.endswith("_1") and not cell.startswith("full") for job, cell in owners(root).items())

    until(second_at_it, 240)
    job, cell = next((job, cell) for job, cell in owners(root).items() if job.endswith("_1"))
    time.sleep(1)
    ask(cluster, "scancel", job)
    code, out, err = finish(process, 600)
    with capsys.disabled():
        print(f"\n-- scancel {job}, which measured {cell}\n{err}\n{out[-2500:]}")
    assert code == 3, err
    frame = experiments.frame(root=root).set_index("cell")
    assert frame["status"].value_counts().to_dict() == {"done": 6, "failed": 1}
    reason = frame.loc[cell, "reason"]
    assert re.search(rf"broken off: job {job} on \S+ ended as CANCELLED.*; its log is .*{job}_0_log.err", reason), (
        reason
    )
    assert "1 of 7 cells were broken off" in err
    assert "job " in err
    code, out, err = finish(start(tmp_path / "jobs", *by_jobs, **cluster), 600)
    with capsys.disabled():
        print(f"-- the same command again\n{err}")
    assert code == 0, err
    code, _, quiet_err = finish(start(tmp_path / "quiet", *grid), 600)
    assert code == 0, quiet_err
    jobs, quiet = frames(tmp_path / "jobs"), frames(tmp_path / "quiet")
    assert_same(jobs[0], quiet[0])
    assert_same(jobs[1], quiet[1])


@pytest.mark.slow
def test_a_job_over_its_memory_and_one_out_of_time(tmp_path, cluster, capsys) -> None:
    texts(tmp_path, 2, 600)
    (tmp_path / "mine.py").write_text(HUNGRY)
    grid = ("-m", *SMALL, "policy._target_=mine.Hungry", "budget=24,48,64", "launcher=slurm", "launcher.cpus=1")
    code, _, err = finish(start(tmp_path, *grid, "launcher.jobs=2", "launcher.memory_gb=2", **cluster), 600)
    with capsys.disabled():
        print(f"\n{err}")
    assert code == 3
    root = tmp_path / "results/runs"
    frame = experiments.frame(root=root).set_index("budget_requested")
    assert frame["status"].tolist() == ["done", "done", "failed", "done"]
    assert re.search("OUT_OF_MEMORY|over its memory", frame.loc[48, "reason"]), frame.loc[48, "reason"]

    texts(tmp_path, 60, 4000)
    long = ("-m", *SMALL, "model.layers=6", "policy=tova", "budget=64", "sweep.name=long", "launcher=slurm")
    limits = ("launcher.jobs=1", "launcher.cpus=1", "launcher.minutes=2", "launcher.requeues=0", "launcher.memory_gb=3")
    code, _, err = finish(start(tmp_path, *long, *limits, **cluster), 600)
    with capsys.disabled():
        print(f"\n{err}")
    assert code == 3
    frame = experiments.frame("long", root=root)
    assert frame["status"].tolist() == ["failed", "pending"]
    assert "out of time (launcher.minutes, launcher.requeues)" in frame.loc[0, "reason"]
    assert CellFolder(root, frame.loc[0, "cell"]).rows(), "what it had finished is kept"


# -- shares and plans ----------------------------------------------------------------------------------------


def test_shares_keep_what_is_loaded_together(tmp_path) -> None:
    """All cells, each once, in as many shares as workers, those of one model and text in as few as possible."""
    cells = [
        cell(f"model.seed={seed}", f"budget={budget}", "policy=tova", "dataset.tokens=100")
        for seed in (0, 1)
        for budget in (16, 24, 32, 48)
    ]
    for workers in (1, 2, 3, 8, 20):
        shares = schedule.shares(cells, workers, tmp_path)
        assert [c.id for share in shares for c in share] == [c.id for c in cells]
        assert len(shares) == min(workers, 8)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    two = schedule.shares(cells, 2, tmp_path)
    assert [{c.config["model"]["seed"] for c in share} for share in two] == [{0}, {1}]


def test_estimates_come_from_what_was_measured(tmp_path) -> None:
    import json

    from experiments.provenance import device_name

    one = cell("budget=16", "policy=tova", "dataset.tokens=100", "dataset.documents=2")
    guess = schedule.History.of(tmp_path).estimate(one)
    assert (guess.documents, guess.tokens, guess.measured) == (2, 100, 0)
    summary = {
        "model": "random_llama",
        "device_name": device_name("cpu"),
        "policy": "tova",
        "documents": 1,
        "tokens": 100,
    }
    for number, speed in enumerate((90.0, 100.0, 400.0)):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "summary.json").write_text(json.dumps({**summary, "tokens_per_second": speed}))
    known = schedule.History.of(tmp_path).estimate(one)
    assert (known.seconds, known.measured) == (2.0, 3)  # 200 tokens at the median of 100 a second
    (tmp_path / "0" / "summary.json").write_text("{")
    assert schedule.History.of(tmp_path).estimate(one).measured == 2
