"""The attention function transformers calls: finds the cache layer, honours masks, calls the replay.

transformers hands an attention function the keys, but not the cache they came from. So what an evicting cache's
``update`` returns are the new keys and values as :class:`HandedOn` tensors: they carry the layer through copies, and
anything but our attention that tries to compute with them is refused, since it would take the new tokens for all there
are. Keys of an ordinary cache, or of none, go to the attention the model had before, with the mask it had before.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from tova import compat
from tova.errors import UsageError
from tova.layer import Attention
from tova.masks import AHEAD, LazyMask, MaskRule, copies, mask_maker, name_of, rule_of, tells, writes
from tova.rotation import note_rotations, rotation_of

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAME = "tova"
"""The ``attn_implementation`` under which the evicting attention is registered."""
NAMES = {"sdpa": NAME, "eager": f"{NAME}_eager"}
"""By what a model does without an evicting cache; other kinds of attention (flash, flex) give way to ``sdpa``."""
LAYER = "_tova_layer"

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}
_STATE_LAYERS = ("linear", "mamba", "recurrent", "conv", "hybrid", "rwkv")
"""What the names of layers contain that keep a state instead of keys and values."""

# Arguments models pass along that say nothing about how logits become weights.
_IRRELEVANT = frozenset(
    {
        "attention_mask", "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "kwargs",
        "layer_idx", "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions",
        "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values", "position_embeddings",
        "position_ids", "return_dict", "sliding_window", "use_cache",
    }
)  # fmt: skip


_CHANGED = (
    "changes its keys after caching them, or its values (as multi-head latent attention does), cannot be followed"
)


class EvictingLayer(Protocol):
    """What the attention function asks of a layer of an evicting cache."""

    def reached(self, module: nn.Module) -> None:
        """The keys that the layer handed on have come to the attention of ``module``."""
        ...

    def get_seq_length(self) -> int:
        """Tokens seen so far."""
        ...

    def replay(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: Attention, rule: MaskRule | None
    ) -> Tensor:
        """[B, H, T, E]: attention of the new tokens over what is held; then evict."""
        ...


class HandedOn(Tensor):
    """New keys or values [B, K, T, D] on their way from a layer of an evicting cache to our attention.

    A copy is one of them too, and anything else is refused. Code that only looks at them asks for
    ``key.as_subclass(torch.Tensor)``.
    """

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"HandedOn({list(self.shape)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensor = args[0] if args else None
        if isinstance(tensor, HandedOn) and copies(func, args) and not writes(func):
            plain = func(tensor.as_subclass(Tensor), *args[1:], **kwargs)
            return _tag(plain, getattr(tensor, LAYER))
        if not (tells(func) or func is Tensor.as_subclass):
            raise UsageError(
                f"keys or values did not reach the evicting attention, something else took them ({name_of(func)}): "
                f"call tova.enable(model) first, unless it was called; {_CHANGED}"
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _tag(tensor: Tensor, layer: EvictingLayer) -> Tensor:
    handed = tensor.as_subclass(HandedOn)
    setattr(handed, LAYER, layer)
    return handed


def _layer_of(tensor: Tensor) -> EvictingLayer | None:
    """The layer of an evicting cache that keys or values come from, None if they come from none."""
    return getattr(tensor, LAYER, None)


def hand_on(layer: EvictingLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """What the cache's ``update`` returns: the same tensors, marked as those of ``layer``."""
    if not torch.compiler.is_compiling():
        return _tag(keys[:], layer), _tag(values[:], layer)
    # A compiler does not trace classes of tensors; views of plain ones can at least carry an attribute.
    keys, values = keys[:], values[:]
    setattr(keys, LAYER, layer)
    setattr(values, LAYER, layer)
    return keys, values


