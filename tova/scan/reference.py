"""The scan in plain torch, one step at a time: slow, short, and what every other scan is tested against."""

from __future__ import annotations

import torch

from tova.policies.base import Policy
from tova.policies.slots import HeadWeights
from tova.policies.steps import take_step
from tova.scan.chunk import Chunk, Decision, Scan, known_rows, softmax


def decide(policy: Policy, chunk: Chunk) -> Decision:
    """See :class:`tova.scan.chunk.Scan`; leaves the logits as they were."""
    slots, steps = chunk.slots, chunk.steps
    index = torch.arange(slots.positions.shape[1], device=slots.positions.device)
    last = torch.full_like(slots.positions, steps)
    last[~slots.held] = -1
    for i in range(steps):
        newcomer = chunk.kept + i
        active = None if chunk.not_padding is None else chunk.not_padding[:, i : i + 1]
        if chunk.allowed is not None:  # the layer's own sliding window moves on
            gone = slots.held & ~chunk.allowed[:, i]
            gone = gone if active is None else gone & active
            slots.held = slots.held & ~gone
            last[gone] = i - 1
        joins = index == newcomer if active is None else (index == newcomer) & active
        seen = (slots.positions >= 0) & (index <= newcomer) if policy.sees_dropped else slots.held | joins
        logits = chunk.logits[:, :, i].masked_fill(~seen.unsqueeze(1), float("-inf"))
        heads = HeadWeights(softmax(logits, chunk.sink_logits), logits, chunk.sink_logits, chunk.dtype)
        row, known = known_rows(policy.combine(heads).masked_fill(~seen, 0.0))
        position = slots.positions[:, newcomer : newcomer + 1]
        dropped = take_step(policy, slots, newcomer, position, row, chunk.schedule, active=active, known=known)
        last = torch.where(joins, steps, last)
        if dropped is not None:
            last = torch.where(dropped, i, last)
    return Decision(last)


SCAN = Scan("reference", decide)
