"""What a replay costs: beside the full-attention forward of the same text, and beside decoding it token by token."""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
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
    from tova.policies import Policy

FULL, MEASURES = "full attention", "measures"
DECODE_PLAIN, DECODE_EVICTING = "decoded, plain cache", "decoded, evicting cache"


@dataclass(frozen=True)
class BenchReplay:
    """Times the dataset's first document at a few lengths, the model's head included on every side.

    Forward (SDPA) and replays are taken in turn, again and again; reported are the median of each and its ratio to the
    forward's, all from one run. At the first length decoding is timed too, at a few places along the text and
    integrated, since all of it would take minutes; and one replay more says where the time goes.

    Args:
        started: when; a benchmark is measured anew each time it is asked for.
        lengths: tokens.
        policies: beside the cell's own, by name and with their own defaults; at the cell's budget.
        repetitions: of each, after one that is not counted.
        measures: also time the cell's policy with retained mass and recall.
        places: how many places along the text decoding is timed at; 0 leaves it out.
        steps: decode steps timed at each place.
        threads: of torch; null leaves its choice.

    Raises:
        UsageError: a number below 1, or a policy that is none.
    """

    started: str
    lengths: Sequence[int] = (4096, 8192)
    policies: Sequence[str] = ("window", "streaming_llm")
    repetitions: int = 3
    measures: bool = True
    places: int = 5
    steps: int = 8
    threads: int | None = None

    name = "bench_replay"
    uses_model = True
    needs_reference = False
    length = None

    def __post_init__(self) -> None:
        require(self, repetitions=1, places=0, steps=1)
        require_some("lengths", self.lengths)
        require_integers("lengths", self.lengths, 2)
        require_policies(self.policies)

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "started": self.started}

    def at_once(self, cell: Cell) -> int:
        return 1

    def run(self, batch: Sequence[Context]) -> Iterator[tuple[int, Row, dict[str, np.ndarray]]]:
        (context,) = batch
        import torch

        from tova import policies

        if self.threads is not None:
            torch.set_num_threads(self.threads)
        document = context.load_documents()[0]
        if document.name in context.done:
            return
        loaded = context.load_model()
        model = loaded.model
        text = encode(loaded, document.text, max(self.lengths), document.name).unsqueeze(0).to(model.device)
        if text.shape[1] < max(self.lengths):
            raise UsageError(f"{document.name} has {text.shape[1]} tokens; task.lengths asks for {max(self.lengths)}")
        own = context.cell.policy(max(self.lengths))
        made = {own.label: own} | {n: policies.make(n, budget=own.budget) for n in self.policies if n != own.name}
        context.expect(sum(self.lengths) * (self.repetitions + 1))
        found: list[Row] = []
        arrays: dict[str, np.ndarray] = {}
        done = 0.0
        for length in self.lengths:
            whole = length * (self.repetitions + 1)
            timed = self._in_turn(model, text[:, :length], made, own, functools.partial(_tell, context, done, whole))
            done += whole
            forward = statistics.median(timed[FULL])
            for what, seconds in timed.items():
                median = statistics.median(seconds)
                found.append({"what": what, "tokens": length, "seconds": median, "ratio": median / forward})
                arrays[f"{what}-{length}"] = np.array(seconds)
        shortest = text[:, : self.lengths[0]]
        where = _where(model, shortest, own)
        decode: dict[str, list[tuple[int, float]]] = {}
        if self.places:
            decode = {
                DECODE_PLAIN: self._decode(model, shortest, None),
                DECODE_EVICTING: self._decode(model, shortest, own),
            }
            forward = next(f["seconds"] for f in found if f["what"] == FULL)
            for what, steps in decode.items():
                all_steps = _integrate(steps, self.lengths[0])
                ratio = all_steps / forward
                found.append({"what": what, "tokens": self.lengths[0], "seconds": all_steps, "ratio": ratio})
        row: Row = {
            "index": 0,
            "document": document.name,
            "policy": own.label,
            "budget": own.budget,
            "tokens": max(self.lengths),
            "timed": found,
            "where": where,
            "decode_steps": decode,
            "repetitions": self.repetitions,
            "machine": machine(model),
            "started": self.started,
        }
        save(context, table(row), figure(row))
        yield 0, row, arrays

    def _in_turn(
        self,
        model: PreTrainedModel,
        ids: torch.Tensor,
        made: dict[str, Policy],
        own: Policy,
        advance: Callable[[float], None],
    ) -> dict[str, list[float]]:
        """Seconds of each pass by what it is."""
        import tova
        from tova import EvictingCache
        from tova.measures import AttentionMeasures, token_nll

        passes: dict[str, Callable[[], Any]] = {FULL: lambda: token_nll(model, ids)}
        for label, policy in made.items():
            passes[label] = functools.partial(
                lambda policy: token_nll(model, ids, EvictingCache(policy, log=False)), policy
            )
        if self.measures:
            passes[f"{own.label}, {MEASURES}"] = lambda: token_nll(
                model, ids, EvictingCache(own, observers=[AttentionMeasures()])
            )
        timed: dict[str, list[float]] = {what: [] for what in passes}
        for repetition in range(self.repetitions + 1):
            for number, (what, one) in enumerate(passes.items(), start=1):
                model.set_attn_implementation("sdpa")
                if what != FULL:
                    tova.enable(model)
                timed[what].append(seconds_of(one, model.device))
                advance((repetition + number / len(passes)) / (self.repetitions + 1))
        return {what: seconds[1:] for what, seconds in timed.items()}

    def _decode(self, model: PreTrainedModel, ids: torch.Tensor, policy: Policy | None) -> list[tuple[int, float]]:
        """(position, seconds per step) at places along the text, with a plain cache or an evicting one."""
        import torch
        from transformers import DynamicCache

        import tova
        from tova import EvictingCache
        from tova.compat import cache_argument

        name = cache_argument(model)
        tokens = ids.shape[1]
        places = np.linspace(1, tokens - self.steps - 1, self.places).astype(int)
        if policy is None:
            model.set_attn_implementation("sdpa")
        cache = DynamicCache(config=model.config) if policy is None else EvictingCache(policy, log=False)
        out = []
        at = 0
        with torch.inference_mode():
            for place in places:
                while at < place:  # a few hundred tokens at a time: logits of all at once would not fit everywhere
                    until = min(int(place), at + 512)
                    model(input_ids=ids[:, at:until], use_cache=True, **{name: cache})
                    at = until
                step = []
                for _ in range(self.steps):
                    one = functools.partial(model, input_ids=ids[:, at : at + 1], use_cache=True, **{name: cache})
                    step.append(seconds_of(one, model.device))
                    at += 1
                out.append((int(place), statistics.median(step)))
        tova.enable(model)
        return out

    def summarise(self, rows: list[Row]) -> Row:
        return {k: v for k, v in rows[0].items() if k not in ("index", "document")}

    def describe(self, summary: Row) -> str | None:
        return table(summary)


