"""The parts: each yields a row per figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from experiments.benchmarks.gpu.decisions import decisions
from experiments.benchmarks.gpu.shape import TINY, Shape
from experiments.benchmarks.gpu.shared import empty_slots, forget, peak, reported, scans
from experiments.benchmarks.models import attending, random_llama, steps_along
from experiments.benchmarks.timing import along, kernels_of, median_of
from experiments.tasks import Row

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel


def card(shape: Shape, device: torch.device) -> Iterator[Row]:
    """What the card can do at most, measured: bytes copied and products in the model's dtype, per second."""
    bandwidth, rate = _roofline(shape, device)
    yield {"bytes_per_second": bandwidth, "flops_per_second": rate}


def _roofline(shape: Shape, device: torch.device) -> tuple[float, float]:
    """Bytes moved by a large copy, and floating-point operations of a large product, per second."""
    import torch

    cuda = device.type == "cuda"
    dtype = getattr(torch, shape.dtype)
    source = torch.empty(2**31 if cuda else 2**22, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy = median_of(lambda: target.copy_(source), device, 5)
    n = 8192 if cuda else 256
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    product = median_of(lambda: a @ b, device, 5)
    return 2 * source.numel() / copy, 2 * n**3 / product


def _model(shape: Shape, device: torch.device, layers: int) -> Any:
    return random_llama(
        device,
        shape.dtype,
        layers=layers,
        heads=shape.heads,
        hidden=shape.hidden,
        intermediate=shape.intermediate,
        vocabulary=shape.vocabulary,
        positions=max(shape.long, shape.length),
    )


def launch(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Microseconds a step of the scan kernel, by how it is launched; one chunk, once the cache is full."""
    import torch

    from tova import policies
    from tova.scan import Chunk
    from tova.scan.select import has_triton

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
                slots = empty_slots(policy, rows, logits.shape[-1], device)
                slots.held[:, : shape.budget] = True
                gpu.decide(policy, Chunk(logits, slots, shape.budget, policy.schedule()))

            with reported(row):
                row["microseconds_per_step"] = 1e6 * median_of(once, device, shape.repetitions) / steps
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
    attending(model, None)
    with torch.inference_mode():
        full = median_of(lambda: model(inputs_embeds=x, use_cache=False), device, shape.repetitions)
    yield {**what, "scan": "full attention", "seconds": full}
    tova.enable(model)
    for scan in scans(device):
        for chunk in shape.chunks:
            row: Row = {**what, "scan": scan, "chunk": chunk}

            def once(scan: str = scan, chunk: int = chunk) -> None:
                cache = EvictingCache(policy, log=False, scan=scan, chunk=chunk)
                model(inputs_embeds=x, use_cache=True, **{name: cache})

            with reported(row), torch.inference_mode():
                forget(device)
                with fixed_point.counting() as heard:
                    once()
                if heard:
                    row["rounds"] = statistics.mean(solved.rounds for solved in heard)
                    row["one_by_one"] = sum(solved.one_by_one for solved in heard)
                seconds = median_of(once, device, shape.repetitions, uncounted=0)
                row |= {"seconds": seconds, "ratio": seconds / full, "bytes": peak(device)}
                if profiled and device.type == "cuda":
                    row["where"] = kernels_of(once)
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
    with reported(row), torch.inference_mode():
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

        row["alone_seconds"] = median_of(one_by_one, device, shape.repetitions)
        row["seconds"] = median_of(side_by_side, device, shape.repetitions)
        row["ratio"] = row["seconds"] / row["alone_seconds"]
    yield row


def decode(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Tokens per second of the whole model, decoding ``length`` tokens from nothing, timed at places along them."""
    import torch
    from transformers import DynamicCache

    bandwidth, rate = _roofline(shape, device)
    model = _model(shape, device, layers=shape.layers)
    parameters = sum(p.numel() for p in model.parameters()) - model.get_input_embeddings().weight.numel()
    size = getattr(torch, shape.dtype).itemsize
    for budget, batch in shape.decode:
        row: Row = {"budget": budget, "batch": batch, "length": shape.length}
        with reported(row), torch.inference_mode():
            forget(device)
            cache = DynamicCache(config=model.config) if budget is None else _evicting(budget)
            places = _places(shape, model, device, cache, budget, batch)
            graph = {} if budget is None or device.type != "cuda" else _as_graph(model, cache, batch, device)
            held = [min(t, budget or t) for t in range(shape.length)]
            seconds = along(places, held)
            if "graph_seconds" in graph:  # a full cache is decoded as a graph, one that fills up as usual
                filling = along(places, [n for n in held if n < (budget or 0)])
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
                "bytes": peak(device),
                **graph,
            }
        yield row


def _evicting(budget: int) -> Any:
    from tova import EvictingCache, policies

    return EvictingCache(policies.make("tova", budget=budget), log=False)


def _places(
    shape: Shape, model: PreTrainedModel, device: torch.device, cache: Any, budget: int | None, batch: int
) -> list[tuple[int, float]]:
    """(positions held, seconds per step) at places; past its budget a cache stays as it is: it is timed up to there."""
    import torch

    attending(model, cache)
    ends = shape.length - shape.steps - 2 if budget is None else budget + 1
    wanted = [max(1, round(ends * k / (shape.places - 1))) for k in range(shape.places)]
    tokens = ends + shape.places * (shape.steps + 1)
    ids = torch.randint(3, shape.vocabulary, (batch, tokens), device=device)
    found = steps_along(model, ids, cache, wanted, shape.steps)
    return [(min(place, budget or place), seconds) for place, seconds in found]


def _as_graph(model: PreTrainedModel, cache: Any, batch: int, device: torch.device) -> Row:
    """A step of a full cache replayed as a graph: how long it takes, or why it does not."""
    import torch

    from tova import DecodeGraph

    try:
        step = DecodeGraph(model, cache)
        ids = torch.full((batch, 1), 3, device=device)
        return {"graph_seconds": median_of(lambda: step(ids), device, 5, uncounted=5)}  # recorded in the first ones
    except Exception as e:
        return {"graph_error": f"{type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}"}


PARTS: dict[str, Callable[[Shape, Any], Iterator[Row]]] = {
    "card": card, "decisions": decisions, "launch": launch, "layer": layer, "long": long, "rows": rows,
    "decode": decode,
}  # fmt: skip
