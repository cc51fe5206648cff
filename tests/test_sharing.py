"""Several processes on one results folder, and killed ones: every document is measured once, none is lost."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import re
import signal
import time
from pathlib import Path

import pandas as pd
import pytest
from support.commands import SMALL, finish, start, texts, until
from support.results import assert_same, cell, frames

import experiments
from experiments import claims
from experiments.store import CellFolder

# -- claims --------------------------------------------------------------------------------------------------


def test_a_claim_is_one_process(tmp_path) -> None:
    mine = claims.take(tmp_path)
    assert isinstance(mine, claims.Claim)
    theirs = claims.take(tmp_path)
    assert isinstance(theirs, claims.Owner)
    assert (theirs.pid, theirs.alive) == (os.getpid(), True)
    mine.check()
    mine.release()
    assert list(tmp_path.iterdir()) == []
    assert claims.holder(tmp_path) is None


def _hold(folder: str, ready, go) -> None:
    claim = claims.take(Path(folder))
    ready.put(isinstance(claim, claims.Claim))
    go.wait(60)


def _child(folder: Path):
    """A process that holds the claim of ``folder``."""
    context = multiprocessing.get_context("spawn")
    ready, go = context.Queue(), context.Event()
    process = context.Process(target=_hold, args=(str(folder), ready, go), daemon=True)
    process.start()
    assert ready.get(timeout=60)
    return process


def test_a_dead_owner_is_followed_at_once(tmp_path) -> None:
    process = _child(tmp_path)
    assert isinstance(claims.take(tmp_path), claims.Owner)
    process.kill()
    process.join()
    mine = claims.take(tmp_path)
    assert isinstance(mine, claims.Claim)
    assert [p.name for p in tmp_path.iterdir()] == ["claim-0002.json"]


def _elsewhere(folder: Path) -> None:
    """Make the claim one of another machine."""
    (path,) = folder.glob("claim-*.json")
    said = json.loads(path.read_text()) | {"place": "another machine", "host": "node7", "job": "12_3"}
    path.write_text(json.dumps(said))


def test_an_owner_elsewhere_lives_as_long_as_it_beats(tmp_path) -> None:
    mine = claims.take(tmp_path)
    assert isinstance(mine, claims.Claim)
    claims._quiet(mine._path)
    _elsewhere(tmp_path)
    owner = claims.take(tmp_path)
    assert isinstance(owner, claims.Owner)
    assert str(owner) == f"process {os.getpid()} on node7 (job 12_3)"
    old = time.time() - claims.PATIENCE - 5
    os.utime(mine._path, (old, old))
    assert isinstance(claims.take(tmp_path), claims.Claim)
    with pytest.raises(claims.LostError):  # it was only asleep, and notices before it writes
        mine.check()
    mine.release()  # takes nothing from the new owner
    assert isinstance(claims.take(tmp_path), claims.Owner)


def test_claims_are_touched(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(claims, "BEAT", 0.05)
    monkeypatch.setattr(claims, "_thread", None)
    mine = claims.take(tmp_path)
    assert isinstance(mine, claims.Claim)
    os.utime(mine._path, (1.0, 1.0))
    until(lambda: mine._path.stat().st_mtime > 2, 10)
    mine.release()


def test_a_broken_claim_is_waited_for_while_it_is_young(tmp_path) -> None:
    path = tmp_path / "claim-0001.json"
    path.write_text("{")
    assert isinstance(claims.take(tmp_path), claims.Owner)
    os.utime(path, (1.0, 1.0))
    assert isinstance(claims.take(tmp_path), claims.Claim)


def _race(folder: str, start_at: float, results) -> None:
    while time.time() < start_at:
        pass
    claim = claims.take(Path(folder))
    results.put(isinstance(claim, claims.Claim))
    time.sleep(1.0)  # stay alive, as a worker does


@pytest.mark.parametrize("links", [True, False])
def test_of_many_that_find_a_dead_owner_one_takes_over(tmp_path, monkeypatch, links) -> None:
    context = multiprocessing.get_context("fork")
    if not links:  # a file system without hard links

        def none(*args, **more):
            raise OSError(95, "not supported")

        monkeypatch.setattr(os, "link", none)
    for number in range(3):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "claim-0004.json").write_text("{}")
        os.utime(folder / "claim-0004.json", (1.0, 1.0))
        results = context.Queue()
        at = time.time() + 0.3
        racers = [context.Process(target=_race, args=(str(folder), at, results)) for _ in range(6)]
        for racer in racers:
            racer.start()
        assert sum(results.get(timeout=30) for _ in racers) == 1
        for racer in racers:
            racer.join()


# -- several sweeps at once ----------------------------------------------------------------------------------


GRID = ("-m", *SMALL, "policy=tova,h2o_half", "budget=16,24,32,48")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The grid of 8 cells and their full cache, run by one process."""
    place = tmp_path_factory.mktemp("undisturbed")
    texts(place, 4, 600)
    code, _, err = finish(start(place, *GRID))
    assert code == 0, err
    return frames(place)


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_same_sweep_several_times_at_once(tmp_path, undisturbed, processes: int) -> None:
    """8 cells and the full cache: 9 summaries, each cell measured by one process, every document once."""
    texts(tmp_path, 4, 600)
    ended = [finish(process) for process in [start(tmp_path, *GRID) for _ in range(processes)]]
    assert [code for code, _, _ in ended] == [0] * processes, ended
    measured = [re.findall(r"^\[.*\] (.*?)  +perplexity.* \(\d+ s", err, re.MULTILINE) for _, _, err in ended]
    names = sorted(name for per_process in measured for name in per_process)
    assert names == sorted(["full", *(f"{p} {b}" for p in ("tova", "h2o_half") for b in (16, 24, 32, 48))]), measured
    cells, documents = frames(tmp_path)
    assert cells["status"].tolist() == ["done"] * 9
    assert cells["documents"].tolist() == [4] * 9
    assert cells["tokens"].tolist() == [4 * 600] * 9
    assert documents.groupby("cell").size().tolist() == [4] * 9
    assert_same(cells, undisturbed[0])
    assert_same(documents, undisturbed[1])
    assert not list((tmp_path / "results").rglob("claim-*"))
    assert not list((tmp_path / "results").rglob("*.tmp"))


