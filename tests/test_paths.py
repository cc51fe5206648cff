"""Every fast path against the reference: forced by name or by counting that it was taken."""

from __future__ import annotations

import time

import pytest
import torch
from models import forward, tiny, tokens

import tova
from tova import EvictingCache, band, policies, replay
from tova.measures import AttentionMeasures, token_nll


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
    calls = counted(monkeypatch, band, "attend")
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
    calls = counted(monkeypatch, band, "attend")
    forward(tiny(name), tokens(2, 60), EvictingCache(policies.make(policy, budget=12), **options))
    assert calls == [0]


def test_after_a_prompt_at_once(monkeypatch) -> None:
    """What is left is what the rule would have left, so the closed form goes on from there."""
    calls = counted(monkeypatch, band, "attend")
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


@pytest.mark.parametrize("policy", ["tova", "h2o_half", "snapkv"])
def test_multiplying_beside_the_scan(monkeypatch, policy: str) -> None:
    """With two threads the values are mixed in a helper thread; the numbers are those of one thread."""
    calls = counted(monkeypatch, replay, "beside")
    model, ids = tiny("llama"), tokens(2, 200)
    made = policies.make(policy, budget=40)
    usual, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            cache = EvictingCache(made, chunk=16)
            found.append((forward(model, ids, cache), cache.evicted_at))
            assert (calls[0] > 0) == (threads == 2)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(usual)
    assert (found[0][1] == found[1][1]).all()
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4


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
