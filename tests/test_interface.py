"""What a policy may see and decide beyond a row of averaged weights, against a loop that really evicts, one token at a
time, on plain lists: weights combined otherwise, features that are vectors, the keys held, budgets that heads share,
thresholds and lifetimes. See docs/policies.md."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tova import policies
from tova.check import check
from tova.errors import UsageError
from tova.layer import NEVER, Attention, LayerState
from tova.policies import Policy, Record, Tova
from tova.replay import replay
from tova.scan import select
from tova.simulation import simulate
from tova.trace import canonical_trace

TOKENS, HEADS, KV_HEADS, SIZE = 60, 4, 2, 8


@dataclass(frozen=True, kw_only=True)
class MaxOverHeads(Tova):
    """Ranks by the largest weight that any head gave."""

    name = "max_over_heads"

    def combine(self, heads):
        return heads.weights.amax(1)


@dataclass(frozen=True, kw_only=True)
class MeanLogit(Tova):
    """Ranks by the mean over heads of the logits, taken back from weights and their sums."""

    name = "mean_logit"

    def combine(self, heads):
        return (heads.weights.log() + heads.logsumexp).mean(1)


@dataclass(frozen=True, kw_only=True)
class UnlikeTheMean(Policy):
    """Drops the key most like the mean of the keys held (Park et al., KeyDiff, arXiv 2504.15364), from a feature."""

    name = "unlike_the_mean"
    reads_attention = False

    def features(self, tokens):
        return {"key": tokens.key}

    def keys(self, slots) -> Tensor:
        return slots.features["key"]

    def score(self, slots):
        keys = self.keys(slots)
        mean = keys.masked_fill(~slots.held.unsqueeze(-1), 0.0).sum(1, keepdim=True) / slots.count.unsqueeze(-1)
        return -torch.nn.functional.cosine_similarity(keys, mean, dim=-1)


@dataclass(frozen=True, kw_only=True)
class UnlikeTheMeanOfHeld(UnlikeTheMean):
    """The same by looking at the keys that the layer holds."""

    name = "unlike_the_mean_of_held"
    features = Policy.features

    def keys(self, slots) -> Tensor:
        return slots.keys.view(len(slots.held), -1, *slots.keys.shape[2:]).mean(1)


@dataclass(frozen=True, kw_only=True)
class SharedByHeads(Tova):
    """The heads of a layer share ``kept_sets * budget`` positions: what is lowest in any head goes (after Ada-KV)."""

    name = "shared_by_heads"
    per_head: bool = True

    def excess(self, slots, schedule):
        sets, size = slots.kept_sets, slots.held.shape[1]
        score = self.score(slots).masked_fill(~slots.held | self.protected(slots), float("inf"))
        rank = score.view(-1, sets * size).argsort(dim=-1, stable=True).argsort(dim=-1)
        count = slots.count.view(-1, sets).sum(1, keepdim=True)
        return (rank < count - sets * self.layer_budget).view(-1, size).sum(-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class BelowThreshold(Tova):
    """Drops whatever was given less than a share of its fair weight, however many that are."""

    name = "below_threshold"
    share: float = 0.3

    def low(self, slots):
        return slots["weight"] * slots.count < self.share

    def excess(self, slots, schedule):
        return (slots.held & ~self.protected(slots) & self.low(slots)).sum(-1, keepdim=True)


@dataclass(frozen=True, kw_only=True)
class Lifetime(Policy):
    """Drops a token so many steps after its own, every third one later."""

    name = "lifetime"
    reads_attention = False
    life: int = 9

    def score(self, slots):
        return self.until(slots) - slots.newest

    def until(self, slots):
        return slots.positions + self.life + (slots.positions % 3 == 0) * 4

    def excess(self, slots, schedule):
        return (slots.held & (self.until(slots) <= slots.newest)).sum(-1, keepdim=True)


def naive(kind: str, q: Tensor, k: Tensor, v: Tensor, budget: int, sets: int) -> tuple[Tensor, Tensor]:
    """Eviction times int64 [G, T] and outputs [H, T, D] of one sequence: lists of what each kept set holds."""
    held: list[list[int]] = [[] for _ in range(sets)]
    out = torch.zeros(HEADS, TOKENS, SIZE)
    evicted = torch.full((sets, TOKENS), NEVER)
    for t in range(TOKENS):
        ranked: list[list[float]] = []
        for s in range(sets):
            held[s].append(t)
            rows, logits = [], []
            for h in range(s * HEADS // sets, (s + 1) * HEADS // sets):
                keys, values = (x[h * KV_HEADS // HEADS][held[s]] for x in (k, v))
                logits.append(keys @ q[h, t] * SIZE**-0.5)
                rows.append(logits[-1].softmax(0))
                out[h, t] = rows[-1] @ values
            row = torch.stack(rows)
            if kind == "mean_logit":
                score = torch.stack(logits).mean(0)
            elif kind == "max_over_heads":
                score = row.amax(0)
            elif kind == "keys":
                mine = slice(s * KV_HEADS // sets, (s + 1) * KV_HEADS // sets)
                keys = k[mine, held[s]].mean(0)
                score = -torch.cosine_similarity(keys, keys.mean(0, keepdim=True), dim=1)
            else:
                score = row.mean(0)
            ranked.append(score[:-1].tolist())
        going: list[tuple[int, int]] = []
        if kind == "shared":
            order = sorted((x, s, j) for s in range(sets) for j, x in enumerate(ranked[s]))
            going = [(s, j) for _, s, j in order[: max(0, sum(map(len, held)) - sets * budget)]]
        for s in range(sets):
            if kind == "threshold":
                going += [(s, j) for j, x in enumerate(ranked[s]) if x * len(held[s]) < 0.3]
            elif kind == "lifetime":
                going += [(s, j) for j, p in enumerate(held[s]) if p + 9 + 4 * (p % 3 == 0) <= t]
            elif kind != "shared" and len(held[s]) > budget:
                going += [(s, min(range(len(ranked[s])), key=lambda j, s=s: ranked[s][j]))]
        for s, j in sorted(going, reverse=True):
            evicted[s, held[s].pop(j)] = t
    return evicted, out


CASES = {
    "max_over_heads": (MaxOverHeads(budget=12), "max_over_heads"),
    "max_over_heads per head": (MaxOverHeads(budget=12, per_head=True), "max_over_heads"),
    "mean_logit": (MeanLogit(budget=12), "mean_logit"),
    "a feature that is a vector": (UnlikeTheMean(budget=12), "keys"),
    "a feature per head": (UnlikeTheMean(budget=12, per_head=True), "keys"),
    "the keys held": (UnlikeTheMeanOfHeld(budget=12), "keys"),
    "the keys held per head": (UnlikeTheMeanOfHeld(budget=12, per_head=True), "keys"),
    "a budget shared by heads": (SharedByHeads(budget=12), "shared"),
    "a threshold": (BelowThreshold(budget=40), "threshold"),
    "a threshold per head": (BelowThreshold(budget=40, per_head=True), "threshold"),
    "a lifetime": (Lifetime(budget=20), "lifetime"),
}


@pytest.mark.parametrize("scan", ["auto", "reference", "fixed_point"])
@pytest.mark.parametrize("case", CASES)
def test_policies_of_many_kinds_decide_as_a_loop_that_really_evicts(case: str, scan: str) -> None:
    policy, kind = CASES[case]
    sets = KV_HEADS if policy.per_head else 1
    g = torch.Generator().manual_seed(7)
    q = torch.randn(2, HEADS, TOKENS, SIZE, generator=g) * 1.5
    k, v = (torch.randn(2, KV_HEADS, TOKENS, SIZE, generator=g) for _ in range(2))
    expected = [naive(kind, q[b], k[b], v[b], policy.budget, sets) for b in range(2)]
    assert len({int(e) for evicted, _ in expected for e in evicted.flatten()}) > 20  # much is dropped, not all at once
    for cuts, chunk in (([TOKENS], TOKENS), ([TOKENS], 7), ([5, *range(6, TOKENS + 1)], 7)):
        state = LayerState.empty(policy, k, v, sets, log=True)
        outs, begin = [], 0
        for end in cuts:
            new = (x[:, :, begin:end] for x in (q, k, v))
            chosen = select(scan, policy, q.device, q.dtype)
            outs.append(replay(*new, state, policy, Attention(SIZE**-0.5), scan=chosen, chunk=chunk))
            begin = end
        assert state.log is not None
        assert torch.equal(state.log.view, torch.stack([evicted for evicted, _ in expected])), (cuts[0], chunk)
        assert (torch.cat(outs, 2) - torch.stack([out for _, out in expected])).abs().max() < 1e-5


def test_a_prompt_read_at_once_is_shared_by_heads_too() -> None:
    """Budgets that heads share are mostly for the end of a prompt: what is lowest in any head goes, in all together."""
    policy = SharedByHeads(budget=12)
    g = torch.Generator().manual_seed(3)
    q = torch.randn(1, HEADS, TOKENS, SIZE, generator=g)
    q[:, :2] *= 6.0
    k, v = (torch.randn(1, KV_HEADS, TOKENS, SIZE, generator=g) for _ in range(2))
    state = LayerState.empty(policy, k, v, KV_HEADS, log=True)
    scan = select("auto", policy, q.device, q.dtype)
    replay(q, k, v, state, policy, Attention(SIZE**-0.5), scan=scan, one_shot=True)
    logits = (q[0, :, -1:].view(KV_HEADS, 2, SIZE) @ k[0].transpose(1, 2)) * SIZE**-0.5
    weights = logits.softmax(-1).mean(1)[:, :-1]  # the newest has nothing to be ranked by
    going = sorted((w, s, j) for s, row in enumerate(weights.tolist()) for j, w in enumerate(row))
    expected = torch.full((KV_HEADS, TOKENS), NEVER)
    for _, s, j in going[: KV_HEADS * (TOKENS - 12)]:
        expected[s, j] = TOKENS - 1
    assert state.log is not None
    assert torch.equal(state.log.view[0], expected)
    assert len(set(state.slots.count[:, 0].tolist())) == KV_HEADS


@pytest.mark.parametrize("policy", [Lifetime(budget=20), BelowThreshold(budget=40)])
def test_how_many_go_is_not_asked_on_a_trace_so_it_is_refused(policy: Policy) -> None:
    """Simulated down to the budget it would be another policy."""
    for engine in ("auto", "stepwise"):
        with pytest.raises(UsageError, match=rf"{policy.name} says itself how many go \(excess\)"):
            simulate(policy, canonical_trace(tokens=100), engine)
    assert any("decid" in sentence for sentence in check(policy))


def test_what_is_no_policy_may_say_its_budget_by_the_name_of_old() -> None:
    """Anything with ``start()`` can be simulated; the name of old was documented for it."""
    made = policies.make("tova", budget=30)
    other = SimpleNamespace(name="other", budget=90, effective_budget=30, start=made.start)
    trace = canonical_trace(tokens=100)
    assert simulate(other, trace).budget == 30
    assert (simulate(other, trace).evicted_at == simulate(made, trace).evicted_at).all()


def test_rows_that_hold_different_numbers_take_no_more_room_than_they_need() -> None:
    """Heads share 24 positions; what the slots of a layer can hold follows the head that holds most."""
    policy = SharedByHeads(budget=12)
    g = torch.Generator().manual_seed(1)
    q = torch.randn(1, HEADS, TOKENS, SIZE, generator=g)
    q[:, :2] *= 6.0  # the first head's weights are few and high
    k, v = (torch.randn(1, KV_HEADS, TOKENS, SIZE, generator=g) for _ in range(2))
    state = LayerState.empty(policy, k, v, KV_HEADS, log=True)
    scan = select("auto", policy, q.device, q.dtype)
    replay(q, k, v, state, policy, Attention(SIZE**-0.5), scan=scan, chunk=16)
    count = state.slots.count[:, 0].tolist()
    assert sum(count) == 24
    assert count[0] != count[1]
    assert state.keys.shape[2] == max(count)


def test_old_names_of_a_policy_still_work_for_one_release() -> None:
    policy = policies.make("pyramidkv", budget=512).for_layer(0, 32)
    with pytest.warns(DeprecationWarning, match="effective_budget is called layer_budget now"):
        assert policy.effective_budget == policy.layer_budget == 819
    with pytest.warns(DeprecationWarning, match="evicts_to"):
        assert policy.keeps(100) == policy.evicts_to(100) == 100
    with pytest.warns(DeprecationWarning, match="keeps_of_prompt"):
        assert policies.make("pyramidkv_prefill", budget=512, recent_window=8).for_layer(0, 32).remains(10_000) == 991


def test_overriding_an_old_name_does_what_it_did_and_says_the_new_one() -> None:
    with pytest.warns(DeprecationWarning, match=r"Bursts.keeps is called evicts_to"):

        @dataclass(frozen=True, kw_only=True)
        class Bursts(Tova):
            name = "bursts"

            def keeps(self, asked):
                return asked - 3

    assert Bursts(budget=10).schedule().leaves == 7
    with pytest.warns(DeprecationWarning, match="remains"):

        @dataclass(frozen=True, kw_only=True)
        class Half(Tova):
            name = "half"

            def remains(self, seen):
                return 10 if seen == 0 else seen // 2

    assert Half(budget=10).schedule().leaves == 10
    assert Half(budget=10).keeps_of_prompt(30, 30) == 15
    with pytest.warns(DeprecationWarning, match="rounds_weights"):

        @dataclass(frozen=True, kw_only=True)
        class Rounding(Tova):
            name = "rounding"
            rounds_weights = True

    weights = torch.rand(1, 2, 5)
    heads = policies.HeadWeights(weights, weights.log(), None, torch.bfloat16)
    assert torch.equal(Rounding().combine(heads), weights.bfloat16().mean(1).float())


def test_names_of_today_warn_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")

        @dataclass(frozen=True, kw_only=True)
        class Plain(Policy):
            name = "plain"

            def records(self):
                return {"sum": Record()}

            def score(self, slots):
                return slots["sum"]

        assert Plain(budget=4).schedule(3).evict_at == 7


def test_replay_takes_its_old_arguments_and_no_others() -> None:
    policy = policies.make("window", budget=4)
    x = torch.randn(1, 2, 9, 4)
    both = []
    for arguments in ({"every": 3}, {"evict_every": 3}):
        state = LayerState.empty(policy, x, x, 1, log=True)
        scan = select("auto", policy, x.device, x.dtype)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            replay(x, x, x, state, policy, Attention(0.5), scan=scan, **arguments)
        assert [str(w.message) for w in caught] == (
            ["replay(every=) is called evict_every now; the old name goes with the next release"]
            if "every" in arguments
            else []
        )
        assert state.log is not None
        both.append(state.log.view)
    assert torch.equal(*both)
    with pytest.raises(TypeError, match="nonsense"):
        replay(x, x, x, state, policy, Attention(0.5), scan=scan, nonsense=1)
