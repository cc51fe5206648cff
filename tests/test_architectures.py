"""Every architecture transformers has for causal language modelling: exact, refused by a sentence, or as transformers.

Each is built tiny (``architectures``) and run in every ordinary way before and after ``tova.enable``, then with an
evicting cache; a process of its own per architecture, limited in memory and time. What is compared is always the model
with itself. ``python tests/test_architectures.py`` runs all and writes docs/architectures.md.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.architectures import (
    CONFIG_MAPPING,
    GAINS,
    SPECIAL,
    NotBuiltError,
    build,
    first_line,
    names,
    randomise,
    variants,
)

import tova
from tova import EvictingCache, UsageError, policies
from tova.compat import cache_argument

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architectures.md"
TOKENS, PROMPT, NEW, PADDING, BUDGET = 30, 17, 8, 7, 8
MEMORY, SECONDS = 6 << 30, 120
"""What one architecture may take: bytes of address space, seconds."""
SAME = 1e-6
"""An ordinary way of running before and after ``enable``, relative to the largest logit: the same code on the same
numbers gives the same bits; this allows no more than a sum in another order."""
CLOSE = 3e-5
"""An evicting cache against the model's own attention, relative to the largest logit: products of other shapes round
otherwise (1e-7 a sum), and two layers of peaked attention make up to a hundred times that of it. A token that is seen
and should not be, or the reverse, moves logits by a hundredth and more. A router of experts that tips over would too:
that takes two of its scores within rounding of each other, and thirty fixed tokens have none."""
TOLD = 0.01
"""What other tokens before it must move the last token's logits by: else nothing here would show."""

EXACT, REFUSED, REFUSED_RUN, REFUSED_PART = "exact", "refused", "refused when run", "refused in part"
DIFFERS, NOT_BUILT, FAULT = "differs as in transformers", "could not be built or run small", "fault"
MEANING = {
    EXACT: "no cache, an ordinary cache, a full evicting cache, left padding, token by token against one pass, with "
    "and without evictions, and generated text: all as the model alone",
    REFUSED: "`tova.enable` says why, in one sentence; the model runs on as before",
    REFUSED_RUN: "a forward with an evicting cache says why, in one sentence; without one the model runs as before",
    REFUSED_PART: "some ways of running it with an evicting cache are refused, in one sentence; the others are exact",
    DIFFERS: "transformers' own ways of running the model differ, or fail with any cache; an evicting cache gives what "
    "the model gives without one, or the same way",
    NOT_BUILT: "not tried: no small model could be made, or it does not run on text alone",
    FAULT: "a wrong number or an unexplained error",
}
ALLOWED = (EXACT, REFUSED, REFUSED_RUN, REFUSED_PART, DIFFERS, NOT_BUILT)


@dataclass
class Outcome:
    """What became of one architecture.

    ``notes`` are sentences; ``figures`` are differences by way of running, relative to the largest logit.
    """

    kind: str
    name: str
    changed: dict[str, Any] = field(default_factory=dict)
    outcome: str = EXACT
    notes: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)


# -- ways of running ------------------------------------------------------------------------------------------


def text(rows: int = 1, seed: int = 0) -> torch.Tensor:
    """int64 [rows, TOKENS], all different, none of them special."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(SPECIAL - 10, generator=generator)[:TOKENS] + 10 for _ in range(rows)])


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows of which the second begins with padding: ids and mask, int64 [2, TOKENS]."""
    mask = (torch.arange(TOKENS) >= torch.tensor([[0], [PADDING]])).long()
    return text(2, seed=1) * mask, mask


def forward(model: Any, ids: torch.Tensor, cache: Any = None, **more: Any) -> torch.Tensor:
    """float32 logits [B, T, V]."""
    given = dict(use_cache=False) if cache is None else {"use_cache": True, cache_argument(model): cache}
    logits = model(input_ids=ids, **given, **more).logits
    assert logits.shape[:2] == ids.shape, f"logits of shape {list(logits.shape)} for ids of shape {list(ids.shape)}"
    return logits.float()


def in_pieces(model: Any, ids: torch.Tensor, cache: Any, first: int = PROMPT) -> torch.Tensor:
    return torch.cat([forward(model, ids[:, :first], cache), forward(model, ids[:, first:], cache)], 1)


