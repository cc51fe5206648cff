"""Tiny random-weight models of several architectures, for tests of the cache."""

from __future__ import annotations

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import tova
from tova.compat import cache_argument

TINY = {
    "llama": (LlamaConfig, LlamaForCausalLM, {}),
    "mistral": (MistralConfig, MistralForCausalLM, dict(sliding_window=32)),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {}),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM, dict(sliding_window=32)),
}


def tiny(name: str, seed: int = 0):
    """A random-weight model with attention peaked enough to tell tokens apart, switched to the evicting attention."""
    config, kind, more = TINY[name]
    made = config(
        vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0, bos_token_id=1,
        eos_token_id=None, initializer_range=0.3, **more,
    )  # fmt: skip
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return tova.enable(kind(made).eval())


def tokens(batch: int = 2, length: int = 110, seed: int = 1) -> torch.Tensor:
    """int64 [batch, length], random."""
    return torch.randint(2, 300, (batch, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def forward(model, ids, cache, padding=None, **more):
    """Logits of one pass, left padding given as columns per row."""
    if padding:
        mask = torch.arange(ids.shape[1]) >= torch.tensor(padding).unsqueeze(1)
        more |= dict(attention_mask=mask.long(), position_ids=(mask.cumsum(-1) - 1).clamp_min(0))
    return model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **more).logits
