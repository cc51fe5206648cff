"""Every sum against float64, and what is bit-identical; docs/numerics.md says the same, and is held to it.

``python tests/test_numerics.py`` prints the table of sums for that page, measured anew.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from support.models import tiny, tokens

from tova import EvictingCache, policies
from tova.measures import AttentionMeasures, AttentionReport, _cross_entropy, perplexity, token_nll
from tova.observers import Seen
from tova.policies import Slots
from tova.policies.base import Schedule
from tova.policies.steps import new_records
from tova.replay import Attention, LayerState, replay
from tova.scan import Chunk, cpu, fixed_point, reference
from tova.scan.chunk import weights_under
from tova.side_by_side import SideBySide

PAGE = Path(__file__).parent.parent / "docs" / "numerics.md"
CANDIDATES = (640, 4_096, 16_384)
VOCABULARIES = (49_152, 128_256, 262_144)
SCALES = (0.5, 3.0, 8.0)
"""Of random logits: flat rows, such as are found, and rows where a few entries have nearly everything."""


def softmax_rows(logits: torch.Tensor, kept: int) -> np.ndarray:
    """float64 [H, C, N] of logits [H, C, N] by the definition: query i sees what is kept, those before it, itself."""
    out = np.zeros(logits.shape)
    for h in range(logits.shape[0]):
        for i in range(logits.shape[1]):
            row = logits[h, i, : kept + i + 1].double().numpy()
            weights = np.exp(row - row.max())
            out[h, i, : kept + i + 1] = weights / math.fsum(weights)
    return out


def normals(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def chunk_of(candidates: int, scale: float, heads: int = 4, steps: int = 4) -> Chunk:
    """A chunk at whose end nothing is dropped yet."""
    kept = candidates - steps
    positions = torch.arange(candidates).unsqueeze(0)
    slots = Slots(
        positions=positions.clone(),
        held=positions < kept,
        records=new_records(policies.make("h2o", budget=10**6), 1, candidates, torch.float32, torch.device("cpu")),
        observed=torch.full((1, 1), kept),
        newest=torch.full((1, 1), kept - 1),
    )
    return Chunk(normals(1, heads, steps, candidates) * scale, slots, kept, Schedule(10**9, 10**9))


def worst(errors: list[float]) -> float:
    assert not any(math.isnan(e) for e in errors)
    return max(errors)


def scanned(scan, candidates: int) -> float:
    """Relative error of the sum that weights are divided by."""
    errors = []
    for scale in SCALES:
        chunk = chunk_of(candidates, scale)
        logits = chunk.logits[0].clone()
        decision = scan.decide(policies.make("h2o", budget=10**6), chunk)
        weights, sums = decision.weights, decision.sums
        if weights is None:
            weights, sums = weights_under(chunk, decision.last)
        exact = softmax_rows(logits, chunk.kept)
        found = (weights.double() / sums.double())[0].numpy()
        top = np.unravel_index(exact.argmax(-1), exact.shape[-1:])[0]
        where = (*np.indices(top.shape), top)  # the largest weight is exp(0) = 1, so its share is the sum's error
        errors.append(float(np.abs(found[where] / exact[where] - 1).max()))
    return worst(errors)


def averaged(scan, candidates: int) -> float:
    """Relative error of what a policy adds up over a few steps: means over heads of shares."""
    errors = []
    for scale in SCALES:
        chunk = chunk_of(candidates, scale)
        logits, kept = chunk.logits[0].clone(), chunk.kept
        scan.decide(policies.make("h2o", budget=10**6), chunk)
        rows = softmax_rows(logits, kept).mean(0)[:, :kept]
        exact = np.array([math.fsum(column) for column in rows.T])
        errors.append(float(np.abs(chunk.slots["sum"][0, :kept].double().numpy() / exact - 1).max()))
    return worst(errors)


def running_sums(steps: int) -> float:
    """Relative error of H2O's sums after so many steps over 160 positions, some hundred times as heavy as others."""
    policy = policies.make("h2o", budget=1000)
    records = new_records(policy, 1, 160, torch.float32, torch.device("cpu"))
    zeros = torch.zeros(1, 160, dtype=torch.int64)
    slots = Slots(positions=zeros, held=zeros == 0, records=records, observed=zeros[:, :1], newest=zeros[:, :1])
    generator = torch.Generator().manual_seed(0)
    weights = (torch.randn(steps, 160, generator=generator) + 2 * normals(160)).softmax(-1)
    for row in weights:
        slots.records |= policy.observe(slots, row.unsqueeze(0))
    exact = torch.tensor([math.fsum(column) for column in weights.T.tolist()], dtype=torch.float64)
    return float((slots["sum"][0].double() / exact - 1).abs().max())


