"""The clock, taking turns, the machine's name, and what a profiler saw."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.provenance import device_name

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel


def seconds_of(run: Callable[[], Any], device: torch.device | None = None) -> float:
    """How long ``run`` takes, what it leaves to the device included."""
    _wait_for(device)
    started = time.perf_counter()
    run()
    _wait_for(device)
    return time.perf_counter() - started


def _wait_for(device: torch.device | None) -> None:
    if device is not None and device.type == "cuda":
        import torch

        torch.cuda.synchronize(device)


def in_turn(
    passes: Mapping[str, Callable[[], float]],
    repetitions: int,
    *,
    uncounted: int = 1,
    tell: Callable[[float], None] = lambda share: None,
) -> dict[str, list[float]]:
    """Seconds of each pass by its name, taken one after the other and all again: a busy machine is shared fairly.

    Args:
        passes: do something and return the seconds it took.
        uncounted: rounds before the ``repetitions`` that count.
        tell: told which share of all is done.
    """
    timed: dict[str, list[float]] = {what: [] for what in passes}
    rounds = repetitions + uncounted
    for done in range(rounds):
        for number, (what, one) in enumerate(passes.items(), start=1):
            timed[what].append(one())
            tell((done + number / len(passes)) / rounds)
    return {what: seconds[uncounted:] for what, seconds in timed.items()}


def median_of(
    run: Callable[[], Any], device: torch.device | None = None, repetitions: int = 3, uncounted: int = 1
) -> float:
    """Seconds ``run`` takes."""
    return statistics.median(in_turn({"": lambda: seconds_of(run, device)}, repetitions, uncounted=uncounted)[""])


def along(places: Sequence[tuple[int, float]], steps: Sequence[int] | range) -> float:
    """Seconds of all ``steps``, linear between the ``places`` (step, seconds) that were timed and level outside."""
    at, seconds = zip(*places, strict=True)
    return float(np.interp(np.asarray(steps), at, seconds).sum())


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """torch's threads; None leaves its choice."""
    import torch

    usual = torch.get_num_threads()
    torch.set_num_threads(count or usual)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def machine(model: PreTrainedModel) -> str:
    """What it runs on: device, threads, version of torch, dtype."""
    import torch

    name = device_name(str(model.device))
    if model.device.type == "cpu":
        name += f", {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}, {str(model.dtype).removeprefix('torch.')}"


def spans_of(run: Callable[[], Any]) -> dict[str, float]:
    """Seconds within each of :mod:`tova.spans` while ``run`` runs, added up over all threads."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    try:
        everywhere = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    except TypeError:  # before torch 2.7: what helpers do is not seen
        everywhere = None
    with profile(activities=[ProfilerActivity.CPU], experimental_config=everywhere) as seen:
        run()
    return {e.key: e.cpu_time_total / 1e6 for e in seen.key_averages() if e.key.startswith("tova::")}


def kernels_of(run: Callable[[], Any], most: int = 8) -> dict[str, float]:
    """Seconds of the kernels that take longest on a GPU, by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
    kernels = [event for event in seen.key_averages() if not event.key.startswith("tova::")]
    longest = sorted(kernels, key=lambda event: -event.self_device_time_total)[:most]
    return {event.key[:80]: event.self_device_time_total / 1e6 for event in longest}
