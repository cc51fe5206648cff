"""The heart: attention under eviction for any number of new tokens, exactly as if they had come one at a time.

For a fixed text an eviction run is described by one integer per layer and token, ``evicted_at``: query t sees token
j when ``j <= t <= evicted_at[j]``. So a whole text needs no token-by-token decoding. Chunk by chunk of queries:

    logits of the chunk against (kept + chunk)     one matrix product
    -> scan: step by step, who is dropped          sequential, tiny (see ``tova.scan``)
    -> masked attention weights -> output          one matrix product
    -> carry only the survivors on

Nothing here knows a transformer library: tensors in, tensors and state out.

Shape letters: B batch rows, H query heads, K key/value heads, T new tokens, D head size, G kept sets per sequence
(1, or K where every key/value head keeps its own), R = B * G, S slots of a layer, C tokens of a chunk, N = kept + C.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from tova.policies import Full, Policy, Slots
from tova.policies.base import admit, choose, new_records, observe
from tova.scan import Scan

NEVER = torch.iinfo(torch.int64).max
"""``evicted_at`` of a token that was never dropped."""
PADDING = -1
"""``evicted_at`` of a padding column."""


class Visibility(Protocol):
    """Which columns a query may look at, beside causality; asked for by block, so never T x T."""

    def block(self, queries: Tensor, columns: Tensor) -> Tensor:
        """bool [B, G, C, N] for query columns [C] and key columns [B, G, N]."""
        ...


@dataclass(frozen=True)
class Attention:
    """How logits become weights: what a model's attention asks for beside queries, keys and values.

    Attributes:
        scaling: factor on the logits.
        softcap: logits become ``softcap * tanh(logits / softcap)``; None leaves them.
    """

    scaling: float
    softcap: float | None = None

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        """float32 [B, H, T, N] from [B, H, T, D] and [B, K, N, D]; queries are grouped, keys never repeated."""
        batch, heads, steps, size = query.shape
        groups = key.shape[1]
        grouped = query.reshape(batch, groups, heads // groups * steps, size)
        if query.dtype == torch.float32:  # fewer numbers to scale; in half precision it would cost accuracy
            logits = (grouped * self.scaling) @ key.transpose(-1, -2)
        else:
            logits = (grouped @ key.transpose(-1, -2)).float().mul_(self.scaling)
        if self.softcap is not None:
            logits = logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits.view(batch, heads, steps, key.shape[2])

    @staticmethod
    def mix(weights: Tensor, sums: Tensor, value: Tensor) -> Tensor:
        """[B, H, T, D]: values [B, K, N, D] under undivided weights [B, H, T, N] with their sums [B, H, T, 1]."""
        batch, heads, steps, candidates = weights.shape
        groups = value.shape[1]
        grouped = weights.to(value.dtype).view(batch, groups, heads // groups * steps, candidates)
        mixed = (grouped @ value).view(batch, heads, steps, value.shape[-1]).float()
        return mixed.div_(sums.clamp_min(torch.finfo(torch.float32).tiny)).to(value.dtype)


@dataclass
class EvictionLog:
    """``evicted_at`` of one layer, int64 [B, G, columns], growing with the text."""

    evicted_at: Tensor | None = None
    columns: int = 0

    def extend(self, batch: int, sets: int, columns: int, device: torch.device) -> None:
        """Make room for ``columns`` columns in all, not dropped so far."""
        if self.evicted_at is None:
            self.evicted_at = torch.full((batch, sets, max(columns, 64)), NEVER, device=device)
        if columns > self.evicted_at.shape[-1]:
            more = max(columns, 2 * self.evicted_at.shape[-1]) - self.evicted_at.shape[-1]
            fresh = torch.full((batch, sets, more), NEVER, device=device)
            self.evicted_at = torch.cat([self.evicted_at, fresh], -1)
        self.columns = columns

    def write(self, column: Tensor, step: Tensor | int, where: Tensor) -> None:
        """Note that ``column`` [R, N] was dropped after query column ``step``, wherever ``where`` holds."""
        assert self.evicted_at is not None
        flat = self.evicted_at.view(-1, self.evicted_at.shape[-1])
        row, index = where.nonzero(as_tuple=True)
        flat[row, column[row, index]] = step[row, index] if isinstance(step, Tensor) else step

    @property
    def view(self) -> Tensor:
        """int64 [B, G, columns]."""
        assert self.evicted_at is not None
        return self.evicted_at[..., : self.columns]


@dataclass
class LayerState:
    """What one layer holds between calls.

    Slots keep their place while tokens come one at a time: the newcomer takes a free slot, the victim frees its own.
    """

    keys: Tensor
    """[B, K, S, D]"""
    values: Tensor
    """[B, K, S, D]"""
    slots: Slots
    """[R, S]; positions count from the sequence's first real token."""
    start: Tensor
    """int64 [R, 1]: padding columns before the first real token; position + start is the column."""
    seen: int = 0
    """Columns processed so far, padding included."""
    ordered: bool = True
    """Whether occupied slots are in position order and come first."""
    ragged: bool = False
    """Whether rows may hold different numbers (because of padding, or of a layer's own window)."""
    most: int = 0
    """No row holds more than this; if not ``ragged``, every row holds exactly this."""
    log: EvictionLog | None = field(default=None)

    @classmethod
    def empty(cls, policy: Policy, key: Tensor, value: Tensor, sets: int, *, log: bool) -> LayerState:
        """A state that holds nothing, for tokens whose keys and values look like these."""
        rows = key.shape[0] * sets
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
            ),
            start=zeros.clone(),
            log=EvictionLog() if log else None,
        )

    @property
    def sets(self) -> int:
        return self.slots.positions.shape[0] // self.keys.shape[0]

    def tensors(self) -> list[Tensor]:
        """Everything a cache is charged for: keys, values, positions and records, not the log."""
        s = self.slots
        return [self.keys, self.values, s.positions, s.held, s.observed, s.newest, self.start, *s.records.values()]

    def map_batch(self, select: Callable[[Tensor, int], Tensor]) -> None:
        """Apply ``select(tensor, rows_per_sequence)`` to every tensor's first dimension (beams, repeats, subsets)."""
        sets = self.sets
        self.keys, self.values = select(self.keys, 1), select(self.values, 1)
        s = self.slots
        self.slots = Slots(
            positions=select(s.positions, sets),
            held=select(s.held, sets),
            records={name: select(record, sets) for name, record in s.records.items()},
            observed=select(s.observed, sets),
            newest=select(s.newest, sets),
        )
        self.start = select(self.start, sets)
        if self.log is not None and self.log.evicted_at is not None:
            self.log.evicted_at = select(self.log.evicted_at, 1)