@pytest.mark.slow
def test_two_cells_that_share_only_their_full_cache(tmp_path) -> None:
    texts(tmp_path, 6, 900)
    both = [start(tmp_path, *SMALL, "budget=32", f"policy={policy}") for policy in ("tova", "h2o_half")]
    for process in both:
        code, _, err = finish(process)
        assert code == 0, err
    for path in (tmp_path / "results/runs").glob("full-*/summary.json"):
        summary = json.loads(path.read_text())
        assert (summary["documents"], summary["tokens"]) == (6, 6 * 900)


# -- processes that are killed -------------------------------------------------------------------------------

LONG = ("-m", *SMALL, "model.layers=3", "policy=tova,window", "budget=24,48")


def _works(root: Path, pid: int) -> bool:
    """Whether this process holds a claim; those of killed ones still lie there."""
    held = [claims.holder(path.parent) for path in root.glob("*/claim-*.json")]
    return any(owner is not None and owner.pid == pid for owner in held)


def _killed_again_and_again(place: Path, times: int, seed: int, longest: float) -> list[str]:
    """Start the sweep and kill it at a random moment, so many times; then let it end. What happened, line by line."""
    texts(place, 5, 2500)
    chance, log = random.Random(seed), []
    root = place / "results/runs"
    for number in range(times):
        process = start(place, *LONG)
        # From the moment it has begun to write, at a random place of what it does.
        until(lambda p=process: p.poll() is not None or _works(root, p.pid), 120)
        time.sleep(chance.uniform(0, longest))
        before = process.poll()
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        cells = [p for p in root.glob("*") if p.name != "_sweeps"]
        rows = sum(len(CellFolder(root, p.name).rows()) for p in cells)
        done = sum((p / "summary.json").exists() for p in cells)
        log.append(
            f"kill {number + 1}: {'had ended' if before is not None else 'killed'}, {done} cells done, {rows} rows"
        )
    code, _, err = finish(start(place, *LONG))
    assert code == 0, err
    log.append(
        f"then to its end: {err.count('done before')} done before, {err.count(' s)') + err.count(' left)')} measured"
    )
    return log


def test_killed_once(tmp_path) -> None:
    _kill_test(tmp_path, 1, seed=1, longest=3)


@pytest.mark.slow
def test_killed_twenty_times(tmp_path, capsys) -> None:
    """Finished cells stay, interrupted ones go on after their last document, and the end is that of a quiet run."""
    log = _kill_test(tmp_path, 20, seed=7, longest=2)
    with capsys.disabled():
        print("\n" + "\n".join(log))
    assert any(line.startswith("kill") and ", 0 rows" not in line for line in log), "it was killed in the middle"


