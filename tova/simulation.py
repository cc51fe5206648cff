"""A policy against a stream of attention rows: what would it have kept, and how much of the attention was there?

The kept set starts as {0}. At step t the policy is shown the step's weights at its kept positions (not
renormalised), the step is measured, the token joins, and if more than the budget are kept the policy evicts. The
measurement comes before the step's eviction: it is what the model would have had at that step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from tova.errors import UsageError, renamed
from tova.kernels import compile
from tova.policies.base import MOST, Policy, integer
from tova.trace import Trace

NEVER = np.iinfo(np.int64).max
"""``evicted_at`` of a position that was never dropped."""
ENGINES = ("auto", "stepwise", "compiled")


@dataclass(frozen=True)
class Simulation:
    """What a policy retained, step by step. Arrays over steps hold step t at index t - 1.

    Attributes:
        budget: positions kept between steps.
        mass: float64 [steps], sum of the step's weights on kept positions.
        hits: int64 [steps], how many of the step's ``min(32, t)`` most-attended positions were kept.
        possible: int64 [steps], ``min(32, t)``.
        evicted_at: int64 [tokens], the step after whose attention a position was dropped; ``NEVER`` if it was not.
        evict_calls: how often the policy was asked to evict.
    """

    budget: int
    mass: np.ndarray
    hits: np.ndarray
    possible: np.ndarray
    evicted_at: np.ndarray
    evict_calls: int

    @property
    def retained_mass(self) -> float:
        """Mean over all steps of the weight on kept positions."""
        return float(self.mass.mean())

    @property
    def heavy_hitter_recall(self) -> float:
        """Total hits over total possible, over all steps."""
        return float(self.hits.sum() / self.possible.sum())

    @property
    def retained_mass_saturated(self) -> float:
        """Mean over the steps t >= budget; NaN if there are none. Before, nothing had been dropped."""
        return float(self.mass[self.budget - 1 :].mean()) if self.budget <= len(self.mass) else float("nan")

    @property
    def heavy_hitter_recall_saturated(self) -> float:
        """Hits over possible, over the steps t >= budget; NaN if there are none."""
        hits, possible = self.hits[self.budget - 1 :], self.possible[self.budget - 1 :]
        return float(hits.sum() / possible.sum()) if len(hits) else float("nan")

    @property
    def kept(self) -> list[int]:
        """The positions held at the end, ascending."""
        return np.flatnonzero(self.evicted_at == NEVER).tolist()


def simulate(policy: Policy | Any, trace: Trace, engine: str = "auto") -> Simulation:
    """Run ``policy`` over ``trace``, records in float64.

    Args:
        policy: a :class:`~tova.policies.base.Policy`, or anything with ``layer_budget`` (or ``budget``) and a
            ``start()`` that gives an object with ``on_decode_step(pos, attn)`` and ``evict(budget)``.
        engine: ``stepwise`` drives the policy token by token; ``compiled`` is its rule in numba, decision for decision
        the
            same; ``auto`` takes the compiled one where it can.

    Raises:
        UsageError: the policy returned a position it does not hold, or too few; the message names the step.
    """
    if engine == "running":
        renamed("engine=running", "engine=stepwise")
        engine = "stepwise"
    if engine not in ENGINES:
        raise UsageError(f"engine must be one of {', '.join(ENGINES)}, got {engine!r}")
    budget = _checked(_budget_of(policy))
    if getattr(policy, "prompt_only", False):
        raise UsageError(
            f"{policy.name} selects once, at the end of a prompt: there is none on a trace of decode steps"
        )
    possible = np.array([len(top) for top in trace.heavy_hitters])
    if engine != "stepwise" and _compiled(policy):
        from tova import simulation_engine

        mass, hits, evicted_at, evict_calls = simulation_engine.run(policy, budget, trace.flat, trace.heavy_table)
        return Simulation(budget, mass, hits, possible, evicted_at, evict_calls)
    if engine == "compiled":
        raise UsageError(f"engine=compiled needs numba and a policy that can be compiled, not {policy.name}")
    stepwise = policy.start()
    steps = len(trace)
    held = np.zeros(steps + 1, dtype=bool)
    held[0] = True
    kept = [0]
    evicted_at = np.full(steps + 1, NEVER)
    mass = np.zeros(steps)
    hits = np.zeros(steps, dtype=np.int64)
    evict_calls = 0
    for t, row in trace:
        attn = row[kept]
        mass[t - 1] = attn.sum(dtype=np.float64)
        hits[t - 1] = held[trace.heavy_hitters[t - 1]].sum()
        stepwise.on_decode_step(t, attn)
        kept.append(t)
        held[t] = True
        if len(kept) > budget:
            evict_calls += 1
            for position in stepwise.evict(budget):
                if not (0 <= position <= t and held[position]):
                    raise UsageError(f"{policy.name}: step {t}: evicted position {position}, which is not held")
                held[position] = False
                evicted_at[position] = t
            kept = [position for position in kept if held[position]]
            if len(kept) > budget:
                raise UsageError(f"{policy.name}: step {t}: {len(kept)} positions remain, more than budget={budget}")
    return Simulation(budget, mass, hits, possible, evicted_at, evict_calls)


def _checked(budget: Any) -> int:
    number = integer(budget)
    if number is None or not 1 <= number <= MOST:
        raise UsageError(f"budget must be an integer of at least 1 and at most {MOST}, got {budget!r}")
    return number


def _budget_of(policy: Any) -> Any:
    """What ``policy`` says it holds; one that is no :class:`Policy` may say so by the name of old."""
    for name in ("layer_budget",) if isinstance(policy, Policy) else ("layer_budget", "effective_budget"):
        if (budget := getattr(policy, name, None)) is not None:
            return budget
    return policy.budget


def _compiled(policy: Any) -> bool:
    if not compile.available():
        return False
    from tova import simulation_engine

    return isinstance(policy, Policy) and simulation_engine.supports(policy)


def bound_topk(trace: Trace, budget: int) -> float:
    """Mean over steps of the ``budget`` largest weights of the full row: no policy can retain more mass.

    It picks anew at every step from all tokens, so it is a bound and not a policy.
    """
    budget = _checked(budget)
    return float(np.mean([np.sort(row)[-budget:].sum(dtype=np.float64) for row in trace.rows]))


@dataclass(frozen=True)
class Oracle:
    """A real policy with foresight (open loop only): drops the position with the least *future* attention.

    It is greedy, so it bounds nothing; it shows what knowing the future of this trace would be worth. Ties go to
    the lower position. Takes the trace it is to foresee.
    """

    trace: Trace
    budget: int
    name: str = "oracle"

    def start(self) -> _StepwiseOracle:
        return _StepwiseOracle(self.trace)


class _StepwiseOracle:
    def __init__(self, trace: Trace) -> None:
        self._rows = trace.rows
        self._future = np.zeros(len(trace) + 1)
        for row in trace.rows:
            self._future[: len(row)] += row
        self._held = np.zeros(len(trace) + 1, dtype=bool)
        self._held[0] = True

    def on_decode_step(self, pos: int, attn: Any) -> None:
        row = self._rows[pos - 1]
        self._future[: len(row)] -= row
        self._held[pos] = True

    def evict(self, budget: int) -> list[int]:
        kept = np.flatnonzero(self._held)
        order = np.argsort(self._future[kept], kind="stable")
        victims = np.sort(kept[order[: len(kept) - budget]])
        self._held[victims] = False
        return victims.tolist()
