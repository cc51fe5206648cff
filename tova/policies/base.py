"""What a policy is, and how one step of it is taken.

A policy is its parameters and a few pure functions over :class:`~tova.policies.slots.Slots`; subclass
:class:`Policy` and say what is remembered (``records``), how a step changes it (``observe``) and what is dropped
first (``score``). The running policy, the simulation and the reference scan all take their steps through
:func:`observe`, :func:`admit` and :func:`choose` below, so a policy is defined in one place.

What is not finite. A step whose head-averaged weights are not all finite (a NaN or an infinity in a query or a key) is
a step about which nothing is known: no record changes, a ring does not advance, ``observed`` does not count, and the
newcomer joins with fill records. Kept sets are independent: only the one whose weights they are. The eviction goes by
the records there are. A score that is NaN is nothing to rank by, so it makes no candidate; where there are fewer
candidates than must go, the oldest held positions that are no sinks go for the rest. So the budget always holds, and
what is poisoned is the oldest at last and leaves.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self

import torch
from torch import Tensor

from tova.errors import UsageError
from tova.policies import layers
from tova.policies.layers import UNIFORM, LayerBudgets
from tova.policies.slots import Slots, Tokens

if TYPE_CHECKING:
    from tova.policies.running import RunningPolicy


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
        width: trailing shape, ``()`` for a number, ``(n,)`` for a ring of n.
        dtype: fixed dtype, or None for the precision the policy runs in (float64 in a running policy and in the
            simulation, float32 on a model).
    """

    fill: float = 0.0
    width: tuple[int, ...] = ()
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Cost:
    """What a policy costs per held position, as its specification counts it, and per step and eviction."""

    bytes_per_slot: int
    step: str
    eviction: str


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Base of all eviction policies. One instance serves one layer of one sequence.

    Args:
        budget: positions a layer may keep between steps; a query sees these and itself.
        sinks: the sequence's first ``sinks`` tokens are never dropped.
        recent_window: the ``recent_window`` newest held positions are never dropped, the newest among them.
        per_head: a kept set per key/value head, by the attention of the query heads that share it, instead of one per
            layer by the attention of all.
        layer_budgets: how the budget is shared out over layers, see :mod:`tova.policies.layers`.
        layer, num_layers: which layer of how many this is; a cache sets them through :meth:`for_layer`.

    Unless a subclass says otherwise the newest token is never dropped in the step that brought it: nothing has
    attended to it yet, so there is nothing to rank it by. Steps whose weights are not finite are never shown, and a
    position whose score is NaN is dropped only where too few others are left (see :mod:`tova.policies.base`).

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
    rounds_weights: ClassVar[bool] = False
    """True for a policy that ranks weights already rounded to the model's dtype, as some public code does."""
    sees_dropped: ClassVar[bool] = False
    """True for a policy whose rows are a softmax over *all* tokens, dropped ones included: what public code that
    simulates by masks computes, and no cache that forgot them could. Keys of dropped tokens are then kept."""
    prompt_only: ClassVar[bool] = False
    """True for a policy that selects once, at the end of a one-shot prompt, and then lets the cache grow."""
    reindexes: ClassVar[bool] = False
    """True for a policy whose sinks are seen at positions counted inside the cache (StreamingLLM's paper)."""

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
        object.__setattr__(self, "layer_budgets", layers.check(self.name, self.layer_budgets))
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
            New values of the records that change, each [R, S, ...]. Empty slots may hold anything.
        """
        return {}

    def admitted(self, own: Tensor) -> dict[str, Tensor]:
        """Records the newest token joins with, where its own weight counts: [R, 1, ...] by name; the rest is filled.

        Args:
            own: [R, 1], the weight the newest token's query gave to itself.
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
    def effective_budget(self) -> int:
        """What this layer is asked to hold: ``budget``, unless ``layer_budgets`` shares it out unevenly."""
        if self.layer_budgets == UNIFORM:
            return self.budget
        share = layers.share(
            self.name, self.layer_budgets, self.budget, self.layer, self.num_layers, self.recent_window
        )
        return min(max(share, self.sinks + self.recent_window + 1), MOST)

    def keeps(self, asked: int) -> int:
        """How many positions remain after ``evict(asked)`` of a running policy: no more than this layer's share."""
        return asked if self.layer_budgets == UNIFORM else min(asked, self.effective_budget)

    def remains(self, seen: int) -> int:
        """How many positions a cache's eviction leaves, ``seen`` tokens having been seen. Usually the budget."""
        return self.keeps(self.effective_budget)

    def for_layer(self, layer: int, layers: int) -> Self:
        """The policy of layer ``layer`` (0-based) of a model with ``layers`` layers."""
        return dataclasses.replace(self, layer=layer, num_layers=layers)

    def start(self) -> RunningPolicy:
        """A running instance: token 0 is held, nothing observed. See :class:`~tova.policies.running.RunningPolicy`."""
        from tova.policies.running import RunningPolicy

        return RunningPolicy(self)

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


def named(policy: Policy) -> str:
    """What a policy is called in a sentence."""
    return policy.name or type(policy).__name__


