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
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from tova import band
from tova.errors import UsageError
from tova.policies import Full, Policy, Slots, Tokens, contract
from tova.policies.base import admit, ask, choose, new_records, observe
from tova.products import Alone, Fused, Products, Shared, attend_where_not_finite, finite, only_seen
from tova.scan import Chunk, Scan, compile, deciding, reference
from tova.scan.reference import head_average, known_rows, softmax
from tova.spans import span
from tova.threads import Team, team

NEVER = torch.iinfo(torch.int64).max
"""``evicted_at`` of a token that was never dropped."""
PADDING = -1
"""``evicted_at`` of a padding column."""
_AT_ONCE = 4096
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
        sinks: [H], a logit per head that only adds to the sum of weights (GPT-OSS); None without.
        rotation: None if the model's is not known.
    """

    scaling: float
    softcap: float | None = None
    sinks: Tensor | None = None
    rotation: Rotation | None = None

    def logits(self, query: Tensor, key: Tensor) -> Tensor:
        """float32 [B, H, T, N] from [B, H, T, D] and [B, K, N, D]; queries are grouped, keys never repeated."""
        batch, heads, steps, size = query.shape
        groups = key.shape[1]
        grouped = query.reshape(batch, groups, heads // groups * steps, size)
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

    def sinks_of(self, batch: int, sets: int) -> Tensor | None:
        """float32 [R, H_g]: the heads' sinks for each kept set."""
        if self.sinks is None:
            return None
        return self.sinks.float().view(1, sets, -1).expand(batch, sets, -1).reshape(batch * sets, -1)

    @staticmethod
    def mix(weights: Tensor, sums: Tensor | None, value: Tensor) -> Tensor:
        """[B, H, T, D]: values [B, K, N, D] under weights [B, H, T, N], divided by ``sums`` [B, H, T, 1] if given."""
        batch, heads, steps, candidates = weights.shape
        groups = value.shape[1]
        grouped = weights.to(value.dtype).view(batch, groups, heads // groups * steps, candidates)
        mixed = (grouped @ value).view(batch, heads, steps, value.shape[-1])
        if sums is None:
            return mixed
        return mixed.float().div_(sums.clamp_min(torch.finfo(torch.float32).tiny)).to(value.dtype)


@dataclass
class EvictionLog:
    """``evicted_at`` of one layer, int64 [B, G, columns], growing with the text."""

    evicted_at: Tensor | None = None
    columns: int = 0

    def extend(self, batch: int, sets: int, columns: int, device: torch.device) -> None:
        """Make room for ``columns`` columns in all, not dropped so far."""
        room = columns + 1  # the last is a place for what is not to be written
        if self.evicted_at is None:
            self.evicted_at = torch.full((batch, sets, max(room, 64)), NEVER, device=device)
        if room > self.evicted_at.shape[-1]:
            more = max(room, 2 * self.evicted_at.shape[-1]) - self.evicted_at.shape[-1]
            fresh = torch.full((batch, sets, more), NEVER, device=device)
            self.evicted_at = torch.cat([self.evicted_at, fresh], -1)
        self.columns = columns

    def write(self, column: Tensor, step: Tensor | int, where: Tensor) -> None:
        """Note that ``column`` [R, N] was dropped after query column ``step``, wherever ``where`` holds."""
        assert self.evicted_at is not None
        flat = self.evicted_at.view(-1, self.evicted_at.shape[-1])
        # Looking up where it holds would make a GPU's caller wait, and rows in streams wait for each other.
        flat.scatter_(1, torch.where(where, column, flat.shape[1] - 1), torch.where(where, step, NEVER))

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
    dense: bool = True
    """Whether occupied slots are the first ``most``, in any order."""
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

    def held(self, entries: Tensor) -> Tensor:
        """[B, K, n, D]: of ``entries`` [B, K, S, D] those that are held, by ascending position; zeros behind them."""
        order, _ = self.slots.in_position_order()
        most = int(self.slots.count.max()) if order.shape[1] else 0
        order = order[:, :most]
        there = self.slots.held.gather(1, order).view(entries.shape[0], self.sets, most, 1)
        return _select(entries, order).masked_fill(~there, 0)

    def own_memory(self) -> None:
        """Replace tensors made in inference mode, which cannot be written outside of it, by copies."""
        s = self.slots

        def own(tensor: Tensor) -> Tensor:
            return tensor.clone() if tensor.is_inference() else tensor

        self.keys, self.values, self.start = own(self.keys), own(self.values), own(self.start)
        s.positions, s.held, s.observed, s.newest = (own(t) for t in (s.positions, s.held, s.observed, s.newest))
        for kind in (s.records, s.features):
            for name, tensor in kind.items():
                kind[name] = own(tensor)
        if self.log is not None and self.log.evicted_at is not None:
            self.log.evicted_at = own(self.log.evicted_at)

    def tensors(self) -> list[Tensor]:
        """Everything a cache is charged for: keys, values, positions and records, not the log."""
        s = self.slots
        kept = [*s.records.values(), *s.features.values()]
        return [self.keys, self.values, s.positions, s.held, s.observed, s.newest, self.start, *kept]

    def pack(self) -> dict[str, Any]:
        """The state as plain tensors and numbers; tensors of their own, since decoding writes in place."""
        s = self.slots
        return {
            "keys": self.keys.clone(),
            "values": self.values.clone(),
            "start": self.start.clone(),
            "numbers": [self.seen, int(self.ordered), int(self.dense), int(self.ragged), self.most],
            "slots": [t.clone() for t in (s.positions, s.held, s.observed, s.newest)],
            "records": {name: record.clone() for name, record in s.records.items()},
            "features": {name: feature.clone() for name, feature in s.features.items()},
            "log": None if self.log is None or self.log.evicted_at is None else self.log.view.clone(),
        }

    @classmethod
    def unpack(cls, packed: dict[str, Any]) -> LayerState:
        """What :meth:`pack` packed, in tensors of its own."""
        positions, held, observed, newest = (t.clone() for t in packed["slots"])
        seen, ordered, dense, ragged, most = packed["numbers"]
        log = packed["log"]
        return cls(
            keys=packed["keys"].clone(),
            values=packed["values"].clone(),
            slots=Slots(
                positions=positions,
                held=held,
                records={name: record.clone() for name, record in packed["records"].items()},
                observed=observed,
                newest=newest,
                features={name: feature.clone() for name, feature in packed["features"].items()},
            ),
            start=packed["start"].clone(),
            seen=seen,
            ordered=bool(ordered),
            dense=bool(dense),
            ragged=bool(ragged),
            most=most,
            log=None if log is None else EvictionLog(log.clone(), log.shape[-1]),
        )

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
            features={name: select(feature, sets) for name, feature in s.features.items()},
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
    one_shot: bool = False,
    chunk: int = 128,
) -> Tensor:
    """Attention of T new tokens under ``policy``, each seeing what is held and itself; ``state`` moves on.

    Args:
        query: [B, H, T, D], key and value: [B, K, T, D], rotated as the model rotates them.
        visibility: what queries may look at beside causality; None if everything.
        real: bool [B, T], False for padding columns, which come before a row's first real token; None if all are.
        every: evict once ``budget + every`` are held, down to what the policy leaves.
        one_shot: take the new tokens for a prompt: nothing is dropped among them until the last has been seen, then
            the policy evicts once.
        chunk: queries per block.

    Returns:
        [B, H, T, D]; rows of padding queries are zero.

    Raises:
        UsageError: new tokens and held ones differ in dtype, device or shape, or the policy and the layer do not go
            together.
    """
    batch, _, steps, _ = query.shape
    sets = state.sets
    check_alike(query, key, value, state)
    if real is not None:
        real = real.repeat_interleave(sets, 0)
        starting = state.start == state.seen
        padding = (~real).sum(-1, keepdim=True)
        state.start = state.start + torch.where(starting, padding, 0)
    if state.log is not None:
        state.log.extend(batch, sets, state.seen + steps, key.device)
        if real is not None:
            columns = (state.seen + torch.arange(steps, device=key.device)).expand(batch * sets, steps)
            state.log.write(columns, PADDING, ~real)
    state.ragged = state.ragged or visibility is not None or real is not None
    if policy.reindexes and visibility is not None:
        raise UsageError(f"{policy.name}: a layer with a window of its own cannot have its positions re-indexed")
    plain = attention.softcap is None and attention.sinks is None
    if isinstance(policy, Full) and plain and not state.ragged:
        return _full(query, key, value, state, attention)
    call = _Call(policy, attention, visibility, every, one_shot)
    if steps == 1 and state.seen > 0 and real is None and not policy.sees_dropped:
        return _decode(query, key, value, state, call, scan)
    closed = every == 1 and not one_shot and not state.ragged and scan is not reference.scan
    if closed and band.supports(policy, attention):
        _into_position_order(state)
        if band.holds(state, policy, call.remains):
            return band.attend(query, key, value, state, policy, attention, call.remains)
    with team() if query.device.type == "cpu" and steps > chunk else nullcontext() as threads:
        return _chunks(query, key, value, state, call, scan, real, chunk, threads)