def token_by_token(model: Any, ids: torch.Tensor, cache: Any) -> torch.Tensor:
    return torch.cat([forward(model, ids[:, t : t + 1], cache) for t in range(ids.shape[1])], 1)


def left_padded(model: Any, cache: Any = None) -> torch.Tensor:
    """Logits [real tokens, V] of a padded batch."""
    ids, mask = padded()
    return forward(model, ids, cache, attention_mask=mask)[mask.bool()]


def generate(model: Any, cache: Any = None, **more: Any) -> torch.Tensor:
    """The ids of a greedy text."""
    given = {} if cache is None else {cache_argument(model): cache}
    return model.generate(text()[:, :PROMPT], max_new_tokens=NEW, min_new_tokens=NEW, **given, **more)


def generate_padded(model: Any, cache: Any = None, **more: Any) -> torch.Tensor:
    ids, mask = padded()
    given = {} if cache is None else {cache_argument(model): cache}
    return model.generate(ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, **given, **more)


def dynamic(model: Any) -> Any:
    """The cache ``generate`` takes where none is given."""
    return transformers.DynamicCache(config=model.config)


Way = Callable[[Any], torch.Tensor]
ORDINARY: dict[str, Way] = {
    "no cache": lambda m: forward(m, text()),
    "one pass": lambda m: forward(m, text(), dynamic(m)),
    "in pieces": lambda m: in_pieces(m, text(), dynamic(m)),
    "token by token": lambda m: token_by_token(m, text(), dynamic(m)),
    "padded": left_padded,
    "padded one pass": lambda m: left_padded(m, dynamic(m)),
    "generate": generate,
    "generate without cache": lambda m: generate(m, use_cache=False),
    "generate with a static cache": lambda m: generate(m, cache_implementation="static"),
    "padded generate": lambda m: generate_padded(m, use_cache=True),
    "padded generate without cache": lambda m: generate_padded(m, use_cache=False),
}
EVICTING: dict[str, Callable[[Any, Any], torch.Tensor]] = {
    "one pass": lambda m, c: forward(m, text(), c),
    "in pieces": lambda m, c: in_pieces(m, text(), c),
    "token by token": lambda m, c: token_by_token(m, text(), c),
    "padded one pass": left_padded,
    "generate": generate,
    "padded generate": generate_padded,
}
# Ways that should agree, the first without any cache. An evicting cache must give what an ordinary one gives the same
# way, or the first or second of these: an answer that only another way of feeding the model has is no excuse.
ALIKE = (
    ("no cache", "one pass", "in pieces", "token by token"),
    ("padded", "padded one pass"),
    ("generate without cache", "generate"),
    ("padded generate without cache", "padded generate"),
)


def attempt(way: Callable[..., torch.Tensor], *given: Any) -> torch.Tensor | UsageError | str:
    """What ``way`` gives: a tensor, a refusal, or the first line of another exception."""
    try:
        return way(*given)
    except UsageError as e:
        return e
    except Exception as e:
        return first_line(e)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """The largest difference of ``a`` and ``b``, relative to the largest logit of ``b``; for texts 0 or 1."""
    if a.shape != b.shape:
        return float("inf")
    if not a.is_floating_point():
        return float(not torch.equal(a, b))
    difference = (a - b).abs().max() / b.abs().max()
    return float("inf") if torch.isnan(difference) else float(difference)


# -- the sweep ------------------------------------------------------------------------------------------------


def prepared(kind: str, changed: dict[str, Any]) -> Any:
    """A tiny model whose logits are finite and depend on the tokens before.

    Raises:
        NotBuiltError: there is none.
    """
    model = build(kind, changed)
    why = ""
    for gain in GAINS:
        randomise(model, gain)
        found = attempt(ORDINARY["no cache"], model)
        if not isinstance(found, torch.Tensor):
            raise NotBuiltError(f"its own forward: {found}")
        other = text()
        other[0, -BUDGET:-1] = torch.arange(3, 2 + BUDGET)  # tokens no text has, near enough for any window
        if not torch.isfinite(found).all():
            why = "its logits are not finite"
        elif apart(forward(model, other)[:, -1], found[:, -1]) < TOLD:
            why = "its logits do not depend on the tokens before"
        else:
            return model
    raise NotBuiltError(why)


