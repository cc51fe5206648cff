"""The scan: which step drops which position, given the logits of a chunk of queries.

``reference`` is plain torch and runs any policy on any device; ``cpu`` is compiled and re-expresses the built-in
policies. On the same logits they decide alike. :func:`select` picks one.
"""

from __future__ import annotations

import importlib.util
from typing import Protocol

import torch
from torch import Tensor

from tova.errors import UsageError
from tova.policies.base import Policy
from tova.policies.slots import Slots

SCANS = ("auto", "reference", "cpu")


class Scan(Protocol):
    """Turns a chunk's logits into attention weights, as if the policy had evicted step by step."""

    def __call__(
        self,
        policy: Policy,
        logits: Tensor,
        slots: Slots,
        kept: int,
        allowed: Tensor | None,
        real: Tensor | None,
        budget: int,
        every: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Scan one chunk.

        Args:
            logits: float32 [R, H_g, C, N]: R kept sets, H_g query heads that share one, C queries, N candidates:
                ``kept`` slots in position order, then the chunk's own tokens. May be overwritten.
            slots: [R, N] candidates; ``held`` is False for the chunk's own tokens. Updated in place: afterwards it
                holds what survives, with records as of the last step.
            kept: how many of the N candidates come from before the chunk.
            allowed: bool [R, C, N], what the model itself lets each query see beside causality; None if everything.
            real: bool [R, C], False where the chunk's token is padding; None if none is.
            budget: what the layer may hold between steps.
            every: evict once ``budget + every`` are held, down to ``budget``.

        Returns:
            weights [R, H_g, C, N] not yet divided, their sums [R, H_g, C, 1], and ``last`` int64 [R, N]: the last
            step of the chunk (0-based) that saw the candidate, C if it survives, -1 if the chunk never saw it.
        """
        ...


def select(name: str, policy: Policy, device: torch.device) -> Scan:
    """The scan called ``name``, one of ``SCANS``; ``auto`` is the fastest that can run ``policy`` on ``device``."""
    from tova.scan import reference

    if name == "reference":
        return reference.scan
    usable = device.type == "cpu" and importlib.util.find_spec("numba") is not None
    if usable:
        from tova.scan import cpu

        if cpu.supports(policy):
            return cpu.scan
    if name == "cpu":
        raise UsageError(f"scan=cpu needs numba, CPU tensors and a built-in policy, not {policy.name} on {device}")
    return reference.scan
