"""Attention of policies that always drop the oldest, in closed form: there is nothing to scan.

With a budget of k and s sink tokens the query at position p sees position j when ``j <= p`` and ``j < s`` or
``j >= p - (k - s)``: the first few tokens and a band. Attention is then torch's own kernel on blocks of the band, and
on everything where nothing is ever dropped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from tova.backends.finite import finite, redo_not_finite
from tova.layer import Attention, LayerState
from tova.policies.base import MOST, Policy, Schedule
from tova.policies.slots import Slots
from tova.rules import drops_oldest

_BLOCK = 256
"""Queries at a time."""


def has_band(policy: Policy, attention: Attention, schedule: Schedule, state: LayerState) -> bool:
    """Whether what queries see is a band: the oldest goes, one at a time, rows hold alike, and softmax is plain.

    ``state``, in position order, must hold what the rule leaves; another call may have left something else.
    """
    alike = attention.is_plain and not state.ragged and not policy.reindexes
    if not alike or schedule.at_once != 1 or not drops_oldest(policy):
        return False
    every = torch.arange(state.seen, device=state.keys.device)
    kept = every[(every < policy.sinks) | (every >= state.seen - (schedule.leaves - policy.sinks))]
    return bool(state.slots.held.all()) and state.most == len(kept) and bool((state.slots.positions == kept).all())


def band_attention(
    query: Tensor, key: Tensor, value: Tensor, state: LayerState, policy: Policy, attention: Attention, budget: int
) -> Tensor:
    """[B, H, T, E]: attention of the new tokens over the band; the state holds afterwards what the rule holds.

    Shapes as in :func:`tova.replay.replay`.
    """
    batch, heads, steps, _ = query.shape
    kv_heads = key.shape[1]
    query_heads_per_kv_head = heads // kv_heads
    device = query.device
    band = budget - policy.sinks
    first = state.seen
    positions = torch.arange(first, first + steps, device=device)
    before = state.slots.positions[0]
    columns = torch.cat([before, positions])
    keys = torch.cat([state.keys, key], 2)
    values = torch.cat([state.values, value], 2)
    sink_tokens = int((columns < policy.sinks).sum())
    all_finite = finite(query, keys, values)
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    for begin in range(0, steps, _BLOCK):
        end = min(begin + _BLOCK, steps)
        oldest = int(torch.searchsorted(columns, max(first + begin - band, policy.sinks)))
        until = len(before) + end
        within = slice(max(oldest, sink_tokens), until)
        place = columns[within]
        k, v = keys[:, :, within], values[:, :, within]
        if sink_tokens and within.start > 0:
            place = torch.cat([columns[:sink_tokens], place])
            k, v = torch.cat([keys[:, :, :sink_tokens], k], 2), torch.cat([values[:, :, :sink_tokens], v], 2)
        at = positions[begin:end, None]
        seen = (place <= at) & ((place < policy.sinks) | (place >= at - band))
        grouped = query[:, :, begin:end].reshape(batch, kv_heads, query_heads_per_kv_head * (end - begin), -1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            grouped, k, v, attn_mask=seen.repeat(query_heads_per_kv_head, 1), scale=attention.scaling
        )
        out[:, :, begin:end] = mixed.view(batch, heads, end - begin, -1)
        if not all_finite:
            redo_not_finite(query[:, :, begin:end], k, v, seen, attention, out[:, :, begin:end])
    last = first + steps - 1
    keep = (columns < policy.sinks) | (columns > last - band)
    rows = state.slots.positions.shape[0]
    if state.log is not None:
        state.log.write(columns.expand(rows, -1), (columns + band).expand(rows, -1), (~keep).expand(rows, -1))
    _hold(state, keys[:, :, keep].contiguous(), values[:, :, keep].contiguous(), columns[keep], positions)
    return out


def never_drops(policy: Policy, attention: Attention, state: LayerState) -> bool:
    """Whether attention is ordinary: nothing is ever dropped, nothing remembered, and softmax is plain."""
    return attention.is_plain and not state.ragged and policy.layer_budget >= MOST and drops_oldest(policy)


def full_attention(query: Tensor, key: Tensor, value: Tensor, state: LayerState, attention: Attention) -> Tensor:
    """[B, H, T, E]: attention over everything, by whatever kernel torch has for it; the state keeps it all."""
    steps, kept = query.shape[2], state.most
    state.into_position_order()
    positions = state.seen + torch.arange(steps, device=key.device)
    columns = torch.cat([state.slots.positions[0], positions])
    _hold(state, torch.cat([state.keys, key], 2), torch.cat([state.values, value], 2), columns, positions)
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
    for begin in range(0, steps, _BLOCK):
        part = slice(begin, begin + _BLOCK)
        seen = columns <= positions[part].unsqueeze(1)
        redo_not_finite(query[:, :, part], state.keys, state.values, seen, attention, out[:, :, part])
    return out


def _hold(state: LayerState, keys: Tensor, values: Tensor, held: Tensor, positions: Tensor) -> None:
    """Let ``state`` hold these entries, at positions ``held`` in every row, after tokens at ``positions``."""
    rows = state.slots.positions.shape[0]
    state.keys, state.values = keys, values
    state.slots = Slots(
        positions=held.expand(rows, -1).contiguous(),
        held=torch.ones(rows, len(held), dtype=torch.bool, device=held.device),
        records={},
        observed=state.slots.observed,
        newest=positions[-1:].expand(rows, 1).contiguous(),
        kept_sets=state.slots.kept_sets,
    )
    state.seen += len(positions)
    state.most = state.used = len(held)
    state.ordered = True
