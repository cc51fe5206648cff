"""What a replay costs: beside the full-attention forward of the same text, and beside decoding it token by token."""

from __future__ import annotations

import functools
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.tasks import Context, Row
from experiments.tasks.perplexity import encode
from tova.errors import UsageError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from tova.policies import Policy

FULL, REPLAY = "forward, full attention", "replay"
DECODE_PLAIN, DECODE_EVICTING = "decode, plain cache", "decode, evicting cache"


@dataclass(frozen=True)
class BenchReplay:
    """Times the dataset's first document, the model's head included on every side.

    Forward and replay are repeated in turn; what is reported is the median of each and the ratio of medians, all from
    one run. Decoding is timed at a few places along the text and integrated, since all of it would take minutes; its
    steps cost more the more the cache holds, and the places show that.

    Args:
        started: when; a benchmark is measured anew each time it is asked for.
        repetitions: of forward and replay, after one of each that is not counted.
        places: how many places along the text decoding is timed at.
        steps: decode steps timed at each place.
        threads: of torch; null leaves its choice.
    """

    started: str
    repetitions: int = 3
    places: int = 5
    steps: int = 8
    threads: int | None = None

    name = "bench_replay"
    uses_model = True
    needs_reference = False
    length = None

    def __post_init__(self) -> None:
        for option in ("repetitions", "places", "steps"):
            if getattr(self, option) < 1:
                raise UsageError(f"task.{option}={getattr(self, option)}: must be at least 1")

    def identity(self) -> dict[str, Any]:
        return {"name": self.name, "started": self.started}

    def run(self, context: Context) -> Iterator[tuple[Row, dict[str, np.ndarray]]]:
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
        tokens = ids.shape[1]
        policy = context.cell.policy(tokens)
        context.expect(tokens)
        forward, replay = self._passes(model, ids, policy, context)
        decode = {
            DECODE_PLAIN: self._decode(model, ids, None),
            DECODE_EVICTING: self._decode(model, ids, policy),
        }
        medians = {
            FULL: statistics.median(forward),
            REPLAY: statistics.median(replay),
            **{name: _integrate(steps, tokens) for name, steps in decode.items()},
        }
        row: Row = {
            "index": 0,
            "document": document.name,
            "policy": policy.label,
            "budget": policy.budget,
            "tokens": tokens,
            "seconds": medians[REPLAY],
            "tokens_per_second": tokens / medians[REPLAY],
            "medians": medians,
            "ratio_to_forward": medians[REPLAY] / medians[FULL],
            "times_faster_than_decoding": medians[DECODE_EVICTING] / medians[REPLAY],
            "decode_steps": decode,
            "machine": machine(model),
            "started": self.started,
        }
        yield row, {"forward": np.array(forward), "replay": np.array(replay)}

    def _passes(
        self, model: PreTrainedModel, ids: torch.Tensor, policy: Policy, context: Context
    ) -> tuple[list[float], list[float]]:
        import tova
        from tova import EvictingCache
        from tova.measures import token_nll

        forward: list[float] = []
        replay: list[float] = []
        for repetition in range(self.repetitions + 1):
            model.set_attn_implementation("sdpa")
            forward.append(_seconds(lambda: token_nll(model, ids), model))
            tova.enable(model)
            replay.append(_seconds(lambda: token_nll(model, ids, EvictingCache(policy, log=False)), model))
            context.advance(ids.shape[1] * (repetition + 1) / (self.repetitions + 2))
        return forward[1:], replay[1:]

    def _decode(self, model: PreTrainedModel, ids: torch.Tensor, policy: Policy | None) -> list[tuple[int, float]]:
        """(position, seconds per step) at places along the text, with a plain cache or an evicting one."""
        import torch
        from transformers import DynamicCache

        from tova import EvictingCache
        from tova.compat import cache_argument

        name = cache_argument(model)
        tokens = ids.shape[1]
        places = np.linspace(1, tokens - self.steps - 1, self.places).astype(int)
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
                    step.append(_seconds(one, model))
                    at += 1
                out.append((int(place), statistics.median(step)))
        return out

    def summarise(self, rows: list[Row]) -> Row:
        return {k: v for k, v in rows[0].items() if k not in ("index", "document")}

    def describe(self, summary: Row) -> str | None:
        medians, steps = summary["medians"], summary["decode_steps"]
        lines = [
            f"{summary['tokens']:,} tokens, {summary['policy']}, budget {summary['budget']}; {summary['machine']}",
            "",
            f"{'':<26}{'seconds':>9}{'of forward':>12}",
        ]
        for name, seconds in medians.items():
            lines.append(f"{name:<26}{seconds:>9.2f}{seconds / medians[FULL]:>12.2f}")
        lines.append("")
        for name, places in steps.items():
            along = ", ".join(f"{1000 * s:.0f} ms at {p:,}" for p, s in places)
            lines.append(f"a step of {name}: {along}")
        lines.append(
            f"replay costs {summary['ratio_to_forward']:.2f} times the full-attention forward, and "
            f"{summary['times_faster_than_decoding']:.0f} times less than decoding with an evicting cache"
        )
        return "\n".join(lines)


def _seconds(run: Callable[[], Any], model: PreTrainedModel) -> float:
    import torch

    cuda = model.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize(model.device)
    started = time.perf_counter()
    run()
    if cuda:
        torch.cuda.synchronize(model.device)
    return time.perf_counter() - started


def _integrate(steps: list[tuple[int, float]], tokens: int) -> float:
    """Seconds for all ``tokens`` steps, linear between the places timed and level outside them."""
    places = [float(place) for place, _ in steps]
    return float(np.interp(np.arange(tokens), places, [seconds for _, seconds in steps]).sum())


def machine(model: PreTrainedModel) -> str:
    """What it ran on."""
    import torch

    if model.device.type == "cuda":
        name = torch.cuda.get_device_name(model.device)
    else:
        name = f"{_processor()}, {torch.get_num_threads()} threads"
    return f"{name}, torch {torch.__version__}, {str(model.dtype).removeprefix('torch.')}"


def _processor() -> str:
    try:
        with open("/proc/cpuinfo") as f:
            return next(line.split(":", 1)[1].strip() for line in f if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
