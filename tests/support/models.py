"""Tiny random-weight models of many architectures, for tests of the cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import transformers

import tova
from tova.compat import cache_argument

_SIZES = dict(
    vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=512, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    initializer_range=0.3,
)  # fmt: skip
_OLD_SIZES = dict(
    vocab_size=300, n_embd=64, n_head=4, n_layer=2, n_positions=512, pad_token_id=0, bos_token_id=1, eos_token_id=None,
    initializer_range=0.3,
)  # fmt: skip

# name -> (class prefix, what its configuration needs, what is particular about it)
ZOO: dict[str, tuple[str, dict, str]] = {
    "llama": ("Llama", {}, "grouped queries"),
    "mistral": ("Mistral", dict(sliding_window=24), "sliding window in every layer"),
    "qwen2": ("Qwen2", {}, "biases"),
    "qwen3": ("Qwen3", {}, "normalised queries and keys"),
    "gemma2": ("Gemma2", dict(sliding_window=24), "softcap, alternating windows"),
    "gemma3": (
        "Gemma3",
        dict(sliding_window=24, layer_types=["sliding_attention", "full_attention"]),
        "hybrid windows, two rotary bases",
    ),
    "phi3": ("Phi3", {}, "fused projections"),
    "gpt_neox": ("GPTNeoX", {}, "partial rotary"),
    "mixtral": ("Mixtral", dict(num_local_experts=4), "mixture of experts"),
    "cohere2": ("Cohere2", dict(sliding_window=24), "interleaved rotary, layers without positions"),
    "llama4": (
        "Llama4",
        dict(attention_chunk_size=24, layer_types=["chunked_attention", "full_attention"], num_local_experts=2,
             intermediate_size_mlp=96, moe_layers=[]),
        "chunked attention",
    ),
    "gpt_oss": (
        "GptOss",
        dict(sliding_window=24, num_local_experts=4, layer_types=["sliding_attention", "full_attention"]),
        "attention sinks in the softmax",
    ),
    "gpt_bigcode": ("GPTBigCode", dict(**_OLD_SIZES, multi_query=True), "multi-query, learned positions"),
    "opt": ("OPT", dict(ffn_dim=96, word_embed_proj_dim=64), "learned positions"),
    "gptj": ("GPTJ", dict(**_OLD_SIZES, rotary_dim=8), "interleaved partial rotary"),
}  # fmt: skip

# name -> (class name, what its configuration needs, what the refusal says)
REFUSED: dict[str, tuple[str, dict, str]] = {
    "mamba": ("MambaForCausalLM", {}, "recurrent or state-space layers"),
    "jamba": ("JambaForCausalLM", dict(num_experts=2), "recurrent or state-space layers"),
    "recurrent_gemma": ("RecurrentGemmaForCausalLM", {}, "recurrent or state-space layers"),
    "t5": ("T5ForConditionalGeneration", dict(d_model=32, d_kv=8, num_layers=1, num_heads=2), "is an encoder-decoder"),
    "bloom": ("BloomForCausalLM", dict(n_layer=1, n_head=4), "does not let its attention function be chosen"),
    "mpt": ("MptForCausalLM", dict(d_model=32, n_layers=1, n_heads=2), "does not let its attention function be chosen"),
    "xglm": (
        "XGLMForCausalLM",
        dict(d_model=32, num_layers=1, attention_heads=2),
        "does not let its attention function be chosen",
    ),
}  # fmt: skip
# Their attention changes keys after caching them, which shows only when it runs.
REFUSED_WHEN_RUN = {
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        dict(q_lora_rank=32, kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
             n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, first_k_dense_replace=1, n_group=2,
             topk_group=1, num_key_value_heads=4, head_dim=None),
        "changes its keys after caching them",
    ),
}  # fmt: skip

TINY = ("llama", "mistral", "qwen3", "gemma2")
"""A few that differ, for tests that need not go through all."""


def build(kind: str, options: dict, seed: int = 0):
    """A model of class ``kind`` with random weights, as transformers makes it."""
    model_class = getattr(transformers, kind)
    sizes = {} if "n_embd" in options else _SIZES
    config = model_class.config_class
    options = sizes | options
    options = {k: v for k, v in options.items() if v is not None}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            return model_class(config(**options)).eval()
        except (ValueError, AttributeError, TypeError):  # some take no head_dim
            return model_class(config(**{k: v for k, v in options.items() if k != "head_dim"})).eval()


def tiny(name: str, seed: int = 0):
    """A random-weight model with attention peaked enough to tell tokens apart, switched to the evicting attention."""
    prefix, options, _ = ZOO[name]
    model = build(f"{prefix}ForCausalLM", options, seed)
    generator = torch.Generator().manual_seed(seed)
    for part, weight in model.named_parameters():
        if part.endswith(("k_norm.weight", "q_norm.weight")):  # all ones give all keys the same norm
            weight.data.copy_(torch.rand(weight.shape, generator=generator) + 0.5)
    return tova.enable(model)


def tokens(batch: int = 2, length: int = 110, seed: int = 1) -> torch.Tensor:
    """int64 [batch, length], random and all different: equal tokens have keys of equal norm in the first layer."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([torch.randperm(297, generator=generator)[:length] + 3 for _ in range(batch)])


def not_padding(padding: Sequence[int], columns: int) -> torch.Tensor:
    """bool [B, columns]: left padding given as columns per row."""
    return torch.arange(columns) >= torch.tensor(padding).unsqueeze(1)


@torch.inference_mode()
def forward(model, ids, cache, padding=None, **more):
    """Logits of one pass, left padding given as columns per row."""
    if padding:
        mask = not_padding(padding, ids.shape[1])
        more |= dict(attention_mask=mask.long(), position_ids=(mask.cumsum(-1) - 1).clamp_min(0))
    return model(input_ids=ids, use_cache=True, **{cache_argument(model): cache}, **more).logits
