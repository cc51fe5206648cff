"""The scan: which step drops which position, given the logits of a chunk of queries.

``reference`` is plain torch and runs any policy on any device; ``cpu`` (numba) and ``gpu`` (Triton) are compiled and
re-express the built-in policies; ``fixed_point`` runs any policy, parallel over steps. On the same logits they decide
alike. :func:`select` picks one.

Logits that are not finite: a step whose head-averaged weights are not all finite tells the policy nothing (see
:mod:`tova.policies.base`), and its query's output is NaN. A query that does not see what is not finite, because it came
before, was dropped or is padding, is as if that were not there. Every engine does this, and so keeps the same.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tova.errors import UsageError
from tova.policies.base import Policy
from tova.policies.slots import Slots
from tova.scan import compile
from tova.threads import Team

SCANS = ("auto", "reference", "cpu", "gpu", "fixed_point")


@dataclass
class Chunk:
    """What a scan works on: R kept sets, H_g query heads that share one, C queries, N candidates.

    Attributes:
        logits: float32 [R, H_g, C, N]. Candidates are ``kept`` slots in position order, then the chunk's own tokens.
            May be overwritten.
        slots: [R, N] candidates; ``held`` is False for the chunk's own tokens. Updated in place: after the scan it
            holds what survives, with records as of the last step.
        kept: how many of the N candidates come from before the chunk.
        trigger: evict in the step after which this many would be held.
        remains: how many an eviction leaves.
        allowed: bool [R, C, N], what the model itself lets each query see beside causality; None if everything.
        real: bool [R, C], False where the chunk's token is padding; None if none is.
        sinks: float32 [R, H_g], a logit per head that only adds to the sum of weights (GPT-OSS); None without.
        dtype: the model's, to which some policies round weights.
        scaling, softcap: what the logits still have to be put through, ``softcap * tanh(logits * scaling / softcap)``;
            other than the defaults only for the scans that read a raw product themselves (see :func:`deciding`).
        threads: to share the rows among, None if the caller is alone.
    """

    logits: Tensor
    slots: Slots
    kept: int
    trigger: int
    remains: int
    allowed: Tensor | None = None
    real: Tensor | None = None
    sinks: Tensor | None = None
    dtype: torch.dtype = torch.float32
    threads: Team | None = None
    scaling: float = 1.0
    softcap: float | None = None

    def scaled(self) -> Chunk:
        """The same with logits in float32 that need nothing done to them; its slots are these very ones."""
        logits = self.logits.float()
        if self.scaling != 1.0:
            logits = logits * self.scaling
        if self.softcap is not None:
            logits = (logits / self.softcap).tanh() * self.softcap
        return dataclasses.replace(self, logits=logits, scaling=1.0, softcap=None)


def visible(last: Tensor, kept: int, begin: int, end: int) -> Tensor:
    """bool [R, end - begin, N]: which candidates the steps from ``begin`` see; ``last`` is what a scan returns."""
    index = torch.arange(last.shape[1], device=last.device)
    step = torch.arange(begin, end, device=last.device).unsqueeze(1)
    return (index - kept <= step) & (step <= last.unsqueeze(1))


class Scan(Protocol):
    """Turns a chunk's logits into attention weights, as if the policy had evicted step by step."""

    def __call__(self, policy: Policy, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Scan one chunk.

        Returns:
            weights [R, H_g, C, N] not yet divided, their sums [R, H_g, C, 1], and ``last`` int64 [R, N]: the last
            step of the chunk (0-based) that saw the candidate, C if it survives, -1 if the chunk never saw it.
        """
        ...


class Decide(Protocol):
    """What a scan decides, without weights; the chunk's slots move on, and its logits may be a raw product."""

    def __call__(self, policy: Policy, chunk: Chunk) -> Tensor:
        """``last`` int64 [R, N] as a :class:`Scan` returns it."""
        ...


def deciding(scan: Scan, device: torch.device) -> Decide | None:
    """How ``scan`` decides without making weights; None if it cannot there."""
    if not has_triton(device):
        return None
    from tova.scan import fixed_point, gpu

    if scan is gpu.scan:
        return gpu.decide
    return fixed_point.decide if scan is fixed_point.scan else None


def has_triton(device: torch.device) -> bool:
    """Whether Triton is there and can run on ``device``: CUDA, or anything in its interpreter (TRITON_INTERPRET=1)."""
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return False
    return importlib.util.find_spec("triton") is not None


def select(name: str, policy: Policy, device: torch.device, dtype: torch.dtype) -> Scan:
    """The scan called ``name``, one of ``SCANS``; ``auto`` is the fastest that can run ``policy`` there."""
    from tova.scan import reference

    if name == "reference":
        return reference.scan
    if name == "fixed_point":
        from tova.scan import fixed_point

        if not fixed_point.supports(policy):
            raise UsageError(f"scan=fixed_point: {policy.name} looks at dropped tokens, so there is nothing to guess")
        return fixed_point.scan
    if name == "gpu" or (name == "auto" and device.type == "cuda"):
        if has_triton(device):
            from tova.scan import gpu

            if gpu.supports(policy, dtype):
                return gpu.scan
        if name == "gpu":
            raise UsageError(
                f"scan=gpu needs triton, CUDA tensors and a compiled built-in policy, not {policy.name} on {device} in "
                f"{str(dtype).removeprefix('torch.')}"
            )
    usable = device.type == "cpu" and compile.available()
    if usable:
        from tova.scan import cpu

        if cpu.supports(policy, dtype):
            return cpu.scan
    if name == "cpu":
        raise UsageError(
            f"scan=cpu needs numba, CPU tensors and a compiled built-in policy, not {policy.name} on {device} in "
            f"{str(dtype).removeprefix('torch.')}"
        )
    return reference.scan
