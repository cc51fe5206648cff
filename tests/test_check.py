"""The contract's checks: every built-in policy passes them, and each kind of mistake is caught."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from support.layers import qkv
from support.policies import EVICTING

from tova import UsageError, policies
from tova.check import ContractError, check, engines, main
from tova.kernels import compile
from tova.policies import Policy, Record, contract
from tova.replay import Attention, LayerState, replay
from tova.scan import fixed_point, reference
from tova.simulation import simulate
from tova.trace import canonical_trace


@pytest.mark.parametrize("name", EVICTING)
def test_built_in_policies_keep_it(name: str) -> None:
    assert len(check(policies.make(name, budget=40))) >= 2


@dataclass(frozen=True, kw_only=True)
class Good(Policy):
    name = "good"

    def records(self):
        return {"sum": Record()}

    def observe(self, slots, attn):
        return {"sum": slots["sum"] + attn}

    def score(self, slots):
        return slots["sum"]


class ChangesInPlace(Good):
    def observe(self, slots, attn):
        return {"sum": slots["sum"].add_(attn)}


class WrongName(Good):
    def observe(self, slots, attn):
        return {"total": attn}


class WrongShape(Good):
    def score(self, slots):
        return slots["sum"].mean(-1)


class NoBools(Good):
    def protected(self, slots):
        return super().protected(slots).float()


class DropsTheNewest(Good):
    def protected(self, slots):
        return torch.zeros_like(slots.held)

    def score(self, slots):
        return -slots.positions.double()


class Random(Good):
    def score(self, slots):
        return torch.rand(slots.held.shape)


class GoesBySlot(Good):
    """Takes slots for positions: right while they are in order."""

    def score(self, slots):
        return torch.arange(slots.held.shape[-1]).double().expand(slots.held.shape) % 5


class LooksAtEmptySlots(Good):
    def score(self, slots):
        return (slots["sum"] - slots["sum"].mean(-1, keepdim=True)).abs()


class LooksAcrossRows(Good):
    def score(self, slots):
        return slots["sum"] * (slots["sum"].sum() * 100).sin() * slots.positions.double().cos()


class Nameless(Good):
    name = ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (ChangesInPlace, "sum was changed in place"),
        (WrongName, "observe returned 'total', which records"),
        (WrongShape, r"score must return \[rows, slots\]"),
        (NoBools, r"protected must return bool \[rows, slots\]"),
        (DropsTheNewest, "step 20: dropped the newest token"),
        (Random, "not deterministic"),
        (GoesBySlot, "decides otherwise token by token than in one piece|decides otherwise in chunks"),
        (LooksAtEmptySlots, "decides otherwise"),
        (LooksAcrossRows, "decides otherwise"),
        (Nameless, "has no name"),
    ],
)
def test_mistakes_are_named(wrong: type[Policy], says: str) -> None:
    assert check(Good(budget=20))
    with pytest.raises(ContractError, match=says):
        check(wrong(budget=20))


class NaNScores(Good):
    def score(self, slots):
        return slots["sum"].masked_fill(slots.positions == 17, float("nan"))


class ProtectsAll(Good):
    def protected(self, slots):
        return torch.ones_like(slots.held)


class ScorePerRow(Good):
    def score(self, slots):
        return slots["sum"].sum(-1)


class ScorePerSlot(Good):
    def score(self, slots):
        return slots["sum"][0]


class ScoreIsBool(Good):
    def score(self, slots):
        return slots["sum"] > 0


class NoScore(Policy):
    name = "noscore"


class Raises(Good):
    def observe(self, slots, attn):
        return {"sum": slots["total"]}


class ReturnsNothing(Good):
    def observe(self, slots, attn):
        slots.records["sum"] = slots["sum"] + attn


class FloatsForBools(Good):
    def records(self):
        return {"sum": Record(dtype=torch.bool)}

    def observe(self, slots, attn):
        return {"sum": attn}


class ScoreInPlace(Good):
    def score(self, slots):
        return slots["sum"].mul_(0.5)


class OwnWeightTwice(Good):
    def admitted(self, own):
        return {"sum": own.repeat(1, 2)}


class SumsKeys(Good):
    def features(self, tokens):
        return {"key": tokens.key.sum(-1).mean(1)}


class BadSubclass(policies.Tova):
    def score(self, slots):
        return slots["weight"].mean(-1)


MISBEHAVING = {
    NaNScores: "good: score returned NaN for position 17 at step (1[789]|20); what cannot be ranked must be protected",
    ProtectsAll: "good: protected leaves 0 of 21 positions to choose from at step 20|good: 21 positions are",
    ScorePerRow: r"good: score must return \[rows, slots\] = .* got float(32|64) \[[12]\] at step",
    ScorePerSlot: r"good: score must return \[rows, slots\] = .* got float(32|64) \[\d+\] at step",
    ScoreIsBool: "good: score must return .*, of floats or integers, got bool",
    NoScore: "noscore: score is not implemented, and is needed at step",
    Raises: "good: observe failed at step [01389]: KeyError: 'total'",
    ReturnsNothing: "good: sum was changed in place by observe at step",
    FloatsForBools: r"good: observe returned 'sum' as float(32|64) .*, its record is bool",
    ScoreInPlace: "good: sum was changed in place by score at step",
    BadSubclass: "tova: score must return",
}
OF_KEYS = {SumsKeys: "good: features returned 'key', which must be .rows, heads, tokens. = "}
OF_OWN_WEIGHT = {OwnWeightTwice: "good: admitted returned 'sum' as float32"}


def replayed(policy: Policy, scan, cuts: list[int], chunk: int = 16) -> LayerState:
    q, k, v = qkv(tokens=cuts[-1], seed=1)
    state = LayerState.empty(policy, k, v, 1, log=True)
    begin = 0
    for end in cuts:
        replay(
            q[:, :, begin:end], k[:, :, begin:end], v[:, :, begin:end], state, policy, Attention(8**-0.5), scan=scan,
            chunk=chunk,
        )  # fmt: skip
        begin = end
    return state


@pytest.mark.parametrize("wrong", [*MISBEHAVING, *OF_KEYS, *OF_OWN_WEIGHT])
def test_a_policy_of_ones_own_is_watched_at_first(wrong: type[Policy]) -> None:
    """In a text, in chunks, token by token, by either scan that can run it, in a simulation and in the check."""
    says = (MISBEHAVING | OF_KEYS | OF_OWN_WEIGHT)[wrong]
    policy = wrong(budget=20)
    for scan in (reference.SCAN, fixed_point.SCAN):
        for cuts in ([64], [1, *range(2, 65)], [8, *range(9, 65)]):
            with pytest.raises(UsageError, match=says):
                replayed(policy, scan, cuts)
    with pytest.raises(UsageError, match=says):
        check(policy)
    if wrong in MISBEHAVING:
        with pytest.raises(UsageError, match=says):
            simulate(policy, canonical_trace(tokens=64))


def test_what_went_wrong_inside_is_the_cause() -> None:
    with pytest.raises(UsageError) as caught:
        replayed(Raises(budget=20), reference.SCAN, [64])
    assert isinstance(caught.value.__cause__, KeyError)


def test_nothing_is_watched_after_the_first_eviction(monkeypatch) -> None:
    """Neither a built-in policy ever, nor one of one's own where it has been seen at work."""
    watched = []
    usual = contract.watched
    monkeypatch.setattr(contract, "watched", lambda policy, first=0: watched.append(policy) or usual(policy, first))
    replayed(policies.Tova(budget=40), reference.SCAN, [128, *range(129, 150)])
    assert watched == []
    replayed(Good(budget=40), reference.SCAN, [128])
    assert len(watched) == 2  # of eight chunks: the first, and that with the first eviction
    replayed(Good(budget=40), reference.SCAN, [20, *range(21, 100)])
    assert len(watched) == 2 + 1 + 1 + 1  # the first chunk, then of the tokens the first, and the first that drops one


