"""Decoding with a full cache as a CUDA graph: the same kernels every step, launched at once.

A cache that holds its budget does the same work for every token: nothing grows, no number is read back. What changes
(which positions are held, what the policy remembers) is therefore written into the same memory each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tova import compat
from tova.cache import EvictingCache, EvictingLayer
from tova.errors import UsageError
from tova.layer import LayerState

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_WARM_UP = 3
"""Steps of a full cache taken as usual before one is recorded: kernels are built and memory is taken in these."""


class DecodeGraph:
    """Takes a batch's next tokens, [B, 1], and returns the model's logits, [B, 1, V].

        cache = EvictingCache(policies.make("tova", budget=512), log=False)
        logits = model(prompt, cache=cache).logits[:, -1:]
        step = DecodeGraph(model, cache)
        for _ in range(100):
            logits = step(logits.argmax(-1))

    While a layer still has room tokens are taken as usual; once every layer is full a step is recorded, and replayed
    from then on. Policies that evict at the prompt only never are full in this sense. The cache can be used without
    the graph in between; a step is then recorded anew.

    Args:
        model: on a CUDA device, after :func:`tova.enable`.
        cache: fed with a prompt, without padding; ``log=False``, ``evict_every=1``.

    Raises:
        UsageError: one of these does not hold, or a layer has a window of its own.
    """

    def __init__(self, model: PreTrainedModel, cache: EvictingCache) -> None:
        if model.device.type != "cuda":
            raise UsageError(f"DecodeGraph needs a model on a CUDA device, this one is on {model.device}")
        if cache.log or cache.observers:
            raise UsageError("DecodeGraph needs a cache made with log=False and no observers: it replays kernels only")
        if cache.evict_every != 1:
            raise UsageError(f"DecodeGraph needs a cache with evict_every=1, this one has {cache.evict_every}")
        self._model = model
        self._cache = cache
        self._argument = compat.cache_argument(model)
        self._warm = 0
        self._replay: Callable[[], None] | None = None
        self._recorded: list[Tensor] = []
        self._ids: Tensor | None = None
        self._logits: Tensor | None = None

    @torch.inference_mode()
    def __call__(self, ids: Tensor) -> Tensor:
        """Logits [B, 1, V] after ``ids`` int64 [B, 1]; the memory is used again by the next call."""
        states = self._states()
        if not all(_is_full(layer) for layer in self._cache.layers):
            return self._forward(ids, None)
        if self._ids is None:
            self._ids = ids.clone()
            self._positions = states[0].slots.newest.view(len(ids), -1)[:, :1] + 1
        self._ids.copy_(ids)
        self._positions.copy_(states[0].slots.newest.view(len(ids), -1)[:, :1] + 1)
        memory = [tensor for state in states for tensor in state.tensors()]
        if self._replay is not None and any(a is not b for a, b in zip(memory, self._recorded, strict=True)):
            self._replay = None
        if self._replay is None and self._warm < _WARM_UP:
            self._warm += 1
            return self._beside(self._step)
        if self._replay is None:
            seen = [state.seen for state in states]
            self._replay = self._record(self._step)
            self._recorded = memory
            for state, before in zip(states, seen, strict=True):  # recording is not doing
                state.seen = before
        self._replay()
        for state in states:
            state.seen += 1
        assert self._logits is not None
        return self._logits

    def _states(self) -> list[LayerState]:
        states = [layer.state for layer in self._cache.layers]
        if not states or any(state is None for state in states):
            raise UsageError("DecodeGraph needs a cache that has been fed with a prompt")
        if any(state.ragged for state in states):
            raise UsageError("DecodeGraph takes no padding and no layers with a window of their own")
        return states

    def _forward(self, ids: Tensor, positions: Tensor | None) -> Tensor:
        logits: Tensor = self._model(
            input_ids=ids, position_ids=positions, use_cache=True, **{self._argument: self._cache}
        ).logits
        return logits

    def _step(self) -> Tensor:
        """One token, what changes being written where it was read from."""
        states = self._states()
        before = [_changing(state) for state in states]
        assert self._ids is not None
        self._logits = self._forward(self._ids, self._positions)
        for state, old in zip(states, before, strict=True):
            _put_back(state, old)
        return self._logits

    def _beside(self, work: Callable[[], Tensor]) -> Tensor:
        """On a stream of its own, as recording needs it."""
        current, side = torch.cuda.current_stream(), torch.cuda.Stream()
        side.wait_stream(current)
        with torch.cuda.stream(side):
            result = work()
        current.wait_stream(side)
        return result

    def _record(self, work: Callable[[], Any]) -> Callable[[], None]:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        replay: Callable[[], None] = graph.replay
        return replay


def _is_full(layer: EvictingLayer) -> bool:
    """Whether the layer evicted at the last step, a decoded one, and so will at the next."""
    policy, state = layer.policy, layer.state
    assert policy is not None
    assert state is not None
    schedule = policy.schedule()
    return state.most == schedule.leaves == schedule.evict_at - 1 and state.most < state.used and not state.ordered


def _changing(state: LayerState) -> dict[str, Any]:
    slots = state.slots
    return {
        "plain": [slots.positions, slots.held, slots.observed, slots.newest],
        "records": dict(slots.records),
        "features": dict(slots.features),
    }


def _put_back(state: LayerState, old: dict[str, Any]) -> None:
    slots, new = state.slots, _changing(state)
    for target, source in zip(old["plain"], new["plain"], strict=True):
        _overwrite(target, source)
    slots.positions, slots.held, slots.observed, slots.newest = old["plain"]
    for kind in ("records", "features"):
        for name, target in old[kind].items():
            _overwrite(target, new[kind][name])
            getattr(slots, kind)[name] = target


def _overwrite(target: Tensor, source: Tensor) -> None:
    if target is not source:
        target.copy_(source)
