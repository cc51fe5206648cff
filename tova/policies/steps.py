"""One step of a policy: it observes, the newest token joins, and what is too much goes.

Every engine that asks a policy's own functions takes its steps through :func:`take_step`: the reference scan, the fixed
point and the plain decode step; the stepwise policy goes through its parts. The compiled engines take the same
functions as expressions (:mod:`tova.rules`).

What is not finite. A step whose combined weights are not all finite (a NaN or an infinity in a query or a key) is a
step about which nothing is known: no record changes, a ring does not advance, ``observed`` does not count, and the
newcomer joins with fill records. Kept sets are independent: only the one whose weights they are. The eviction goes by
the records there are. A score that is NaN is nothing to rank by, so it makes no candidate; where there are fewer
candidates than must go, the oldest held positions that are no sinks go for the rest. So the budget always holds, and
what is poisoned is the oldest at last and leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tova.errors import UsageError
from tova.eviction_log import NEVER
from tova.policies.base import Policy, Ring, Schedule
from tova.policies.slots import Slots


def take_step(
    policy: Policy,
    slots: Slots,
    slot: Tensor | int,
    position: Tensor,
    row: Tensor,
    schedule: Schedule,
    *,
    active: Tensor | None = None,
    known: Tensor | None = None,
    held: int | None = None,
) -> Tensor | None:
    """One step, in place; bool [R, S] of what was dropped, None if nothing was.

    Args:
        slot: the newcomer's, an index or int64 [R, 1].
        position: int64 [R, 1], the newcomer's.
        row: [R, S], the weights of its query, its own among them; 0 where it does not look.
        active: bool [R, 1], rows in which there is a newcomer; None if in all.
        known: bool [R, 1], rows whose weights are finite (those of others are zeros); None if all are.
        held: how many every row holds before the step; None if rows may differ.
    """
    where = slot if isinstance(slot, Tensor) else torch.full((len(row), 1), slot, device=row.device)
    observe(policy, slots, row.masked_fill(~slots.held, 0.0), active, known)
    admit(policy, slots, where, position, active, self_weight=row.gather(-1, where), known=known)
    if schedule.evict_at == NEVER:  # within a prompt that is read at once nothing goes, whatever the policy says
        return None
    if held is not None:
        if held + 1 < schedule.evict_at:
            return None
        dropped = choose(policy, slots, held + 1 - schedule.leaves)
    else:
        excess: Tensor = ask(policy, "excess", slots.newest, slots, schedule)
        if row.device.type == "cpu" and not bool(excess.any()):
            return None
        most = None if policy.uneven else min(max(schedule.at_once, 1), slots.held.shape[1])
        dropped = choose(policy, slots, excess, most)
    slots.held = slots.held & ~dropped
    return dropped


def is_own(policy: Policy) -> bool:
    """Whether ``policy`` is the user's own and not built in; a subclass of one that is may have changed anything."""
    return not type(policy).__module__.startswith("tova.policies.")


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
        name: torch.full(r.shape(rows, slots), r.fill, dtype=r.dtype or dtype, device=device)
        for name, r in ask(policy, "records", None).items()
    }


def ring_names(policy: Policy) -> frozenset[str]:
    """Which of the policy's records are rings."""
    return frozenset(name for name, r in ask(policy, "records", None).items() if isinstance(r, Ring))


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
        if name in slots.rings:
            turn = (slots.observed % old.shape[1]).unsqueeze(-1).expand(-1, 1, old.shape[2])
            value = old.scatter(1, turn, value.to(old.dtype).unsqueeze(1))
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
    self_weight: Tensor | None = None,
    known: Tensor | None = None,
) -> None:
    """Let the newest token join, in place: occupy ``slot`` (an index, or int64 [R, 1]) with fresh records.

    ``self_weight`` [R, 1] is the weight it gave to itself, None where tokens do not attend to themselves; ``known``
    bool [R, 1] says where it is finite, None if everywhere.
    """
    rows = slots.positions.shape[0]
    where = slot if isinstance(slot, Tensor) else torch.full((rows, 1), slot, device=slots.positions.device)
    position = position.expand(rows, 1)
    joins = torch.ones_like(where, dtype=torch.bool) if active is None else active
    slots.held = slots.held.scatter(-1, where, joins | slots.held.gather(-1, where))
    slots.positions = slots.positions.scatter(-1, where, position)
    slots.newest = torch.where(joins, position, slots.newest)
    joined = {} if self_weight is None else ask(policy, "admitted", position, self_weight)
    for name, record in policy.records().items():
        if name not in joined:
            slots.records[name] = slots.scattered(name, where, record.fill)
            continue
        fresh = joined[name].to(slots.records[name].dtype)
        if name in slots.rings:  # the entry of this step, which has been observed already
            width = slots.records[name].shape[1]
            other = torch.arange(width, device=where.device) != (slots.observed - 1) % width
            fresh = fresh.expand(rows, width).masked_fill(other, record.fill).unsqueeze(-1)
        if known is not None:
            fresh = fresh.masked_fill(~known.view(rows, *[1] * (fresh.ndim - 1)), record.fill)
        slots.records[name] = slots.scattered(name, where, fresh)
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
