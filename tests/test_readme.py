"""What the README shows is run as it stands there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir

import experiments
from experiments import run as entry
from experiments import sweeper
from experiments.planning import plan

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w*)\n(.*?)```", README, flags=re.DOTALL)


def block(language: str, containing: str) -> str:
    (found,) = [text for kind, text in BLOCKS if kind == language and containing in text]
    return found


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "text.txt").write_text("Call me Ishmael. Some years ago, never mind how long precisely. " * 10)
    return tmp_path


def run(monkeypatch, *words: str) -> None:
    small = ["model=random_llama", "dataset=text", "dataset.path=text.txt", "tracking.mode=disabled"]
    monkeypatch.setattr(sys, "argv", ["experiments.run", *words, *small])
    entry.main()


def test_the_library_in_eight_lines(smollm2) -> None:
    names: dict = {}
    exec(block("python", "tova.EvictingCache"), names)
    assert names["cache"].evicted_at.shape[0] == 30
    assert names["ids"].shape[1] < names["text"].shape[1] <= names["ids"].shape[1] + 20


def test_adding_a_policy(place, monkeypatch, capsys) -> None:
    (place / "my_policies.py").write_text(block("python", "class Decay"))
    assert "python -m experiments.run policy._target_=my_policies.Decay policy.fade=0.8 budget=128" in README
    run(monkeypatch, "-m", "policy._target_=my_policies.Decay", "policy.fade=0.8", "budget=32,64")
    frame = experiments.frame()
    assert list(frame["policy"]) == ["full", *["decay fade=0.8"] * 2]
    assert frame["perplexity"].notna().all()
    assert "decay fade=0.8" in capsys.readouterr().out
    from tova.check import main as check
    from tova.simulation import simulate
    from tova.trace import canonical_trace

    assert "python -m tova.check my_policies.Decay fade=0.8" in README
    assert check(["my_policies.Decay", "fade=0.8"]) == 0
    decay = sys.modules["my_policies"].Decay(budget=64)
    assert 0.2 < simulate(decay, canonical_trace(tokens=300)).retained_mass < 1
    names: dict = {}
    exec(block("python", "experiments.frame()"), names)
    assert len(names["cells"]) == 3
    assert len(names["documents"]) == 3


@pytest.mark.parametrize(("group", "name"), [("dataset", "letters"), ("model", "qwen3_1_7b")])
def test_adding_a_dataset_or_a_model(tmp_path, group: str, name: str) -> None:
    """The files shown compose with the others and describe something that can be run."""
    text = block("yaml", f"conf/{group}/{name}.yaml")
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "one.txt").write_text("Dear reader, " * 20)
    text = text.replace("/data/letters", str(tmp_path / "letters"))
    assert set(yaml.safe_load(text)) >= {"_target_"}
    (tmp_path / group).mkdir()
    (tmp_path / group / f"{name}.yaml").write_text(text)
    sweeper.register()
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        search = f"hydra.searchpath=[file://{tmp_path}]"
        cell = plan(compose("config", [f"{group}={name}", search]))
    assert getattr(cell, group).identity()


def test_commands_and_choices_exist() -> None:
    """Every group option the README lists is a file, every file of a group is listed."""
    for group in ("policy", "task"):
        there = {p.stem for p in (ROOT / "conf" / group).glob("*.yaml")}
        (row,) = [line for line in README.splitlines() if line.startswith(f"| `{group}` |")]
        assert set(re.findall(r"`(\w+)`", row)) - {group} == there
    experiments_named = re.findall(r"experiment=(\w+)", README)
    assert experiments_named
    for experiment in experiments_named:
        assert (ROOT / "conf" / "experiment" / f"{experiment}.yaml").exists()
    files = re.findall(r"^  ?(\w+\.py) ", README, flags=re.MULTILINE)
    assert files
    for name in files:
        assert list(ROOT.rglob(name)), name
