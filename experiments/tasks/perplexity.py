"""Perplexity under eviction, and what became of the attention: every document teacher-forced in one replay."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.tasks import Context, Row
from tova.errors import UsageError

if TYPE_CHECKING:
    import torch

    from experiments.models import Loaded
    from tova.measures import AttentionReport
    from tova.observers import Seen


@dataclass(frozen=True)
class Perplexity:
    """Losses of every token but the first, and (``measures``) retained mass and heavy-hitter recall in closed loop.

    Args:
        measures: also measure the attention; costs about one more full attention and all keys of a document.
        batch_size: documents of equal length run as rows of one batch; the figures are the same.
        chunk: queries per block of the replay, null chooses; the figures are the same.
        scan: auto, reference or cpu; the figures are the same.
    """

    measures: bool = True
    batch_size: int = 1
    chunk: int | None = None
    scan: str = "auto"

    name = "perplexity"
    uses_model = True
    needs_reference = True
    length = None

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "measures": self.measures}

    def run(self, context: Context) -> Iterator[tuple[Row, dict[str, np.ndarray]]]:
        import torch

        assert context.cell.dataset is not None
        documents = list(enumerate(context.load_documents()))
        todo = [(i, d) for i, d in documents if d.name not in context.done]
        if not todo:
            return
        loaded = context.load_model()
        ids = {i: encode(loaded, d.text, context.cell.dataset.tokens, d.name) for i, d in todo}
        context.expect(sum(t.shape[0] for t in ids.values()))
        for batch in _batches(list(ids), ids, self.batch_size):
            names = {i: d for i, d in todo if i in batch}
            rows = self._measure(context, loaded, torch.stack([ids[i] for i in batch]))
            for index, (row, arrays) in zip(batch, rows, strict=True):
                document = names[index]
                reference = arrays if row["policy"] == "full" else context.reference(index)
                row |= {"index": index, "document": document.name, "text_sha256": document.sha256}
                row |= _losses(arrays["nll"], reference["nll"], row["saturated_from"])
                yield row, arrays

    def _measure(
        self, context: Context, loaded: Loaded, ids: torch.Tensor
    ) -> Iterator[tuple[Row, dict[str, np.ndarray]]]:
        from tova import EvictingCache
        from tova.measures import AttentionMeasures, token_nll

        batch, tokens = ids.shape
        policy = context.cell.policy(tokens)
        measures = AttentionMeasures() if self.measures else None
        ticker = _Ticker(context, batch * tokens, loaded.model.config.num_hidden_layers)
        prompt = context.cell.prompt.tokens(tokens) if context.cell.prompt is not None else 0
        cache = EvictingCache(
            policy,
            prefill=context.cell.prefill,
            evict_every=context.cell.evict_every,
            observers=[o for o in (measures, ticker) if o is not None],
            scan=self.scan,
            chunk=self.chunk,
        )
        started = time.perf_counter()
        nll = token_nll(loaded.model, ids.to(loaded.model.device), cache, prompt=prompt).float().cpu().numpy()
        seconds = (time.perf_counter() - started) / batch
        unbounded = context.cell.budget is None
        evicted_at = cache.evicted_at.cpu()
        held = (evicted_at > tokens).sum(-1).float().transpose(0, 1).flatten(1).mean(1)
        for r in range(batch):
            row: Row = {
                "policy": policy.label,
                "budget": None if unbounded else policy.budget,
                "tokens": tokens,
                "saturated_from": 0 if unbounded else max(policy.budget, prompt),
                "evict_every": context.cell.evict_every,
                "prefill": context.cell.prefill,
                "prompt": prompt,
                "held_mean": float(held[r]),
                "cache_bytes": cache.nbytes // batch,
                "seconds": seconds,
                "tokens_per_second": tokens / seconds,
                "context_exceeded": loaded.context is not None and tokens > loaded.context,
            }
            if measures is not None:
                row |= _attention(measures.report, row["saturated_from"], r)
            yield row, {"nll": nll[r]}

    def summarise(self, rows: list[Row]) -> Row:
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
        summary["perplexity"] = math.exp(summary["nll_all_steps"])
        summary["perplexity_saturated"] = math.exp(summary["nll"])
        summary["saturated_steps"] = sum(r["saturated_steps"] for r in rows)
        if self.measures:
            for suffix in ("", "_all_steps"):
                for figure in ("retained_mass", "retained_mass_with_self"):
                    summary[figure + suffix] = _mean(rows, figure + suffix, f"attention_steps{suffix}")
                hits = np.array([r["layers"][f"hits{suffix}"] for r in rows], dtype=float).sum(0)
                possible = np.array([r["layers"][f"possible{suffix}"] for r in rows], dtype=float).sum(0)
                summary[f"heavy_hitter_recall{suffix}"] = _ratio(hits, possible)
        return summary

    def describe(self, summary: Row) -> str | None:
        return None


def encode(loaded: Loaded, text: str, tokens: int | None, name: str) -> torch.Tensor:
    """int64 [T]: the text's first ``tokens`` tokens, with a BOS if the tokenizer puts one."""
    import torch

    # The beginning is enough, unless its tokens might reach the place where it was cut.
    ids = loaded.tokenizer(text if tokens is None else text[: 16 * tokens])["input_ids"]
    if tokens is not None and len(ids) < tokens + 64 and len(text) > 16 * tokens:
        ids = loaded.tokenizer(text)["input_ids"]
    if len(ids) < 2:
        raise UsageError(f"document {name}: has {len(ids)} tokens, perplexity needs at least 2")
    return torch.tensor(ids[:tokens], dtype=torch.int64)


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

    def __init__(self, context: Context, tokens: int, layers: int) -> None:
        self._advance = context.advance
        self._layers = layers

    def see(self, seen: Seen) -> None:
        self._advance(seen.query.shape[0] * seen.query.shape[2] / self._layers)


def _losses(nll: np.ndarray, full: np.ndarray, saturated_from: int) -> Row:
    """Mean loss and its difference from the full model's on the same tokens, over saturated and over all steps."""
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
        "perplexity": math.exp(mean(nll)),
    }


def _attention(report: AttentionReport, saturated_from: int, row: int) -> Row:
    """Averages over layers, over saturated and over all steps, and the figures of each layer."""
    out: Row = {"layers": {}}
    for suffix, first in (("", saturated_from), ("_all_steps", 0)):
        means = report.over(first, row)
        out[f"attention_steps{suffix}"] = means.steps
        out[f"retained_mass{suffix}"] = _nanmean(means.retained_mass)
        out[f"retained_mass_with_self{suffix}"] = _nanmean(means.retained_mass_with_self)
        out[f"heavy_hitter_recall{suffix}"] = _ratio(np.array(means.hits, float), np.array(means.possible, float))
        for figure in ("retained_mass", "retained_mass_with_self", "hits", "possible"):
            out["layers"][f"{figure}{suffix}"] = getattr(means, figure)
    return out


def _nanmean(values: list[float]) -> float:
    return float(np.mean(values)) if values and not any(math.isnan(v) for v in values) else float("nan")


def _ratio(hits: np.ndarray, possible: np.ndarray) -> float:
    """Recall pooled over steps within each layer, then averaged over layers."""
    return float(np.mean(hits / possible)) if possible.size and possible.min() > 0 else float("nan")


def _mean(rows: list[Row], figure: str, weight: str) -> float:
    """Mean over documents, each weighing as much as it has steps."""
    pairs = [(r[figure], r[weight]) for r in rows if r[weight] and r[figure] is not None]
    total = sum(w for _, w in pairs)
    return sum(v * w for v, w in pairs) / total if total else float("nan")
