"""What a replay and a decoded token cost on a GPU, and whether the scans there decide as they must.

Every part runs in a process of its own under a time limit and writes each figure as it is found, so whatever goes
wrong in one part (too little memory, a kernel that hangs) leaves the others and what it had measured itself. Needs
torch, transformers, triton and ``tova``, no weights, no data and no configuration:

    python -m experiments.benchmarks.gpu --out results/bench_gpu

or, as a cell, ``python -m experiments.run experiment=bench_gpu``. ``--tiny`` (``task.tiny=true``) goes through all of
it in a small shape on any device; its figures mean nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from experiments.benchmarks.common import Benchmark, some_of
from experiments.benchmarks.gpu.page import markdown
from experiments.benchmarks.gpu.processes import SECONDS, measure
from experiments.benchmarks.timing import seconds_of
from experiments.options import boolean
from experiments.tasks import Context, Row

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class BenchGpu(Benchmark):
    """The benchmark as a cell; everything but time limits and places of output is fixed, see :mod:`.shape`.

    Args:
        tiny: go through all of it in a small shape, on any device.
        parts: which parts to run, of those in ``SECONDS``; null for all.
        out: folder for ``bench_gpu.json`` and ``bench_gpu.md``.
    """

    tiny: bool = False
    parts: Sequence[str] | None = None
    out: str = "results/bench_gpu"

    name = "bench_gpu"

    def __post_init__(self) -> None:
        boolean("task.tiny", self.tiny)
        if self.parts is not None:
            some_of("task.parts", self.parts, list(SECONDS))

    def measure(self, context: Context) -> tuple[Row, dict[str, np.ndarray]]:
        import numpy as np

        parts = list(self.parts or SECONDS)
        context.expect(len(parts))
        found: Row = {}

        def run() -> None:
            device = str(context.cell.config["device"])
            found.update(measure(parts, device, self.tiny, Path(self.out), context.advance))

        row = {"document": self.name, "seconds": seconds_of(run), "result": found}
        return row, {"ratio": np.array([one["ratio"] for one in found["rows"] if "ratio" in one])}

    def table(self, summary: Row) -> str:
        return markdown(summary["result"])