def replay(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LayerState,
    policy: Policy,
    attention: Attention,
    *,
    scan: Scan,
    visibility: Visibility | None = None,
    real: Tensor | None = None,
    every: int = 1,
    chunk: int = 128,
) -> Tensor:
    """Attention of T new tokens under ``policy``, each seeing what is held and itself; ``state`` moves on.

    Args:
        query: [B, H, T, D], key and value: [B, K, T, D], rotated as the model rotates them.
        visibility: what queries may look at beside causality; None if everything.
        real: bool [B, T], False for padding columns, which come before a row's first real token; None if all are.
        every: evict once ``budget + every`` are held, down to the budget.
        chunk: queries per block.

    Returns:
        [B, H, T, D]; rows of padding queries are zero.
    """
    batch, _, steps, _ = query.shape
    sets = state.sets
    if real is not None:
        real = real.repeat_interleave(sets, 0)
        starting = state.start == state.seen
        padding = (~real).sum(-1, keepdim=True)
        state.start = state.start + torch.where(starting, padding, 0)
    if state.log is not None:
        state.log.extend(batch, sets, state.seen + steps, key.device)
        if real is not None:
            state.log.write(
                (state.seen + torch.arange(steps, device=key.device)).expand(batch * sets, steps), PADDING, ~real
            )
    state.ragged = state.ragged or visibility is not None or real is not None
    if isinstance(policy, Full) and not state.ragged and attention.softcap is None:
        return _full(query, key, value, state, attention)
    if steps == 1 and state.seen > 0 and real is None:
        return _decode(query, key, value, state, policy, attention, visibility, every)
    return _chunks(query, key, value, state, policy, attention, scan, visibility, real, every, chunk)


