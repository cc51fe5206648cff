"""The scan in plain torch, one step at a time: slow, short, and what every other scan is tested against."""

from __future__ import annotations

import torch
from torch import Tensor

from tova.policies.base import Policy, admit, choose, observe
from tova.policies.slots import Slots
from tova.scan import Chunk, visible

_NOTHING = float("-inf")


def scan(policy: Policy, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
    """See :class:`tova.scan.Scan`."""
    logits, slots, kept = chunk.logits, chunk.slots, chunk.kept
    _, _, steps, candidates = logits.shape
    index = torch.arange(candidates, device=logits.device)
    last = torch.full_like(slots.positions, steps)
    last[~slots.held] = -1
    for i in range(steps):
        newcomer = kept + i
        active = None if chunk.real is None else chunk.real[:, i : i + 1]
        if chunk.allowed is not None:
            _expire(slots, last, slots.held & ~chunk.allowed[:, i], i, active)
        joins = index == newcomer if active is None else (index == newcomer) & active
        if policy.sees_dropped:
            looked_at = (slots.positions >= 0) & (index <= newcomer)
        else:
            looked_at = slots.held | joins
        row, known = known_rows(_row(policy, chunk, i, looked_at))
        position = slots.positions[:, newcomer : newcomer + 1]
        observe(policy, slots, row.masked_fill(~slots.held, 0.0), active, known)
        admit(policy, slots, newcomer, position, active, own=row[:, newcomer : newcomer + 1], known=known)
        last = torch.where(joins, steps, last)
        count = slots.count
        excess = torch.where(count >= chunk.trigger, count - chunk.remains, 0)
        if logits.device.type == "cpu" and not bool(excess.any()):
            continue
        dropped = choose(policy, slots, excess, most=max(chunk.trigger - chunk.remains, 1))
        slots.held = slots.held & ~dropped
        last = torch.where(dropped, i, last)
    return *weights_under(chunk, last), last


def weights_under(chunk: Chunk, last: Tensor) -> tuple[Tensor, Tensor]:
    """Undivided weights float32 [R, H_g, C, N] and their sums [R, H_g, C, 1], if drops are as in ``last``."""
    logits = chunk.logits.float()
    seen = visible(last, chunk.kept, 0, logits.shape[2]).unsqueeze(1)
    logits = logits.masked_fill(~seen, _NOTHING)
    top = logits.amax(-1, keepdim=True)
    if chunk.sinks is not None:
        top = torch.maximum(top, chunk.sinks[:, :, None, None])
    # A query of padding sees nothing, and gets nothing; one that sees but minus infinity gets NaN, as of any softmax.
    top = top.masked_fill(~seen.any(-1, keepdim=True), 0.0)
    weights = logits.sub_(top).exp_()
    sums = weights.sum(-1, keepdim=True)
    if chunk.sinks is not None:
        sums = sums + (chunk.sinks[:, :, None, None] - top).exp()
    return weights, sums


def _row(policy: Policy, chunk: Chunk, step: int, looked_at: Tensor) -> Tensor:
    """[R, N]: the weights of one query on ``looked_at``, averaged over heads; zero elsewhere. NaN for padding."""
    logits = chunk.logits[:, :, step].masked_fill(~looked_at.unsqueeze(1), _NOTHING)
    return head_average(policy, softmax(logits, chunk.sinks), chunk.dtype)


def head_average(policy: Policy, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 [R, N] of weights [R, H_g, N]: the mean over heads, in the model's dtype where the policy says so."""
    if policy.rounds_weights and dtype != torch.float32:
        return weights.to(dtype).mean(1).float()
    return weights.mean(1)


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """[R, H_g, N] beside ``sinks`` [R, H_g] if any."""
    if sinks is not None:
        return torch.cat([logits, sinks.unsqueeze(-1)], -1).softmax(-1)[..., :-1]
    return logits.softmax(-1)


def known_rows(weights: Tensor, *, ask: bool = True) -> tuple[Tensor, Tensor | None]:
    """Head-averaged weights [R, N], zero in rows that are not finite, and bool [R, 1]: which are; None if all.

    ``ask`` whether all are where that does not mean waiting; a step that may be part of a graph must not.
    """
    known = weights.isfinite().all(-1, keepdim=True)
    if ask and weights.device.type == "cpu" and bool(known.all()):
        return weights, None
    return weights.masked_fill(~known, 0.0), known


def _expire(slots: Slots, last: Tensor, gone: Tensor, step: int, active: Tensor | None) -> None:
    """Let go of what the query may no longer look at (it left the layer's own sliding window)."""
    if active is not None:
        gone = gone & active
    slots.held = slots.held & ~gone
    last[gone] = step - 1
