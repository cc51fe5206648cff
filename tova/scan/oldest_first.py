"""The scan of policies that always drop the oldest: counting says what is dropped when."""

from __future__ import annotations

import torch
from torch import Tensor

from tova.policies.base import Policy
from tova.scan.chunk import Chunk


def last_seen(policy: Policy, chunk: Chunk) -> Tensor:
    """``last`` int64 [R, N] of a policy that :func:`~tova.rules.drops_oldest`; the chunk's slots move on.

    Where the layer has a window of its own (``chunk.allowed``), counts depend on it and this does not apply.
    """
    slots, schedule, steps = chunk.slots, chunk.schedule, chunk.steps
    rows, device = len(slots.held), slots.held.device
    joins = torch.ones(rows, steps, dtype=torch.bool, device=device)
    joined = (joins if chunk.not_padding is None else chunk.not_padding).cumsum(1)
    # The first eviction leaves what the schedule says, and each later one takes as many as have come since.
    first = (schedule.evict_at - slots.count).clamp_min(1)
    since = joined - first
    turns = since.clamp_min(0) // schedule.at_once * schedule.at_once
    dropped = torch.where(since >= 0, slots.count + first - schedule.leaves + turns, 0)
    present = chunk.present()
    droppable = present & (slots.positions >= policy.sinks)
    rank = droppable.cumsum(1) - 1
    last = torch.searchsorted(dropped, rank, right=True)
    last = torch.where(droppable, last, torch.where(present, steps, -1))
    slots.held = last == steps
    chunk.count_steps(policy)
    return last
