"""Every architecture for causal language modelling that the installed transformers knows, built tiny.

No model is listed here: names come from transformers' own mapping, and a configuration is made small by what its
fields are called. :data:`EXTRAS` says the few things that such rules cannot know. ``test_architectures`` runs them.
"""

from __future__ import annotations

import inspect
import re
import sys
from typing import Any

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 99
SPECIAL = 80
"""Ids from here on are given to images, sounds and the like, those below 3 to padding and marks: texts have neither."""
LARGEST = 50_000_000
"""Parameters of the largest model that is built."""
HIDDEN, HEADS, HEAD_DIM, LAYERS = 64, 4, 16, 2
GAINS = (1.5, 1.0, 0.5)
"""How much a linear layer amplifies, the first with finite logits: 1.5 makes attention peaked."""

# What a size becomes, by the first pattern that fits its whole name; None leaves it.
_SIZES: tuple[tuple[str, int | None], ...] = (
    (r"(task_)?type_vocab_size|vocab_offset|make_ngram_vocab\w+", None),
    (r"\w*vocab(_size)?(_base|_per_layer_input)?", VOCABULARY),
    (r"moe_(top_?)?k", 2),
    (r"(\w+_)?intermediate_size(_mlp)?|(\w+_)?ffn_(dim|hidden_size)|feed_forward_size|mlp_dim", 96),
    (r"d_inner|n_inner|d_ff|dff|dim_ff", 96),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|max_(target|source)_positions", 128),
    (r"context_length|rel_extent", 128),
    (r"linear_num_key_heads", 2),
    (r"mamba_n(um)?_heads|n_mamba_heads", 8),
    (r"qk_rope_head_dim|rotary_dim", 8),
    (r"qk_head_dim", HEAD_DIM + 8),
    (r"(\w+_)?head_dim|d_head|dim_head|attention_head_size|kv_channels|d_kv|mamba_d_head|mamba_headdim", HEAD_DIM),
    (r"(\w+_)?(attention_heads|n_heads?|num_heads|num_query_groups)", HEADS),
    (r"hidden_size_per_layer_input|laurel_rank|gated_norm_rank|hc_lowrank|loop_gate_rank|adapter_rank|d_rel", 16),
    (r"(\w+_)?hidden_size(_global)?|n_embd|d_model|emb_dim|embedding_dim|lru_width|(\w+_)?embedding_size", HIDDEN),
    (
        r"word_embed_proj_dim|\w+_embed_dim|projector_\w+_dim|adapter_(in|out)_dim|adapter_input_size",
        HIDDEN,
    ),
    (r"q_lora_rank|mamba_dt_rank|time_step_rank", 32),
    (r"(kv|o)_lora_rank", 16),
    (r"mamba_d_state|ssm_state_size|state_size|index_topk", 8),
    (r"(moe_)?num_(local_)?experts|n_routed_experts|zero_expert_num", 4),
    (r"num_experts_per_tok(en)?", 2),
    (r"n_shared_experts|(moe_)?num_shared_experts|topk_group|first_k_dense_replace|num_dense_layers", 1),
    (r"n_groups?|num_expert_group|index_topk_blocks", 2),
    (r"sliding_window(_size)?|attention_(chunk|window)_size|local_attention(_window_len)?|window_size", 8),
    (r"chunk_size|block_size|index_block_size|mamba_chunk_size|keep_window_size", 8),
    (r"block_multiple_of|ffn_round_up_to_multiple_of|image_size|crop_size", 32),
    (r"codebook_(size|dim)|num_centroids", 64),
    (r"num_position_embeddings", 16),
)
_LAYERS = re.compile(
    r"num_hidden_layers|num_layers|n_layers?|(de|en)coder_layers|num_(de|en)coder_layers|num_blocks|depth|num_global_layers"
)
_KEY_VALUE_HEADS = re.compile(r"(\w+_)?(num_key_value_heads|num_kv_heads|kv_n_heads)")
_MARKS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SPECIAL = re.compile(r"\w+_token_(id|index)")

_INDEXER = dict(indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=8, indexer_compress_ratio=2)

