"""The contract's checks: every built-in policy passes them, and each kind of mistake is caught."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tova import policies
from tova.check import ContractError, check, main
from tova.policies import Policy, Record


@pytest.mark.parametrize("name", [name for name in policies.POLICIES if name != "full"])
def test_built_in_policies_keep_it(name: str) -> None:
    assert len(check(policies.make(name, budget=40))) >= 2


@dataclass(frozen=True, kw_only=True)
class Good(Policy):
    name = "good"

    def records(self):
        return {"sum": Record()}

    def observe(self, slots, attn):
        return {"sum": slots["sum"] + attn}

    def score(self, slots):
        return slots["sum"]


class ChangesInPlace(Good):
    def observe(self, slots, attn):
        return {"sum": slots["sum"].add_(attn)}


class WrongName(Good):
    def observe(self, slots, attn):
        return {"total": attn}


class WrongShape(Good):
    def score(self, slots):
        return slots["sum"].mean(-1)


class NoBools(Good):
    def protected(self, slots):
        return super().protected(slots).float()


class DropsTheNewest(Good):
    def protected(self, slots):
        return torch.zeros_like(slots.held)

    def score(self, slots):
        return -slots.positions.double()


class Random(Good):
    def score(self, slots):
        return torch.rand(slots.held.shape)


class GoesBySlot(Good):
    """Takes slots for positions: right while they are in order."""

    def score(self, slots):
        return torch.arange(slots.held.shape[-1]).double().expand(slots.held.shape) % 5


class LooksAtEmptySlots(Good):
    def score(self, slots):
        return (slots["sum"] - slots["sum"].mean(-1, keepdim=True)).abs()


class LooksAcrossRows(Good):
    def score(self, slots):
        return slots["sum"] * (slots["sum"].sum() * 100).sin() * slots.positions.double().cos()


class Nameless(Good):
    name = ""


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (ChangesInPlace, "sum was changed in place"),
        (WrongName, "observe returned 'total', which records"),
        (WrongShape, r"score must return \[rows, slots\]"),
        (NoBools, r"protected must return bool \[rows, slots\]"),
        (DropsTheNewest, "step 20: dropped the newest token"),
        (Random, "not deterministic"),
        (GoesBySlot, "decides otherwise token by token than in one piece|decides otherwise in chunks"),
        (LooksAtEmptySlots, "decides otherwise"),
        (LooksAcrossRows, "decides otherwise"),
        (Nameless, "has no name"),
    ],
)
def test_mistakes_are_named(wrong: type[Policy], says: str) -> None:
    assert check(Good(budget=20))
    with pytest.raises(ContractError, match=says):
        check(wrong(budget=20))


def test_from_the_command_line(capsys) -> None:
    assert main(["tova.policies.Tova", "budget=20", "sinks=2"]) == 0
    assert capsys.readouterr().out.count("ok  ") == 5
    assert main(["tova.policies.Tova", "budget=0"]) == 2
    assert "budget must be at least 1" in capsys.readouterr().err
    assert main(["nowhere.Mine"]) == 2
    assert "nowhere.Mine: cannot be imported" in capsys.readouterr().err
    assert main(["tova.policies.make"]) == 2
    assert "is no subclass" in capsys.readouterr().err
    assert main(["tova.policies.Tova", "colour=3"]) == 2
    assert "colour" in capsys.readouterr().err
