"""Memory that runs out: how it shows, and what would have fitted."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from experiments.cells import Cell


def is_exhausted(error: BaseException) -> bool:
    """Whether an error says that memory ran out."""
    import torch

    if isinstance(error, MemoryError | torch.cuda.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and bool(
        re.search(r"not enough memory|can't allocate|out of memory", str(error))
    )


def exhausted(error: BaseException, cell: Cell) -> str:
    """A sentence about it: what was asked for, and what is known to help."""
    said = " ".join(str(error).split())[:200]
    tokens = None if cell.dataset is None else cell.dataset.tokens
    of = f" of {tokens:,} tokens" if tokens else ""
    fits = ""
    if tokens and (free := free_bytes_of(cell.device)) and (asked := _asked(said)):
        # Most of what a long text needs grows with its length.
        fitting = max(1, int(tokens * free / (free + asked)))
        fits = f"; {free / 2**30:.1f} GiB are free now, and about {fitting:,} tokens would fit"
    return (
        f"out of memory with a document{of} on {cell.device} ({said}){fits}; take a smaller dataset.tokens, "
        "task.measures=false, a smaller model.dtype, or a device with more"
    )


def _asked(said: str) -> int | None:
    """Bytes that could not be had, as the message names them."""
    if match := re.search(r"allocate ([\d.]+) ([KMG]i?B)", said):
        return int(float(match.group(1)) * {"K": 2**10, "M": 2**20, "G": 2**30}[match.group(2)[0]])
    if match := re.search(r"allocate (\d+) bytes", said):
        return int(match.group(1))
    return None


def free_bytes_of(device: str) -> int | None:
    """Memory that is free on a device, by its name."""
    import torch

    return free_bytes(torch.device(device))


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free there; None where the machine does not say."""
    import torch

    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo") as f:
            for line in f:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):
        return None
