"""The benchmarks run from end to end, refuse what cannot be, share what they measure with, and see where time goes."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from support.commands import command

from experiments import run as entry
from experiments.benchmarks import gpu, tables, timing
from experiments.benchmarks.decode import BenchDecode
from experiments.benchmarks.gpu import processes
from experiments.benchmarks.models import read, steps_along
from experiments.benchmarks.replay import BenchReplay, _where
from experiments.benchmarks.simulation import BenchSimulation
from experiments.models import RandomLlama
from tova import EvictingCache, UsageError, policies
from tova.measures import token_nll
from tova.spans import span

ALL = (BenchDecode, BenchReplay, BenchSimulation, gpu.BenchGpu)
SPANS = {"tova::logits", "tova::scan", "tova::mix", "tova::carry"}


def run_experiment(tmp_path, monkeypatch, capsys, *words: str) -> tuple[Path, str]:
    """The folder and the printed text of ``python -m experiments.run`` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("It was the best of times, it was the worst of times. " * 12)
    code, out, err = command(monkeypatch, capsys, *words)
    assert code == 0, err
    folders = [p for p in (tmp_path / "results/runs").iterdir() if (p / "summary.json").exists()]
    assert len(folders) == 1
    return folders[0], out


# -- each from end to end ------------------------------------------------------------------------------------


