"""Lengths in tokens: a number of them, or a share of a document's length. Budgets and prompts are such."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from experiments.options import shown
from tova.errors import UsageError

MOST = 2**31
"""No text is so long; numbers far beyond would not fit where positions do."""


@dataclass(frozen=True)
class Length:
    """A number of tokens, or a share of a document's length, rounded down.

    Args:
        option: what it is called on the command line, ``budget`` or ``prompt``.
        value: an integer, or a number strictly between 0 and 1.
        least: the fewest tokens it may come to.
    """

    option: str
    value: int | float
    least: int = 1

    def tokens(self, length: int) -> int:
        """In tokens, for a document of ``length`` tokens.

        Raises:
            UsageError: it comes to fewer than ``least``.
        """
        if isinstance(self.value, int):
            return self.value
        # A share that is a whole number of tokens on paper must not lose one to binary fractions (0.29 of 100).
        tokens = math.floor(self.value * length + 1e-9)
        if tokens < self.least:
            least = "one token" if self.least == 1 else f"{self.least} tokens"
            raise UsageError(f"{self.option}={self.value}: is less than {least} of a document of {length} tokens")
        return tokens

    def __str__(self) -> str:
        return str(self.value)


def budget_of(value: Any) -> Length:
    """How many positions a layer may keep, from a configuration.

    Raises:
        UsageError: it is neither an integer from 1 on nor a share strictly between 0 and 1.
    """
    wanted = "an integer of tokens (budget=256), or a share below 1 of the document's length (budget=0.125)"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise UsageError(f"budget={shown(value)}: must be {wanted}")
    if value == 1 and isinstance(value, float):
        raise UsageError(
            f"budget={value}: a share of 1 would be the whole document, which is policy=full; one token is budget=1"
        )
    if isinstance(value, float) and not 0 < value < 1:
        meant = f"; write budget={int(value)}" if value > 1 and value.is_integer() else ""
        raise UsageError(f"budget={value}: must be {wanted}{meant}")
    if value < 1 and isinstance(value, int):
        raise UsageError(f"budget={value}: must be at least 1 token, or a share above 0 and below 1")
    if value >= MOST:
        raise UsageError(f"budget={value}: must be below {MOST:,} tokens; no limit at all is policy=full")
    return Length("budget", value)


def prompt_of(value: Any) -> Length | None:
    """How much of a document is its prompt, from a configuration; None where there is none.

    Raises:
        UsageError: it is neither null, nor an integer from 2 on, nor a share strictly between 0 and 1.
    """
    if value is None:
        return None
    whole = isinstance(value, int) and not isinstance(value, bool) and 2 <= value < MOST
    if not whole and not (isinstance(value, float) and 0 < value < 1):
        raise UsageError(
            f"prompt={shown(value)}: must be null, an integer of at least 2 tokens (prompt=1024), or a share below 1 "
            "of the document's length (prompt=0.5)"
        )
    return Length("prompt", value, least=2)


def prompt_tokens(prompt: Length | None, length: int) -> int:
    """The prompt of a document of ``length`` tokens; 0 without one.

    Raises:
        UsageError: no token would follow it.
    """
    if prompt is None:
        return 0
    tokens = prompt.tokens(length)
    if tokens >= length:
        raise UsageError(
            f"prompt={prompt}: is {tokens} tokens of a document of {length}; at least one token must follow it"
        )
    return tokens
