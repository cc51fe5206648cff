"""What a user can get wrong, the sentence each mistake gets, and what looks wrong and is not: docs/mistakes.md.

``python tests/test_mistakes.py`` writes that page from the tables below; a test checks that it is what they give, and
another that each sentence is what the command really says.
"""

# ruff: noqa: E501  # a mistake and its sentence stand in one line
from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path

import pytest
from support.commands import command

PAGE = Path(__file__).parent.parent / "docs" / "mistakes.md"
TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 12
BASE = ["model=random_llama", "dataset=text", "dataset.path=texts", "dataset.tokens=120", "tracking.mode=disabled"]

OWN = """
from dataclasses import dataclass
from abc import abstractmethod

from tova.policies import Policy, Record


@dataclass(frozen=True, kw_only=True)
class Decay(Policy):
    name = "decay"
    fade: float = 0.9

    def records(self):
        return {"mass": Record()}

    def observe(self, slots, attn):
        return {"mass": slots.records["mass"] * self.fade + attn}

    def score(self, slots):
        return slots.records["mass"]


@dataclass(frozen=True, kw_only=True)
class NoScore(Policy):
    name = "no_score"


class NoDataclass(Decay):
    rate: float = 0.5


@dataclass(frozen=True, kw_only=True)
class Raises(Decay):
    name = "raises"

    def __post_init__(self):
        raise RuntimeError("out of luck")


class Data:
    def __init__(self, path="texts", shuffle=False):
        self.path, self.shuffle = path, shuffle

    def identity(self):
        return {}

    def load(self):
        return []


def function(**parameters):
    raise SystemExit("was called")


@dataclass(frozen=True, kw_only=True)
class Branches(Decay):
    name = "branches"

    def score(self, slots):
        return slots["mass"] if bool(slots.held.all()) else -slots["mass"]
"""

FILES: dict[str, str | bytes] = {
    "texts/a.txt": TEXT,
    "texts/b.txt": TEXT[::-1],
    "empty.txt": "",
    "blank.txt": " \n\n ",
    "latin1.txt": "für mich ".encode("latin-1") * 40,
    "utf16.txt": ("It was " * 40).encode("utf-16"),
    "binary.txt": b"It was \x00 the" * 40,
    "bom.txt": b"\xef\xbb\xbf" + TEXT.encode(),
    "letter.txt": "I",
    "short.txt": TEXT[:40],
    "no_texts/notes.md": "# notes",
    "own.py": OWN,
    "broken.py": 'import math\n\nVALUE = int("twelve")\n',
    "unfinished.py": "def policy(:\n",
    "needs.py": "import a_package_nobody_has\n",
    "leaves.py": "raise SystemExit(3)\n",
    "no_config/weights.txt": "",
    "no_weights/config.json": "{}",
    "no_weights/tokenizer.json": "{}",
}
"""What lies where the commands are run."""

Mistakes = dict[str, tuple[list[str], str]]