def decoded(candidates: int) -> float:
    """Of a token decoded over a full cache: its attention's error, by the largest value in it."""
    errors = []
    held = candidates - 1
    for scale in SCALES:
        key, value = normals(1, 2, candidates, 16, seed=1), normals(1, 2, candidates, 16, seed=2)
        query = normals(1, 4, 1, 16, seed=3) * scale
        policy, attention = policies.make("tova", budget=candidates), Attention(0.25)
        state = LayerState.empty(policy, key, value, 1, log=False)
        state.keys, state.values = key[:, :, :held].clone(), value[:, :, :held].clone()
        state.slots = Slots(
            positions=torch.arange(held).unsqueeze(0),
            held=torch.ones(1, held, dtype=torch.bool),
            records=new_records(policy, 1, held, torch.float32, torch.device("cpu")),
            observed=torch.full((1, 1), held),
            newest=torch.full((1, 1), held - 1),
        )
        state.seen = state.most = state.used = held
        out = replay(query, key[:, :, held:], value[:, :, held:], state, policy, attention, scan=cpu.SCAN)
        keys, values = (x.double().repeat_interleave(2, 1) for x in (key, value))
        rows = torch.from_numpy(softmax_rows((query.double() @ keys.mT * 0.25)[0], held))
        exact = (rows @ values[0])[:, 0]
        errors.append(float((out[0, :, 0].double() - exact).abs().max() / exact.abs().max()))
    return worst(errors)


def mixed(candidates: int) -> float:
    """Of values under weights: the error, by the largest result."""
    errors = []
    for scale in SCALES:
        weights, value = (normals(1, 2, 4, candidates) * scale).softmax(-1), normals(1, 2, candidates, 32, seed=1)
        exact = weights.double() @ value.double()
        off = (Attention.mix(weights, None, value).double() - exact).abs().max()
        errors.append(float(off / exact.abs().max()))
    return worst(errors)


def measured(candidates: int, compiled: bool) -> float:
    """Absolute error of a step's retained mass."""
    errors = []
    steps = 4
    for scale in SCALES:
        key = normals(1, 1, candidates, 8, seed=1)
        query = normals(1, 4, candidates, 8, seed=2) * scale
        log = torch.where(normals(1, 1, candidates, seed=3) > 0, 10**6, torch.arange(candidates))
        first = candidates - steps
        seen = Seen(0, 0, query[:, :, :first], key[:, :, :first], Attention(0.35), log[..., :first], None)
        measures = AttentionMeasures(compiled=compiled)
        measures._append(0, seen.key)  # the queries before are not what is looked at
        measures.see(Seen(0, first, query[:, :, first:], key[:, :, first:], Attention(0.35), log, None))
        exact = softmax_rows((query[:, :, first:].double() @ key.double().mT * 0.35)[0], first).mean(0)
        for i in range(steps):
            t = first + i
            visible = (log[0, 0, :t] >= t).numpy()
            share = math.fsum(exact[i, :t][visible]) / math.fsum(exact[i, :t])
            errors.append(abs(float(measures.report.mass[0, 0, i]) - share))
    return worst(errors)


def lost(vocabulary: int) -> float:
    """Relative error of a loss, rare words and certain ones."""
    errors = []
    for scale in SCALES:
        logits = normals(1, 6, vocabulary) * scale
        targets = torch.randint(vocabulary, (1, 6), generator=torch.Generator().manual_seed(1))
        targets[0, 3:] = logits[0, 3:].argmax(-1)
        found = _cross_entropy(logits, targets)[0].tolist()
        for row, target, loss in zip(logits[0].double().numpy(), targets[0].tolist(), found, strict=True):
            exact = math.log1p(math.fsum(np.exp(np.delete(row, target) - row[target])))
            errors.append(abs(loss - exact) / exact)
    return worst(errors)


