"""What a cache takes: stated bytes, allocated bytes, and the peak of a long generation."""

from __future__ import annotations

import weakref

import pytest
import torch
from support.models import forward, tiny, tokens
from support.policies import small
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import tova
from tova import EvictingCache, policies
from tova.compat import cache_argument


class Allocations(TorchDispatchMode):
    """Bytes of all tensor storages made while it is on, those still alive and the most there ever were.

    The model's own are not counted.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.alive, self.peak = 0, 0
        self._known = {t.untyped_storage()._cdata for t in [*model.parameters(), *model.buffers()]}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf.untyped_storage())
        return out

    def _note(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known:
            return
        self._known.add(key)
        self.alive += size
        self.peak = max(self.peak, self.alive)
        weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.alive -= size


def wide_llama(layers: int = 4):
    """A small model with large keys and values, so that the cache is what memory goes to."""
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=4, head_dim=128, max_position_embeddings=8192, pad_token_id=0, bos_token_id=1,
        eos_token_id=None,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return tova.enable(LlamaForCausalLM(config).eval())


def peak_of(model, cache, length: int) -> int:
    """Bytes: the most that was allocated at once while ``length`` tokens were generated."""
    allocations = Allocations(model)
    ids = torch.tensor([[5, 6, 7]])
    with allocations:
        text = model.generate(
            ids, **{cache_argument(model): cache}, max_new_tokens=length - 3, do_sample=False, suppress_tokens=[0, 1, 2]
        )
    assert text.shape[1] == length
    return allocations.peak


@pytest.mark.parametrize(
    ("length", "budget", "within"), [(640, 256, 0.08), pytest.param(4096, 512, 0.05, marks=pytest.mark.slow)]
)
def test_peak_of_a_long_generation(length: int, budget: int, within: float) -> None:
    """The peak is the budget's entries and one more, whatever the length; the full cache's grows with the text."""
    model = wide_llama()
    per_entry = 2 * 4 * 128 * 4
    evicting = peak_of(model, EvictingCache(policies.make("tova", budget=budget), log=False), length)
    full = peak_of(model, DynamicCache(config=model.config), length)
    arithmetic = 4 * (budget + 1) * (per_entry + 8 + 1 + 4)
    print(
        f"{length:,} tokens at budget {budget}: peak {evicting / 2**20:.2f} MiB, arithmetic {arithmetic / 2**20:.2f}, "
        f"full cache {full / 2**20:.2f} MiB"
    )
    assert abs(evicting / arithmetic - 1) < within
    assert full > 4 * length * per_entry


@pytest.mark.parametrize("policy", policies.POLICIES)
def test_bytes_are_those_allocated(policy: str) -> None:
    """``nbytes`` is what the tensors' storages take, after a prompt and after each decoded token."""
    model = tiny("llama")
    cache = EvictingCache(small(policy, 40), prefill="one_shot")
    ids = tokens(2, 110)
    for begin, end in ((0, 90), (90, 91), (91, 92), (92, 100), (100, 101)):
        forward(model, ids[:, begin:end], cache)
        storages = {t.untyped_storage()._cdata: t.untyped_storage() for layer in cache.layers for t in layer.tensors()}
        assert cache.nbytes == sum(s.nbytes() for s in storages.values()), (begin, end)


def test_the_log_is_apart() -> None:
    """It grows with the text, is not charged, and can be off."""
    model = tiny("llama")
    with_log, without = (EvictingCache(policies.make("tova", budget=20), log=log) for log in (True, False))
    for end in (60, 100):
        for cache in (with_log, without):
            forward(model, tokens(1, 100)[:, end - 40 if end > 60 else 0 : end], cache)
        assert with_log.evicted_at.shape[-1] == end
        assert with_log.nbytes == without.nbytes
    assert all(layer.state.log is None for layer in without.layers)