@torch.no_grad()
def sweep(
    kind: str,
    changed: dict[str, Any] | None = None,
    enable: Callable[[Any], Any] = tova.enable,
    full: Callable[[], EvictingCache] = lambda: EvictingCache(policies.make("full")),
    small: Callable[[], EvictingCache] = lambda: EvictingCache(policies.make("tova", budget=BUDGET)),
) -> Outcome:
    """Run one architecture in every way; nothing is raised.

    Args:
        kind: its model type.
        changed: fields of its configuration that differ from what a small one has.
        enable: what is done to the model; the sweep's own tests do something wrong.
        full: makes a cache that keeps everything.
        small: makes one that evicts.
    """
    changed = changed or {}
    outcome = Outcome(kind, names()[kind], changed)
    try:
        model = prepared(kind, changed)
    except NotBuiltError as e:
        outcome.outcome, outcome.notes = NOT_BUILT, [str(e)]
        return outcome
    before = {name: attempt(way, model) for name, way in ORDINARY.items()}
    faults: list[str] = []
    own = _own_differences(before, outcome)
    idle = _idle(model)
    try:
        enable(model)
        refusal = None
    except UsageError as e:
        refusal = str(e)
    except Exception as e:
        refusal = ""
        faults.append(f"enable: {first_line(e)}")
    _unchanged(before, model, "after enable", outcome, faults)
    refused: dict[str, list[str]] = {}
    if refusal is None:
        _evicting(before, model, full, idle, own, outcome, faults, refused)
        _unchanged({name: before[name] for name in ("one pass", "generate")}, model, "after evicting", outcome, faults)
        if not refused:
            _with_a_budget(model, small, own, outcome, faults, refused)
    outcome.outcome = _verdict(faults, refusal, refused, own)
    outcome.notes = faults + ([refusal] if refusal else _sentences(refused))
    if outcome.outcome in (FAULT, DIFFERS):
        outcome.notes += own
    return outcome


def _verdict(faults: list[str], refusal: str | None, refused: dict[str, list[str]], own: list[str]) -> str:
    if faults:
        return FAULT
    if refusal:
        return REFUSED
    if refused:
        return REFUSED_RUN if _all_refused(refused) else REFUSED_PART
    return DIFFERS if own else EXACT


def _all_refused(refused: dict[str, list[str]]) -> bool:
    return {way for ways in refused.values() for way in ways} >= set(EVICTING)


def _sentences(refused: dict[str, list[str]]) -> list[str]:
    """Refusals that differ in numbers only become one, with the ways that were refused unless all were."""
    alike: dict[str, tuple[str, list[str]]] = {}
    for sentence, ways in refused.items():
        alike.setdefault(re.sub(r"\d+", "0", sentence), (sentence, []))[1].extend(ways)
    if len(alike) == 1 and _all_refused(refused):
        return [sentence for sentence, _ in alike.values()]
    return [f"{sentence} ({', '.join(ways)})" for sentence, ways in alike.values()]


def _own_differences(before: dict[str, Any], outcome: Outcome) -> list[str]:
    """Where transformers itself differs between its ways of running the model."""
    fails: dict[str, list[str]] = {}
    said = []
    for first, *others in ALIKE:
        differ: dict[str, float] = {}
        for other in others:
            a, b = before[other], before[first]
            if not isinstance(b, torch.Tensor):
                continue
            if not isinstance(a, torch.Tensor):
                fails.setdefault(str(a), []).append(other)
                continue
            difference = outcome.figures[f"own {other}"] = apart(a, b)
            if difference > CLOSE:
                differ[other] = difference
        if differ:
            size = f" (by up to {max(differ.values()):.1g})" if before[first].is_floating_point() else ""
            said.append(f"transformers itself differs: {', '.join(differ)} from {first}{size}")
    return said + [f"transformers cannot run it {', '.join(ways)}: {error}" for error, ways in fails.items()]


