"""Built-in policies at the size of a small test: one table for all of them.

It is keyed by parameter, not by policy: a parameter that a policy's class sets to more than a small test can bear
(a window of 32 at a budget of 12) is set to what stands here. So a new built-in policy needs a line only for a
parameter of its own that must be smaller in a test.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tova import policies
from tova.policies import POLICIES, Policy

BUDGET = 12
SMALL: dict[str, int] = {"recent_window": 4, "obs_window": 8, "pool_kernel": 3, "history": 20, "beta": 4}
"""The most a small test gives a policy of each parameter; what a class sets to less (or to nothing) stays."""

EVICTING = [name for name in POLICIES if name != "full"]
STEPWISE = [name for name, made in POLICIES.items() if not made.prompt_only and name != "full"]
"""Those that drop as they go, not once at the end of a prompt."""


def options_of(name: str, **more: Any) -> dict[str, Any]:
    """What a small test gives the policy besides its budget; ``more`` wins. Keywords only what the policy takes."""
    own = {f.name: f.default for f in dataclasses.fields(POLICIES[name]) if f.init}
    small = {p: most for p, most in SMALL.items() if isinstance(default := own.get(p), int) and default > most}
    return small | more


def small(name: str, budget: int = BUDGET, **more: Any) -> Policy:
    """The policy as a small test runs it; ``full`` takes no budget."""
    if name == "full":
        return policies.make(name)
    return policies.make(name, budget=budget, **options_of(name, **more))
