"""The heart: attention under eviction for any number of new tokens, exactly as if they had come one at a time.

For a fixed text an eviction run is described by one integer per layer and token, ``evicted_at``: query t sees token
j when ``j <= t <= evicted_at[j]``. So a whole text needs no token-by-token decoding. Chunk by chunk of queries:

    logits of the chunk against (kept + chunk)     one matrix product
    -> decide: step by step, who is dropped        sequential, tiny (see ``tova.scan``)
    -> mix the values under the decision           one matrix product
    -> carry the survivors on

Shape letters as in :mod:`tova.layer`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from tova import closed_forms
from tova.backends.base import Backend
from tova.backends.finite import finite
from tova.backends.plain import TorchBackend
from tova.backends.threaded import ThreadsBackend
from tova.call import Call
from tova.decode.one_token import decode
from tova.errors import UsageError, renamed
from tova.layer import NEVER, PADDING, Attention, EvictionLog, LayerState, Rotation, Visibility
from tova.policies.base import Policy
from tova.policies.slots import Slots
from tova.policies.steps import ask, choose, new_records
from tova.scan.chunk import Chunk, Scan
from tova.spans import span
from tova.threads import Team, team

__all__ = ["NEVER", "PADDING", "Attention", "EvictionLog", "LayerState", "Rotation", "Visibility", "replay"]


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
    not_padding: Tensor | None = None,
    evict_every: int = 1,
    one_shot: bool = False,
    chunk: int = 128,
    **old: Any,
) -> Tensor:
    """Attention of T new tokens under ``policy``, each seeing what is held and itself; ``state`` moves on.

    Args:
        query: [B, H, T, D], key: [B, K, T, D], value: [B, K, T, E], rotated as the model rotates them.
        visibility: what queries may look at beside causality; None if everything.
        not_padding: bool [B, T], False for padding columns, which come before a row's first real token; None if all
            are real.
        evict_every: evict once ``budget + evict_every`` are held, down to what the policy leaves.
        one_shot: take the new tokens for a prompt: nothing is dropped among them until the last has been seen, then
            the policy evicts once.
        chunk: queries per block.

    Returns:
        [B, H, T, E]; rows of padding queries are zero.

    Raises:
        UsageError: new tokens and held ones differ in dtype, device or shape, or the policy and the layer do not go
            together.
    """
    if old:
        not_padding, evict_every = _renamed(not_padding, evict_every, **old)
    steps = query.shape[2]
    state.check_alike(query, key, value)
    if not_padding is not None:
        not_padding = not_padding.repeat_interleave(state.kept_sets, 0)
        state.note_padding(not_padding)
    state.extend_log(steps, not_padding)
    if visibility is not None:
        state.ragged = True
        if policy.reindexes:
            raise UsageError(f"{policy.name}: a layer with a window of its own cannot have its positions re-indexed")
    call = Call(policy, attention, visibility, evict_every, one_shot)
    if closed_forms.never_drops(policy, attention, state):
        return closed_forms.full_attention(query, key, value, state, attention)
    if steps == 1 and state.seen > 0 and not_padding is None and not policy.sees_dropped:
        return decode(query, key, value, state, call, scan)
    state.into_position_order()
    if scan.name != "reference" and closed_forms.has_band(policy, attention, call.schedule, state):
        return closed_forms.band_attention(query, key, value, state, policy, attention, call.schedule.leaves)
    with team() if query.device.type == "cpu" and steps > chunk else nullcontext() as threads:
        return _in_chunks(query, key, value, state, call, scan, not_padding, chunk, threads)


def _in_chunks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    state: LayerState,
    call: Call,
    scan: Scan,
    not_padding: Tensor | None,
    size: int,
    threads: Team | None,
) -> Tensor:
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    backend = _backend(query, value, state, call, scan, threads)
    for begin in range(0, query.shape[2], size):
        part = slice(begin, begin + size)
        queries, new_keys, new_values = query[:, :, part], key[:, :, part], value[:, :, part]
        steps = queries.shape[2]
        now = call.watched(state, steps, first=state.seen == 0)
        slots = _with_newcomers(state, now, new_keys, new_values)
        assert slots.keys is not None
        assert slots.values is not None
        chunk = _chunk(
            backend, queries, slots, state, now, threads, None if not_padding is None else not_padding[:, part]
        )
        with span("scan"):
            decision = scan.decide(now.policy, chunk)
        backend.mix(chunk, decision, queries, slots.keys, slots.values, out[:, :, part])
        joined = torch.nn.functional.pad(state.slots.held, (0, steps), value=True)
        if chunk.not_padding is not None:
            joined[:, chunk.kept :] = chunk.not_padding
        with span("carry"):
            dropped = joined & (decision.last < steps)
            state.carry(slots, steps, now.policy, now.schedule, decision.last + state.seen, dropped)
    backend.finish()
    if call.one_shot:
        _evict_after_prompt(state, call.watched(state, 0, first=True).policy)
    return out


def _backend(query: Tensor, value: Tensor, state: LayerState, call: Call, scan: Scan, threads: Team | None) -> Backend:
    """What computes the products: Triton where the scan reads raw ones, else torch, by itself or in threads."""
    if scan.reads_products and not call.policy.reindexes:
        from tova.backends import triton

        if triton.supports(query, value):
            return triton.TritonBackend(call.attention)
    careful = not finite(state.values, value)
    if threads is None:
        return TorchBackend(call.attention, careful=careful)
    return ThreadsBackend(call.attention, threads, overlap=len(state.start) == 1, careful=careful)


def _with_newcomers(state: LayerState, call: Call, key: Tensor, value: Tensor) -> Slots:
    """The chunk's candidates: the held slots followed by the chunk's own tokens, which have yet to join."""
    steps = key.shape[2]
    positions = state.seen + torch.arange(steps, device=key.device) - state.start
    fresh = new_records(call.policy, len(positions), steps, torch.float32, key.device)
    slots = state.slots.followed_by(positions, fresh, call.features(key, value, positions, state.kept_sets))
    slots.keys, slots.values = torch.cat([state.keys, key], 2), torch.cat([state.values, value], 2)
    return slots


def _chunk(
    backend: Backend,
    query: Tensor,
    slots: Slots,
    state: LayerState,
    call: Call,
    threads: Team | None,
    not_padding: Tensor | None,
) -> Chunk:
    """What the scan needs to know of the chunk; its slots are ``slots``."""
    batch, heads, steps, _ = query.shape
    kept_sets, kept = state.kept_sets, state.slots.positions.shape[1]
    rows, candidates = slots.positions.shape
    assert slots.keys is not None
    positions = slots.positions[:, kept:]
    logits = backend.logits(query, slots.keys)
    logits = call.reindexed(logits, query, slots.keys, positions, slots, state.slots.count)
    allowed = None
    if call.visibility is not None:
        columns = state.seen + torch.arange(steps, device=query.device)
        allowed = call.visibility.block(columns, (slots.positions + state.start).view(batch, kept_sets, -1))
        allowed = allowed.expand(batch, kept_sets, steps, candidates).reshape(rows, steps, candidates)
    return Chunk(
        logits=logits.view(rows, heads // kept_sets, steps, candidates),
        slots=slots,
        kept=kept,
        schedule=call.schedule,
        allowed=allowed,
        not_padding=not_padding,
        sink_logits=call.attention.sink_logits_of(batch, kept_sets),
        dtype=query.dtype,
        threads=threads,
        scaling=backend.scaling,
        softcap=backend.softcap,
    )


def _evict_after_prompt(state: LayerState, policy: Policy) -> None:
    """The selection at the end of a one-shot prompt."""
    slots = state.slots
    count = slots.count[:, 0]
    tokens = (slots.newest[:, 0] + 1).tolist()
    if policy.uneven:
        excess = ask(policy, "excess", slots.newest, slots, policy.schedule())
    else:
        keeps = [policy.keeps_of_prompt(n, held) for n, held in zip(tokens, count.tolist(), strict=True)]
        excess = (count - torch.tensor(keeps, device=count.device)).unsqueeze(1)
    dropped = choose(policy, slots, excess)
    slots.held = slots.held & ~dropped
    state.write_log(state.seen - 1, dropped)
    state.keep_held(policy, None)


def _renamed(
    not_padding: Tensor | None, evict_every: int, real: Tensor | None = None, every: int | None = None
) -> tuple[Tensor | None, int]:
    """What was asked for by the old names of two arguments."""
    if real is not None:
        renamed("replay(real=)", "not_padding", 4)
    if every is not None:
        renamed("replay(every=)", "evict_every", 4)
    return real if not_padding is None else not_padding, evict_every if every is None else every