MISTAKES: dict[str, Mistakes] = {
    "Budgets and prompts": {
        "none": (["budget=0"], "budget=0: must be at least 1 token, or a share above 0 and below 1"),
        "below 0": (["budget=-3"], "budget=-3: must be at least 1 token, or a share above 0 and below 1"),
        "a share below 0": (["budget=-0.5"], "budget=-0.5: must be an integer of tokens (budget=256), or a share below 1 of the document's length (budget=0.125)"),
        "a share of 1": (["budget=1.0"], "budget=1.0: a share of 1 would be the whole document, which is policy=full; one token is budget=1"),
        "a share above 1": (["budget=1.5"], "budget=1.5: must be an integer of tokens (budget=256), ..."),
        "a float of tokens": (["budget=1e3"], "budget=1000.0: must be an integer of tokens (budget=256), or a share below 1 of the document's length (budget=0.125); write budget=1000"),
        "a unit": (["budget=4k"], "budget=4k: must be an integer of tokens (budget=256), ..."),
        "a text": (["budget='64'"], "budget='64': must be an integer of tokens (budget=256), ..."),
        "nothing": (["budget="], "budget=: must be an integer of tokens (budget=256), ..."),
        "null": (["budget=null"], "budget=null: must be an integer of tokens (budget=256), ..."),
        "true": (["budget=true"], "budget=true: must be an integer of tokens (budget=256), ..."),
        "a list": (["budget=[1,2]"], "budget=[1,2]: must be an integer of tokens (budget=256), ..."),
        "infinite": (["budget=inf"], "budget=inf: must be an integer of tokens (budget=256), ..."),
        "too large for a float": (["budget=1e400"], "budget=inf: must be an integer of tokens (budget=256), ..."),
        "not a number": (["budget=nan"], "budget=nan: must be an integer of tokens (budget=256), ..."),
        "too large": (["budget=9223372036854775808"], "budget=9223372036854775808: must be below 2,147,483,648 tokens; no limit at all is policy=full"),
        "a share of less than a token": (["budget=0.001"], "budget=0.001: is less than one token of a document of 120 tokens"),
        "an interval of 0": (["evict_every=0"], "evict_every=0: must be an integer of at least 1"),
        "an interval of 1.5": (["evict_every=1.5"], "evict_every=1.5: must be an integer of at least 1"),
        "an interval too large": (["evict_every=9223372036854775808"], "evict_every=9223372036854775808: must be at most 2,147,483,647"),
        "a prompt of 1.0": (["prompt=1.0"], "prompt=1.0: must be null, an integer of at least 2 tokens (prompt=1024), or a share below 1 of the document's length (prompt=0.5)"),
        "a prompt as long as the text": (["prompt=120"], "prompt=120: is 120 tokens of a document of 120; at least one token must follow it"),
        "a prompt longer than it": (["prompt=4000"], "prompt=4000: is 4000 tokens of a document of 120; at least one token must follow it"),
        "another way to take it": (["prefill=chunked"], "prefill=chunked: must be one of every_step, one_shot"),
    },
    "Other values": {
        "measures": (["task.measures=maybe"], "task.measures=maybe: must be true or false"),
        "measures as a number": (["task.measures=1"], "task.measures=1: must be true or false"),
        "chunk of 0": (["task.chunk=0"], "task.chunk=0: must be null, or an integer of at least 1"),
        "chunk as a float": (["task.chunk=16.0"], "task.chunk=16.0: must be null, or an integer of at least 1"),
        "batch of 0": (["task.batch_size=0"], "task.batch_size=0: must be an integer of at least 1"),
        "batch of true": (["task.batch_size=true"], "task.batch_size=true: must be an integer of at least 1"),
        "together": (["task.together=0"], "task.together=0: must be auto, or an integer of at least 1"),
        "scan": (["task.scan=cuda"], "task.scan=cuda: must be one of auto, reference, cpu, gpu, fixed_point"),
        "seed of a trace": (["task=trace", "task.seed=x"], "task.seed=x: must be an integer of at least 0"),
        "tokens of a trace": (["task=trace", "task.tokens=1"], "task.tokens=1: must be an integer of at least 2"),
        "dtype to compare with": (["task=dtypes", "task.against=float32"], "task.against=float32: must be one of bfloat16, float16 (did you mean float16?)"),
        "tokens": (["dataset.tokens=1"], "dataset.tokens=1: must be an integer of at least 2, or null for all"),
        "documents": (["dataset.documents=0"], "dataset.documents=0: must be an integer of at least 1, or null for all"),
        "more documents than there are": (["dataset.documents=5"], "dataset.documents=5: there are 2 (a.txt, b.txt); take fewer, or null for all"),
        "a book": (["dataset=books", "dataset.titles=[alice]", "~dataset.path"], "dataset.titles: there is no 'alice'; there are alice29, asyoulik, lcet10, plrabn12"),
        "dtype": (["model.dtype=float8"], "model.dtype=float8: must be one of float32, bfloat16, float16 (did you mean float32?)"),
        "heads": (["model.heads=0"], "model.heads=0: must be an integer of at least 1"),
        "device": (["device=gpu"], "device=gpu: must be auto, cpu, cuda or cuda:N"),
        "device null": (["device=null"], "device=null: must be auto, cpu, cuda or cuda:N"),
        "a device that holds nothing": (["device=meta"], "device=meta: must be auto, cpu, cuda or cuda:N"),
        "a device this machine has not": (["device=mps"], "device=mps: this machine has no MPS device; use device=cpu or device=auto"),
        "sinks below 0": (["policy.sinks=-1", "budget=64"], "tova: sinks must be at least 0 and below 64 (budget=64), got -1"),
        "sinks as a float": (["policy.sinks=1.5"], "tova: sinks must be an integer, got 1.5"),
        "per head": (["policy.per_head=3"], "tova: per_head must be true or false, got 3"),
        "shares of layers": (["policy.layer_budgets=pyramid"], "tova: layer_budgets must be uniform, linear:R, slope:B (R and B integers of at least 1) or a list of tokens per layer, got 'pyramid'"),
        "an even kernel": (["policy=snapkv", "policy.pool_kernel=4"], "snapkv: pool_kernel must be odd, got 4"),
        "tracking": (["tracking.mode=on"], "tracking.mode=on: must be one of offline, online, disabled"),
        "tracking of another kind": (["tracking.mode=ofline"], "tracking.mode=ofline: must be one of offline, online, disabled (did you mean offline?)"),
        "a project W&B refuses": (["tracking.project=a/b"], "tracking.project=a/b: must be 1 to 128 characters, none of them / \\ # ? % :"),
        "a sweep without a name": (["sweep.name="], "sweep.name=: must be one line of text with a letter or a digit in it"),
        "a sweep called ..": (["sweep.name=.."], "sweep.name=..: must be one line of text with a letter or a digit in it"),
        "results nowhere": (["results_dir=null"], "results_dir=null: must be the path of a folder, as results_dir=results/runs"),
        "results in no folder": (["results_dir="], "results_dir=: must be the path of a folder, as results_dir=results/runs"),
        "results in a file": (["results_dir=own.py"], "results_dir=own.py: is a file; results need a folder"),
        "results below a file": (["results_dir=own.py/x"], "results_dir=own.py/x: own.py is a file; results need a folder"),
        "results where none can be": (["results_dir=/proc/1/here"], "results_dir=/proc/1/here: ..."),
    },
    "Combinations that cannot be": {
        "sinks fill the budget": (["policy.sinks=64", "budget=64"], "tova: sinks must be at least 0 and below 64 (budget=64), got 64"),
        "sinks fill a share": (["policy.sinks=24", "budget=0.2"], "tova: sinks must be at least 0 and below 24 (budget=24), got 24"),
        "the window fills the budget": (["policy=h2o", "budget=16"], "h2o: recent_window must be at least 1 and below 16 (budget=16), got 32"),
        "sinks and window do": (["policy.sinks=8", "policy.recent_window=9", "budget=16"], "tova: sinks=8 and recent_window=9 together protect more than budget=16 positions"),
        "at once, without a prompt": (["prefill=one_shot"], "prefill=one_shot: say how much of each document is its prompt, prompt=1024 tokens or prompt=0.5 of it"),
        "a policy of prompts without one": (["policy=snapkv_prefill"], "policy=snapkv_prefill: selects once, at the end of a prompt; add prefill=one_shot and prompt=..., or leave it out: 'policy=glob(*,exclude=*_prefill)' is all the others"),
        "a prompt for a trace": (["task=trace", "prompt=5"], "prompt=5: task=trace has no prompts; leave it out"),
        "an interval for a trace": (["task=trace", "evict_every=8"], "evict_every=8: task=trace evicts at every step; leave it out"),
        "a policy of prompts on a trace": (["task=trace", "policy=snapkv_prefill"], "policy=snapkv_prefill: selects once, at the end of a prompt, and task=trace has none"),
        "nothing to compare": (["task=dtypes", "policy=full"], "policy=full: drops nothing, so task=dtypes has nothing to compare"),
        "a GPU's scan on a CPU": (["task.scan=gpu", "device=cpu"], "task.scan=gpu needs triton 3.4 or newer, and tensors on CUDA, and what it is given is on cpu in float32 under tova; scan=auto takes what fits"),
        "a compiled scan of one's own policy": (["policy._target_=own.Branches", "task.scan=cpu"], "task.scan=cpu cannot take branches: score goes over all rows at once; over slots is dim=-1; scan=auto takes it by the reference"),
        "a guess at what is dropped": (["policy=h2o_masked", "task.scan=fixed_point"], "task.scan=fixed_point: h2o_masked looks at dropped tokens, so there is nothing to guess"),
        "heads that cannot be shared": (["model.kv_heads=3"], "model.kv_heads=3: must divide model.heads, which is 4"),
        "several values without -m": (["budget=16,32"], "budget=16,32: several values make a sweep; add -m (or --multirun) before them"),
        "several policies as a list": (["policy=[tova,h2o]"], "policy=[tova,h2o]: a cell has one policy; several make a sweep, -m policy=tova,h2o"),
        "every policy without -m": (["policy=glob(*)"], "policy=glob(*): several values make a sweep; add -m (or --multirun)"),
        "one bad value of a sweep": (["-m", "budget=16,32,1.0"], "budget=1.0: a share of 1 would be the whole document, which is policy=full; one token is budget=1"),
        "every policy, not all of which fit": (["-m", "policy=glob(*)"], "policy=pyramidkv_prefill: selects once, at the end of a prompt; add prefill=one_shot ..."),
    },
    "Names": {
        "policy": (["policy=tovaa"], "policy=tovaa: there is no such policy (did you mean tova?); there are full, h2o, h2o_half, ..."),
        "a policy that merges": (["policy=d2o"], "policy=d2o merges dropped tokens into kept ones; policies here only choose what is dropped, and kept keys and values never change; there are: full, ..."),
        "model": (["model=gpt5"], "model=gpt5: there is no such model; there are gemma3_1b, ..."),
        "dataset": (["dataset=boks"], "dataset=boks: there is no such dataset (did you mean books?); there are books, pg19, text"),
        "task": (["task=perplexty"], "task=perplexty: there is no such task (did you mean perplexity?); there are bench_decode, ..."),
        "experiment": (["experiment=quickstrat"], "experiment=quickstrat: there is no such experiment (did you mean quickstart?); there are bench_decode, ..."),
        "no policy": (["policy=null"], "policy=null: must be the name of a policy; --help lists them"),
        "no model": (["model="], "model=: must be the name of a model; --help lists them"),
        "a number for a task": (["task=3"], "task=3: must be the name of a task; --help lists them"),
        "a policy taken away": (["~policy"], "policy must be given: policy=..."),
        "option": (["buget=3"], "buget: there is no such option (did you mean budget?); the options are budget, dataset, ..."),
        "option with a plus": (["+buget=3"], "buget: there is no such option (did you mean budget?); the options are budget, dataset, ..."),
        "option of tracking": (["tracking.mod=offline"], "tracking.mod: there is no such option (did you mean mode?); the options of tracking are mode, project"),
        "all of tracking": (["tracking=offline"], "tracking=offline: tracking is several options; one of them is set as tracking.mode=offline"),
        "tracking switched off": (["tracking=null"], "tracking=null: tracking is several options; one of them is set as tracking.mode=..."),
        "all of a sweep": (["sweep=mine"], "sweep=mine: sweep is several options; one of them is set as sweep.name=mine"),
        "option of a dataset": (["dataset.token=3"], "dataset.token: there is no such option (did you mean tokens?); TextFiles takes path, documents, tokens, label"),
        "option of a model": (["model.layer=3"], "model.layer: there is no such option (did you mean layers?); RandomLlama takes layers, heads, ..."),
        "option of a task": (["task.chunks=3"], "task.chunks: there is no such option (did you mean chunk?); Perplexity takes measures, batch_size, together, chunk, scan"),
        "option of a policy": (["policy=h2o", "policy.recent_windw=3"], "policy.recent_windw: there is no such option (did you mean recent_window?); h2o takes sinks, recent_window, per_head, layer_budgets"),
        "option of another policy": (["-m", "policy=snapkv,tova", "policy.pool_kernel=5"], "policy.pool_kernel: there is no such option; tova takes sinks, recent_window, per_head, layer_budgets"),
        "option a policy has decided": (["policy=h2o_half", "policy.recent_window=3"], "policy.recent_window=3: h2o_half decides that itself; h2o_half takes sinks, per_head, layer_budgets"),
        "the budget as a policy's": (["policy.budget=3"], "policy.budget=3: is an option of its own, budget=3; tova takes sinks, recent_window, per_head, layer_budgets"),
        "option to take away": (["~policy.fade"], "~policy.fade: there is no such option to take away"),
        "no path": (["dataset.path=???"], "dataset.path has no default and must be given: dataset.path=..."),
        "no name": (["model=hub"], "model.name has no default and must be given: model.name=..."),
        "a label that is a number": (["dataset.label=3"], "dataset.label=3: must be text; put it in quotes"),
        "dashes": (["--policy=tova"], "--policy=tova: options are written without dashes, policy=tova"),
        "one dash": (["-policy=tova"], "-policy=tova: options are written without dashes, policy=tova"),
        "a dash of a word processor": (["–m", "policy=tova,h2o"], "–m: begins with a dash that is none of the keyboard's, or with too few; type -m"),
        "flag": (["--multrun"], "--multrun: there is no such flag (did you mean --multirun?); the flags are --help, ..."),
        "no value": (["budget"], "budget: is no valid override; write option=value, and quote values with special characters"),
        "no option": (["policy.=3"], "policy.=3: is no valid override; write option=value, and quote values with special characters"),
        "a comma too many": (["budget=256,"], "budget=256,: is no valid override; write option=value, and quote values with special characters"),
    },
    "Classes of one's own": {
        "option": (["policy._target_=own.Decay", "policy.fad=0.8"], "policy.fad: there is no such option (did you mean fade?); decay takes sinks, recent_window, per_head, layer_budgets, fade"),
        "no @dataclass": (["policy._target_=own.NoDataclass", "policy.rate=0.8"], "policy.rate: there is no such option (does NoDataclass lack @dataclass(frozen=True)?); decay takes sinks, recent_window, per_head, layer_budgets, fade"),
        "no module": (["policy._target_=nowhere.Mine"], "policy._target_=nowhere.Mine: cannot be imported, there is no module nowhere; run where it lies, or have its folder in PYTHONPATH"),
        "no class": (["policy._target_=own.Decy"], "policy._target_=own.Decy: cannot be imported, own has no Decy (did you mean Decay?)"),
        "no module before it": (["policy._target_=Decay"], "policy._target_=Decay: must name a class, as package.module.Class"),
        "null": (["policy._target_=null"], "policy._target_=null: must name a class, as package.module.Class"),
        "a module that fails": (["policy._target_=broken.Mine"], "policy._target_=broken.Mine: cannot be imported, ValueError: invalid literal for int() with base 10: 'twelve' (broken.py, line 3)"),
        "a module that is unfinished": (["policy._target_=unfinished.Mine"], "policy._target_=unfinished.Mine: cannot be imported, SyntaxError: invalid syntax (unfinished.py, line 1)"),
        "a module that needs another": (["policy._target_=needs.Mine"], "policy._target_=needs.Mine: cannot be imported, ModuleNotFoundError: No module named 'a_package_nobody_has' (needs.py, line 1)"),
        "a module that leaves": (["policy._target_=leaves.Mine"], "policy._target_=leaves.Mine: cannot be imported, SystemExit: 3 (leaves.py, line 1)"),
        "a class that is no policy": (["policy._target_=builtins.dict"], "policy._target_=builtins.dict: is not a subclass of tova.policies.Policy"),
        "a function": (["policy._target_=own.function"], "policy._target_=own.function: is not a subclass of tova.policies.Policy"),
        "no score": (["policy._target_=own.NoScore"], "policy._target_=own.NoScore: defines no score(slots), which says what is dropped first"),
        "the base class": (["policy._target_=tova.policies.Policy"], "policy._target_=tova.policies.Policy: defines no score(slots), which says what is dropped first"),
        "a policy that raises": (["policy._target_=own.Raises"], "policy=raises: cannot be made, RuntimeError: out of luck (own.py, line 37)"),
        "a command of the system": (["dataset._target_=os.system", "dataset.command=date"], "dataset._target_=os.system: is no dataset, which is a class with the methods identity, load"),
        "a class that would start one": (["task._target_=subprocess.Popen"], "task._target_=subprocess.Popen: is no task, which is a class with the methods identity, run, summarise"),
        "a function for a model": (["model._target_=own.function"], "model._target_=own.function: is no model, which is a class with the methods identity, load"),
        "a command inside": (["dataset.label={_target_:os.system,command:date}"], "dataset.label={'_target_': 'os.system', 'command': 'date'}: must be text; put it in quotes"),
        "what the group's file says": (["dataset._target_=own.Data"], "dataset.tokens: there is no such option; Data takes path, shuffle; if a file of conf/dataset set it, ~dataset.tokens takes it away"),
        "what a dataset has": (["dataset._target_=own.Data", "~dataset.tokens"], "dataset._target_=own.Data: has no label, which every dataset has"),
    },
    "Texts and models": {
        "no file": (["dataset.path=nowhere.txt"], "dataset.path=nowhere.txt: there is no such file or folder"),
        "no text": (["dataset.path=no_texts"], "dataset.path=no_texts: the folder holds no *.txt file, only notes.md"),
        "an empty text": (["dataset.path=empty.txt"], "dataset.path=empty.txt: empty.txt is empty"),
        "a blank text": (["dataset.path=blank.txt"], "dataset.path=blank.txt: blank.txt is blank"),
        "Latin-1": (["dataset.path=latin1.txt"], "dataset.path=latin1.txt: latin1.txt is not UTF-8 (the byte 0xfc at 1); if it is Latin-1, convert it: iconv -f latin1 -t utf-8"),
        "UTF-16": (["dataset.path=utf16.txt"], "dataset.path=utf16.txt: utf16.txt is not UTF-8 but UTF-16 (its first bytes say so); save it as UTF-8"),
        "no text at all": (["dataset.path=binary.txt"], "dataset.path=binary.txt: binary.txt is no text, or not UTF-8: it holds a zero byte at 7"),
        "no folder of a model": (["model=hub", "model.name=./nowhere"], "model.name=./nowhere: there is no such folder"),
        "a folder without a model": (["model=hub", "model.name=no_config"], "model.name=no_config: the folder has no config.json"),
        "a model without weights": (["model=hub", "model.name=no_weights"], "model.name=no_weights: the folder has no weights (model.safetensors or the like)"),
    },
}  # fmt: skip
"""Kind -> mistake -> words after ``BASE``, and the whole sentence; one that ends in ``...`` goes on."""

