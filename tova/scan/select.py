"""Which scan decides."""

from __future__ import annotations

import importlib.metadata
import os
from functools import lru_cache

import torch

from tova.errors import UsageError
from tova.kernels import compile
from tova.policies.base import Policy
from tova.rules import why_not
from tova.scan import fixed_point, reference
from tova.scan.chunk import Scan

SCANS = ("auto", "reference", "cpu", "gpu", "fixed_point")


def has_triton(device: torch.device) -> bool:
    """Whether Triton is there and can run on ``device``: CUDA, or anything in its interpreter (TRITON_INTERPRET=1)."""
    return (device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1") and _knows_tuples()


@lru_cache(maxsize=1)
def _knows_tuples() -> bool:
    """Whether there is a Triton of 3.4 or later: kernels take tuples, and functions among them."""
    try:
        major, minor, *_ = importlib.metadata.version("triton").split(".")
        return (int(major), int(minor)) >= (3, 4)
    except (importlib.metadata.PackageNotFoundError, ValueError):
        return False


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
            raise UsageError(_cannot("gpu", policy, device, dtype, "triton, and tensors on CUDA", reason))
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
