"""Which Triton the kernels need, and a helper of theirs that no policy that is built in tries hard."""

from __future__ import annotations

import sys

import pytest
import torch

from tova import UsageError, policies
from tova.scan.select import has_triton, select

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
kernels = pytest.mark.skipif(not has_triton(DEVICE), reason="triton is not installed (it is for Linux only)")

if has_triton(DEVICE):
    import triton
    import triton.language as tl

    from tova.kernels.triton_math import Slots, recent_floor

    @triton.jit
    def find_floor(positions, held, out, number, newest, count, JOINED: tl.constexpr, BLOCK: tl.constexpr):
        i = tl.arange(0, BLOCK)
        position, occupied, at = tl.load(positions + i), tl.load(held + i) != 0, tl.load(newest)
        slots = Slots(i, i >= 0, position, occupied, (), (), (), (), 0, tl.load(count), at, at, (), True)
        tl.store(out, recent_floor(tl.load(number), slots, JOINED))


@pytest.mark.parametrize(("version", "enough"), [((), False), ((3, 3), False), ((3, 4), True), ((3, 10), True)])
def test_an_older_triton_is_as_good_as_none(monkeypatch, version: tuple[int, ...], enough: bool) -> None:
    monkeypatch.setattr(sys.modules[has_triton.__module__], "triton_version", lambda: version)
    cuda = torch.device("cuda")
    assert has_triton(cuda) == enough
    if not enough:
        assert select("auto", policies.make("tova"), cuda, torch.float32).name == "reference"
        with pytest.raises(UsageError, match=r"scan=gpu needs triton 3\.4 or newer"):
            select("gpu", policies.make("tova"), cuda, torch.float32)


@kernels
@pytest.mark.parametrize("joined", [True, False])
@pytest.mark.parametrize("n", [-1, 0, 1, 2, 3, 5, 8, 9])
def test_the_newest_held_are_found_over_gaps_of_any_width(n: int, joined: bool, monkeypatch) -> None:
    """In at most as many turns as tokens are asked for, however far apart they are."""
    turns = [0]
    if DEVICE.type == "cpu":
        from triton.runtime import interpreter

        reduce = interpreter.ReduceOps.apply_impl

        def counting(self, *arguments):
            turns[0] += 1
            return reduce(self, *arguments)

        monkeypatch.setattr(interpreter.ReduceOps, "apply_impl", counting)
    order = torch.tensor([3, 0, 7, 2, 5, 1, 6, 4])  # slots are in no order
    sorted_positions = torch.tensor([0, 1, 300, 301, 302, 900, 901, 902])
    positions = sorted_positions[order].to(DEVICE)
    held = torch.ones(8, dtype=torch.uint8, device=DEVICE)
    held[order == 4] = 0
    newest = 902 if joined else 1500  # or it has been dropped at once
    out = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    given = [torch.tensor([x], device=DEVICE) for x in (n, newest, 7)]
    find_floor[(1,)](positions, held, out, *given, JOINED=joined, BLOCK=8)
    kept = (held != 0) & (positions >= out)
    assert sorted(positions[kept].tolist()) == ([0, 1, 300, 301, 900, 901, 902][-n:] if n > 0 else [])
    assert turns[0] <= 1 + 2 * max(n, 0)