LATE: Mistakes = {
    "a text of one letter": (["dataset.path=letter.txt"], "document letter: has 1 tokens, perplexity needs at least 2"),
    "layers that are not": (["policy.layer_budgets=[8,8,8]", "budget=16"], "tova: layer_budgets lists 3 layers, the model has 2"),
}  # fmt: skip
"""What nobody can know before the model reads the text; the sentence may begin with the cell's name."""

RIGHT: dict[str, tuple[list[str], str]] = {
    "a budget above the text": (["budget=4000"], "nothing is dropped, and the loss is the full cache's"),
    "a text shorter than the chunk": (["dataset.path=short.txt", "task.chunk=512", "budget=16"], "the chunk is as long as the text"),
    "a text shorter than its cut": (["dataset.path=short.txt", "budget=16"], "the document is taken whole"),
    "a byte-order mark": (["dataset.path=bom.txt", "budget=16"], "it is no part of the text"),
    "an option given twice": (["budget=32", "budget=16"], "the last counts"),
    "-m that comes late": (["policy=window", "-m", "budget=16"], "a sweep, wherever it stands"),
    "-m without several values": (["-m", "budget=16"], "a sweep of one cell"),
    "an option of one's own policy": (["policy._target_=own.Decay", "policy.fade=0.8", "budget=16"], "set as it is, without a plus"),
    "the same with a plus": (["policy._target_=own.Decay", "+policy.fade=0.8", "budget=16"], "likewise"),
    "options of any policy for one's own": (["policy._target_=own.Decay", "policy.sinks=2", "budget=16"], "every policy has them"),
    "an option of two of a sweep's policies": (["-m", "policy=snapkv,pyramidkv", "policy.pool_kernel=5", "budget=40"], "both get it"),
    "a folder in a sweep's name": (["-m", "sweep.name=a/b", "budget=16"], "results are in _sweeps/a_b-..."),
    "a comma and quotes in it": (["-m", "sweep.name='first, \"try\" = 1'", "budget=16"], "results are in _sweeps/first_try_1-..."),
    "letters beyond ASCII in it": (["-m", "sweep.name='für mich'", "budget=16"], "results are in _sweeps/fur_mich-..."),
}  # fmt: skip
"""What may look wrong -> words after ``BASE``, and what it means."""

