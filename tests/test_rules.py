"""A policy's rule as an expression: what torch's functions mean, in compiled code; what is none, and why."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tova import policies
from tova.kernels import frame
from tova.kernels import numba_math as nm
from tova.policies import Policy, Record, Ring, Slots
from tova.policies.steps import admit, new_records, observe, ring_names
from tova.rules import NotARule, Rule, drops_oldest, how_heads_combine, rule_of, why_not
from tova.rules.numba_code import bind, source

ROOT = Path(policies.__file__).parents[2]
NAN, INF = float("nan"), float("inf")
DTYPES = (torch.float32, torch.float64)


# -- compiled functions on one row of slots ----------------------------------------------------------------------------


class Compiled:
    """A rule's ``step`` and ``rank`` on the slots of one row, which they change in place."""

    def __init__(self, rule: Rule, slots: Slots, weights: Tensor | None = None, *, in_order: bool = False) -> None:
        self.rule, self.slots, self.bound = rule, slots, bind(rule)
        self.n = slots.held.shape[1]
        call = self.bound.call[0]
        self._rank = torch.full((self.n,), 7)
        self._kept: list[Any] = [self._rank]
        self._frame = np.zeros(frame.MEMORY + 3 * call["records"] + call["features"], np.int64)
        self._frame[frame.N] = self.n
        self._frame[frame.POSITIONS] = self._at(slots.positions)
        self._frame[frame.HELD] = self._at(slots.held)
        self._frame[frame.COUNT] = int(slots.count)
        self._frame[frame.NEWEST] = int(slots.newest)
        self._frame[frame.OBSERVED] = int(slots.observed)
        self._frame[frame.ORDERING] = nm.SORTED if in_order else nm.UNSORTED
        self._frame[frame.RANK] = self._rank.data_ptr()
        self._frame[frame.SCRATCH] = self._at(torch.zeros(max(1, call["scratch"]) * self.n, dtype=torch.float64))
        self._frame[frame.INTS], self._frame[frame.FLOATS] = call["ints"], call["floats"]
        if weights is not None:
            self._frame[frame.WEIGHT] = self._at(weights)
        for i, name in enumerate(self.bound.records):
            record = slots.records[name]
            assert record.is_contiguous()
            at = frame.MEMORY + 3 * i
            self._frame[at] = self._at(record)
            if name in slots.rings:
                self._frame[at + 1], self._frame[at + 2] = record.shape[1], record.shape[2]
        for i, name in enumerate(self.bound.features):
            self._frame[frame.MEMORY + 3 * call["records"] + i] = self._at(slots.features[name])

    def _at(self, tensor: Tensor) -> int:
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _call(self, address: int) -> None:
        ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)(address)(self._frame.ctypes.data)

    def step(self, slot: int, self_weight: Tensor | None, known: bool = True) -> None:
        self._frame[frame.SLOT] = slot
        self._frame[frame.KNOWN] = known
        self._frame[frame.SELF_WEIGHT] = 0 if self_weight is None else self._at(self_weight)
        self._call(int(self.bound.call[0]["step"]))

    def rank(self) -> tuple[Tensor, int, int, int]:
        """Scores (NaN where there is none), how many candidates, how many are not ranked, and the first of these."""
        self._call(int(self.bound.call[0]["rank"]))
        bits = self._rank ^ ((self._rank >> 63) & nm.NOWHERE)
        return (
            bits.view(torch.float64),
            *(int(self._frame[i]) for i in (frame.CANDIDATES, frame.UNRANKED, frame.FIRST)),
        )


