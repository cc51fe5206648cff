"""What a replay and a decoded token cost on a GPU, and whether the scans there decide as they must.

Every part runs in a process of its own under a time limit and writes each figure as it is found, so whatever goes
wrong in one part (too little memory, a kernel that hangs) leaves the others and what it had measured itself. Needs
torch, transformers, triton and ``tova``, no weights, no data and no configuration:

    python -m experiments.tasks.bench_gpu --out results/bench_gpu

or, as a cell, ``python -m experiments.run experiment=bench_gpu``. ``--tiny`` (``task.tiny=true``) goes through all of
it in a small shape on any device; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.tasks import Context, Row
from experiments.tasks.timing import seconds_of
from tova.errors import UsageError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel

    from experiments.cells import Cell
    from tova.policies import Policy

SECONDS = {"card": 20, "decisions": 70, "launch": 60, "layer": 120, "long": 50, "rows": 50, "decode": 210}
"""The parts, and the seconds each is given: under 10 minutes in all."""
NEAR = 1e-5
"""Two lowest scores closer than this (relative) are a near-tie: float32 does not resolve which is lower."""


@dataclass(frozen=True)
class Shape:
    """What is measured. Batches of ``decode`` are those of TOVA's paper; None is the full cache.

    Attributes:
        hidden, heads, intermediate, layers, vocabulary, dtype: the model's.
        budget, tokens, batches: of the layer's replay.
        long: tokens of the single long sequence.
        chunks: queries per block of a replay, each tried.
        rows: kept sets in the comparison of decisions.
        decode: (budget, batch) of each decoding run.
        length: tokens that are decoded.
        places, steps: places along the length at which decoding is timed, and steps at each.
        repetitions: of what is timed, after one that is not counted.
    """

    hidden: int = 4096
    heads: int = 32
    intermediate: int = 11008
    layers: int = 32
    vocabulary: int = 32000
    dtype: str = "bfloat16"
    budget: int = 512
    tokens: int = 4096
    batches: tuple[int, ...] = (1, 32)
    long: int = 65536
    chunks: tuple[int, ...] = (128, 512)
    rows: int = 4
    decode: tuple[tuple[int | None, int], ...] = ((None, 8), (256, 139), (512, 70), (1024, 35), (2048, 17))
    length: int = 4096
    places: int = 4
    steps: int = 6
    repetitions: int = 3


LLAMA_2_7B = Shape()
TINY = Shape(
    hidden=32, heads=4, intermediate=64, layers=2, vocabulary=100, dtype="float32", budget=8, tokens=40, batches=(1, 2),
    long=64, chunks=(16,), rows=2, decode=((None, 2), (8, 3)), length=24, places=2, steps=2, repetitions=1,
)  # fmt: skip


@dataclass(frozen=True)
class BenchGpu:
    """The benchmark as a cell; everything but time limits and places of output is fixed, see :class:`Shape`.

    Args:
        started: when; a benchmark is measured anew each time it is asked for.
        tiny: go through all of it in a small shape, on any device.
        parts: which parts to run, of those in ``SECONDS``; null for all.
        out: folder for ``bench_gpu.json`` and ``bench_gpu.md``.
    """

    started: str
    tiny: bool = False
    parts: list[str] | None = None
    out: str = "results/bench_gpu"

    name = "bench_gpu"
    uses_model = False
    needs_reference = False
    length = None

    def __post_init__(self) -> None:
        for part in self.parts or ():
            if part not in SECONDS:
                raise UsageError(f"task.parts: there is no part {part!r}; there are: {', '.join(SECONDS)}")

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "started": self.started}

    def at_once(self, cell: Cell) -> int:
        return 1

    def run(self, batch: Sequence[Context]) -> Iterator[tuple[int, Row, dict[str, np.ndarray]]]:
        (context,) = batch
        import numpy as np

        if self.name in context.done:
            return
        parts = self.parts or list(SECONDS)
        context.expect(len(parts))
        began = time.perf_counter()
        result = measure(parts, str(context.cell.config["device"]), self.tiny, Path(self.out), context.advance)
        seconds = time.perf_counter() - began
        ratios = [row["ratio"] for row in result["rows"] if "ratio" in row]
        yield (
            0,
            {"index": 0, "document": self.name, "seconds": seconds, "result": result, "started": self.started},
            {"ratio": np.array(ratios)},
        )

    def summarise(self, rows: list[Row]) -> Row:
        return {k: v for k, v in rows[0].items() if k not in ("index", "document")}

    def describe(self, summary: Row) -> str | None:
        return markdown(summary["result"])


# -- all parts, each in a process of its own -----------------------------------------------------------------


def measure(
    parts: Sequence[str], device: str, tiny: bool, out: Path, advance: Callable[[float], None] = lambda done: None
) -> dict[str, Any]:
    """Run ``parts`` and write ``bench_gpu.json`` and ``bench_gpu.md`` to ``out`` after each.

    Returns:
        What is in the JSON file: ``made`` (about the run), ``rows`` (one per figure) and ``parts`` (how each ended).

    Raises:
        UsageError: there is no CUDA device, and it is not to be tiny.
    """
    device = _device(device, tiny)
    out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {"made": _made(device, tiny), "rows": [], "parts": {}}
    for done, part in enumerate(parts):
        scratch = out / f".{part}.jsonl"
        scratch.unlink(missing_ok=True)
        began = time.perf_counter()
        ended = _in_a_process(part, device, tiny, scratch)
        found = [json.loads(line) for line in scratch.read_text().splitlines()] if scratch.exists() else []
        scratch.unlink(missing_ok=True)
        result["rows"] += found
        result["parts"][part] = {"ended": ended, "seconds": round(time.perf_counter() - began, 1), "rows": len(found)}
        (out / "bench_gpu.json").write_text(json.dumps(result, indent=1) + "\n")
        (out / "bench_gpu.md").write_text(markdown(result) + "\n")
        advance(done + 1)
    return result


def _in_a_process(part: str, device: str, tiny: bool, rows: Path) -> str:
    """``ok``, or what went wrong in a line."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "experiments.tasks.bench_gpu", "--part", part, "--device", device]
    command += ["--rows", str(rows.resolve())] + (["--tiny"] if tiny else [])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))}
    limit = SECONDS[part] * (4 if tiny else 1)  # where it only has to run, on whatever machine
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit)
    except subprocess.TimeoutExpired:
        return f"stopped after {limit} s"
    if done.returncode == 0:
        return "ok"
    lines = [line for line in done.stderr.strip().splitlines() if line.strip()]
    return f"exit code {done.returncode}: {lines[-1][:300] if lines else 'no message'}"


