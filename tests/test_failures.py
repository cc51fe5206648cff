"""Cells that fail, disks that are full, files that are not what they should be: a row, a sentence, and nothing lost."""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import stat
import weakref

import numpy as np
import pytest
import torch
import yaml
from support.commands import TINY, command

import experiments
from experiments import files, memory
from experiments.store import CellFolder, find_sweep

POLICIES = """
from dataclasses import dataclass
import torch
from tova.policies import Policy, Record, Tova

@dataclass(frozen=True, kw_only=True)
class Raises(Tova):
    name = "raises"
    def score(self, slots):
        raise ZeroDivisionError("by the policy")

@dataclass(frozen=True, kw_only=True)
class Nan(Tova):
    name = "nan"
    def score(self, slots):
        return super().score(slots) * float("nan")

@dataclass(frozen=True, kw_only=True)
class ProtectsAll(Tova):
    name = "protects_all"
    def protected(self, slots):
        return torch.ones_like(slots.positions, dtype=torch.bool)

@dataclass(frozen=True, kw_only=True)
class Shape(Tova):
    name = "shape"
    def score(self, slots):
        return super().score(slots)[..., :3]
"""


def test_policies_that_misbehave_are_failed_rows(place, monkeypatch, capsys) -> None:
    monkeypatch.syspath_prepend(str(place))
    (place / "bad.py").write_text(POLICIES)
    classes = "policy._target_=bad.Raises,bad.Nan,bad.ProtectsAll,bad.Shape,tova.policies.Tova"
    code, out, err = command(monkeypatch, capsys, "-m", *TINY, classes, "budget=16")
    assert code == 3, err
    frame = experiments.frame().set_index("policy")
    assert frame["status"].to_dict() == {
        "full": "done", "raises": "failed", "nan": "failed", "protects_all": "failed", "shape": "failed",
        "tova": "done",
    }  # fmt: skip
    for policy, says in (
        ("raises", "score failed at step 0: ZeroDivisionError: by the policy"),
        ("nan", "score returned NaN for position 0 at step 1"),
        ("protects_all", "protected leaves 0 of 17 positions to choose from at step 16, and 1 must go"),
        ("shape", "score must return [rows, slots] = [1, 119], of floats or integers, got float32 [1, 3] at step 0"),
    ):
        assert frame.loc[policy, "reason"].startswith(f"{policy}: {says}")
    assert "4 of 6 cells failed: raises 16, nan 16, protects_all 16, shape 16; retry=failed" in err
    assert out.count("failed") >= 4
    assert "by the policy" in out
    assert f"{frame.loc['tova', 'perplexity']:.3f}" in out


def test_a_mistake_found_at_run_time_hides_nothing(place, monkeypatch, capsys) -> None:
    """A budget share too small for one short text: that cell fails, the others are in the table."""
    (place / "texts" / "a.txt").write_text("It was")
    words = ["-m", *TINY[:-2], "tracking.mode=disabled", "policy=tova", "budget=3,0.1", "task.measures=false"]
    code, out, _err = command(monkeypatch, capsys, *words)
    assert code == 3
    frame = experiments.frame()
    assert frame["status"].tolist() == ["done", "done", "failed"]
    assert frame.loc[2, "reason"] == "budget=0.1: is less than one token of a document of 6 tokens"
    assert f"{frame.loc[1, 'perplexity']:.3f}" in out


def test_what_no_cell_can_do_is_one_sentence(place, monkeypatch, capsys) -> None:
    """The model cannot be had: nothing is left behind, and it is tried once, not once a cell."""
    from experiments.models import RandomLlama
    from tova import UsageError

    tried = []

    def load(self, device):
        tried.append(device)
        raise UsageError("model.name=x: broken")

    monkeypatch.setattr(RandomLlama, "load", load)
    code, _, err = command(monkeypatch, capsys, "-m", *TINY, "policy=tova,h2o_half", "budget=16,32")
    assert code == 2
    assert err.strip().splitlines()[-1] == "error: model.name=x: broken"
    assert not (place / "results").exists()
    assert len(tried) == 1


def test_a_failure_keeps_no_memory(place, monkeypatch, capsys) -> None:
    """The traceback of a failed cell held its tensors: after one that was too large, small ones failed too."""
    from experiments.tasks.perplexity import Perplexity

    original = Perplexity._measure
    held = []

    def breaks(self, contexts, loaded, ids):
        big = torch.zeros(1000)
        if contexts[0].cell.budget is not None:
            held.append(weakref.ref(big))
            raise RuntimeError("out of luck")
        return original(self, contexts, loaded, ids)

    monkeypatch.setattr(Perplexity, "_measure", breaks)
    from experiments.runner import Runner

    seen = []
    fail = Runner._fail

    def look(self, *args, **more):
        gc.collect()
        seen.append([ref() is None for ref in held])
        return fail(self, *args, **more)

    monkeypatch.setattr(Runner, "_fail", look)
    code, _, _ = command(monkeypatch, capsys, "-m", *TINY, "policy=tova", "budget=16,24,32")
    assert code == 3
    assert seen == [[True], [True] * 2, [True] * 3]


