"""Replay against the physical decode: the same kept sets at every step and layer, the same losses."""

from __future__ import annotations

import pytest
import torch
from support.models import TINY, forward, not_padding, tiny, tokens
from support.oracle import PhysicalCache, compare, decode
from support.policies import options_of, small

import tova
from tova import EvictingCache, policies
from tova.compat import cache_argument
from tova.measures import token_nll
from tova.scan import cpu

POLICIES = ("window", "streaming_llm", "h2o", "h2o_half", "scissorhands", "snapkv", "pyramidkv", "tova")
BUDGET, TOKENS = 24, 110


def make(policy: str, model):
    """As a small test runs it; skipped where the model refuses the policy (see test_matrix)."""
    if policy == "streaming_llm_reindexed" and getattr(model.config, "sliding_window", None):
        pytest.skip("positions inside the cache need layers without windows")
    return small(policy, BUDGET)


@pytest.fixture(scope="module", params=TINY)
def model(request):
    return tiny(request.param)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("scan", ["reference", "cpu"])
def test_replay_is_physical_decode(model, policy: str, scan: str) -> None:
    """Two rows, one of them left-padded; chunks that do not divide the text."""
    padding = [0, 23]
    ids = tokens()
    physical = PhysicalCache(policy, BUDGET, padding, **options_of(policy))
    expected = decode(model, ids, physical)
    cache = EvictingCache(small(policy, BUDGET), scan=scan, chunk=17)
    logits = forward(model, ids, cache, padding)
    verdict = compare(cache.evicted_at, physical)
    print(f"{policy}: {verdict}")
    assert not verdict.unexcused, verdict.unexcused
    if not verdict.different:
        real = not_padding(padding, TOKENS)
        assert (logits - expected)[real].abs().max() < 1e-3


def test_the_judge_notices_a_wrong_decision() -> None:
    """The comparison can fail: one eviction moved by a step is reported."""
    model = tiny("llama")
    ids = tokens(1)
    physical = PhysicalCache("tova", 24)
    decode(model, ids, physical)
    right = physical.evicted_at()
    assert compare(right, physical).different == 0
    wrong = right.clone()
    layer, row, token = (x[0] for x in (right < 100).nonzero(as_tuple=True))
    wrong[layer, row, token] += 1
    verdict = compare(wrong, physical)
    assert (verdict.different, verdict.excused) == (1, 0)
    step = int(right[layer, row, token])
    assert verdict.unexcused == [f"row 0: step {step}, layer {int(layer)}, head 0"]
    # Where the two lowest scores were as good as equal there, it is excused.
    physical.layers[layer].rows[0][0].near_tie[step] = True
    verdict = compare(wrong, physical)
    assert (verdict.different, verdict.excused, verdict.unexcused) == (1, 1, [])


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_scans_decide_alike_and_chunks_do_not_matter(model, policy: str) -> None:
    ids, padding = tokens(seed=2), [11, 0]
    made = make(policy, model)
    first = None
    other = "cpu" if cpu.supports(made) else "auto"
    for scan, chunk in (("reference", 110), ("reference", 9), (other, 110), (other, 31)):
        cache = EvictingCache(made, scan=scan, chunk=chunk)
        logits = forward(model, ids, cache, padding)
        if first is None:
            first = (cache.evicted_at, logits)
        assert (cache.evicted_at == first[0]).all(), (scan, chunk)
        assert (logits - first[1])[:, 12:].abs().max() < 1e-3


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_token_by_token_with_fixed_slots_is_the_same(model, policy: str) -> None:
    """The cache a person generates with: decoding through it equals the replay."""
    ids = tokens(seed=3)
    made = make(policy, model)
    whole = EvictingCache(made)
    expected = forward(model, ids, whole)
    stepwise = EvictingCache(made)
    logits = [forward(model, ids[:, :50], stepwise)]
    logits += [forward(model, ids[:, t : t + 1], stepwise) for t in range(50, 80)]
    logits += [forward(model, ids[:, 80:], stepwise)]
    assert (stepwise.evicted_at == whole.evicted_at).all()
    assert (torch.cat(logits, 1) - expected).abs().max() < 1e-3
    kept = [[stepwise.kept(layer, row) for row in range(2)] for layer in range(len(stepwise.layers))]
    assert kept == [[whole.kept(layer, row) for row in range(2)] for layer in range(len(whole.layers))]


def test_an_unbounded_budget_is_the_models_own_attention(model) -> None:
    ids, padding = tokens(seed=4), [0, 7]
    real = not_padding(padding, TOKENS)
    model.set_attn_implementation("eager")
    mask = real.long()
    positions = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.inference_mode():
        expected = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    tova.enable(model)
    for scan in ("reference", "cpu"):
        cache = EvictingCache(policies.make("tova", budget=10**6), scan=scan, chunk=32)
        assert (forward(model, ids, cache, padding) - expected)[real].abs().max() < 1e-3
    full = forward(model, ids, EvictingCache(policies.make("full")), padding)
    assert (full - expected)[real].abs().max() < 1e-3


