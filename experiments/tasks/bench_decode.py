"""What a decoded token costs: with an evicting cache beside an ordinary one that holds as many entries."""

from __future__ import annotations

import contextlib
import importlib.util
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.tasks import Context, Row
from experiments.tasks.perplexity import encode
from experiments.tasks.timing import (
    machine,
    require,
    require_integers,
    require_policies,
    require_some,
    save,
    seconds_of,
)
from tova.errors import UsageError

if TYPE_CHECKING:
    import torch
    from matplotlib.figure import Figure
    from transformers import PreTrainedModel

    from experiments.cells import Cell

PLAIN, FULL, KVPRESS = "plain", "full", "kvpress tova"
_WARM_UP = 3


@dataclass(frozen=True)
class BenchDecode:
    """Times decode steps of the dataset's first document, the model's head included.

    At each budget one ordinary cache and one evicting cache per policy are filled with that many entries; then they
    take a step each in turn, again and again, and what is reported is the median of each and its ratio to the ordinary
    cache's. The ordinary cache gives its newest entry back after each step, untimed, so that it holds as many all
    along. Beside these, an ordinary cache that keeps everything is timed at a few lengths of the text.

    Args:
        started: when; a benchmark is measured anew each time it is asked for.
        policies: by name, with their own defaults.
        budgets: entries held.
        lengths: tokens the full cache has seen.
        kvpress: also time kvpress' decoding press with its TOVA, compressing at every step; it must be installed.
        repetitions: steps of each cache, after three that are not counted.
        threads: of torch; null leaves its choice.

    Raises:
        UsageError: nothing to time, or a number below 1.
    """

    started: str
    policies: Sequence[str] = ("tova", "h2o", "window", "snapkv")
    budgets: Sequence[int] = (128, 512, 2048)
    lengths: Sequence[int] = (1024, 4096)
    kvpress: bool = False
    repetitions: int = 30
    threads: int | None = None

    name = "bench_decode"
    uses_model = True
    needs_reference = False
    length = None

    def __post_init__(self) -> None:
        require(self, repetitions=1)
        require_some("policies", self.policies)
        require_policies(self.policies)
        require_some("budgets", self.budgets)
        require_integers("budgets", self.budgets, 1)
        require_integers("lengths", self.lengths, 1)
        if self.kvpress and importlib.util.find_spec("kvpress") is None:
            raise UsageError(
                "task.kvpress=true: kvpress is not installed; it needs an environment of its own, with "
                "`pip install -e . 'kvpress==0.5.5' 'transformers<5.3'`"
            )

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "started": self.started}

    def at_once(self, cell: Cell) -> int:
        return 1

    def run(self, batch: Sequence[Context]) -> Iterator[tuple[int, Row, dict[str, np.ndarray]]]:
        (context,) = batch
        import torch

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        assert context.cell.dataset is not None
        document = context.load_documents()[0]
        if document.name in context.done:
            return
        loaded = context.load_model()
        model = loaded.model
        ids = encode(loaded, document.text, context.cell.dataset.tokens, document.name).unsqueeze(0).to(model.device)
        steps = self.repetitions + _WARM_UP
        needed = max([*self.budgets, *self.lengths]) + steps
        if ids.shape[1] < needed:
            raise UsageError(
                f"{document.name} has {ids.shape[1]} tokens; these budgets, lengths and repetitions need {needed}"
            )
        context.expect(len(self.budgets) * (1 + len(self.policies)) + len(self.lengths))
        found: list[Row] = []
        arrays: dict[str, np.ndarray] = {}
        done = 0
        for budget in self.budgets:
            timed = self._side_by_side(model, ids, budget)
            plain = statistics.median(timed[PLAIN])
            for cache, seconds in timed.items():
                median = statistics.median(seconds)
                found.append({"cache": cache, "holds": budget, "seconds": median, "ratio": median / plain})
                arrays[f"{cache}-{budget}"] = np.array(seconds)
            done += len(timed)
            context.advance(done)
        for length in self.lengths:
            seconds = self._full(model, ids, length)
            found.append({"cache": FULL, "holds": length, "seconds": statistics.median(seconds), "ratio": None})
            arrays[f"{FULL}-{length}"] = np.array(seconds)
            done += 1
            context.advance(done)
        row: Row = {
            "index": 0,
            "document": document.name,
            "tokens": ids.shape[1],
            "steps": found,
            "repetitions": self.repetitions,
            "machine": machine(model),
            "started": self.started,
        }
        save(context, table(row), figure(row))
        yield 0, row, arrays

    def _side_by_side(self, model: PreTrainedModel, ids: torch.Tensor, budget: int) -> dict[str, list[float]]:
        """Seconds of each step by cache; all hold ``budget`` entries between steps."""
        import torch

        from tova import EvictingCache
        from tova import policies as known
        from tova.attention import NAME

        plain = _ordinary_cache()
        evicting = {
            name: EvictingCache(known.make(name, budget=budget), log=False, prefill="one_shot")
            for name in self.policies
        }
        caches = {PLAIN: plain, **evicting}
        if self.kvpress:
            caches[KVPRESS] = _ordinary_cache()
        with torch.inference_mode():
            for name, cache in caches.items():
                model.set_attn_implementation(NAME if name in evicting else "sdpa")
                _read(model, ids, 0, budget, cache)
            timed: dict[str, list[float]] = {name: [] for name in caches}
            for at in range(budget, budget + self.repetitions + _WARM_UP):
                for name, cache in caches.items():
                    model.set_attn_implementation(NAME if name in evicting else "sdpa")
                    with _pressing(model, budget) if name == KVPRESS else contextlib.nullcontext():
                        timed[name].append(_step(model, ids, at, cache))
                plain.crop(-1)
        return {name: seconds[_WARM_UP:] for name, seconds in timed.items()}

    def _full(self, model: PreTrainedModel, ids: torch.Tensor, length: int) -> list[float]:
        """Seconds of each step of a cache that keeps everything, from ``length`` tokens on."""
        import torch

        from tova.attention import NAME

        cache = _ordinary_cache()
        model.set_attn_implementation("sdpa")
        with torch.inference_mode():
            _read(model, ids, 0, length, cache)
            seconds = [_step(model, ids, length + i, cache) for i in range(self.repetitions + _WARM_UP)]
        model.set_attn_implementation(NAME)
        return seconds[_WARM_UP:]

    def summarise(self, rows: list[Row]) -> Row:
        return {k: v for k, v in rows[0].items() if k not in ("index", "document")}

    def describe(self, summary: Row) -> str | None:
        return table(summary)


