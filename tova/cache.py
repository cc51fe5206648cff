"""A transformers cache that forgets: pass it to a forward (a teacher-forced replay) or to ``generate``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tova import compat
from tova.attention import LAYER, MaskRule
from tova.errors import UsageError
from tova.observers import Observer, Seen
from tova.policies import Policy
from tova.replay import Attention, LayerState, replay
from tova.scan import SCANS, Scan, select

PREFILLS = ("every_step", "one_shot")
_OFFLOADED = (
    "an evicting cache cannot be offloaded: it is small because it forgets; take a smaller budget, or transformers' "
    "DynamicCache(offloading=True) to keep everything"
)
_QUANTISED = (
    "an evicting cache cannot be quantised: what is kept is kept as it was written; take a smaller budget or "
    "model.dtype=bfloat16, or transformers' QuantizedCache to keep everything"
)
_OTHERS = {
    "offloading": _OFFLOADED,
    "offload_only_non_sliding": _OFFLOADED,
    "nbits": _QUANTISED,
    "backend": _QUANTISED,
    "q_group_size": _QUANTISED,
    "residual_length": _QUANTISED,
}
"""Options of transformers' other caches, and why they are refused here."""


def _chunk(policy: Policy, device: torch.device) -> int:
    """Queries per block: longer ones carry survivors on less often, and look at more that is dead."""
    if device.type == "cpu":
        return 128
    return max(128, min(256, policy.effective_budget * 3 // 8 // 64 * 64))


class EvictingCache(compat.Cache):
    """A key-value cache that holds at most ``policy.budget`` positions per layer between steps.

    One kept set per layer, shared by all heads, unless the policy is ``per_head``; policies see the attention averaged
    over the query heads that share a set. Keys keep their original rotary positions. The model must be switched over
    once with :func:`tova.enable`.

        cache = EvictingCache(policies.make("tova", budget=256))
        model(ids, cache=cache)                     # teacher-forced, exact, one pass
        cache.evicted_at                            # what was dropped when

    Args:
        policy: one instance for all layers; layers that differ get theirs through ``policy.for_layer``.
        prefill: ``every_step`` takes a prompt as if it had been decoded token by token; ``one_shot`` lets every token
            of a prompt see all of it and then evicts once, as most public code does. A prompt is any call of more
            than one token, for policies that select once or re-index the first such call only; the attribute may be
            changed between calls.
        evict_every: let the cache grow this many entries past the budget, then evict to the budget at once.
        log: keep ``evicted_at``. It grows with the text and is no part of ``nbytes``.
        observers: told of every call of every layer; they need the log.
        scan: ``auto``, ``reference`` (plain torch, any policy), ``cpu`` or ``gpu`` (compiled, built-in policies), or
            ``fixed_point`` (plain torch, all steps of a chunk at once).
        chunk: queries per block of a replay; None chooses. Any value gives the same decisions, up to near-ties.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        prefill: str = "every_step",
        evict_every: int = 1,
        log: bool = True,
        observers: Sequence[Observer] = (),
        scan: str = "auto",
        chunk: int | None = None,
        **others: Any,
    ) -> None:
        for option in others:
            raise UsageError(_OTHERS.get(option, f"EvictingCache takes no option {option!r}"))
        if prefill not in PREFILLS:
            raise UsageError(f"prefill must be one of {', '.join(PREFILLS)}, got {prefill!r}")
        if isinstance(evict_every, bool) or not isinstance(evict_every, int) or evict_every < 1:
            raise UsageError(f"evict_every must be an integer of at least 1, got {evict_every!r}")
        if observers and not log:
            raise UsageError("observers need the log of evictions; leave log=True")
        if chunk is not None and chunk < 1:
            raise UsageError(f"chunk must be at least 1, got {chunk}")
        if scan not in SCANS:
            raise UsageError(f"scan must be one of {', '.join(SCANS)}, got {scan!r}")
        super().__init__(layer_class_to_replicate=self._new_layer)
        self.policy = policy
        self.prefill = prefill
        self.evict_every = evict_every
        self.log = log
        self.observers = tuple(observers)
        self.scan = scan
        self.chunk = chunk

    is_croppable = False  # older versions of transformers do not ask the layers

    def _new_layer(self) -> EvictingLayer:
        return EvictingLayer(self, len(self.layers))

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Called by the model: hands new keys and values to the attention function, which asks this layer."""
        if layer_idx and layer_idx <= len(self.layers):
            self.layers[layer_idx - 1].check_attended()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @property
    def evicted_at(self) -> Tensor:
        """int64 [layers, B, columns]: the last step at which a token was visible, counted in columns.

        The int64 maximum where it was never dropped, -1 for padding. With a kept set per key/value head there is a
        head axis: [layers, B, K, columns].
        """
        if not self.log:
            raise UsageError("evicted_at was not recorded: the cache was made with log=False")
        logs = []
        for layer in self.layers:
            layer.check_attended()
            if layer.state is None or layer.state.log is None:
                raise UsageError("evicted_at: nothing has been processed yet")
            logs.append(layer.state.log.view)
        if not logs:
            raise UsageError("evicted_at: nothing has been processed yet")
        stacked = torch.stack(logs)
        return stacked[:, :, 0] if stacked.shape[2] == 1 else stacked

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, positions and records of all layers, the log apart."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors())

    def kept(self, layer: int, row: int = 0, head: int = 0) -> list[int]:
        """The columns layer ``layer`` holds of batch row ``row`` now, ascending; of one head where they differ."""
        state = self.layers[layer].state
        if state is None:
            return []
        index = row * state.sets + (head if state.sets > 1 else 0)
        columns = (state.slots.positions + state.start)[index]
        return sorted(columns[state.slots.held[index]].tolist())

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on later, as tensors and numbers (``torch.save``, ``weights_only`` loads it)."""
        for layer in self.layers:
            layer.check_attended()
        states = [None if layer.state is None else layer.state.pack() for layer in self.layers]
        return {"policy": repr(self.policy), "evict_every": self.evict_every, "layers": states}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; the cache must have been made with the same policy."""
        for name, mine in (("policy", repr(self.policy)), ("evict_every", self.evict_every)):
            if stored[name] != mine:
                raise UsageError(f"the stored cache was made with {name}={stored[name]}, this one with {mine}")
        self.layers.clear()
        for packed in stored["layers"]:
            layer = self._new_layer()
            layer.state = None if packed is None else LayerState.unpack(packed)
            layer.is_initialized = packed is not None
            self.layers.append(layer)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("an evicting cache cannot be cropped: what was dropped is gone")


class EvictingLayer(compat.CacheLayerMixin):
    """One layer of an :class:`EvictingCache`; its state is a :class:`~tova.replay.LayerState`."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, cache: EvictingCache, index: int) -> None:
        super().__init__()
        self.cache = cache
        self.index = index
        self.policy: Policy | None = None
        self.state: LayerState | None = None
        self._scan: Scan | None = None
        self._awaits_attention = False

    # -- called by the model ---------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        self._awaits_attention = True
        tagged = key_states[:]
        setattr(tagged, LAYER, self)
        return tagged, value_states

    def check_attended(self) -> None:
        """The new keys must have reached our attention: another one would have seen nothing but them."""
        if self._awaits_attention:
            raise UsageError(
                "the keys did not reach the evicting attention: call tova.enable(model) first; if it was called, this "
                "model changes its keys after caching them (as multi-head latent attention does) and cannot be followed"
            )

    def get_seq_length(self) -> int:
        return 0 if self.state is None else self.state.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return self.get_seq_length() + compat.number_of(query_length), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    # -- called by the attention function --------------------------------------------------------------------

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: Attention, rule: MaskRule | None
    ) -> Tensor:
        """[B, H, T, D]: attention of the new tokens over what is held; then evict."""
        self._awaits_attention = False
        key = key.view_as(key)  # without the tag: an observer may keep it
        cache = self.cache
        if self.policy is None or self._scan is None:
            layers = getattr(module.config, "num_hidden_layers", self.index + 1)
            self.policy = cache.policy.for_layer(self.index, max(layers, self.index + 1))
            self._scan = select(cache.scan, self.policy, key.device, key.dtype)
        if self.state is None:
            sets = key.shape[1] if self.policy.per_head else 1
            self.state = LayerState.empty(self.policy, key, value, sets, log=cache.log)
        state = self.state
        real = rule.real(query.shape[2]) if rule is not None else None
        if real is not None:
            self._check_padding(state, real)
        first = state.seen
        visibility = rule if rule is not None and rule.rule is not None else None
        out = replay(
            query,
            key,
            value,
            state,
            self.policy,
            how,
            scan=self._scan,
            visibility=visibility,
            real=real,
            every=cache.evict_every,
            one_shot=cache.prefill == "one_shot" and query.shape[2] > 1 and self._takes_a_prompt(),
            chunk=cache.chunk or _chunk(self.policy, key.device),
        )
        if cache.observers:
            assert state.log is not None
            seen = Seen(self.index, first, query, key, how, state.log.view, visibility)
            for observer in cache.observers:
                observer.see(seen)
        return out

    def _takes_a_prompt(self) -> bool:
        """Whether a call may be taken at once. Some policies are defined for the first prompt only."""
        assert self.policy is not None
        assert self.state is not None
        first_only = self.policy.prompt_only or self.policy.reindexes
        return not (first_only and self.state.seen)

    @staticmethod
    def _check_padding(state: LayerState, real: Tensor) -> None:
        begun = (state.start != state.seen).view(real.shape[0], -1)[:, :1]
        padding = ~real
        if bool((padding & begun).any()) or bool((padding[:, 1:] & real[:, :-1]).any()):
            raise UsageError("padding must come before a row's first real token (left padding), found some after it")

    # -- housekeeping ----------------------------------------------------------------------------------------

    def tensors(self) -> list[Tensor]:
        return [] if self.state is None else self.state.tensors()

    def reset(self) -> None:
        self.state = None
        self.policy = None
        self._awaits_attention = False
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            batch = self.state.keys.shape[0]
            self._map_rows(torch.arange(batch).repeat_interleave(repeats))

    def _map_rows(self, indices: Tensor) -> None:
        if self.state is None:
            return
        indices = indices.to(self.state.keys.device)

        def pick(tensor: Tensor, sets: int) -> Tensor:
            return tensor.view(-1, sets, *tensor.shape[1:])[indices].reshape(-1, *tensor.shape[1:])

        self.state.map_batch(pick)

    def offload(self) -> None:
        raise UsageError(_OFFLOADED)

    prefetch = offload

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError("an evicting cache cannot be cropped: what was dropped is gone")