def _exhausts(monkeypatch, limit: int) -> list[tuple[int, int | None]]:
    """A device on which more than ``limit`` cells times chunk do not fit."""
    from experiments.tasks.perplexity import USUAL_CHUNK, Perplexity

    original = Perplexity._measure
    tried: list[tuple[int, int | None]] = []

    def small(self, contexts, loaded, ids):
        chunk = USUAL_CHUNK >> contexts[0].smaller
        if contexts[0].cell.budget is not None:
            tried.append((len(contexts), chunk))
            if len(contexts) * chunk > limit:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has")
        return original(self, contexts, loaded, ids)

    monkeypatch.setattr(Perplexity, "_measure", small)
    return tried


def test_memory_that_runs_out_halves_the_cells_then_the_chunk(place, monkeypatch, capsys) -> None:
    words = ["-m", *TINY, "policy=tova", "budget=16,24,32,48", "task.together=4"]
    tried = _exhausts(monkeypatch, 64)
    code, _, err = command(monkeypatch, capsys, *words)
    assert code == 0, err
    # 4 at once, then 2, then 1, then 1 with half the chunk; and so for each.
    assert tried[:4] == [(4, 128), (2, 128), (1, 128), (1, 64)]
    assert "4 cells at once did not work (OutOfMemoryError); 2 at a time" in err
    assert "out of memory; once more, with chunks half as long" in err
    rows = experiments.documents()
    assert set(rows.loc[rows["policy"] == "tova", "chunk"]) == {64}
    assert rows.loc[rows["policy"] == "full", "chunk"].isna().all()


def test_memory_that_is_never_enough_is_said_in_numbers(place, monkeypatch, capsys) -> None:
    _exhausts(monkeypatch, 1)
    monkeypatch.setattr(memory, "free_bytes_of", lambda device: 2**31)
    code, _, _ = command(monkeypatch, capsys, "-m", *TINY, "policy=tova,full", "budget=16")
    assert code == 3
    frame = experiments.frame().set_index("policy")
    assert frame["status"].to_dict() == {"full": "done", "tova": "failed"}
    reason = frame.loc["tova", "reason"]
    assert reason.startswith(
        "out of memory with a document of 120 tokens on cpu (CUDA out of memory. Tried to allocate"
    )
    assert "2.0 GiB are free now, and about 53 tokens would fit" in reason  # 120 * 2 / (2 + 2.5)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.cuda.OutOfMemoryError("CUDA out of memory."),
        RuntimeError("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to"),
        RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 123 bytes."),
    ],
)  # fmt: skip
def test_how_memory_runs_out(error) -> None:
    assert memory.is_exhausted(error)
    assert not memory.is_exhausted(RuntimeError("shapes do not match"))


# -- disks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 3, 6, 9, 12])
def test_a_full_disk_loses_nothing(place, monkeypatch, capsys, after: int) -> None:
    """One sentence, whatever was being written; no temporary file stays, and the same command ends like a quiet run."""
    words = ["-m", *TINY, "policy=tova", "budget=16,32"]
    original = files.Scratch.write
    count = 0

    def full(self, content):
        nonlocal count
        count += 1
        if count > after:
            self.path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        return original(self, content)

    monkeypatch.setattr(files.Scratch, "write", full)
    code, _, err = command(monkeypatch, capsys, *words)
    monkeypatch.setattr(files.Scratch, "write", original)
    assert code == 2
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: results_dir=results/runs: cannot be written (No space left on device); what was")
    assert "Traceback" not in err
    assert not list(place.rglob("*.tmp"))
    assert not list(place.rglob("claim-*"))
    code, _, err = command(monkeypatch, capsys, *words)
    assert code == 0, err
    again = experiments.frame()
    shutil.rmtree(place / "results")
    command(monkeypatch, capsys, *words)
    quiet = experiments.frame()
    for figure in ("perplexity", "delta_nll", "retained_mass", "documents", "tokens"):
        assert again[figure].tolist() == quiet[figure].tolist()


def test_permissions_are_the_umask_s(place, monkeypatch, capsys) -> None:
    """Colleagues can read what the umask lets them; arrays were readable by their owner alone."""
    before = os.umask(0o027)
    try:
        command(monkeypatch, capsys, *TINY, "policy=tova", "budget=16")
    finally:
        os.umask(before)
    found = {stat.S_IMODE(p.stat().st_mode) for p in (place / "results").rglob("*") if p.is_file()}
    assert found == {0o640}