def _chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LayerState,
    policy: Policy,
    attention: Attention,
    scan: Scan,
    visibility: Visibility | None,
    real: Tensor | None,
    every: int,
    chunk: int,
) -> Tensor:
    batch, heads, steps, _ = query.shape
    device = query.device
    sets = state.sets
    rows = batch * sets
    budget = policy.effective_budget
    out = query.new_empty(batch, heads, steps, value.shape[-1])
    _into_position_order(state)
    for begin in range(0, steps, chunk):
        end = min(begin + chunk, steps)
        size = end - begin
        kept = state.slots.positions.shape[1]
        columns = state.seen + torch.arange(size, device=device)
        keys = torch.cat([state.keys, key[:, :, begin:end]], 2)
        values = torch.cat([state.values, value[:, :, begin:end]], 2)
        slots = _with_newcomers(policy, state.slots, columns - state.start)
        logits = attention.logits(query[:, :, begin:end], keys).view(rows, heads // sets, size, kept + size)
        allowed = None
        if visibility is not None:
            allowed = visibility.block(columns, (slots.positions + state.start).view(batch, sets, -1))
            allowed = allowed.expand(batch, sets, size, kept + size).reshape(rows, size, kept + size)
        in_chunk = None if real is None else real[:, begin:end]
        weights, sums, last = scan(policy, logits, slots, kept, allowed, in_chunk, budget, every)
        out[:, :, begin:end] = attention.mix(
            weights.view(batch, heads, size, kept + size), sums.view(batch, heads, size, 1), values
        )
        if state.log is not None:
            joined = torch.nn.functional.pad(state.slots.held, (0, size), value=True)
            if real is not None:
                joined[:, kept:] = real[:, begin:end]
            state.log.write(slots.positions + state.start, state.seen + last, joined & (last < size))
        state.seen += size
        _compact(state, keys, values, slots)
    return out


def _with_newcomers(policy: Policy, slots: Slots, positions: Tensor) -> Slots:
    """The held slots followed by fresh ones for ``positions`` [R, C], which have yet to join."""
    rows, fresh = positions.shape
    added = new_records(policy, rows, fresh, torch.float32, positions.device)
    return Slots(
        positions=torch.cat([slots.positions, positions], 1),
        held=torch.nn.functional.pad(slots.held, (0, fresh)),
        records={name: torch.cat([slots.records[name], added[name]], 1) for name in added},
        observed=slots.observed,
        newest=slots.newest,
    )


def _compact(state: LayerState, keys: Tensor, values: Tensor, slots: Slots) -> None:
    """Keep only the survivors among the candidates, in the order they are in."""
    state.slots, state.keys, state.values = slots, keys, values
    state.most = int(slots.count.max())
    if state.most < slots.held.shape[1]:
        _take(state, (~slots.held).to(torch.uint8).argsort(dim=-1, stable=True)[:, : state.most])
    state.ordered = True


def _take(state: LayerState, order: Tensor) -> None:
    """Re-slot every tensor: slot i becomes what was in ``order[r, i]`` (int64 [R, S'])."""
    s = state.slots
    rows, size = order.shape
    state.keys, state.values = _select(state.keys, order), _select(state.values, order)
    records = {}
    for name, record in s.records.items():
        within = order.view(rows, size, *[1] * (record.ndim - 2)).expand(rows, size, *record.shape[2:])
        records[name] = record.gather(1, within)
    state.slots = Slots(s.positions.gather(1, order), s.held.gather(1, order), records, s.observed, s.newest)


def _select(entries: Tensor, order: Tensor) -> Tensor:
    """[B, K, S', D] of [B, K, S, D]: the slots int64 [R, S'] of each kept set."""
    batch, heads, _, width = entries.shape
    if order.shape[0] == batch and entries.device.type == "cpu":  # copies whole entries; gather goes number by number
        return torch.stack([row.index_select(1, slots) for row, slots in zip(entries, order, strict=True)])
    index = order.view(batch, -1, order.shape[1], 1).expand(batch, heads, -1, width)
    return entries.gather(2, index)


def _into_position_order(state: LayerState) -> None:
    """Occupied slots first and by position, and as few as hold them all."""
    if not state.ordered or state.slots.held.shape[1] > state.most:
        order, _ = state.slots.in_position_order()
        _take(state, order[:, : state.most])
        state.ordered = True


def _decode(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LayerState,
    policy: Policy,
    attention: Attention,
    visibility: Visibility | None,
    every: int,
) -> Tensor:
    """One token: no stored key moves."""
    batch, heads, _, size = query.shape
    sets, budget, step = state.sets, policy.effective_budget, state.seen
    _make_room(state, policy, budget + every)
    slots = state.slots
    if visibility is not None:
        columns = slots.positions + state.start
        now = torch.tensor([step], device=query.device)
        gone = slots.held & ~visibility.block(now, columns.view(batch, sets, -1)).view(batch * sets, -1)
        slots.held = slots.held & ~gone
        if state.log is not None:
            state.log.write(columns, step - 1, gone)
    slot = slots.held.to(torch.uint8).argmin(-1, keepdim=True)
    where = slot.view(batch, sets, 1, 1).expand(batch, key.shape[1], 1, 1)
    state.keys.scatter_(2, where.expand(-1, -1, -1, size), key)
    state.values.scatter_(2, where.expand(-1, -1, -1, value.shape[-1]), value)
    logits = attention.logits(query, state.keys).view(batch * sets, heads // sets, -1)
    full = not state.ragged and state.most + 1 == slots.held.shape[1]
    if not full:
        seen = slots.held.scatter(-1, slot, True)
        logits = logits.masked_fill_(~seen.unsqueeze(1), float("-inf"))
    weights = logits.softmax(-1)
    out = attention.mix(weights.view(batch, heads, 1, -1), weights.new_ones(1, 1, 1, 1), state.values)
    if policy.reads_attention:
        observe(policy, slots, weights.mean(1).scatter(-1, slot, 0.0))
    admit(policy, slots, slot, step - state.start)
    state.seen += 1
    state.ordered = False
    if state.ragged:
        state.most = min(state.most + 1, budget + every - 1)
        excess = slots.count - budget
        dropped = choose(policy, slots, torch.where(excess >= every, excess, 0), most=every)
    elif state.most + 1 >= budget + every:
        dropped = choose(policy, slots, state.most + 1 - budget)
        state.most = budget
    else:
        state.most += 1
        return out
    slots.held = slots.held & ~dropped
    if state.log is not None:
        state.log.write(slots.positions + state.start, step, dropped)
    return out


def _make_room(state: LayerState, policy: Policy, capacity: int) -> None:
    """A free slot in every row. Room grows by an eighth until ``capacity``, where it stays."""
    size = state.slots.held.shape[1]
    if state.most < size:
        return
    more = min(capacity, size + max(64, size // 8)) - size
    state.keys = torch.nn.functional.pad(state.keys, (0, 0, 0, more))
    state.values = torch.nn.functional.pad(state.values, (0, 0, 0, more))
    s = state.slots
    rows = s.positions.shape[0]
    fresh = new_records(policy, rows, more, torch.float32, s.positions.device)
    state.slots = Slots(
        positions=torch.nn.functional.pad(s.positions, (0, more), value=-1),
        held=torch.nn.functional.pad(s.held, (0, more)),
        records={name: torch.cat([s.records[name], fresh[name]], 1) for name in fresh},
        observed=s.observed,
        newest=s.newest,
    )


def _full(query: Tensor, key: Tensor, value: Tensor, state: LayerState, attention: Attention) -> Tensor:
    """Nothing is ever dropped: ordinary attention, by whatever kernel torch has for it."""
    steps = query.shape[2]
    kept = state.most
    _into_position_order(state)
    positions = state.seen + torch.arange(steps, device=key.device) - state.start
    state.keys, state.values = torch.cat([state.keys, key], 2), torch.cat([state.values, value], 2)
    s = state.slots
    state.slots = Slots(
        positions=torch.cat([s.positions, positions], 1),
        held=torch.nn.functional.pad(s.held, (0, steps), value=True),
        records={},
        observed=s.observed,
        newest=positions[:, -1:],
    )
    state.seen += steps
    state.most += steps
    causal = None
    if kept and steps > 1:
        causal = torch.ones(steps, kept + steps, dtype=torch.bool, device=key.device).tril(kept)
    return torch.nn.functional.scaled_dot_product_attention(
        query,
        state.keys,
        state.values,
        attn_mask=causal,
        is_causal=kept == 0 and steps > 1,
        scale=attention.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
