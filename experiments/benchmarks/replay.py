"""What a replay costs: beside the full-attention forward of the same text, and beside decoding it token by token."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.benchmarks.axes import drawn, looks
from experiments.benchmarks.common import Benchmark, some_policies
from experiments.benchmarks.models import attending, model_and_text, steps_along
from experiments.benchmarks.tables import crossed
from experiments.benchmarks.timing import along, in_turn, machine, seconds_of, spans_of, threads
from experiments.options import boolean, integer, integers
from experiments.tasks import Context, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor
    from transformers import PreTrainedModel

    from tova.policies import Policy

FULL, MEASURES = "full attention", "measures"
DECODE_PLAIN, DECODE_EVICTING = "decoded, plain cache", "decoded, evicting cache"
_PARTS = {
    "tova::logits": "logits of a chunk against what is held",
    "tova::scan": "scan: who is dropped when, and the weights",
    "tova::mix": "weights times values (in other threads, beside the next scan)",
    "tova::carry": "carrying the survivors on",
}
_ALL = "all of it"


@dataclass(frozen=True)
class BenchReplay(Benchmark):
    """Times the dataset's first document at a few lengths, the model's head included on every side.

    Forward (SDPA) and replays are taken in turn, again and again; reported are the median of each and its ratio to the
    forward's, all from one run. At the least length decoding is timed too, at a few places along the text and
    integrated, since all of it would take minutes; and one replay more, watched by torch's profiler, says where the
    time goes.

    Args:
        lengths: tokens.
        policies: beside the cell's own, by name and with their own defaults; at the cell's budget.
        repetitions: of each, after one that is not counted.
        measures: also time the cell's policy with retained mass and recall.
        places: how many places along the text decoding is timed at; 0 leaves it out.
        steps: decode steps timed at each place, after one that is not counted.
        threads: of torch; null leaves its choice.

    Raises:
        UsageError: a number out of its range, or a policy that is none.
    """

    lengths: Sequence[int] = (4096, 8192)
    policies: Sequence[str] = ("window", "streaming_llm", "decay")
    repetitions: int = 3
    measures: bool = True
    places: int = 5
    steps: int = 8
    threads: int | None = None

    name = "bench_replay"
    uses_model = True

    def __post_init__(self) -> None:
        integers("task.lengths", self.lengths, 2)
        if self.policies:
            some_policies(self.policies)
        integer("task.repetitions", self.repetitions, 1)
        boolean("task.measures", self.measures)
        integer("task.places", self.places, 0)
        integer("task.steps", self.steps, 1)
        if self.threads is not None:
            integer("task.threads", self.threads, 1)

    def measure(self, context: Context) -> tuple[Row, dict[str, np.ndarray]]:
        model, text, document = model_and_text(context, max(self.lengths))
        own = context.cell.policy(max(self.lengths))
        shortest = text[:, : min(self.lengths)]
        context.expect(sum(self.lengths))
        timed: list[Row] = []
        arrays: dict[str, np.ndarray] = {}
        decode: dict[str, list[tuple[int, float]]] = {}
        with threads(self.threads):
            for n, length in enumerate(self.lengths):
                done = sum(self.lengths[:n])
                passes = self._passes(model, text[:, :length], own)
                tell = functools.partial(_tell, context, done, length)
                seconds = in_turn(passes, self.repetitions, tell=tell)
                medians = {what: statistics.median(each) for what, each in seconds.items()}
                timed += _beside(medians[FULL], length, medians)
                arrays |= {f"{what}-{length}": np.array(each) for what, each in seconds.items()}
            where = _where(model, shortest, own)
            if self.places:
                decode = {what: self._decode(model, shortest, own, what) for what in (DECODE_PLAIN, DECODE_EVICTING)}
                tokens = min(self.lengths)
                whole = {what: along(steps, range(tokens)) for what, steps in decode.items()}
                forward = next(one["seconds"] for one in timed if (one["what"], one["tokens"]) == (FULL, tokens))
                timed += _beside(forward, tokens, whole)
            row = {
                "document": document,
                "policy": own.label,
                "budget": own.budget,
                "tokens": max(self.lengths),
                "timed": timed,
                "where": where,
                "decode_steps": decode,
                "repetitions": self.repetitions,
                "machine": machine(model),
            }
        return row, arrays

    def _passes(self, model: PreTrainedModel, ids: Tensor, own: Policy) -> dict[str, Callable[[], float]]:
        """What is timed: each reads ``ids`` with a fresh cache."""
        from experiments.benchmarks.own import make as policy_of
        from tova import EvictingCache
        from tova.measures import AttentionMeasures, token_nll

        others = {name: policy_of(name, own.budget) for name in self.policies if name != own.name}
        made: dict[str, Callable[[], Any]] = {FULL: lambda: None}
        for label, policy in {own.label: own, **others}.items():
            made[label] = functools.partial(EvictingCache, policy, log=False)
        if self.measures:
            made[f"{own.label}, {MEASURES}"] = lambda: EvictingCache(own, observers=[AttentionMeasures()])

        def seconds(make: Callable[[], Any]) -> float:
            cache = make()
            attending(model, cache)
            return seconds_of(lambda: token_nll(model, ids, cache), model.device)

        return {what: functools.partial(seconds, make) for what, make in made.items()}

    def _decode(self, model: PreTrainedModel, ids: Tensor, own: Policy, what: str) -> list[tuple[int, float]]:
        """(position, seconds per step) at places along the text."""
        import torch
        from transformers import DynamicCache

        from tova import EvictingCache

        evicting = what == DECODE_EVICTING
        cache = EvictingCache(own, log=False) if evicting else DynamicCache(config=model.config)
        places = np.linspace(1, ids.shape[1] - self.steps - 2, self.places).astype(int).tolist()
        attending(model, cache)
        with torch.inference_mode():
            return steps_along(model, ids, cache, places, self.steps)

    def table(self, summary: Row) -> str:
        """Seconds and ratios, a row per pass."""
        where, total = summary["where"], summary["where"][_ALL]
        lines = [
            f"Seconds (median of {summary['repetitions']}, decoding integrated along the text) and, in brackets, times "
            f"the full-attention forward; budget {summary['budget']}; {summary['machine']}",
            "",
            *crossed(
                [{**one, "pass": _called(one["what"])} for one in summary["timed"]],
                "pass",
                "tokens",
                lambda tokens: f"{tokens:,} tokens",
                lambda one: f"{one['seconds']:.2f} ({one['ratio']:.2f})",
            ),
            "",
            f"Where one replay of {min(one['tokens'] for one in summary['timed']):,} tokens by {summary['policy']} "
            f"spends its {total:.2f} s:",
            "",
            *(f"- {what}: {where[what]:.2f} s ({where[what] / total:.0%})" for what in where if what != _ALL),
            "- the rest: the model's linear layers, its head and the loss",
        ]
        for what, places in summary["decode_steps"].items():
            steps = ", ".join(f"{1000 * s:.0f} ms at {p:,}" for p, s in places)
            lines += ["", f"A step {what}: {steps}."]
        return "\n".join(lines)

    def figure(self, summary: Row) -> Figure:
        """Times the full-attention forward against the length, a line per replay."""
        timed = [one for one in summary["timed"] if _is_replay(one["what"])]
        look = looks()
        with drawn(
            f"budget {summary['budget']}; {summary['machine']}",
            y="seconds over those of the full-attention forward",
            x="tokens",
            ticks=[one["tokens"] for one in timed],
        ) as (figure, axes):
            axes.axhline(1.0, color="black", linestyle="--", linewidth=1, label="full-attention forward")
            for what in dict.fromkeys(one["what"] for one in timed):
                points = sorted((one["tokens"], one["ratio"]) for one in timed if one["what"] == what)
                axes.plot(*zip(*points, strict=True), label=_called(what), **look(what))
        return figure


def _beside(forward: float, tokens: int, seconds: dict[str, float]) -> list[Row]:
    """A row for each of ``seconds``, with its ratio to those of the forward."""
    return [{"what": what, "tokens": tokens, "seconds": s, "ratio": s / forward} for what, s in seconds.items()]


def _is_replay(what: str) -> bool:
    return what not in (FULL, DECODE_PLAIN, DECODE_EVICTING)


def _called(what: str) -> str:
    return f"replay: {what}" if _is_replay(what) else what


def _tell(context: Context, done: float, whole: float, share: float) -> None:
    context.advance(done + share * whole)


def _where(model: PreTrainedModel, ids: Tensor, policy: Policy) -> dict[str, float]:
    """Seconds of one replay by part, and of all; the rest is the model's own layers, its head, and the loss."""
    from tova import EvictingCache
    from tova.measures import token_nll

    cache = EvictingCache(policy, log=False)
    attending(model, cache)
    total = 0.0

    def run() -> None:
        nonlocal total
        total = seconds_of(lambda: token_nll(model, ids, cache), model.device)

    spans = spans_of(run)
    return {what: spans[part] for part, what in _PARTS.items() if part in spans} | {_ALL: total}
