"""What the parts share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from experiments.tasks import Row

if TYPE_CHECKING:
    import torch

    from tova.policies import Policy


@contextmanager
def reported(row: Row) -> Iterator[None]:
    """What goes wrong with one figure is written into its row, and the next one is tried."""
    try:
        yield
    except Exception as e:
        row["error"] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:300]}"


def scans(device: torch.device) -> list[str]:
    """Those that run on a device, the reference only where it is no punishment."""
    from tova.scan.select import has_triton

    found = ["gpu"] if has_triton(device) else []
    return [*found, "fixed_point"] if device.type == "cuda" else [*found, "fixed_point", "reference"]


def empty_slots(policy: Policy, rows: int, candidates: int, device: torch.device) -> Any:
    """Slots for ``candidates`` tokens that have yet to join."""
    import torch

    from tova.policies import Slots
    from tova.policies.steps import new_records, ring_names

    zeros = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    return Slots(
        positions=torch.arange(candidates, device=device).repeat(rows, 1),
        held=torch.zeros(rows, candidates, dtype=torch.bool, device=device),
        records=new_records(policy, rows, candidates, torch.float32, device),
        observed=zeros,
        newest=zeros - 1,
        rings=ring_names(policy),
    )


def forget(device: torch.device) -> None:
    """Give memory back, and begin to look for the most in use."""
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int | None:
    """The most bytes in use since; None on a CPU."""
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
