"""The contract, step by step: every policy's running form against worked cases.

A case is a script. ``3: 0.5 0.25 0.25`` is decode step 3 with those weights on the held positions, ``3: -`` one about
which nothing is known; ``evict 3 -> 1 2`` asks for at most 3 and expects exactly these victims; ``kept 3``,
``record 0 = 0.5`` (``none``: not held, or nothing observed), ``effective_budget = 4`` and ``sinks_held = 2`` are what
must be seen at that point. Weights are sums of powers of two, so every figure is exact.
"""

from __future__ import annotations

import pytest

from tova import UsageError, policies

CASES = {
    "tova": {
        "lowest weight of the latest step is evicted": (
            dict(budget=3),
            """
            1: 1; 2: 0.25 0.75; 3: 0.5 0.25 0.25; record 0 = 0.5; record 1 = 0.25; record 2 = 0.25;
            evict 3 -> 1; kept 3
            """,
        ),
        "record is replaced, never accumulated": (
            dict(budget=3),
            """
            1: 1; record 0 = 1; 2: 0.875 0.125; record 0 = 0.875; 3: 0.0625 0.5 0.4375; record 0 = 0.0625;
            evict 3 -> 0
            """,
        ),
        "the newest token is unobserved and never the victim": (
            dict(budget=2),
            """
            1: 1; 2: 0.5 0.5; record 2 = none; evict 2 -> 0; kept 2
            """,
        ),
        "distinguishing from h2o: highest cumulative sum (2.6875) is evicted": (
            dict(budget=4),
            """
            1: 1; 2: 0.875 0.125; 3: 0.75 0.125 0.125; 4: 0.0625 0.0625 0.375 0.5; record 0 = 0.0625;
            record 1 = 0.0625; record 2 = 0.375; record 3 = 0.5; evict 4 -> 0
            """,
        ),
        "equal weights evict the lower position": (
            dict(budget=3),
            """
            1: 1; 2: 0.5 0.5; 3: 0.5 0.25 0.25; evict 3 -> 1
            """,
        ),
        "several victims come back in ascending position order": (
            dict(budget=4),
            """
            1: 1; 2: 0.5 0.5; 3: 0.25 0.25 0.5; 4: 0.5 0.125 0.25 0.125; evict 2 -> 1 2 3; kept 2
            """,
        ),
        "a null step leaves every record untouched": (
            dict(budget=3),
            """
            1: 1; 2: 0.75 0.25; 3: -; record 0 = 0.75; record 1 = 0.25; evict 3 -> 1
            """,
        ),
    },
    "h2o": {
        "lowest cumulative score is evicted": (
            dict(budget=3, recent_window=1),
            """
            1: 1; 2: 0.25 0.75; 3: 0.5 0.25 0.25; record 0 = 1.75; record 1 = 1; record 2 = 0.25;
            record 3 = 0; evict 3 -> 2; kept 3
            """,
        ),
        "the recent window outranks the score": (
            dict(budget=3, recent_window=2),
            """
            1: 1; 2: 0.9375 0.0625; 3: 0.5 0.25 0.25; record 1 = 0.3125; record 2 = 0.25; evict 3 -> 1;
            record 2 = 0.25; record 1 = none
            """,
        ),
        "distinguishing from scissorhands: one early spike defends a position": (
            dict(budget=5, recent_window=2),
            """
            1: 1; 2: 0.875 0.125; 3: 0.0625 0.5 0.4375; 4: 0.0625 0.3125 0.3125 0.3125;
            5: 0.0625 0.25 0.25 0.25 0.1875; record 0 = 2.0625; record 1 = 1.1875; record 2 = 1;
            record 3 = 0.5625; evict 5 -> 3; record 0 = 2.0625
            """,
        ),
        "equal scores evict the lower position": (
            dict(budget=3, recent_window=1),
            """
            1: 1; 2: 0.875 0.125; 3: 0.625 0.125 0.25; record 1 = 0.25; record 2 = 0.25; evict 3 -> 1
            """,
        ),
        "several victims come back in ascending position order": (
            dict(budget=5, recent_window=1),
            """
            1: 1; 2: 0.5 0.5; 3: 0.25 0.25 0.5; 4: 0.125 0.125 0.25 0.5; record 1 = 0.875; record 2 = 0.75;
            record 3 = 0.5; evict 2 -> 1 2 3; kept 2
            """,
        ),
        "a null step leaves every score untouched": (
            dict(budget=3, recent_window=1),
            """
            1: 1; 2: -; record 0 = 1; record 1 = 0; 3: 0.25 0.25 0.5; record 0 = 1.25; evict 3 -> 1
            """,
        ),
    },
    "scissorhands": {
        "fewest votes is evicted": (
            dict(budget=3, recent_window=1),
            """
            1: 1; record 0 = 0; 2: 0.25 0.75; 3: 0.5 0.25 0.25; record 0 = 1; record 1 = 1; record 2 = 0;
            evict 3 -> 2; kept 3
            """,
        ),
        "exactly the fair share earns no vote": (
            dict(budget=3, recent_window=1),
            """
            1: 1; 2: 0.5 0.5; record 0 = 0; record 1 = 0; 3: 0.25 0.25 0.5; record 2 = 1; evict 3 -> 0
            """,
        ),
        "the recent window outranks the votes": (
            dict(budget=3, recent_window=2),
            """
            1: 1; 2: 0.9375 0.0625; 3: 0.5 0.25 0.25; record 0 = 2; record 1 = 0; record 2 = 0; evict 3 -> 1;
            record 2 = 0
            """,
        ),
        "distinguishing from h2o: an early spike buys one vote": (
            dict(budget=5, recent_window=2),
            """
            1: 1; 2: 0.875 0.125; 3: 0.0625 0.5 0.4375; 4: 0.0625 0.3125 0.3125 0.3125;
            5: 0.0625 0.25 0.25 0.25 0.1875; record 0 = 1; record 1 = 3; record 2 = 3; record 3 = 2;
            record 4 = 0; evict 5 -> 0; record 0 = none
            """,
        ),
        "equal votes evict the lower position": (
            dict(budget=3, recent_window=1),
            """
            1: 1; 2: 0.875 0.125; 3: 0.5 0.25 0.25; record 0 = 2; record 1 = 0; record 2 = 0; evict 3 -> 1
            """,
        ),
        "several victims come back in ascending position order": (
            dict(budget=5, recent_window=1),
            """
            1: 1; 2: 0.75 0.25; 3: 0.5 0.25 0.25; 4: 0.5 0.125 0.25 0.125; record 0 = 3; record 1 = 0;
            record 2 = 0; record 3 = 0; evict 2 -> 1 2 3; kept 2
            """,
        ),
        "a null step leaves every vote untouched": (
            dict(budget=3, recent_window=1),
            """
            1: 1; 2: 0.75 0.25; record 0 = 1; 3: -; record 0 = 1; record 1 = 0; evict 3 -> 1
            """,
        ),
    },
    "snapkv": {
        "window longer than the run, no pooling: it sums": (
            dict(budget=3, recent_window=1, obs_window=8, pool_kernel=1),
            """
            1: 1; 2: 0.25 0.75; 3: 0.5 0.25 0.25; record 0 = 1.75; record 1 = 1; record 2 = 0.25;
            evict 3 -> 2; kept 3
            """,
        ),
        "attention ages out of the observation window": (
            dict(budget=3, recent_window=1, obs_window=2, pool_kernel=1),
            """
            1: 1; 2: 0.875 0.125; 3: 0.0625 0.4375 0.5; record 0 = 0.9375; evict 3 -> 2;
            4: 0.0625 0.4375 0.5; record 0 = 0.125; record 1 = 0.875; record 3 = 0.5; evict 3 -> 0
            """,
        ),
        "without max-pooling position 3 is evicted": (
            dict(budget=4, recent_window=1, obs_window=8, pool_kernel=1),
            """
            1: 1; 2: 0.5 0.5; 3: 0.0625 0.0625 0.875; 4: 0.0625 0.0625 0.8125 0.0625; record 0 = 1.625;
            record 1 = 0.625; record 2 = 1.6875; record 3 = 0.0625; evict 4 -> 3
            """,
        ),
        "with max-pooling position 0 is evicted": (
            dict(budget=4, recent_window=1, obs_window=8, pool_kernel=3),
            """
            1: 1; 2: 0.5 0.5; 3: 0.0625 0.0625 0.875; 4: 0.0625 0.0625 0.8125 0.0625; record 3 = 0.0625;
            evict 4 -> 0
            """,
        ),
        "the recent window outranks the pooled score": (
            dict(budget=3, recent_window=2, obs_window=8, pool_kernel=1),
            """
            1: 1; 2: 0.9375 0.0625; 3: 0.5 0.25 0.25; record 1 = 0.3125; record 2 = 0.25; evict 3 -> 1
            """,
        ),
        "equal pooled scores evict the lower position": (
            dict(budget=3, recent_window=1, obs_window=8, pool_kernel=1),
            """
            1: 1; 2: 0.875 0.125; 3: 0.625 0.125 0.25; record 1 = 0.25; record 2 = 0.25; evict 3 -> 1
            """,
        ),
        "a null step is inert: nothing written, the ring does not advance": (
            dict(budget=3, recent_window=1, obs_window=2, pool_kernel=1),
            """
            1: 1; record 0 = 1; 2: -; record 0 = 1; 3: 0.125 0.5 0.375; record 0 = 1.125; record 1 = 0.5;
            record 2 = 0.375; evict 3 -> 2
            """,
        ),
    },
    "pyramidkv": {
        "one layer redistributes nothing": (
            dict(budget=6, layer=0, num_layers=1, pyramid_ratio=4, recent_window=1, obs_window=8, pool_kernel=1),
            """
            1: 1; 2: 0.5 0.5; 3: 0.25 0.25 0.5; 4: 0.125 0.125 0.25 0.5; 5: 0.0625 0.0625 0.125 0.25 0.5;
            6: 0.0625 0.0625 0.0625 0.125 0.25 0.4375; effective_budget = 6; record 0 = 2; record 5 = 0.4375;
            evict 6 -> 5; kept 6
            """,
        ),
        "a deep layer's share binds tighter than the ask": (
            dict(budget=6, layer=2, num_layers=3, pyramid_ratio=2, recent_window=1, obs_window=8, pool_kernel=1),
            """
            1: 1; 2: 0.5 0.5; 3: 0.25 0.25 0.5; 4: 0.125 0.125 0.25 0.5; 5: 0.0625 0.0625 0.125 0.25 0.5;
            6: 0.0625 0.0625 0.0625 0.125 0.25 0.4375; effective_budget = 4; evict 6 -> 3 4 5; kept 4
            """,
        ),
        "a shallow layer's share cannot exceed what the caller allows": (
            dict(budget=6, layer=0, num_layers=3, pyramid_ratio=2, recent_window=1, obs_window=8, pool_kernel=1),
            """
            1: 1; 2: 0.5 0.5; 3: 0.25 0.25 0.5; 4: 0.125 0.125 0.25 0.5; 5: 0.0625 0.0625 0.125 0.25 0.5;
            6: 0.0625 0.0625 0.0625 0.125 0.25 0.4375; effective_budget = 8; evict 6 -> 5; kept 6
            """,
        ),
        "the middle layer of three gets exactly the average": (
            dict(budget=6, layer=1, num_layers=3, pyramid_ratio=2, recent_window=1, obs_window=8, pool_kernel=1),
            """
            1: 1; 2: 0.5 0.5; 3: 0.25 0.25 0.5; 4: 0.125 0.125 0.25 0.5; 5: 0.0625 0.0625 0.125 0.25 0.5;
            6: 0.0625 0.0625 0.0625 0.125 0.25 0.4375; effective_budget = 6; evict 6 -> 5
            """,
        ),
        "a ratio of one is the uniform pyramid": (
            dict(budget=6, layer=2, num_layers=3, pyramid_ratio=1, recent_window=1, obs_window=8, pool_kernel=1),
            """
            1: 1; 2: 0.5 0.5; 3: 0.25 0.25 0.5; 4: 0.125 0.125 0.25 0.5; 5: 0.0625 0.0625 0.125 0.25 0.5;
            6: 0.0625 0.0625 0.0625 0.125 0.25 0.4375; effective_budget = 6; evict 6 -> 5
            """,
        ),
        "a share below the recent window is raised to hold one choosable position": (
            dict(budget=10, layer=3, num_layers=4, pyramid_ratio=4, recent_window=4, obs_window=8, pool_kernel=1),
            """
            1: 1; 2: 0.5 0.5; 3: 0.25 0.25 0.5; 4: 0.125 0.125 0.25 0.5; 5: 0.0625 0.0625 0.125 0.25 0.5;
            6: 0.0625 0.0625 0.0625 0.125 0.25 0.4375; effective_budget = 5; evict 10 -> 1 2; kept 5
            """,
        ),
    },
    "streaming_llm": {
        "sinks are pinned and the window slides past them": (
            dict(budget=6, sinks=2),
            """
            1: -; 2: -; 3: -; 4: -; 5: -; kept 6; sinks_held = 2; 6: -; evict 6 -> 2; 7: -; evict 6 -> 3;
            sinks_held = 2
            """,
        ),
        "one recency slot": (
            dict(budget=3, sinks=2),
            """
            1: -; 2: -; kept 3; 3: -; evict 3 -> 2; kept 3
            """,
        ),
        "sinks survive where a sliding window drops them": (
            dict(budget=6, sinks=4),
            """
            1: -; 2: -; 3: -; 4: -; 5: -; kept 6; 6: -; evict 6 -> 4; 7: -; evict 6 -> 5; 8: -; evict 6 -> 6;
            sinks_held = 4; kept 6
            """,
        ),
        "several victims come back oldest first": (
            dict(budget=6, sinks=2),
            """
            1: -; 2: -; 3: -; 4: -; 5: -; evict 3 -> 2 3 4; sinks_held = 2; kept 3
            """,
        ),
        "zero sinks is a plain sliding window": (
            dict(budget=4, sinks=0),
            """
            1: -; 2: -; 3: -; sinks_held = 0; 4: -; evict 4 -> 0; 5: -; evict 4 -> 1
            """,
        ),
        "attention is ignored": (
            dict(budget=6, sinks=2),
            """
            1: 1; 2: 0.5 0.5; 3: 0.25 0.25 0.5; 4: 0.125 0.125 0.25 0.5; 5: 0.125 0.125 0.125 0.125 0.5;
            6: 0.0625 0.0625 0.0625 0.0625 0.75 0.0625; evict 6 -> 2
            """,
        ),
    },
    "window": {
        "the oldest position goes first": (
            dict(budget=4),
            """
            1: -; 2: -; 3: -; kept 4; 4: -; evict 4 -> 0; kept 4; 5: -; evict 4 -> 1
            """,
        ),
        "a budget of one keeps only the newest token": (
            dict(budget=1),
            """
            1: -; evict 1 -> 0; 2: -; evict 1 -> 1; kept 1
            """,
        ),
        "the sinks are dropped first": (
            dict(budget=6),
            """
            1: -; 2: -; 3: -; 4: -; 5: -; kept 6; 6: -; evict 6 -> 0; 7: -; evict 6 -> 1; 8: -; evict 6 -> 2
            """,
        ),
        "eviction order is arrival order": (
            dict(budget=5),
            """
            1: -; 2: -; 3: -; 4: -; 5: -; evict 2 -> 0 1 2 3; kept 2
            """,
        ),
        "attention is ignored": (
            dict(budget=4),
            """
            1: 1; 2: 0.75 0.25; 3: 0.5 0.25 0.25; 4: 0.5 0.25 0.125 0.125; evict 4 -> 0
            """,
        ),
    },
}