@pytest.mark.parametrize("every", [2, 7])
@pytest.mark.parametrize("policy", ["tova", "h2o", "snapkv", "window"])
def test_evicting_at_intervals(model, policy: str, every: int) -> None:
    """The cache grows past the budget and is cut back at once, however the text is fed and scanned."""
    ids = tokens(seed=5)
    made = small(policy, 20)
    runs = []
    for scan, chunk, split in (("reference", 110, 110), ("cpu", 13, 110), ("reference", 16, 60)):
        cache = EvictingCache(made, evict_every=every, scan=scan, chunk=chunk)
        forward(model, ids[:, :split], cache)
        for t in range(split, TOKENS):
            forward(model, ids[:, t : t + 1], cache)
        runs.append(cache.evicted_at)
    assert (runs[0] == runs[1]).all()
    assert (runs[0] == runs[2]).all()
    if model.config.model_type == "llama":
        steps = runs[0][0, 0]
        steps = steps[steps < TOKENS].unique()
        assert (steps == torch.arange(20 + every - 1, TOKENS, every)).all()


def test_real_model_against_physical_decode(smollm2, books) -> None:
    """SmolLM2 reading Alice: kept sets of all 30 layers at every step, and every loss."""
    model = smollm2.model
    ids = torch.tensor([smollm2.tokenizer(books["alice29"][:3000])["input_ids"][:224]])
    for policy, budget in (("tova", 48), ("h2o_half", 48)):
        physical = PhysicalCache(policy, budget)
        logits = decode(model, ids, physical)
        expected = torch.nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:], reduction="none")
        cache = EvictingCache(policies.make(policy, budget=budget))
        forward(model, ids, cache)
        nll = token_nll(model, ids, EvictingCache(policies.make(policy, budget=budget)), segment=100)[0]
        verdict = compare(cache.evicted_at, physical)
        print(f"{policy}: {verdict}; largest difference of a loss {(nll - expected).abs().max():.1e}")
        assert not verdict.unexcused, verdict.unexcused
        if not verdict.different:
            assert (nll - expected).abs().max() < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["tova", "h2o", "h2o_half", "snapkv", "scissorhands"])
def test_a_whole_cell_against_physical_decode(smollm2, books, policy: str) -> None:
    """The quickstart's cell at 256, both books as rows of one batch, every step and layer."""
    model = smollm2.model
    ids = torch.stack(
        [torch.tensor(smollm2.tokenizer(books[name][:20000])["input_ids"][:2048]) for name in ("alice29", "asyoulik")]
    )
    physical = PhysicalCache(policy, 256)
    losses = []
    logits = decode_losses(model, ids, physical, losses)
    cache = EvictingCache(policies.make(policy, budget=256))
    nll = token_nll(model, ids, cache)
    del logits
    verdict = compare(cache.evicted_at[:, :, :2047], physical)
    difference = (nll - torch.cat(losses, 1)).abs().max()
    print(f"{policy}: {verdict}; largest difference of a loss {difference:.1e}")
    assert not verdict.unexcused, verdict.unexcused
    if not verdict.different:
        assert difference < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("budget", [128, 600])
def test_gemma_and_its_windows(books, budget: int) -> None:
    """Gemma 3 reading past its windows of 512: a windowed layer holds min(budget, window), drop for drop as decoded."""
    from experiments.models import Gemma3

    loaded = Gemma3().load("cpu")
    model = loaded.model
    ids = torch.tensor([loaded.tokenizer(books["alice29"][:6000])["input_ids"][:700]])
    physical = PhysicalCache("tova", budget)
    losses: list[torch.Tensor] = []
    decode_losses(model, ids, physical, losses)
    cache = EvictingCache(policies.make("tova", budget=budget))
    nll = token_nll(model, ids, cache)
    verdict = compare(cache.evicted_at[:, :, :699], physical)
    difference = (nll - torch.cat(losses, 1)).abs().max()
    print(f"gemma3 {budget}: {verdict}; largest difference of a loss {difference:.1e}")
    assert not verdict.unexcused, verdict.unexcused
    for layer, kind in enumerate(model.config.layer_types):
        # The last query may look back 511 positions and at itself: so many are worth holding after it.
        assert len(cache.kept(layer)) <= (min(budget, 512) if kind == "sliding_attention" else budget)
        if kind == "full_attention":
            assert len(cache.kept(layer)) == budget


def decode_losses(model, ids, cache, losses) -> None:
    """As ``decode``, keeping losses instead of logits; the last token is never fed."""
    usual = model.config._attn_implementation
    model.set_attn_implementation("physical")
    try:
        with torch.inference_mode():
            for t in range(ids.shape[1] - 1):
                logits = model(input_ids=ids[:, t : t + 1], use_cache=True, **{cache_argument(model): cache}).logits[
                    :, 0
                ]
                losses.append(
                    torch.nn.functional.cross_entropy(logits.float(), ids[:, t + 1], reduction="none").unsqueeze(1)
                )
    finally:
        model.set_attn_implementation(usual)