def _tell(context: Context, done: float, whole: float, share: float) -> None:
    context.advance(done + share * whole)


_PARTS = (
    "logits of a chunk against what is held",
    "scan: who is dropped when, and the weights",
    "weights times values (in other threads, beside the next scan)",
    "carrying the survivors on",
)


def _where(model: PreTrainedModel, ids: torch.Tensor, policy: Policy) -> dict[str, float]:
    """Seconds of one replay by part; the rest is the model's own layers, its head, and the loss."""
    from tova import EvictingCache, products, replay
    from tova.measures import token_nll

    spent = dict.fromkeys(_PARTS, 0.0)
    logits, scan, mix, carry = _PARTS

    def timed(part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                spent[part] += time.perf_counter() - started

        return run

    cache = EvictingCache(policy, log=False)
    with contextlib.ExitStack() as undo:
        for owner, name, part in (
            (products.Alone, "logits", logits),
            (products.Alone, "mix", mix),
            (products.Shared, "logits", logits),
            (products, "_mix", mix),
            (replay, "_compact", carry),
        ):
            original = getattr(owner, name)
            undo.callback(setattr, owner, name, original)
            setattr(owner, name, timed(part, original))
        chunks: Any = replay._chunks
        undo.callback(setattr, replay, "_chunks", chunks)

        def with_timed_scan(*arguments: Any) -> Any:
            return chunks(*[timed(scan, a) if n == 5 else a for n, a in enumerate(arguments)])

        setattr(replay, "_chunks", with_timed_scan)  # noqa: B010
        started = time.perf_counter()
        token_nll(model, ids, cache)
        total = time.perf_counter() - started
    return {**spent, "all of it": total}


def table(summary: Row) -> str:
    """Seconds and ratios in Markdown, a row per pass."""
    timed = summary["timed"]
    lengths = sorted({t["tokens"] for t in timed})
    lines = [
        f"Seconds (median of {summary['repetitions']}, decoding integrated along the text) and, in brackets, times the "
        f"full-attention forward; budget {summary['budget']}; {summary['machine']}",
        "",
        f"| pass | {' | '.join(f'{n:,} tokens' for n in lengths)} |",
        f"| --- |{' ---: |' * len(lengths)}",
    ]
    for what in dict.fromkeys(t["what"] for t in timed):
        by_length = {t["tokens"]: t for t in timed if t["what"] == what}
        cells = [
            f"{by_length[n]['seconds']:.2f} ({by_length[n]['ratio']:.2f})" if n in by_length else "" for n in lengths
        ]
        name = what if what == FULL or what.startswith("decoded") else f"replay: {what}"
        lines.append(f"| {name} | {' | '.join(cells)} |")
    where = summary["where"]
    total = where["all of it"]
    lines += ["", f"Where one replay of {min(lengths):,} tokens by {summary['policy']} spends its {total:.2f} s:", ""]
    lines += [f"- {what}: {seconds:.2f} s ({seconds / total:.0%})" for what, seconds in where.items() if what in _PARTS]
    lines.append("- the rest: the model's linear layers, its head and the loss")
    for what, places in summary["decode_steps"].items():
        along = ", ".join(f"{1000 * s:.0f} ms at {p:,}" for p, s in places)
        lines += ["", f"A step {what}: {along}."]
    return "\n".join(lines)


def figure(summary: Row) -> Figure:
    """Times the full-attention forward against the length, a line per replay."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter

    from experiments.report.figures import _LOOKS, _OTHERS

    timed = [t for t in summary["timed"] if not t["what"].startswith("decoded") and t["what"] != FULL]
    drawn = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=150)
    axes = drawn.add_subplot(1, 1, 1)
    others = iter(_OTHERS * 8)
    axes.axhline(1.0, color="black", linestyle="--", linewidth=1, label="full-attention forward")
    for what in dict.fromkeys(t["what"] for t in timed):
        points = sorted((t["tokens"], t["ratio"]) for t in timed if t["what"] == what)
        colour, marker = _LOOKS.get(what) or next(others)
        axes.plot([n for n, _ in points], [r for _, r in points], color=colour, marker=marker, label=f"replay: {what}")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(sorted({t["tokens"] for t in timed})))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens")
    axes.set_ylabel("seconds over those of the full-attention forward")
    axes.set_title(f"budget {summary['budget']}; {summary['machine']}", fontsize=9)
    axes.grid(True, alpha=0.3)
    axes.legend(fontsize=8)
    return drawn


def _integrate(steps: list[tuple[int, float]], tokens: int) -> float:
    """Seconds for all ``tokens`` steps, linear between the places timed and level outside them."""
    places = [float(place) for place, _ in steps]
    return float(np.interp(np.arange(tokens), places, [seconds for _, seconds in steps]).sum())
