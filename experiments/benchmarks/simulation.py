"""How fast policies are simulated over the canonical trace, and how long its table of 21 rows takes."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from experiments.benchmarks.axes import drawn
from experiments.benchmarks.common import Benchmark, some_policies
from experiments.benchmarks.tables import table
from experiments.benchmarks.timing import in_turn, seconds_of
from experiments.options import boolean, integer
from experiments.provenance import processor
from experiments.tasks import Context, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tova.policies import Policy
    from tova.trace import Trace

TABLE = ("tova", "h2o", "scissorhands", "snapkv", "pyramidkv", "streaming_llm", "window")
TABLE_BUDGETS = (256, 512, 1024)


@dataclass(frozen=True)
class BenchSimulation(Benchmark):
    """Times ``simulate`` on the canonical trace, which is generated once, with its heavy hitters, and not counted.

    Every compiled policy is simulated ``repetitions`` times, in turn, and once by its stepwise policy, which takes the
    same decisions step by step in torch. The table of 21 rows is timed from nothing, generation included.

    Args:
        policies: by name; those that are not compiled are timed by the stepwise engine only.
        budget: positions kept.
        tokens: of the trace.
        repetitions: of the compiled engine, after one that is not counted.
        running: whether the stepwise engine is timed too; it takes seconds per policy.

    Raises:
        UsageError: nothing to time, or a number out of its range.
    """

    policies: Sequence[str] = (*TABLE, "h2o_half", "random", "decay")
    budget: int = 256
    tokens: int = 4096
    repetitions: int = 7
    running: bool = True

    name = "bench_simulation"

    def __post_init__(self) -> None:
        some_policies(self.policies)
        integer("task.budget", self.budget, 1)
        integer("task.tokens", self.tokens, 2)
        integer("task.repetitions", self.repetitions, 1)
        boolean("task.running", self.running)

    @property
    def length(self) -> int:
        return self.tokens

    def measure(self, context: Context) -> tuple[Row, dict[str, np.ndarray]]:
        from experiments.benchmarks.own import make
        from tova.trace import canonical_trace

        trace = canonical_trace(tokens=self.tokens)
        made = {name: make(name, self.budget) for name in self.policies}
        passes = {
            name: functools.partial(_seconds, policy, trace, "compiled")
            for name, policy in made.items()
            if _compiled(policy)
        }
        context.expect(len(made) * (1 + self.running))
        # The first compiles the engine, and works out the heavy hitters.
        warm_up = sum(one() for one in passes.values())
        timed = in_turn(passes, self.repetitions, uncounted=0)
        context.advance(len(passes))
        found: list[Row] = []
        for done, (name, policy) in enumerate(made.items(), start=1):
            speeds: Row = {"policy": name, "compiled": None, "stepwise": None}
            if name in timed:
                speeds["compiled"] = len(trace) / statistics.median(timed[name])
            if self.running or name not in timed:
                speeds["stepwise"] = len(trace) / _seconds(policy, trace, "stepwise")
            found.append(speeds)
            context.advance(len(passes) + done)
        row = {
            "document": trace.name,
            "budget": self.budget,
            "tokens": self.tokens,
            "steps_per_second": found,
            "table_seconds": seconds_of(functools.partial(_canonical_table, self.tokens)),
            "warm_up_seconds": warm_up,
            "repetitions": self.repetitions,
            "machine": processor(),
        }
        return row, {name: np.array(seconds) for name, seconds in timed.items()}

    def table(self, summary: Row) -> str:
        """Steps per second, a row per policy."""

        def figures(row: Row) -> list[str]:
            compiled, stepwise = row["compiled"], row["stepwise"]
            times = f"{compiled / stepwise:,.0f}" if compiled and stepwise else ""
            return [row["policy"], *(f"{n:,.0f}" if n else "" for n in (compiled, stepwise)), times]

        lines = [
            f"Steps per second at budget {summary['budget']} on {summary['tokens']:,} tokens "
            f"(compiled: median of {summary['repetitions']}; stepwise: once); {summary['machine']}",
            "",
            *table(["policy", "compiled", "stepwise", "times faster"], map(figures, summary["steps_per_second"])),
            "",
            f"The table of {len(TABLE) * len(TABLE_BUDGETS)} rows, generation included: "
            f"{summary['table_seconds']:.2f} s.",
        ]
        return "\n".join(lines)

    def figure(self, summary: Row) -> Figure:
        """Steps per second, a pair of bars per policy."""
        rows = summary["steps_per_second"]
        places = np.arange(len(rows))
        with drawn(summary["machine"], y=f"steps per second at budget {summary['budget']}") as (figure, axes):
            for engine, colour, shift in (("compiled", "#D55E00", -0.2), ("stepwise", "#0072B2", 0.2)):
                heights = [row[engine] or np.nan for row in rows]
                if not np.isnan(heights).all():
                    axes.bar(places + shift, heights, 0.4, color=colour, label=engine)
            axes.set_yscale("log")
            axes.set_xticks(places, [row["policy"] for row in rows], rotation=30, ha="right", fontsize=8)
            axes.grid(False, axis="x")
        return figure


def _compiled(policy: Policy) -> bool:
    from tova.simulation import _compiled

    return _compiled(policy)


def _seconds(policy: Policy, trace: Trace, engine: str) -> float:
    from tova.simulation import simulate

    return seconds_of(lambda: simulate(policy, trace, engine=engine))


def _canonical_table(tokens: int) -> None:
    """All rows of the canonical table, from generating the trace on."""
    from tova import policies as known
    from tova.simulation import simulate
    from tova.trace import canonical_trace

    trace = canonical_trace(tokens=tokens)
    for name in TABLE:
        for budget in TABLE_BUDGETS:
            simulate(known.make(name, budget=budget), trace)
