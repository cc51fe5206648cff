"""A policy simulated over the canonical trace: no model, no data, exact to the last decimal."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments import options
from experiments.tasks import Context, Row

if TYPE_CHECKING:
    from experiments.cells import Cell


@dataclass(frozen=True)
class TraceTask:
    """Simulates a policy over the trace of ``seed`` and ``tokens``; the published figures are of the defaults."""

    seed: int = 7
    tokens: int = 4096

    name = "trace"
    uses_model = False
    needs_reference = False

    def __post_init__(self) -> None:
        options.integer("task.seed", self.seed, 0)
        options.integer("task.tokens", self.tokens, 2)

    @property
    def length(self) -> int:
        return self.tokens

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "seed": self.seed, "tokens": self.tokens}

    def at_once(self, cell: Cell) -> int:
        return 1

    def run(self, batch: Sequence[Context]) -> Iterator[tuple[int, Row, dict[str, np.ndarray]]]:
        (context,) = batch
        from tova.simulation import simulate

        trace = canonical(self.seed, self.tokens)
        if trace.name in context.done:
            return
        policy = context.cell.policy(self.tokens)
        context.expect(self.tokens)
        started = time.perf_counter()
        result = simulate(policy, trace)
        seconds = time.perf_counter() - started
        context.advance(self.tokens)
        yield (
            0,
            {
                "index": 0,
                "document": trace.name,
                "policy": policy.label,
                "budget": None if context.cell.budget is None else policy.budget,
                "tokens": self.tokens,
                "retained_mass": result.retained_mass_saturated,
                "retained_mass_all_steps": result.retained_mass,
                "heavy_hitter_recall": result.heavy_hitter_recall_saturated,
                "heavy_hitter_recall_all_steps": result.heavy_hitter_recall,
                "evict_calls": result.evict_calls,
                "seconds": seconds,
                "tokens_per_second": self.tokens / seconds,
            },
            {"mass": result.mass, "hits": result.hits, "evicted_at": result.evicted_at},
        )

    def summarise(self, rows: list[Row]) -> Row:
        return {k: v for k, v in rows[0].items() if k not in ("index", "document")}

    def describe(self, summary: Row) -> str | None:
        return None


@lru_cache(maxsize=1)
def canonical(seed: int, tokens: int) -> Any:
    """The trace with its heavy hitters worked out, shared by the cells of a process."""
    from tova.policies import Tova
    from tova.simulation import simulate
    from tova.trace import canonical_trace

    simulate(Tova(budget=4), canonical_trace(tokens=16))  # so that the first cell's speed is not that of compiling
    trace = canonical_trace(seed, tokens)
    simulate(Tova(budget=4), trace)  # works out, once, what all policies are measured against
    return trace
