"""The model a benchmark runs, the text it reads, and how a cache is fed."""

from __future__ import annotations

import functools
import inspect
import statistics
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from experiments.benchmarks.timing import seconds_of
from experiments.tasks import Context
from experiments.tasks.perplexity import encode
from tova.errors import UsageError

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

_AT_ONCE = 256
"""Tokens a cache is filled with at a time: logits of all at once would not fit everywhere."""


def model_and_text(context: Context, tokens: int) -> tuple[PreTrainedModel, Tensor, str]:
    """The cell's model, the first document's ids int64 [1, T] with T at least ``tokens``, and its name.

    Raises:
        UsageError: the document, or what ``dataset.tokens`` leaves of it, is shorter.
    """
    dataset = context.cell.dataset
    assert dataset is not None
    document = context.load_documents()[0]
    loaded = context.load_model()
    ids = encode(loaded, document.text, dataset.tokens, document.name).unsqueeze(0).to(loaded.model.device)
    if ids.shape[1] < tokens:
        cut = f" with dataset.tokens={dataset.tokens}" if ids.shape[1] == dataset.tokens else ""
        raise UsageError(
            f"{document.name} has {ids.shape[1]} tokens{cut}; these lengths, budgets and repetitions need {tokens}"
        )
    return loaded.model, ids, document.name


def random_llama(
    device: torch.device, dtype: str, *, layers: int, heads: int, hidden: int, intermediate: int, vocabulary: int,
    positions: int,
) -> PreTrainedModel:  # fmt: skip
    """A Llama of random weights, made on the device and in its dtype; always the same ones."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        max_position_embeddings=positions,
    )
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def attending(model: PreTrainedModel, cache: Any) -> None:
    """Let the model attend as ``cache`` needs it: to an evicting one by ours, to any other, or none, by torch's."""
    import tova

    if isinstance(cache, tova.EvictingCache):
        tova.enable(model)
    else:
        model.set_attn_implementation("sdpa")


def read(model: PreTrainedModel, ids: Tensor, cache: Any) -> None:
    """Feed a cache with ``ids`` [B, T], a few at a time, of which only the last logits are made."""
    from tova.compat import cache_argument

    named = {"use_cache": True, cache_argument(model): cache}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        named["logits_to_keep"] = 1
    for part in ids.split(_AT_ONCE, 1):
        model(input_ids=part, **named)


def step(model: PreTrainedModel, ids: Tensor, at: int, cache: Any) -> float:
    """Seconds for token ``at`` of ``ids`` [B, T]."""
    from tova.compat import cache_argument

    named = {"input_ids": ids[:, at : at + 1], "use_cache": True, cache_argument(model): cache}
    return seconds_of(functools.partial(model, **named), model.device)


def steps_along(
    model: PreTrainedModel, ids: Tensor, cache: Any, places: Iterable[int], steps: int
) -> list[tuple[int, float]]:
    """(place, seconds per step) at ascending places of ``ids`` [B, T]: the median of ``steps`` after one more.

    A place that was passed while the one before was timed is moved on to where that ended.
    """
    found, at = [], 0
    for place in places:
        if at < place:
            read(model, ids[:, at:place], cache)
        begin = max(at, place)
        seconds = [step(model, ids, begin + n, cache) for n in range(steps + 1)]
        found.append((begin, statistics.median(seconds[1:])))
        at = begin + steps + 1
    return found
