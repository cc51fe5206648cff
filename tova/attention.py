"""The attention function transformers calls: finds the cache layer, honours masks, calls the replay.

transformers hands an attention function the keys, but not the cache they came from. So the cache's ``update``
returns a fresh view of the keys that carries a reference to the layer (:data:`LAYER`). Keys without it come from an
ordinary cache or from none, and go to the attention the model would have used anyway.

Masks are asked for by block: the mask function registered here returns a placeholder that uses no memory and carries
the rule (:class:`MaskRule`), so a long text never makes a T x T mask.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from tova import compat
from tova.errors import UsageError
from tova.replay import Attention

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tova.cache import EvictingLayer

NAME = "tova"
"""The ``attn_implementation`` under which the evicting attention is registered."""
LAYER = "_tova_layer"
_RULE = "_tova_rule"

_ATTENTION_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}

# Arguments models pass along that say nothing about how logits become weights.
_IRRELEVANT = frozenset(
    {
        "attention_mask", "cache", "cache_position", "cu_seq_lens_k", "cu_seq_lens_q", "is_causal", "kwargs",
        "layer_idx", "max_length_k", "max_length_q", "num_items_in_batch", "output_attentions",
        "output_hidden_states", "output_router_logits", "past_key_value", "past_key_values", "position_embeddings",
        "position_ids", "return_dict", "sliding_window", "use_cache",
    }
)  # fmt: skip


class MaskRule:
    """A mask that is a rule over column indices; blocks of it are computed when asked for.

    Args:
        rule: transformers' mask function of (batch, head, query column, key column), broadcast over index tensors;
            None if there is nothing beside causality and padding.
        padding: bool [B, columns] of real tokens, or None if all are.
        offset: column of the first query.
        dense: how to build the whole mask [B, 1, T, columns], for attention that is not ours.
    """

    def __init__(
        self,
        rule: Callable[..., Tensor] | None,
        padding: Tensor | None,
        offset: int,
        dense: Callable[[], Tensor | None],
    ) -> None:
        self.rule = rule
        self._padding = padding
        self._offset = offset
        self._dense = dense
        self._made: dict[str, Tensor | None] = {}

    def block(self, queries: Tensor, columns: Tensor) -> Tensor:
        """bool [B, G, C, N]; see :class:`tova.replay.Visibility`."""
        assert self.rule is not None
        batch = torch.arange(columns.shape[0], device=columns.device).view(-1, 1, 1, 1)
        head = torch.zeros((), dtype=torch.int64, device=columns.device)
        return self.rule(batch, head, queries.view(1, 1, -1, 1), columns.clamp_min(0).unsqueeze(2))

    def real(self, steps: int) -> Tensor | None:
        """bool [B, T] of the queries' own columns, None if none is padding; worked out once per forward."""
        if "real" not in self._made:
            own = None if self._padding is None else self._padding[:, self._offset : self._offset + steps]
            self._made["real"] = None if own is None or bool(own.all()) else own
        return self._made["real"]

    def dense(self) -> Tensor | None:
        """The whole mask, made once however many layers ask."""
        if "dense" not in self._made:
            self._made["dense"] = self._dense()
        return self._made["dense"]


def _rule_of(mask: Tensor | None, columns: int) -> MaskRule | None:
    """The rule a mask carries, or one made of a mask [B, 1, T, columns] that somebody passed whole."""
    if mask is None:
        return None
    rule = getattr(mask, _RULE, None)
    if rule is None:
        rule = _given(mask, columns)
        setattr(mask, _RULE, rule)
    return rule


