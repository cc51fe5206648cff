"""The one exception a user is meant to read: a sentence that names the option, the value and what would be right."""

from __future__ import annotations

import warnings


class UsageError(ValueError):
    """Something the caller asked for cannot be done; the message says what, and what can."""


def renamed(old: str, new: str, stacklevel: int = 3) -> None:
    """Warn that ``old`` is called ``new`` now; the old name goes with the next release."""
    warnings.warn(f"{old} is called {new} now; the old name goes with the next release", DeprecationWarning, stacklevel)
