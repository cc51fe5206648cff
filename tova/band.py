"""Policies that always drop the oldest, in closed form: what a query sees is the first few tokens and a band.

With a budget of k and s sinks the query at position p sees position j when ``j <= p`` and ``j < s`` or
``j >= p - (k - s)``; so there is nothing to scan, and attention is torch's own kernel on blocks of the band.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tova.policies import Policy, StreamingLLM, Window
from tova.policies.slots import Slots
from tova.products import attend_where_not_finite, finite

if TYPE_CHECKING:
    from tova.replay import Attention, LayerState

_BLOCK = 256


def supports(policy: Policy, attention: Attention) -> bool:
    """Whether there is a closed form: for these very classes (a subclass may differ) and a plain softmax."""
    return type(policy) in (Window, StreamingLLM) and attention.softcap is None and attention.sinks is None


def holds(state: LayerState, policy: Policy, budget: int) -> bool:
    """Whether ``state``, in position order, is what the rule leaves; another call may have left something else."""
    every = torch.arange(state.seen, device=state.keys.device)
    kept = every[(every < policy.sinks) | (every >= state.seen - (budget - policy.sinks))]
    return not state.ragged and bool(state.slots.held.all()) and bool((state.slots.positions == kept).all())


def attend(
    query: Tensor, key: Tensor, value: Tensor, state: LayerState, policy: Policy, attention: Attention, budget: int
) -> Tensor:
    """[B, H, T, D]: attention of the new tokens; the state holds afterwards what the rule holds.

    Shapes as in :func:`tova.replay.replay`.
    """
    batch, heads, steps, _ = query.shape
    groups = key.shape[1]
    per_group = heads // groups
    device = query.device
    band = budget - policy.sinks
    first = state.seen
    positions = torch.arange(first, first + steps, device=device)
    before = state.slots.positions[0]
    columns = torch.cat([before, positions])
    keys = torch.cat([state.keys, key], 2)
    values = torch.cat([state.values, value], 2)
    sinks = int((columns < policy.sinks).sum())
    whole = finite(query, keys, values)
    out = query.new_empty(*query.shape[:3], value.shape[-1])
    for begin in range(0, steps, _BLOCK):
        end = min(begin + _BLOCK, steps)
        oldest = int(torch.searchsorted(columns, max(first + begin - band, policy.sinks)))
        until = len(before) + end
        within = slice(max(oldest, sinks), until)
        place = columns[within]
        k, v = keys[:, :, within], values[:, :, within]
        if sinks and within.start > 0:
            place = torch.cat([columns[:sinks], place])
            k, v = torch.cat([keys[:, :, :sinks], k], 2), torch.cat([values[:, :, :sinks], v], 2)
        at = positions[begin:end, None]
        seen = (place <= at) & ((place < policy.sinks) | (place >= at - band))
        grouped = query[:, :, begin:end].reshape(batch, groups, per_group * (end - begin), -1)
        mixed = torch.nn.functional.scaled_dot_product_attention(
            grouped, k, v, attn_mask=seen.repeat(per_group, 1), scale=attention.scaling
        )
        out[:, :, begin:end] = mixed.view(batch, heads, end - begin, -1)
        if not whole:
            attend_where_not_finite(query[:, :, begin:end], k, v, seen, attention, out[:, :, begin:end])
    last = first + steps - 1
    keep = (columns < policy.sinks) | (columns > last - band)
    rows = state.slots.positions.shape[0]
    if state.log is not None:
        state.log.write(columns.expand(rows, -1), (columns + band).expand(rows, -1), (~keep).expand(rows, -1))
    state.keys, state.values = keys[:, :, keep].contiguous(), values[:, :, keep].contiguous()
    kept = columns[keep]
    state.slots = Slots(
        positions=kept.expand(rows, -1).contiguous(),
        held=torch.ones(rows, len(kept), dtype=torch.bool, device=device),
        records={},
        observed=state.slots.observed,
        newest=positions[-1:].expand(rows, 1).contiguous(),
    )
    state.seen += steps
    state.most = len(kept)
    state.ordered = state.dense = True
    return out
