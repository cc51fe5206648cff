"""A policy at work on one sequence, token by token: the contract every build of a policy is held to."""

from __future__ import annotations

import math
from typing import Any

import torch

from tova.errors import UsageError
from tova.policies import contract
from tova.policies.base import Policy, integer
from tova.policies.slots import Slots
from tova.policies.steps import admit, as_row, ask, choose, is_own, new_records, observe, ring_names

_DTYPE = torch.float64


class StepwisePolicy:
    """The kept set of one layer of one sequence under ``policy``, records in float64.

    The kept set starts as ``{0}``. Each decode step is one :meth:`on_decode_step`, then :meth:`evict` whenever more
    are held than the budget allows.
    """

    def __init__(self, policy: Policy) -> None:
        if policy.wants_features:
            raise UsageError(
                f"{policy.name} ranks by keys or values, which a stream of attention weights does not have"
            )
        if policy.uneven:
            raise UsageError(
                f"{policy.name} says itself how many go (excess), and a stepwise policy is told how many may remain"
            )
        self.policy = policy
        self._slots = Slots(
            positions=torch.zeros(1, 1, dtype=torch.int64, device="cpu"),
            held=torch.ones(1, 1, dtype=torch.bool, device="cpu"),
            records=new_records(policy, 1, 1, _DTYPE, "cpu"),
            observed=torch.zeros(1, 1, dtype=torch.int64, device="cpu"),
            newest=torch.zeros(1, 1, dtype=torch.int64, device="cpu"),
            rings=ring_names(policy),
        )
        # What is asked: the policy, watched through its first steps and its first eviction if it is one's own.
        self._asked = contract.watched(policy, first=1) if is_own(policy) else policy
        self._steps = 0
        self._evicted = False

    def on_decode_step(self, pos: int, attn: Any | None) -> None:
        """Token ``pos`` was just generated: update the records, then let it join.

        Args:
            pos: its absolute position, above every earlier one.
            attn: the weight it gave to each held position in ascending order (``kept`` numbers), or None if
                nothing is known of this step, which then changes no record. So it is if they are not all finite.

        Raises:
            UsageError: ``pos`` is not new, or ``attn`` has another length than the kept set.
        """
        slots = self._slots
        if pos <= int(slots.newest):
            raise UsageError(f"pos must be above the newest position {int(slots.newest)}, got {pos}")
        if attn is not None:
            row = as_row(attn, _DTYPE)
            if row.shape[-1] != self.kept:
                raise UsageError(f"attn must have one weight per held position ({self.kept}), got {row.shape[-1]}")
            if bool(row.isfinite().all()):
                observe(self._asked, slots, row)
        n = slots.positions.shape[-1]
        self._slots = slots.padded(new_records(self.policy, 1, 1, _DTYPE, "cpu"), 1)
        admit(self._asked, self._slots, n, torch.tensor([[pos]], device="cpu"))
        self._steps += 1
        self._unwatched()

    def evict(self, budget: int) -> list[int]:
        """Drop down to ``budget`` positions (or this layer's share, if lower) and return them, ascending.

        Raises:
            UsageError: ``budget`` is no positive integer, or the protected positions alone exceed it.
        """
        asked = integer(budget)
        if asked is None or asked < 1:
            raise UsageError(f"evict: budget must be an integer of at least 1, got {budget!r}")
        target = self.policy.evicts_to(asked)
        excess = self.kept - target
        if excess <= 0:
            return []
        protected = int((self._slots.held & ask(self._asked, "protected", self._slots.newest, self._slots)).sum())
        if protected > target:
            raise UsageError(
                f"{self.policy.name}: {protected} positions are protected, more than the {target} that may remain"
            )
        dropped = choose(self._asked, self._slots, excess)
        self._evicted = True
        self._unwatched()
        slots = self._slots
        victims = slots.positions[dropped].tolist()
        self._slots = slots.selected((~dropped[0]).nonzero()[:, 0].unsqueeze(0))
        return victims

    def _unwatched(self) -> None:
        """From here on the policy is on its own."""
        if self._evicted and self._steps >= contract.STEPS:
            self._asked = self.policy

    @property
    def kept(self) -> int:
        """How many positions are held."""
        return self._slots.positions.shape[-1]

    @property
    def positions(self) -> list[int]:
        """The held positions, ascending."""
        return self._slots.positions[0].tolist()

    def record(self, pos: int) -> float | None:
        """The policy's own record of a position; None if it is not held, not observed yet, or there is none."""
        evidence = self.policy.evidence(self._slots)
        index = (self._slots.positions[0] == pos).nonzero()
        if evidence is None or not len(index):
            return None
        value = float(evidence[0, int(index[0, 0])])
        return None if math.isnan(value) else value

    @property
    def layer_budget(self) -> int:
        """The share of the budget this layer is asked to hold."""
        return self.policy.layer_budget

    @property
    def effective_budget(self) -> int:
        """What the canonical cases call :attr:`layer_budget`."""
        return self.layer_budget

    @property
    def sinks_held(self) -> int:
        """How many of the policy's sink positions are held."""
        return int(self._slots.first(self.policy.sinks).sum())


Policy._stepwise = StepwisePolicy
