"""Several evicting caches side by side: row r of a batch belongs to cache r, whatever its policy and budget.

Runs that share model and text and differ in policy or budget then share everything but attention: one forward of a
batch instead of many forwards. Each row is replayed by its own cache, so its decisions are those of the run alone, up
to how a matrix product of another shape rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tova import compat
from tova.cache import EvictingCache, EvictingLayer, Passing, columns_of
from tova.errors import UsageError
from tova.layer import Attention
from tova.masks import MaskRule
from tova.threads import workers


class _Side:
    """The caches, and what their rows are taken by."""

    def __init__(self, caches: Sequence[EvictingCache]) -> None:
        self.caches = tuple(caches)
        self._workers: ThreadPoolExecutor | None = None
        self._streams: list[torch.cuda.Stream] = []

    def over_rows(self, work: Callable[[int], Tensor], device: torch.device) -> list[Tensor]:
        """``work(r)`` for every row: on the CPU in threads, on a GPU in streams."""
        rows = range(len(self.caches))
        if device.type == "cuda" and len(rows) > 1:
            return self._in_streams(work, device)
        threads = torch.get_num_threads()
        if device.type != "cpu" or threads == 1 or len(rows) == 1:
            return [work(r) for r in rows]
        if self._workers is None:
            self._workers = workers(min(len(rows), threads))
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def one(r: int) -> Tensor:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return work(r)

        return list(self._workers.map(one, rows))

    def _in_streams(self, work: Callable[[int], Tensor], device: torch.device) -> list[Tensor]:
        # A row's memory belongs to its stream. Streams wait for the caller's before they begin, and it for them in the
        # end, so none of it is used again before it has been read.
        if not self._streams:
            self._streams = [torch.cuda.Stream(device) for _ in self.caches]
        current = torch.cuda.current_stream(device)
        results = []
        for r, stream in enumerate(self._streams):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                results.append(work(r))
        for stream in self._streams:
            current.wait_stream(stream)
        return results


class SideBySide(compat.Cache):
    """One :class:`~tova.EvictingCache` per row of a batch; for texts of one length, without padding.

        caches = [tova.EvictingCache(policies.make("tova", budget=k)) for k in (64, 128, 256)]
        model(ids.expand(3, -1), cache=SideBySide(caches))
        caches[1].evicted_at                        # as if run alone, up to near-ties

    On a CPU rows are taken by threads, as many as torch has, each computing with one; on a GPU each row has a stream of
    its own, since a scan keeps one multiprocessor busy and leaves the others free.

    Args:
        caches: empty ones, or all fed with the same number of tokens.

    Raises:
        UsageError: there is none, one is there twice, or they have seen different numbers of tokens.
    """

    is_croppable = False

    def __init__(self, caches: Sequence[EvictingCache]) -> None:
        if not caches:
            raise UsageError("SideBySide needs at least one cache")
        if len({id(cache) for cache in caches}) < len(caches):
            raise UsageError("SideBySide needs a cache of its own for every row, got one of them twice")
        seen = {cache.get_seq_length() for cache in caches}
        if len(seen) > 1:
            raise UsageError(
                f"caches side by side must have seen the same number of tokens, got {min(seen)} to {max(seen)}"
            )
        self._side = _Side(caches)
        super().__init__(layer_class_to_replicate=partial(_Layer, self._side))
        self._passing = Passing()

    @property
    def caches(self) -> tuple[EvictingCache, ...]:
        """The caches, one per row."""
        return self._side.caches

    @property
    def prefill(self) -> str:
        """As the caches say; they must agree."""
        found = {cache.prefill for cache in self.caches}
        if len(found) > 1:
            raise UsageError(f"caches side by side must have the same prefill, got {', '.join(sorted(found))}")
        return found.pop()

    @prefill.setter
    def prefill(self, value: str) -> None:
        for cache in self.caches:
            cache.prefill = value

    @property
    def nbytes(self) -> int:
        """Of all caches."""
        return sum(cache.nbytes for cache in self.caches)

    def over_rows(self, work: Callable[[int], Tensor], device: torch.device) -> list[Tensor]:
        """``work(r)`` for every row: on the CPU in threads, on a GPU in streams."""
        return self._side.over_rows(work, device)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        if key_states.shape[0] != len(self.caches):
            raise UsageError(f"{len(self.caches)} caches side by side need as many rows, got {key_states.shape[0]}")
        while len(self.layers) <= layer_idx:
            self.layers.append(_Layer(self._side, len(self.layers)))
        self._passing.enter(self.layers[layer_idx], key_states.shape[2], self.layers)
        return self.layers[layer_idx].update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.caches[0].get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        return columns_of(self.get_seq_length(layer_idx), query_length), 0

    def reset(self) -> None:
        """Forget everything, the caches too."""
        for cache in self.caches:
            cache.reset()
        super().reset()
        self._passing = Passing()

    def crop(self, *args: Any, **kwargs: Any) -> None:
        self.caches[0].crop()


class _Layer(EvictingLayer):
    """Layer ``index`` of all caches."""

    def __init__(self, side: _Side, index: int = 0) -> None:
        super().__init__(side.caches[0]._settings, index)
        self._side = side
        self.rows = [cache.layer(index) for cache in side.caches]

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        handed = super().update(key_states, value_states)
        self._all_busy(self.busy)
        return handed

    def reached(self, module: nn.Module) -> None:
        super().reached(module)
        self._all_busy("")

    @property
    def begun(self) -> bool:
        return self.rows[0].begun

    def get_seq_length(self) -> int:
        return self.rows[0].get_seq_length()

    def replay(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, how: Attention, rule: MaskRule | None
    ) -> Tensor:
        if rule is not None and rule.not_padding(query.shape[2]) is not None:
            raise UsageError("caches side by side take texts of one length: no padding")
        if rule is not None and rule.rule is not None:
            rule.check(query.shape[2], torch.zeros(len(self.rows), dtype=torch.int64, device=query.device))
            rule.last_row = None  # of all rows together

        def one(r: int) -> Tensor:
            row = slice(r, r + 1)
            return self.rows[r].replay(module, query[row], key[row], value[row], how, rule)

        self._all_busy("was in the middle of its attention")
        out = torch.cat(self._side.over_rows(one, query.device))
        self._all_busy("")
        return out

    def _all_busy(self, what: str) -> None:
        """Rows are taken one after the other: what breaks one off leaves all of them half done."""
        self.busy = what
        for row in self.rows:
            row.busy = what

    def _map_rows(self, indices: Tensor) -> None:
        raise UsageError("rows of caches side by side cannot be reordered: each has a policy of its own (no beams)")
