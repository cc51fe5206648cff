"""Measures against naive loops over plain rows."""

from __future__ import annotations

import math

import pytest
import torch
from support.models import forward, tiny, tokens
from support.policies import small

import tova
from tova import EvictingCache, UsageError, policies
from tova.measures import AttentionMeasures, lifetimes, perplexity, token_nll
from tova.replay import NEVER


def eager_rows(model, ids, cache):
    """Full softmax rows [layers, B, H, T, T] of the run with ``cache``, from its own hidden states.

    Written without the library's attention: hooks take the queries and keys each layer's attention was given.
    """
    rows = []
    original = tova.attention.evicting_attention
    from transformers import AttentionInterface

    def spy(module, query, key, value, mask, **kwargs):
        k = key.as_subclass(torch.Tensor).repeat_interleave(query.shape[1] // key.shape[1], 1)
        logits = query.double() @ k.double().transpose(-1, -2) * kwargs["scaling"]
        steps = query.shape[2]
        rows.append(logits.masked_fill(torch.ones(steps, steps).triu(1).bool(), -torch.inf).softmax(-1))
        return original(module, query, key, value, mask, **kwargs)

    AttentionInterface.register(tova.attention.NAME, spy)
    try:
        forward(model, ids, cache)
    finally:
        AttentionInterface.register(tova.attention.NAME, original)
    return torch.stack(rows)


@pytest.mark.parametrize("policy", ["tova", "window", "full"])
def test_mass_and_recall_against_a_naive_loop(policy: str) -> None:
    model = tiny("llama")
    ids = tokens(2, 90)
    made = small(policy, 24)
    rows = eager_rows(model, ids, EvictingCache(made)).mean(2)
    measures = AttentionMeasures(block=32)
    cache = EvictingCache(made, observers=[measures])
    forward(model, ids[:, :40], cache)
    forward(model, ids[:, 40:41], cache)
    forward(model, ids[:, 41:], cache)
    report = measures.report
    log = cache.evicted_at
    for layer in range(2):
        for b in range(2):
            for t in range(90):
                row = rows[layer, b, t]
                seen = [j for j in range(t + 1) if log[layer, b, j] >= t]
                with_self = sum(float(row[j]) for j in seen)
                assert float(report.mass_with_self[layer, b, t]) == pytest.approx(with_self, abs=1e-5)
                earlier = sorted(range(t), key=lambda j: (-float(row[j]), j))[:32]
                assert int(report.possible[layer, b, t]) == len(earlier)
                assert int(report.hits[layer, b, t]) == len(set(earlier) & set(seen))
                if t:
                    mass = sum(float(row[j]) for j in seen if j < t) / float(row[:t].sum())
                    assert float(report.mass[layer, b, t]) == pytest.approx(mass, abs=1e-5)
    if policy == "full":
        assert report.over(0).hits == report.over(0).possible
        assert report.over(0).retained_mass == pytest.approx([1.0] * 2, abs=1e-6)


def seen_of(query, key, evicted_at):
    from tova.observers import Seen
    from tova.replay import Attention

    return Seen(0, 0, query, key, Attention(1.0), evicted_at, None)


@pytest.mark.parametrize("kind", ["bfloat16", "float64", "meta"])
@pytest.mark.parametrize("compiled", [False, True])
def test_nothing_is_made_in_the_default_dtype_or_on_the_default_device(kind: str, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(1, 2, 50, 8, generator=generator) for _ in range(2))
    log = torch.randint(20, 60, (1, 1, 50), generator=generator)
    found = []
    usual = torch.get_default_dtype()
    for changed in (False, True):
        measures = AttentionMeasures(block=20, compiled=compiled)
        try:
            if changed and kind == "meta":
                torch.set_default_device("meta")
            elif changed:
                torch.set_default_dtype(getattr(torch, kind))
            measures.see(seen_of(query, key, log))
            report = measures.report
            found.append((report.mass, report.mass_with_self, report.hits, report.possible, report.over(0)))
        finally:
            torch.set_default_dtype(usual)
            torch.set_default_device(None)
    for expected, ours in zip(*(f[:4] for f in found), strict=True):
        assert ours.dtype == expected.dtype
        assert torch.equal(ours.nan_to_num(), expected.nan_to_num())
    assert found[0][4] == found[1][4]


@pytest.mark.parametrize("compiled", [False, True])
def test_mass_where_nearly_all_of_the_weight_is_on_the_query_itself(compiled: bool) -> None:
    """One minus nearly one is mostly rounding: what lies on earlier positions is added up itself."""
    query = torch.ones(1, 1, 40, 1)
    key = torch.linspace(-1, 1, 40).view(1, 1, 40, 1).clone()
    key[:, :, -1] = 14.0
    log = torch.arange(40).view(1, 1, 40) * 3 + 10
    measures = AttentionMeasures(compiled=compiled)
    measures.see(seen_of(query, key, log))
    weights = key[0, 0, :39, 0].double().exp()
    expected = float((weights * (log[0, 0, :39] >= 39)).sum() / weights.sum())
    assert float(measures.report.mass[0, 0, 39]) == pytest.approx(expected, abs=1e-6)


def test_averages_over_saturated_steps() -> None:
    model = tiny("llama")
    measures = AttentionMeasures()
    forward(model, tokens(1, 90), EvictingCache(policies.make("tova", budget=24), observers=[measures]))
    report = measures.report
    late, all_steps = report.over(24), report.over(0)
    assert late.steps == 66
    assert all_steps.steps == 89
    assert late.retained_mass[0] == pytest.approx(float(report.mass[0, 0, 24:].mean()), abs=1e-6)
    assert (report.mass[:, :, 1:24] > 1 - 1e-5).all()
    assert all(a < b for a, b in zip(late.retained_mass, all_steps.retained_mass, strict=True))
    assert sum(late.hits) == int(report.hits[:, 0, 24:].sum())


def test_padding_and_own_windows_count_in_nothing() -> None:
    """A padded row measures what it measures alone; a layer's own window is no loss of the policy's."""
    model = tiny("mistral")
    ids = tokens(2, 90)
    both = AttentionMeasures()
    forward(model, ids, EvictingCache(policies.make("tova", budget=24), observers=[both]), padding=[0, 13])
    alone = AttentionMeasures()
    forward(model, ids[1:, 13:], EvictingCache(policies.make("tova", budget=24), observers=[alone]))
    assert (both.report.hits[:, 1, 13:] == alone.report.hits[:, 0]).all()
    assert torch.allclose(both.report.mass[:, 1, 14:], alone.report.mass[:, 0, 1:], atol=1e-5)
    full = AttentionMeasures()
    forward(model, ids, EvictingCache(policies.make("full"), observers=[full]))
    assert (full.report.hits == full.report.possible).all()
    assert torch.allclose(full.report.mass_with_self, torch.ones(()), atol=1e-5)


def test_ties_in_recall_go_to_the_lower_position() -> None:
    from tova.measures import _hits

    row = torch.full((1, 40), 0.02)
    row[0, 35] = 0.5
    visible = torch.zeros(1, 40, dtype=torch.bool)
    visible[0, :31] = True
    assert int(_hits(row, visible, torch.tensor([32]))) == 31
    visible[0, 35] = True
    assert int(_hits(row, visible, torch.tensor([32]))) == 32


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_losses_in_pieces(name: str) -> None:
    model = tiny(name)
    ids = tokens(2, 90)
    made = policies.make("tova", budget=24)
    whole = token_nll(model, ids, EvictingCache(made))
    pieces = token_nll(model, ids, EvictingCache(made), segment=17)
    assert whole.shape == (2, 89)
    assert (whole - pieces).abs().max() < 1e-4
    logits = forward(model, ids, EvictingCache(made)).double()
    expected = -logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    assert (whole - expected).abs().max() < 1e-4
    assert (token_nll(model, ids) - token_nll(model, ids, EvictingCache(policies.make("full")))).abs().max() < 1e-4


def exact_losses(logits, targets):
    """float64 [B, T], from the definition."""
    logits = logits.double()
    return logits.logsumexp(-1) - logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("vocabulary", [300, 49_152, 128_256, 262_144])
@pytest.mark.parametrize("scale", [1.0, 3.0, 8.0])
def test_each_loss_is_right_to_float32(vocabulary: int, scale: float) -> None:
    """Flat and peaked logits, rare targets and certain ones: no bias, and every loss within 1e-7 of itself."""
    from tova.measures import _cross_entropy

    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(2, 24, vocabulary, generator=generator) * scale
    targets = torch.randint(vocabulary, (2, 24), generator=generator)
    targets[1] = logits[1].argmax(-1)
    off = _cross_entropy(logits, targets).double() - exact_losses(logits, targets)
    assert abs(float(off.mean())) < 1e-7 * scale
    assert (off.abs() / exact_losses(logits, targets)).max() < 1e-7


def test_the_loss_of_other_dtypes_and_layouts() -> None:
    from tova.measures import _cross_entropy

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(3, 7, 1000, generator=generator, dtype=torch.float64) * 5
    targets = torch.randint(1000, (3, 7), generator=generator)
    assert _cross_entropy(logits, targets).dtype == torch.float64
    assert (_cross_entropy(logits, targets) - exact_losses(logits, targets)).abs().max() < 1e-13
    for dtype in (torch.bfloat16, torch.float16):
        half = logits.to(dtype)
        found = _cross_entropy(half, targets)
        assert found.dtype == torch.float32
        assert (found.double() - exact_losses(half, targets)).abs().max() < 1e-6
    padded = torch.randn(3, 7, 1100, generator=generator)[..., :1000]
    assert (_cross_entropy(padded, targets).double() - exact_losses(padded, targets)).abs().max() < 1e-6
    with torch.inference_mode():
        ours = logits.float()
    assert (_cross_entropy(ours, targets).double() - exact_losses(ours, targets)).abs().max() < 2e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_loss_of_logits_that_are_no_numbers(dtype: torch.dtype) -> None:
    from tova.measures import _cross_entropy

    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[[0.0, nan, 1.0], [0.0, inf, 1.0], [0.0, -inf, 1.0], [-inf, 0.0, 1.0], [inf, 0.0, 0.0]]])
    found = _cross_entropy(logits.to(dtype), torch.tensor([[2, 2, 2, 0, 0]]))[0].tolist()
    assert math.isnan(found[0])
    assert found[1] == inf
    assert found[2] == pytest.approx(math.log(1 + math.exp(-1)), rel=1e-6)
    assert found[3] == inf
    assert math.isnan(found[4])


