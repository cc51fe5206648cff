"""A sample of stored cells measured again; plans of what would be run; what is printed to be typed works."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pytest
from support.commands import TINY, command
from support.results import left_behind

import experiments
from experiments import verify
from experiments.store import CellFolder, find_sweep


def test_what_is_stored_is_what_comes_out(place, monkeypatch, capsys) -> None:
    command(monkeypatch, capsys, "-m", *TINY, "policy=tova,snapkv", "budget=40")
    assert verify.main(["--cells", "9"]) == 0
    out = capsys.readouterr().out
    assert out.count("2 documents, every figure the same to the last bit") == 3
    assert "3 of 3 cells are the same" in out
    chosen = [{v.cell for v in verify.verify(place / "results/runs", 1, seed)} for seed in range(4)]
    assert len(set.union(*chosen)) > 1  # by chance, not always the first


def test_another_figure_is_found_and_named(place, monkeypatch, capsys) -> None:
    command(monkeypatch, capsys, *TINY, "policy=full")
    (cell,) = experiments.frame()["cell"]
    folder = CellFolder(place / "results/runs", cell)
    path = folder.path / "documents.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[1])
    row["nll"] += 1e-9
    row["torch"] = "1.0"
    path.write_text("\n".join([lines[0], json.dumps(row)]) + "\n")
    assert verify.main([]) == 1
    out = capsys.readouterr().out
    assert re.search(r"NOT THE SAME: nll differ", out), out
    # Arrays as well, by how much they are off.
    arrays = folder.arrays(0)
    arrays["nll"][5] += np.float32(0.25)
    np.savez(folder.path / "arrays" / "0000.npz", **arrays)
    row = json.loads(lines[0])
    del row["arrays_sha256"]
    import hashlib

    row["arrays_sha256"] = hashlib.sha256((folder.path / "arrays" / "0000.npz").read_bytes()).hexdigest()
    path.write_text("\n".join([json.dumps(row), lines[1]]) + "\n")
    assert verify.main([]) == 1
    assert "per token by 2.5e-01 at most" in capsys.readouterr().out


def test_what_cannot_be_measured_again_is_said(place, monkeypatch, capsys) -> None:
    command(monkeypatch, capsys, *TINY, "policy=full")
    (place / "texts" / "a.txt").write_text("quite another text, " * 20)
    assert verify.main([]) == 1
    assert re.search(r"cannot be measured again, is full-\S+ now: its dataset changed", capsys.readouterr().out)
    assert verify.main(["nowhere"]) == 2
    assert "nowhere: holds no finished cell" in capsys.readouterr().err
    assert verify.main(["--cells", "0"]) == 2


# -- plans -----------------------------------------------------------------------------------------------------


def test_a_plan_runs_nothing(place, monkeypatch, capsys) -> None:
    words = ["-m", *TINY, "policy=tova,h2o_half", "budget=16,32", "model.dtype=float32,bfloat16"]
    code, out, err = command(monkeypatch, capsys, "--plan", *words)
    assert code == 0, err
    assert left_behind(place) == []
    assert "10 cells" in out  # 2 x 2 x 2, and a full cache each
    assert "2 of the cells are full caches, which the others are compared with" in out
    assert re.search(r"random_llama +texts +5 +0 +1,200 +\d+ s +\S+ GiB", out), out
    assert "nothing was run; leave out --plan to run it" in out
    command(monkeypatch, capsys, *[w for w in words if "dtype" not in w])
    code, out, _ = command(monkeypatch, capsys, *words, "--plan")
    assert code == 0
    assert "by speeds measured before" in out
    code, out, _ = command(monkeypatch, capsys, *TINY, "policy=tova", "budget=24", "--plan")
    assert code == 0
    assert "2 cells" in out


@pytest.mark.slow
def test_the_plan_of_a_sweep_of_days(place, monkeypatch, capsys) -> None:
    """Ten policies, seven budgets, three models, two datasets: within the time of composing it."""
    policies = "tova,h2o,h2o_half,scissorhands,snapkv,pyramidkv,streaming_llm,window,random,l2norm"
    words = ["-m", f"policy={policies}", "budget=64,128,256,512,1024,2048,0.125", "model.layers=1,2,3"]
    words += ["model=random_llama", "dataset=text", "dataset.path=texts/a.txt,texts/b.txt", "launcher=slurm"]
    code, out, err = command(monkeypatch, capsys, *words, "launcher.jobs=8", "dataset.tokens=900", "--plan")
    assert code == 0, err
    assert "426 cells" in out  # 420, and a full cache of each model and text
    assert "8 workers begin with" in out


# -- what is printed to be typed -------------------------------------------------------------------------------


def typed(out: str) -> str:
    """The call that is printed for pandas."""
    return re.search(r"import experiments; (experiments\.frame\(.*?\))(?:   #|$)", out, re.MULTILINE).group(1)  # type: ignore[union-attr]


@pytest.mark.parametrize("words", [["policy=tova", "budget=16"], ["-m", "policy=tova", "budget=16,24"]])
def test_the_printed_call_gives_the_frame(place, monkeypatch, capsys, words) -> None:
    """With results where they are by default and elsewhere; from here, and from a notebook's folder."""
    for where in ([], [f"results_dir={place / 'else where'}"]):
        code, out, err = command(monkeypatch, capsys, *words[:1], *TINY, *words[1:], *where)
        assert code == 0, err
        for folder in (place, place / "notebooks"):
            folder.mkdir(exist_ok=True)
            os.chdir(folder)
            frame = eval(typed(out), {"experiments": experiments})
            assert set(frame["policy"]) == {"full", "tova"}
            assert frame["status"].eq("done").all()
        os.chdir(place)


def test_the_latest_sweep_is_the_latest_run(place, monkeypatch, capsys) -> None:
    """One single cell is a sweep as well: frame() gave an older one, or nothing."""
    command(monkeypatch, capsys, "-m", *TINY, "policy=tova", "budget=16,32")
    command(monkeypatch, capsys, *TINY, "policy=window", "budget=16")
    assert experiments.frame()["policy"].tolist() == ["full", "window"]


def test_an_experiment_that_was_changed_does_not_pass_for_it(place, monkeypatch, capsys) -> None:
    small = ["task.tokens=200", "tracking.mode=disabled"]
    code, _, err = command(monkeypatch, capsys, "experiment=canonical_trace", *small, "budget=64")
    assert code == 0, err
    changed = find_sweep("canonical_trace")
    assert "budget=64" in changed.content()["overrides"]
    content = json.loads((changed.path / "cells.json").read_text())
    assert "experiments.run experiment=canonical_trace" in content["command"]
    # A plain one, older than the changed one, is what the name means.
    plain = changed.path.parent / "canonical_trace-00000000"
    plain.mkdir()
    (plain / "cells.json").write_text(json.dumps(content | {"overrides": []}))
    os.utime(plain / "cells.json", (1.0, 1.0))
    assert find_sweep("canonical_trace").id == plain.name
    assert find_sweep(changed.id).id == changed.id
    assert find_sweep().id == changed.id
