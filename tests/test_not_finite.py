"""What is not finite: every engine does the same, the budget holds, and NaN stays where it is seen and nowhere else.

The judge is a loop over tokens on plain numbers. A step whose averaged weights are not all finite changes nothing but
that its token joins; a score that is NaN ranks nothing; where too few can be ranked the oldest that are no sinks go.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.layers import Window, qkv
from support.models import not_padding
from support.oracle import LAST, PER_HEAD, RINGS, Row, Rule, f32
from support.policies import options_of, small

from tova.decode import cpu as step
from tova.policies import Policy, Record
from tova.replay import NEVER, Attention, LayerState, replay
from tova.scan import cpu, fixed_point, reference
from tova.scan.select import has_triton

BATCH, HEADS, GROUPS, TOKENS, SIZE, BUDGET = 2, 4, 2, 44, 8, 9
NAN, INF = math.nan, math.inf
KERNELS = has_triton(torch.device("cpu"))


class Judge(Rule):
    """The oracle's rules, and what is said above."""

    def step(self, row: Row, position: int, weights: list[float], own: float) -> None:
        if all(map(math.isfinite, [*weights, own])):
            super().step(row, position, weights, own)
            if self.name in LAST and self.name != "tova_official" and position in row.memory:
                row.memory[position] = NAN
            return
        row.kept.append(position)
        rings = dict.fromkeys(RINGS, [0.0] * self.window) | {"scissorhands_paper": [0] * self.history}
        fresh = rings.get(self.name, NAN if self.name in LAST else 0.0)
        row.memory[position] = list(fresh) if isinstance(fresh, list) else fresh
        self.evict(row, position)

    def evict(self, row: Row, position: int) -> None:
        """As the oracle's, which is part of its step."""
        if len(row.kept) < self.budget + self.every:
            return
        remains = self.budget
        if self.name == "scissorhands_paper":
            remains = max(self.budget - int(0.5 * self.budget), self.sinks + self.recent)
        scores = self.scores(row)
        protected = set(row.kept[len(row.kept) - self.recent :]) | {p for p in row.kept if p < self.sinks}
        while len(row.kept) > remains:
            self.drop(row, position, scores, protected)

    def drop(self, row: Row, step: int, scores: dict[int, float], protected: set[int]) -> None:
        ranked = [p for p in row.kept if p not in protected and not math.isnan(scores[p])]
        if ranked:
            super().drop(row, step, scores, {p for p in row.kept if p not in ranked})
            return
        victim = next(p for p in row.kept if p >= self.sinks)
        row.kept.remove(victim)
        row.evicted_at[victim] = step

    def scores(self, row: Row) -> dict[int, float]:
        if self.name == "random":
            step = mixed((row.kept[-1] + mixed(0)) & 0xFFFFFFFF)
            return {p: float(mixed((p + step) & 0xFFFFFFFF)) for p in row.kept}
        if self.name == "tova_value":  # without numpy's warnings
            return {p: f32(row.memory[p]) * f32(row.norm[p]) for p in row.kept}
        return super().scores(row)


def mixed(z: int) -> int:
    """The finaliser of splitmix32."""
    z ^= z >> 16
    z = (z * 0x21F0AAAD) & 0xFFFFFFFF
    z ^= z >> 15
    z = (z * 0x735A2D97) & 0xFFFFFFFF
    return z ^ (z >> 15)


class Decay(Policy):
    """One of one's own."""

    name = "h2o"  # of a window of one, to the judge

    def records(self):
        return {"sum": Record()}

    def observe(self, slots, attn):
        return {"sum": slots["sum"] + attn}

    def score(self, slots):
        return slots["sum"]


POLICIES: dict[str, tuple[str, dict]] = {
    name: (name, options_of(name))
    for name in (
        "tova", "tova_head", "tova_official", "tova_value", "h2o", "h2o_head", "h2o_masked", "scissorhands",
        "scissorhands_paper", "snapkv", "window", "streaming_llm", "l2norm", "random", "full",
    )
} | {"tova, sinks": ("tova", dict(sinks=2, recent_window=3)), "own": ("own", dict(recent_window=1))}  # fmt: skip
"""Name -> policy and options; what is here the judge below knows."""

