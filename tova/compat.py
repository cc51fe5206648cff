"""What differs between versions of transformers, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface, causal_mask_function
from transformers.masking_utils import sdpa_mask as _sdpa_mask

__all__ = [
    "Asked",
    "Cache",
    "CacheLayerMixin",
    "asked_by_length",
    "cache_argument",
    "causal_mask_function",
    "mask_function_of",
    "number_of",
    "register",
    "sdpa_attention_forward",
]


# Up to 5.3 a mask is asked for with the columns of the new tokens, later with their number and the first one.
_MASKS_BY_COLUMNS = "cache_position" in inspect.signature(_sdpa_mask).parameters


def register(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make ``attn_implementation=name`` known, with its mask: without one the mask would silently be None."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def mask_function_of(name: str) -> Callable[..., Any]:
    """The mask function transformers calls for ``attn_implementation=name``."""
    return ALL_MASK_ATTENTION_FUNCTIONS[name]


@dataclass(frozen=True)
class Asked:
    """What a mask function is asked for, in the words of newer versions."""

    batch_size: int
    q_length: int
    q_offset: int
    kv_length: int
    mask_function: Callable[..., Tensor] | None
    attention_mask: Tensor | None
    use_vmap: bool
    dtype: torch.dtype
    device: torch.device | str


def asked_by_length(asked: dict[str, Any]) -> Asked:
    """The arguments of a mask function, whatever the version that calls it."""
    skips = asked.get("allow_is_causal_skip", True)
    columns: Any = asked.get("cache_position")
    return Asked(
        batch_size=asked["batch_size"],
        q_length=len(columns) if _MASKS_BY_COLUMNS else asked["q_length"],
        q_offset=int(columns[0]) if _MASKS_BY_COLUMNS else int(asked.get("q_offset", 0)),
        kv_length=int(asked["kv_length"]),
        mask_function=asked.get("mask_function"),
        attention_mask=asked.get("attention_mask"),
        # 4.x does not say whether the rule works on indices, but forbids to skip the mask of one that may not.
        use_vmap=asked.get("use_vmap", _MASKS_BY_COLUMNS and not skips),
        dtype=asked.get("dtype", torch.float32),
        device=columns.device if _MASKS_BY_COLUMNS else asked.get("device", "cpu"),
    )


def cache_argument(model: torch.nn.Module) -> str:
    """What a model's forward calls its cache: ``past_key_values``, or ``cache`` since the renaming."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def number_of(new: int | Tensor) -> int:
    """How many new columns a cache is asked about: older versions give it the columns, newer ones their number."""
    return new if isinstance(new, int) else new.shape[0]