def test_decode(tmp_path, monkeypatch, capsys) -> None:
    words = ["experiment=bench_decode", "model=random_llama", "dataset=text", "dataset.path=texts"]
    words += ["dataset.tokens=120", "task.budgets=[40,60]", "task.lengths=[90]", "task.repetitions=2"]
    folder, out = run_experiment(tmp_path, monkeypatch, capsys, *words)
    summary = json.loads((folder / "summary.json").read_text())
    assert len(summary["steps"]) == 2 * 5 + 1
    assert all(step["seconds"] > 0 for step in summary["steps"])
    assert [step["ratio"] for step in summary["steps"] if step["cache"] == "plain"] == [1, 1]
    assert summary["machine"]
    assert summary["torch"] == torch.__version__.split("+")[0] or summary["torch"] == torch.__version__
    table = (folder / "table.md").read_text()
    assert "| cache | 40 entries | 60 entries |\n| --- | ---: | ---: |\n| ordinary | " in table
    assert "ms at 90 tokens" in table
    assert table.strip() in out
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_replay(tmp_path, monkeypatch, capsys) -> None:
    words = ["experiment=bench_replay", "model=random_llama", "dataset=text", "dataset.path=texts", "budget=32"]
    words += ["dataset.tokens=120", "task.lengths=[120,80]", "task.repetitions=1", "task.places=2", "task.steps=2"]
    folder, out = run_experiment(tmp_path, monkeypatch, capsys, *words)
    summary = json.loads((folder / "summary.json").read_text())
    found = {(t["what"], t["tokens"]): t for t in summary["timed"]}
    for length in (80, 120):
        assert found["full attention", length]["ratio"] == 1
        assert found["tova", length]["seconds"] > 0
        assert found["window", length]["seconds"] > 0
        assert found["tova, measures", length]["seconds"] > 0
    decoded, forward = found["decoded, plain cache", 80], found["full attention", 80]
    assert decoded["ratio"] == pytest.approx(decoded["seconds"] / forward["seconds"])
    assert 0 < summary["where"]["scan: who is dropped when, and the weights"] < summary["where"]["all of it"]
    table = (folder / "table.md").read_text()
    assert "| pass | 80 tokens | 120 tokens |\n| --- | ---: | ---: |\n| full attention | " in table
    assert "\n| replay: tova, measures | " in table
    assert "Where one replay of 80 tokens by tova spends its " in table
    assert table.strip() in out
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_simulation(tmp_path, monkeypatch, capsys) -> None:
    words = ["experiment=bench_simulation", "task.tokens=200", "task.budget=40", "task.repetitions=2"]
    folder, out = run_experiment(tmp_path, monkeypatch, capsys, *words, "task.policies=[tova,snapkv,decay]")
    summary = json.loads((folder / "summary.json").read_text())
    speeds = {row["policy"]: row for row in summary["steps_per_second"]}
    assert min(speeds["tova"]["compiled"], speeds["tova"]["stepwise"]) > 0
    assert speeds["decay"]["compiled"] > 0  # a policy of one's own is compiled too
    assert summary["table_seconds"] > 0
    assert (folder / "table.md").read_text().strip() in out
    assert (folder / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timing
def test_what_is_compiled_is_faster(tmp_path, monkeypatch, capsys) -> None:
    words = ["experiment=bench_simulation", "task.tokens=200", "task.budget=40", "task.repetitions=2"]
    folder, _ = run_experiment(tmp_path, monkeypatch, capsys, *words, "task.policies=[tova]")
    (row,) = json.loads((folder / "summary.json").read_text())["steps_per_second"]
    assert row["compiled"] > row["stepwise"]


def test_gpu(tmp_path, monkeypatch, capsys) -> None:
    words = ["experiment=bench_gpu", "task.tiny=true", "device=cpu", "tracking.mode=disabled", "task.out=out"]
    folder, printed = run_experiment(tmp_path, monkeypatch, capsys, *words)
    assert "## Decoding" in printed
    result = json.loads((tmp_path / "out/bench_gpu.json").read_text())
    assert {name: part["ended"] for name, part in result["parts"].items()} == dict.fromkeys(result["parts"], "ok")
    assert not [row for row in result["rows"] if "error" in row]
    parts = {row["part"] for row in result["rows"]}
    assert parts >= {"card", "decisions", "layer", "long", "rows", "decode"}
    assert sum(row["different"] for row in result["rows"] if row["part"] == "decisions") == 0
    page = (tmp_path / "out/bench_gpu.md").read_text()
    for word in ("driver", "torch 2", "transformers", "the figures mean nothing"):
        assert word in page
    assert (folder / "table.md").read_text() == page


# -- the parts of the GPU's, each in a process of its own ----------------------------------------------------


def test_gpu_outlives_a_part_that_fails(tmp_path, monkeypatch) -> None:
    """A part that is stopped, and one that fails, are reported as such; what they had measured stays."""

    def fake(part: str, device: str, tiny: bool, rows: Path) -> str:
        row = {"part": part, "batch": 1, "bytes_per_second": 1.0, "flops_per_second": 1.0}
        rows.write_text(json.dumps(row) + "\n")
        return "ok" if part == "card" else "exit code 1: boom"

    monkeypatch.setattr(processes, "_in_a_process", fake)
    result = processes.measure(["card", "layer"], "cpu", True, tmp_path)
    assert result["parts"]["card"]["ended"] == "ok"
    assert result["parts"]["layer"]["ended"] == "exit code 1: boom"
    assert [row["part"] for row in result["rows"]] == ["card", "layer"]
    page = (tmp_path / "bench_gpu.md").read_text()
    assert "This part did not come to its end: exit code 1: boom." in page
    with pytest.raises(UsageError, match="needs a CUDA device"):
        processes._device("cpu", tiny=False)


def test_gpu_stops_a_part_in_time(tmp_path, monkeypatch) -> None:
    monkeypatch.setitem(processes.SECONDS, "card", 0.01)
    assert processes._in_a_process("card", "cpu", True, tmp_path / "rows") == "stopped after 0.04 s"


def test_gpu_by_itself(tmp_path) -> None:
    """Without a configuration: one part as a command."""
    command = [sys.executable, "-m", "experiments.benchmarks.gpu", "--tiny", "--device", "cpu", "--parts", "card"]
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "| TB/s copied | TFLOP/s |\n| --- | ---: |\n" in done.stdout
    assert (tmp_path / "bench_gpu.md").read_text() == done.stdout


# -- what they refuse ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(budgets=[0]), r"task\.budgets=0: must be an integer of at least 1"),
        (dict(budgets=[]), r"task\.budgets=\[\]: must be a list of integers of at least 1"),
        (dict(budgets=512), r"task\.budgets=512: must be a list of integers of at least 1"),
        (dict(lengths=[4096, 0.5]), r"task\.lengths=0\.5: must be an integer of at least "),
        (dict(places=-1), r"task\.places=-1: must be an integer of at least 0"),
        (dict(steps=0), r"task\.steps=0: must be an integer of at least 1"),
        (dict(tokens="many"), r"task\.tokens=many: must be an integer of at least 2"),
        (dict(budget=0), r"task\.budget=0: must be an integer of at least 1"),
        (dict(repetitions=0), r"task\.repetitions=0: must be an integer of at least 1"),
        (dict(threads=0), r"task\.threads=0: must be an integer of at least 1"),
        (dict(policies=["mine"]), r"task\.policies=mine: must be one of full, "),
        (dict(policies="tova"), r"task\.policies=tova: must be a list of at least one of full, "),
        (dict(measures="maybe"), r"task\.measures=maybe: must be true or false"),
        (dict(running=2), r"task\.running=2: must be true or false"),
        (dict(kvpress="no"), r"task\.kvpress=no: must be true or false"),
        (dict(tiny="yes"), r"task\.tiny=yes: must be true or false"),
        (dict(parts=["speed"]), r"task\.parts=speed: must be one of card, "),
        (dict(parts=[]), r"task\.parts=\[\]: must be a list of at least one of card, "),
    ],
    ids=str,
)
def test_what_a_benchmark_refuses(options: dict, message: str) -> None:
    """Every benchmark that has the option, in the same words."""
    having = [b for b in ALL if options.keys() <= {f.name for f in dataclasses.fields(b)}]
    assert having
    for benchmark in having:
        with pytest.raises(UsageError, match=message):
            benchmark(started="", **options)