def check_alike(query: Tensor, key: Tensor, value: Tensor, state: LayerState) -> None:
    """Raise unless new tokens and held ones go together."""
    dtypes = [x.dtype for x in (query, key, value, state.keys, state.values)]
    if len(set(dtypes)) > 1:
        new, held = (", ".join(str(d).removeprefix("torch.") for d in some) for some in (dtypes[:3], dtypes[3:]))
        raise UsageError(
            f"queries, keys and values must be of one dtype, that of what the cache holds ({held}), got {new}: "
            "autocast must be on, or off, all along a text"
        )
    for what, ours, theirs in (("keys", state.keys, key), ("values", state.values, value)):
        if ours.device != theirs.device:
            raise UsageError(f"the cache holds {what} on {ours.device}, the model's new ones are on {theirs.device}")
        (b, k, _, d), (new_b, new_k, _, new_d) = ours.shape, theirs.shape
        if (b, k, d) != (new_b, new_k, new_d):
            raise UsageError(
                f"the cache holds {what} of {b} rows, {k} heads and size {d}, the new ones have {new_b} rows, {new_k} "
                f"heads and size {new_d}: another batch, or another model"
            )


@dataclass(frozen=True)
class _Call:
    """What does not change while the tokens of a call go by."""

    policy: Policy
    attention: Attention
    visibility: Visibility | None
    every: int
    one_shot: bool

    @property
    def trigger(self) -> int:
        """Evict in the step after which this many would be held."""
        if self.one_shot or self.policy.prompt_only:
            return NEVER
        return min(self.policy.effective_budget + self.every, NEVER)

    @property
    def remains(self) -> int:
        """How many an eviction within the call leaves."""
        return self.policy.remains(0)

    def held_after(self, held: int, steps: int) -> int:
        """How many are held ``steps`` tokens after ``held`` are, no row having holes of its own."""
        if held + steps < self.trigger:
            return held + steps
        since = held + steps - self.trigger
        return self.remains + since % (self.trigger - self.remains)

    def features(self, key: Tensor, value: Tensor, positions: Tensor, sets: int) -> dict[str, Tensor]:
        """The policy's features of new tokens, [R, T] by name."""
        if not self.policy.wants_features:
            return {}
        rotation = self.attention.rotation
        unrotate = None if rotation is None else (lambda x, at: rotation.turn(x, at, None))
        batch, heads, steps = key.shape[:3]
        tokens = Tokens(key, value, positions.view(batch, sets, steps)[:, 0], unrotate)
        out = {}
        for name, feature in ask(self.policy, "features", positions, tokens).items():
            shared = feature.float().view(batch, sets, heads // sets, steps).mean(2)
            out[name] = shared.reshape(batch * sets, steps)
        return out

    def reindexed(
        self, logits: Tensor, query: Tensor, keys: Tensor, positions: Tensor, slots: Slots, count: Tensor
    ) -> Tensor:
        """Logits [B, H, T, N] with the sinks at positions counted inside the cache, for a policy that does that.

        ``positions`` int64 [B, T] are the queries' own, ``count`` int64 [B, 1] is what is held before the first of
        them. A query's position inside the cache is how many are held before it; it is turned there to look at the
        sinks, whose own positions stay. The window's tokens keep their distances.
        """
        if not self.policy.reindexes or self.one_shot:
            return logits
        if self.attention.rotation is None:
            raise UsageError(f"{self.policy.name} re-rotates keys, and how this model rotates is not known here")
        budget = self.policy.effective_budget
        inside = count + (positions - positions[:, :1].clamp_min(0))
        inside = torch.where(inside >= self.trigger, budget + (inside - budget) % self.every, inside)
        moved = self.attention.rotation.turn(query, positions, inside)
        sink = ((slots.positions >= 0) & (slots.positions < self.policy.sinks))[:, None, None, : keys.shape[2]]
        return torch.where(sink, self.attention.logits(moved, keys), logits)


def _products(
    query: Tensor, value: Tensor, state: LayerState, call: _Call, scan: Scan, threads: Team | None, rows: int
) -> Products:
    decide = deciding(scan, query.device)
    if decide is not None and not call.policy.reindexes and Fused.supports(query, value):
        return Fused(call.attention, decide)
    careful = not finite(state.values, value)
    if threads is None:
        return Alone(call.attention, scan, careful=careful)
    return Shared(call.attention, scan, threads, overlap=rows == 1, careful=careful)


def _chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LayerState,
    call: _Call,
    scan: Scan,
    real: Tensor | None,
    chunk: int,
    threads: Team | None,
) -> Tensor:
    batch, heads, steps, _ = query.shape
    device = query.device
    attention, visibility = call.attention, call.visibility
    sets = state.sets
    rows = batch * sets
    own = contract.is_own(call.policy)
    unwatched = call
    out = query.new_empty(batch, heads, steps, value.shape[-1])
    _into_position_order(state)
    products = _products(query, value, state, call, scan, threads, rows)
    for begin in range(0, steps, chunk):
        end = min(begin + chunk, steps)
        size = end - begin
        call = unwatched
        if own and (state.seen == 0 or _begins_to_evict(state, call, size)):
            call = replace(unwatched, policy=contract.watched(unwatched.policy))
        policy = call.policy
        kept = state.slots.positions.shape[1]
        columns = state.seen + torch.arange(size, device=device)
        positions = columns - state.start
        keys = torch.cat([state.keys, key[:, :, begin:end]], 2)
        values = torch.cat([state.values, value[:, :, begin:end]], 2)
        features = call.features(key[:, :, begin:end], value[:, :, begin:end], positions, sets)
        slots = _with_newcomers(policy, state.slots, positions, features)
        logits = products.logits(query[:, :, begin:end], keys)
        logits = call.reindexed(logits, query[:, :, begin:end], keys, positions, slots, state.slots.count)
        allowed = None
        if visibility is not None:
            allowed = visibility.block(columns, (slots.positions + state.start).view(batch, sets, -1))
            allowed = allowed.expand(batch, sets, size, kept + size).reshape(rows, size, kept + size)
        in_chunk = None if real is None else real[:, begin:end]
        last = products.attend(
            policy,
            Chunk(
                logits=logits.view(rows, heads // sets, size, kept + size),
                slots=slots,
                kept=kept,
                trigger=call.trigger,
                remains=call.remains,
                allowed=allowed,
                real=in_chunk,
                sinks=attention.sinks_of(batch, sets),
                dtype=query.dtype,
                threads=threads,
                scaling=products.scaling,
                softcap=products.softcap,
            ),
            query[:, :, begin:end],
            keys,
            values,
            out[:, :, begin:end],
        )
        if state.log is not None:
            joined = torch.nn.functional.pad(state.slots.held, (0, size), value=True)
            if in_chunk is not None:
                joined[:, kept:] = in_chunk
            state.log.write(slots.positions + state.start, state.seen + last, joined & (last < size))
        state.seen += size
        state.slots, state.keys, state.values = slots, keys, values
        with span("carry"):
            _compact(state, policy, call.held_after(state.most, size))
    products.finish()
    if call.one_shot:
        _evict_once(state, contract.watched(unwatched.policy) if own else unwatched.policy)
    return out


def _begins_to_evict(state: LayerState, call: _Call, steps: int) -> bool:
    """Whether some row reaches its first eviction within ``steps`` tokens."""
    if not state.ragged:
        return state.seen < call.trigger <= state.seen + steps
    before = state.slots.newest + 1
    return bool(((before < call.trigger) & (before + steps >= call.trigger)).any())


def _evict_once(state: LayerState, policy: Policy) -> None:
    """The selection at the end of a one-shot prompt."""
    slots = state.slots
    remains = [policy.remains(newest + 1) for newest in slots.newest[:, 0].tolist()]
    left = torch.tensor(remains, device=slots.held.device).unsqueeze(1)
    allowed = left if policy.prompt_only else torch.full_like(left, policy.effective_budget)
    dropped = choose(policy, slots, torch.where(slots.count > allowed, slots.count - left, 0))
    slots.held = slots.held & ~dropped
    if state.log is not None:
        state.log.write(slots.positions + state.start, state.seen - 1, dropped)
    _compact(state, policy, int(slots.count.max()))


def _with_newcomers(policy: Policy, slots: Slots, positions: Tensor, features: dict[str, Tensor]) -> Slots:
    """The held slots followed by fresh ones for ``positions`` [R, C], which have yet to join."""
    rows, fresh = positions.shape
    added = new_records(policy, rows, fresh, torch.float32, positions.device)
    return Slots(
        positions=torch.cat([slots.positions, positions], 1),
        held=torch.nn.functional.pad(slots.held, (0, fresh)),
        records={name: torch.cat([slots.records[name], added[name]], 1) for name in added},
        observed=slots.observed,
        newest=slots.newest,
        features={
            name: torch.cat([slots.features[name], new], 1) if name in slots.features else new
            for name, new in features.items()
        },
    )


def _compact(state: LayerState, policy: Policy, held: int) -> None:
    """Keep only the survivors among the candidates, in the order they are in; ``held`` of them in rows not ragged."""
    slots = state.slots
    state.ordered, state.dense = True, not state.ragged
    if policy.sees_dropped:
        state.most = slots.held.shape[1]
        return
    state.most = int(slots.count.max()) if state.ragged else held
    if state.most == slots.held.shape[1]:
        return
    if state.ragged or slots.held.device.type != "cpu":  # where reading how many there are would mean waiting
        order = (~slots.held).to(torch.uint8).argsort(dim=-1, stable=True)[:, : state.most]
    else:
        order = slots.held.nonzero()[:, 1].view(-1, state.most)
    _take(state, order)


def _take(state: LayerState, order: Tensor) -> None:
    """Re-slot every tensor: slot i becomes what was in ``order[r, i]`` (int64 [R, S'])."""
    s = state.slots
    rows, size = order.shape
    state.keys, state.values = _select(state.keys, order), _select(state.values, order)
    records = {}
    for name, record in s.records.items():
        within = order.view(rows, size, *[1] * (record.ndim - 2)).expand(rows, size, *record.shape[2:])
        records[name] = record.gather(1, within)
    features = {name: feature.gather(1, order) for name, feature in s.features.items()}
    state.slots = Slots(s.positions.gather(1, order), s.held.gather(1, order), records, s.observed, s.newest, features)


def _select(entries: Tensor, order: Tensor) -> Tensor:
    """[B, K, S', D] of [B, K, S, D]: the slots int64 [R, S'] of each kept set."""
    batch, heads, _, width = entries.shape
    if order.shape[0] == batch and entries.device.type == "cpu":  # copies whole entries; gather goes number by number
        picked = [row.index_select(1, slots) for row, slots in zip(entries, order, strict=True)]
        return picked[0].unsqueeze(0) if batch == 1 else torch.stack(picked)
    sets, size = order.shape[0] // batch, order.shape[1]
    return entries.gather(2, order.view(batch, sets, size, 1).expand(batch, heads, size, width))


def _into_position_order(state: LayerState) -> None:
    """Occupied slots first and by position, and as few as hold them all."""
    if not state.ordered or state.slots.held.shape[1] > state.most:
        order, _ = state.slots.in_position_order()
        _take(state, order[:, : state.most])
        state.ordered, state.dense = True, not state.ragged


def _decode(query: Tensor, key: Tensor, value: Tensor, state: LayerState, call: _Call, scan: Scan) -> Tensor:
    """One token: no stored key moves."""
    batch, heads, _, size = query.shape
    watch = contract.is_own(call.policy) and (state.ordered or _begins_to_evict(state, call, 1))
    if watch and not (query.is_cuda and torch.cuda.is_current_stream_capturing()):
        call = replace(call, policy=contract.watched(call.policy))
    policy, attention, visibility = call.policy, call.attention, call.visibility
    sets, step, trigger, remains = state.sets, state.seen, call.trigger, call.remains
    position = state.slots.newest + 1  # a tensor like all else that differs from step to step: see tova.graphs
    _make_room(state, policy, trigger)
    slots = state.slots
    if visibility is not None:
        columns = slots.positions + state.start
        now = torch.tensor([step], device=query.device)
        allowed = visibility.block(now, columns.view(batch, sets, -1)).expand(batch, sets, 1, -1)
        gone = slots.held & ~allowed.reshape(batch * sets, -1)
        slots.held = slots.held & ~gone
        if state.log is not None:
            state.log.write(columns, step - 1, gone)
    # Until something is dropped the occupied slots are the first ones, and only they are looked at.
    used = state.most + 1 if state.dense else slots.held.shape[1]
    if not call.one_shot and _kernels(scan, policy, query, value, used):
        return _kernel_step(query, key, value, state, call, used)
    if not call.one_shot and _compiled(scan, policy, query):
        return _compiled_step(query, key, value, state, call, used)
    slot = slots.held.to(torch.uint8).argmin(-1, keepdim=True)
    where = slot.view(batch, sets, 1, 1).expand(batch, key.shape[1], 1, 1)
    state.keys.scatter_(2, where.expand(-1, -1, -1, size), key)
    state.values.scatter_(2, where.expand(-1, -1, -1, value.shape[-1]), value)
    for name, feature in call.features(key, value, position, sets).items():
        slots.features[name] = slots.features[name].scatter(-1, slot, feature)
    slots.positions = slots.positions.scatter(-1, slot, position)
    keys = state.keys[:, :, :used]
    logits = attention.logits(query, keys)
    logits = call.reindexed(logits, query, keys, position, slots, slots.count)
    logits = logits.view(batch * sets, heads // sets, -1)
    seen = None
    if state.ragged or state.most + 1 < used:
        seen = slots.held.scatter(-1, slot, True)[:, :used]
        logits = logits.masked_fill_(~seen.unsqueeze(1), float("-inf"))
    weights = softmax(logits, attention.sinks_of(batch, sets))
    out = _mix_one(weights.view(batch, heads, 1, -1), state.values[:, :, :used], seen, attention)
    own = known = None
    if policy.reads_attention:
        row, known = known_rows(head_average(policy, weights, query.dtype), ask=False)
        own = row.gather(-1, slot)
        row = row.scatter(-1, slot, 0.0)
        observe(policy, slots, torch.nn.functional.pad(row, (0, slots.held.shape[1] - used)), known=known)
    admit(policy, slots, slot, position, own=own, known=known)
    state.seen += 1
    state.ordered = False
    if state.ragged:
        state.most = min(state.most + 1, trigger - 1)
        excess = torch.where(slots.count >= trigger, slots.count - remains, 0)
        dropped = choose(policy, slots, excess, most=min(max(trigger - remains, 1), slots.held.shape[1]))
    elif state.most + 1 >= trigger:
        dropped = choose(policy, slots, state.most + 1 - remains)
        state.most = remains
    else:
        state.most += 1
        return out
    state.dense = False
    slots.held = slots.held & ~dropped
    if state.log is not None:
        state.log.write(slots.positions + state.start, step, dropped)
    return out


def _mix_one(weights: Tensor, values: Tensor, seen: Tensor | None, attention: Attention) -> Tensor:
    """Values under the weights [B, H, 1, S] of one query; what is left in slots that are not ``seen`` does not count.

    ``seen`` is bool [R, S], None if all are.
    """
    if seen is None:
        return attention.mix(weights, None, values)
    if values.device.type != "cpu":  # where looking whether anything is not finite would mean waiting
        return attention.mix(weights, None, only_seen(values, seen))
    out = attention.mix(weights, None, values)
    return out if finite(out) else attention.mix(weights, None, only_seen(values, seen))


def _compiled(scan: Scan, policy: Policy, query: Tensor) -> bool:
    """Whether one token is taken by the compiled step: where the chosen scan is compiled too, and knows the policy."""
    if scan is reference.scan or query.device.type != "cpu" or not compile.available():
        return False
    from tova.scan import step

    return step.supports(policy, query.dtype)


def _kernels(scan: Scan, policy: Policy, query: Tensor, value: Tensor, used: int) -> bool:
    """Whether one token is taken by kernels: where the chosen scan consists of them too."""
    if deciding(scan, query.device) is None:
        return False
    from tova.scan import step_gpu

    return step_gpu.supports(policy, query, value, used)


def _kernel_step(query: Tensor, key: Tensor, value: Tensor, state: LayerState, call: _Call, used: int) -> Tensor:
    """The rest of :func:`_decode` in three kernels; see :mod:`tova.scan.step_gpu`."""
    from tova.scan import step_gpu

    policy, feature = call.policy, None
    if policy.wants_features:
        (feature,) = call.features(key, value, state.slots.newest + 1, state.sets).values()
    out = step_gpu.step(
        policy, query, key, value, state, call.attention, call.trigger, call.remains, used, feature
    )  # fmt: skip
    _moved_on(state, call)
    return out


def _moved_on(state: LayerState, call: _Call) -> None:
    """Count the token that a step has taken."""
    state.seen += 1
    state.ordered = False
    if state.ragged:
        state.most = min(state.most + 1, call.trigger - 1)
    elif state.most + 1 >= call.trigger:
        state.most = call.remains
        state.dense = False
    else:
        state.most += 1
    state.dense = state.dense and not state.ragged


def _compiled_step(query: Tensor, key: Tensor, value: Tensor, state: LayerState, call: _Call, used: int) -> Tensor:
    """The rest of :func:`_decode` in one call; see :mod:`tova.scan.step`."""
    from tova.scan import step

    policy, feature = call.policy, None
    if policy.wants_features:
        (feature,) = call.features(key, value, state.seen - state.start, state.sets).values()
    out = step.step(policy, query, key, value, state, call.attention, call.every, used, feature)
    _moved_on(state, call)
    return out


def _make_room(state: LayerState, policy: Policy, capacity: int) -> None:
    """A free slot in every row: all there will ever be at once, or, where that is a lot, an eighth more each time."""
    size = state.slots.held.shape[1]
    if state.most < size:
        return
    more = min(capacity, max(_AT_ONCE, size + max(64, size // 8))) - size
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
        features={name: torch.nn.functional.pad(feature, (0, more)) for name, feature in s.features.items()},
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
        newest=positions[:, -1:].clone(),
    )
    state.seen += steps
    state.most += steps
    causal = None
    if kept and steps > 1:
        causal = torch.ones(steps, kept + steps, dtype=torch.bool, device=key.device).tril(kept)
    out = torch.nn.functional.scaled_dot_product_attention(
        query,
        state.keys,
        state.values,
        attn_mask=causal,
        is_causal=kept == 0 and steps > 1,
        scale=attention.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    if steps == 1 and query.device.type != "cpu":  # it sees everything, and may be part of a graph
        return out
    if finite(query) and ((steps == 1 and kept) or finite(state.keys, state.values)):
        return out
    columns = torch.arange(kept + steps, device=key.device)
    for begin in range(0, steps, 256):
        part = slice(begin, begin + 256)
        seen = columns <= columns[kept:][part].unsqueeze(1)
        attend_where_not_finite(query[:, :, part], state.keys, state.values, seen, attention, out[:, :, part])
    return out