def _idle(model: Any) -> set[int]:
    """Layers that a text does not feed: an ordinary cache has nothing for them (attention to images, say)."""
    try:
        cache = dynamic(model)
        forward(model, text(), cache)
    except Exception:
        return set()
    lengths = [getattr(layer, "get_seq_length", lambda: 1)() for layer in cache.layers]  # a state has no length
    return {index for index, length in enumerate(lengths) if not length}


def _unchanged(before: dict[str, Any], model: Any, when: str, outcome: Outcome, faults: list[str]) -> None:
    """Ordinary ways of running are what they were, those in ``before``."""
    for name, b in before.items():
        a = attempt(ORDINARY[name], model)
        if not isinstance(a, torch.Tensor) or not isinstance(b, torch.Tensor):
            if isinstance(a, UsageError) or isinstance(a, str) != isinstance(b, str):
                now, then = (x if isinstance(x, UsageError | str) else "runs" for x in (a, b))
                faults.append(f"{when}, {name}: {now}; before: {then}")
            continue
        difference = outcome.figures[f"{when} {name}"] = apart(a, b)
        if difference > SAME:
            faults.append(f"{when}, {name}: differs from before by {difference:.1g}")


def _evicting(
    before: dict[str, Any],
    model: Any,
    full: Callable[[], EvictingCache],
    idle: set[int],
    own: list[str],
    outcome: Outcome,
    faults: list[str],
    refused: dict[str, list[str]],
) -> None:
    """A cache that keeps everything gives the model's own numbers."""
    otherwise: dict[str, list[str]] = {}
    for name, way in EVICTING.items():
        cache = full()
        found = attempt(way, model, cache)
        if isinstance(found, UsageError):
            refused.setdefault(str(found), []).append(name)
            continue
        alike = next(group for group in ALIKE if name in group)
        candidates = [b for b in (name, *alike[:2]) if isinstance(before[b], torch.Tensor)]
        if isinstance(found, str):
            if found != before[name]:  # where an ordinary cache fails so too, the model cannot be cached
                faults.append(f"evicting cache, {name}: {found}")
            continue
        seen = [layer.get_seq_length() for layer in cache.layers]
        expected = TOKENS if found.is_floating_point() else found.shape[1] - 1
        if not seen or any(length != (0 if layer in idle else expected) for layer, length in enumerate(seen)):
            faults.append(f"evicting cache, {name}: its layers have seen {seen or 'nothing'} of {expected} tokens")
        if not candidates:
            continue
        differences = {b: apart(found, before[b]) for b in candidates}
        if min(differences.values()) > CLOSE and found.is_floating_point():
            eager = attempt(ORDINARY[name], _eager(outcome))
            if isinstance(eager, torch.Tensor):
                differences["its eager attention"] = apart(found, eager)
        nearest = min(differences, key=lambda b: differences[b])
        outcome.figures[f"evicting {name}"] = differences[nearest]
        if differences[nearest] > CLOSE:
            faults.append(f"evicting cache, {name}: differs by {differences[nearest]:.1g} from {nearest}")
        elif differences[candidates[0]] > CLOSE:
            same = nearest if nearest not in before else "the model without a cache"
            otherwise.setdefault(same, []).append(name)
    own += [f"an evicting cache gives what {same} gives ({', '.join(ways)})" for same, ways in otherwise.items()]


def _eager(outcome: Outcome) -> Any:
    """The model with its own eager attention: another implementation may leave out what the model asks for."""
    model = prepared(outcome.kind, outcome.changed)
    model.set_attn_implementation("eager")
    return model