def _kill_test(tmp_path: Path, times: int, seed: int, longest: float) -> list[str]:
    (tmp_path / "killed").mkdir()
    (tmp_path / "quiet").mkdir()
    log = _killed_again_and_again(tmp_path / "killed", times, seed, longest)
    texts(tmp_path / "quiet", 5, 2500)
    code, _, err = finish(start(tmp_path / "quiet", *LONG))
    assert code == 0, err
    killed, quiet = frames(tmp_path / "killed"), frames(tmp_path / "quiet")
    assert_same(killed[0], quiet[0])
    assert_same(killed[1], quiet[1])
    assert len(quiet[1]) == 5 * 5
    assert not list((tmp_path / "killed/results").rglob("claim-*"))
    assert not list((tmp_path / "killed/results").rglob("*.tmp"))
    return [*log, f"frames equal: {len(quiet[0])} cells, {len(quiet[1])} documents"]


@pytest.mark.timing
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_within_seconds_and_say_how_to_go_on(tmp_path, number, code: int) -> None:
    texts(tmp_path, 40, 3000)
    words = ("-m", *SMALL, "model.layers=4", "policy=tova", "budget=24,48")
    process = start(tmp_path, *words)
    root = tmp_path / "results/runs"
    until(lambda: list(root.glob("*/rows/*.json")), 120)
    os.kill(process.pid, number)
    began = time.monotonic()
    ended, _, err = finish(process, 30)
    assert time.monotonic() - began < 15
    assert ended == code, err
    assert "interrupted: 0 of 3 cells are done; to go on:" in err
    last = err.strip().splitlines()[-1]
    assert last.endswith("-m experiments.run " + " ".join(words))
    assert not list(root.glob("*/claim-*"))
    assert "Traceback" not in err
    frame = experiments.frame(root=root)
    assert set(frame["status"]) <= {"interrupted", "pending"}
    assert "after" in frame.loc[0, "reason"]


def test_what_is_ignored_stays_ignored(tmp_path) -> None:
    """nohup makes a process deaf to SIGHUP: a sweep goes on when the terminal is closed."""
    texts(tmp_path, 3, 1500)
    process = start(
        tmp_path, "-m", *SMALL, "policy=tova", "budget=24", before=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN)
    )
    until(lambda: list((tmp_path / "results/runs").glob("*/claim-*.json")), 120)
    os.kill(process.pid, signal.SIGHUP)
    code, _, err = finish(process)
    assert code == 0, err


def test_a_claim_that_was_lost_takes_no_folder_with_it(tmp_path, monkeypatch) -> None:
    """Another process took a sleeping owner for dead and began anew: what it has begun is not removed under it."""
    from experiments.progress import Progress
    from experiments.runner import Runner
    from experiments.tracking import Tracking

    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Call me Ishmael. " * 30)
    one = cell("policy=full", "dataset=text", "dataset.path=text.txt", "dataset.tokens=60")
    root = tmp_path / "runs"
    folder = CellFolder(root, one.id)

    def taken_over(self, row, arrays):
        claims._quiet(folder.path / "claim-0001.json")
        (folder.path / "claim-0002.json").write_text((folder.path / "claim-0001.json").read_text())
        check(claim)

    check = claims.Claim.check
    claim = None
    original = claims.take

    def take(path):
        nonlocal claim
        claim = original(path)
        return claim

    monkeypatch.setattr(claims, "take", take)
    monkeypatch.setattr(CellFolder, "append", taken_over)
    with Progress(1) as progress:
        runner = Runner(root, [one], {one.id: "one"}, progress, Tracking("disabled", "", root, "", root))
        runner._run([(one, take(_made(folder.path)))])
    assert (folder.path / "config.yaml").exists()
    assert (folder.path / "claim-0002.json").exists()


def _made(path: Path) -> Path:
    path.mkdir(parents=True)
    return path


def test_a_cell_that_is_finished_while_it_is_read(tmp_path, monkeypatch) -> None:
    """Rows become one file at the end; whoever was reading them one by one reads that instead."""
    folder = CellFolder(tmp_path, "cell-1")
    folder.path.mkdir()
    for index in range(3):
        folder.append({"index": index, "document": str(index)}, {})
    original, finished = CellFolder._text, []

    def finished_meanwhile(self, path):
        if path.name == "0001.json" and not finished:
            finished.append(path)
            folder.finish({"documents": 3})
        return original(self, path)

    expected = folder.rows()
    monkeypatch.setattr(CellFolder, "_text", finished_meanwhile)
    assert CellFolder(tmp_path, "cell-1").rows() == expected
    assert folder.done


def test_a_folder_that_is_removed_while_it_is_claimed(tmp_path, monkeypatch) -> None:
    """Its last owner gave it up with nothing in it."""
    import shutil

    original, removed = claims.take, []

    def take(path):
        if not removed:
            removed.append(path)
            shutil.rmtree(path)
        return original(path)

    monkeypatch.setattr(claims, "take", take)
    claim = CellFolder(tmp_path, "cell-1").claim()
    assert isinstance(claim, claims.Claim)
    claim.release()