def test_perplexity_weighs_tokens() -> None:
    losses = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.5])]
    assert perplexity(losses) == pytest.approx(math.exp(6.5 / 4))
    uniform = torch.full((5,), math.log(300.0))
    assert perplexity([uniform]) == pytest.approx(300.0, rel=1e-6)


def test_perplexity_beyond_what_a_float_holds() -> None:
    assert perplexity([torch.full((3,), 800.0)]) == math.inf
    assert perplexity([torch.tensor([1.0, math.inf])]) == math.inf
    assert math.isnan(perplexity([torch.tensor([1.0, math.nan])]))
    assert math.isnan(perplexity([]))
    assert perplexity([torch.full((5,), 709.0)]) < math.inf


def test_a_step_that_is_not_finite_is_no_step_that_does_not_count() -> None:
    """Its layer's mean is NaN; leaving it out would be a figure that looks like one."""
    from tova.measures import AttentionReport

    mass = torch.rand(2, 1, 9, generator=torch.Generator().manual_seed(0))
    mass[:, :, 0] = float("nan")  # the first step has nothing before it
    possible = torch.arange(9).expand(2, 1, 9)
    report = AttentionReport(mass, mass.nan_to_num(1.0), possible.clone(), possible)
    found = report.over(0)
    assert found.steps == 8
    assert found.retained_mass == pytest.approx(mass[:, 0, 1:].double().mean(-1).tolist(), rel=1e-15)
    mass[1, 0, 5] = float("nan")
    assert not math.isnan(report.over(0).retained_mass[0])
    assert math.isnan(report.over(0).retained_mass[1])
    assert math.isnan(AttentionReport(mass, mass, possible, possible).over(3).retained_mass_with_self[1])
    assert not math.isnan(report.over(6).retained_mass[1])
    assert all(math.isnan(m) for m in report.over(9).retained_mass)


