"""The data model of a layer: how logits become weights, and what a layer holds.

Nothing here knows a transformer library, or which policy decides: tensors in, tensors and state out.

Shape letters used throughout ``tova``:

    B batch rows      H query heads       K key/value heads      T new tokens      D head size, E size of a value
    G kept sets per sequence (1, or K where every key/value head keeps its own)    R = B * G
    S slots of a layer      C tokens of a chunk      N = kept + C candidates       H_g = H / G query heads of a kept set
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tova.errors import UsageError, renamed
from tova.eviction_log import NEVER, PADDING, EvictionLog
from tova.policies.base import Policy, Schedule
from tova.policies.slots import Slots
from tova.policies.steps import new_records, ring_names

__all__ = ["NEVER", "PADDING", "Attention", "EvictionLog", "LayerState", "Rotation", "Visibility"]

_ROOM_AT_FIRST = 4096
"""Slots a layer takes at its first decoded token if its budget is no larger."""


class Visibility(Protocol):
    """Which columns a query may look at, beside causality; asked for by block, so never T x T."""

    def block(self, queries: Tensor, columns: Tensor) -> Tensor:
        """bool [B, G, C, N] for query columns [C] and key columns [B, G, N]."""
        ...


class Rotation(Protocol):
    """How a model turns queries and keys by their positions; asked by the few policies that move them."""

    def turn(self, x: Tensor, positions: Tensor, to: Tensor | None) -> Tensor:
        """[B, H, T, D] turned from ``positions`` int64 [B, T] to those of ``to``, or back to none."""
        ...


@dataclass(frozen=True)
class Attention:
    """How logits become weights: what a model's attention asks for beside queries, keys and values.

    Attributes:
        scaling: factor on the logits.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None leaves them.
        sink_logits: [H], a logit per head that only adds to the sum of weights (GPT-OSS); None without.
        rotation: None if the model's is not known.
    """

    scaling: float
    softcap: float | None = None
    sink_logits: Tensor | None = None
    rotation: Rotation | None = None

    @property
    def is_plain(self) -> bool:
        """Whether weights are a plain softmax of scaled products."""
        return self.softcap is None and self.sink_logits is None

    @property
    def sinks(self) -> Tensor | None:
        """Old name of ``sink_logits``."""
        renamed("Attention.sinks", "Attention.sink_logits")
        return self.sink_logits

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        """float32 [B, H, T, N] from [B, H, T, D] and [B, K, N, D]; queries are grouped, keys never repeated."""
        batch, heads, steps, size = query.shape
        kv_heads = key.shape[1]
        grouped = query.reshape(batch, kv_heads, heads // kv_heads * steps, size)
        return self.product(grouped, key.transpose(-1, -2)).view(batch, heads, steps, key.shape[2])

    def product(self, query: Tensor, key: Tensor, out: Tensor | None = None) -> Tensor:
        """float32 [..., M, N] from [..., M, D] and [..., D, N]; written into ``out`` if given."""
        if query.dtype == torch.float32:  # fewer numbers to scale; in half precision it would cost accuracy
            logits = torch.matmul(query * self.scaling, key, out=out)
        else:
            logits = (query @ key).float().mul_(self.scaling)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits if out is None or out is logits else out.copy_(logits)

    def sink_logits_of(self, batch: int, kept_sets: int) -> Tensor | None:
        """float32 [R, H_g]: the sink logits of the heads of each kept set."""
        if self.sink_logits is None:
            return None
        by_set = self.sink_logits.float().view(1, kept_sets, -1)
        return by_set.expand(batch, kept_sets, -1).reshape(batch * kept_sets, -1)

    @staticmethod
    def mix(weights: Tensor, sums: Tensor | None, value: Tensor) -> Tensor:
        """[B, H, T, E]: values [B, K, N, E] under weights [B, H, T, N], divided by ``sums`` [B, H, T, 1] if given."""
        batch, heads, steps, candidates = weights.shape
        kv_heads = value.shape[1]
        grouped = weights.to(value.dtype).view(batch, kv_heads, heads // kv_heads * steps, candidates)
        mixed = (grouped @ value).view(batch, heads, steps, value.shape[-1])
        if sums is None:
            return mixed
        return mixed.float().div_(sums.clamp_min(torch.finfo(torch.float32).tiny)).to(value.dtype)


@dataclass
class LayerState:
    """What one layer holds between calls.

    Slots keep their place while tokens come one at a time: the newcomer takes a free slot, the victim frees its own.
    A chunk leaves what survives in position order, in the first slots.
    """

    keys: Tensor
    """[B, K, S, D]"""
    values: Tensor
    """[B, K, S, E]"""
    slots: Slots
    """[R, S]; positions count from the sequence's first real token."""
    start: Tensor
    """int64 [R, 1]: padding columns before the first real token; position + start is the column."""
    seen: int = 0
    """Columns processed so far, padding included."""
    ordered: bool = True
    """Whether occupied slots are in position order."""
    ragged: bool = False
    """Whether rows may hold different numbers (because of padding, a layer's own window, or the policy)."""
    most: int = 0
    """No row holds more than this; if not ``ragged``, every row holds exactly this."""
    used: int = 0
    """A high-water mark: all that is held is in the first ``used`` slots."""
    log: EvictionLog | None = None

    @classmethod
    def empty(cls, policy: Policy, key: Tensor, value: Tensor, kept_sets: int, *, log: bool) -> LayerState:
        """A state that holds nothing, for tokens whose keys and values look like these."""
        rows = key.shape[0] * kept_sets
        device = key.device
        zeros = torch.zeros(rows, 1, dtype=torch.int64, device=device)
        return cls(
            keys=key[:, :, :0],
            values=value[:, :, :0],
            slots=Slots(
                positions=zeros[:, :0],
                held=zeros[:, :0].bool(),
                records=new_records(policy, rows, 0, torch.float32, device),
                observed=zeros,
                newest=zeros - 1,
                kept_sets=kept_sets,
                rings=ring_names(policy),
            ),
            start=zeros.clone(),
            ragged=policy.uneven,
            log=EvictionLog() if log else None,
        )

    @property
    def kept_sets(self) -> int:
        """G, kept sets per sequence."""
        return self.slots.positions.shape[0] // self.keys.shape[0]

    @property
    def columns(self) -> Tensor:
        """int64 [R, S]: the slots' columns."""
        return self.slots.positions + self.start

    def held(self, entries: Tensor) -> Tensor:
        """[B, K, n, D]: of ``entries`` [B, K, S, D] those that are held, by ascending position; zeros behind them."""
        order, _ = self.slots.in_position_order()
        most = int(self.slots.count.max()) if order.shape[1] else 0
        order = order[:, :most]
        there = self.slots.held.gather(1, order).view(entries.shape[0], self.kept_sets, most, 1)
        return _entries_in(entries, order).masked_fill(~there, 0)

    # -- what changes it ---------------------------------------------------------------------------------------

    def check_alike(self, query: Tensor, key: Tensor, value: Tensor) -> None:
        """Raise unless new tokens and held ones go together.

        Raises:
            UsageError: they differ in dtype, device or shape.
        """
        dtypes = [x.dtype for x in (query, key, value, self.keys, self.values)]
        if len(set(dtypes)) > 1:
            new, held = (", ".join(str(d).removeprefix("torch.") for d in some) for some in (dtypes[:3], dtypes[3:]))
            raise UsageError(
                f"queries, keys and values must be of one dtype, that of what the cache holds ({held}), got {new}: "
                "autocast must be on, or off, all along a text"
            )
        for what, ours, theirs in (("keys", self.keys, key), ("values", self.values, value)):
            if ours.device != theirs.device:
                raise UsageError(
                    f"the cache holds {what} on {ours.device}, the model's new ones are on {theirs.device}"
                )
            (b, k, _, d), (new_b, new_k, _, new_d) = ours.shape, theirs.shape
            if (b, k, d) != (new_b, new_k, new_d):
                raise UsageError(
                    f"the cache holds {what} of {b} rows, {k} heads and size {d}, the new ones have {new_b} rows, "
                    f"{new_k} heads and size {new_d}: another batch, or another model"
                )

    def note_padding(self, not_padding: Tensor) -> None:
        """Let rows whose first real token is among the new columns begin there; ``not_padding`` is bool [R, T]."""
        padding = (~not_padding).sum(-1, keepdim=True)
        self.start = self.start + torch.where(self.start == self.seen, padding, 0)
        self.ragged = True

    def extend_log(self, steps: int, not_padding: Tensor | None) -> None:
        """Make room in the log for ``steps`` more columns; ``not_padding`` is bool [R, steps], None if none is."""
        if self.log is None:
            return
        rows, device = len(self.start), self.keys.device
        self.log.extend(self.keys.shape[0], self.kept_sets, self.seen + steps, device)
        if not_padding is not None:
            columns = (self.seen + torch.arange(steps, device=device)).expand(rows, steps)
            self.log.write(columns, PADDING, ~not_padding)

    def write_log(self, step: Tensor | int, where: Tensor) -> None:
        """Note that the slots ``where`` (bool [R, S]) were dropped after query column ``step``."""
        if self.log is not None:
            self.log.write(self.columns, step, where)

    def open_slot(self, policy: Policy, schedule: Schedule) -> int:
        """See to a free slot in every row; returns how many of the first slots have one and all that is held.

        Where there is none, all there will ever be is made at once, or, where that is a lot, an eighth more.
        """
        capacity = NEVER if policy.uneven else schedule.evict_at
        self.used += self.most == self.used
        size = self.slots.held.shape[1]
        if self.used > size:
            more = min(capacity, max(_ROOM_AT_FIRST, size + max(64, size // 8))) - size
            self.keys = torch.nn.functional.pad(self.keys, (0, 0, 0, more))
            self.values = torch.nn.functional.pad(self.values, (0, 0, 0, more))
            rows = len(self.start)
            self.slots = self.slots.padded(new_records(policy, rows, more, torch.float32, self.keys.device), more)
        return self.used

    def advance(self, policy: Policy, schedule: Schedule) -> None:
        """Count the token that a step has taken; its slots have moved on already."""
        self.seen += 1
        self.ordered = False
        if policy.uneven:
            self.most = int(self.slots.count.max())
        elif self.ragged:
            self.most = min(self.most + 1, schedule.evict_at - 1)
        else:
            self.most = schedule.held_after(self.most, 1)

    def carry(
        self, slots: Slots, steps: int, policy: Policy, schedule: Schedule, last_seen: Tensor, dropped: Tensor
    ) -> None:
        """Go on with the survivors among a chunk's candidates, in the order they are in.

        Args:
            slots: the [R, N] candidates after ``steps`` steps, with their keys and values.
            last_seen: int64 [R, N], the columns of the last queries that saw them, for those ``dropped`` (bool [R, N]).
        """
        assert slots.keys is not None
        assert slots.values is not None
        self.keys, self.values = slots.keys, slots.values
        self.slots = replace(slots, keys=None, values=None)
        self.write_log(last_seen, dropped)
        self.seen += steps
        self.keep_held(policy, None if self.ragged else schedule.held_after(self.most, steps))

    def keep_held(self, policy: Policy, held: int | None) -> None:
        """Give back all slots that are empty; ``held`` is how many every row holds, None if rows differ."""
        slots = self.slots
        size = slots.held.shape[1]
        self.ordered = True
        if policy.sees_dropped:
            self.most = self.used = size
            return
        self.most = self.used = int(slots.count.max()) if held is None else held
        if self.most == size:
            return
        if held is None or slots.held.device.type != "cpu":  # where reading how many there are would mean waiting
            order = (~slots.held).to(torch.uint8).argsort(dim=-1, stable=True)[:, : self.most]
        else:
            order = slots.held.nonzero()[:, 1].view(-1, self.most)
        self.select_slots(order)

    def into_position_order(self) -> None:
        """Occupied slots first and by position, and as few as hold them all."""
        if not self.ordered or self.slots.held.shape[1] > self.most:
            order, _ = self.slots.in_position_order()
            self.select_slots(order[:, : self.most])
            self.ordered, self.used = True, self.most

    def select_slots(self, order: Tensor) -> None:
        """Re-slot every tensor: slot i becomes what was in ``order[r, i]`` (int64 [R, S'])."""
        self.keys, self.values = _entries_in(self.keys, order), _entries_in(self.values, order)
        self.slots = self.slots.selected(order)

    def map_batch(self, select: Callable[[Tensor, int], Tensor]) -> None:
        """Apply ``select(tensor, rows_per_sequence)`` to every tensor's first dimension (beams, repeats, subsets)."""
        sets = self.kept_sets
        self.keys, self.values = select(self.keys, 1), select(self.values, 1)
        self.slots = self.slots.mapped(lambda tensor: select(tensor, sets))
        self.start = select(self.start, sets)
        if self.log is not None and self.log.evicted_at is not None:
            self.log.evicted_at = select(self.log.evicted_at, 1)

    # -- memory and storage ------------------------------------------------------------------------------------

    def own_memory(self) -> None:
        """Replace tensors made in inference mode, which cannot be written outside of it, by copies."""

        def own(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.is_inference() else tensor

        self.keys, self.values, self.start = own(self.keys), own(self.values), own(self.start)
        self.slots = self.slots.mapped(own)
        if self.log is not None and self.log.evicted_at is not None:
            self.log.evicted_at = own(self.log.evicted_at)

    def tensors(self) -> list[Tensor]:
        """Everything a cache is charged for: keys, values, positions and records, not the log."""
        return [self.keys, self.values, *self.slots.tensors(), self.start]

    def pack(self) -> dict[str, Any]:
        """The state as plain tensors and numbers; tensors of their own, since decoding writes in place."""
        s = self.slots.mapped(Tensor.clone)
        return {
            "keys": self.keys.clone(),
            "values": self.values.clone(),
            "start": self.start.clone(),
            "numbers": [self.seen, int(self.ordered), self.used, int(self.ragged), self.most],
            "slots": [s.positions, s.held, s.observed, s.newest],
            "records": s.records,
            "rings": sorted(s.rings),
            "features": s.features,
            "log": None if self.log is None or self.log.evicted_at is None else self.log.view.clone(),
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> LayerState:
        """What :meth:`pack` packed, in tensors of its own."""
        positions, held, observed, newest = packed["slots"]
        seen, ordered, used, ragged, most = packed["numbers"]
        keys, log = packed["keys"].clone(), packed["log"]
        kept_sets = len(positions) // len(keys)
        slots = Slots(
            positions,
            held,
            packed["records"],
            observed,
            newest,
            packed["features"],
            kept_sets,
            rings=frozenset(packed["rings"]),
        )
        return cls(
            keys=keys,
            values=packed["values"].clone(),
            slots=slots.mapped(Tensor.clone),
            start=packed["start"].clone(),
            seen=seen,
            ordered=bool(ordered),
            used=used,
            ragged=bool(ragged),
            most=most,
            log=None if log is None else EvictionLog(log.clone(), log.shape[-1]),
        )


def _entries_in(entries: Tensor, order: Tensor) -> Tensor:
    """[B, K, S', D] of [B, K, S, D]: the slots int64 [R, S'] of each kept set."""
    batch, kv_heads, _, width = entries.shape
    if order.shape[0] == batch and entries.device.type == "cpu":  # copies whole entries; gather goes number by number
        picked = [row.index_select(1, slots) for row, slots in zip(entries, order, strict=True)]
        return picked[0].unsqueeze(0) if batch == 1 else torch.stack(picked)
    kept_sets, size = order.shape[0] // batch, order.shape[1]
    return entries.gather(2, order.view(batch, kept_sets, size, 1).expand(batch, kv_heads, size, width))