def mean_loss(tokens: int) -> float:
    """Relative error of a perplexity."""
    losses = (normals(tokens).abs() * 3).float()
    exact = math.exp(math.fsum(losses.tolist()) / tokens)
    return abs(perplexity([losses[: tokens // 3], losses[tokens // 3 :]]) / exact - 1)


def mean_mass(steps: int) -> float:
    """Absolute error of a mean over steps."""
    mass = torch.rand(1, 1, steps, generator=torch.Generator().manual_seed(0))
    possible = torch.full((1, 1, steps), 32)
    found = AttentionReport(mass, mass, possible, possible).over(0).retained_mass[0]
    return abs(found - math.fsum(mass.flatten().tolist()) / steps)


def rows_of_cells(tokens: int) -> float:
    """Relative error of a document's figures, as the runner stores them."""
    from experiments.tasks.perplexity import _losses

    nll, full = normals(tokens).abs().numpy(), normals(tokens, seed=1).abs().numpy()
    found = _losses(nll, full, 100)
    late = [float(a) - float(b) for a, b in zip(nll[100:], full[100:], strict=True)]
    exact = math.fsum(nll.tolist()) / tokens, math.fsum(late) / len(late)
    return worst([abs(found["nll_all_steps"] / exact[0] - 1), abs(found["delta_nll"] - exact[1])])


@dataclass(frozen=True)
class Sum:
    """A sum: where it is, what it is added up in, how it is measured at which sizes, and what it may be off by."""

    where: str
    kept_in: str
    error: Callable[[int], float]
    sizes: tuple[int, ...]
    bound: float


SUMS = {
    "loss: sum over the vocabulary": Sum("measures", "float64", lost, VOCABULARIES, 1e-7),
    "perplexity: mean over tokens": Sum("measures", "float64", mean_loss, (4_096, 70_000), 1e-12),
    "mass: mean over steps": Sum("measures", "float64", mean_mass, (4_096, 70_000), 1e-12),
    "a document's means": Sum("experiments/tasks/perplexity", "float64", rows_of_cells, (4_096, 70_000), 1e-12),
    "mass of a step, torch": Sum(
        "measures", "float32 rows, float64 sums", lambda n: measured(n, compiled=False), CANDIDATES, 1e-6
    ),
    "mass of a step, compiled": Sum(
        "measures_cpu", "float32 rows, float64 sums", lambda n: measured(n, compiled=True), CANDIDATES, 1e-6
    ),
    "softmax denominator, reference scan": Sum(
        "scan/reference", "float32", lambda n: scanned(reference.SCAN, n), CANDIDATES, 2e-6
    ),
    "softmax denominator, compiled scan": Sum("scan/cpu", "float32", lambda n: scanned(cpu.SCAN, n), CANDIDATES, 2e-6),
    "softmax denominator, fixed point": Sum(
        "scan/fixed_point", "float32", lambda n: scanned(fixed_point.SCAN, n), CANDIDATES, 2e-6
    ),
    "weights a policy sees, reference scan": Sum(
        "scan/reference", "float32", lambda n: averaged(reference.SCAN, n), CANDIDATES, 5e-6
    ),
    "weights a policy sees, compiled scan": Sum(
        "scan/cpu", "float32", lambda n: averaged(cpu.SCAN, n), CANDIDATES, 5e-6
    ),
    "a decoded token's attention": Sum("decode/cpu", "float32", decoded, CANDIDATES, 2e-5),
    "values under weights": Sum("backends/threaded", "float32", mixed, CANDIDATES, 5e-6),
    "h2o's sums over steps": Sum("policies/h2o, all scans", "float32", running_sums, CANDIDATES, 2e-5),
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_against_float64(name: str) -> None:
    found = {size: SUMS[name].error(size) for size in SUMS[name].sizes}
    assert max(found.values()) <= SUMS[name].bound, found


def test_the_page_says_what_is_tested() -> None:
    """The same rows and bounds, and figures within them."""
    table = PAGE.read_text().split("<!-- sums -->")[1].split("<!-- /sums -->")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.strip().splitlines()[2:]]
    assert [line[0] for line in lines] == list(SUMS)
    for name, where, kept_in, figures, bound in lines:
        expected = SUMS[name]
        assert (where, kept_in, float(bound)) == (f"`{expected.where}`", expected.kept_in, expected.bound)
        stated = re.findall(r"(\S+) at ([\d,]+)", figures)
        assert [int(size.replace(",", "")) for _, size in stated] == list(expected.sizes)
        assert all(float(figure) <= expected.bound for figure, _ in stated)


class Attended:
    """Observer: the queries and keys of the first row, to look at a decision again."""

    def __init__(self) -> None:
        self.queries: dict[int, list[torch.Tensor]] = {}
        self.keys: dict[int, list[torch.Tensor]] = {}

    def see(self, seen: Seen) -> None:
        self.queries.setdefault(seen.layer, []).append(seen.query[0].clone())
        self.keys.setdefault(seen.layer, []).append(seen.key[0].clone())
        self.scaling = seen.attention.scaling

    def gap(self, layer: int, step: int, evicted_at: torch.Tensor) -> float:
        """How far apart, relatively, the two lowest weights were that a step gave to what it could see [T]."""
        query, key = torch.cat(self.queries[layer], 1)[:, step].double(), torch.cat(self.keys[layer], 1).double()
        logits = torch.einsum("kgd,knd->kgn", query.view(len(key), -1, key.shape[2]), key).flatten(0, 1) * self.scaling
        column = torch.arange(evicted_at.shape[0])
        weights = logits.masked_fill((evicted_at < step) | (column > step), float("-inf")).softmax(-1).mean(0)
        lowest, second = weights[(evicted_at >= step) & (column < step)].sort().values[:2].tolist()
        return (second - lowest) / lowest


def outcome(
    model, ids: torch.Tensor, other: torch.Tensor, how: str, observer: Attended | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [T - 1] and what was dropped when [layers, T] of a text [1, T], run in one of a few ways."""
    word, _, number = how.partition(" ")
    options = {word: int(number) if word == "chunk" else number} if word in ("chunk", "scan") else {}
    observers = [] if observer is None else [observer]
    cache = EvictingCache(policies.make("tova", budget=ids.shape[1] // 16), observers=observers, **options)
    if word == "threads":
        torch.set_num_threads(int(number))
    if word == "neighbours":
        return token_nll(model, torch.cat([ids, other]), cache)[0], cache.evicted_at[:, 0]
    if word == "together":
        beside = EvictingCache(policies.make("h2o_half", budget=ids.shape[1] // 32))
        return token_nll(model, ids.expand(2, -1), SideBySide([cache, beside]))[0], cache.evicted_at[:, 0]
    nll = token_nll(model, ids, cache, segment=int(number) if word == "pieces" else 0)
    return nll[0], cache.evicted_at[:, 0]


WAYS = (
    "chunk 32", "chunk 64", "chunk 512", "threads 1", "threads 2", "pieces 300", "neighbours", "together",
    "scan reference",
)  # fmt: skip


@pytest.mark.parametrize("how", ["alone", *WAYS])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_the_same_call_gives_the_same_bits(name: str, how: str) -> None:
    """Whatever the way, as long as it is the same way; between ways the bound that the page states."""
    model, texts = tiny(name), tokens(2, 250)
    expected = outcome(model, texts[:1], texts[1:], "alone")
    usual = torch.get_num_threads()
    try:
        found = outcome(model, texts[:1], texts[1:], how)
        again = outcome(model, texts[:1], texts[1:], how)
    finally:
        torch.set_num_threads(usual)
    assert torch.equal(found[0], again[0])
    assert torch.equal(found[1], again[1])
    assert torch.equal(found[1], expected[1])
    assert (found[0] - expected[0]).abs().max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("title", ["alice29", "asyoulik"])
def test_what_is_promised_on_a_real_model(smollm2, books, title: str) -> None:
    """Bits for the same call. For others decisions alike up to a near-tie, and losses within the bound of the page."""
    ids = {name: torch.tensor([smollm2.tokenizer(books[name][:32_768])["input_ids"][:2048]]) for name in books}
    text, other = ids[title], ids["lcet10"]
    attended = Attended()
    expected, evicted_at = outcome(smollm2.model, text, other, "threads 2", attended)
    again = outcome(smollm2.model, text, other, "threads 2")
    assert torch.equal(expected, again[0])
    assert torch.equal(evicted_at, again[1])
    for how in WAYS:
        torch.set_num_threads(2)
        losses, theirs = outcome(smollm2.model, text, other, how)
        differ = evicted_at != theirs
        when = torch.minimum(evicted_at, theirs).masked_fill(~differ, text.shape[1])
        step, layer = min((int(row.min()), layer) for layer, row in enumerate(when))
        off = losses.double() - expected.double()
        print(f"{title}, {how}: {int(differ.sum())} decisions, {off.abs().max():.0e} a token, {off.mean():.0e} in all")
        assert off[:step].abs().max() < 2e-4
        if differ.any():
            assert attended.gap(layer, step, evicted_at[layer]) < 1e-5
        else:
            assert abs(off.mean()) < 2e-6


def table() -> str:
    """The page's table, measured here and now."""
    lines = ["| sum | where | added up in | error against float64 | tested to stay under |", "|---|---|---|---|---|"]
    for name, one in SUMS.items():
        figures = ", ".join(f"{one.error(size):.0e} at {size:,}" for size in one.sizes)
        lines.append(f"| {name} | `{one.where}` | {one.kept_in} | {figures} | {one.bound:.0e} |")
    return "\n".join(lines)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(table())
