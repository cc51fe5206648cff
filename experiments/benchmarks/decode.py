"""What a decoded token costs: with an evicting cache beside an ordinary one that holds as many entries."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.benchmarks.axes import drawn, looks
from experiments.benchmarks.common import Benchmark, some_policies
from experiments.benchmarks.models import attending, model_and_text, read, step
from experiments.benchmarks.tables import crossed
from experiments.benchmarks.timing import in_turn, machine, threads
from experiments.options import boolean, integer, integers
from experiments.tasks import Context, Row
from tova.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor
    from transformers import PreTrainedModel

PLAIN, FULL, KVPRESS = "plain", "full", "kvpress tova"
_UNCOUNTED = 3


@dataclass(frozen=True)
class BenchDecode(Benchmark):
    """Times decode steps of the dataset's first document, the model's head included.

    At each budget one ordinary cache and one evicting cache per policy are filled with that many entries; then they
    take a step each in turn, again and again, and what is reported is the median of each and its ratio to the ordinary
    cache's. The ordinary cache gives its newest entry back after each step, untimed, so that it holds as many all
    along. Beside these, an ordinary cache that keeps everything is timed at a few lengths of the text.

    Args:
        policies: by name, with their own defaults.
        budgets: entries held.
        lengths: tokens the full cache has seen; none leaves it out.
        kvpress: also time kvpress' decoding press with its TOVA, compressing at every step; it must be installed.
        repetitions: steps of each cache, after three that are not counted.
        threads: of torch; null leaves its choice.

    Raises:
        UsageError: nothing to time, or a number below 1.
    """

    policies: Sequence[str] = ("tova", "h2o", "window", "snapkv")
    budgets: Sequence[int] = (128, 512, 2048)
    lengths: Sequence[int] = (1024, 4096)
    kvpress: bool = False
    repetitions: int = 30
    threads: int | None = None

    name = "bench_decode"
    uses_model = True

    def __post_init__(self) -> None:
        some_policies(self.policies)
        integers("task.budgets", self.budgets, 1)
        if self.lengths:
            integers("task.lengths", self.lengths, 1)
        integer("task.repetitions", self.repetitions, 1)
        if self.threads is not None:
            integer("task.threads", self.threads, 1)
        if boolean("task.kvpress", self.kvpress) and importlib.util.find_spec("kvpress") is None:
            raise UsageError(
                "task.kvpress=true: kvpress is not installed; it needs an environment of its own, with "
                "`pip install -e . 'kvpress==0.5.5' 'transformers<5.3'`"
            )

    def measure(self, context: Context) -> tuple[Row, dict[str, np.ndarray]]:
        import torch

        needed = max([*self.budgets, *self.lengths]) + self.repetitions + _UNCOUNTED
        model, ids, document = model_and_text(context, needed)
        together = 1 + len(self.policies) + self.kvpress
        context.expect(len(self.budgets) * together + len(self.lengths))
        found: list[Row] = []
        arrays: dict[str, np.ndarray] = {}
        done = 0

        def take(caches: dict[str, Any], holds: int) -> None:
            nonlocal done
            passes = {name: _stepping(model, ids, cache, holds, name) for name, cache in caches.items()}
            timed = in_turn(passes, self.repetitions, uncounted=_UNCOUNTED)
            plain = statistics.median(timed[PLAIN]) if PLAIN in timed else None
            for name, seconds in timed.items():
                median = statistics.median(seconds)
                ratio = None if plain is None else median / plain
                found.append({"cache": name, "holds": holds, "seconds": median, "ratio": ratio})
                arrays[f"{name}-{holds}"] = np.array(seconds)
            done += len(timed)
            context.advance(done)

        with threads(self.threads), torch.inference_mode():
            for budget in self.budgets:
                take(self._caches(budget), budget)
            for length in self.lengths:
                take({FULL: _ordinary_cache()}, length)
            row = {
                "document": document,
                "tokens": ids.shape[1],
                "steps": found,
                "repetitions": self.repetitions,
                "machine": machine(model),
            }
        return row, arrays

    def _caches(self, budget: int) -> dict[str, Any]:
        """What is timed side by side; all hold ``budget`` entries between steps."""
        from experiments.benchmarks.own import make
        from tova import EvictingCache

        caches: dict[str, Any] = {PLAIN: _ordinary_cache()}
        for name in self.policies:
            caches[name] = EvictingCache(make(name, budget), log=False, prefill="one_shot")
        if self.kvpress:
            caches[KVPRESS] = _ordinary_cache()
        return caches

    def table(self, summary: Row) -> str:
        """Milliseconds and ratios, a row per cache."""
        beside = [
            {**one, "cache": "ordinary" if one["cache"] == PLAIN else one["cache"]}
            for one in summary["steps"]
            if one["cache"] != FULL
        ]
        lines = [
            f"Milliseconds per decoded token (median of {summary['repetitions']}) and, in brackets, times the ordinary "
            f"cache holding as many entries; {summary['machine']}",
            "",
            *crossed(
                beside,
                "cache",
                "holds",
                lambda entries: f"{entries:,} entries",
                lambda one: f"{1000 * one['seconds']:.1f} ({one['ratio']:.2f})",
            ),
        ]
        full = [one for one in summary["steps"] if one["cache"] == FULL]
        if full:
            said = ", ".join(f"{1000 * one['seconds']:.1f} ms at {one['holds']:,} tokens" for one in full)
            lines += ["", f"A cache that keeps everything: {said}."]
        if any(one["cache"] == KVPRESS for one in beside):
            lines += ["", f"kvpress {version('kvpress')}: DecodingPress(TOVAPress()), interval 1."]
        return "\n".join(lines)

    def figure(self, summary: Row) -> Figure:
        """Milliseconds per token against what a cache holds, a line per cache."""
        steps = summary["steps"]
        ordinary: dict[str, dict[str, Any]] = {
            PLAIN: dict(color="black", linestyle="--", marker=".", label="ordinary cache, as many entries"),
            FULL: dict(color="black", linestyle=":", marker="+", label="ordinary cache, all tokens so far"),
        }
        look = looks()
        with drawn(
            summary["machine"],
            y="milliseconds per decoded token",
            x="entries a layer holds",
            ticks=[one["holds"] for one in steps],
        ) as (figure, axes):
            for cache in dict.fromkeys(one["cache"] for one in steps):
                points = sorted((one["holds"], 1000 * one["seconds"]) for one in steps if one["cache"] == cache)
                how = ordinary.get(cache) or {"label": cache, **look(cache)}
                axes.plot(*zip(*points, strict=True), **how)
        return figure


def _ordinary_cache() -> Any:
    """Made without the configuration: no layer gets a window of its own, so all can give back what they took."""
    from transformers import DynamicCache

    return DynamicCache()


def _stepping(model: PreTrainedModel, ids: Tensor, cache: Any, holds: int, name: str) -> Callable[[], float]:
    """Fill a cache with ``holds`` tokens; what is returned takes the next one each time, and says how long it took."""
    attending(model, cache)
    read(model, ids[:, :holds], cache)
    places = itertools.count(holds)

    def one() -> float:
        attending(model, cache)
        with _pressing(model, holds) if name == KVPRESS else contextlib.nullcontext():
            seconds = step(model, ids, next(places), cache)
        if name == PLAIN:
            cache.crop(-1)
        return seconds

    return one


def _pressing(model: PreTrainedModel, budget: int) -> Any:
    """A context in which kvpress cuts the cache back to ``budget`` by TOVA after every token."""
    from kvpress import DecodingPress, TOVAPress

    press = DecodingPress(TOVAPress(), compression_interval=1, target_size=budget, hidden_states_buffer_size=0)
    return press(model)