def _with_a_budget(
    model: Any,
    small: Callable[[], EvictingCache],
    own: list[str],
    outcome: Outcome,
    faults: list[str],
    refused: dict[str, list[str]],
) -> None:
    """Evicting, one pass and token by token decide and compute the same.

    Two scores closer than float32 resolves may fall either way in products of two shapes; such decisions agree in
    double precision, where there are none so close.
    """
    for precise in (False, True):
        whole, stepwise = small(), small()
        if precise:
            model.double()
        a = attempt(forward, model, text(), whole)
        b = attempt(token_by_token, model, text(), stepwise)
        for found in (a, b):
            if isinstance(found, UsageError):
                refused.setdefault(str(found), []).append(f"budget of {BUDGET}")
        if isinstance(a, UsageError) or isinstance(b, UsageError):
            return
        if isinstance(a, str) or isinstance(b, str):
            if not own:
                faults.append(f"budget of {BUDGET}: {a if isinstance(a, str) else b}")
            return
        held = max(len(whole.kept(layer)) for layer in range(len(whole.layers)))
        if held > BUDGET:
            faults.append(f"budget of {BUDGET}: {held} tokens are held")
        times = [attempt(lambda cache: cache.evicted_at, cache) for cache in (whole, stepwise)]
        if isinstance(times[0], UsageError):  # some layers see no text: there is no such table
            refused.setdefault(str(times[0]), []).append("evicted_at")
            return
        decided = int((times[0] != times[1]).sum())
        difference = outcome.figures[f"budget of {BUDGET}, token by token"] = apart(b, a)
        if not decided and difference <= CLOSE:
            return
    if not own:
        faults.append(
            f"budget of {BUDGET}: token by token {decided} of {times[0].numel()} eviction times differ from "
            f"one pass, logits by {difference:.1g}, in double precision too"
        )


def sweep_all(kind: str) -> list[Outcome]:
    """The architecture, and what else its configuration can make of it."""
    return [sweep(kind, changed) for changed in variants(kind)]


# -- a process per architecture -------------------------------------------------------------------------------


def serve() -> None:
    """Answer model types, one a line, by lists of outcomes; each in a fork limited in memory and time."""
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    sweep("llama")  # what all need is loaded once, compiled scans too
    for line in sys.stdin:
        kind = json.loads(line)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            _limited(kind, write)
        os.close(write)
        answers.write(json.dumps(_answer(kind, child, read)) + "\n")
        answers.flush()


def _limited(kind: str, write: int) -> None:
    """The child: sweeps and is gone."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    signal.alarm(2 * SECONDS)  # should the parent be gone
    try:
        found = [asdict(outcome) for outcome in sweep_all(kind)]
    except BaseException as e:
        found = [asdict(Outcome(kind, names().get(kind, ""), outcome=FAULT, notes=[f"the sweep: {first_line(e)}"]))]
    with os.fdopen(write, "w") as answer:
        answer.write(json.dumps(found))
    os._exit(0)


def _answer(kind: str, child: int, read: int) -> list[dict[str, Any]]:
    """What the child says, or what became of it."""
    said = b""
    with contextlib.suppress(ProcessLookupError):
        while select.select([read], [], [], SECONDS)[0]:
            part = os.read(read, 1 << 16)
            if not part:
                break
            said += part
        else:
            os.kill(child, signal.SIGKILL)
    os.close(read)
    status = os.waitpid(child, 0)[1]
    try:
        return json.loads(said)
    except ValueError:
        ended = f"ended by signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit code {status >> 8}"
        why = f"took more than {SECONDS} s or {MEMORY >> 30} GiB ({ended})"
        return [asdict(Outcome(kind, names().get(kind, ""), outcome=NOT_BUILT, notes=[why]))]


class Sweeper:
    """A server process that answers model types by outcomes; started when first asked."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def __call__(self, kind: str) -> list[Outcome]:
        if self._process is None:
            environment = os.environ | dict(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", MKL_NUM_THREADS="1")
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--serve"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True,
            )  # fmt: skip
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(kind) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the sweep's server ended, asked for {kind}"
        return [Outcome(**found) for found in json.loads(answer)]

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()  # it has nothing to put away
            self._process.communicate()
            self._process = None


# -- tests ----------------------------------------------------------------------------------------------------

# A few that differ, in the quick tests: what must come out of each.
QUICK = {
    "bert": REFUSED_PART,
    "bloom": REFUSED,
    "deepseek_v3": REFUSED_RUN,
    "diffllama": REFUSED_RUN,
    "doge": REFUSED_RUN,
    "falcon": REFUSED,
    "gemma2": EXACT,
    "gemma3_text": EXACT,
    "gpt2": EXACT,
    "gpt_oss": EXACT,
    "llama": EXACT,
    "mamba": REFUSED,
    "mistral": EXACT,
}
RECENT = tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24)
"""Earlier versions have other attention for some of these."""
FEW = 15
"""So many of some two hundred may be not built."""
FOUND: dict[str, list[Outcome]] = {}
"""What this run of the tests found."""


