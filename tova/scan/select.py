"""Which scan decides."""

from __future__ import annotations

import importlib.util
import os
import re
from functools import lru_cache

import torch

from tova.errors import UsageError
from tova.kernels import compile
from tova.policies.base import Policy
from tova.rules import why_not
from tova.scan import fixed_point, reference
from tova.scan.chunk import Scan

SCANS = ("auto", "reference", "cpu", "gpu", "fixed_point")


OLDEST_TRITON = (3, 4)
"""Kernels take tuples, and functions among them, which older ones do not; torch 2.8 comes with 3.4."""


def has_triton(device: torch.device) -> bool:
    """Whether a Triton new enough is there and can run on ``device``: CUDA, or anything in its interpreter
    (TRITON_INTERPRET=1)."""
    return (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1") and triton_version() >= OLDEST_TRITON


@lru_cache(maxsize=1)
def triton_version() -> tuple[int, ...]:
    """Major and minor version, whatever the distribution it came with is called; () if there is none."""
    if importlib.util.find_spec("triton") is None:
        return ()
    import triton

    return tuple(int(n) for n in re.findall(r"\d+", triton.__version__)[:2])


def select(name: str, policy: Policy, device: torch.device, dtype: torch.dtype) -> Scan:
    """The scan called ``name``, one of ``SCANS``; ``auto`` is the fastest that can run ``policy`` there."""
    if name == "reference":
        return reference.SCAN
    if name == "fixed_point":
        if not fixed_point.supports(policy):
            raise UsageError(f"scan=fixed_point: {policy.name} looks at dropped tokens, so there is nothing to guess")
        if device.type == "cuda" and has_triton(device):
            from tova.scan import gpu

            return gpu.FIXED_POINT
        return fixed_point.SCAN
    if name == "gpu" or (name == "auto" and device.type == "cuda"):
        if has_triton(device):
            from tova.scan import gpu

            if gpu.supports(policy, dtype):
                return gpu.SCAN
        if name == "gpu":
            reason = None
            if has_triton(device):
                from tova.scan import gpu

                reason = gpu.why_not(policy, dtype)
            needs = f"triton {'.'.join(map(str, OLDEST_TRITON))} or newer, and tensors on CUDA"
            raise UsageError(_cannot("gpu", policy, device, dtype, needs, reason))
    if device.type == "cpu" and compile.available():
        from tova.scan import cpu

        if cpu.supports(policy, dtype):
            return cpu.SCAN
    if name == "cpu":
        raise UsageError(_cannot("cpu", policy, device, dtype, "numba, and tensors on a CPU"))
    return reference.SCAN


def _cannot(
    name: str, policy: Policy, device: torch.device, dtype: torch.dtype, needs: str, reason: str | None = None
) -> str:
    """Why a compiled scan cannot take ``policy``, a sentence; ``reason`` is the scan's own."""
    reason = why_not(policy) or reason
    if reason is not None:
        return f"scan={name} cannot take {policy.name}: {reason}; scan=auto takes it by the reference"
    return (
        f"scan={name} needs {needs}, and what it is given is on {device} in {str(dtype).removeprefix('torch.')} under "
        f"{policy.name}; scan=auto takes what fits"
    )
