"""Caches side by side: every row is the run alone, whatever its policy, budget and intervals."""

from __future__ import annotations

import contextlib

import pytest
import torch
from support.models import forward, tiny, tokens

from tova import EvictingCache, UsageError, policies
from tova.measures import AttentionMeasures, token_nll
from tova.side_by_side import SideBySide


def caches(**options) -> list[EvictingCache]:
    return [
        EvictingCache(policies.make("tova", budget=20), observers=[AttentionMeasures()], **options),
        EvictingCache(policies.make("tova", budget=31, sinks=2), observers=[AttentionMeasures()], **options),
        EvictingCache(policies.make("h2o", budget=24, recent_window=4), evict_every=3, **options),
        EvictingCache(policies.make("tova_head", budget=9), observers=[AttentionMeasures()], **options),
        EvictingCache(policies.make("window", budget=40), **options),
        EvictingCache(policies.make("full"), **options),
    ]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_rows_are_the_runs_alone(name: str, threads: int) -> None:
    model, ids = tiny(name), tokens(1, 90)
    usual = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        together = caches(chunk=16)
        nll = token_nll(model, ids.expand(6, -1), SideBySide(together), segment=50)
    finally:
        torch.set_num_threads(usual)
    for r, alone in enumerate(caches(chunk=16)):
        expected = token_nll(model, ids, alone, segment=50)
        assert (together[r].evicted_at == alone.evicted_at).all()
        assert (nll[r] - expected[0]).abs().max() < 1e-4
        assert together[r].nbytes == alone.nbytes
        if alone.observers:
            ours, theirs = together[r].observers[0].report, alone.observers[0].report
            assert (ours.mass - theirs.mass).nan_to_num().abs().max() < 1e-5
            assert (ours.hits == theirs.hits).all()


def test_streams_wait_for_each_other(monkeypatch) -> None:
    """By a stand-in for CUDA's streams: rows begin after what the caller did, and it goes on after them."""
    noted: list[tuple] = []

    class Stream:
        def __init__(self, device=None, name: str = "row") -> None:
            self.name = f"row {sum(entry[0] == 'made' for entry in noted)}" if name == "row" else name
            if name == "row":
                noted.append(("made", self.name))

        def wait_stream(self, other) -> None:
            noted.append((self.name, "waits for", other.name))

    caller = Stream(name="caller")

    @contextlib.contextmanager
    def within(stream):
        noted.append(("enter", stream.name))
        yield
        noted.append(("leave", stream.name))

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: caller)
    monkeypatch.setattr(torch.cuda, "stream", within)
    side = SideBySide(caches()[:2])

    def work(r: int) -> torch.Tensor:
        noted.append(("work", r))
        return torch.tensor(r)

    for call in range(2):
        noted[:] = [entry for entry in noted if entry[0] == "made"]
        assert side.over_rows(work, torch.device("cuda")) == [0, 1]
        made = [("made", "row 0"), ("made", "row 1")]
        order = []
        for r in range(2):
            order += [(f"row {r}", "waits for", "caller"), ("enter", f"row {r}"), ("work", r), ("leave", f"row {r}")]
        order += [("caller", "waits for", "row 0"), ("caller", "waits for", "row 1")]
        assert noted == made + order, call  # the same two streams at the second call


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_on_a_gpu() -> None:
    model, ids = tiny("llama").to("cuda"), tokens(1, 90).to("cuda")
    together = caches(chunk=16)
    nll = token_nll(model, ids.expand(6, -1), SideBySide(together))
    for r, alone in enumerate(caches(chunk=16)):
        expected = token_nll(model, ids, alone)
        assert (together[r].evicted_at == alone.evicted_at).all()
        assert (nll[r] - expected[0]).abs().max() < 1e-3


def test_prompts_at_once() -> None:
    model, ids = tiny("llama"), tokens(1, 90)
    together = caches(prefill="one_shot")
    token_nll(model, ids.expand(6, -1), SideBySide(together), prompt=50)
    for r, alone in enumerate(caches(prefill="one_shot")):
        token_nll(model, ids, alone, prompt=50)
        assert (together[r].evicted_at == alone.evicted_at).all()


def test_refusals() -> None:
    model, ids = tiny("llama"), tokens(2, 30)
    with pytest.raises(UsageError, match="6 caches side by side need as many rows, got 2"):
        forward(model, ids, SideBySide(caches()))
    with pytest.raises(UsageError, match="no padding"):
        forward(model, ids, SideBySide(caches()[:2]), padding=[0, 3])
    mixed = SideBySide([EvictingCache(policies.make("full")), EvictingCache(policies.make("full"), prefill="one_shot")])
    with pytest.raises(UsageError, match="same prefill"):
        token_nll(model, ids, mixed)
    with pytest.raises(UsageError, match="at least one"):
        SideBySide([])
