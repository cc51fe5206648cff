"""Perplexity under eviction, and what became of the attention: every document teacher-forced in one replay."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import options
from experiments.lengths import prompt_tokens
from experiments.memory import free_bytes
from experiments.tasks import Context, Row
from tova.errors import UsageError

if TYPE_CHECKING:
    import torch

    from experiments.cells import Cell
    from experiments.models import Loaded
    from tova import EvictingCache
    from tova.measures import AttentionMeasures, AttentionReport
    from tova.observers import Seen
    from tova.policies import Policy


USUAL_CHUNK = 128
"""Queries per block, from which chunks are halved where memory is short."""


@dataclass(frozen=True)
class Perplexity:
    """Losses of every token but the first, and (``measures``) retained mass and heavy-hitter recall in closed loop.

    The same settings on one machine give the same bits. ``batch_size``, ``together``, ``chunk`` and ``scan`` decide
    how matrix products round: with others the decisions are the same but for near-ties, and losses to 1e-4 of a nat
    where none fell otherwise (docs/numerics.md says what was measured). So what is said for them is part of a
    result's address.

    Args:
        measures: also measure the attention; costs about one more full attention and all keys of a document.
        batch_size: documents of equal length run as rows of one batch.
        together: cells that share model and text, as rows of one batch: how many, or ``auto``: 8 on a GPU, 1 on a CPU.
        chunk: queries per block of the replay, null chooses.
        scan: auto, reference, cpu, gpu or fixed_point.
    """

    measures: bool = True
    batch_size: int = 1
    together: int | str = "auto"
    chunk: int | None = None
    scan: str = "auto"

    name = "perplexity"
    uses_model = True
    needs_reference = True
    length = None
    halvings = 3
    """How often chunks may be halved where memory is short."""

    def __post_init__(self) -> None:
        from tova.scan import SCANS

        options.boolean("task.measures", self.measures)
        options.integer("task.batch_size", self.batch_size, 1)
        if self.together != "auto":
            options.integer("task.together", self.together, 1, instead="auto")
        if self.chunk is not None:
            options.integer("task.chunk", self.chunk, 1, instead="null")
        options.one_of("task.scan", self.scan, SCANS)

    def check(self, cell: Cell, policy: Policy) -> None:
        """Whether the scan asked for can run the policy there."""
        if self.scan not in ("auto", "reference"):
            import torch

            from tova.scan import select

            dtype = getattr(torch, str(getattr(cell.model, "dtype", "float32")), torch.float32)
            try:
                select(self.scan, policy, torch.device(cell.device), dtype)
            except UsageError as e:
                raise UsageError(f"task.{e}") from e

    def identity(self) -> dict[str, Any]:
        rounding = {"batch_size": 1, "chunk": None, "scan": "auto"}
        given = {name: getattr(self, name) for name, usual in rounding.items() if getattr(self, name) != usual}
        if self.together not in ("auto", 1):
            given["together"] = self.together
        return {"name": self.name, "measures": self.measures, **given}

    def at_once(self, cell: Cell) -> int:
        if isinstance(self.together, int):
            return self.together
        # On a CPU rows of one batch take as long as one after the other, and round otherwise; on a GPU they share what
        # a single row leaves idle.
        return 8 if cell.device.startswith("cuda") else 1

    def run(self, batch: Sequence[Context]) -> Iterator[tuple[int, Row, dict[str, np.ndarray]]]:
        """Documents in order; each by all cells that have not done it, as rows of one batch while memory allows."""
        import torch

        cell = batch[0].cell
        assert cell.dataset is not None
        todo = {
            i: d
            for i, d in enumerate(batch[0].load_documents())
            if any(d.name not in context.done for context in batch)
        }
        if not todo:
            return
        loaded = batch[0].load_model()
        ids = {i: encode(loaded, d.text, cell.dataset.tokens, d.name) for i, d in todo.items()}
        batch[0].expect(sum(len(ids[i]) for i, d in todo.items() for c in batch if d.name not in c.done))
        for documents in _batches(list(ids), ids, self.batch_size):
            wanted = [n for n, c in enumerate(batch) if any(todo[i].name not in c.done for i in documents)]
            most = self._that_fit(loaded, len(ids[documents[0]]), len(wanted)) if len(documents) == 1 else 1
            for begin in range(0, len(wanted), most):
                part = wanted[begin : begin + most]
                # A cell alone takes several documents at once; several cells take one.
                texts = [[i for i in documents if todo[i].name not in batch[n].done] for n in part]
                which = [(n, i) for n, of_n in zip(part, texts, strict=True) for i in of_n]
                runs = self._measure([batch[n] for n in part], loaded, torch.stack([ids[i] for i in texts[0]]))
                for (n, index), (row, arrays) in zip(which, runs, strict=True):
                    reference = arrays if row["policy"] == "full" else batch[n].reference(index)
                    row |= {"index": index, "document": todo[index].name, "text_sha256": todo[index].sha256}
                    row |= _losses(arrays["nll"], reference["nll"], row["saturated_from"])
                    yield n, row, arrays

    def _that_fit(self, loaded: Loaded, tokens: int, rows: int) -> int:
        """How many rows of so many tokens fit into half the memory that is free; at least 1."""
        free = free_bytes(loaded.model.device)
        if free is None:
            return rows
        config = loaded.model.config.get_text_config()
        size = loaded.model.dtype.itemsize
        kept = config.num_hidden_layers * config.hidden_size * 2 * size if self.measures else 0
        row = tokens * (kept + 40 * config.hidden_size * size) + 2**29
        return max(1, min(rows, int(free / 2 // row)))

    def _measure(
        self, contexts: list[Context], loaded: Loaded, ids: torch.Tensor
    ) -> Iterator[tuple[Row, dict[str, np.ndarray]]]:
        """A row per batch row of ``ids`` for one cell, or a row per cell for a single text."""
        from tova import EvictingCache
        from tova.measures import AttentionMeasures, token_nll
        from tova.side_by_side import SideBySide

        batch, tokens = ids.shape
        cells = [context.cell for context in contexts]
        prompt = prompt_tokens(cells[0].prompt, tokens)
        chunk = self.chunk
        if smaller := contexts[0].smaller:
            chunk = max(8, (self.chunk or USUAL_CHUNK) >> smaller)
        ticker = _Ticker(contexts[0], loaded.model.config.num_hidden_layers)
        measures = [AttentionMeasures() if self.measures else None for _ in cells]
        caches = [
            EvictingCache(
                cell.policy(tokens),
                prefill=cell.prefill,
                evict_every=cell.evict_every,
                observers=[o for o in (measure, ticker) if o is not None],
                scan=self.scan,
                chunk=chunk,
            )
            for cell, measure in zip(cells, measures, strict=True)
        ]
        rows = batch if len(cells) == 1 else len(cells)
        cache = caches[0] if len(cells) == 1 else SideBySide(caches)
        started = time.perf_counter()
        ids = ids.to(loaded.model.device).expand(rows, -1)
        nll = token_nll(loaded.model, ids, cache, prompt=prompt).float().cpu().numpy()
        seconds = (time.perf_counter() - started) / rows
        for r in range(rows):
            which, within = (0, r) if len(cells) == 1 else (r, 0)
            row = self._row(cells[which], caches[which], measures[which], within, tokens, prompt)
            row |= {"seconds": seconds, "tokens_per_second": tokens / seconds}
            if smaller:
                row["chunk"] = chunk  # other chunks round otherwise: a row says so
            row["context_exceeded"] = loaded.context is not None and tokens > loaded.context
            yield row, {"nll": nll[r]}

    @staticmethod
    def _row(
        cell: Cell, cache: EvictingCache, measures: AttentionMeasures | None, r: int, tokens: int, prompt: int
    ) -> Row:
        policy = cell.policy(tokens)
        unbounded = cell.budget is None
        evicted_at = cache.evicted_at[:, r].cpu()
        row: Row = {
            "policy": policy.label,
            "budget": None if unbounded else policy.budget,
            "tokens": tokens,
            "saturated_from": 0 if unbounded else max(policy.budget, prompt),
            "evict_every": cell.evict_every,
            "prefill": cell.prefill,
            "prompt": prompt,
            "held_mean": float((evicted_at > tokens).sum(-1).double().mean()),
            "cache_bytes": cache.nbytes // cache.evicted_at.shape[1],
        }
        if measures is not None:
            row |= _attention(measures.report, row["saturated_from"], r)
        return row

    def summarise(self, rows: list[Row]) -> Row:
        from tova.measures import perplexity_of

        first = rows[0]
        summary: Row = {
            "policy": first["policy"],
            "budget": first["budget"] if all(r["budget"] == first["budget"] for r in rows) else None,
            "documents": len(rows),
            "tokens": sum(r["tokens"] for r in rows),
            "evict_every": first["evict_every"],
            "prefill": first["prefill"],
            "prompt": first["prompt"] if all(r["prompt"] == first["prompt"] for r in rows) else None,
            "seconds": sum(r["seconds"] for r in rows),
            "cache_bytes": max(r["cache_bytes"] for r in rows),
        }
        summary["tokens_per_second"] = summary["tokens"] / summary["seconds"]
        summary["held_mean"] = _mean(rows, "held_mean", "tokens")
        for suffix, weight in (("", "saturated_steps"), ("_all_steps", "steps")):
            for figure in ("nll", "delta_nll"):
                summary[figure + suffix] = _mean(rows, figure + suffix, weight)
        summary["perplexity"] = perplexity_of(summary["nll_all_steps"])
        summary["perplexity_saturated"] = perplexity_of(summary["nll"])
        # Absent from rows that were stored before it was counted.
        summary["tokens_not_finite"] = sum(r.get("tokens_not_finite", 0) for r in rows)
        summary["saturated_steps"] = sum(r["saturated_steps"] for r in rows)
        if self.measures:
            for suffix in ("", "_all_steps"):
                for figure in ("retained_mass", "retained_mass_with_self"):
                    summary[figure + suffix] = _mean(rows, figure + suffix, f"attention_steps{suffix}")
                hits = np.array([r["layers"][f"hits{suffix}"] for r in rows], dtype=float).sum(0)
                possible = np.array([r["layers"][f"possible{suffix}"] for r in rows], dtype=float).sum(0)
                known = not any(
                    _unknown(r["layers"][f"retained_mass{suffix}"]) for r in rows if r[f"attention_steps{suffix}"]
                )
                summary[f"heavy_hitter_recall{suffix}"] = _ratio(hits, possible) if known else float("nan")
        return summary

    def describe(self, summary: Row) -> str | None:
        return None


def encode(loaded: Loaded, text: str, tokens: int | None, name: str) -> torch.Tensor:
    """int64 [T]: the text's first ``tokens`` tokens, with a BOS if the tokenizer puts one.

    Raises:
        UsageError: there are too few of them, or the model cannot read them; the document is named.
    """
    import torch

    from tova.limits import check_text, positions

    # The beginning is enough, unless its tokens might reach the place where it was cut.
    ids = loaded.tokenizer(text if tokens is None else text[: 16 * tokens])["input_ids"]
    if tokens is not None and len(ids) < tokens + 64 and len(text) > 16 * tokens:
        ids = loaded.tokenizer(text)["input_ids"]
    if len(ids) < 2:
        raise UsageError(f"document {name}: has {len(ids)} tokens, perplexity needs at least 2")
    found = torch.tensor(ids[:tokens], dtype=torch.int64)
    room = positions(loaded.model)
    if room is not None and len(found) > room:
        raise UsageError(
            f"document {name}: {len(found)} tokens are more than the {room} positions this model has; take "
            f"dataset.tokens={room} or fewer"
        )
    try:
        check_text(loaded.model, found.unsqueeze(0))
    except UsageError as e:
        raise UsageError(f"document {name}: {e}") from e
    return found


def _batches(order: list[int], ids: dict[int, torch.Tensor], size: int) -> Iterator[list[int]]:
    """Consecutive documents of equal length, at most ``size`` at a time."""
    batch: list[int] = []
    for index in order:
        if batch and (len(batch) == size or ids[batch[0]].shape != ids[index].shape):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


class _Ticker:
    """Observer that reports progress: a layer of a text is its share of the text's tokens."""

    def __init__(self, context: Context, layers: int) -> None:
        self._advance = context.advance
        self._layers = layers

    def see(self, seen: Seen) -> None:
        self._advance(seen.query.shape[0] * seen.query.shape[2] / self._layers)


