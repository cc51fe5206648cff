"""Whether the scans decide as the reference does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from experiments.benchmarks.gpu.shape import Shape
from experiments.benchmarks.gpu.shared import empty_slots, reported, scans
from experiments.tasks import Row

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from tova.policies import Policy

NEAR = 1e-5
"""Two lowest scores closer than this (relative) are a near-tie: float32 does not resolve which is lower."""


def decisions(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Every scan against the reference on the same random logits, from an empty cache on."""
    import torch

    from tova import policies
    from tova.scan import Chunk, fixed_point, select

    budget = shape.budget
    recent = dict(recent_window=max(1, budget // 16))
    options: dict[str, dict[str, Any]] = {
        "tova": {}, "h2o": recent, "h2o_half": {}, "scissorhands": recent, "snapkv": recent, "window": {},
    }  # fmt: skip
    steps = budget + (128 if budget > 100 else budget)
    for dtype in dict.fromkeys(("float32", shape.dtype)):
        torch.manual_seed(0)
        logits = 2 * torch.randn(shape.rows, shape.heads, steps, steps, device=device)
        logits = logits.to(getattr(torch, dtype))
        for name, parameters in options.items():
            policy = policies.make(name, budget=budget, **parameters)
            watched, gaps = _watched(policy)

            def chunk(policy: Policy, logits: Tensor) -> Chunk:
                return Chunk(logits, empty_slots(policy, shape.rows, steps, device), 0, policy.schedule())

            reference = select("reference", policy, device, torch.float32)
            right = reference.decide(watched, chunk(watched, logits.float())).last
            for scan in scans(device):
                row: Row = {"policy": name, "dtype": dtype, "scan": scan, "decisions": right.numel()}
                if scan == "reference":
                    continue
                with reported(row), fixed_point.counting() as heard:
                    made = chunk(policy, logits.clone())
                    made.dtype = logits.dtype
                    last = select(scan, policy, device, logits.dtype).decide(policy, made).last
                    row |= _compared(last, right, gaps)
                    row["rounds"] = max((solved.rounds for solved in heard), default=None)
                yield row


def _watched(policy: Policy) -> tuple[Policy, dict[int, Tensor]]:
    """The policy, and what it fills when the reference scan runs it: step -> [R], how close the two lowest scores are.

    Distances are relative to the second lowest.
    """
    gaps: dict[int, Tensor] = {}
    kind = type(policy)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def score(self, slots: Any) -> Tensor:
            score: Tensor = kind.score(self, slots)
            free = slots.held & ~self.protected(slots)
            two = score.double().masked_fill(~free, float("inf")).topk(2, largest=False).values
            gaps[int(slots.newest[0])] = (two[:, 1] - two[:, 0]) / two[:, 1].abs().clamp_min(1e-300)
            return score

    return Watched(**policy.parameters()), gaps


def _compared(last: Tensor, right: Tensor, gaps: dict[int, Tensor]) -> Row:
    """How many decisions differ, in how many sets, and how many of these begin at a near-tie."""
    import torch

    steps = right.shape[1]
    differs = last != right
    first = torch.where(differs, torch.minimum(last, right), steps).amin(1).tolist()
    begun = [(row, step) for row, step in enumerate(first) if step < steps]
    near = sum(step in gaps and float(gaps[step][row]) < NEAR for row, step in begun)
    ties = sum(int((gap < NEAR).sum()) for gap in gaps.values())
    return {
        "different": int(differs.sum()),
        "sets_different": len(begun),
        "from_a_near_tie": near,
        "unexcused": len(begun) - near,
        "near_ties": ties,
        "evictions": sum(len(gap) for gap in gaps.values()),
    }
