"""torch's default dtype and device change nothing: whatever is made here says of what kind it is, and where."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.layers import Window, qkv
from support.models import not_padding, tiny, tokens
from support.policies import STEPWISE, small

import tova
from tova import policies
from tova.check import check
from tova.compat import cache_argument
from tova.decode import cpu as step
from tova.replay import Attention, LayerState, replay
from tova.scan import cpu, fixed_point, reference
from tova.simulation import simulate
from tova.trace import canonical_trace

DEFAULTS = ("bfloat16", "float64", "meta")
SCANS = {"reference": reference.SCAN, "cpu": cpu.SCAN, "fixed_point": fixed_point.SCAN}
BUDGET = 9


@contextlib.contextmanager
def default(what: str):
    """torch's defaults as ``what`` says inside: a dtype, or a device on which nothing can be computed."""
    usual = torch.get_default_dtype()
    try:
        if what == "meta":
            torch.set_default_device("meta")
        else:
            torch.set_default_dtype(getattr(torch, what))
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(usual)


def same(a, b) -> bool:
    """Whether two results are the same to the bit, in the same dtypes."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.device == b.device and bool(((a == b) | ((a != a) & (b != b))).all())
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def numbers(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = qkv(seed=generator)
    real = not_padding([0, 5], 40)
    return [*(x.to(dtype) for x in made), real, torch.randn(4, generator=generator, dtype=torch.float32)]


def replayed(name: str, scan, made: list[torch.Tensor], **how) -> tuple:
    """Outputs, what is held, and the log: in pieces, then token by token."""
    policy = small(name, BUDGET)
    query, key, value, real, sinks = made
    state = LayerState.empty(policy, key, value, 2 if policy.per_head else 1, log=True)
    attention = Attention(8**-0.5, how.pop("softcap", None), sinks if how.pop("sinks", False) else None)
    padded = how.pop("padded", False)
    out = []
    for begin, end in ((0, 14), (14, 27), *((t, t + 1) for t in range(27, 40))):
        out.append(
            replay(
                query[:, :, begin:end], key[:, :, begin:end], value[:, :, begin:end], state, policy, attention,
                scan=scan, chunk=8, not_padding=real[:, begin:end] if padded and begin == 0 else None,
                **how | (dict(one_shot=True) if begin == 0 and "prefill" in name else {}),
            )
        )  # fmt: skip
    return torch.cat(out, 2), LayerState.unpack(state.pack()).pack()


@pytest.mark.parametrize("scan", SCANS)
@pytest.mark.parametrize("name", [name for name, made in policies.POLICIES.items() if not made.reindexes])
def test_replay(name: str, scan: str) -> None:
    if (scan == "cpu" and not cpu.supports(small(name, BUDGET))) or (scan == "fixed_point" and name == "h2o_masked"):
        pytest.skip("another scan's")
    for how in ({}, dict(padded=True, sinks=True), dict(visibility=Window(6), evict_every=3, softcap=5.0)):
        made = numbers()
        expected = replayed(name, SCANS[scan], made, **how)
        for what in DEFAULTS:
            with default(what):
                found = replayed(name, SCANS[scan], made, **how)
            assert same(found, expected), (what, how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_replay_of_other_dtypes(dtype: torch.dtype) -> None:
    made = numbers(dtype)
    for name in ("tova", "h2o_head", "scissorhands", "full", "window"):
        expected = replayed(name, reference.SCAN, made)
        for what in DEFAULTS:
            with default(what):
                assert same(replayed(name, reference.SCAN, made), expected), what


def test_replay_with_threads_and_what_is_not_finite(monkeypatch) -> None:
    made = numbers()
    made[2][0, 0, 17] = float("nan")
    usual = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(step, "_MANY", 0)
    monkeypatch.setattr(step, "_THREADS", 1)
    try:
        for name in ("tova", "window", "full"):
            expected = replayed(name, cpu.SCAN, made)
            for what in DEFAULTS:
                with default(what):
                    assert same(replayed(name, cpu.SCAN, made), expected), what
    finally:
        torch.set_num_threads(usual)


@pytest.mark.parametrize("name", STEPWISE)
def test_simulation_and_check(name: str) -> None:
    policy = small(name, BUDGET)
    trace = canonical_trace(tokens=60)
    engines = [] if policy.wants_features else ["stepwise", "auto"]
    expected = [vars(simulate(policy, trace, engine)) for engine in engines]
    for what in DEFAULTS:
        with default(what):
            found = [vars(simulate(policy, trace, engine)) for engine in engines]
            assert check(policy)
        for a, b in zip(found, expected, strict=True):
            assert all(
                (x == y).all() if hasattr(x, "all") else x == y for x, y in zip(a.values(), b.values(), strict=True)
            )


@pytest.mark.parametrize("what", DEFAULTS)
@pytest.mark.parametrize("kind", ["llama", "gemma2", "gpt_oss"])
def test_a_model_with_a_cache(kind: str, what: str) -> None:
    """A padded prompt, tokens one by one, and the measures along the way."""
    model, ids = tiny(kind), tokens(length=40)

    @torch.inference_mode()
    def run() -> list:
        out = []
        for name in ("tova", "h2o", "streaming_llm", "full"):
            cache = tova.EvictingCache(small(name, BUDGET), chunk=16)
            mask = (torch.arange(30, device="cpu") >= torch.tensor([[0], [4]], device="cpu")).long()
            given = {cache_argument(model): cache, "use_cache": True}
            places = (mask.cumsum(-1) - 1).clamp_min(0)
            out.append(model(ids[:, :30], attention_mask=mask, position_ids=places, **given).logits)
            for t in range(30, 36):
                mask = torch.cat([mask, mask[:, -1:]], 1)
                places = (mask.cumsum(-1) - 1)[:, -1:]
                out.append(model(ids[:, t : t + 1], attention_mask=mask, position_ids=places, **given).logits)
            out.append(cache.evicted_at)
        return out

    expected = run()
    with default(what):
        found = run()
    assert same(found, expected)


@pytest.mark.parametrize("what", ["bfloat16", "float64"])
def test_generate(what: str) -> None:
    """transformers itself makes tensors of the default device there."""
    model, ids = tiny("llama"), tokens(length=20)

    def run() -> torch.Tensor:
        cache = tova.EvictingCache(small("tova", BUDGET))
        return model.generate(
            ids,
            **{cache_argument(model): cache},
            max_new_tokens=12,
            do_sample=False,
            attention_mask=torch.ones_like(ids),
        )

    expected = run()
    with default(what):
        assert torch.equal(run(), expected)


@pytest.mark.parametrize("what", DEFAULTS)
def test_measures(what: str) -> None:
    from tova import measures

    model, ids = tiny("llama"), tokens(length=60)

    def run() -> list:
        found = []
        for compiled in (True, False):
            attention = measures.AttentionMeasures(compiled=compiled)
            cache = tova.EvictingCache(small("tova", BUDGET), observers=[attention])
            found.append(measures.token_nll(model, ids, cache))
            found.append(measures.perplexity(found[-1]))
            report = attention.report
            found += [report.mass, report.mass_with_self, report.hits, report.over(BUDGET).retained_mass]
            found += measures.lifetimes(cache.evicted_at)
        return found

    expected = run()
    with default(what):
        found = run()
    assert same(found, expected)


def test_the_defaults_were_others() -> None:
    """That the contexts above do what they say."""
    with default("meta"):
        assert torch.zeros(1).device.type == "meta"
    with default("bfloat16"):
        assert torch.zeros(1).dtype == torch.bfloat16
    assert torch.zeros(1).dtype == torch.float32
    assert torch.zeros(1).device.type == "cpu"