def test_a_score_may_be_of_integers() -> None:
    class Integers(Good):
        def score(self, slots):
            return slots.positions

    class Floats(Good):
        def score(self, slots):
            return slots.positions.double()

    a, b = (replayed(kind(budget=20), reference.SCAN, [64, 65, 66]) for kind in (Integers, Floats))
    assert torch.equal(a.log.view, b.log.view)
    assert check(Integers(budget=20))


def test_unknown_steps_excuse_nothing_to_rank_by() -> None:
    """A policy that says NaN where nothing was observed is right to."""

    class Last(Good):
        def records(self):
            return {"sum": Record(fill=float("nan"))}

        def observe(self, slots, attn):
            return {"sum": attn}

    running = Last(budget=3).start()
    for step in range(1, 4):
        running.on_decode_step(step, None)
    assert running.evict(3) == [0]  # nothing is known of any: the oldest
    running.on_decode_step(4, [0.5, float("nan"), 0.5])  # which is as None
    assert running.evict(3) == [1]


@pytest.mark.parametrize("value", [2**63, 10**30, 2**62 + 1, -(2**63), 0, True, 64.0, "64", None, float("nan")])
def test_a_budget_is_an_integer_that_can_be_reckoned_with(value) -> None:
    with pytest.raises(UsageError, match=r"^tova: budget must be") as caught:
        policies.make("tova", budget=value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("snapkv", dict(obs_window=2**40)), ("snapkv", dict(pool_kernel=2**63 + 1)),
        ("scissorhands_paper", dict(history=2**62)), ("scissorhands_paper", dict(drop_share="half")),
        ("snapkv_prefill", dict(budget=2**62, recent_window=2**61)), ("random", dict(seed=2**65)),
        ("pyramidkv", dict(pyramid_ratio=2**63)), ("pyramidkv_prefill", dict(beta=2**64)),
        ("tova", dict(layer_budgets=[2**63])), ("tova", dict(layer_budgets="linear:" + "9" * 5000)),
        ("tova", dict(layer_budgets=7)), ("tova", dict(num_layers=2**63)),
    ],
)  # fmt: skip
def test_so_is_every_other_integer(name: str, parameters: dict) -> None:
    with pytest.raises(UsageError, match=f"^{name}: {list(parameters)[-1]} must "):
        policies.make(name, **parameters)


