"""Rules: a policy's pure functions as an expression, from which the compiled engines are made.

A policy (:class:`tova.policies.Policy`) says in plain torch what it remembers and what goes first. :func:`rule_of`
calls these functions once with symbols and gives the :class:`Rule` they are; engines know no policy by name or class. A
policy that is no expression (it branches on what a tensor holds, say) runs on the reference scan, and :func:`why_not`
says why.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from tova.policies.base import Policy
from tova.rules import tracing
from tova.rules.expression import Node, Rule

__all__ = ["Node", "NotARule", "Rule", "drops_oldest", "how_heads_combine", "is_rule", "rule_of", "why_not"]

_MOST = 4096
_by_value: dict[Any, Any] = {}
_by_identity: dict[Any, Any] = {}


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
    return _remembered(policy, ("rule", dtype, torch.get_default_dtype()), lambda p: _rule_of(p, dtype))


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
    return _remembered(policy, ("combine",), tracing.how_heads_combine)


def _rule_of(policy: Policy, dtype: torch.dtype) -> Rule | NotARule:
    try:
        return tracing.trace(policy, dtype)
    except tracing.NotExpressibleError as e:
        return NotARule(str(e))


def _remembered(policy: Policy, what: tuple[Any, ...], make: Any) -> Any:
    """``make(policy)``, made once for each policy value, or each object where a value cannot be hashed."""
    policy = getattr(policy.watcher, "policy", policy)
    # 1 and 1.0 are equal, and other numbers in an expression.
    kinds = tuple(map(type, vars(policy).values()))
    try:
        key = (policy, kinds, *what)
        found = _by_value.get(key)
    except TypeError:
        return _remembered_by_identity(policy, what, make)
    if found is None:
        if len(_by_value) >= _MOST:
            _by_value.clear()
        found = _by_value[key] = _Found(make(policy))
    return found.value


def _remembered_by_identity(policy: Policy, what: tuple[Any, ...], make: Any) -> Any:
    key = (id(policy), *what)
    found = _by_identity.get(key)
    if found is None:
        found = _by_identity[key] = _Found(make(policy))
        weakref.finalize(policy, _by_identity.pop, key, None)
    return found.value


@dataclass(frozen=True)
class _Found:
    value: Any
