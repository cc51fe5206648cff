"""Every fast path against the reference: forced by name or by counting that it was taken."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch
from support.models import forward, tiny, tokens

import tova
from tova import EvictingCache, closed_forms, policies
from tova.backends import threaded
from tova.compat import cache_argument
from tova.measures import AttentionMeasures, token_nll
from tova.replay import Attention
from tova.threads import team


def counted(monkeypatch, module, name: str) -> list[int]:
    """Count calls of ``module.name`` while it goes on doing what it does."""
    calls, original = [0], getattr(module, name)

    def counting(*arguments, **named):
        calls[0] += 1
        return original(*arguments, **named)

    monkeypatch.setattr(module, name, counting)
    return calls


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize(("policy", "options"), [("window", {}), ("streaming_llm", {}), ("window", dict(sinks=7))])
def test_the_band(monkeypatch, policy: str, options: dict, per_head: bool) -> None:
    """Window and sinks in closed form are the window and sinks taken step by step, fed in any pieces."""
    calls = counted(monkeypatch, closed_forms, "band_attention")
    model, ids = tiny("llama"), tokens(2, 290)
    made = policies.make(policy, budget=20, per_head=per_head, **options)
    expected = EvictingCache(made, scan="reference", observers=[AttentionMeasures()])
    logits = forward(model, ids, expected)
    assert calls == [0]
    for cuts in ([290], [13, 290], [5, 40, 41, 42, 290]):
        cache = EvictingCache(made, observers=[AttentionMeasures()])
        parts = [forward(model, ids[:, a:b], cache) for a, b in zip([0, *cuts], cuts, strict=False)]
        assert (cache.evicted_at == expected.evicted_at).all()
        assert (torch.cat(parts, 1) - logits).abs().max() < 1e-3
        for layer in range(2):
            assert cache.kept(layer, 1) == expected.kept(layer, 1)
        assert cache.nbytes == expected.nbytes
    assert calls[0] > 2 * 3


@pytest.mark.parametrize(
    ("name", "policy", "options"),
    [
        ("mistral", "window", {}),  # a window of the model's own
        ("gemma2", "window", {}),  # a soft cap
        ("gpt_oss", "streaming_llm", {}),  # sinks in the softmax
        ("llama", "window", dict(evict_every=3)),
        ("llama", "window", dict(prefill="one_shot")),
        ("llama", "tova", {}),
    ],
)
def test_where_there_is_no_closed_form(monkeypatch, name: str, policy: str, options: dict) -> None:
    calls = counted(monkeypatch, closed_forms, "band_attention")
    forward(tiny(name), tokens(2, 60), EvictingCache(policies.make(policy, budget=12), **options))
    assert calls == [0]


def test_after_a_prompt_at_once(monkeypatch) -> None:
    """What is left is what the rule would have left, so the closed form goes on from there."""
    calls = counted(monkeypatch, closed_forms, "band_attention")
    model, ids = tiny("llama"), tokens(2, 90)
    found = []
    for scan in ("reference", "auto"):
        cache = EvictingCache(policies.make("streaming_llm", budget=12), prefill="one_shot", scan=scan)
        forward(model, ids[:, :40], cache)
        cache.prefill = "every_step"
        found.append((forward(model, ids[:, 40:], cache), cache.evicted_at))
    assert calls == [2]
    assert (found[0][1] == found[1][1]).all()
    assert (found[0][0] - found[1][0]).abs().max() < 1e-3


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    usual = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(usual)


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize(("policy", "options"), [("tova", {}), ("h2o_half", {"per_head": True}), ("snapkv", {})])
def test_threads_share_a_chunk(monkeypatch, threads, policy: str, options: dict, batch: int) -> None:
    """Products, and the rows of a batch, are shared among a team; the numbers are those of one thread."""
    calls = counted(monkeypatch, threaded.ThreadsBackend, "mix_weights")
    model, ids = tiny("llama"), tokens(batch, 200)
    made = policies.make(policy, budget=40, **options)
    found = []
    for count in (1, 2, 5):
        threads(count)
        calls[0] = 0
        cache = EvictingCache(made, chunk=16)
        found.append((forward(model, ids, cache), cache.evicted_at))
        assert (calls[0] > 0) == (count > 1)
        assert torch.get_num_threads() == count
    for logits, evicted_at in found[1:]:
        assert (found[0][1] == evicted_at).all()
        assert (found[0][0] - logits).abs().max() < 1e-4


def test_threads_where_gradients_are_on(threads) -> None:
    """The README's way: no ``no_grad`` around the call."""
    model, ids = tiny("llama"), tokens(1, 100)
    expected = forward(model, ids, EvictingCache(policies.make("tova", budget=20), chunk=100))
    threads(2)
    cache = EvictingCache(policies.make("tova", budget=20), chunk=16)
    logits = model(ids, use_cache=True, **{cache_argument(model): cache}).logits
    assert logits.requires_grad
    assert (logits - expected).abs().max() < 1e-4


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("count", [2, 3, 7])
def test_products_of_a_team(threads, count: int, softcap: float | None, dtype: torch.dtype, overlap: bool) -> None:
    """Chunk after chunk beside formulas in float64, buffers being used again and the shapes changing."""
    threads(count)
    torch.manual_seed(count)
    attention = Attention(0.3, softcap)
    expected, out = [], []
    with team() as together:
        shared = threaded.ThreadsBackend(attention, together, overlap=overlap)
        for chunk, candidates in enumerate((5, 9, 12, 12, 12, 7)):
            steps = 5 if chunk < 5 else 2
            query, key, value = (
                torch.randn(2, heads, n, 8).to(dtype) for heads, n in ((6, steps), (2, candidates), (2, candidates))
            )
            logits = shared.logits(query, key)
            exact = query.double() @ key.double().repeat_interleave(3, 1).transpose(2, 3) * 0.3
            if softcap is not None:
                exact = softcap * (exact / softcap).tanh()
            close = 1e-5 if dtype == torch.float32 else 3e-2
            assert (logits.double() - exact).abs().max() < close
            weights = logits.exp_()
            sums = weights.sum(-1, keepdim=True)
            expected.append(exact.softmax(-1) @ value.double().repeat_interleave(3, 1))
            out.append(torch.full((2, 6, steps, 8), float("nan"), dtype=dtype))
            shared.mix_weights(weights, sums, value, out[-1])
        shared.finish()
    for one, other in zip(out, expected, strict=True):
        assert (one.double() - other).abs().max() < close