def _losses(nll: np.ndarray, full: np.ndarray, saturated_from: int) -> Row:
    """Mean loss and its difference from the full model's on the same tokens, over saturated and over all steps.

    A loss that is NaN or infinite makes the means it is in so; how many are, and at which token of the document the
    first is, stands beside them.
    """
    from tova.measures import perplexity_of

    lost = ~np.isfinite(nll)
    nll, full = nll.astype(np.float64), full.astype(np.float64)
    late, late_full = nll[saturated_from:], full[saturated_from:]

    def mean(values: np.ndarray) -> float:
        return float(values.mean()) if len(values) else float("nan")

    return {
        "steps": len(nll),
        "saturated_steps": len(late),
        "nll": mean(late),
        "nll_all_steps": mean(nll),
        "delta_nll": mean(late - late_full),
        "delta_nll_all_steps": mean(nll - full),
        "perplexity": perplexity_of(mean(nll)),
        "tokens_not_finite": int(lost.sum()),
        "first_not_finite": int(lost.argmax()) + 1 if lost.any() else None,
    }


def _attention(report: AttentionReport, saturated_from: int, row: int) -> Row:
    """Averages over layers, over saturated and over all steps, and the figures of each layer."""
    out: Row = {"layers": {}}
    for suffix, first in (("", saturated_from), ("_all_steps", 0)):
        means = report.over(first, row)
        out[f"attention_steps{suffix}"] = means.steps
        out[f"retained_mass{suffix}"] = _nanmean(means.retained_mass)
        out[f"retained_mass_with_self{suffix}"] = _nanmean(means.retained_mass_with_self)
        recall = _ratio(np.array(means.hits, float), np.array(means.possible, float))
        out[f"heavy_hitter_recall{suffix}"] = float("nan") if _unknown(means.retained_mass) else recall
        for figure in ("retained_mass", "retained_mass_with_self", "hits", "possible"):
            out["layers"][f"{figure}{suffix}"] = getattr(means, figure)
    return out


def _unknown(values: list[float]) -> bool:
    """Whether there is a layer without a figure: it has no steps that count, or its attention was NaN."""
    return any(math.isnan(v) for v in values)


def _nanmean(values: list[float]) -> float:
    return float(np.mean(values)) if values and not _unknown(values) else float("nan")


def _ratio(hits: np.ndarray, possible: np.ndarray) -> float:
    """Recall pooled over steps within each layer, then averaged over layers."""
    return float(np.mean(hits / possible)) if possible.size and possible.min() > 0 else float("nan")


def _mean(rows: list[Row], figure: str, weight: str) -> float:
    """Mean over documents, each weighing as much as it has steps."""
    pairs = [(r[figure], r[weight]) for r in rows if r[weight] and r[figure] is not None]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else float("nan")
