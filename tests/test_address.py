"""A result's address: everything that determines its numbers, found out from the code, and nothing else."""

from __future__ import annotations

import importlib
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from support.results import cell

from experiments import fingerprint

ROOT = Path(__file__).parent.parent


POLICY = '''
"""Mine."""
from dataclasses import dataclass
from helpers import weigh
from tova.policies import Policy, Record

@dataclass(frozen=True, kw_only=True)
class Mine(Policy):
    """Drops something."""
    name = "mine"
    fade: float = 0.9

    def records(self):
        return {"sum": Record()}  # a record

    def observe(self, slots, attn):
        return {"sum": weigh(slots["sum"], attn)}

    def score(self, slots):
        return slots["sum"]
'''


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder on the path, with a policy that imports a helper beside it."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "mine.py").write_text(POLICY)
    (tmp_path / "helpers.py").write_text("def weigh(a, b):\n    return 0.9 * a + b\n")
    (tmp_path / "text.txt").write_text("Call me Ishmael. " * 30)
    yield tmp_path
    for name in ("mine", "helpers", "yours"):
        sys.modules.pop(name, None)


def mine(module: str = "mine") -> str:
    """The address of a cell of the policy as it stands now, as a new process finds it."""
    for name in (module, "helpers"):
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    for cached in (fingerprint._own, fingerprint._root):
        cached.cache_clear()
    return cell(f"policy._target_={module}.Mine", "dataset=text", "dataset.path=text.txt").id


def test_an_edited_policy_is_another(place) -> None:
    """Also where the edit is in what it imports; comments, docstrings, its file's name and place are no edits."""
    before = mine()
    assert mine() == before
    (place / "mine.py").write_text(
        POLICY.replace("Drops something.", "Drops\n\n    something else.").replace("# a record", "")
    )
    assert mine() == before
    (place / "yours.py").write_text(POLICY)
    assert mine("yours").rpartition("-")[2] == before.rpartition("-")[2]
    (place / "mine.py").write_text(POLICY.replace('return slots["sum"]', 'return -slots["sum"]'))
    edited = mine()
    assert edited != before
    (place / "mine.py").write_text(POLICY)
    (place / "helpers.py").write_text("def weigh(a, b):\n    return 0.8 * a + b\n")
    assert mine() not in (before, edited)


def test_edited_data_are_others(place) -> None:
    before = mine()
    (place / "text.txt").write_text("Call me Ishmael! " * 30)
    changed = mine()
    assert changed != before
    (place / "text.txt").write_text("Call me Ishmael. " * 30)
    assert mine() == before


WATCHED = textwrap.dedent(
    """
    import re, sys, threading
    from hydra import compose, initialize_config_dir
    from pathlib import Path
    from experiments import fingerprint, settings, sweeper
    from experiments.loading import Kept
    from experiments.tasks import Context

    root = Path(fingerprint.__file__).parent.parent
    sweeper.register()
    with initialize_config_dir(str(root / "conf"), version_base="1.3"):
        cell = settings.planned(compose("config", sys.argv[1:]))
    parts = [type(p) for p in (cell.task, cell.model, cell.dataset) if p is not None] + [cell.policy_class]
    modules = {c.__module__ for part in parts for c in part.__mro__} - {"builtins"}
    counted = {str(path) for path in fingerprint.files(modules).values()}
    ran = set()

    def watch(frame, event, arg):
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(str(root)) and not re.search("/.venv/|/__pycache__/", name):
            ran.add(name)

    kept = Kept()

    def measure(cell, reference):
        nothing = lambda *_: None
        load = (lambda: kept.model(cell)), (lambda: kept.documents(cell))
        context = Context(cell, frozenset(), *load, reference, nothing, nothing)
        return list(cell.task.run([context]))

    threading.setprofile(watch)
    sys.setprofile(watch)
    losses = {}
    if cell.task.needs_reference and cell.budget is not None:
        losses = {row["index"]: arrays for _, row, arrays in measure(cell.full, None)}
    cell.task.summarise([row for _, row, _ in measure(cell, losses.get)])
    sys.setprofile(None)
    threading.setprofile(None)
    plumbing = {"cells.py", "loading.py", "fingerprint.py", "settings.py"}
    apart = {str(root / "experiments" / name) for name in plumbing} | {str(root / "tova" / "spans.py")}
    apart |= {str(root / "tova" / "policies" / "__init__.py"), str(root / "tova" / "__init__.py")}
    # Of the reference, which is a cell of its own, and of what a trace's engine is warmed up with.
    apart |= {str(root / "tova" / "policies" / name) for name in ("full.py", "tova.py")}
    assert len(ran & counted) >= 3, ran
    assert not ran - counted - apart, sorted(ran - counted - apart)
    """
)