# where -> (which of query, key, value; batch row, heads, tokens; what). Row 1 is never touched.
WHERE = {
    "a query of one head": [("query", 2, 20, NAN)],
    "a key": [("key", 1, 20, NAN)],
    "infinity in a query": [("query", 0, 17, INF)],
    "minus infinity in a query": [("query", 3, 17, -INF)],
    "infinity in a key": [("key", 0, 25, INF)],
    "minus infinity in a key": [("key", 1, 25, -INF)],
    "a value": [("value", 0, 19, NAN)],
    "infinity in a value": [("value", 1, 19, -INF)],
    "two values, one dropped before the other comes": [("value", 0, 10, NAN), ("value", 1, 30, NAN)],
    "the first token": [("query", 0, 0, NAN), ("key", 0, 0, NAN), ("value", 0, 0, NAN)],
    "the first token's key": [("key", 1, 0, INF)],
    "while filling": [("query", 1, 5, NAN), ("key", 0, 6, NAN)],
    "the last token": [("key", 0, TOKENS - 1, NAN)],
    "every other query": [("query", 0, t, NAN) for t in range(0, TOKENS, 2)],
    "all of the text": [(what, h, t, NAN) for what in ("query", "key", "value") for h in (0, 1) for t in range(TOKENS)],
    "only values": [("value", h, t, NAN) for h in (0, 1) for t in range(TOKENS)],
}

# how -> the scan, the pieces a text is fed in, the length of chunks, threads
ENGINES = {
    "reference": ("reference", [TOKENS], 13, 1),
    "reference, token by token": ("reference", [1, *range(2, TOKENS + 1)], 13, 1),
    "cpu": ("cpu", [TOKENS], 13, 1),
    "cpu, in one chunk": ("cpu", [TOKENS], TOKENS, 1),
    "cpu, threads": ("cpu", [TOKENS], 13, 2),
    "cpu, token by token": ("cpu", [1, *range(2, TOKENS + 1)], 13, 1),
    "cpu, prompt and tokens": ("cpu", [16, *range(17, TOKENS + 1)], 11, 1),
    "cpu, tokens in two products": ("split", [16, *range(17, TOKENS + 1)], 11, 1),
    "fixed_point": ("fixed_point", [TOKENS], 13, 1),
    "fixed_point, one chunk, then tokens": ("fixed_point", [30, *range(31, TOKENS + 1)], TOKENS, 1),
}
if KERNELS:
    ENGINES = {
        "gpu": ("gpu", [TOKENS], 22, 1),
        "gpu, prompt and tokens": ("gpu", [16, *range(17, TOKENS + 1)], 16, 1),
        "gpu, fixed point": ("gpu fixed_point", [TOKENS], 22, 1),
    }
CLEAN: dict = {}
"""What the same text gives where all is finite, by policy, engine and case."""
# What else may be the case; with a few policies each.
CASES = {
    "padding": dict(padding=[0, 7]),
    "padding in front of what is not finite": dict(padding=[5, 0]),
    "interval": dict(every=4),
    "a layer's own window": dict(window=6),
    "everything": dict(padding=[3, 0], every=3, window=7),
    "sinks beside the softmax": dict(sinks=True),
}


def make(name: str) -> Policy:
    kind, chosen = POLICIES[name]
    if kind == "own":
        return Decay(budget=BUDGET)
    return small(kind, BUDGET, **chosen)


def numbers(where: str | None, seed: int = 5) -> dict[str, torch.Tensor]:
    parts = qkv(BATCH, (HEADS, GROUPS), TOKENS, SIZE, scales=(1.5, 1.5, 1), seed=seed)
    made = dict(zip(("query", "key", "value"), parts, strict=True))
    for what, head, token, number in WHERE[where] if where else ():
        made[what][0, head, token, 3] = number
    return made


