"""What differs between versions of transformers, in one place."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function, sdpa_mask

__all__ = [
    "Cache",
    "CacheLayerMixin",
    "cache_argument",
    "causal_mask_function",
    "eager_mask_of",
    "register",
    "sdpa_attention_forward",
    "sdpa_mask",
]


def register(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make ``attn_implementation=name`` known, with its mask: without one the mask would silently be None."""
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, mask)


def cache_argument(model: torch.nn.Module) -> str:
    """What a model's forward calls its cache: ``past_key_values``, or ``cache`` since the renaming."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def eager_mask_of(mask: Tensor | None, query: Tensor, columns: int) -> Tensor:
    """The additive mask a model's own eager attention wants, from a boolean one or from None (causal)."""
    steps = query.shape[2]
    if mask is None:
        mask = torch.ones(steps, columns, dtype=torch.bool, device=query.device).tril(columns - steps)[None, None]
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