def evicting_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    ordinary: str = "sdpa",
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: [B, H, T, D] queries and [B, K, T, D] new keys and values to [B, T, H, D].

    Args:
        ordinary: the attention for keys that come from no evicting cache; it gets all arguments as they are.

    Raises:
        UsageError: with an evicting cache, for dropout or for an argument that would change the weights and is not
            known here; for keys that do not come from the evicting cache the mask was made for.
    """
    layer = _layer_of(key)
    if layer is not None:
        try:
            how = _how(module, query, value, layer, attention_mask, **kwargs)
        except UsageError:
            layer.reached(module)
            raise
        key, value = key.as_subclass(Tensor), value.as_subclass(Tensor)
        out = _outside_graphs(layer, module, query, key, value, how, attention_mask)
        if torch.is_grad_enabled() and query.requires_grad:
            out = _Undifferentiable.apply(out, query)
        return out.transpose(1, 2).contiguous(), None
    if isinstance(attention_mask, LazyMask):
        raise UsageError(
            f"{type(module).__name__} was not given its evicting cache in training, as gradient checkpointing leaves "
            "it out: call model.eval(), or model.gradient_checkpointing_disable()"
            if module.training
            else f"{type(module).__name__}: {_CHANGED}"
        )
    if ordinary == "eager":
        return _eager_of(module)(module, query, key, value, attention_mask, **kwargs)
    return compat.sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)


def _eager_of(module: nn.Module) -> Callable[..., tuple[Tensor, Tensor | None]]:
    """The eager attention of the file that defines ``module``, or a class it is derived from."""
    for kind in type(module).__mro__:
        found = getattr(sys.modules.get(kind.__module__), "eager_attention_forward", None)
        if found is not None:
            return found
    raise UsageError(
        f"{type(module).__name__} is defined in a file without eager_attention_forward: load the model with "
        "attn_implementation='sdpa' before tova.enable"
    )


def _how(
    module: nn.Module,
    query: Tensor,
    value: Tensor,
    layer: EvictingLayer,
    mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> Attention:
    """How the model turns logits into weights; raises for what an evicting cache does not do."""
    if _layer_of(value) is not layer:
        raise UsageError(f"{type(module).__name__}: {_CHANGED}")
    if dropout:
        raise UsageError(f"an evicting cache works in evaluation mode only, got attention dropout {dropout}")
    if kwargs.get("output_attentions"):
        raise UsageError(
            "output_attentions=True: an evicting cache never makes the whole map of weights; leave it out, and give "
            "the cache an observer (tova.observers) that looks at queries and keys"
        )
    for name, argument in kwargs.items():
        if argument is not None and name not in _IRRELEVANT:
            raise UsageError(
                f"{type(module).__name__} asks its attention for {name!r}, which an evicting cache does not honour"
            )
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    if mask is None and query.shape[2] > 1 and not causal:
        raise UsageError(AHEAD)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    return Attention(scaling, softcap, s_aux, rotation_of(module))


@torch.compiler.disable
def _outside_graphs(
    layer: EvictingLayer,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    how: Attention,
    mask: Tensor | None,
) -> Tensor:
    """What a compiled model must not look into: it depends on numbers that change at every step."""
    device = query.device.type
    # What the cache holds is written in place later on, maybe outside of the inference mode it was made in.
    with torch.inference_mode(False), torch.no_grad():
        layer.reached(module)
        rule = rule_of(mask, query.shape[0], layer.get_seq_length() + query.shape[2])
        if not torch.is_autocast_enabled(device):
            return layer.replay(module, query, key, value, how, rule)
        # What autocast does for scaled_dot_product_attention: all three in its dtype, whatever theirs.
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
        with torch.autocast(device, enabled=False):
            return layer.replay(module, query, key, value, how, rule)


class _Undifferentiable(torch.autograd.Function):
    """Passes its first argument on; a backward pass through it is refused instead of being silently incomplete."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UsageError("an evicting cache has no gradient: which token is dropped cannot be differentiated")


def _refuse_others(model: PreTrainedModel) -> None:
    """Raise for a model whose layers are not all attention over keys and values of their own."""
    name = type(model).__name__
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"{name} is an encoder-decoder; evicting caches are for decoder-only models")
    text = config.get_text_config(decoder=True)
    kinds = sorted(set(getattr(text, "layer_types", None) or []) - _ATTENTION_LAYERS)
    states = [kind for kind in kinds if any(state in kind for state in _STATE_LAYERS)]
    if states or (not kinds and getattr(model, "_is_stateful", False)):
        what = f" ({', '.join(states)})" if states else ""
        raise UsageError(
            f"{name} has recurrent or state-space layers{what}: they keep a state that has no positions to drop; "
            "evicting caches are for models of attention layers only"
        )
    if kinds:
        raise UsageError(
            f"{name} has layers of a kind that an evicting cache does not know ({', '.join(kinds)}); it knows those "
            "that attend to all earlier tokens, or to a window or chunk of them"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise UsageError(
            f"{name}: its last {text.num_kv_shared_layers} layers reuse keys and values of earlier ones; evicting "
            "caches need layers that keep their own"
        )


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a loaded transformers model to the evicting attention; returns the model.

    Ordinary caches, and calls without a cache, keep the attention and the masks they had (``sdpa`` and ``eager``; other
    kinds give way to ``sdpa``). Call it once after loading.

    Continuous batching (``cache_implementation="paged"``) knows attention by name and refuses ours: call
    ``model.set_attn_implementation("sdpa")`` before it, and :func:`enable` after it.

    Raises:
        UsageError: the model does not let its attention be chosen, so an evicting cache cannot be had with it.
    """
    for ordinary, name in NAMES.items():
        compat.register(name, partial(evicting_attention, ordinary=ordinary), mask_maker(ordinary))
    _refuse_others(model)
    text = model.config.get_text_config(decoder=True)
    before = [(config, config._attn_implementation_internal) for config in _configs(model)]
    model.set_attn_implementation(_switched(model.config, text))
    if not {model.config._attn_implementation, text._attn_implementation} <= set(NAMES.values()):
        for config, usual in before:  # parts of it may have been switched
            config._attn_implementation_internal = usual
        raise UsageError(
            f"{type(model).__name__} does not let its attention function be chosen; evicting caches need a model that "
            "follows transformers' attention interface (Llama, Mistral, Qwen, Gemma, Phi and others do)"
        )
    note_rotations(model)
    return model


def _configs(model: PreTrainedModel) -> list[Any]:
    """The configurations of a model and all its parts, each once."""
    found = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    queue = list(found.values())
    while queue:
        config = queue.pop()
        for key in getattr(config, "sub_configs", None) or {}:
            part = getattr(config, key, None)
            if part is not None and id(part) not in found:
                found[id(part)] = part
                queue.append(part)
    return [config for config in found.values() if hasattr(config, "_attn_implementation_internal")]


def _switched(config: Any, text: Any) -> str | dict[str, Any]:
    """What to ask ``set_attn_implementation`` for: ours for the model and its text part, the rest as it is."""
    usual = config._attn_implementation
    ours = usual if usual in NAMES.values() else NAMES.get(usual, NAME)
    switched: dict[str, Any] = {"": ours}
    for key in getattr(config, "sub_configs", None) or {}:
        part: Any = getattr(config, key, None)
        if part is not None:
            switched[key] = _switched(part, text) if part is text else part._attn_implementation
    return switched if len(switched) > 1 else ours