def _given(mask: Tensor, columns: int) -> MaskRule:
    allowed = mask if mask.dtype == torch.bool else mask > -1.0
    offset = columns - allowed.shape[2]
    if allowed.ndim != 4 or allowed.shape[1] != 1 or allowed.shape[3] != columns or offset < 0:
        raise UsageError(
            f"an evicting cache needs a mask of shape [batch, 1, new tokens, {columns} columns], got {list(mask.shape)}"
        )
    if bool(allowed[..., offset:].triu(1).any()):
        raise UsageError("the mask lets tokens look ahead; an evicting cache is for causal attention only")
    own = allowed[:, 0, :, offset:].diagonal(dim1=-2, dim2=-1)
    if not bool(own.any()):
        raise UsageError("the mask hides every new token from itself; this model's masks cannot be followed")

    def rule(batch: Tensor, head: Tensor, query: Tensor, column: Tensor) -> Tensor:
        return allowed[batch.clamp_max(allowed.shape[0] - 1), 0, query - offset, column]

    return MaskRule(rule, nn.functional.pad(own, (offset, 0), value=True), offset, lambda: mask)


def make_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor] | None = None,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls to make a mask: a placeholder [B, 1, T, columns] without memory that carries the rule.

    None where causality says it all, so that other attention can take its fastest path. Masks that are no rule over
    indices (``use_vmap``) are built whole.
    """
    function = mask_function or compat.causal_mask_function
    # A static cache hands its live counter over, which has moved on by the time the whole mask is asked for.
    q_offset = int(q_offset)

    def dense() -> Tensor | None:
        return compat.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=function, attention_mask=attention_mask, allow_is_causal_skip=allow_is_causal_skip,
            use_vmap=use_vmap, **kwargs,
        )  # fmt: skip

    if use_vmap:
        return dense()
    causal = function is compat.causal_mask_function
    # A static cache has columns beyond the last token, which only a mask keeps from being looked at.
    to_the_end = q_offset + q_length == kv_offset + kv_length
    if causal and to_the_end and q_length in (1, kv_length) and (attention_mask is None or bool(attention_mask.all())):
        return None
    # Nothing may look at anything in the placeholder: code that loses the tag fails loudly instead of being wrong.
    nothing = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=kwargs.get("device", "cpu"))
    mask = nothing.expand(batch_size, 1, q_length, kv_length)
    setattr(mask, _RULE, MaskRule(None if causal else function, attention_mask, q_offset, dense))
    return mask


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function: [B, H, T, D] queries and [B, K, T, D] new keys and values to [B, T, H, D].

    Raises:
        UsageError: with an evicting cache, for dropout or for an argument that would change the weights and is not
            known here.
    """
    layer: EvictingLayer | None = getattr(key, LAYER, None)
    if layer is None:
        return _ordinary(module, query, key, value, attention_mask, scaling, dropout, softcap, s_aux, **kwargs)
    if dropout:
        raise UsageError(f"an evicting cache works in evaluation mode only, got attention dropout {dropout}")
    for name, argument in kwargs.items():
        if argument is not None and name not in _IRRELEVANT:
            raise UsageError(
                f"{type(module).__name__} asks its attention for {name!r}, which an evicting cache does not honour"
            )
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    how = Attention(scaling, softcap, s_aux, _ROTATIONS.get(module))
    out = _outside_graphs(layer, module, query, key, value, how, attention_mask)
    if torch.is_grad_enabled() and query.requires_grad:
        out = _Undifferentiable.apply(out, query)
    return out.transpose(1, 2).contiguous(), None


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
    rule = _rule_of(mask, layer.get_seq_length() + query.shape[2])
    device = query.device.type
    with torch.no_grad():
        if not torch.is_autocast_enabled(device):
            return layer.attend(module, query, key, value, how, rule)
        # What autocast does for scaled_dot_product_attention: all three in its dtype, whatever theirs.
        query, key, value = (x.to(torch.get_autocast_dtype(device)) for x in (query, key, value))
        with torch.autocast(device, enabled=False):
            return layer.attend(module, query, key, value, how, rule)