def test_what_a_helper_raises_is_raised(threads) -> None:
    threads(3)
    done = []

    def work(n: int) -> None:
        if n == 2:
            raise ValueError("two")
        done.append(n)

    with pytest.raises(ValueError, match="two"), team() as together:
        together.share(work, [(1,), (2,), (3,)])
    assert sorted(done) == [1, 3]
    assert torch.get_num_threads() == 3


@pytest.mark.timing
def test_a_replay_costs_about_a_forward(smollm2, books) -> None:
    """A guard, generous enough never to fail by noise: the ratio of two passes in turn, the best of three."""
    model = smollm2.model
    ids = torch.tensor([smollm2.tokenizer(books["alice29"][:8000])["input_ids"][:1024]])

    def seconds(cache_of) -> float:
        started = time.perf_counter()
        token_nll(model, ids, cache_of())
        return time.perf_counter() - started

    ratios = []
    for _ in range(3):
        model.set_attn_implementation("sdpa")
        forward_seconds = seconds(lambda: None)
        tova.enable(model)
        replay_seconds = seconds(lambda: EvictingCache(policies.make("tova", budget=256), log=False))
        ratios.append(replay_seconds / forward_seconds)
        if ratios[-1] < 1.8:
            break
    assert min(ratios) < 1.8, ratios
