"""The canonical trace, bit for bit, and every policy's figures on it."""

from __future__ import annotations

import numpy as np
import pytest
from support.policies import small
from support.published import BUDGETS, PUBLISHED

from tova import UsageError, policies
from tova.simulation import NEVER, Oracle, bound_topk, simulate
from tova.trace import Trace, Xoshiro128, canonical_trace

# IEEE 754 bit patterns of the first ten steps.
FIRST_STEPS = """
1065353216
1057091522 1056710779
1051789414 1051372203 1050954991
1049169913 1048773971 1048180058 1047388173
1046887454 1046054006 1045220557 1044387108 1043553659
1044968671 1044107532 1043246392 1042385253 1041524113 1041669607
1043597057 1042716155 1041835253 1040954350 1039959505 1040199179 1040324910
1042567400 1041671690 1040775981 1039573152 1037781733 1038003581 1038225428 1038447276
1041765693 1040858481 1039715144 1037900720 1036086295 1036285136 1036483977 1036682818 1036881659
1041123532 1040207130 1038394063 1036561258 1034728452 1034908913 1035089374 1035269835 1035450296 1035630757
"""


@pytest.fixture(scope="module")
def trace():
    return canonical_trace()


def test_rows_are_the_published_bits(trace) -> None:
    assert len(trace) == 4095
    for row, line in zip(trace.rows, FIRST_STEPS.strip().splitlines(), strict=False):
        assert row.dtype == np.float32
        assert row.view(np.uint32).tolist() == [int(bits) for bits in line.split()]
    assert trace.fnv1a32 == 3136039440


def test_every_row_sums_to_one(trace) -> None:
    sums = np.array([row.sum(dtype=np.float64) for row in trace.rows])
    assert np.abs(sums - 1).max() < 1e-6


def test_the_generator_against_its_definition() -> None:
    """An independent writing of xoshiro128** on numpy words, and no modulo bias worth seeing."""
    words = np.array(Xoshiro128(7)._state, dtype=np.uint32)

    def rotl(x: np.uint32, k: int) -> np.uint32:
        return np.uint32((int(x) << k | int(x) >> (32 - k)) & 0xFFFFFFFF)

    rng = Xoshiro128(7)
    with np.errstate(over="ignore"):
        for _ in range(1000):
            expected = rotl(words[1] * np.uint32(5), 7) * np.uint32(9)
            shifted = words[1] << np.uint32(9)
            words[2] ^= words[0]
            words[3] ^= words[1]
            words[1] ^= words[2]
            words[0] ^= words[3]
            words[2] ^= shifted
            words[3] = rotl(words[3], 11)
            assert rng.next() == expected
    counts = np.bincount([rng.below(7) for _ in range(7000)], minlength=7)
    assert abs(counts - 1000).max() < 150


@pytest.mark.parametrize("policy", PUBLISHED)
def test_published_figures(trace, policy: str) -> None:
    for budget, (mass, recall) in zip(BUDGETS, PUBLISHED[policy], strict=True):
        found = simulate(policies.make(policy, budget=budget), trace)
        assert f"{found.retained_mass:.6f}" == f"{mass:.6f}"
        assert f"{found.heavy_hitter_recall:.6f}" == f"{recall:.6f}"
        assert found.evict_calls == 4096 - budget


@pytest.mark.parametrize(
    ("window", "mass", "recall"),
    [(16, 0.4847, 0.6806), (32, 0.6439, 0.8863), (64, 0.7712, 0.8823), (128, 0.7745, 0.8902)],
)
def test_recent_window_of_h2o(trace, window: int, mass: float, recall: float) -> None:
    found = simulate(policies.make("h2o", budget=256, recent_window=window), trace)
    assert (round(found.retained_mass, 4), round(found.heavy_hitter_recall, 4)) == (mass, recall)
    if window == 128:
        assert (simulate(policies.make("h2o_half", budget=256), trace).evicted_at == found.evicted_at).all()


@pytest.mark.parametrize("obs_window", [1, 4, 16, 64])
def test_snapkv_without_pooling_is_tova(trace, obs_window: int) -> None:
    """Equal in every figure; for a window of one step they are the same rule but for the recent window."""
    for budget in BUDGETS:
        snapkv = simulate(policies.make("snapkv", budget=budget, obs_window=obs_window, pool_kernel=1), trace)
        tova = simulate(policies.make("tova", budget=budget), trace)
        assert f"{snapkv.retained_mass:.6f}" == f"{tova.retained_mass:.6f}"
        assert f"{snapkv.heavy_hitter_recall:.6f}" == f"{tova.heavy_hitter_recall:.6f}"


def test_what_tova_holds_at_the_end(trace) -> None:
    """The whole local window and all four sinks, with no rule for either."""
    kept = set(simulate(policies.make("tova", budget=256), trace).kept)
    assert kept >= {*range(4), *range(4031, 4095)}
    assert len(kept) == 256


def test_relations_between_policies(trace) -> None:
    def at(name: str, budget: int):
        return simulate(policies.make(name, budget=budget), trace)

    for budget in BUDGETS:
        tova, h2o, scissorhands = at("tova", budget), at("h2o", budget), at("scissorhands", budget)
        assert tova.retained_mass > h2o.retained_mass
        assert tova.heavy_hitter_recall < h2o.heavy_hitter_recall
        assert abs(h2o.retained_mass - scissorhands.retained_mass) < 0.01
        assert at("random", budget).retained_mass < tova.retained_mass
        bound = bound_topk(trace, budget)
        assert all(at(name, budget).retained_mass < bound for name in PUBLISHED)
        # The oracle foresees the redraws of the heavy set, which no policy can.
        oracle = simulate(Oracle(trace, budget), trace)
        assert tova.retained_mass < oracle.retained_mass <= bound + 1e-12
    for name in PUBLISHED:
        masses = [at(name, budget).retained_mass for budget in BUDGETS]
        assert masses == sorted(masses)