EVERY = [(kind, name) for kind, mistakes in MISTAKES.items() for name in mistakes]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with texts and modules, good ones and others."""
    for name, content in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)  # a GPU's scan is none without one
    yield tmp_path
    for module in [m for m in sys.modules if f"{m}.py" in FILES]:
        del sys.modules[module]


def ran(monkeypatch, capsys, words: list[str]) -> tuple[int, str, str]:
    """``BASE`` and ``words``, as the runner takes them."""
    # Without a flag Hydra composes twice, to see whether an experiment is a sweep; that is most of the time here.
    return command(monkeypatch, capsys, *([] if "-m" in words else ["--run"]), *BASE, *words)


def lying_in(place: Path) -> set[str]:
    return {str(p.relative_to(place)) for p in place.rglob("*")}


def test_there_are_enough() -> None:
    assert len(EVERY) >= 100
    words = [tuple(words) for mistakes in MISTAKES.values() for words, _ in mistakes.values()]
    assert len(set(words)) == len(words)


@pytest.mark.parametrize(("kind", "name"), EVERY, ids=lambda part: part)
def test_one_mistake_one_sentence(place, monkeypatch, capsys, kind: str, name: str) -> None:
    """Exit code 2, one line, and nothing is left behind."""
    words, says = MISTAKES[kind][name]
    before = lying_in(place)
    code, out, err = ran(monkeypatch, capsys, words)
    assert code == 2, (out, err)
    lines = err.strip().splitlines()
    said = lines[-1].removeprefix("error: ")
    if says.endswith("..."):
        assert said.startswith(says.removesuffix("..."))
        assert said != says.removesuffix("...").strip()
    else:
        assert said == says
    assert lines[-1].startswith("error: ")
    assert lines == lines[-1:], "one line, and no more"
    assert out == ""
    assert lying_in(place) == before


@pytest.mark.timing
def test_a_mistake_is_said_at_once(place, monkeypatch, capsys) -> None:
    """The first of each kind, so that nothing was read or computed before."""
    for kind, mistakes in MISTAKES.items():
        words, _ = next(iter(mistakes.values()))
        started = time.monotonic()
        assert ran(monkeypatch, capsys, words)[0] == 2, words
        assert time.monotonic() - started < 20, kind


@pytest.mark.parametrize("name", LATE)
def test_mistakes_that_are_found_late(place, monkeypatch, capsys, name: str) -> None:
    words, says = LATE[name]
    code, _, err = ran(monkeypatch, capsys, words)
    assert code in (2, 3), err
    last = err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    assert says in last


@pytest.mark.parametrize("name", RIGHT)
def test_what_looks_wrong_and_is_right(place, monkeypatch, capsys, name: str) -> None:
    words, _ = RIGHT[name]
    code, _, err = ran(monkeypatch, capsys, words)
    assert code == 0, err
    import experiments

    assert list((place / "results/runs").glob("*/summary.json"))
    if "-m" in words:
        frame = experiments.frame()
        assert len(frame)
        (sweep,) = (place / "results/runs/_sweeps").iterdir()
        _, _, folder = RIGHT[name][1].partition("_sweeps/")
        assert sweep.name.startswith(folder.removesuffix("..."))


def test_the_last_of_two_counts(place, monkeypatch, capsys) -> None:
    code, _, err = ran(monkeypatch, capsys, RIGHT["an option given twice"][0])
    assert code == 0, err
    assert list((place / "results/runs").glob("tova-16-*"))
    assert not list((place / "results/runs").glob("tova-32-*"))


def test_a_folder_that_cannot_be_written(tmp_path, monkeypatch) -> None:
    import os

    from experiments import options
    from tova import UsageError

    monkeypatch.setattr(os, "access", lambda path, how: False)
    with pytest.raises(UsageError, match=r"results_dir=\S+/runs/here: \S+ cannot be written; give another folder"):
        options.results_dir(f"{tmp_path}/runs/here")
    with pytest.raises(UsageError, match=r"results_dir=a\\x00b: must be the path of a folder"):
        options.results_dir("a\0b")
    with pytest.raises(UsageError, match="File name too long"):
        options.results_dir("x" * 300)


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("quickstart", "quickstart"),
        ("v1.2_a-b", "v1.2_a-b"),
        ("a/b", "a_b"),
        ("../../etc", "etc"),
        ("-x_", "x"),
        ("_sweeps", "sweeps"),
        (3, "3"),
        ("first, 'try' = \"1\"", "first_try_1"),
        ("für mich", "fur_mich"),
        ("日本", "cf2abf0c"),
        ("über/日本", "uber_e5b47d8e"),
        ("x" * 300, "x" * 48 + "_0d4e2ca9"),
    ],
)
def test_folders_of_sweeps(name, folder: str) -> None:
    from experiments import options

    assert options.sweep_name(name) == folder
    assert options.sweep_name(folder) == folder


def test_relaxed_twice_is_relaxed_once() -> None:
    from experiments import options

    words = ["policy=tova", "-m", "+policy.fade=1,2", "policy.sinks=4", "budget=3", "~dataset.tokens", "--cfg", "job"]
    once = options.relaxed(words)
    assert once == [
        "-m", "policy=tova", "++policy.fade=1,2", "++policy.sinks=4", "budget=3", "~dataset.tokens", "--cfg", "job",
    ]  # fmt: skip
    assert options.relaxed(once) == once


def test_a_launcher_that_is_not_installed() -> None:
    from hydra.errors import MissingConfigException

    from experiments.explain import explain

    missing = MissingConfigException("...", "hydra/launcher/submitit_slurm", ["basic"])
    assert explain(missing) == (
        "hydra/launcher=submitit_slurm: needs the package hydra-submitit-launcher; pip install -e '.[cluster]'"
    )
    assert 'cluster = ["hydra-submitit-launcher' in (PAGE.parent.parent / "pyproject.toml").read_text()


def test_the_page_is_what_the_tables_give() -> None:
    assert PAGE.read_text() == page(), "run: python tests/test_mistakes.py"


def page() -> str:
    count = sum(len(mistakes) for mistakes in MISTAKES.values())
    lines = [
        "# What can go wrong on the command line, and what is said",
        "",
        f"{count} mistakes, in a folder with a few texts and a module `own.py`. Each command is",
        "",
        f"    python -m experiments.run {' '.join(BASE)}",
        "",
        "and the words below. It ends with exit code 2 and this one sentence, before a model is loaded, and leaves nothing",
        "behind. Made by `python tests/test_mistakes.py` from the tables that the tests run; `...` is where a sentence goes on.",
    ]
    for kind, mistakes in MISTAKES.items():
        lines += ["", f"## {kind}", "", "| mistake | words | sentence |", "|---|---|---|"]
        lines += [
            f"| {name} | {_code(shlex.join(words))} | {_cell(says)} |" for name, (words, says) in mistakes.items()
        ]
    lines += ["", "## Found when the model has read the text", "", "| mistake | words | sentence |", "|---|---|---|"]
    lines += [f"| {name} | {_code(shlex.join(words))} | {_cell(says)} |" for name, (words, says) in LATE.items()]
    lines += ["", "## What looks wrong and is right", "", "| what | words | what it means |", "|---|---|---|"]
    lines += [f"| {name} | {_code(shlex.join(words))} | {_cell(means)} |" for name, (words, means) in RIGHT.items()]
    return "\n".join(lines) + "\n"


def _code(words: str) -> str:
    return f"`{words}`".replace("|", "\\|")


def _cell(text: str) -> str:
    return "".join(f"\\{c}" if c in "|*_<[\\`" else c for c in text)


if __name__ == "__main__":
    PAGE.write_text(page())