def test_nothing_to_time_beside() -> None:
    BenchReplay(started="", policies=[])
    BenchDecode(started="", lengths=[])
    with pytest.raises(UsageError, match=r"task\.policies=\[\]: must be a list of at least one of full, "):
        BenchDecode(started="", policies=[])


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("evict_every=4", "evict_every=4: task=bench_replay evicts at every step; leave it out"),
        ("prompt=64", "prompt=64: task=bench_replay has no prompts; leave it out"),
    ],
)
def test_what_would_be_ignored(word: str, sentence: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["task=bench_replay", "model=random_llama", "dataset=text", f"dataset.path={__file__}", word]
    monkeypatch.setattr(sys, "argv", ["experiments.run", *words])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    assert sentence in capsys.readouterr().err


# -- what they share -----------------------------------------------------------------------------------------


def test_spans_are_seen_in_every_thread() -> None:
    """Those of helpers that were there before, too; and only while a profiler is on."""
    pool, begun = ThreadPoolExecutor(1), threading.Barrier(2)
    pool.submit(begun.wait)
    begun.wait()

    def work(part: str) -> None:
        with span(part):
            torch.ones(64, 64) @ torch.ones(64, 64)

    def run() -> None:
        work("scan")
        for _ in range(2):
            pool.submit(work, "mix").result()

    assert span("scan") is span("mix"), "nothing is made where nobody listens"
    spans = timing.spans_of(run)
    assert spans.keys() == {"tova::scan", "tova::mix"}
    assert all(seconds > 0 for seconds in spans.values())
    assert span("scan") is span("mix")


@pytest.mark.parametrize("threads", [1, 2])
def test_where_the_time_goes(threads: int) -> None:
    """Each part is seen, with one thread and with helpers; in a chunk each happens once, and bits stay as they are."""
    model = RandomLlama().load("cpu").model
    ids = torch.randint(3, 300, (1, 300), generator=torch.Generator().manual_seed(0))
    policy = policies.make("tova", budget=64)
    with timing.threads(threads):
        plain, watched = EvictingCache(policy), EvictingCache(policy)
        expected = token_nll(model, ids, plain)
        found = []
        spans = timing.spans_of(lambda: found.append(token_nll(model, ids, watched)))
        assert spans.keys() == SPANS
        assert (found[0] == expected).all()
        assert (watched.evicted_at == plain.evicted_at).all()
        where = _where(model, ids, policy)
    parts = list(where.values())
    assert len(parts) == 5
    assert all(0 < seconds < where["all of it"] for seconds in parts[:-1])


def test_turns() -> None:
    heard: list[str] = []
    shares: list[float] = []

    def one(name: str) -> float:
        heard.append(name)
        return float(len(heard))

    timed = timing.in_turn({"a": lambda: one("a"), "b": lambda: one("b")}, 2, uncounted=1, tell=shares.append)
    assert "".join(heard) == "ababab"
    assert timed == {"a": [3.0, 5.0], "b": [4.0, 6.0]}
    assert shares == [n / 6 for n in range(1, 7)]


def test_seconds_along_a_text() -> None:
    places = [(10, 1.0), (20, 3.0)]
    assert timing.along(places, [0, 10, 15, 20, 99]) == 1 + 1 + 2 + 3 + 3
    assert timing.along(places[:1], range(7)) == 7


def test_steps_along_a_text() -> None:
    """Every token is read once, in order, also where places are closer than the steps timed at one."""
    model = RandomLlama().load("cpu").model
    ids = torch.randint(3, 300, (1, 60), generator=torch.Generator().manual_seed(0))
    expected, cache = (EvictingCache(policies.make("tova", budget=16)) for _ in range(2))
    with torch.inference_mode():
        read(model, ids[:, :44], expected)
        found = steps_along(model, ids, cache, [1, 3, 40], 3)
    assert [place for place, _ in found] == [1, 5, 40]
    assert cache.get_seq_length() == 44
    assert (cache.evicted_at == expected.evicted_at).all()


def test_tables() -> None:
    rows = [dict(what=w, n=n) for w, n in (("b", 20), ("b", 3), ("a", 20))]
    lines = tables.crossed(rows, "what", "n", lambda n: f"{n} tokens", lambda row: f"{row['what']}{row['n']}")
    assert lines == ["| what | 3 tokens | 20 tokens |", "| --- | ---: | ---: |", "| b | b3 | b20 |", "| a |  | a20 |"]


def test_a_text_that_is_too_short(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("It was the best of times. " * 20)
    words = ["task=bench_replay", "model=random_llama", "dataset=text", "dataset.path=a.txt", "dataset.tokens=100"]
    words += ["task.lengths=[120]", "budget=32", "tracking.mode=disabled", "device=cpu"]
    monkeypatch.setattr(sys, "argv", ["experiments.run", *words])
    with pytest.raises(SystemExit) as ended:
        entry.main()
    assert ended.value.code == 2
    said = capsys.readouterr()
    sentence = "a has 100 tokens with dataset.tokens=100; these lengths, budgets and repetitions need 120"
    assert sentence in " ".join((said.err + said.out).split())