def _play(running, script: str) -> None:
    for order in script.replace("\n", ";").split(";"):
        if not (order := order.strip()):
            continue
        if order[0].isdigit():
            position, _, weights = order.partition(":")
            attn = None if weights.strip() == "-" else [float(w) for w in weights.split()]
            running.on_decode_step(int(position), attn)
        elif order.startswith("evict"):
            asked, _, victims = order.removeprefix("evict").partition("->")
            assert running.evict(int(asked)) == [int(v) for v in victims.split()], order
        elif order.startswith("kept"):
            assert running.kept == int(order.split()[1]) == len(running.positions), order
        elif order.startswith("record"):
            position, _, value = order.removeprefix("record").partition("=")
            expected = None if value.strip() == "none" else float(value)
            assert running.record(int(position)) == expected, order
        else:
            name, _, value = order.partition("=")
            assert getattr(running, name.strip()) == int(value), order


@pytest.mark.parametrize(("policy", "case"), [(policy, case) for policy, cases in CASES.items() for case in cases])
def test_case(policy: str, case: str) -> None:
    parameters, script = CASES[policy][case]
    _play(policies.make(policy, **parameters).start(), script)


def test_a_wrong_expectation_is_noticed() -> None:
    """The player itself can fail: a case with one figure changed does."""
    parameters, script = CASES["tova"]["lowest weight of the latest step is evicted"]
    for right, wrong in (("evict 3 -> 1", "evict 3 -> 2"), ("record 0 = 0.5", "record 0 = 0.4"), ("kept 3", "kept 4")):
        assert right in script
        with pytest.raises(AssertionError):
            _play(policies.make("tova", **parameters).start(), script.replace(right, wrong))


