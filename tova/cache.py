"""A transformers cache that forgets: pass it to a forward (a teacher-forced replay) or to ``generate``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tova import compat
from tova.attention import hand_on
from tova.errors import UsageError
from tova.layer import PADDING, Attention, LayerState
from tova.masks import Columns, MaskRule
from tova.observers import Observer, Seen
from tova.policies import Policy
from tova.replay import replay
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
_MOST = 2**31
"""Above ``evict_every`` and ``chunk``: more tokens than anybody reads at once."""


def _chunk(policy: Policy, device: torch.device) -> int:
    """Queries per block: longer ones carry survivors on less often, and look at more that is dead."""
    if device.type == "cpu":
        return 128
    return max(128, min(256, policy.layer_budget * 3 // 8 // 64 * 64))


@dataclass
class _Settings:
    """What a cache and its layers share. Layers know these and not the cache, so that nothing refers to itself in a
    circle: a cache that goes out of scope frees its memory at once."""

    policy: Policy
    prefill: str
    evict_every: int
    log: bool
    observers: tuple[Observer, ...]
    scan: str
    chunk: int | None


class EvictingCache(compat.Cache):
    """A key-value cache that holds at most ``policy.budget`` positions per layer between steps.

    One kept set per layer, shared by all heads, unless the policy is ``per_head``; policies see the attention averaged
    over the query heads that share a set. Keys keep their original rotary positions. The model must be switched over
    once with :func:`tova.enable`.

        cache = EvictingCache(policies.make("tova", budget=256))
        model(ids, cache=cache)                     # teacher-forced, exact, one pass
        cache.evicted_at                            # what was dropped when

    A forward that is broken off half-way (Ctrl-C, out of memory) leaves layers that have seen different tokens: the
    cache then refuses to go on until :meth:`reset`.

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
        chunk: queries per block of a replay; None chooses. The same chunk gives the same decisions; with another one
            matrix products round otherwise, so that near-ties may fall the other way (see docs/numerics.md).

    Raises:
        UsageError: an option is out of its range, or one of another kind of cache.
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
        if not isinstance(policy, Policy):
            raise UsageError(
                f"policy must be an instance of a policy, as tova.policies.make('tova', budget=512) gives one, got "
                f"{policy!r}"
            )
        if not isinstance(log, bool):
            raise UsageError(f"log must be true or false, got {log!r}")
        if observers and not log:
            raise UsageError("observers need the log of evictions; leave log=True")
        for observer in observers:
            if not callable(getattr(observer, "see", None)):
                raise UsageError(f"observers must have a method see(seen), {observer!r} has none")
        if scan not in SCANS:
            raise UsageError(f"scan must be one of {', '.join(SCANS)}, got {scan!r}")
        self._settings = _Settings(
            policy=policy,
            prefill=_known_prefill(prefill),
            evict_every=_whole("evict_every", evict_every),
            log=log,
            observers=tuple(observers),
            scan=scan,
            chunk=None if chunk is None else _whole("chunk", chunk),
        )
        super().__init__(layer_class_to_replicate=partial(EvictingLayer, self._settings))
        self._passing = Passing()

    is_croppable = False  # older versions of transformers do not ask the layers

    @property
    def policy(self) -> Policy:
        """The policy the cache was made with."""
        return self._settings.policy

    @property
    def prefill(self) -> str:
        """``every_step`` or ``one_shot``; may be changed between calls."""
        return self._settings.prefill

    @prefill.setter
    def prefill(self, value: str) -> None:
        self._settings.prefill = _known_prefill(value)

    @property
    def evict_every(self) -> int:
        """Entries the cache grows past the budget before it evicts."""
        return self._settings.evict_every

    @property
    def log(self) -> bool:
        """Whether ``evicted_at`` is kept."""
        return self._settings.log

    @property
    def observers(self) -> tuple[Observer, ...]:
        """Those that are told of every call of every layer."""
        return self._settings.observers

    @property
    def scan(self) -> str:
        """The scan that was asked for."""
        return self._settings.scan

    @property
    def chunk(self) -> int | None:
        """Queries per block, None if that is chosen."""
        return self._settings.chunk

    def layer(self, index: int) -> EvictingLayer:
        """Layer ``index``, made if there is none yet."""
        while len(self.layers) <= index:
            self.layers.append(EvictingLayer(self._settings, len(self.layers)))
        return self.layers[index]

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Called by the model: hands new keys and values to the attention function, which asks this layer."""
        layer = self.layer(layer_idx)
        self._passing.enter(layer, key_states.shape[2], self.layers)
        return layer.update(key_states, value_states)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """Columns of a mask for that many new tokens, and the first of them: 0, since positions are logical."""
        return columns_of(self.get_seq_length(layer_idx), query_length), 0

    @property
    def evicted_at(self) -> Tensor:
        """int64 [layers, B, columns]: the last step at which a token was visible, counted in columns.

        The int64 maximum where it was never dropped, -1 for padding, and all along a layer that no forward used
        (cross-attention, for a text without images). With a kept set per key/value head there is a head axis:
        [layers, B, K, columns].
        """
        if not self.log:
            raise UsageError("evicted_at was not recorded: the cache was made with log=False")
        self._passing.check(self.layers)
        logs = [None if layer.state is None or layer.state.log is None else layer.state.log for layer in self.layers]
        views = [log.view for log in logs if log is not None]
        if not views:
            raise UsageError("evicted_at: nothing has been processed yet")
        unused = torch.full_like(views[0], PADDING)
        stacked = torch.stack([unused if log is None else log.view for log in logs])
        return stacked[:, :, 0] if stacked.shape[2] == 1 else stacked

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values, positions and records of all layers, the log apart."""
        return sum(t.numel() * t.element_size() for layer in self.layers for t in layer.tensors())

    def kept(self, layer: int, row: int = 0, head: int = 0) -> list[int]:
        """The columns layer ``layer`` holds of batch row ``row`` now, ascending; of one head where they differ."""
        self._passing.check(self.layers)
        state = self.layers[layer].state
        if state is None:
            return []
        index = row * state.kept_sets + (head if state.kept_sets > 1 else 0)
        columns = state.columns[index]
        return sorted(columns[state.slots.held[index]].tolist())

    def state_dict(self) -> dict[str, Any]:
        """All that is needed to go on later, as tensors and numbers (``torch.save``, ``weights_only`` loads it)."""
        self._passing.check(self.layers)
        states = [None if layer.state is None else layer.state.pack() for layer in self.layers]
        return {"policy": repr(self.policy), "evict_every": self.evict_every, "layers": states}

    def load_state_dict(self, stored: dict[str, Any]) -> None:
        """Go on from what :meth:`state_dict` gave; the cache must have been made with the same policy.

        Raises:
            UsageError: it was given by a cache of another policy or interval, by one without a log while this one
                keeps it, or by something else; the cache is left as it was.
        """
        try:
            for name, mine in (("policy", repr(self.policy)), ("evict_every", self.evict_every)):
                if stored[name] != mine:
                    raise UsageError(f"the stored cache was made with {name}={stored[name]}, this one with {mine}")
            states = [None if packed is None else LayerState.unpack(packed) for packed in stored["layers"]]
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            if isinstance(e, UsageError):
                raise
            raise UsageError(f"this is not what state_dict of an evicting cache gives ({type(e).__name__}: {e})") from e
        for state in states:
            if state is not None and state.log is None and self.log and state.seen:
                raise UsageError(
                    "the stored cache was made with log=False, so what it dropped is not known; load it into a cache "
                    "made with log=False"
                )
            if state is not None and not self.log:
                state.log = None
        self.layers.clear()
        self._passing = Passing()
        for index, state in enumerate(states):
            layer = self.layer(index)
            layer.state = state
            layer.is_initialized = state is not None

    def reset(self) -> None:
        """Forget everything; the cache is as new."""
        super().reset()
        self._passing = Passing()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes what was in row ``beam_idx[i]`` (int64 [B'])."""
        with self._passing.all_or_none(self.layers):
            super().reorder_cache(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep the rows ``indices`` (int64 [B']), in that order."""
        with self._passing.all_or_none(self.layers):
            super().batch_select_indices(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every row ``repeats`` times, one after the other."""
        with self._passing.all_or_none(self.layers):
            super().batch_repeat_interleave(repeats)

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(_CROPPED)


_CROPPED = "an evicting cache cannot be cropped: what was dropped is gone"


def _known_prefill(prefill: str) -> str:
    if prefill not in PREFILLS:
        raise UsageError(f"prefill must be one of {', '.join(PREFILLS)}, got {prefill!r}")
    return prefill


def _whole(option: str, value: Any) -> int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    if not whole or not 1 <= value < _MOST:
        below = f" and below {_MOST}" if whole and value >= 1 else ""
        raise UsageError(f"{option} must be an integer of at least 1{below}, got {value!r}")
    return value


def columns_of(seen: int, query_length: Any) -> int:
    """How many columns a mask for new tokens has, said so that the mask is known to be for an evicting cache."""
    columns = seen + compat.number_of(query_length)
    return columns if torch.compiler.is_compiling() else Columns(columns)


class Passing:
    """Keeps watch that every forward goes through all layers, each taking the same tokens once.

    A forward begins with a layer that has seen as much as all others. What is left half done by one that was broken
    off is noticed by the next.
    """

    def __init__(self) -> None:
        self._begun = -1
        self._new = 0
        self._done: set[int] = set()
        self._moving = False

    def enter(self, layer: EvictingLayer, new: int, layers: Sequence[EvictingLayer]) -> None:
        """``layer`` is about to take ``new`` tokens.

        Raises:
            UsageError: layers disagree about what they have seen.
        """
        seen = layer.get_seq_length()
        if seen == self._begun and new == self._new and layer.index not in self._done and not self._moving:
            previous = layers[layer.index - 1]
            if layer.index == 0 or previous.busy == "":
                self._done.add(layer.index)
                return
        self.check(layers, seen)
        self._begun, self._new, self._done = seen, new, {layer.index}

    def check(self, layers: Sequence[EvictingLayer], *also: int) -> None:
        """Raise if a forward was broken off: layers that were ever used must have seen the same, and as ``also`` says.

        A layer that no forward uses (cross-attention, for a text without images) stays empty.
        """
        seen = [layer.get_seq_length() for layer in layers if layer.begun]
        seen += also if seen else ()
        for layer in layers:
            if layer.busy:
                raise UsageError(
                    f"layer {layer.index} of this evicting cache {layer.busy}: a forward was broken off there (or the "
                    "model's attention is not ours: call tova.enable(model) first); call reset() and start over"
                )
        if self._moving or len(set(seen)) > 1:
            raise UsageError(
                f"a forward with this evicting cache was broken off half-way: its layers have seen {min(seen)} to "
                f"{max(seen)} tokens, so it cannot go on; call reset() and start over"
            )

    @contextmanager
    def all_or_none(self, layers: Sequence[EvictingLayer]) -> Iterator[None]:
        """Around what changes all layers: broken off in between, they disagree."""
        self.check(layers)
        self._moving = True
        yield
        self._moving = False


class EvictingLayer(compat.CacheLayerMixin):
    """One layer of an :class:`EvictingCache`; its state is a :class:`~tova.layer.LayerState`."""

    is_compileable = False
    is_croppable = False
    is_sliding = False

    def __init__(self, settings: _Settings, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.policy: Policy | None = None
        self.state: LayerState | None = None
        self.busy = ""
        """What the layer is in the middle of, in words; empty when it is at rest."""
        self._settings = settings
        self._scan: Scan | None = None
        self._hidden: Tensor | None = None

    # -- called by the model ---------------------------------------------------------------------------------

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing is made before the first token."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        self.busy = "was handed keys that its attention never got"
        return hand_on(self, key_states, value_states)

    @property
    def begun(self) -> bool:
        """Whether the layer has ever taken tokens."""
        return self.state is not None

    def get_seq_length(self) -> int:
        return 0 if self.state is None else self.state.seen

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        return columns_of(self.get_seq_length(), query_length), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length

    # -- called by the attention function --------------------------------------------------------------------

    def reached(self, module: nn.Module) -> None:
        """The keys that were handed on have come to our attention.

        What is refused from here on, before anything has changed, leaves the layer as it was.
        """
        if not self.busy.startswith("was handed"):
            self.busy = "was asked for the same tokens twice"
            raise UsageError(
                f"{type(module).__name__} calls its attention more than once for the same keys; an evicting cache "
                "would take its tokens twice, so this model cannot be followed"
            )
        self.busy = ""

    def replay(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: Attention, rule: MaskRule | None
    ) -> Tensor:
        """[B, H, T, D]: attention of the new tokens over what is held; then evict."""
        settings = self._settings
        if self.policy is None or self._scan is None:
            layers = getattr(module.config, "num_hidden_layers", None) or self.index + 1
            self.policy = settings.policy.for_layer(self.index, max(layers, self.index + 1))
            self._scan = select(settings.scan, self.policy, key.device, key.dtype)
        if self.state is None:
            kept_sets = key.shape[1] if self.policy.per_head else 1
            self.state = LayerState.empty(self.policy, key, value, kept_sets, log=settings.log)
        state = self.state
        state.check_alike(query, key, value)
        state.own_memory()
        steps = query.shape[2]
        not_padding = None
        if rule is not None:
            rule.check(steps, state.start.view(query.shape[0], -1)[:, 0])
            not_padding = rule.not_padding(steps)
            not_padding = None if not_padding is None else not_padding.to(key.device)
            self._check_hidden(rule)
        if not_padding is not None:
            self._check_padding(state, not_padding)
        first = state.seen
        visibility = rule if rule is not None and rule.rule is not None else None
        self.busy = "was in the middle of its attention"
        out = replay(
            query,
            key,
            value,
            state,
            self.policy,
            how,
            scan=self._scan,
            visibility=visibility,
            not_padding=not_padding,
            evict_every=settings.evict_every,
            one_shot=settings.prefill == "one_shot" and steps > 1 and self._takes_a_prompt(),
            chunk=settings.chunk or _chunk(self.policy, key.device),
        )
        if settings.observers:
            assert state.log is not None
            seen = Seen(self.index, first, query, key, how, state.log.view, visibility)
            for observer in settings.observers:
                observer.see(seen)
        self.is_initialized = True
        self.busy = ""
        return out

    def _takes_a_prompt(self) -> bool:
        """Whether a call may be taken at once. Some policies are defined for the first prompt only."""
        assert self.policy is not None
        assert self.state is not None
        first_only = self.policy.prompt_only or self.policy.reindexes
        return not (first_only and self.state.seen)

    def _check_hidden(self, rule: MaskRule) -> None:
        """What a mask passed whole has hidden once must stay hidden in the next one."""
        if rule.last_row is None:
            return
        if self._hidden is not None:
            first = rule.block(
                torch.tensor([rule.offset], device=self._hidden.device),
                torch.arange(self._hidden.shape[1], device=self._hidden.device).expand(len(self._hidden), 1, -1),
            )
            first = first[:, 0, 0] if rule.padding is None else first[:, 0, 0] & rule.padding[:, : first.shape[-1]]
            if bool((first & self._hidden).any()):
                raise UsageError(
                    "the mask shows a token that an earlier mask has hidden; an evicting cache drops what is hidden, "
                    "and cannot bring it back"
                )
        self._hidden = ~rule.last_row

    @staticmethod
    def _check_padding(state: LayerState, not_padding: Tensor) -> None:
        begun = (state.start != state.seen).view(len(not_padding), -1)[:, :1]
        if bool((~not_padding & begun).any()) or bool((~not_padding[:, 1:] & not_padding[:, :-1]).any()):
            raise UsageError("padding must come before a row's first real token (left padding), found some after it")

    # -- housekeeping ----------------------------------------------------------------------------------------

    @property
    def keys(self) -> Tensor | None:
        """[B, K, n, D]: a copy of the keys held now, rotated as the model rotated them, by ascending position; None
        before the first token. n is what the row that holds most holds; rows that hold fewer end with zeros."""
        return None if self.state is None else self.state.held(self.state.keys)

    @keys.setter
    def keys(self, value: None) -> None:
        self._refuse(value)

    @property
    def values(self) -> Tensor | None:
        """[B, K, n, D]: a copy of the values held now, in the order of :attr:`keys`."""
        return None if self.state is None else self.state.held(self.state.values)

    @values.setter
    def values(self, value: None) -> None:
        self._refuse(value)

    @staticmethod
    def _refuse(value: None) -> None:
        if value is not None:
            raise UsageError("keys and values of an evicting cache cannot be set: what is held goes with its positions")

    def tensors(self) -> list[Tensor]:
        return [] if self.state is None else self.state.tensors()

    def reset(self) -> None:
        self.state = None
        self.policy = None
        self.busy = ""
        self._hidden = None
        self.is_initialized = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._map_rows(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self._map_rows(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            batch = self.state.keys.shape[0]
            self._map_rows(torch.arange(batch, device=self.state.keys.device).repeat_interleave(repeats))

    def _map_rows(self, indices: Tensor) -> None:
        if self.state is None:
            return
        indices = indices.to(self.state.keys.device)

        def pick(tensor: Tensor, sets: int) -> Tensor:
            return tensor.view(-1, sets, *tensor.shape[1:])[indices].reshape(-1, *tensor.shape[1:])

        self.state.map_batch(pick)
        self._hidden = None if self._hidden is None else pick(self._hidden, 1)

    def offload(self) -> None:
        raise UsageError(_OFFLOADED)

    prefetch = offload

    def crop(self, *args: Any, **kwargs: Any) -> None:
        raise UsageError(_CROPPED)