def _device(name: str, tiny: bool) -> str:
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise UsageError(f"device={name}: this machine has no CUDA device")
    if name == "cpu" and not tiny:
        raise UsageError("bench_gpu needs a CUDA device; with task.tiny=true it goes through everything on the CPU")
    return name


def _made(device: str, tiny: bool) -> dict[str, Any]:
    """On what, with what and when."""
    import torch

    versions = {}
    for package in ("torch", "triton", "transformers", "tova"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    if device.startswith("cuda"):
        card, driver = torch.cuda.get_device_name(device), _driver()
    else:
        card, driver = f"no card ({platform.machine()} CPU)", "none"
    return {
        "card": card,
        "driver": driver,
        "cuda": torch.version.cuda or "none",
        "python": platform.python_version(),
        **versions,
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "tiny": tiny,
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.split("\n")[0] or "unknown"
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"


# -- the parts: each yields a row per figure -----------------------------------------------------------------


def card(shape: Shape, device: torch.device) -> Iterator[Row]:
    """What the card can do at most, measured: bytes copied and products in the model's dtype, per second."""
    bandwidth, rate = _roofline(shape, device)
    yield {"bytes_per_second": bandwidth, "flops_per_second": rate}


def decisions(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Every scan against the reference on the same random logits, from an empty cache on."""
    import torch

    from tova import policies
    from tova.scan import Chunk, fixed_point, select

    budget = shape.budget
    recent = dict(recent_window=max(1, budget // 16))
    options: dict[str, dict[str, Any]] = {
        "tova": {}, "h2o": recent, "h2o_half": {}, "scissorhands": recent, "snapkv": recent, "window": {},
    }  # fmt: skip
    steps = budget + (128 if budget > 100 else budget)
    for dtype in dict.fromkeys(("float32", shape.dtype)):
        torch.manual_seed(0)
        logits = 2 * torch.randn(shape.rows, shape.heads, steps, steps, device=device)
        logits = logits.to(getattr(torch, dtype))
        for name, parameters in options.items():
            policy = policies.make(name, budget=budget, **parameters)
            watched, gaps = _watched(policy)

            def chunk(policy: Policy, logits: Tensor) -> Chunk:
                return Chunk(logits, _empty(policy, shape.rows, steps, device), 0, policy.budget + 1, policy.budget)

            reference = select("reference", policy, device, torch.float32)
            _, _, right = reference(watched, chunk(watched, logits.float()))
            for scan in _scans(device):
                row: Row = {"policy": name, "dtype": dtype, "scan": scan, "decisions": right.numel()}
                if scan == "reference":
                    continue
                with _reported(row), fixed_point.counting() as heard:
                    made = chunk(policy, logits.clone())
                    made.dtype = logits.dtype
                    _, _, last = select(scan, policy, device, logits.dtype)(policy, made)
                    row |= _compared(last, right, gaps)
                    row["rounds"] = max((solved.rounds for solved in heard), default=None)
                yield row


def launch(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Microseconds a step of the scan kernel, by how it is launched; one chunk, once the cache is full."""
    import torch

    from tova import policies
    from tova.scan import Chunk, has_triton

    if not has_triton(device):
        return
    from tova.scan import gpu

    policy = policies.make("tova", budget=shape.budget)
    steps = min(shape.chunks)
    usual = (gpu.launch.tile, gpu.launch.scan_warps, gpu.launch.ahead)
    tried = [usual]
    if shape is not TINY:
        tried += [(32768, 32, False), (16384, 16, False), (16384, 8, False), (8192, 8, False), (8192, 4, False)]
        tried += [(32768, 16, True), (32768, 32, True)]
    for rows in shape.batches:
        logits = 2 * torch.randn(rows, shape.heads, steps, shape.budget + steps, device=device)
        for tile, warps, ahead in tried:
            row: Row = {"rows": rows, "tile": tile, "warps": warps, "ahead": ahead}
            gpu.launch.tile, gpu.launch.scan_warps, gpu.launch.ahead = tile, warps, ahead

            def once(logits: Tensor = logits, rows: int = rows) -> None:
                slots = _empty(policy, rows, logits.shape[-1], device)
                slots.held[:, : shape.budget] = True
                state = gpu._State(policy, Chunk(logits, slots, shape.budget, shape.budget + 1, shape.budget))
                state.go(logits, given=False)

            with _reported(row):
                row["microseconds_per_step"] = 1e6 * _median(once, device, shape.repetitions) / steps
            yield row
    gpu.launch.tile, gpu.launch.scan_warps, gpu.launch.ahead = usual


def layer(shape: Shape, device: torch.device) -> Iterator[Row]:
    """A layer's replay beside the same layer with full attention."""
    for batch in shape.batches:
        yield from _layer(shape, device, batch, shape.tokens, profiled=True)


def long(shape: Shape, device: torch.device) -> Iterator[Row]:
    """The same for one long sequence."""
    yield from _layer(shape, device, 1, shape.long, profiled=False)


def _layer(shape: Shape, device: torch.device, batch: int, tokens: int, *, profiled: bool) -> Iterator[Row]:
    import torch

    import tova
    from tova import EvictingCache, policies
    from tova.compat import cache_argument
    from tova.scan import fixed_point

    model = _model(shape, device, layers=1).model
    policy = policies.make("tova", budget=shape.budget)
    x = torch.randn(batch, tokens, shape.hidden, device=device, dtype=getattr(torch, shape.dtype))
    name = cache_argument(model)
    what: Row = {"batch": batch, "tokens": tokens, "budget": shape.budget}
    model.set_attn_implementation("sdpa")
    with torch.inference_mode():
        full = _median(lambda: model(inputs_embeds=x, use_cache=False), device, shape.repetitions)
    yield {**what, "scan": "full attention", "seconds": full}
    tova.enable(model)
    for scan in _scans(device):
        for chunk in shape.chunks:
            row: Row = {**what, "scan": scan, "chunk": chunk}

            def once(scan: str = scan, chunk: int = chunk) -> None:
                cache = EvictingCache(policy, log=False, scan=scan, chunk=chunk)
                model(inputs_embeds=x, use_cache=True, **{name: cache})

            with _reported(row), torch.inference_mode():
                _forget(device)
                with fixed_point.counting() as heard:
                    once()
                if heard:
                    row["rounds"] = statistics.mean(solved.rounds for solved in heard)
                    row["one_by_one"] = sum(solved.one_by_one for solved in heard)
                seconds = _median(once, device, shape.repetitions, warm=True)
                row |= {"seconds": seconds, "ratio": seconds / full, "bytes": _peak(device)}
                if profiled and device.type == "cuda":
                    row["where"] = _where_time_goes(once)
            yield row


def rows(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Runs that share model and text as rows of one batch, beside the same runs one after another."""
    import torch

    import tova
    from tova import EvictingCache, policies
    from tova.compat import cache_argument
    from tova.rows import SideBySide

    model = tova.enable(_model(shape, device, layers=1).model)
    name = cache_argument(model)
    x = torch.randn(1, shape.tokens, shape.hidden, device=device, dtype=getattr(torch, shape.dtype))
    recent = dict(recent_window=max(1, shape.budget // 32))
    options: dict[str, dict[str, Any]] = {"tova": {}, "h2o": recent, "scissorhands": recent, "snapkv": recent}
    made = [
        policies.make(policy, budget=budget, **parameters)
        for policy, parameters in options.items()
        for budget in (shape.budget // 2, shape.budget)
    ]

    def read(embedded: Tensor, cache: Any) -> None:
        model(inputs_embeds=embedded, use_cache=True, **{name: cache})

    row: Row = {"cells": len(made), "tokens": shape.tokens}
    with _reported(row), torch.inference_mode():
        alone = [EvictingCache(policy) for policy in made]
        together = [EvictingCache(policy) for policy in made]
        for cache in alone:
            read(x, cache)
        read(x.expand(len(made), -1, -1), SideBySide(together))
        row["decisions"] = sum(cache.evicted_at.numel() for cache in alone)
        row["different"] = sum(int((a.evicted_at != b.evicted_at).sum()) for a, b in zip(alone, together, strict=True))

        def one_by_one() -> None:
            for policy in made:
                read(x, EvictingCache(policy, log=False))

        def side_by_side() -> None:
            read(x.expand(len(made), -1, -1), SideBySide([EvictingCache(policy, log=False) for policy in made]))

        row["alone_seconds"] = _median(one_by_one, device, shape.repetitions)
        row["seconds"] = _median(side_by_side, device, shape.repetitions)
        row["ratio"] = row["seconds"] / row["alone_seconds"]
    yield row


def decode(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Tokens per second of the whole model, decoding ``length`` tokens from nothing, timed at places along them."""
    import torch

    import tova

    bandwidth, rate = _roofline(shape, device)
    model = _model(shape, device, layers=shape.layers)
    parameters = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    size = getattr(torch, shape.dtype).itemsize
    for budget, batch in shape.decode:
        row: Row = {"budget": budget, "batch": batch, "length": shape.length}
        with _reported(row), torch.inference_mode():
            _forget(device)
            if budget is None:
                model.set_attn_implementation("sdpa")
            else:
                tova.enable(model)
            places, graph = _decode_places(shape, model, device, budget, batch)
            held = [min(t, budget or t) for t in range(shape.length)]
            seconds = _integrate(places, held)
            if "graph_seconds" in graph:  # a full cache is decoded as a graph, one that fills up as usual
                filling = _integrate(places, [n for n in held if n < (budget or 0)])
                full = sum(n == budget for n in held) * graph["graph_seconds"]
                graph["graph_tokens_per_second"] = batch * shape.length / (filling + full)
            bound = sum(
                max(
                    (parameters * size + batch * n * shape.layers * 2 * shape.hidden * size) / bandwidth,
                    (2 * parameters + 4 * n * shape.hidden * shape.layers) * batch / rate,
                )
                for n in held
            )
            row |= {
                "places": places,
                "tokens_per_second": batch * shape.length / seconds,
                "bound_tokens_per_second": batch * shape.length / bound,
                "of_bound": bound * max(graph.get("graph_tokens_per_second", 0.0) / batch / shape.length, 1 / seconds),
                "bytes": _peak(device),
                **graph,
            }
        yield row


def _decode_places(
    shape: Shape, model: PreTrainedModel, device: torch.device, budget: int | None, batch: int
) -> tuple[list[tuple[int, float]], Row]:
    """(positions held, seconds per step) at places; and, on CUDA, a step of the full cache replayed as a graph.

    Past its budget a cache stays as it is, so an evicting one is timed up to there.
    """
    import torch
    from transformers import DynamicCache

    from tova import DecodeGraph, EvictingCache, policies
    from tova.compat import cache_argument

    name = cache_argument(model)
    if budget is None:
        cache: Any = DynamicCache(config=model.config)
        ends = shape.length - shape.steps - 1
    else:
        cache = EvictingCache(policies.make("tova", budget=budget), log=False)
        ends = budget + 1
    ids = torch.randint(3, shape.vocabulary, (batch, max(ends, shape.length) + 1), device=device)
    found = []
    at = 0
    for k in range(shape.places):
        place = max(at, 1, round(ends * k / (shape.places - 1)))
        while at < place:
            until = min(place, at + 256)
            model(input_ids=ids[:, at:until], use_cache=True, logits_to_keep=1, **{name: cache})
            at = until
        times = []
        for _ in range(shape.steps):
            one = functools.partial(model, input_ids=ids[:, at : at + 1], use_cache=True, **{name: cache})
            times.append(seconds_of(one, device))
            at = min(at + 1, ids.shape[1] - 2)
        found.append((min(place, budget or place), statistics.median(times[1:] or times)))
    graph: Row = {}
    if device.type == "cuda" and budget is not None:
        try:
            step = DecodeGraph(model, cache)
            for _ in range(5):  # until it is recorded
                step(ids[:, :1])
            graph["graph_seconds"] = _median(lambda: step(ids[:, :1]), device, 5)
        except Exception as e:
            graph["graph_error"] = f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"
    return found, graph


PARTS: dict[str, Callable[[Shape, Any], Iterator[Row]]] = {
    "card": card, "decisions": decisions, "launch": launch, "layer": layer, "long": long, "rows": rows,
    "decode": decode,
}  # fmt: skip


# -- what they share -----------------------------------------------------------------------------------------


class _reported:  # noqa: N801  # read as a word in a with statement
    """What goes wrong with one figure is written into its row, and the next one is tried."""

    def __init__(self, row: Row) -> None:
        self.row = row

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        if error is None or not isinstance(error, Exception):
            return False
        self.row["error"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
        return True


def _scans(device: torch.device) -> list[str]:
    from tova.scan import has_triton

    found = ["gpu"] if has_triton(device) else []
    return [*found, "fixed_point"] if device.type == "cuda" else [*found, "fixed_point", "reference"]


def _model(shape: Shape, device: torch.device, layers: int) -> Any:
    """A Llama of random weights, made on the device."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        max_position_embeddings=max(shape.long, shape.length),
    )
    before = torch.get_default_dtype()
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, shape.dtype))
    try:
        with device:
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(before)


def _empty(policy: Policy, rows: int, candidates: int, device: torch.device) -> Any:
    """Slots for ``candidates`` tokens that have yet to join."""
    import torch

    from tova.policies import Slots
    from tova.policies.base import new_records

    zeros = torch.zeros(rows, 1, dtype=torch.int64, device=device)
    return Slots(
        positions=torch.arange(candidates, device=device).repeat(rows, 1),
        held=torch.zeros(rows, candidates, dtype=torch.bool, device=device),
        records=new_records(policy, rows, candidates, torch.float32, device),
        observed=zeros,
        newest=zeros - 1,
    )


def _watched(policy: Policy) -> tuple[Policy, dict[int, Tensor]]:
    """The policy, and what it fills when the reference scan runs it: step -> [R], how close the two lowest scores are.

    Distances are relative to the second lowest.
    """
    gaps: dict[int, Tensor] = {}
    kind = type(policy)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def score(self, slots: Any) -> Tensor:
            score: Tensor = kind.score(self, slots)
            free = slots.held & ~self.protected(slots)
            two = score.double().masked_fill(~free, float("inf")).topk(2, largest=False).values
            gaps[int(slots.newest[0])] = (two[:, 1] - two[:, 0]) / two[:, 1].abs().clamp_min(1e-300)
            return score

    return Watched(**policy.parameters()), gaps


def _compared(last: Tensor, right: Tensor, gaps: dict[int, Tensor]) -> Row:
    """How many decisions differ, in how many sets, and how many of these begin at a near-tie."""
    import torch

    steps = right.shape[1]
    differs = last != right
    first = torch.where(differs, torch.minimum(last, right), steps).amin(1).tolist()
    begun = [(row, step) for row, step in enumerate(first) if step < steps]
    near = sum(step in gaps and float(gaps[step][row]) < NEAR for row, step in begun)
    ties = sum(int((gap < NEAR).sum()) for gap in gaps.values())
    return {
        "different": int(differs.sum()),
        "sets_different": len(begun),
        "from_a_near_tie": near,
        "unexcused": len(begun) - near,
        "near_ties": ties,
        "evictions": sum(len(gap) for gap in gaps.values()),
    }


def _median(run: Callable[[], Any], device: torch.device, repetitions: int, *, warm: bool = False) -> float:
    """Seconds, after one run that is not counted unless it is ``warm`` already."""
    if not warm:
        run()
    return statistics.median(seconds_of(run, device) for _ in range(repetitions))


def _forget(device: torch.device) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def _peak(device: torch.device) -> int | None:
    import torch

    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None


def _where_time_goes(run: Callable[[], Any]) -> dict[str, float]:
    """The eight kernels that take longest: seconds by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as prof:
        run()
    longest = sorted(prof.key_averages(), key=lambda event: -event.self_device_time_total)[:8]
    return {event.key[:80]: event.self_device_time_total / 1e6 for event in longest}


def _roofline(shape: Shape, device: torch.device) -> tuple[float, float]:
    """Bytes moved by a large copy, and floating-point operations of a large product, per second."""
    import torch

    cuda = device.type == "cuda"
    dtype = getattr(torch, shape.dtype)
    source = torch.empty(2**31 if cuda else 2**22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = _median(lambda: target.copy_(source), device, 5)
    n = 8192 if cuda else 256
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    product = _median(lambda: a @ b, device, 5)
    return 2 * source.numel() / copy, 2 * n**3 / product


def _integrate(places: list[tuple[int, float]], held: list[int]) -> float:
    """Seconds of steps that find ``held`` positions, linear between the places timed and level outside them."""
    total = 0.0
    for n in held:
        below = max((p for p in places if p[0] <= n), default=places[0])
        above = min((p for p in places if p[0] >= n), default=places[-1])
        share = 0.0 if above[0] == below[0] else (n - below[0]) / (above[0] - below[0])
        total += below[1] + share * (above[1] - below[1])
    return total


# -- what a reader gets --------------------------------------------------------------------------------------


def markdown(result: dict[str, Any]) -> str:
    """The result as Markdown tables."""
    made, rows = result["made"], result["rows"]
    lines = [
        f"# Replay and decoding on {made['card']}",
        "",
        f"{made['date']}; driver {made['driver']}, CUDA {made['cuda']}, torch {made['torch']}, triton "
        f"{made['triton']}, transformers {made['transformers']}, tova {made['tova']}, Python {made['python']}.",
    ]
    if made["tiny"]:
        lines += ["", "A tiny shape, to see that everything runs: **the figures mean nothing**."]

    def table(part: str, title: str, columns: dict[str, Callable[[Row], Any]]) -> None:
        mine = [row for row in rows if row["part"] == part]
        if part not in result["parts"]:
            return
        lines.extend(["", f"## {title}", ""])
        ended = result["parts"][part]
        if ended["ended"] != "ok":
            lines.extend([f"This part did not come to its end: {ended['ended']}.", ""])
        if not mine:
            lines.append("Nothing was measured.")
            return
        lines.extend(["| " + " | ".join(columns) + " |", "| " + " | ".join("---" for _ in columns) + " |"])
        for row in mine:
            cells = [_cell(column, row) for column in columns.values()]
            if "error" in row:
                cells[-1] = row["error"].replace("|", "/")
            lines.append("| " + " | ".join(cells) + " |")

    table("card", "The card, measured", {
        "TB/s copied": lambda r: r["bytes_per_second"] / 1e12, "TFLOP/s": lambda r: r["flops_per_second"] / 1e12,
    })  # fmt: skip
    table("decisions", "Decisions against the reference scan, on the same logits", {
        "policy": lambda r: r["policy"], "logits": lambda r: r["dtype"], "scan": lambda r: r["scan"],
        "rounds": lambda r: r["rounds"], "decisions": lambda r: r["decisions"], "different": lambda r: r["different"],
        "sets that differ": lambda r: r["sets_different"], "of them from a near-tie on": lambda r: r["from_a_near_tie"],
        "near-ties / evictions": lambda r: f"{r['near_ties']} / {r['evictions']}",
    })  # fmt: skip
    table("launch", "The scan kernel by launch", {
        "sets": lambda r: r["rows"], "tile": lambda r: r["tile"], "warps": lambda r: r["warps"],
        "a step ahead": lambda r: "yes" if r["ahead"] else "no",
        "microseconds a step": lambda r: r["microseconds_per_step"],
    })  # fmt: skip
    replays: dict[str, Callable[[Row], Any]] = {
        "batch": lambda r: r["batch"], "tokens": lambda r: r["tokens"], "budget": lambda r: r["budget"],
        "scan": lambda r: r["scan"], "chunk": lambda r: r["chunk"], "rounds": lambda r: r["rounds"],
        "ms": lambda r: 1e3 * r["seconds"], "GB": lambda r: r["bytes"] / 1e9, "of full attention": lambda r: r["ratio"],
    }  # fmt: skip
    longest = {
        "longest kernels, ms": lambda r: "; ".join(f"{1e3 * s:.1f} {k[:40]}" for k, s in [*r["where"].items()][:4])
    }
    table("layer", "One layer: replay beside full attention", replays | longest)
    table("long", "One long sequence", replays)
    table("rows", "Runs as rows of one batch, beside one after another", {
        "runs": lambda r: r["cells"], "tokens": lambda r: r["tokens"], "decisions": lambda r: r["decisions"],
        "different": lambda r: r["different"], "ms one after another": lambda r: 1e3 * r["alone_seconds"],
        "ms as rows": lambda r: 1e3 * r["seconds"], "of one after another": lambda r: r["ratio"],
    })  # fmt: skip
    full = [r["tokens_per_second"] for r in rows if r["part"] == "decode" and r["budget"] is None and "error" not in r]
    table("decode", "Decoding", {
        "budget": lambda r: r["budget"] or "full", "batch": lambda r: r["batch"], "length": lambda r: r["length"],
        "tokens/s": lambda r: r["tokens_per_second"], "of the full cache": lambda r: r["tokens_per_second"] / full[0],
        "bound, tokens/s": lambda r: r["bound_tokens_per_second"], "of the bound": lambda r: r["of_bound"],
        "GB": lambda r: r["bytes"] / 1e9,
        "ms a step: held": lambda r: ", ".join(f"{1e3 * s:.1f}: {n}" for n, s in r["places"]),
        "as a graph, ms": lambda r: 1e3 * r["graph_seconds"] if "graph_seconds" in r else r["graph_error"],
        "tokens/s with the graph": lambda r: r["graph_tokens_per_second"],
        "of the full cache with it": lambda r: r["graph_tokens_per_second"] / full[0],
    })  # fmt: skip
    lines += [
        "",
        "Near-tie: the two lowest scores of a step are within 1e-5 of each other. Bound: the larger of bytes (weights "
        "and cache) over the copy's rate and operations over the product's; the share of it is the better way's. With "
        "the graph: a full cache is decoded by tova.DecodeGraph, one that still fills up as usual. The full cache is "
        "transformers' DynamicCache.",
    ]
    return "\n".join(lines)


def _cell(column: Callable[[Row], Any], row: Row) -> str:
    try:
        value = column(row)
    except (KeyError, IndexError, TypeError):  # not measured for this row
        return ""
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 100 else f"{value:,.0f}"
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value).replace("|", "/")


def main() -> None:
    """The command line; ``--part`` is how a part is run in a process of its own."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("results/bench_gpu"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=list(SECONDS), default=list(SECONDS))
    parser.add_argument("--part", choices=list(SECONDS), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is None:
        try:
            print(markdown(measure(given.parts, given.device, given.tiny, given.out)))
        except UsageError as e:
            print(e, file=sys.stderr)
            sys.exit(2)
        return
    import torch

    with given.rows.open("w") as file:
        for row in PARTS[given.part](TINY if given.tiny else LLAMA_2_7B, torch.device(given.device)):
            file.write(json.dumps({"part": given.part, **row}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
