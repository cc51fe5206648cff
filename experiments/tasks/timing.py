"""What the benchmarks share: checks of their options, the clock, the machine's name, and where table and figure go."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.tasks import Context
from tova.errors import UsageError

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel


def require(task: Any, **least: int) -> None:
    """Raise for an option of ``task`` below what is given here for it."""
    for option, bound in least.items():
        if getattr(task, option) < bound:
            raise UsageError(f"task.{option}={getattr(task, option)}: must be at least {bound}")


def require_integers(option: str, numbers: Sequence[int], least: int) -> None:
    """Raise unless every number is an integer of at least ``least``."""
    if not all(isinstance(n, int) and not isinstance(n, bool) and n >= least for n in numbers):
        raise UsageError(f"task.{option}={list(numbers)}: must be integers of at least {least}")


def require_some(option: str, values: Sequence[Any]) -> None:
    """Raise if there are none."""
    if not values:
        raise UsageError(f"task.{option}=[]: must name at least one")


def require_policies(names: Sequence[str]) -> None:
    """Raise for a name that is no policy's."""
    from tova import policies

    if any(name not in policies.POLICIES for name in names):
        raise UsageError(f"task.policies={list(names)}: must be some of {', '.join(policies.POLICIES)}")


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """How long ``run`` takes, what it leaves to the device included."""
    import torch

    cuda = device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


def machine(model: PreTrainedModel) -> str:
    """What it runs on: device, threads, version of torch, dtype."""
    import torch

    if model.device.type == "cuda":
        name = torch.cuda.get_device_name(model.device)
    else:
        name = f"{processor()}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}, {str(model.dtype).removeprefix('torch.')}"


def processor() -> str:
    """The CPU's name."""
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def save(context: Context, text: str, drawn: Figure) -> None:
    """Put ``table.md`` and ``figure.png`` beside the cell's results."""
    from experiments.report.figures import png
    from experiments.store import write_atomically

    folder = Path(context.cell.config["results_dir"]) / context.cell.id
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "table.md", text + "\n")
    (folder / "figure.png").write_bytes(png(drawn))