@pytest.mark.parametrize(
    ("name", "parameters", "says"),
    [
        ("tova", dict(budget=0), "budget must be at least 1, got 0"),
        ("tova", dict(budget=2.5), "budget must be an integer, got 2.5"),
        ("tova", dict(budget=True), "budget must be an integer, got True"),
        ("tova", dict(budget="8"), "budget must be an integer, got '8'"),
        ("h2o", dict(budget=8, recent_window=8), "recent_window must be at least 1 and below 8 (budget=8), got 8"),
        ("h2o", dict(budget=8, recent_window=0), "recent_window must be at least 1 and below 8 (budget=8), got 0"),
        ("h2o_half", dict(budget=1), "budget must be at least 2, got 1"),
        ("scissorhands", dict(budget=16), "recent_window must be at least 1 and below 16 (budget=16), got 32"),
        ("snapkv", dict(obs_window=0), "obs_window must be at least 1, got 0"),
        ("snapkv", dict(pool_kernel=4), "pool_kernel must be odd, got 4"),
        ("pyramidkv", dict(layer=2, num_layers=2), "layer must be at least 0 and below 2, got 2"),
        ("pyramidkv", dict(pyramid_ratio=0), "pyramid_ratio must be at least 1, got 0"),
        ("streaming_llm", dict(budget=4, sinks=4), "sinks must be at least 0 and below 4 (budget=4), got 4"),
        ("streaming_llm", dict(budget=4, sinks=-1), "sinks must be at least 0 and below 4 (budget=4), got -1"),
        ("tova", dict(budget=8, sinks=5, recent_window=4), "sinks=5 and recent_window=4 together protect more than"),
        ("tova", dict(buget=8), "has no parameter 'buget' (did you mean 'budget'?); it takes: budget"),
        ("full", dict(budget=8), "full takes no parameters, got 'budget'"),
        ("tovaa", {}, "no policy is named 'tovaa' (did you mean 'tova'?); there are: full, window"),
    ],
)
def test_bad_parameters_are_named(name: str, parameters: dict, says: str) -> None:
    with pytest.raises(UsageError) as error:
        policies.make(name, **parameters)
    assert says in str(error.value)


