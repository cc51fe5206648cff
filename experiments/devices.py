"""Which device is meant by its name."""

from __future__ import annotations

from typing import Any

from experiments.options import shown
from tova.errors import UsageError


def device_of(name: Any) -> str:
    """The device in torch's words; ``auto`` is CUDA where there is one.

    Raises:
        UsageError: it is no device's name, or this machine has none such.
    """
    import torch

    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name if isinstance(name, str) else shown(name))
    except RuntimeError as e:
        raise UsageError(f"device={shown(name)}: must be auto, cpu, cuda or cuda:N") from e
    if device.type == "cpu":
        return "cpu"
    if device.type == "cuda":
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    elif device.type == "mps":
        there = int(torch.backends.mps.is_available())
    else:
        raise UsageError(f"device={name}: must be auto, cpu, cuda or cuda:N")
    if not there:
        raise UsageError(
            f"device={name}: this machine has no {device.type.upper()} device; use device=cpu or device=auto"
        )
    if (device.index or 0) >= there:
        last = f"the last is {device.type}:{there - 1}"
        raise UsageError(f"device={name}: this machine has {there} {device.type.upper()} devices, {last}")
    return str(device)