# -- files that are not what they should be ------------------------------------------------------------------


@pytest.fixture
def two(place, monkeypatch, capsys) -> tuple[CellFolder, CellFolder]:
    """Two finished cells: tova at 16 and at 32."""
    code, _, err = command(monkeypatch, capsys, "-m", *TINY, "policy=tova", "budget=16,32")
    assert code == 0, err
    found = [CellFolder(place / "results/runs", cell) for cell in experiments.frame()["cell"]]
    return found[1], found[2]


WORDS = ["-m", *TINY, "policy=tova", "budget=16,32"]


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("config.yaml", "this is the configuration of another cell"),
        ("documents.jsonl", "line 1 is a row of another cell, tova-32-"),
        ("summary.json", "not a summary of this cell"),
        ("arrays/0000.npz", "its figures are not those of its row"),
    ],
)
def test_another_cell_s_files_are_not_taken(two, monkeypatch, capsys, name: str, says: str) -> None:
    """All but arrays say whose they are; a folder of another cell's is seen through."""
    mine, other = two
    (mine.path / name).write_bytes((other.path / name).read_bytes())
    code, _, err = command(monkeypatch, capsys, *WORDS)
    assert code == 2
    assert f"{mine.id}/{name}: {says}" in err
    assert len(err.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("summary.json", "{}", "not of format 3"),
        ("summary.json", "[]", "not readable as a summary"),
        ("summary.json", "", "not readable as a summary"),
        ("summary.json", '{"format": 99}', "written by a later version (format 99; this one reads 3)"),
        ("summary.json", b"\xff\xfe", "not readable"),
        ("config.yaml", "{}", "not readable as a configuration"),
        ("config.yaml", "format: 99\nidentity: {}\nconfig: {}\n", "written by a later version"),
        ("config.yaml", "!!python/object/apply:os.system ['true']", "not readable as a configuration"),
        ("documents.jsonl", "{}\n", "line 1 is not a document's row"),
        ("documents.jsonl", '{"index": 0, "document": "a"}\n', "line 1 is not a document's row"),
        ("documents.jsonl", "", "there are 0"),
    ],
)
def test_broken_files_are_named(two, monkeypatch, capsys, name: str, content, says: str) -> None:
    mine, _ = two
    (mine.path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    before = sorted(str(p) for p in mine.path.rglob("*"))
    code, _, err = command(monkeypatch, capsys, *WORDS)
    assert code == 2
    assert len(err.strip().splitlines()) == 1, err
    assert says in err
    assert sorted(str(p) for p in mine.path.rglob("*")) == before


def test_rows_that_appear_twice_or_not_at_all(two, monkeypatch, capsys) -> None:
    mine, _other = two
    path = mine.path / "documents.jsonl"
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], lines[0]]) + "\n")
    code, _, err = command(monkeypatch, capsys, *WORDS)
    assert code == 2
    assert "line 2 is document 0 once more" in err
    path.write_text(lines[0] + "\n")
    code, _, err = command(monkeypatch, capsys, *WORDS)
    assert code == 2
    assert "its summary is of 2 documents, and there are 1" in err


def test_a_truncated_array_file(two, monkeypatch, capsys) -> None:
    mine, _ = two
    path = mine.path / "arrays" / "0001.npz"
    path.write_bytes(path.read_bytes()[:-40])
    code, _, err = command(monkeypatch, capsys, *WORDS)
    assert code == 2
    assert "arrays/0001.npz: its figures are not those of its row" in err


def test_arrays_are_never_pickles(two, monkeypatch, capsys) -> None:
    mine, _ = two
    path = mine.path / "arrays" / "0000.npz"
    np.savez(path, nll=np.array([{"a": 1}], dtype=object))
    with pytest.raises(experiments.store.UsageError, match=r"0000.npz: not readable \(ValueError\)"):
        mine.arrays(0)
    code, _, err = command(monkeypatch, capsys, *WORDS)
    assert code == 2
    assert "arrays/0000.npz: its figures are not those of its row" in err


def test_a_broken_sweep_s_list(two, place, monkeypatch, capsys) -> None:
    path = find_sweep().path / "cells.json"
    path.write_text("{}")
    with pytest.raises(experiments.store.UsageError, match="run the sweep again to have it written anew"):
        experiments.frame()
    code, _, err = command(monkeypatch, capsys, *WORDS)
    assert code == 0, err
    assert len(experiments.frame()) == 3
    assert json.loads(path.read_text())["cells"][0]["options"]["policy"] == "full"
    assert yaml.safe_load((two[0].path / "config.yaml").read_text())["format"] == 3
