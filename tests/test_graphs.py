"""Decoding as a CUDA graph. Without a GPU a recorder stands in that keeps to a graph's rules, :class:`Recorder`."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import tiny, tokens
from support.policies import small
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tova import DecodeGraph, EvictingCache, UsageError
from tova.compat import cache_argument
from tova.policies import make

POLICIES = (
    "tova", "tova_official", "tova_value", "h2o", "h2o_half", "scissorhands", "snapkv", "window", "streaming_llm",
    "l2norm", "random",
)  # fmt: skip
WAITS = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal")
"""Operations that read a number back, for which a GPU would have to be waited for; a graph cannot hold them."""


class Recorder(TorchDispatchMode):
    """Notes every operation with the very tensors it reads and writes, and does them again on demand.

    As with a CUDA graph, Python does not run again: numbers are those of the recording, and what one replay is to
    find of the one before must be where it was read from.
    """

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[Any, tuple, dict, Any]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        assert not any(word in func.__name__ for word in WAITS), f"{func} would wait for the GPU"
        result = func(*args, **kwargs)
        self.done.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        for func, args, kwargs, result in self.done:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and not _same_memory(old, new):
                    old.copy_(new)


def _same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


class OnTheCpu(DecodeGraph):
    """The class under test with what needs a GPU replaced."""

    recordings = 0

    def _beside(self, work: Callable[[], torch.Tensor]) -> torch.Tensor:
        return work()

    def _record(self, work: Callable[[], Any]) -> Callable[[], None]:
        # A graph records without doing, the recorder does: what it changed is put back.
        tensors = [tensor for layer in self._cache.layers for tensor in layer.tensors()]
        before = [tensor.clone() for tensor in tensors]
        with Recorder() as recorder:
            work()
        for tensor, old in zip(tensors, before, strict=True):
            tensor.copy_(old)
        self.recordings += 1
        return recorder.replay


@pytest.fixture
def on_the_cpu(monkeypatch) -> type[DecodeGraph]:
    """Constructed as usual but for the check that there is a GPU."""

    class There:
        type = "cuda"

    original = DecodeGraph.__init__

    def init(self, model, cache) -> None:
        with monkeypatch.context() as patch:
            patch.setattr(type(model), "device", There())
            original(self, model, cache)

    monkeypatch.setattr(OnTheCpu, "__init__", init, raising=False)
    return OnTheCpu


def decode(model, cache: EvictingCache, prompt: torch.Tensor, following: torch.Tensor, graph=None) -> torch.Tensor:
    """Logits after each of the ``following`` tokens, taken one at a time."""
    name = cache_argument(model)
    out = []
    with torch.inference_mode():
        model(input_ids=prompt, use_cache=True, **{name: cache})
        step = None if graph is None else graph(model, cache)
        for ids in following.split(1, 1):
            if step is None:
                out.append(model(input_ids=ids, use_cache=True, **{name: cache}).logits)
            else:
                out.append(step(ids).clone())
    decode.step = step
    return torch.cat(out, 1)


@pytest.mark.parametrize("prompt", [7, 40])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_graph_decodes_the_same(on_the_cpu, policy: str, prompt: int) -> None:
    """From a cache with room, and from a full one; logits and what is kept in the end."""
    model, ids = tiny("llama"), tokens(2, 75)
    found = []
    for graph in (None, on_the_cpu):
        cache = EvictingCache(small(policy, 16), log=False, scan="reference")
        logits = decode(model, cache, ids[:, :prompt], ids[:, prompt:], graph)
        found.append((logits, [cache.kept(n, row) for n in range(2) for row in range(2)], cache.get_seq_length()))
    assert decode.step.recordings == 1
    assert found[0][1:] == found[1][1:]
    assert (found[0][0] - found[1][0]).abs().max() < 1e-5


def test_heads_and_layers_of_their_own(on_the_cpu) -> None:
    model, ids = tiny("llama"), tokens(1, 90)
    found = []
    for graph in (None, on_the_cpu):
        cache = EvictingCache(small("pyramidkv", 20, per_head=True), log=False, scan="reference")
        logits = decode(model, cache, ids[:, :60], ids[:, 60:], graph)
        found.append((logits, [cache.kept(n, 0, head) for n in range(2) for head in range(2)]))
    assert decode.step.recordings == 1
    assert found[0][1] == found[1][1]
    assert (found[0][0] - found[1][0]).abs().max() < 1e-5


def test_a_step_taken_without_the_graph_is_seen(on_the_cpu) -> None:
    """Whatever is done to the cache in between, the next step starts from it."""
    model, ids = tiny("llama"), tokens(1, 60)
    name = cache_argument(model)
    found = []
    for graph in (None, on_the_cpu):
        cache = EvictingCache(make("tova", budget=12), log=False, scan="reference")
        first = decode(model, cache, ids[:, :20], ids[:, 20:30], graph)
        step = decode.step
        with torch.inference_mode():
            model(input_ids=ids[:, 30:31], use_cache=True, **{name: cache})
            model(input_ids=ids[:, 31:45], use_cache=True, **{name: cache})
            rest = [
                step(one).clone() if step else model(input_ids=one, use_cache=True, **{name: cache}).logits
                for one in ids[:, 45:].split(1, 1)
            ]
        found.append(torch.cat([first, *rest], 1))
    assert step.recordings == 2
    assert (found[0] - found[1]).abs().max() < 1e-5


def test_a_policy_that_never_fills_is_decoded_as_usual(on_the_cpu) -> None:
    model, ids = tiny("llama"), tokens(1, 40)
    cache = EvictingCache(make("full"), log=False)
    expected = decode(model, EvictingCache(make("full"), log=False), ids[:, :20], ids[:, 20:])
    assert (decode(model, cache, ids[:, :20], ids[:, 20:], on_the_cpu) - expected).abs().max() < 1e-5
    assert decode.step.recordings == 0


def test_the_recorder_notices_what_a_graph_cannot_do() -> None:
    """The stand-in itself: numbers stay those of the recording, and waiting is refused."""
    x, n = torch.zeros(2), 1
    with Recorder() as recorder:
        x.add_(n)
    n = 5
    recorder.replay()
    assert x.tolist() == [2.0, 2.0]
    y = torch.ones(2)
    with Recorder() as recorder:
        y = y + 1  # a new tensor each time: the next replay reads the old one
    recorder.replay()
    assert y.tolist() == [2.0, 2.0]
    with pytest.raises(AssertionError, match="would wait"), Recorder():
        x.sum().item()


def test_as_the_readme_shows_it(on_the_cpu) -> None:
    class Tova:
        DecodeGraph = on_the_cpu

    text = (Path(__file__).parent.parent / "README.md").read_text()
    (block,) = [b for b in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL) if "DecodeGraph" in b]
    model = tiny("llama")
    cache = EvictingCache(make("tova", budget=8), log=False)
    with torch.no_grad():
        model(tokens(1, 20), use_cache=True, **{cache_argument(model): cache})
    names = {"tova": Tova, "model": model, "cache": cache, "ids": tokens(1, 1)}
    exec(block, names)
    assert names["logits"].shape == (1, 1, model.config.vocab_size)


def test_refusals(on_the_cpu) -> None:
    model = tiny("llama")
    tova = make("tova", budget=8)
    with pytest.raises(UsageError, match="DecodeGraph needs a model on a CUDA device, this one is on cpu"):
        DecodeGraph(model, EvictingCache(tova, log=False))
    with pytest.raises(UsageError, match="log=False"):
        on_the_cpu(model, EvictingCache(tova))
    with pytest.raises(UsageError, match="evict_every=1, this one has 4"):
        on_the_cpu(model, EvictingCache(tova, log=False, evict_every=4))
    with pytest.raises(UsageError, match="fed with a prompt"):
        on_the_cpu(model, EvictingCache(tova, log=False))(tokens(1, 1))
    windowed = tiny("mistral")
    with pytest.raises(UsageError, match="no layers with a window of their own"):
        decode(windowed, EvictingCache(tova, log=False), tokens(1, 20), tokens(1, 2), on_the_cpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("policy", POLICIES)
def test_on_a_gpu(policy: str) -> None:
    model, ids = tiny("llama").to("cuda"), tokens(2, 75).to("cuda")
    found = []
    for graph in (None, DecodeGraph):
        cache = EvictingCache(small(policy, 16), log=False)
        found.append((decode(model, cache, ids[:, :30], ids[:, 30:], graph), [cache.kept(n) for n in range(2)]))
    assert found[0][1] == found[1][1]
    assert (found[0][0] - found[1][0]).abs().max() < 1e-4