def test_protected_positions_beyond_the_budget() -> None:
    running = policies.make("streaming_llm", budget=6, sinks=3).start()
    for t in range(1, 7):
        running.on_decode_step(t, None)
    with pytest.raises(UsageError, match="4 positions are protected, more than the 3 that may remain"):
        running.evict(3)
    assert running.evict(4) == [3, 4, 5]


def test_unobserved_positions_are_no_candidates() -> None:
    """Steps without attention admit tokens that tova cannot rank: it says so instead of guessing."""
    running = policies.make("tova", budget=2).start()
    for t in range(1, 4):
        running.on_decode_step(t, None)
    with pytest.raises(UsageError, match="4 positions are protected, more than the 2"):
        running.evict(2)


def test_misuse_of_a_running_policy() -> None:
    running = policies.make("tova", budget=4).start()
    running.on_decode_step(1, [1.0])
    with pytest.raises(UsageError, match="above the newest position 1, got 1"):
        running.on_decode_step(1, [0.5, 0.5])
    with pytest.raises(UsageError, match=r"one weight per held position \(2\), got 3"):
        running.on_decode_step(2, [0.5, 0.25, 0.25])
    for budget in (0, -1, 1.5, True):
        with pytest.raises(UsageError, match="budget must be an integer of at least 1"):
            running.evict(budget)