@pytest.fixture(scope="module")
def sweeper() -> Iterator[Sweeper]:
    made = Sweeper()
    yield made
    made.close()


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in sorted(names())]
)
def test_exact_or_refused_or_as_transformers(sweeper: Sweeper, kind: str) -> None:
    FOUND[kind] = sweeper(kind)
    for outcome in FOUND[kind]:
        assert outcome.outcome in ALLOWED, "\n".join([described(outcome), *outcome.notes])
        assert outcome.outcome != NOT_BUILT or outcome.notes[0]
    if kind in QUICK and RECENT:
        assert FOUND[kind][0].outcome == QUICK[kind], FOUND[kind][0].notes
    for outcome in FOUND[kind]:
        page_has = rows_of_the_page()
        # With other versions of transformers there may be others; with the page's own all are on it.
        assert described(outcome) in page_has or versions() not in PAGE.read_text(), "the page misses one"
        assert page_has.get(described(outcome), outcome.outcome) == outcome.outcome, "the page is stale"


@pytest.mark.slow
def test_few_could_not_be_built() -> None:
    if set(FOUND) != set(names()):
        pytest.skip("not all were run")
    assert sum(outcomes[0].outcome == NOT_BUILT for outcomes in FOUND.values()) <= FEW


def test_the_page_has_a_row_for_every_architecture() -> None:
    rows = rows_of_the_page()
    if not rows:
        pytest.skip("the page was made with other versions")
    assert {row.split()[0] for row in rows} == set(names())


def test_one_that_is_added_is_found() -> None:
    class AddedConfig(transformers.LlamaConfig):
        model_type = "added_for_a_test"

    class AddedForCausalLM(transformers.LlamaForCausalLM):
        config_class = AddedConfig

    transformers.AutoConfig.register("added_for_a_test", AddedConfig)
    transformers.AutoModelForCausalLM.register(AddedConfig, AddedForCausalLM)
    try:
        assert names()["added_for_a_test"] == "AddedForCausalLM"
        assert sweep("added_for_a_test").outcome == EXACT
    finally:
        transformers.AutoModelForCausalLM._model_mapping._extra_content.pop(AddedConfig)
        CONFIG_MAPPING._extra_content.pop("added_for_a_test")


def test_large_ones_are_not_built() -> None:
    with pytest.raises(NotBuiltError, match="million parameters"):
        build("llama", dict(hidden_size=8192, intermediate_size=8192))


# The sweep finds what it is there for.


def test_a_cache_that_drops_is_noticed() -> None:
    found = sweep("llama", full=lambda: EvictingCache(policies.make("window", budget=BUDGET)))
    assert found.outcome == FAULT
    assert any(note.startswith("evicting cache, one pass: differs") for note in found.notes)


@pytest.mark.parametrize("refuses", [False, True])
def test_an_enable_that_changes_the_model_is_noticed(refuses: bool) -> None:
    def enable(model: Any) -> None:
        tova.enable(model)
        model.lm_head.weight.data[3] += 0.01
        if refuses:
            raise UsageError("no")

    found = sweep("llama", enable=enable)
    assert found.outcome == FAULT
    assert any(note.startswith("after enable, no cache: differs") for note in found.notes)


def test_decisions_that_differ_are_noticed() -> None:
    names_in_turn = ("tova", "window") * 2
    made = iter([EvictingCache(policies.make(name, budget=BUDGET)) for name in names_in_turn])
    found = sweep("llama", small=lambda: next(made))
    assert found.outcome == FAULT
    assert "eviction times differ" in found.notes[0]


def test_a_crash_and_a_hang_are_outcomes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "SECONDS", 0.5)
    for code, says in (("import os; os._exit(3)", "exit code 3"), ("import time; time.sleep(60)", "signal 9")):
        read, write = os.pipe()
        child = os.posix_spawn(sys.executable, [sys.executable, "-c", code], os.environ)
        (found,) = _answer("llama", child, read)  # the other end stays open: it has nothing to say
        os.close(write)
        assert found["outcome"] == NOT_BUILT
        assert says in found["notes"][0]