def test_the_code_that_runs_is_the_code_that_counts(tmp_path) -> None:
    """Every function of ours that runs while a cell is measured is in a file its address is made of."""
    script = WATCHED
    (tmp_path / "text.txt").write_text("Call me Ishmael. " * 30)
    data = ["model=random_llama", "dataset=text", "dataset.path=text.txt"]
    for words in (
        [*data, "policy=h2o_half", "budget=0.2", "dataset.tokens=120"],
        [*data, "policy=pyramidkv", "budget=48", "task=dtypes", "task.against=float16", "dataset.tokens=100"],
        ["task=trace", "task.tokens=200", "policy=scissorhands", "budget=48"],
    ):
        done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=tmp_path)
        assert done.returncode == 0, (words, done.stderr[-2000:])


def test_no_other_policy_counts() -> None:
    """One more policy, or an edit of another one's file, changes no address."""
    files = fingerprint.files(["experiments.tasks.perplexity", "tova.policies.tova"])
    assert {"tova.policies.tova", "tova.policies.base", "tova.replay", "tova.scan.cpu", "tova.measures"} <= set(files)
    others = {f"tova.policies.{p.stem}" for p in (ROOT / "tova/policies").glob("*.py")} & set(files)
    assert others <= {
        f"tova.policies.{n}"
        for n in ("tova", "base", "layer_budgets", "old_names", "slots", "steps", "stepwise", "contract")
    }
    assert not any(name.startswith(("experiments.report", "experiments.store", "tova.check")) for name in files)


def test_code_that_rules_were_written_as_changes_no_address(tmp_path) -> None:
    """It lies beside the engines where that folder can be written, and comes and goes."""
    from tova import policies
    from tova.rules import rule_of
    from tova.rules.numba_code import bind

    before = fingerprint.files(["experiments.tasks.perplexity", "tova.policies.tova"])
    bind(rule_of(policies.make("tova")))
    fingerprint._engine.cache_clear()
    after = fingerprint.files(["experiments.tasks.perplexity", "tova.policies.tova"])
    assert sorted(before) == sorted(after)
    assert not any("__pycache__" in name for name in after)


def test_what_is_left_out_of_code(tmp_path) -> None:
    def digest(text: str) -> str:
        path = tmp_path / "m.py"
        path.write_text(text)
        return fingerprint._code_of(str(path), hash(text), 0)

    one = 'def f(x):\n    """Doc."""\n    # why\n    return x + 1\n'
    assert digest(one) == digest("def f(x):\n    return x + 1\n")
    assert digest(one) == digest('def f(x):\n    """Other."""\n\n    return x  + 1  # because\n')
    assert digest(one) != digest("def f(x):\n    return x + 2\n")
    assert digest("x = 'a'\n") != digest("x = 'b'\n")
    assert digest("x = f'{a}b'\n") != digest("x = f'{a}c'\n")
    assert digest("def f():\n    return 'a'\n") != digest("def f():\n    return 'b'\n")
    assert digest("if a:\n    b()\nc()\n") != digest("if a:\n    b()\n    c()\n")
    assert digest('x = [\n    "a",\n    "b",\n]\n') != digest('x = [\n    "a",\n    "c",\n]\n')


def test_imports_are_followed_as_python_does(tmp_path, monkeypatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = tmp_path / "pack"
    (package / "deep").mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text(
        "from . import b\nfrom .deep.c import x\nfrom typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    import pack.d\n"
    )
    (package / "b.py").write_text("def f():\n    import lone\n")
    (package / "d.py").write_text("")
    (package / "deep" / "c.py").write_text("from ..b import f\nx = 1\nimport numpy, json\n")
    (tmp_path / "lone.py").write_text("import pack.a\n")
    for cached in (fingerprint._own, fingerprint._root):
        cached.cache_clear()
    found = {name for name in fingerprint.files(["pack.a"]) if not name.startswith(("tova", "experiments"))}
    assert found == {"pack", "pack.a", "pack.b", "pack.deep.c", "lone"}


def test_order_and_volatile_options_do_not_count() -> None:
    """Options in another order, and those that say how and where a cell is run."""
    words = ["policy=h2o", "budget=64", "dataset.tokens=200"]
    base = cell(*words).id
    assert cell(*reversed(words)).id == base
    for word in (
        "results_dir=x",
        "tracking.mode=online",
        "tracking.project=y",
        "sweep.name=z",
        "retry=failed",
        "launcher=joblib",
        "launcher=slurm",
    ):
        assert cell(*words, word).id == base, word
    for word in ("task.chunk=64", "task.scan=reference", "task.batch_size=2", "task.together=3", "task.measures=false"):
        assert cell(*words, word).id != base, word
