"""One decoded token in plain torch: any policy, any device, nothing to wait for on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from tova.backends.finite import finite, only_seen
from tova.call import Call
from tova.layer import Attention, LayerState
from tova.policies.slots import HeadWeights
from tova.policies.steps import take_step
from tova.scan.chunk import known_rows, softmax


def step(query: Tensor, key: Tensor, value: Tensor, state: LayerState, call: Call, used: int) -> Tensor:
    """[B, H, 1, E]: attention of one new token over what is held and itself; the slots move on, in place.

    Args:
        query: [B, H, 1, D], key: [B, K, 1, D], value: [B, K, 1, E].
        state: with a free slot in every row. Only its slots, keys, values and log are written.
        used: look at this many of the first slots; a free one and all that is held must be among them.
    """
    batch, heads, _, size = query.shape
    policy, attention, kept_sets, slots = call.policy, call.attention, state.kept_sets, state.slots
    position = slots.newest + 1  # a tensor like all else that differs from step to step: see tova.graphs
    slot = slots.held.to(torch.uint8).argmin(-1, keepdim=True)
    where = slot.view(batch, kept_sets, 1, 1).expand(batch, key.shape[1], 1, 1)
    state.keys.scatter_(2, where.expand(-1, -1, -1, size), key)
    state.values.scatter_(2, where.expand(-1, -1, -1, value.shape[-1]), value)
    for name, feature in call.features(key, value, position, kept_sets).items():
        index = slot.view(-1, 1, *[1] * (feature.ndim - 2)).expand_as(feature)
        slots.features[name] = slots.features[name].scatter(1, index, feature)
    slots.positions = slots.positions.scatter(-1, slot, position)
    slots.keys, slots.values = state.keys, state.values
    keys = state.keys[:, :, :used]
    logits = attention.logits(query, keys)
    logits = call.reindexed(logits, query, keys, position, slots, slots.count)
    logits = logits.view(batch * kept_sets, heads // kept_sets, -1)
    seen = None
    if state.ragged or state.most + 1 < used:
        seen = slots.held.scatter(-1, slot, True)[:, :used]
        logits = logits.masked_fill_(~seen.unsqueeze(1), float("-inf"))
    sink_logits = attention.sink_logits_of(batch, kept_sets)
    weights = softmax(logits, sink_logits)
    out = _mix(weights.view(batch, heads, 1, -1), state.values[:, :, :used], seen, attention)
    row, known = slots.positions.new_zeros(slots.held.shape, dtype=torch.float32), None
    if policy.reads_attention:
        combined = policy.combine(HeadWeights(weights, logits, sink_logits, query.dtype))
        combined = combined if seen is None else combined.masked_fill(~seen, 0.0)
        combined, known = known_rows(combined, ask=False)
        row = torch.nn.functional.pad(combined, (0, slots.held.shape[1] - used))
    dropped = take_step(
        policy, slots, slot, position, row, call.schedule, known=known, held=None if state.ragged else state.most
    )
    if dropped is not None:
        state.write_log(state.seen, dropped)
    slots.keys = slots.values = None
    return out


def _mix(weights: Tensor, values: Tensor, seen: Tensor | None, attention: Attention) -> Tensor:
    """Values under the weights [B, H, 1, S] of one query; what is left in slots that are not ``seen`` does not count.

    ``seen`` is bool [R, S], None if all are.
    """
    if seen is None:
        return attention.mix(weights, None, values)
    if values.device.type != "cpu":  # where looking whether anything is not finite would mean waiting
        return attention.mix(weights, None, only_seen(values, seen))
    out = attention.mix(weights, None, values)
    return out if finite(out) else attention.mix(weights, None, only_seen(values, seen))
