"""One more policy is one file: here is one with a ring, a feature and its own weight that no engine has heard of. It
runs through all of them, the kernels of a GPU in Triton's interpreter, against a loop that really evicts, on lists."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from tova.decode import cpu as compiled_step
from tova.layer import NEVER, Attention, LayerState
from tova.policies import Policy, Record, Ring
from tova.replay import replay
from tova.rules import why_not
from tova.scan import fixed_point, reference
from tova.scan import select as select_scan
from tova.simulation import simulate
from tova.trace import canonical_trace

TOKENS, HEADS, KV_HEADS, SIZE, BUDGET, WINDOW, RING = 30, 4, 2, 8, 8, 2, 5


@dataclass(frozen=True, kw_only=True)
class Mixed(Policy):
    """Ranks by the weights of the last few steps and a fading sum in which a token's own weight counts."""

    name = "mixed"
    recent_window: int = WINDOW
    fade: float = 0.7

    def records(self):
        return {"ring": Ring(RING, torch.float32), "sum": Record()}

    def observe(self, slots, attn):
        return {"ring": attn.float(), "sum": self.fade * slots["sum"] + attn}

    def admitted(self, self_weight):
        return {"sum": 2 * self_weight}

    def score(self, slots):
        return slots.ring_sum("ring") + slots["sum"]


@dataclass(frozen=True, kw_only=True)
class MixedByValue(Mixed):
    """The same times the size of the value."""

    name = "mixed_by_value"

    def features(self, tokens):
        return {"size": tokens.value.float().abs().sum(-1)}

    def score(self, slots):
        return super().score(slots) * slots.features["size"]


class Held:
    """One kept set, token by token, on plain numbers."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.weights: dict[int, list[float]] = {}
        self.sums: dict[int, float] = {}

    def step(self, token: int, weights: list[float], own: float | None, size: dict[int, float]) -> int | None:
        """The token that goes, if one does."""
        for t, w in zip(self.tokens, weights, strict=True):
            self.weights[t] = [*self.weights[t], w][-RING:]
            self.sums[t] = 0.7 * self.sums[t] + w
        self.tokens.append(token)
        self.weights[token], self.sums[token] = [], 0.0 if own is None else 2 * own
        if len(self.tokens) <= BUDGET:
            return None
        victim = min(self.tokens[:-WINDOW], key=lambda t: ((sum(self.weights[t]) + self.sums[t]) * size.get(t, 1.0), t))
        self.tokens.remove(victim)
        return victim


def expected(q: Tensor, k: Tensor, v: Tensor, sets: int, sized: bool) -> tuple[Tensor, Tensor]:
    """Eviction times [G, T] and outputs [H, T, D] of one sequence; entries that are dropped are gone."""
    evicted = torch.full((sets, TOKENS), NEVER)
    out = torch.zeros(HEADS, TOKENS, SIZE)
    for s in range(sets):
        held = Held()
        mine = slice(s * KV_HEADS // sets, (s + 1) * KV_HEADS // sets)
        size = {t: float(v[mine, t].abs().sum(-1).mean()) for t in range(TOKENS)} if sized else {}
        for t in range(TOKENS):
            seen = [*held.tokens, t]
            rows = []
            for h in range(s * HEADS // sets, (s + 1) * HEADS // sets):
                keys, values = (x[h * KV_HEADS // HEADS][seen] for x in (k, v))
                rows.append((keys @ q[h, t] * SIZE**-0.5).softmax(0))
                out[h, t] = rows[-1] @ values
            row = torch.stack(rows).mean(0).tolist()
            victim = held.step(t, row[:-1], row[-1], size)
            if victim is not None:
                evicted[s, victim] = t
    return evicted, out


ENGINES = {
    "reference": ("reference", [TOKENS]),
    "reference, token by token": ("reference", [3, *range(4, TOKENS + 1)]),
    "cpu": ("cpu", [TOKENS]),
    "cpu, token by token": ("cpu", [3, *range(4, TOKENS + 1)]),
    "fixed point": ("fixed_point", [TOKENS]),
    "gpu": ("gpu", [TOKENS]),
    "gpu, token by token": ("gpu", [22, *range(23, TOKENS + 1)]),
    "fixed point, gpu": ("rounds", [TOKENS]),
}


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("kind", [Mixed, MixedByValue])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_engine_decides_as_a_loop_that_really_evicts(engine: str, kind: type[Mixed], per_head: bool) -> None:
    name, cuts = ENGINES[engine]
    policy = kind(budget=BUDGET, per_head=per_head)
    assert why_not(policy) is None
    q, k, v = _layer()
    sets = KV_HEADS if per_head else 1
    if name in ("gpu", "rounds"):
        pytest.importorskip("triton")
        from tova.scan import gpu

        scan = gpu.SCAN if name == "gpu" else gpu.FIXED_POINT
        assert gpu.supports(policy, torch.float32)
        from tova.decode import gpu as tokens

        assert tokens.supports(policy, q, v, BUDGET + 1)
    else:
        scan = select_scan(name, policy, q.device, q.dtype)
        assert scan.name == name
        assert compiled_step.supports(policy, torch.float32)
    state = LayerState.empty(policy, k, v, sets, log=True)
    outs, begin = [], 0
    for end in cuts:
        new = (x[:, :, begin:end] for x in (q, k, v))
        outs.append(replay(*new, state, policy, Attention(SIZE**-0.5), scan=scan, chunk=16))
        begin = end
    assert state.log is not None
    for b in range(2):
        evicted, out = expected(q[b], k[b], v[b], sets, kind is MixedByValue)
        assert (evicted < TOKENS).sum() == sets * (TOKENS - BUDGET)
        assert torch.equal(state.log.view[b], evicted)
        assert (torch.cat(outs, 2)[b] - out).abs().max() < 1e-5


def test_a_trace_simulates_it_as_plain_numbers_do() -> None:
    trace = canonical_trace(tokens=300)
    held = Held()
    held.step(0, [], None, {})
    evicted = np.full(300, np.iinfo(np.int64).max)
    for t, row in trace:
        victim = held.step(t, row[held.tokens].astype(float).tolist(), None, {})
        if victim is not None:
            evicted[victim] = t
    for engine in ("stepwise", "compiled"):
        assert np.array_equal(simulate(Mixed(budget=BUDGET), trace, engine).evicted_at, evicted), engine


def test_the_engines_can_disagree_with_the_loop() -> None:
    """The comparison can fail: without its own weight, or another fade, it drops others."""

    class WithoutItsOwn(Mixed):
        def admitted(self, self_weight):
            return {}

    q, k, v = _layer()
    right, _ = expected(q[0], k[0], v[0], 1, sized=False)
    for policy in (WithoutItsOwn(budget=BUDGET), Mixed(budget=BUDGET, fade=0.2)):
        state = LayerState.empty(policy, k, v, 1, log=True)
        replay(q, k, v, state, policy, Attention(SIZE**-0.5), scan=reference.SCAN)
        assert state.log is not None
        assert not torch.equal(state.log.view[0], right)
    assert fixed_point.supports(Mixed(budget=BUDGET))


def _layer() -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(11)
    q = torch.randn(2, HEADS, TOKENS, SIZE, generator=g) * 1.5
    return q, *(torch.randn(2, KV_HEADS, TOKENS, SIZE, generator=g) for _ in range(2))