def table(summary: Row) -> str:
    """Milliseconds and ratios in Markdown, a row per cache."""
    steps = summary["steps"]
    if any(step["cache"] == KVPRESS for step in steps):
        lines_after = ["", f"kvpress {version('kvpress')}: DecodingPress(TOVAPress()), interval 1."]
    else:
        lines_after = []
    budgets = sorted({step["holds"] for step in steps if step["cache"] != FULL})
    lines = [
        f"Milliseconds per decoded token (median of {summary['repetitions']}) and, in brackets, times the ordinary "
        f"cache holding as many entries; {summary['machine']}",
        "",
        f"| cache | {' | '.join(f'{budget:,} entries' for budget in budgets)} |",
        f"| --- |{' ---: |' * len(budgets)}",
    ]
    for cache in dict.fromkeys(step["cache"] for step in steps if step["cache"] != FULL):
        by_budget = {step["holds"]: step for step in steps if step["cache"] == cache}
        cells = [f"{1000 * by_budget[b]['seconds']:.1f} ({by_budget[b]['ratio']:.2f})" for b in budgets]
        lines.append(f"| {'ordinary' if cache == PLAIN else cache} | {' | '.join(cells)} |")
    full = [f"{1000 * s['seconds']:.1f} ms at {s['holds']:,} tokens" for s in steps if s["cache"] == FULL]
    if full:
        lines += ["", f"A cache that keeps everything: {', '.join(full)}."]
    return "\n".join([*lines, *lines_after])


def figure(summary: Row) -> Figure:
    """Milliseconds per token against what a cache holds, a line per cache."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    from experiments.report.figures import _LOOKS, _OTHERS

    steps = summary["steps"]
    drawn = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=150)
    axes = drawn.add_subplot(1, 1, 1)
    others = iter(_OTHERS * 8)
    for cache in dict.fromkeys(step["cache"] for step in steps):
        points = sorted((s["holds"], 1000 * s["seconds"]) for s in steps if s["cache"] == cache)
        if cache == PLAIN:
            looks: dict[str, Any] = dict(
                color="black", linestyle="--", marker=".", label="ordinary cache, as many entries"
            )
        elif cache == FULL:
            looks = dict(color="black", linestyle=":", marker="+", label="ordinary cache, all tokens so far")
        else:
            colour, marker = _LOOKS.get(cache) or next(others)
            looks = dict(color=colour, marker=marker, label=cache)
        axes.plot([holds for holds, _ in points], [ms for _, ms in points], **looks)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({step["holds"] for step in steps})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("entries a layer holds")
    axes.set_ylabel("milliseconds per decoded token")
    axes.set_title(summary["machine"], fontsize=9)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
    return drawn


def _ordinary_cache() -> Any:
    """Made without the configuration: no layer gets a window of its own, so all can give back what they took."""
    from transformers import DynamicCache

    return DynamicCache()


def _pressing(model: PreTrainedModel, budget: int) -> Any:
    """A context in which kvpress cuts the cache back to ``budget`` by TOVA after every token."""
    from kvpress import DecodingPress, TOVAPress

    press = DecodingPress(TOVAPress(), compression_interval=1, target_size=budget, hidden_states_buffer_size=0)
    return press(model)


def _read(model: PreTrainedModel, ids: torch.Tensor, begin: int, end: int, cache: Any) -> None:
    """Fill a cache with tokens ``begin`` to ``end``, a few hundred at a time: all their logits would not fit."""
    from tova.compat import cache_argument

    name = cache_argument(model)
    for at in range(begin, end, 512):
        model(input_ids=ids[:, at : min(at + 512, end)], use_cache=True, **{name: cache})


def _step(model: PreTrainedModel, ids: torch.Tensor, at: int, cache: Any) -> float:
    """Seconds for token ``at``."""
    from tova.compat import cache_argument

    arguments = {"input_ids": ids[:, at : at + 1], "use_cache": True, cache_argument(model): cache}
    return seconds_of(lambda: model(**arguments), model.device)