@pytest.mark.parametrize("kind", ["tova", "h2o", "snapkv", "window", "scissorhands_paper"])
def test_the_largest_budget_is_one(kind: str) -> None:
    """Sums of budgets, intervals and shares stay within 64 bits, in every engine."""
    most = 2**62
    policy = policies.make(kind, budget=most, layer_budgets="linear:3", num_layers=4)
    assert policy.layer_budget == most
    from tova.scan import cpu

    scans = [reference.SCAN, fixed_point.SCAN] + ([cpu.SCAN] if cpu.supports(policy) else [])
    for scan in scans:
        for every in (1, most):
            generator = torch.Generator().manual_seed(1)
            q = torch.randn(1, 2, 12, 8, generator=generator)
            state = LayerState.empty(policy, q, q, 2 if policy.per_head else 1, log=True)
            for begin, end in ((0, 10), (10, 11), (11, 12)):
                part = q[:, :, begin:end]
                replay(part, part, part, state, policy, Attention(8**-0.5), scan=scan, evict_every=every)
            assert (state.log.view == torch.iinfo(torch.int64).max).all()
    if kind != "scissorhands_paper":
        for engine in ("stepwise", "compiled"):
            assert simulate(policy, canonical_trace(tokens=40), engine).retained_mass == pytest.approx(1)


def test_numbers_of_numpy_and_torch_are_integers() -> None:
    import numpy as np

    for value in (np.int64(9), np.uint8(9), torch.tensor(9)):
        assert policies.make("tova", budget=value) == policies.make("tova", budget=9)
    for value in (np.bool_(True), torch.tensor(True), np.float64(9), torch.tensor([9])):
        with pytest.raises(UsageError, match="budget must be an integer"):
            policies.make("tova", budget=value)


def test_from_the_command_line(capsys) -> None:
    assert main(["tova.policies.Tova", "budget=20", "sinks=2"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("ok  ") == 5
    assert shown.splitlines()[-1] == "    compiled: replay, decoded tokens, simulation"
    assert main(["tova.policies.Tova", "budget=0"]) == 2
    assert "budget must be at least 1" in capsys.readouterr().err
    assert main(["nowhere.Mine"]) == 2
    assert "nowhere.Mine: cannot be imported" in capsys.readouterr().err
    assert main(["tova.policies.make"]) == 2
    assert "is not a subclass" in capsys.readouterr().err
    assert main(["tova.policies.Tova", "colour=3"]) == 2
    assert "colour" in capsys.readouterr().err


class Branches(Good):
    def score(self, slots):
        return slots["sum"] if slots.count > 9 else -slots["sum"]


class LargestOverHeads(Good):
    def combine(self, heads):
        return heads.weights.amax(1)


@pytest.mark.skipif(not compile.available(), reason="needs numba")
def test_which_engines_run_it_and_why_others_do_not() -> None:
    everything = ["compiled: replay, decoded tokens, simulation"]
    assert engines(Good(budget=20)) == everything
    for name in ("tova", "h2o_head", "snapkv", "scissorhands_paper", "random", "full"):
        assert engines(policies.make(name)) == everything
    assert engines(policies.make("tova_value")) == ["compiled: replay, decoded tokens"]
    assert engines(policies.make("streaming_llm_reindexed")) == [
        "compiled: replay, simulation", "in plain torch: decoded tokens; sinks are seen at other positions"
    ]  # fmt: skip
    assert engines(policies.make("snapkv_prefill")) == [
        "compiled: replay, decoded tokens", "in plain torch: replay in half precision; weights are rounded there"
    ]  # fmt: skip
    assert engines(policies.make("h2o_masked")) == [
        "compiled: simulation", "in plain torch: replay, decoded tokens; it looks at dropped tokens"
    ]  # fmt: skip
    assert "combine is not a mean over heads" in engines(LargestOverHeads(budget=20))[-1]
    for policy, why in (
        (Branches(budget=20), "score depends on the numbers in a tensor"),
        (ScorePerRow(budget=20), "score goes over slots without keepdim"),
    ):
        (line,) = engines(policy)
        assert line.startswith(f"in plain torch: replay, decoded tokens, simulation; {why}")
