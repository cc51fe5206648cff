"""What does not change while the new tokens of a call go by, and what a policy asks of them beside attention."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from tova.errors import UsageError
from tova.layer import NEVER, Attention, LayerState, Visibility
from tova.policies import contract
from tova.policies.base import Policy, Schedule
from tova.policies.slots import Slots, Tokens
from tova.policies.steps import ask, is_own


@dataclass(frozen=True)
class Call:
    """New tokens of a layer, under which policy and attention, and when something is dropped.

    Attributes:
        visibility: what queries may look at beside causality; None if everything.
        evict_every: evict once ``budget + evict_every`` are held.
        one_shot: nothing is dropped among the new tokens until the last has been seen.
    """

    policy: Policy
    attention: Attention
    visibility: Visibility | None = None
    evict_every: int = 1
    one_shot: bool = False

    @cached_property
    def schedule(self) -> Schedule:
        """When something is dropped within the call."""
        schedule = self.policy.schedule(self.evict_every)
        return Schedule(NEVER, schedule.leaves) if self.one_shot else schedule

    def watched(self, state: LayerState, steps: int, *, first: bool) -> Call:
        """The same with the policy watched, if it is the user's own and this is its first time (``first``), or its
        first eviction is within the next ``steps`` tokens."""
        if is_own(self.policy) and (first or self._begins_to_evict(state, steps)):
            return replace(self, policy=contract.watched(self.policy))
        return self

    def _begins_to_evict(self, state: LayerState, steps: int) -> bool:
        """Whether some row reaches its first eviction within ``steps`` tokens."""
        at = self.schedule.evict_at
        if not state.ragged:
            return state.seen < at <= state.seen + steps
        before = state.slots.newest + 1
        return bool(((before < at) & (before + steps >= at)).any())

    def features(self, key: Tensor, value: Tensor, positions: Tensor, kept_sets: int) -> dict[str, Tensor]:
        """The policy's features of new tokens, [R, T] or [R, T, n] by name, averaged over heads that share a set.

        Args:
            key: [B, K, T, D] and value [B, K, T, E], positions: int64 [R, T].
        """
        if not self.policy.wants_features:
            return {}
        rotation = self.attention.rotation
        unrotate = None if rotation is None else (lambda x, at: rotation.turn(x, at, None))
        batch, kv_heads, steps = key.shape[:3]
        tokens = Tokens(key, value, positions.view(batch, kept_sets, steps)[:, 0], unrotate)
        out = {}
        for name, feature in ask(self.policy, "features", positions, tokens).items():
            shared = feature.float().view(batch, kept_sets, kv_heads // kept_sets, steps, *feature.shape[3:]).mean(2)
            out[name] = shared.flatten(0, 1)
        return out

    def reindexed(
        self, logits: Tensor, query: Tensor, keys: Tensor, positions: Tensor, slots: Slots, count: Tensor
    ) -> Tensor:
        """Logits [B, H, T, N] with the sinks at positions counted inside the cache, for a policy that does that.

        ``positions`` int64 [B, T] are the queries' own, ``count`` int64 [B, 1] is what is held before the first of
        them. A query's position inside the cache is how many are held before it; it is turned there to look at the
        sinks, whose own positions stay. The window's tokens keep their distances.
        """
        policy, rotation = self.policy, self.attention.rotation
        if not policy.reindexes or self.one_shot:
            return logits
        if rotation is None:
            raise UsageError(f"{policy.name} re-rotates keys, and how this model rotates is not known here")
        budget = policy.layer_budget
        inside = count + (positions - positions[:, :1].clamp_min(0))
        inside = torch.where(inside >= self.schedule.evict_at, budget + (inside - budget) % self.evict_every, inside)
        moved = rotation.turn(query, positions, inside)
        sink = ((slots.positions >= 0) & (slots.positions < policy.sinks))[:, None, None, : keys.shape[2]]
        return torch.where(sink, self.attention.logits(moved, keys), logits)
