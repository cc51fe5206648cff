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
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function
from transformers.masking_utils import sdpa_mask as _sdpa_mask

__all__ = [
    "Cache",
    "CacheLayerMixin",
    "cache_argument",
    "causal_mask_function",
    "eager_mask_of",
    "number_of",
    "register",
    "sdpa_attention_forward",
    "sdpa_mask",
]


# Up to 5.3 a mask is asked for with the columns of the new tokens, later with their number and the first one.
_MASKS_BY_COLUMNS = "cache_position" in inspect.signature(_sdpa_mask).parameters


def register(name: str, attention: Callable[..., Any], mask: Callable[..., Any]) -> None:
    """Make ``attn_implementation=name`` known, with its mask: without one the mask would silently be None.

    ``mask`` is called as :func:`sdpa_mask` is here, whatever the version.
    """
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, _by_columns(mask) if _MASKS_BY_COLUMNS else mask)


def _by_columns(mask: Callable[..., Any]) -> Callable[..., Any]:
    """``mask`` as versions up to 5.3 call it."""

    def ask(cache_position: Tensor, allow_is_causal_skip: bool = True, **kwargs: Any) -> Any:
        # 4.x does not say whether the rule works on indices, but forbids to skip the mask of one that may not.
        kwargs.setdefault("use_vmap", not allow_is_causal_skip)
        return mask(
            q_length=len(cache_position), q_offset=int(cache_position[0]), device=cache_position.device,
            allow_is_causal_skip=allow_is_causal_skip, **kwargs,
        )  # fmt: skip

    return ask


def sdpa_mask(*, q_length: int, q_offset: int = 0, device: torch.device | str = "cpu", **kwargs: Any) -> Tensor | None:
    """transformers' boolean mask [B, 1, ``q_length``, ``kv_length``] of a rule, or None where causality says it all."""
    if _MASKS_BY_COLUMNS:
        columns = torch.arange(q_offset, q_offset + q_length, device=device)
        return _sdpa_mask(cache_position=columns, **kwargs)
    return _sdpa_mask(q_length=q_length, q_offset=q_offset, device=device, **kwargs)


def cache_argument(model: torch.nn.Module) -> str:
    """What a model's forward calls its cache: ``past_key_values``, or ``cache`` since the renaming."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def number_of(new: int | Tensor) -> int:
    """How many new columns a cache is asked about: older versions give it the columns, newer ones their number."""
    return new if isinstance(new, int) else new.shape[0]


def eager_mask_of(mask: Tensor | None, query: Tensor, columns: int) -> Tensor:
    """The additive mask a model's own eager attention wants, from a boolean one or from None (causal)."""
    steps = query.shape[2]
    if mask is None:
        mask = torch.ones(steps, columns, dtype=torch.bool, device=query.device).tril(columns - steps)[None, None]
    if mask.dtype != torch.bool:
        return mask
    return torch.where(mask, 0.0, torch.finfo(query.dtype).min).to(query.dtype)