def test_shares_of_the_pyramid() -> None:
    """Worked figures: budget 512 over 32 layers at ratio 4 is 819 at the top and 204 at the bottom."""
    policy = policies.make("pyramidkv", budget=512)
    shares = [policy.for_layer(i, 32).layer_budget for i in range(32)]
    assert (shares[0], shares[31]) == (819, 204)
    assert shares == sorted(shares, reverse=True)
    assert 511 < sum(shares) / 32 <= 512
    assert policy.layer_budget == 512
    assert [policies.make("pyramidkv", pyramid_ratio=1).for_layer(i, 5).layer_budget for i in range(5)] == [512] * 5


def test_costs_are_stated_as_specified() -> None:
    def bytes_per_slot(name: str, **parameters: int) -> int:
        return policies.make(name, **parameters).bytes_per_slot

    assert bytes_per_slot("tova") * 512 == 6656
    assert bytes_per_slot("h2o") == 13
    assert bytes_per_slot("scissorhands") == 9
    assert bytes_per_slot("window") == bytes_per_slot("streaming_llm") == 4
    assert bytes_per_slot("snapkv", obs_window=16) == bytes_per_slot("pyramidkv") == 4 + 64 + 8 + 8 + 1
    # What the tensors here take, in float32: an int64 position, a flag, and the records.
    assert policies.make("tova").tensor_bytes_per_slot() == 8 + 1 + 4
    assert policies.make("snapkv").tensor_bytes_per_slot() == 8 + 1 + 16 * 4
    assert policies.make("window").tensor_bytes_per_slot() == 8 + 1
    for policy in policies.POLICIES.values():
        cost = policy().cost()
        assert cost.step
        assert cost.eviction


def test_random_draws_are_seeded_and_uniform() -> None:
    def victims(seed: int, layer: int = 0) -> list[int]:
        running = policies.make("random", budget=8, seed=seed).for_layer(layer, 2).start()
        out = []
        for t in range(1, 1500):
            running.on_decode_step(t, None)
            out += running.evict(8)
        return out

    first = victims(0)
    assert first == victims(0)
    assert first != victims(1)
    assert first != victims(0, layer=1)
    # A position is dropped with chance 1/8 at each of its steps: ages are geometric with mean 8.
    ages = [step - position for step, position in enumerate(first, start=8)]
    assert 7.4 < sum(ages) / len(ages) < 8.6
    assert min(ages) == 1