class _Undifferentiable(torch.autograd.Function):
    """Passes its first argument on; a backward pass through it is refused instead of being silently incomplete."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, query: Tensor) -> Tensor:
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UsageError("an evicting cache has no gradient: which token is dropped cannot be differentiated")


def _ordinary(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    dropout: float,
    softcap: float | None,
    s_aux: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attention with an ordinary cache or none: SDPA, or the model's own where SDPA cannot do what it asks for."""
    rule = getattr(mask, _RULE, None)
    if rule is not None:
        mask = rule.dense()
    if softcap is None and s_aux is None:
        return compat.sdpa_attention_forward(
            module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs
        )
    eager = sys.modules[type(module).__module__].eager_attention_forward
    mask = compat.eager_mask_of(mask, query, key.shape[2])
    kwargs |= {name: given for name, given in (("softcap", softcap), ("s_aux", s_aux)) if given is not None}
    return eager(module, query, key, value, mask, dropout=dropout, scaling=scaling, **kwargs)


class ModelRotation:
    """A model's own rotary embedding, asked for positions of our choosing; see :class:`tova.replay.Rotation`.

    ``rotary`` gives cosines and sines for positions, ``apply`` is the modeling file's ``apply_rotary_pos_emb``, which
    knows how dimensions are paired and how many are turned.
    """

    def __init__(self, rotary: nn.Module, apply: Callable[..., tuple[Tensor, Tensor]]) -> None:
        self._rotary = rotary
        self._apply = apply

    def turn(self, x: Tensor, positions: Tensor, to: Tensor | None) -> Tensor:
        """[B, H, T, D] turned from ``positions`` int64 [B, T] to those of ``to``, or back to none."""
        cos, sin = self._rotary(x, positions)
        # A scaled embedding (YaRN) multiplies by more than one: turning back divides by its square.
        size = (cos[..., :1].double().square() + sin[..., :1].double().square()).to(x.dtype)
        still, _ = self._apply(x, x, cos / size, -sin / size)
        if to is None:
            return still
        cos, sin = self._rotary(x, to)
        moved, _ = self._apply(still, still, cos, sin)
        return moved


_ROTATIONS: WeakKeyDictionary[nn.Module, ModelRotation] = WeakKeyDictionary()


def _note_rotations(model: nn.Module) -> None:
    """Remember how the attention modules of ``model`` rotate, where there is one rotary embedding for all of them."""
    rotaries = [m for name, m in model.named_modules() if name.split(".")[-1] == "rotary_emb"]
    if len(rotaries) != 1:
        return
    for module in model.modules():
        if type(module).__name__.endswith("Attention"):
            apply = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
            if apply is not None and list(inspect.signature(apply).parameters)[:4] == ["q", "k", "cos", "sin"]:
                _ROTATIONS[module] = ModelRotation(rotaries[0], apply)


def _refuse_others(model: PreTrainedModel) -> None:
    """Raise for a model whose layers are not all attention over keys and values of their own."""
    kind = type(model).__name__
    config = model.config
    if getattr(config, "is_encoder_decoder", False):
        raise UsageError(f"{kind} is an encoder-decoder; evicting caches are for decoder-only models")
    text = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    kinds = set(getattr(text, "layer_types", None) or []) - _ATTENTION_LAYERS
    if kinds or getattr(model, "_is_stateful", False):
        what = f" ({', '.join(sorted(kinds))})" if kinds else ""
        raise UsageError(
            f"{kind} has recurrent or state-space layers{what}: they keep a state that has no positions to drop; "
            "evicting caches are for models of attention layers only"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise UsageError(
            f"{kind}: its last {text.num_kv_shared_layers} layers reuse keys and values of earlier ones; evicting "
            "caches need layers that keep their own"
        )


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Switch a loaded transformers model to the evicting attention; returns the model.

    Ordinary caches, and calls without a cache, keep working as before. Call it once after loading.

    Raises:
        UsageError: the model does not let its attention be chosen, so an evicting cache cannot be had with it.
    """
    compat.register(NAME, attend, make_mask)
    _refuse_others(model)
    kind = type(model).__name__
    model.set_attn_implementation(NAME)
    if model.config._attn_implementation != NAME:
        raise UsageError(
            f"{kind} does not let its attention function be chosen; evicting caches need a model that follows "
            "transformers' attention interface (Llama, Mistral, Qwen, Gemma, Phi and others do)"
        )
    _note_rotations(model)
    return model
