"""Which policy runs on which engine: docs/engines.md is what the engines say themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tova import policies
from tova.decode import cpu as cpu_token
from tova.rules import drops_oldest, why_not
from tova.scan import cpu, fixed_point
from tova.simulation import _compiled

PAGE = Path(__file__).parent.parent / "docs" / "engines.md"
HEADS = 4
ENGINES = (
    "closed form", "scan, numba", "scan, triton", "fixed point", "token, numba", "token, triton", "simulation, numba",
)  # fmt: skip


def runs_on(policy: policies.Policy) -> list[str]:
    """Of every engine ``yes`` or ``no``, in the order of ``ENGINES``; float32."""
    from tova.decode import gpu as gpu_token
    from tova.scan import gpu

    query = torch.zeros(1, HEADS, 1, 64)
    found = (
        drops_oldest(policy),
        cpu.supports(policy, torch.float32),
        gpu.supports(policy, torch.float32),
        fixed_point.supports(policy),
        cpu_token.supports(policy, torch.float32),
        gpu_token.supports(policy, query, query, 513),
        _compiled(policy),
    )
    return ["yes" if one else "no" for one in found]


def page() -> str:
    """The page."""
    lines = [
        "# Which policy runs on which engine",
        "",
        "Made by `python tests/test_engines.py` from what the engines say; the tests hold it to that. What no compiled",
        "engine takes runs on the reference: the scan in plain torch, the plain decode step, the stepwise simulation,",
        "which run every policy and decide alike. What that costs is measured in `results/bench_simulation` (column",
        "*times faster*); the costs here are a step's and an eviction's, as each policy's card counts them.",
        "",
        f"| policy | {' | '.join(ENGINES)} | step | eviction | why not |",
        f"|---|{'---|' * len(ENGINES)}---|---|---|",
    ]
    for name in policies.POLICIES:
        policy = policies.make(name)
        cost, reason = policy.cost(), why_not(policy)
        lines.append(f"| `{name}` | {' | '.join(runs_on(policy))} | {cost.step} | {cost.eviction} | {reason or ''} |")
    return "\n".join(lines) + "\n"


def test_the_page_is_what_the_engines_say() -> None:
    pytest.importorskip("triton")
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/test_engines.py"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