# What the rules cannot know, by model type; a name with dots is a field of a part.
EXTRAS: dict[str, dict[str, Any]] = {
    # left open by the defaults, and needed
    "cohere_compass_text": dict(
        layer_types=["sliding_attention", "full_attention"],
        rope_parameters={
            kind: dict(rope_type="default", rope_theta=1e4, mrope_section=[4, 2, 2])
            for kind in ("sliding_attention", "full_attention")
        },
    ),
    "dbrx": {"attn_config.rope_theta": 1e4, "attn_config.clip_qkv": 8.0},
    "deepseek_v2": dict(num_experts_per_tok=2),
    "dots1": dict(n_routed_experts=4, n_shared_experts=1, num_experts_per_tok=2),
    "nemotron": dict(num_key_value_heads=2),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"]),
    "qwen4_exp": {f"text_config.{name}": value for name, value in _INDEXER.items()},
    "qwen4_exp_text": _INDEXER,
    "reformer": dict(is_decoder=True, axial_pos_shape=[16, 8], axial_pos_embds_dim=[32, 32]),
    "xmod": dict(default_language="en_XX"),
    "lfm2": dict(layer_types=["conv", "full_attention"], num_hidden_layers=2),  # as its models have it
    "mllama": {"text_config.num_hidden_layers": 3, "text_config.cross_attention_layers": [1]},
    # refused by the configuration or the model as the rules make it
    "gemma4_assistant": {
        "text_config.hidden_size_per_layer_input": 0,
        "text_config.vocab_size_per_layer_input": 0,
        "text_config.num_kv_shared_layers": 0,
    },
    "dory": dict(
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_hidden_layers=4,
        n_input_layers=1,
        n_recurrent_layers=2,
        n_output_layers=1,
    ),
    "gpt_neo": dict(attention_types=[[["global", "local"], 1]]),
    "longcat_flash": dict(head_dim=8),
    "mamba2": dict(num_heads=8),
    "musicgen": {"decoder.num_codebooks": 1},
    "musicgen_melody": {"decoder.num_codebooks": 1},
    "zamba": dict(
        layers_block_type=["linear_attention", "hybrid", "hybrid"], num_hidden_layers=3, attention_hidden_size=128
    ),
}

# Switches of a configuration that make another architecture of it: what the configuration says, and what is tried too.
_VARIANTS: dict[str, tuple[Any, Any]] = {
    "is_decoder": (lambda value: value is False, True),
    "num_kv_shared_layers": (lambda value: bool(value), 0),
}


class NotBuiltError(Exception):
    """An architecture that could not be built small; the message is one line that says why."""


def names() -> dict[str, str]:
    """Model type to class name, of all that ``AutoModelForCausalLM`` of this transformers can build."""
    listed = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    found = {kind: name if isinstance(name, str) else name[0] for kind, name in listed}
    added = getattr(AutoModelForCausalLM._model_mapping, "_extra_content", {})
    return found | {config.model_type: model.__name__ for config, model in added.items()}


def shrink(config: Any, extras: dict[str, Any], special: list[int]) -> dict[str, Any]:
    """What to make a small configuration of the kind of ``config`` from.

    Args:
        config: one with its defaults.
        extras: fields to set whatever the rules say.
        special: ids not yet given to a special token; taken from its end.
    """
    fields = {name: value for name, value in vars(config).items() if not name.startswith("_")}
    layers = next((value for name, value in fields.items() if _LAYERS.fullmatch(name) and isinstance(value, int)), 0)
    picked = _pick([v for v in fields.values() if isinstance(v, list | tuple) and len(v) == layers > 1], layers)
    if fields.get("num_kv_shared_layers"):  # some keep keys and values, as many others use theirs
        picked = picked * 2
    heads = next((v for n, v in fields.items() if re.fullmatch(r"num_attention_heads|n_heads?", n)), None)
    taken = inspect.signature(type(config).__init__).parameters
    small: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in taken:  # worked out from the others
            continue
        if hasattr(value, "to_dict"):
            inner = {n.removeprefix(f"{name}."): v for n, v in extras.items() if n.startswith(f"{name}.")}
            small[name] = shrink(value, inner, special)
            if "model_type" in fields and getattr(value, "model_type", ""):
                small[name]["model_type"] = value.model_type
        elif name == "head_dim" and value is None:
            small[name] = HEAD_DIM
        elif name == "num_kv_shared_layers" and value:
            small[name] = len(picked) // 2
        elif name in _MARKS:
            small[name] = _MARKS[name]
        elif _SPECIAL.fullmatch(name) and isinstance(value, int):
            small[name] = special.pop()
        elif isinstance(value, list | tuple) and len(value) == layers > 1:
            small[name] = [_small(name, value[i]) for i in picked]
        elif name == "rope_parameters" and isinstance(value, dict) and _sections(value):
            small[name] = value | {"mrope_section": _sections(value)}
        elif isinstance(value, int) and not isinstance(value, bool):
            if _LAYERS.fullmatch(name):
                small[name] = len(picked)
            elif _KEY_VALUE_HEADS.fullmatch(name):
                small[name] = HEADS if value == heads else 1 if value == 1 else 2
            else:
                small[name] = _small(name, value)
        if name in small and small[name] is value:
            del small[name]
    return small | {name: value for name, value in extras.items() if "." not in name}


def _pick(lists: list[Any], layers: int) -> list[int]:
    """Layers to keep: the first of each kind by what is said layer by layer, at least two and at most four."""
    kinds = [repr([entries[i] for entries in lists]) for i in range(layers)]
    first = sorted({kind: i for i, kind in reversed(list(enumerate(kinds)))}.values())[:4]
    others = [i for i in range(layers) if i not in first]
    return sorted(first + others[: max(0, LAYERS - len(first))]) or list(range(LAYERS))


