"""How fast policies are simulated over the canonical trace, and how long its table of 21 rows takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.tasks import Context, Row
from experiments.tasks.timing import processor, require, require_policies, require_some, save

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from experiments.cells import Cell
    from tova.policies import Policy
    from tova.trace import Trace

TABLE = ("tova", "h2o", "scissorhands", "snapkv", "pyramidkv", "streaming_llm", "window")
TABLE_BUDGETS = (256, 512, 1024)


@dataclass(frozen=True)
class BenchSimulation:
    """Times ``simulate`` on the canonical trace, which is generated once, with its heavy hitters, and not counted.

    Every compiled policy is simulated ``repetitions`` times, in turn, and once by its running policy, which takes the
    same decisions step by step in torch. The table of 21 rows is timed from nothing, generation included.

    Args:
        started: when; a benchmark is measured anew each time it is asked for.
        policies: by name; those that are not compiled are timed by the running engine only.
        budget: positions kept.
        tokens: of the trace.
        repetitions: of the compiled engine, after one that is not counted.
        running: whether the running engine is timed too; it takes seconds per policy.

    Raises:
        UsageError: nothing to time, or a number out of its range.
    """

    started: str
    policies: Sequence[str] = (*TABLE, "h2o_half", "random")
    budget: int = 256
    tokens: int = 4096
    repetitions: int = 7
    running: bool = True

    name = "bench_simulation"
    uses_model = False
    needs_reference = False

    def __post_init__(self) -> None:
        require(self, budget=1, tokens=2, repetitions=1)
        require_some("policies", self.policies)
        require_policies(self.policies)

    @property
    def length(self) -> int:
        return self.tokens

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "started": self.started}

    def at_once(self, cell: Cell) -> int:
        return 1

    def run(self, batch: Sequence[Context]) -> Iterator[tuple[int, Row, dict[str, np.ndarray]]]:
        (context,) = batch
        from tova import policies as known
        from tova.simulation import simulate
        from tova.trace import canonical_trace

        trace = canonical_trace(tokens=self.tokens)
        if trace.name in context.done:
            return
        made = {name: known.make(name, budget=self.budget) for name in self.policies}
        compiled = {name: policy for name, policy in made.items() if _compiled(policy)}
        context.expect(len(made) * (1 + self.running))
        started = time.perf_counter()
        for policy in compiled.values():  # compiles the engine and works out the heavy hitters
            simulate(policy, trace, engine="compiled")
        warm_up = time.perf_counter() - started
        timed: dict[str, list[float]] = {name: [] for name in compiled}
        for _ in range(self.repetitions):
            for name, policy in compiled.items():
                timed[name].append(_seconds(policy, trace, "compiled"))
        context.advance(len(compiled))
        steps = len(trace)
        found: list[Row] = []
        for done, (name, policy) in enumerate(made.items(), start=1):
            row: Row = {"policy": name, "compiled": None, "running": None}
            if name in timed:
                row["compiled"] = steps / statistics.median(timed[name])
            if self.running or name not in timed:
                row["running"] = steps / _seconds(policy, trace, "running")
            found.append(row)
            context.advance(len(compiled) + done)
        table_seconds = _table_seconds(self.tokens)
        row = {
            "index": 0,
            "document": trace.name,
            "budget": self.budget,
            "tokens": self.tokens,
            "steps_per_second": found,
            "table_seconds": table_seconds,
            "warm_up_seconds": warm_up,
            "repetitions": self.repetitions,
            "machine": processor(),
            "started": self.started,
        }
        save(context, table(row), figure(row))
        yield 0, row, {name: np.array(seconds) for name, seconds in timed.items()}

    def summarise(self, rows: list[Row]) -> Row:
        return {k: v for k, v in rows[0].items() if k not in ("index", "document")}

    def describe(self, summary: Row) -> str | None:
        return table(summary)


def _compiled(policy: Policy) -> bool:
    from tova.simulation import _compiled

    return _compiled(policy)


def _seconds(policy: Policy, trace: Trace, engine: str) -> float:
    from tova.simulation import simulate

    started = time.perf_counter()
    simulate(policy, trace, engine=engine)
    return time.perf_counter() - started


def _table_seconds(tokens: int) -> float:
    """Seconds of all rows of the canonical table, from generating the trace on."""
    from tova import policies as known
    from tova.simulation import simulate
    from tova.trace import canonical_trace

    started = time.perf_counter()
    trace = canonical_trace(tokens=tokens)
    for name in TABLE:
        for budget in TABLE_BUDGETS:
            simulate(known.make(name, budget=budget), trace)
    return time.perf_counter() - started


def table(summary: Row) -> str:
    """Steps per second in Markdown, a row per policy."""
    lines = [
        f"Steps per second at budget {summary['budget']} on {summary['tokens']:,} tokens "
        f"(compiled: median of {summary['repetitions']}; running: once); {summary['machine']}",
        "",
        "| policy | compiled | running | times faster |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in summary["steps_per_second"]:
        both = row["compiled"] and row["running"]
        figures = [f"{row[engine]:,.0f}" if row[engine] else "" for engine in ("compiled", "running")]
        times = f"{row['compiled'] / row['running']:,.0f}" if both else ""
        lines.append(f"| {row['policy']} | {' | '.join([*figures, times])} |")
    lines += ["", f"The table of {len(TABLE) * len(TABLE_BUDGETS)} rows, generation included: "]
    lines[-1] += f"{summary['table_seconds']:.2f} s."
    return "\n".join(lines)


def figure(summary: Row) -> Figure:
    """Steps per second, a pair of bars per policy."""
    from matplotlib.figure import Figure

    rows = summary["steps_per_second"]
    drawn = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=150)
    axes = drawn.add_subplot(1, 1, 1)
    places = np.arange(len(rows))
    for engine, colour, shift in (("compiled", "#D55E00", -0.2), ("running", "#0072B2", 0.2)):
        heights = [row[engine] or np.nan for row in rows]
        if not np.isnan(heights).all():
            axes.bar(places + shift, heights, 0.4, color=colour, label=engine)
    axes.set_yscale("log")
    axes.set_xticks(places, [row["policy"] for row in rows], rotation=30, ha="right", fontsize=8)
    axes.set_ylabel(f"steps per second at budget {summary['budget']}")
    axes.set_title(summary["machine"], fontsize=9)
    axes.grid(True, axis="y", alpha=0.3)
    axes.legend(fontsize=8)
    return drawn