def judged(name: str, made: dict[str, torch.Tensor], case: dict) -> tuple[torch.Tensor, torch.Tensor, list]:
    """Outputs, ``evicted_at`` int64 [B, G, T] and rows, by a loop that drops for real."""
    kind, chosen = POLICIES[name]
    kind = {"own": "h2o", "h2o_masked": "h2o_head", "full": "window"}.get(kind, kind)
    budget = 10**6 if name == "full" else BUDGET
    q, k, v = made["query"], made["key"], made["value"]
    sets = GROUPS if kind in PER_HEAD else 1
    share, queries = GROUPS // sets, HEADS // sets
    padding, window = case.get("padding", [0, 0]), case.get("window", TOKENS)
    beside = head_sinks() if case.get("sinks") else None
    out = torch.zeros(BATCH, HEADS, TOKENS, SIZE)
    log = torch.full((BATCH, sets, TOKENS), NEVER)
    rows = []
    for b in range(BATCH):
        log[b, :, : padding[b]] = -1
        for g in range(sets):
            rule, row = Judge(kind, budget, 0, 1, every=case.get("every", 1), **chosen), Row()
            heads = slice(g * queries, (g + 1) * queries)
            keys, values = k[b, g * share : (g + 1) * share], v[b, g * share : (g + 1) * share]
            for t in range(padding[b], TOKENS):
                position = t - padding[b]
                for p in [p for p in row.kept if p <= position - window]:
                    row.kept.remove(p)
                    row.evicted_at[p] = position - 1

                def softmax(of: list[int], t=t, keys=keys, heads=heads, b=b) -> torch.Tensor:
                    logits = torch.einsum("hd,hnd->hn", q[b, heads, t], keys[:, of].repeat_interleave(2, 0))
                    logits = logits * SIZE**-0.5
                    if beside is not None:
                        logits = torch.cat([logits, beside[heads, None]], 1)
                    return logits.softmax(-1)[:, : len(of)]

                columns = [padding[b] + p for p in row.kept] + [t]
                weights = softmax(columns)
                out[b, heads, t] = torch.einsum("hn,hnd->hd", weights, values[:, columns].repeat_interleave(2, 0))
                norms = keys[:, t].norm(dim=-1) if kind == "l2norm" else values[:, t].abs().sum(-1)
                row.norm[position] = float(norms.mean())
                average = weights.mean(0)
                if name == "h2o_masked":
                    every = list(range(padding[b], t + 1))
                    average = softmax(every).mean(0)
                    if average.isfinite().all():
                        average = average[[c - padding[b] for c in columns]]
                rule.step(row, position, average[: len(columns) - 1].tolist(), float(average[-1]))
                assert len(row.kept) < budget + case.get("every", 1)
            for position, at in row.evicted_at.items():
                log[b, g, padding[b] + position] = padding[b] + at
            rows.append((b, g, row))
    return out, log, rows


def head_sinks() -> torch.Tensor:
    return torch.randn(HEADS, generator=torch.Generator().manual_seed(8))


def run(name: str, engine: str, made: dict[str, torch.Tensor], case: dict, monkeypatch) -> tuple:
    """Outputs and ``evicted_at`` of one engine; None where it does not know the policy."""
    kind, cuts, chunk, threads = ENGINES[engine]
    policy = make(name)
    scan = {"reference": reference.SCAN, "cpu": cpu.SCAN, "split": cpu.SCAN, "fixed_point": fixed_point.SCAN}.get(kind)
    if kind == "split":
        monkeypatch.setattr(step, "_MANY", 0)
        monkeypatch.setattr(step, "_THREADS", 1)
    if kind.startswith("gpu"):
        from tova.scan import gpu

        scan = gpu.SCAN if kind == "gpu" else fixed_point.SCAN
        if kind == "gpu" and not gpu.supports(policy):
            return None
    if scan is cpu.SCAN and not cpu.supports(policy):
        return None
    if scan is fixed_point.SCAN and not fixed_point.supports(policy):
        return None
    q, k, v = (made[what].clone() for what in ("query", "key", "value"))
    state = LayerState.empty(policy, k, v, GROUPS if policy.per_head else 1, log=True)
    attention = Attention(SIZE**-0.5, None, head_sinks() if case.get("sinks") else None)
    real = not_padding(case.get("padding", [0, 0]), TOKENS)
    out, begin = [], 0
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for end in cuts:
            columns = real[:, begin:end]
            out.append(
                replay(
                    q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], state, policy, attention, scan=scan,
                    not_padding=None if bool(columns.all()) else columns, evict_every=case.get("every", 1), chunk=chunk,
                    visibility=Window(case["window"]) if "window" in case else None,
                )
            )  # fmt: skip
            held = state.slots.count
            if name not in ("full", "h2o_masked"):
                assert int(held.max()) < BUDGET + case.get("every", 1), (engine, end)
            begin = end
    finally:
        torch.set_num_threads(usual)
        monkeypatch.undo()
    return torch.cat(out, 2), state.log.view


