"""The command line; ``--part`` is how a part is run in a process of its own."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from experiments.benchmarks import gpu
from experiments.benchmarks.gpu.page import markdown
from experiments.benchmarks.gpu.processes import SECONDS, measure
from tova.errors import UsageError


def main() -> None:
    """Run all parts, or one."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.benchmarks.gpu", description=(gpu.__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("results/bench_gpu"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--parts", nargs="+", choices=list(SECONDS), default=list(SECONDS))
    parser.add_argument("--part", choices=list(SECONDS), help=argparse.SUPPRESS)
    parser.add_argument("--rows", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part is None:
        try:
            print(markdown(measure(given.parts, given.device, given.tiny, given.out)))
        except UsageError as e:
            print(e, file=sys.stderr)
            sys.exit(2)
        return
    import torch

    from experiments.benchmarks.gpu.parts import PARTS
    from experiments.benchmarks.gpu.shape import LLAMA_2_7B, TINY

    with given.rows.open("w") as file:
        for row in PARTS[given.part](TINY if given.tiny else LLAMA_2_7B, torch.device(given.device)):
            file.write(json.dumps({"part": given.part, **row}) + "\n")
            file.flush()


if __name__ == "__main__":
    main()
