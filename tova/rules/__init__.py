"""Rules: a policy's pure functions as an expression, from which the compiled engines are made.

A policy (:class:`tova.policies.Policy`) says in plain torch what it remembers and what goes first. :func:`rule_of`
calls these functions once with symbols and gives the :class:`Rule` they are; engines know no policy by name or class. A
policy that is no expression (it branches on what a tensor holds, say) runs on the reference scan, and :func:`why_not`
says why.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tova.policies import contract
from tova.policies.base import Policy
from tova.rules import tracing
from tova.rules.expression import Node, Rule

__all__ = [
    "Node",
    "NotARule",
    "Rule",
    "drops_oldest",
    "how_heads_combine",
    "is_rule",
    "remembered",
    "rule_of",
    "why_not",
]

_MOST = 4096
_by_value: dict[Any, Any] = {}
_by_identity: dict[int, tuple[weakref.ref[Policy], dict[Any, Any]]] = {}


@dataclass(frozen=True)
class NotARule:
    """A policy is no expression.

    Attributes:
        reason: a sentence without the policy's name: which function does what.
    """

    reason: str


def rule_of(policy: Policy, dtype: torch.dtype = torch.float32) -> Rule | NotARule:
    """The expression of ``policy``'s pure functions, or why there is none.

    Args:
        dtype: of weights and of records without a dtype of their own: float32 on a model, float64 in a simulation.
    """
    return remembered(policy, ("rule", dtype, torch.get_default_dtype()), lambda p: _rule_of(p, dtype))


def is_rule(policy: Policy, dtype: torch.dtype = torch.float32) -> bool:
    """Whether ``policy`` is an expression."""
    return isinstance(rule_of(policy, dtype), Rule)


def why_not(policy: Policy) -> str | None:
    """Why ``policy`` runs on no compiled engine, a sentence; None if it does."""
    if policy.uneven:
        return "excess is its own: it decides itself how many go"
    if how_heads_combine(policy) is None:
        return "combine is not a mean over heads"
    if policy.sees_dropped:
        return "it looks at dropped tokens"
    rule = rule_of(policy)
    return rule.reason if isinstance(rule, NotARule) else None


def drops_oldest(policy: Policy) -> bool:
    """Whether ``policy`` always drops the oldest position that is no sink, one look at its rule says.

    That the score is the position, that nothing is remembered or looked at, and that no more is protected than by
    default; so counting says what goes when.
    """
    if policy.uneven or policy.sees_dropped:
        return False
    rule = rule_of(policy)
    return isinstance(rule, Rule) and rule.drops_oldest


def how_heads_combine(policy: Policy) -> str | None:
    """How weights of heads that share a kept set become one: ``mean``, ``rounded mean``, or None for anything else.

    The rounded mean is of weights rounded to the model's dtype.
    """
    return remembered(policy, ("combine",), tracing.how_heads_combine)


def _rule_of(policy: Policy, dtype: torch.dtype) -> Rule | NotARule:
    try:
        return tracing.trace(policy, dtype)
    except tracing.NotExpressibleError as e:
        return NotARule(str(e))


def remembered(policy: Policy, what: Any, make: Callable[[Policy], Any]) -> Any:
    """``make(policy)``, made once for each policy value, or each object where a value cannot be hashed.

    A watched policy is the one it stands for. Objects are known again without a look at their values, since a step of a
    small cache costs little more than that.
    """
    if policy.watcher is not None:
        policy = contract.unwatched(policy)
    known = _by_identity.get(id(policy))
    if known is None or known[0]() is not policy:
        known = _by_identity[id(policy)] = (weakref.ref(policy), {})
        weakref.finalize(policy, _by_identity.pop, id(policy), None)
    made = known[1]
    if what not in made:
        made[what] = _by_its_value(policy, what, make)
    return made[what]


def _by_its_value(policy: Policy, what: Any, make: Callable[[Policy], Any]) -> Any:
    values = vars(policy)
    # 1 and 1.0 are equal, and other numbers in an expression.
    key = (type(policy), what, tuple(values), tuple(values.values()), tuple(map(type, values.values())))
    try:
        hash(key)
    except TypeError:
        return make(policy)
    if key not in _by_value:
        if len(_by_value) >= _MOST:
            _by_value.clear()
        _by_value[key] = make(policy)
    return _by_value[key]