def compare(name: str, where: str, case: dict, monkeypatch) -> None:
    made = numbers(where)
    expected, log, rows = judged(name, made, case)
    compared = 0
    for engine in ENGINES:
        found = run(name, engine, made, case, monkeypatch)
        if found is None:
            continue
        compared += 1
        out, evicted = found
        key = name, engine, str(case)
        if key not in CLEAN:
            CLEAN[key] = run(name, engine, numbers(None), case, monkeypatch)
        clean = CLEAN[key]
        assert torch.equal(out[1], clean[0][1]), f"{engine}: the neighbour's output changed"
        assert torch.equal(evicted[1], clean[1][1]), f"{engine}: the neighbour's decisions changed"
        if not torch.equal(evicted, log):
            for b, g, row in rows:
                wrong = evicted[b, g] != log[b, g]
                if wrong.any():
                    first = int(torch.minimum(evicted[b, g], log[b, g])[wrong].min()) - case.get("padding", [0, 0])[b]
                    assert row.near_tie.get(first, False), (engine, b, g, first, evicted[b, g], log[b, g])
            continue
        assert torch.equal(out.isfinite(), expected.isfinite()), f"{engine}: not finite elsewhere"
        torch.testing.assert_close(out.nan_to_num(0, 0, 0), expected.nan_to_num(0, 0, 0), rtol=1e-4, atol=1e-4)
    assert compared


FEW = ("a query of one head", "a key", "a value", "the first token")


@pytest.mark.parametrize(
    ("name", "where"),
    [(n, w) for n in POLICIES for w in WHERE if w in FEW or n in ("tova", "tova_value", "h2o_head", "snapkv", "full")]
    + [("tova_head", "infinity in a key"), ("h2o", "while filling"), ("h2o_head", "minus infinity in a query")],
)
def test_every_engine_does_as_the_judge(name: str, where: str, monkeypatch) -> None:
    compare(name, where, {}, monkeypatch)


@pytest.mark.parametrize("where", ["a query of one head", "a key", "a value"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["tova_value", "h2o_head", "snapkv", "scissorhands_paper", "streaming_llm"])
def test_whatever_else_is_the_case(name: str, case: str, where: str, monkeypatch) -> None:
    if name == "scissorhands_paper" and "every" in CASES[case]:
        pytest.skip("drops many at once already")
    compare(name, where, CASES[case], monkeypatch)


def test_what_was_dropped_may_weigh_more_than_a_float_holds(monkeypatch) -> None:
    """All is finite; a dropped position whose logit is 88.4 to 89.1 above what is held once made infinity times 0."""
    for gap in (88.0, 88.5, 89.0, 90.0, 200.0):
        made = numbers(None)
        made["query"] = torch.zeros_like(made["query"])
        made["key"] = torch.zeros_like(made["key"])
        made["query"][..., 0] = SIZE**0.5
        made["key"][0, :, 0, 0] = gap
        expected, log, _ = judged("window", made, dict(every=2))
        for engine in ENGINES:
            out, evicted = run("window", engine, made, dict(every=2), monkeypatch)
            assert torch.equal(evicted, log)
            torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4, msg=f"{engine}, {gap}")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(KERNELS, reason="this is the process it starts")
def test_kernels_do_as_the_judge() -> None:
    """In Triton's interpreter, which has to be chosen before Triton is imported."""
    here = Path(__file__).resolve()
    chosen = [
        f"{here}::test_every_engine_does_as_the_judge[{name}-{where}]"
        for name, where in (
            ("tova, sinks", "a key"), ("tova_head", "infinity in a key"), ("tova_official", "the first token"),
            ("tova_value", "a value"), ("h2o", "while filling"), ("scissorhands", "a key"),
            ("snapkv", "every other query"), ("l2norm", "a key"), ("tova", "all of the text"),
        )
    ] + [
        f"{here}::test_whatever_else_is_the_case[{name}-{case}-{where}]"
        for name, case, where in (
            ("snapkv", "everything", "a key"), ("h2o_head", "sinks beside the softmax", "a query of one head"),
            ("tova_value", "padding in front of what is not finite", "a value"),
        )
    ]  # fmt: skip
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([*sys.path, str(here.parent)])}
    found = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", *chosen], env=environment, capture_output=True, text=True
    )
    assert found.returncode == 0, found.stdout[-4000:]
    assert f"{len(chosen)} passed" in found.stdout