def _small(name: str, value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    for pattern, size in _SIZES:
        if re.fullmatch(pattern, name):
            return value if size is None or value <= 0 else min(size, value)
    return value


def _sections(rope: dict[str, Any]) -> list[int]:
    """Frequencies per axis of a rotary embedding of several axes, all of a small head's; empty if it has one."""
    if not rope.get("mrope_section"):
        return []
    half = int(HEAD_DIM * rope.get("partial_rotary_factor", 1.0)) // 2
    rest = half // 3
    return [half - 2 * rest, rest, rest]


def configuration(kind: str, changed: dict[str, Any] | None = None) -> Any:
    """A small configuration of model type ``kind``, with ``changed`` fields on top."""
    extras = EXTRAS.get(kind, {}) | (changed or {})
    made = CONFIG_MAPPING[kind]
    try:
        config = made()
    except Exception:  # defaults that contradict each other
        given: dict[str, Any] = {}
        for name, value in extras.items():
            part, _, field = name.rpartition(".")
            (given.setdefault(part, {}) if part else given)[field] = value
        config = made(**given)
    return made(**shrink(config, extras, list(range(SPECIAL, VOCABULARY))))


def variants(kind: str) -> list[dict[str, Any]]:
    """What to change in the configuration of ``kind`` for the architectures it has: nothing first."""
    try:
        model = build(kind)
    except Exception:
        return [{}]
    found = [{}]
    for name, (applies, other) in _VARIANTS.items():
        if applies(getattr(model.config, name, None)) and _reads(model, name):
            found.append({name: other})
    return found


def _reads(model: Any, name: str) -> bool:
    """Whether the file of the model or that of its configuration asks for the field."""
    asks = ((model, f"config.{name}"), (model.config, f"self.{name}"))
    return any(what in inspect.getsource(sys.modules[type(part).__module__]) for part, what in asks)


def build(kind: str, changed: dict[str, Any] | None = None, seed: int = 0) -> Any:
    """A model of type ``kind`` with random weights, float32, in evaluation mode, with the attention it comes up with.

    Raises:
        NotBuiltError: it would be large, or cannot be made, or its logits are not finite whatever the weights.
    """
    try:
        config = configuration(kind, changed)
    except Exception as e:
        raise NotBuiltError(f"configuration: {first_line(e)}") from e
    try:
        with torch.device("meta"):
            size = sum(p.numel() for p in _make(kind, config).parameters())
    except Exception:  # some look at numbers while they are made; the caller limits memory
        size = 0
    if size > LARGEST:
        raise NotBuiltError(f"it would have {size / 1e6:,.0f} million parameters")
    try:
        torch.manual_seed(seed)
        model = _make(kind, config).float().eval()
    except Exception as e:
        raise NotBuiltError(f"model: {first_line(e)}") from e
    # Texts go on for as long as they are asked to, and say nothing but words.
    model.generation_config = GenerationConfig(
        pad_token_id=0, do_sample=False, suppress_tokens=[0, 1, 2, *range(SPECIAL, VOCABULARY)]
    )
    return model


def _make(kind: str, config: Any) -> Any:
    """The model class of ``kind``, from ``config`` or from the part of it the class is for."""
    wanted = getattr(transformers, names()[kind], None)
    parts = [part for part in vars(config).values() if wanted is not None and type(part) is wanted.config_class]
    return wanted(parts[0]) if parts else AutoModelForCausalLM.from_config(config)


@torch.no_grad()
def randomise(model: nn.Module, gain: float, seed: int = 0) -> None:
    """Weights with attention peaked enough to tell tokens apart, and norms that are not all ones."""
    generator = torch.Generator().manual_seed(seed)
    done: set[int] = set()
    for module in model.modules():
        for weight in module.parameters(recurse=False):
            if id(weight) in done or not weight.is_floating_point():
                continue
            done.add(id(weight))
            if weight.ndim < 2:  # norms begin with ones or with zeros, biases with zeros
                noise = 0.8 * (torch.rand(weight.shape, generator=generator) - 0.5)
                weight.add_(torch.where(weight == 0, noise, weight * noise)).nan_to_num_()
                continue
            size = 1.0
            if not isinstance(module, nn.Embedding):
                inputs = weight.shape[-1] if isinstance(module, nn.Linear) else max(4, min(weight.shape[-2:]))
                size = gain / inputs**0.5
            weight.copy_(torch.randn(weight.shape, generator=generator) * size)


def first_line(e: BaseException) -> str:
    """The kind and the first line of an exception."""
    lines = str(e).strip().splitlines() or [""]
    line = next((x.strip() for x in lines[1:] if x.strip()), lines[0]) if lines[0].endswith(":") else lines[0]
    return f"{type(e).__name__}: {line}"[:240]