def rule(policy: Policy, dtype: torch.dtype = torch.float32) -> Rule:
    found = rule_of(policy, dtype)
    assert isinstance(found, Rule), found
    return found


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but that a NaN is a NaN."""
    return a.dtype == b.dtype and a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def numbers(seed: int, n: int, dtype: torch.dtype, *, special: bool = True) -> Tensor:
    """[1, n] random numbers of a dtype, unpleasant ones among them."""
    g = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(1, n, generator=g) < 0.5
    if dtype == torch.int64:
        x = torch.randint(-50, 50, (1, n), generator=g)
        x[0, :4] = torch.tensor([0, -1, 2**40 + 1, -(2**40) - 1])
        return x
    x = (torch.randn(1, n, generator=g, dtype=torch.float64) * 3).to(dtype)
    if special:
        x[0, :8] = torch.tensor([NAN, INF, -INF, 0.0, -0.0, 1e30, -1e-30, 1.0], dtype=dtype)
    return x


def slots_of(policy: Policy, dtype: torch.dtype, n: int = 23, *, seed: int = 1, in_order: bool = False) -> Slots:
    """One row in the middle of a text: some slots empty, in no order unless asked."""
    g = torch.Generator().manual_seed(seed)
    positions = torch.randperm(3 * n, generator=g)[:n].unsqueeze(0)
    if in_order:
        positions = positions.sort().values
    held = torch.rand(1, n, generator=g) < 0.8
    held[0, n // 2] = False
    records = new_records(policy, 1, n, dtype)
    for i, (name, record) in enumerate(policy.records().items()):
        shape = records[name].shape
        records[name] = numbers(seed + i, records[name].numel(), record.dtype or dtype).view(shape).contiguous()
    return Slots(
        positions=positions,
        held=held,
        records=records,
        observed=torch.tensor([[5 + n]]),
        newest=positions.masked_fill(~held, -1).amax(-1, keepdim=True),
        features={name: numbers(seed + 9, n, torch.float32) for name in ("size", "value_norm", "key_norm")},
        rings=ring_names(policy),
    )


# -- operations --------------------------------------------------------------------------------------------------------


class Inputs:
    """What a case may be made of: records f32, f64, i and b, and what slots and weights are."""

    def __init__(self, slots: Any, attn: Any) -> None:
        self.f, self.d, self.i, self.b = (slots[name] for name in "fdib")
        self.w, self.slots = attn, slots
        self.p, self.held = slots.positions, slots.held


EXACT: dict[str, Callable[[Inputs], Any]] = {
    "float plus float": lambda x: x.f + x.f * 0.1,
    "float plus double": lambda x: x.f + x.d,
    "float plus int": lambda x: x.f + x.i,
    "int plus a float number": lambda x: x.i + 0.5,
    "bool plus an int number": lambda x: x.b + 1,
    "bool plus bool": lambda x: x.b + ~x.b,
    "float plus bool": lambda x: x.f + x.b,
    "int minus float": lambda x: x.i - x.f,
    "number minus int": lambda x: 3 - x.i,
    "number minus double": lambda x: 0.1 - x.d,
    "int times double": lambda x: x.i * x.d,
    "bool times bool": lambda x: x.b * x.b,
    "bool times float": lambda x: x.b * 0.3,
    "int over int": lambda x: x.i / (x.p + 1),
    "int over a number": lambda x: x.i / 3,
    "number over float": lambda x: 1 / x.f,
    "double over float": lambda x: x.d / x.f,
    "float over zero": lambda x: x.f / 0.0,
    "int floor-divided": lambda x: x.i // 7,
    "int floor-divided by a negative": lambda x: x.i // -7,
    "positions in pages": lambda x: (x.p // 4) * 4,
    "int remainder": lambda x: x.i % 7,
    "int remainder of a negative": lambda x: x.i % -7,
    "float remainder": lambda x: x.f.clamp(-40, 40) % 0.7,
    "float remainder of a negative": lambda x: x.d.clamp(-40, 40) % -0.7,
    "minus": lambda x: -x.f,
    "minus int": lambda x: -x.i,
    "abs": lambda x: x.f.abs() + torch.abs(x.d) + abs(x.i),
    "square": lambda x: x.f**2 + x.f.square(),
    "cube": lambda x: x.d**3,
    "int square": lambda x: x.i.clamp(-1000, 1000) ** 2,
    "reciprocals": lambda x: x.f.reciprocal() + x.f**-1 + x.d**-2,
    "floor and ceil": lambda x: x.f.floor() + torch.ceil(x.d) + x.i.floor(),
    "float below double": lambda x: x.f < x.d,
    "int below a float number": lambda x: x.i < 0.5,
    "int at least an int": lambda x: (x.i >= 3) & (x.i <= x.p),
    "large ints are not compared as floats": lambda x: x.i > 2**40,
    "equal": lambda x: (x.f == x.f) | (x.i != x.p),
    "bool equals bool": lambda x: x.b == x.held,
    "float above bool": lambda x: x.f > x.b,
    "and, or, xor, not of bools": lambda x: (x.b & x.held) ^ ~(x.b | x.held),
    "and, or, xor, not of ints": lambda x: (x.i & 0xFF) ^ ~(x.p | 3),
    "bool and a number": lambda x: x.b & True,
    "int and bool": lambda x: x.i & x.b,
    "logical": lambda x: torch.logical_and(x.f, x.i) | x.b.logical_xor(x.held) | torch.logical_not(x.i),
    "shifts": lambda x: (x.p << 3) + (x.i >> 2),
    "where": lambda x: torch.where(x.b, x.f, x.d),
    "where of numbers": lambda x: torch.where(x.b, x.f, 0.25),
    "where of an int number": lambda x: torch.where(x.b, 1, x.f),
    "where as a method": lambda x: x.i.where(x.b, x.p),
    "masked fill": lambda x: x.f.masked_fill(~x.held, -INF),
    "masked fill of ints": lambda x: x.i.masked_fill(x.b, -3),
    "clamp": lambda x: x.f.clamp(-1, 1),
    "clamp int by float": lambda x: x.i.clamp(min=0.5),
    "clamp by a tensor": lambda x: torch.clamp(x.d, max=x.f),
    "clamp min, max": lambda x: x.f.clamp_min(0.1) + x.d.clamp_max(2),
    "maximum": lambda x: torch.maximum(x.f, x.w) + torch.minimum(x.d, x.f),
    "maximum of ints": lambda x: torch.max(x.i, x.p) + torch.min(x.i, x.p),
    "isnan": lambda x: x.f.isnan() | torch.isinf(x.d),
    "isfinite": lambda x: x.f.isfinite(),
    "isnan of ints": lambda x: x.i.isnan() | x.i.isfinite(),
    "to double": lambda x: x.f.double() * 0.1 + x.b.double(),
    "to float": lambda x: x.d.float() + x.i.to(torch.float32),
    "to long": lambda x: x.f.clamp(-9, 9).masked_fill(x.f.isnan(), 0).long() + x.b.long(),
    "to bool": lambda x: x.f.bool() | x.i.bool(),
    "to as another": lambda x: x.f.to(x.d),
    "sum over held": lambda x: x.f.masked_fill(~x.held | ~x.f.isfinite(), 0).mul(0).sum(-1, keepdim=True) + x.f,
    "sum of ints": lambda x: x.i - x.i.sum(-1, keepdim=True),
    "how many": lambda x: (x.held & x.b).sum(-1, keepdim=True) + x.i,
    "largest": lambda x: x.d - x.d.masked_fill(~x.held | x.d.isnan(), -INF).amax(-1, keepdim=True),
    "largest of all, NaN among them": lambda x: x.f.amax(-1, keepdim=True) + x.i,
    "smallest": lambda x: x.i - x.i.min(-1, keepdim=True).values,
    "largest position": lambda x: x.p.masked_fill(~x.held, -1).max(dim=-1, keepdim=True)[0] - x.p,
    "any and all": lambda x: x.b & x.b.any(-1, keepdim=True) & ~x.held.all(-1, keepdim=True),
    "likes": lambda x: torch.zeros_like(x.f) + torch.ones_like(x.i) + torch.full_like(x.d, 0.1),
    "likes of a dtype": lambda x: torch.zeros_like(x.f, dtype=torch.int64),
    "a tensor without dimensions": lambda x: x.f * torch.tensor(0.1, dtype=torch.float64) + x.i * torch.tensor(2),
    "numpy's numbers": lambda x: np.float64(0.3) * x.f + np.int64(2) * x.i,
    "clone and detach": lambda x: x.f.clone().detach().contiguous(),
    "count": lambda x: x.w * x.slots.count + x.slots.newest,
    "fair share": lambda x: x.w.double() > 1.0 / x.slots.count.double(),
    "age": lambda x: x.slots.newest - x.p,
    "steps since": lambda x: x.slots.observed - x.p,
    "first tokens": lambda x: x.slots.first(9),
    "newest held": lambda x: x.slots.newest_held(4),
    "newest held, none": lambda x: x.slots.newest_held(0) | x.slots.newest_held(-2),
    "newest held, all": lambda x: x.slots.newest_held(100),
    "named methods": lambda x: x.f.add(x.d).sub(1).mul(2).div(3).less(x.f.negative()),
    "torch functions": lambda x: torch.where(torch.gt(torch.add(x.f, x.d), torch.mul(x.f, 2)), torch.neg(x.f), x.f),
    "weights": lambda x: x.w,
}
CLOSE: dict[str, Callable[[Inputs], Any]] = {
    "exp": lambda x: x.f.clamp(-20, 20).exp(),
    "exp of double": lambda x: torch.exp(x.d.clamp(-20, 20)),
    "exp of int": lambda x: x.i.clamp(-20, 20).exp(),
    "log": lambda x: (x.f.abs() + 1e-3).log() + x.d.log(),
    "power": lambda x: x.f.abs() ** 1.7 + x.d.abs() ** 0.3,
    "number to a power": lambda x: 0.9 ** (x.slots.newest - x.p),
    "sigmoid": lambda x: x.f.sigmoid(),
    "sum of floats": lambda x: x.w / x.w.masked_fill(~x.held, 0).sum(-1, keepdim=True),
    "sum of doubles": lambda x: x.w.double().square().sum(-1, keepdim=True) + x.i,
    "roots": lambda x: x.f.sqrt() + x.d.abs() ** 0.5,
    "root of int": lambda x: x.p.sqrt(),
    "inverse root": lambda x: (x.f.abs() + 0.1) ** -0.5,
}
POOLS: dict[str, Callable[[Inputs], Any]] = {
    "max pool": lambda x: x.slots.max_pool(x.d, 5),
    "max pool of floats": lambda x: x.slots.max_pool(x.f, 3) + 1,
    "max pool of one": lambda x: x.slots.max_pool(x.f, 1),
    "wide max pool": lambda x: x.slots.max_pool(x.d, 201),
    "average pool": lambda x: x.slots.average_pool(x.d, 5),
    "average pool of floats": lambda x: x.slots.average_pool(x.f, 3),
    "a pool of a pool": lambda x: x.slots.max_pool(x.slots.average_pool(x.d.clamp(-9, 9), 3), 3),
}


@dataclass(frozen=True, kw_only=True)
class Probe(Policy):
    """Records the values of some cases, each in a record of its dtype."""

    name = "probe"
    cases: tuple[str, ...]
    of: tuple[torch.dtype, ...]

    def records(self):
        given = {
            "f": Record(dtype=torch.float32), "d": Record(dtype=torch.float64), "i": Record(dtype=torch.int64),
            "b": Record(dtype=torch.bool),
        }  # fmt: skip
        return given | {case: Record(dtype=of) for case, of in zip(self.cases, self.of, strict=True)}

    def observe(self, slots, attn):
        values = {case: CASES[case](Inputs(slots, attn)) for case in self.cases}
        # A record is of slots, whatever a value is of.
        return {
            case: torch.where(slots.held | True, value, torch.zeros_like(attn).to(value.dtype))
            for case, value in values.items()
        }

    def score(self, slots):
        return slots.positions


CASES = EXACT | CLOSE | POOLS
NAMES = list(CASES)
GROUPS = [tuple(NAMES[i : i + 24]) for i in range(0, len(NAMES), 24)]


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("cases", GROUPS, ids=[f"from {group[0]}" for group in GROUPS])
def test_operations_are_what_torch_makes_of_them(cases: tuple[str, ...], dtype: torch.dtype) -> None:
    slots = slots_of(Probe(cases=(), of=()), dtype)
    of = tuple(CASES[case](Inputs(slots, numbers(3, 23, dtype))).dtype for case in cases)
    probe = Probe(cases=cases, of=of)
    made = rule(probe, dtype)
    wrong = set()
    for seed in range(3):
        for in_order in (False, True):
            slots = slots_of(probe, dtype, seed=seed, in_order=in_order)
            weights = numbers(seed + 5, 23, dtype, special=False).abs().masked_fill(~slots.held, 0.0)
            expected = probe.observe(slots, weights)
            before = {name: record.clone() for name, record in slots.records.items()}
            Compiled(made, slots, weights, in_order=in_order).step(11, None)
            others = torch.arange(23) != 11  # where the newcomer is now
            for case, dtype_of_case in zip(cases, of, strict=True):
                assert made.observed[case].dtype == expected[case].dtype == dtype_of_case
                seen = (slots.held & others) if case in POOLS else others.expand(1, -1)
                found, right = slots.records[case][seen], expected[case][seen]
                if case in CLOSE:
                    step = 1e-15 if dtype_of_case == torch.float64 and "double" in case else 5e-7
                    right_enough = torch.allclose(found, right, rtol=step, atol=1e-30, equal_nan=True)
                else:
                    right_enough = same(found, right)
                if not right_enough:
                    wrong.add(case)
                assert not slots.records[case][0, 11]
            assert all(same(slots.records[name][:, others], before[name][:, others]) for name in "fdib")
    assert not wrong


# -- policies ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Everything(Policy):
    """A ring, plain records, a feature, its own weight, pools, and a protection of its own."""

    name = "everything"
    fade: float = 0.9
    width: int = 5

    def records(self):
        return {
            "ring": Ring(self.width), "sum": Record(fill=0.25), "times": Record(dtype=torch.int64),
            "ever": Ring(3, torch.bool), "low": Record(dtype=torch.bool),
        }  # fmt: skip

    def features(self, tokens):
        return {"size": tokens.value.float().abs().sum(-1)}

    def observe(self, slots, attn):
        share = attn / attn.amax(-1, keepdim=True)
        return {
            "sum": self.fade * slots["sum"] + attn, "ring": share, "times": slots["times"] + (share > 0.5),
            "ever": share > 0.5, "low": slots["low"] | (share < 0.01),
        }  # fmt: skip

    def admitted(self, self_weight):
        return {"sum": self_weight * 2, "ring": self_weight, "ever": self_weight > 0.1}

    def score(self, slots):
        smooth = slots.max_pool(slots.ring_sum("ring") + slots.ring_sum("ever"), 3)
        size = slots.features["size"]
        return slots.average_pool(smooth * size, 3) + slots["sum"] + slots["times"] - 5 * slots["low"].double()

    def protected(self, slots):
        return super().protected(slots) | (slots.features["size"] > 20)


BUILT_IN = {name: made() if name == "full" else made(budget=40) for name, made in policies.POLICIES.items()}
ALL: dict[str, Policy] = BUILT_IN | {
    "everything": Everything(budget=12, sinks=2, recent_window=3),
    "snapkv, narrow": policies.make("snapkv", budget=12, recent_window=2, obs_window=3, pool_kernel=3),
    "snapkv, no pool": policies.make("snapkv", budget=12, recent_window=2, obs_window=1, pool_kernel=1),
    "prefill, max": policies.make("snapkv_prefill", budget=12, recent_window=2, pooling="max", sinks=1),
    "tova, sinks": policies.make("tova", budget=12, recent_window=2, sinks=3),
    "random, negative": policies.make("random", budget=12, seed=-(2**63), layer=3, num_layers=4),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=["float32", "float64"])
@pytest.mark.parametrize("name", ALL)
def test_records_and_ranks_are_the_policys_own(name: str, dtype: torch.dtype) -> None:
    """Over some steps, one of them not known: records bit for bit, ranks, candidates and what is not ranked."""
    policy = ALL[name]
    made = rule(policy, dtype)
    n = 23
    for in_order in (False, True):
        slots = slots_of(policy, dtype, n, in_order=in_order)
        for record in slots.records.values():  # a step not known leaves them, and then NaN would be everywhere
            if record.dtype.is_floating_point:
                record.nan_to_num_(0.5, 0.25, 0.125)
        g = torch.Generator().manual_seed(3)
        empty = (~slots.held).nonzero()[:, 1].tolist()
        if in_order:
            empty = [slot for slot in empty if slot > int(slots.held.nonzero()[-1, 1])]
            slots.positions[0, empty] = torch.tensor([10 * n + i for i in range(len(empty))], dtype=torch.int64)
        for step, slot in enumerate(empty[:4]):
            known = step != 1
            row = torch.rand(1, n, generator=g, dtype=torch.float64).to(dtype).masked_fill(~slots.held, 0.0)
            own = torch.rand(1, 1, generator=g, dtype=torch.float64).to(dtype)
            own = None if step == 2 else own
            position = slots.positions[:, slot : slot + 1] if in_order else slots.newest + 1
            ours = slots.mapped(torch.clone)
            ours.positions[0, slot] = position
            code = Compiled(made, ours, row.clone(), in_order=in_order)
            code.step(slot, own, known)
            if known:
                observe(policy, slots, row)
            admit(policy, slots, slot, position, self_weight=own, known=torch.tensor([[known]]))
            for record, value in slots.records.items():
                dim = slots.slot_dim(record)
                there = slots.held[0].nonzero()[:, 0]
                assert same(ours.records[record].index_select(dim, there), value.index_select(dim, there)), record
            slots.features = {key: value.clone() for key, value in slots.features.items()}
            code = Compiled(made, slots, in_order=in_order)
            score, candidates, unranked, first = code.rank()
            expected = policy.score(slots).double()
            unprotected = slots.held & ~policy.protected(slots)
            ranked = unprotected & ~expected.isnan()
            assert same(score, expected.masked_fill(~ranked, NAN)[0])
            assert candidates == int(ranked.sum())
            missing = (unprotected & ~ranked)[0].nonzero()[:, 0].tolist()
            assert unranked == len(missing)
            assert first == (missing[0] if missing else -1)


def test_every_built_in_policy_is_an_expression() -> None:
    assert {name for name, policy in BUILT_IN.items() if not isinstance(rule_of(policy), Rule)} == set()
    reasons = {name: why_not(policy) for name, policy in BUILT_IN.items()}
    assert {name for name, reason in reasons.items() if reason} == {"h2o_masked"}
    assert "dropped" in reasons["h2o_masked"]


def test_which_policies_drop_the_oldest_is_read_off_the_expression() -> None:
    found = {name for name, policy in BUILT_IN.items() if drops_oldest(policy)}
    assert found == {"full", "window", "streaming_llm", "streaming_llm_reindexed"}

    class Mine(Policy):
        name = "mine"
        reads_attention = False

        def score(self, slots):
            return slots.positions

    class Reading(Mine):
        reads_attention = True

    class Remembering(Mine):
        def records(self):
            return {"sum": Record()}

    class Protecting(Mine):
        def protected(self, slots):
            return super().protected(slots) | (slots.positions == 7)

    class Otherwise(Mine):
        def protected(self, slots):
            return slots.newest_held(9) | slots.first(self.sinks)

    class Newest(Mine):
        def score(self, slots):
            return -slots.positions

    class Some(Mine):
        def excess(self, slots, schedule):
            return super().excess(slots, schedule)

    assert drops_oldest(Mine(budget=8, sinks=3, recent_window=2))
    for other in (Reading, Remembering, Protecting, Otherwise, Newest, Some):
        assert not drops_oldest(other(budget=20)), other


def test_numbers_are_no_part_of_the_structure() -> None:
    """Budgets, seeds, layers and parameters share one compiled form; what is computed otherwise does not."""
    make = policies.make
    alike = [
        (make("tova", budget=8), make("tova", budget=99, recent_window=5, layer=2, num_layers=3)),
        (make("random", budget=8), make("random", budget=8, seed=2**64 - 1)),
        (make("snapkv", budget=40), make("pyramidkv", budget=80, obs_window=3, pool_kernel=9)),
        (Everything(budget=12), Everything(budget=30, fade=0.5, width=9)),
        (make("h2o", budget=64), make("h2o_half", budget=48)),
    ]
    for a, b in alike:
        assert rule(a).key == rule(b).key
        assert rule(a).ints + rule(a).floats != rule(b).ints + rule(b).floats
        assert source(rule(a)) == source(rule(b))
    assert rule(make("tova")).key != rule(make("tova"), torch.float64).key
    assert rule(make("tova")).key != rule(make("tova", sinks=2)).key  # one more protection
    assert rule(make("h2o")).key != rule(make("h2o_head")).key


def test_a_rule_is_found_again_by_value() -> None:
    assert rule_of(policies.make("tova", budget=77)) is rule_of(policies.make("tova", budget=77))
    # Equal, but torch computes otherwise with them.
    ints, floats = Everything(budget=12, fade=1), Everything(budget=12, fade=1.0)
    assert ints == floats
    assert rule(ints).key == rule(floats).key  # both times a float32 tensor

    @dataclass(frozen=True, kw_only=True)
    class Scaled(Policy):
        name = "scaled"
        by: float = 1

        def score(self, slots):
            return slots.positions * self.by

    assert rule(Scaled(by=1)).score.dtype == torch.int64
    assert rule(Scaled(by=1.0)).score.dtype == torch.float32

    @dataclass(frozen=True, kw_only=True)
    class Listed(Policy):
        name = "listed"
        of: Any = ()

        def score(self, slots):
            return slots.positions * self.of[0]

    first, second = Listed(of=[2]), Listed(of=[3])  # which cannot be hashed
    assert rule_of(first) is rule_of(first)
    assert (rule(first).ints[0], rule(second).ints[0]) == (2, 3)


def test_a_subclass_of_a_built_in_policy_is_what_it_says() -> None:
    class Latest(policies.Tova):
        def score(self, slots):
            return -slots["weight"]

    class Own(policies.H2O):
        def admitted(self, self_weight):
            return {"sum": self_weight * 3}

    assert rule(Latest()).score.op == "neg"
    assert rule(Own()).admitted["sum"].op == "mul"
    assert rule(policies.Tova()).score.op == "record"


# -- what is no expression ---------------------------------------------------------------------------------------------


class Plain(Policy):
    name = "plain"

    def records(self):
        return {"sum": Record()}

    def observe(self, slots, attn):
        return {"sum": slots["sum"] + attn}

    def score(self, slots):
        return slots["sum"]


def with_score(score: Callable[[Any, Any], Any]) -> Policy:
    return type("Other", (Plain,), {"score": score})(budget=20)


def with_observe(function: Callable[[Any, Any, Any], Any]) -> Policy:
    return type("Other", (Plain,), {"observe": function})(budget=20)


def branches(self, slots):
    if (slots["sum"] > 3).any():
        return slots["sum"]
    return -slots["sum"]


def branches_on_a_row(self, slots):
    return slots["sum"] if slots.count > 9 else -slots["sum"]


def loops(self, slots):
    total = slots["sum"]
    for _ in range(slots.newest):
        total = total + 1
    return total


def adds_in_place(self, slots):
    total = slots["sum"].double()
    total += 1
    return total


def draws(self, slots):
    return slots["sum"] * torch.rand(()).item()


NO_SCORE: dict[str, tuple[Callable, str]] = {
    "a branch": (branches, "score goes over all rows|score depends on the numbers in a tensor"),
    "a branch on a row": (branches_on_a_row, "score depends on the numbers in a tensor"),
    "a loop": (loops, "score depends on the numbers in a tensor"),
    "in place": (adds_in_place, "score changes a tensor in place"),
    "a method in place": (lambda self, slots: slots["sum"].mul_(2), r"score changes a tensor in place \(mul_\)"),
    "an item in place": (lambda self, slots: slots["sum"].__setitem__(0, 1), "score changes a tensor in place"),
    "out": (lambda self, slots: torch.add(slots["sum"], 1, out=slots["sum"]), "score changes a tensor in place"),
    "a number taken out": (lambda self, slots: slots["sum"] * float(slots.count), "score depends on the numbers"),
    "item": (lambda self, slots: slots["sum"] * slots.count.item(), "score uses item, which is no operation"),
    "unknown": (lambda self, slots: slots["sum"].sin(), "score uses sin, which is no operation"),
    "unknown function": (lambda self, slots: torch.argsort(slots["sum"]), "score uses argsort"),
    "of slots": (lambda self, slots: slots.in_position_order()[1], "score asks for slots.in_position_order"),
    "keys": (lambda self, slots: slots.keys.sum(-1), "score asks for slots.keys"),
    "an index": (lambda self, slots: slots["sum"][:, 0], "score looks at parts of a tensor by index"),
    "a shape": (lambda self, slots: torch.rand(slots["sum"].shape), "score uses shape"),
    "all slots": (lambda self, slots: slots["sum"] - slots["sum"].mean(-1, keepdim=True), "score takes a mean over"),
    "no keepdim": (lambda self, slots: slots["sum"].sum(-1), "score goes over slots without keepdim"),
    "all rows": (lambda self, slots: slots["sum"] / slots["sum"].sum(), "score goes over all rows"),
    "another tensor": (lambda self, slots: slots["sum"] * torch.arange(9), "score uses a tensor of its own"),
    "half": (lambda self, slots: slots["sum"].to(torch.float16), "score converts to float16"),
    "a device": (lambda self, slots: slots["sum"].to("cpu"), "score moves a tensor to a device"),
    "per row": (lambda self, slots: slots.count, "score returns int64 per row"),
    "a bool": (lambda self, slots: slots["sum"] > 0, "score returns bool per slot"),
    "nothing": (lambda self, slots: None, "score returns NoneType"),
    "chance": (draws, "give something else when they are called again"),
    "no such record": (lambda self, slots: slots["total"], "score cannot be called with symbols: KeyError"),
    "a large number": (lambda self, slots: slots.positions + 2**64, "score uses 18446744073709551616"),
    "a float for an integer": (lambda self, slots: slots.positions.masked_fill(slots.held, 0.5), "makes an integer"),
    "floats in bits": (lambda self, slots: slots["sum"] & 3, "score uses & | ^ on float32"),
    "minus bools": (lambda self, slots: slots.held - slots.held, "score subtracts bools"),
    "no ring": (lambda self, slots: slots.ring_sum("sum"), "score asks for the sum of 'sum', which is no Ring"),
    "sets a field": (lambda self, slots: setattr(slots, "held", 1), "score sets slots.held"),
}  # fmt: skip
NO_OBSERVE: dict[str, tuple[Callable, str]] = {
    "another record": (lambda self, slots, attn: {"total": attn}, "observe returns 'total', which records"),
    "no dict": (lambda self, slots, attn: attn, "observe returns float32 per slot, and not a dict"),
    "per row": (lambda self, slots, attn: {"sum": slots.count.float()}, "observe returns 'sum' as float32 per row"),
    "a number": (lambda self, slots, attn: {"sum": 1.0}, "observe returns 'sum' as float"),
    "in place": (lambda self, slots, attn: {"sum": slots["sum"].add_(attn)}, "observe changes a tensor in place"),
}


@pytest.mark.parametrize("what", NO_SCORE)
def test_a_score_that_is_no_expression_has_a_reason(what: str) -> None:
    score, says = NO_SCORE[what]
    found = rule_of(with_score(score))
    assert isinstance(found, NotARule)
    assert re.search(says, found.reason), found.reason


@pytest.mark.parametrize("what", NO_OBSERVE)
def test_an_observation_that_is_no_expression_has_a_reason(what: str) -> None:
    function, says = NO_OBSERVE[what]
    found = rule_of(with_observe(function))
    assert isinstance(found, NotARule)
    assert says in found.reason


def test_other_functions_that_are_no_expressions() -> None:
    class Floats(Plain):
        def protected(self, slots):
            return slots["sum"]

    class ManyNumbers(Plain):
        def records(self):
            return {"sum": Record(width=(3,))}

    class Bytes(Plain):
        def records(self):
            return {"sum": Record(dtype=torch.uint8)}

    class Lossy(Plain):
        def records(self):
            return {"sum": Record(dtype=torch.int64)}

    class EntryByEntry(policies.SnapKV):
        def score(self, slots):
            return slots["ring"].amax(1)

    class Twice(Plain):
        def admitted(self, self_weight):
            return {"sum": self_weight.repeat(1, 2)}

    says = {
        Floats: "protected returns float32 per slot",
        ManyNumbers: "observe reads 'sum', which has several numbers per slot",
        Bytes: "records: 'sum' is of uint8",
        Lossy: "observe returns 'sum' as float32 per slot, its record is int64",
        EntryByEntry: "score looks into the ring 'ring' itself",
        Twice: "admitted uses repeat",
    }
    for kind, reason in says.items():
        found = rule_of(kind(budget=64))
        assert isinstance(found, NotARule)
        assert reason in found.reason
        assert why_not(kind(budget=64)) == found.reason


def test_how_heads_combine() -> None:
    def combining(function: Callable[[Any], Any]) -> str | None:
        return how_heads_combine(type("Other", (Plain,), {"combine": lambda self, heads: function(heads)})(budget=20))

    assert how_heads_combine(Plain(budget=20)) == "mean"
    assert how_heads_combine(policies.make("tova_official")) == "rounded mean"
    assert combining(lambda heads: heads.weights.float().mean(1)) == "mean"
    others = [
        lambda heads: heads.weights.amax(1), lambda heads: heads.weights.sum(1), lambda heads: heads.weights,
        lambda heads: heads.weights.mean(-1), lambda heads: heads.logits.mean(1), lambda heads: heads.logsumexp,
        lambda heads: heads.weights.mean(1) * 2, lambda heads: heads.weights.square().mean(1),
        lambda heads: heads.rounded.float().mean(1),
    ]  # fmt: skip
    for other in others:
        assert combining(other) is None
    assert "combine" in str(why_not(type("Other", (Plain,), {"combine": lambda s, h: h.weights.amax(1)})(budget=20)))


# -- kept on disk ------------------------------------------------------------------------------------------------------

TWICE = """
from tova import policies
from tova.rules import rule_of
from tova.rules.numba_code import bind
for name in ("tova", "scissorhands"):
    bound = bind(rule_of(policies.make(name)))
    print(name, sum(f.cache_hits for f in bound.functions), len(bound.functions))
"""


def fresh_process(**environment: str) -> list[list[str]]:
    found = subprocess.run(
        [sys.executable, "-c", TWICE], capture_output=True, text=True, cwd="/",
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    return [line.split() for line in found.stdout.splitlines()]


def test_a_second_process_compiles_nothing(tmp_path) -> None:
    first = fresh_process(NUMBA_CACHE_DIR=str(tmp_path))
    assert all(hits == "0" for _, hits, _ in first)
    files = sorted(tmp_path.rglob("*"))
    assert files
    again = fresh_process(NUMBA_CACHE_DIR=str(tmp_path))
    assert all(hits == of != "0" for _, hits, of in again)
    assert sorted(tmp_path.rglob("*")) == files