def ask(policy: Policy, function: str, step: Tensor | int | None, *arguments: Any) -> Any:
    """``policy.function(*arguments)``; what goes wrong in a function of one's own names policy, function and step.

    Raises:
        UsageError: the function of a policy that is not built in raised something, which is its cause.
    """
    try:
        return getattr(policy, function)(*arguments)
    except (UsageError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as e:
        from tova.policies.contract import is_own

        if not is_own(policy):
            raise
        if isinstance(step, Tensor):  # the newest token's position, which has yet to join when it is observed
            step = int(step.max()) + (function == "observe")
        at = "" if step is None else f" at step {step}"
        if isinstance(e, NotImplementedError) and not str(e):
            raise UsageError(f"{named(policy)}: {function} is not implemented, and is needed{at}") from e
        raise UsageError(f"{named(policy)}: {function} failed{at}: {type(e).__name__}: {e}") from e


def new_records(policy: Policy, rows: int, slots: int, dtype: torch.dtype, device: Any = None) -> dict[str, Tensor]:
    """Records of ``rows`` x ``slots`` freshly admitted positions."""
    return {
        name: torch.full((rows, slots, *r.width), r.fill, dtype=r.dtype or dtype, device=device)
        for name, r in ask(policy, "records", None).items()
    }


def observe(
    policy: Policy, slots: Slots, attn: Tensor, active: Tensor | None = None, known: Tensor | None = None
) -> None:
    """Show the policy one step, in place. Rows that are not ``active`` and ``known``, bool [R, 1], stay as they were.

    ``known`` says whose weights are finite; those of the others are zeros here.
    """
    if not policy.reads_attention:
        return
    if known is not None:
        active = known if active is None else known & active
    for name, value in ask(policy, "observe", slots.newest, slots, attn).items():
        old = slots.records[name]
        if active is not None:
            value = torch.where(active.view(-1, *[1] * (old.ndim - 1)), value, old)
        slots.records[name] = value.to(old.dtype)
    slots.observed = slots.observed + (1 if active is None else active.long())


def admit(
    policy: Policy,
    slots: Slots,
    slot: Tensor | int,
    position: Tensor,
    active: Tensor | None = None,
    own: Tensor | None = None,
    known: Tensor | None = None,
) -> None:
    """Let the newest token join, in place: occupy ``slot`` (an index, or int64 [R, 1]) with fresh records.

    ``own`` [R, 1] is the weight it gave to itself, None where tokens do not attend to themselves; ``known`` bool [R, 1]
    says where it is finite, None if everywhere.
    """
    rows = slots.positions.shape[0]
    where = slot if isinstance(slot, Tensor) else torch.full((rows, 1), slot, device=slots.positions.device)
    position = position.expand(rows, 1)
    joins = torch.ones_like(where, dtype=torch.bool) if active is None else active
    slots.held = slots.held.scatter(-1, where, joins | slots.held.gather(-1, where))
    slots.positions = slots.positions.scatter(-1, where, position)
    slots.newest = torch.where(joins, position, slots.newest)
    joined = {} if own is None else ask(policy, "admitted", position, own)
    for name, record in policy.records().items():
        old = slots.records[name]
        index = where.view(rows, 1, *[1] * len(record.width)).expand(rows, 1, *record.width)
        if name in joined:
            fresh = joined[name].to(old.dtype).reshape(index.shape)
            if known is not None:
                fresh = fresh.masked_fill(~known.view(rows, 1, *[1] * len(record.width)), record.fill)
            slots.records[name] = old.scatter(1, index, fresh)
        else:
            slots.records[name] = old.scatter(1, index, record.fill)
    if policy.watcher is not None:
        policy.watcher.joined(slots)


def choose(policy: Policy, slots: Slots, excess: Tensor | int, most: int | None = None) -> Tensor:
    """bool [R, S]: the ``excess`` (an int or int64 [R, 1]) lowest-scored candidates of each row.

    Candidates are the held positions that are not protected and whose score is not NaN. Where they are fewer than must
    go, all of them go, and then the oldest held positions that are no sinks; callers that must not let that pass
    compare counts before. ``most`` is an upper bound on ``excess`` where the caller knows one: it saves reading the
    tensor.
    """
    score = ask(policy, "score", slots.newest, slots)
    if not score.is_floating_point():
        score = score.double()
    candidates = slots.held & ~ask(policy, "protected", slots.newest, slots) & ~score.isnan()
    if policy.watcher is not None:
        policy.watcher.chosen(slots, candidates, excess)
    score = score.masked_fill(~candidates, float("inf"))
    if most is None:
        most = excess if isinstance(excess, int) else int(excess.max())
    if most <= 0:
        return torch.zeros_like(candidates)
    others = slots.held & ~candidates & (slots.positions >= policy.sinks)
    if most == 1:
        tied = candidates & (score == score.amin(-1, keepdim=True))
        tied = tied | (others & ~candidates.any(-1, keepdim=True))
        slot = slots.positions.masked_fill(~tied, torch.iinfo(torch.int64).max).argmin(-1, keepdim=True)
        first = torch.zeros_like(candidates).scatter(-1, slot, True)
        return first & tied & (excess > 0)
    order, _ = slots.in_position_order()
    by_score = order.gather(-1, score.gather(-1, order).argsort(dim=-1, stable=True))
    turn = torch.where(candidates, 0, torch.where(others, 1, 2))  # an infinite score is one, what has none comes later
    by_turn = by_score.gather(-1, turn.gather(-1, by_score).argsort(dim=-1, stable=True))
    rank = by_turn.argsort(dim=-1)
    return (candidates | others) & (rank < excess)


def as_row(attn: Sequence[float] | Tensor | Any, dtype: torch.dtype) -> Tensor:
    """[1, n] in ``dtype`` from a list, an array or a tensor of n weights."""
    return torch.as_tensor(attn, dtype=dtype, device="cpu").reshape(1, -1)
