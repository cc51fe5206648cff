"""The scan in plain torch, one step at a time: slow, short, and what every other scan is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from tova.policies.base import Policy, admit, choose, observe
from tova.policies.slots import Slots


def scan(
    policy: Policy,
    logits: Tensor,
    slots: Slots,
    kept: int,
    allowed: Tensor | None,
    real: Tensor | None,
    budget: int,
    every: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`tova.scan.Scan`."""
    _, _, steps, candidates = logits.shape
    last = torch.full_like(slots.positions, steps)
    last[~slots.held] = -1
    for i in range(steps):
        newcomer = kept + i
        active = None if real is None else real[:, i : i + 1]
        if allowed is not None:
            _expire(slots, last, slots.held & ~allowed[:, i], i, active)
        seen = slots.held.clone()
        seen[:, newcomer] = True if active is None else active[:, 0]
        weights = logits[:, :, i].masked_fill(~seen.unsqueeze(1), float("-inf")).softmax(-1).nan_to_num(0.0)
        attn = weights.mean(1).masked_fill(~slots.held, 0.0)
        position = slots.positions[:, newcomer : newcomer + 1]
        observe(policy, slots, attn, active)
        admit(policy, slots, newcomer, position, active)
        last[:, newcomer] = torch.where(seen[:, newcomer], steps, -1)
        excess = slots.count - budget
        dropped = choose(policy, slots, torch.where(excess >= every, excess, 0), most=every)
        slots.held = slots.held & ~dropped
        last[dropped] = i
    step = torch.arange(steps, device=logits.device).view(1, steps, 1)
    joins = torch.arange(candidates, device=logits.device) - kept
    visible = (joins <= step) & (step <= last.unsqueeze(1))
    logits = logits.masked_fill(~visible.unsqueeze(1), float("-inf"))
    top = logits.amax(-1, keepdim=True).clamp_min(torch.finfo(logits.dtype).min)
    weights = (logits - top).exp()
    return weights, weights.sum(-1, keepdim=True), last


def _expire(slots: Slots, last: Tensor, gone: Tensor, step: int, active: Tensor | None) -> None:
    """Let go of what the query may no longer look at (it left the layer's own sliding window)."""
    if active is not None:
        gone = gone & active
    slots.held = slots.held & ~gone
    last[gone] = step - 1