def test_upper_bound(trace) -> None:
    assert [round(bound_topk(trace, budget), 4) for budget in BUDGETS] == [0.9618, 0.9692, 0.9798]


COMPILED = (
    *PUBLISHED, "full", "h2o_half", "h2o_head", "h2o_masked", "scissorhands_paper", "streaming_llm_reindexed",
    "tova_head", "tova_official", "random",
)  # fmt: skip


@pytest.mark.parametrize("policy", COMPILED)
def test_compiled_simulation_decides_like_the_running_policy(policy: str) -> None:
    """Every decision and figure, on another trace and at budgets small enough to press."""
    trace = canonical_trace(seed=11, tokens=900)
    for budget in (40, 150):
        made = small(policy, budget)
        compiled = simulate(made, trace, engine="compiled")
        running = simulate(made, trace, engine="stepwise")
        assert (compiled.evicted_at == running.evicted_at).all()
        assert (compiled.hits == running.hits).all()
        assert np.abs(compiled.mass - running.mass).max() < 1e-12
        assert compiled.evict_calls == running.evict_calls


@pytest.mark.parametrize("policy", [name for name in policies.POLICIES if name not in COMPILED])
def test_policies_that_are_not_compiled(policy: str) -> None:
    """They are those that want what a trace has not, and they say so."""
    trace = canonical_trace(seed=11, tokens=300)
    made = policies.make(policy, budget=60)
    refusals = {
        "snapkv_prefill": "selects once, at the end of a prompt",
        "pyramidkv_prefill": "selects once, at the end of a prompt",
        "tova_value": "ranks by keys or values",
        "l2norm": "ranks by keys or values",
    }
    with pytest.raises(UsageError, match=f"{policy} {refusals[policy]}"):
        simulate(made, trace)


def test_variants_that_are_their_original_on_a_trace() -> None:
    """A trace has no weight of the newest token and no heads: what differs in these is not there."""
    trace = canonical_trace(seed=11, tokens=300)

    def log(name: str) -> np.ndarray:
        return simulate(policies.make(name, budget=60), trace).evicted_at

    assert (log("tova_official") == log("tova")).all()
    assert (log("tova_head") == log("tova")).all()
    assert (log("h2o_head") == log("h2o_half")).all()
    assert (log("streaming_llm_reindexed") == log("streaming_llm")).all()


def test_simulation_against_a_naive_loop() -> None:
    """tova written out once more, on plain lists."""
    trace = canonical_trace(seed=3, tokens=400)
    kept, masses, evicted_at = [0], [], {}
    for t, row in trace:
        weights = {position: float(row[position]) for position in kept}
        masses.append(sum(weights.values()))
        kept.append(t)
        if len(kept) > 50:
            victim = min(weights, key=lambda position: (weights[position], position))
            kept.remove(victim)
            evicted_at[victim] = t
    found = simulate(policies.make("tova", budget=50), trace)
    assert found.kept == kept
    assert found.retained_mass == pytest.approx(np.mean(masses), abs=1e-12)
    assert {p: int(t) for p, t in enumerate(found.evicted_at) if t != NEVER} == evicted_at
    assert found.retained_mass_saturated == pytest.approx(np.mean(masses[49:]), abs=1e-12)


def test_a_policy_that_cheats_is_caught(trace) -> None:
    class Running:
        def __init__(self, victims):
            self.victims = victims

        def on_decode_step(self, pos, attn):
            pass

        def evict(self, budget):
            return self.victims

    class Cheat:
        name, budget = "cheat", 4

        def __init__(self, victims):
            self.victims = victims

        def start(self):
            return Running(self.victims)

    with pytest.raises(UsageError, match="cheat: step 4: evicted position 9, which is not held"):
        simulate(Cheat([9]), trace)
    with pytest.raises(UsageError, match="cheat: step 4: 5 positions remain, more than budget=4"):
        simulate(Cheat([]), trace)


def test_a_trace_is_of_finite_weights_one_for_each_position() -> None:
    """So that neither engine meets a NaN, nor reads another step's weights."""
    rows = [np.full(t, 1 / t, np.float32) for t in range(1, 20)]
    for number in (np.nan, np.inf):
        wrong = [row.copy() for row in rows]
        wrong[11][4] = number
        with pytest.raises(
            UsageError, match=rf"^mine: step 12 has weight {number} at position 4; a trace needs finite"
        ):
            Trace("mine", wrong)
    with pytest.raises(UsageError, match=r"^mine: step 12 must have 12 weights, got an array of shape \(13,\)"):
        Trace("mine", [*rows[:11], rows[12]])
    for budget in (0, -1, 2**63, 2.0, True):
        with pytest.raises(UsageError, match=r"^budget must be an integer of at least 1 and at most"):
            bound_topk(Trace("mine", rows), budget)


def test_a_step_that_is_not_finite_is_one_without_information() -> None:
    for name in ("tova", "h2o", "scissorhands", "snapkv"):
        one, other = small(name, 6).start(), small(name, 6).start()
        for step in range(1, 5):
            row = [1 / step] * step
            one.on_decode_step(step, None if step == 3 else row)
            other.on_decode_step(step, [*row[:-1], float("nan")] if step == 3 else row)
        assert [one.record(p) for p in range(5)] == [other.record(p) for p in range(5)]
        assert one.evict(4) == other.evict(4)