# -- the page -------------------------------------------------------------------------------------------------


def described(outcome: Outcome) -> str:
    """``llama / LlamaForCausalLM``, and what was changed."""
    changed = "".join(f", {name}={value}" for name, value in outcome.changed.items())
    return f"{outcome.kind} / {outcome.name}{changed}"


def versions() -> str:
    return f"torch {torch.__version__}, transformers {transformers.__version__}"


def page(found: list[Outcome]) -> str:
    """The outcomes as Markdown."""
    counts = Counter(outcome.outcome for outcome in found)
    lines = [
        "# Every architecture for causal language modelling",
        "",
        f"Made by `python tests/test_architectures.py` with {versions()}: each architecture `AutoModelForCausalLM` "
        "knows, built tiny with random weights (float32), in every way of running it against the model itself.",
        "",
        "| outcome | architectures | what it means |",
        "|---|---:|---|",
        *(f"| {kind} | {counts[kind]} | {MEANING[kind]} |" for kind in MEANING if counts[kind] or kind != FAULT),
        "",
        f"{len(found)} in all: {len({o.kind for o in found})} model types, and some once more with a switch of their "
        "configuration turned. Differences are relative to the largest logit; what counts as exact is "
        f"{CLOSE:g} with an evicting cache and {SAME:g} for the ordinary ways, before and after `tova.enable`. The "
        f"texts have {TOKENS} tokens, windows {BUDGET}.",
        "",
        "| architecture | outcome | largest difference | notes |",
        "|---|---|---:|---|",
    ]
    for outcome in sorted(found, key=lambda o: (o.kind, len(o.changed))):
        evicting = [v for name, v in outcome.figures.items() if name.startswith(("evicting", "budget"))]
        largest = f"{max(evicting):.0e}" if evicting and outcome.outcome in (EXACT, DIFFERS) else ""
        notes = "; ".join(note.replace("|", "\\|") for note in outcome.notes)
        lines.append(f"| {described(outcome)} | {outcome.outcome} | {largest} | {notes} |")
    return "\n".join(lines) + "\n"


def rows_of_the_page() -> dict[str, str]:
    """Architecture to outcome as the page has them; empty if it was made with other versions."""
    text = PAGE.read_text(encoding="utf-8") if PAGE.exists() else ""
    if versions() not in text:
        return {}
    return dict(re.findall(r"^\| (\S+ / .+?) \| (.+?) \|", text, flags=re.MULTILINE))


def _state() -> str:
    """What the outcomes rest on: versions, the library, this sweep."""
    files = [*Path(tova.__file__).parent.rglob("*.py"), Path(__file__), Path(__file__).with_name("architectures.py")]
    content = b"".join(file.read_bytes() for file in sorted(files))
    return f"{versions()}, {hashlib.sha256(content).hexdigest()[:12]}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Sweep every architecture and write the page.")
    parser.add_argument("kinds", nargs="*", help="model types; all if none is named")
    parser.add_argument("--kept", type=Path, default=Path(tempfile.gettempdir()) / "tova_architectures",
                        help="folder where outcomes are kept until the library or the versions change")  # fmt: skip
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page goes once all are there")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    options.kept.mkdir(parents=True, exist_ok=True)
    store = options.kept / "outcomes.json"
    kept = json.loads(store.read_text()) if store.exists() else {}
    if kept.get("state") != _state():
        kept = {"state": _state(), "found": {}}
    sweeper = Sweeper()
    for kind in options.kinds or sorted(names()):
        if kind not in kept["found"]:
            kept["found"][kind] = [asdict(outcome) for outcome in sweeper(kind)]
            store.write_text(json.dumps(kept, indent=1))
        for found in kept["found"][kind]:
            outcome = Outcome(**found)
            print(f"{described(outcome)}: {outcome.outcome}", *outcome.notes, sep="\n    ", flush=True)
    sweeper.close()
    found = [Outcome(**outcome) for outcomes in kept["found"].values() for outcome in outcomes]
    print(*Counter(outcome.outcome for outcome in found).items(), sep="\n")
    if set(kept["found"]) >= set(names()):
        options.page.parent.mkdir(parents=True, exist_ok=True)
        options.page.write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    main()