@pytest.mark.parametrize("where", ["query", "key"])
def test_a_nan_stays_one_in_every_measure(where: str) -> None:
    query, key = (torch.randn(1, 2, 50, 8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    (query if where == "query" else key)[0, 0, 20, 3] = float("nan")
    log = torch.full((1, 1, 50), NEVER)
    log[0, 0, :10] = 25
    lost = [20] if where == "query" else [*range(20, 50)]
    found = []
    for compiled in (True, False):
        measures = AttentionMeasures(block=16, compiled=compiled)
        measures.see(seen_of(query, key, log))
        report = measures.report
        assert report.mass[0, 0].isnan().nonzero().flatten().tolist() == [0, *lost]
        assert report.mass_with_self[0, 0].isnan().nonzero().flatten().tolist() == lost
        assert not report.hits[0, 0, lost].any()
        assert math.isnan(report.over(10).retained_mass[0])
        found.append(report.hits)
    assert torch.equal(*found)


def test_means_over_many_steps_are_added_up_in_float64() -> None:
    from tova.measures import AttentionReport

    mass = 0.9 + 0.1 * torch.rand(1, 1, 70_000, generator=torch.Generator().manual_seed(1))
    possible = torch.full((1, 1, 70_000), 32)
    (found,) = AttentionReport(mass, mass, possible, possible).over(0).retained_mass
    assert abs(found - math.fsum(mass.flatten().tolist()) / 70_000) < 1e-14


def test_lifetimes() -> None:
    log = torch.tensor([[-1, 3, NEVER, 3]])
    life, censored = lifetimes(log)
    assert life.tolist() == [[-1, 2, 1, 0]]
    assert censored.tolist() == [[False, False, True, False]]


def test_refusals() -> None:
    with pytest.raises(UsageError, match="observers need the log"):
        EvictingCache(policies.make("tova"), observers=[AttentionMeasures()], log=False)
    with pytest.raises(UsageError, match="nothing has been processed yet"):
        _ = AttentionMeasures().report
    with pytest.raises(UsageError, match="needs at least 2 tokens, got 1"):
        token_nll(tiny("llama"), tokens(1, 1))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("policy", ["tova", "tova_head", "window", "full"])
def test_the_compiled_pass_measures_the_same(policy: str, threads: int) -> None:
    """Ties included: in the first layer of a text of few words many weights are equal."""
    model = tiny("llama")
    ids = tokens(2, 150) % 5 + 3
    made = small(policy, 24)
    found = []
    torch.set_num_threads(threads)
    for compiled in (True, False):
        measures = AttentionMeasures(block=40, compiled=compiled)
        cache = EvictingCache(made, observers=[measures], scan="reference")
        forward(model, ids[:, :61], cache)
        forward(model, ids[:, 61:], cache)
        found.append(measures.report)
    ours, theirs = found
    assert (ours.possible == theirs.possible).all()
    assert (ours.mass.isnan() == theirs.mass.isnan()).all()
    assert (ours.mass - theirs.mass).nan_to_num().abs().max() < 1e-5
    assert (ours.mass_with_self - theirs.mass_with_self).abs().max() < 1e-5
    # Weights that are equal in exact arithmetic may differ in their last bit.
    assert (ours.hits != theirs.hits).float().mean() < 0.05
