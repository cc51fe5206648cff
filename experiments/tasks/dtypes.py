"""How often a run in half precision keeps other tokens than the same run in float32."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import options
from experiments.tasks import Context, Row
from experiments.tasks.perplexity import encode
from tova.errors import UsageError

if TYPE_CHECKING:
    import torch

    from experiments.cells import Cell
    from tova.policies import Policy


@dataclass(frozen=True)
class Dtypes:
    """The cell's policy on each document, in the model's configured dtype and in ``against``, compared step by step.

    Records and ranking are float32 on both sides; what differs is the model's own arithmetic, and with it attention.
    Compared is what each layer holds after every step from the budget on: the share of those (layer, step) pairs with
    exactly the same set, the share of a set that both hold, and the losses.

    Args:
        against: bfloat16 or float16; the cell's ``model.dtype`` is the other side.
    """

    against: str = "bfloat16"

    name = "dtypes"
    uses_model = True
    needs_reference = False
    length = None
    takes_prompts = False

    def __post_init__(self) -> None:
        options.one_of("task.against", self.against, ("bfloat16", "float16"))

    def check(self, cell: Cell, policy: Policy) -> None:
        """Whether there is something to compare."""
        assert cell.model is not None
        if not hasattr(cell.model, "dtype"):
            raise UsageError(f"task=dtypes: model {cell.model.label} has no option dtype")
        if cell.budget is None:
            raise UsageError(f"policy={policy.name}: drops nothing, so task=dtypes has nothing to compare")

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "against": self.against}

    def at_once(self, cell: Cell) -> int:
        return 1

    def run(self, batch: Sequence[Context]) -> Iterator[tuple[int, Row, dict[str, np.ndarray]]]:
        (context,) = batch
        cell = context.cell
        assert cell.model is not None
        assert cell.dataset is not None
        todo = [(i, d) for i, d in enumerate(context.load_documents()) if d.name not in context.done]
        if not todo:
            return
        loaded = context.load_model()
        other = dataclasses.replace(cell.model, dtype=self.against).load(cell.device)  # type: ignore[type-var]
        texts = {i: encode(loaded, d.text, cell.dataset.tokens, d.name) for i, d in todo}
        context.expect(sum(len(ids) for ids in texts.values()))
        for index, document in todo:
            tokens = len(texts[index])
            started = time.perf_counter()
            ours, ours_nll = self._run(loaded.model, texts[index], context)
            theirs, theirs_nll = self._run(other.model, texts[index], context)
            policy = cell.policy(tokens)
            same, shared = agreement(ours, theirs, policy.budget)
            seconds = time.perf_counter() - started
            row: Row = {
                "index": index,
                "document": document.name,
                "policy": f"{policy.label} {self.against}",
                "budget": policy.budget,
                "tokens": tokens,
                "seconds": seconds,
                "tokens_per_second": 2 * tokens / seconds,
                "against": self.against,
                "same_sets": float(same.mean()),
                "shared": float(shared.mean()),
                "shared_by_layer": shared.mean(1).tolist(),
                "nll": float(ours_nll.mean(dtype=np.float64)),
                "nll_against": float(theirs_nll.mean(dtype=np.float64)),
            }
            yield 0, row, {"same": same, "shared": shared}
            context.advance(tokens)

    @staticmethod
    def _run(model: Any, ids: torch.Tensor, context: Context) -> tuple[np.ndarray, np.ndarray]:
        from tova import EvictingCache
        from tova.measures import token_nll

        cache = EvictingCache(context.cell.policy(len(ids)), evict_every=context.cell.evict_every)
        nll = token_nll(model, ids.unsqueeze(0).to(model.device), cache)[0].float().cpu().numpy()
        return cache.evicted_at[:, 0].cpu().numpy(), nll

    def summarise(self, rows: list[Row]) -> Row:
        summary = {k: rows[0][k] for k in ("policy", "budget", "against")}
        summary |= {"documents": len(rows), "tokens": sum(r["tokens"] for r in rows)}
        summary["seconds"] = sum(r["seconds"] for r in rows)
        summary["tokens_per_second"] = 2 * summary["tokens"] / summary["seconds"]
        for figure in ("same_sets", "shared", "nll", "nll_against"):
            summary[figure] = float(np.average([r[figure] for r in rows], weights=[r["tokens"] for r in rows]))
        summary["shared_by_layer"] = np.mean([r["shared_by_layer"] for r in rows], axis=0).tolist()
        return summary

    def describe(self, summary: Row) -> str | None:
        layers = summary["shared_by_layer"]
        return (
            f"{summary['policy']}, budget {summary['budget']}, {summary['documents']} documents: in half precision "
            f"{100 * summary['same_sets']:.1f}% of all (layer, step) pairs from the budget on hold exactly the same "
            f"tokens; of a set {100 * summary['shared']:.2f}% are in both (first layer {100 * layers[0]:.2f}%, least "
            f"{100 * min(layers):.2f}%); loss {summary['nll']:.4f} against {summary['nll_against']:.4f} nats per token"
        )


def agreement(ours: np.ndarray, theirs: np.ndarray, first: int, block: int = 256) -> tuple[np.ndarray, np.ndarray]:
    """What two runs hold after each step.

    Args:
        ours, theirs: int64 [layers, ..., T], the last step at which each token was visible.
        first: the first step that counts.

    Returns:
        bool [layers, T - first] whether the sets are equal, and float [layers, T - first]: the share of the larger
        set that is in both. With a kept set per head, over all heads of a layer together.
    """
    layers, tokens = ours.shape[0], ours.shape[-1]
    ours, theirs = ours.reshape(layers, -1, tokens), theirs.reshape(layers, -1, tokens)
    position = np.arange(tokens)
    same, shared = [], []
    for begin in range(first, tokens, block):
        step = np.arange(begin, min(begin + block, tokens))[:, None]
        written = position <= step
        a = (ours[:, :, None, :] > step) & written
        b = (theirs[:, :, None, :] > step) & written
        both = (a & b).sum((1, 3))
        larger = np.maximum(a.sum((1, 3)), b.sum((1, 3)))
        same.append((a == b).all((1, 3)))
        shared.append(both / np.maximum(larger, 1))
    if not same:
        raise UsageError(f"task=dtypes: a text of {tokens} tokens never exceeds budget={first}; take a smaller budget")
    return np.concatenate(same, 1), np.concatenate(shared, 1)
