"""What a policy is: parameters and a few pure functions.

A policy is its parameters and a few pure functions over :class:`~tova.policies.slots.Slots`; subclass :class:`Policy`
and say what is remembered (``records``), how a step changes it (``observe``) and what is dropped first (``score``).
These functions are its only definition: the reference scan, the stepwise policy and the plain decode step call them
(:mod:`tova.policies.steps`), and the compiled engines are made from them (:mod:`tova.rules`).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from tova.errors import UsageError
from tova.eviction_log import NEVER
from tova.policies import layer_budgets
from tova.policies.layer_budgets import UNIFORM, LayerBudgets
from tova.policies.old_names import OldNames
from tova.policies.slots import HeadWeights, Slots, Tokens

_NOT_IN_LABEL = ("budget", "layer", "num_layers")
MOST = 2**62
"""The largest integer parameter: what is reckoned with it (a budget and an interval, say) still fits into 64 bits."""
WIDEST = 2**20
"""The most numbers that a record may remember per position (4 MiB in float32)."""


def integer(value: Any) -> int | None:
    """``value`` as a plain int if it is an integer of Python's, numpy's or torch's, else (true, 64.0) None."""
    if isinstance(value, bool) or (isinstance(value, Tensor) and (value.dtype == torch.bool or value.ndim)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


@dataclass(frozen=True)
class Record:
    """One thing remembered per position.

    Attributes:
        fill: the value a position is admitted with.
        width: trailing shape, ``()`` for a number, ``(n,)`` for n numbers (see :class:`Ring`).
        dtype: fixed dtype, or None for the precision the policy runs in (float64 in a stepwise policy and in the
            simulation, float32 on a model).
    """

    fill: float = 0.0
    width: tuple[int, ...] = ()
    dtype: torch.dtype | None = None

    def shape(self, rows: int, slots: int) -> tuple[int, ...]:
        """Of the tensor that holds it."""
        return (rows, slots, *self.width)


class Ring(Record):
    """A record of the last ``width`` observed steps, a number each.

    ``observe`` returns what the newest step adds, [R, S]; it takes the place of the oldest one, ``observed % width``.
    Policies ask for ``slots.ring_sum(name)``. Stored as [R, width, S], so that what one step wrote lies together; a
    newcomer's entries are 0.

    Args:
        width: how many steps.
        dtype: of the entries; None for the precision the policy runs in.
    """

    def __init__(self, width: int, dtype: torch.dtype | None = None) -> None:
        super().__init__(width=(width,), dtype=dtype)

    def shape(self, rows: int, slots: int) -> tuple[int, ...]:
        return (rows, *self.width, slots)

    @property
    def steps(self) -> int:
        """How many steps are remembered."""
        return self.width[0]


@dataclass(frozen=True)
class Schedule:
    """When a layer evicts, and down to what.

    Attributes:
        evict_at: eviction happens in the step after which this many would be held.
        leaves: how many it leaves.
    """

    evict_at: int
    leaves: int

    @property
    def at_once(self) -> int:
        """How many go at a time, where every row holds as many."""
        return self.evict_at - self.leaves

    def held_after(self, held: int, steps: int) -> int:
        """How many are held ``steps`` tokens after ``held`` are."""
        if held + steps < self.evict_at:
            return held + steps
        return self.leaves + (held + steps - self.evict_at) % self.at_once


@dataclass(frozen=True)
class Cost:
    """What a policy costs per held position, as its specification counts it, and per step and eviction."""

    bytes_per_slot: int
    step: str
    eviction: str


@dataclass(frozen=True, kw_only=True)
class Policy(OldNames):
    """Base of all eviction policies. One instance serves one layer of one sequence.

    Args:
        budget: positions a layer may keep between steps; a query sees these and itself.
        sinks: the sequence's first ``sinks`` tokens are never dropped.
        recent_window: the ``recent_window`` newest held positions are never dropped, the newest among them.
        per_head: a kept set per key/value head, by the attention of the query heads that share it, instead of one per
            layer by the attention of all.
        layer_budgets: how the budget is shared out over layers, see :mod:`tova.policies.layer_budgets`.
        layer, num_layers: which layer of how many this is; a cache sets them through :meth:`for_layer`.

    Unless a subclass says otherwise the newest token is never dropped in the step that brought it: nothing has
    attended to it yet, so there is nothing to rank it by. Steps whose weights are not finite are never shown, and a
    position whose score is NaN is dropped only where too few others are left (see :mod:`tova.policies.steps`).

    Raises:
        UsageError: a parameter is no integer or out of its range; the message names it.
    """

    name: ClassVar[str] = ""
    watcher: ClassVar[Watcher | None] = None
    """Who is told of each step; see :mod:`tova.policies.contract`."""
    reads_attention: ClassVar[bool] = True
    """False for a policy that ignores attention: its ``observe`` is never called."""
    least_recent_window: ClassVar[int] = 0
    """1 for a policy that makes no sense without a recent window."""
    newest_competes: ClassVar[bool] = False
    """True for a policy that may drop the newest token at once, by the weight it gave itself (see ``admitted``)."""
    sees_dropped: ClassVar[bool] = False
    """True for a policy whose rows are a softmax over *all* tokens, dropped ones included: what public code that
    simulates by masks computes, and no cache that forgot them could. Keys of dropped tokens are then kept."""
    prompt_only: ClassVar[bool] = False
    """True for a policy that selects once, at the end of a one-shot prompt, and then lets the cache grow."""
    reindexes: ClassVar[bool] = False
    """True for a policy whose sinks are seen at positions counted inside the cache (StreamingLLM's paper)."""
    _stepwise: ClassVar[Callable[..., Any]]
    """What :meth:`start` gives; set by :mod:`tova.policies.stepwise`, which needs this module."""

    budget: int = 512
    sinks: int = 0
    recent_window: int = 0
    per_head: bool = False
    layer_budgets: LayerBudgets = UNIFORM
    layer: int = 0
    num_layers: int = 1

    def __post_init__(self) -> None:
        self.require("num_layers", at_least=1)
        self.require("layer", at_least=0, below=self.num_layers)
        object.__setattr__(self, "layer_budgets", layer_budgets.check(self.name, self.layer_budgets))
        if not isinstance(self.per_head, bool):
            raise UsageError(f"{self.name}: per_head must be true or false, got {self.per_head!r}")
        self.require("budget", at_least=1)
        self.require("sinks", at_least=0, below=self.budget)
        self.require("recent_window", at_least=self.least_recent_window, below=self.budget)
        if self.sinks + self.recent_window > self.budget:
            raise UsageError(
                f"{self.name}: sinks={self.sinks} and recent_window={self.recent_window} together protect more than "
                f"budget={self.budget} positions"
            )

    def require(self, parameter: str, *, at_least: int, below: int | None = None, at_most: int = MOST) -> None:
        """Check that an integer parameter is in ``[at_least, below)`` and at most ``at_most``; store it as an int."""
        value = getattr(self, parameter)
        number = integer(value)
        if number is None:
            raise UsageError(f"{self.name}: {parameter} must be an integer, got {value!r}")
        if number < at_least or (below is not None and number >= below):
            limit = f"at least {at_least}" if below is None else f"at least {at_least} and below {below}"
            hint = f" (budget={self.budget})" if below == self.budget and parameter != "budget" else ""
            raise UsageError(f"{self.name}: {parameter} must be {limit}{hint}, got {value!r}")
        if number > at_most:
            raise UsageError(f"{self.name}: {parameter} must be at most {at_most}, got {value!r}")
        object.__setattr__(self, parameter, number)

    # -- what a policy defines -------------------------------------------------------------------------------

    def records(self) -> dict[str, Record]:
        """What is remembered per held position, by name."""
        return {}

    def observe(self, slots: Slots, attn: Tensor) -> dict[str, Tensor]:
        """The records after one step.

        Args:
            slots: what is held before the newest token joins.
            attn: [R, S] weight the newest token's query gave to each slot, 0 where the slot is empty.

        Returns:
            New values of the records that change, each [R, S, ...], and the newest entry of a ring, [R, S]. Empty
            slots may hold anything.
        """
        return {}

    def admitted(self, self_weight: Tensor) -> dict[str, Tensor]:
        """Records the newest token joins with, where its own weight counts: [R, 1, ...] by name; the rest is filled.

        Of a :class:`Ring` it is the entry of this step, [R, 1].

        Args:
            self_weight: [R, 1], the weight the newest token's query gave to itself.
        """
        return {}

    def features(self, tokens: Tokens) -> dict[str, Tensor]:
        """What is worth knowing of a token besides attention, fixed when it is written: [B, K, T] by name.

        They are found as ``slots.features[name]`` ([R, S]), averaged over key/value heads where these share a kept
        set.
        """
        return {}

    def score(self, slots: Slots) -> Tensor:
        """[R, S]: what is dropped first is the lowest score that is not protected, ties to the lower position."""
        raise NotImplementedError

    def protected(self, slots: Slots) -> Tensor:
        """bool [R, S]: what must not be dropped now. By default sinks, the recent window and the newest token."""
        recent = slots.newest_held(self.newest_protected)
        return recent | slots.first(self.sinks) if self.sinks else recent

    def combine(self, heads: HeadWeights) -> Tensor:
        """[R, S], or [R, C, S] of several steps: what ``observe`` is shown of the weights of several heads: their mean.

        A policy may take their maximum or sum instead, or go back to the logits; where this is not a mean, steps are
        taken by the reference scan.
        """
        return heads.weights.mean(1)

    def excess(self, slots: Slots, schedule: Schedule) -> Tensor:
        """int64 [R, 1]: how many of each kept set go now, the newest token having joined.

        All above ``schedule.leaves`` where ``schedule.evict_at`` are held. A policy that says otherwise drops by a
        threshold or a lifetime, or shares a budget out over the ``slots.kept_sets`` sets of a sequence; rows may then
        hold different numbers, and steps are taken by the reference scan.
        """
        count = slots.count
        return torch.where(count >= schedule.evict_at, count - schedule.leaves, 0)

    def evicts_to(self, asked: int | None = None) -> int:
        """How many positions an eviction leaves that is asked for ``asked``: no more than this layer's share.

        None asks for what a cache asks for, the layer's budget.
        """
        asked = self.layer_budget if asked is None else asked
        return asked if self.layer_budgets == UNIFORM else min(asked, self.layer_budget)

    def keeps_of_prompt(self, tokens: int, held: int) -> int:
        """How many of ``held`` positions remain at the end of a prompt of ``tokens`` tokens that was read at once."""
        fits = held <= self.layer_budget and not self.prompt_only
        return held if fits else min(held, self.evicts_to())

    def evidence(self, slots: Slots) -> Tensor | None:
        """[R, S]: the policy's own record of each position for people to look at; NaN where nothing was observed."""
        return self.score(slots) if self.records() else None

    def cost(self) -> Cost:
        """Bytes per slot as specified, and the time of a step and of an eviction."""
        raise NotImplementedError

    # -- what every policy has -------------------------------------------------------------------------------

    @property
    def bytes_per_slot(self) -> int:
        """Bytes per held position beside its key and value, counted as the specification does."""
        return self.cost().bytes_per_slot

    def tensor_bytes_per_slot(self, dtype: torch.dtype = torch.float32) -> int:
        """Bytes per slot that the tensors of a cache really take: an int64 position, a flag and the records."""
        total = torch.int64.itemsize + torch.bool.itemsize
        for record in self.records().values():
            entries = 1
            for size in record.width:
                entries *= size
            total += entries * (record.dtype or dtype).itemsize
        return total

    @property
    def wants_features(self) -> bool:
        """Whether the policy looks at keys or values."""
        return type(self).features is not Policy.features

    @property
    def newest_protected(self) -> int:
        """How many of the newest held positions are protected: the recent window, and the newest unless it competes."""
        return max(0 if self.newest_competes else 1, self.recent_window)

    @property
    def layer_budget(self) -> int:
        """What this layer is asked to hold: ``budget``, unless ``layer_budgets`` shares it out unevenly."""
        if self.layer_budgets == UNIFORM:
            return self.budget
        share = layer_budgets.share(
            self.name, self.layer_budgets, self.budget, self.layer, self.num_layers, self.recent_window
        )
        return min(max(share, self.sinks + self.recent_window + 1), MOST)

    def schedule(self, evict_every: int = 1) -> Schedule:
        """When a layer of a cache evicts, and down to what: once ``layer_budget + evict_every`` would be held."""
        evict_at = NEVER if self.prompt_only else min(self.layer_budget + evict_every, NEVER)
        return Schedule(evict_at, self.evicts_to())

    @property
    def uneven(self) -> bool:
        """Whether kept sets may hold different numbers, since the policy itself says how many go."""
        return type(self).excess is not Policy.excess

    def for_layer(self, layer: int, layers: int) -> Self:
        """The policy of layer ``layer`` (0-based) of a model with ``layers`` layers."""
        return dataclasses.replace(self, layer=layer, num_layers=layers)

    def start(self) -> Any:
        """The policy at work on one sequence, token by token: a :class:`~tova.policies.stepwise.StepwisePolicy`."""
        return self._stepwise(self)

    def with_budget(self, budget: int) -> Self:
        """The same policy at another budget."""
        return dataclasses.replace(self, budget=budget)

    def parameters(self) -> dict[str, Any]:
        """All parameters by name, for reports and for the address of a result."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.init}

    @property
    def label(self) -> str:
        """The name and those parameters, budget apart, that differ from their defaults: ``h2o recent_window=64``."""
        changed = [
            f"{f.name}={getattr(self, f.name)}"
            for f in dataclasses.fields(self)
            if f.init and f.name not in _NOT_IN_LABEL and getattr(self, f.name) != f.default
        ]
        return " ".join([self.name, *changed])


class Watcher(Protocol):
    """Looks at the steps of a policy of one's own."""

    def joined(self, slots: Slots) -> None:
        """The newest token has joined."""
        ...

    def chosen(self, slots: Slots, candidates: Tensor, excess: Tensor | int) -> None:
        """``excess`` (an int or int64 [R, 1]) of the ``candidates`` (bool [R, S]) are about to go."""
        ...
