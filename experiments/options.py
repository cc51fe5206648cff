"""What the value of an option must be, asked in one place: a check returns it, or says in a sentence what is due."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Sequence
from typing import Any

from tova.errors import UsageError

MOST = 2**62
"""The largest integer: what is reckoned with it still fits into 64 bits."""


def integer(option: str, value: Any, least: int, most: int | None = None) -> int:
    """``value`` as an integer of at least ``least``, at most ``most``.

    Raises:
        UsageError: it is none (true, 64.0 and "64" are none either), or out of this range.
    """
    number = _whole(value)
    top = MOST if most is None else most
    if number is not None and least <= number <= top:
        return number
    if most is None and (number is None or number < least):
        raise UsageError(f"{option}={shown(value)}: must be an integer of at least {least:,}")
    raise UsageError(f"{option}={shown(value)}: must be an integer from {least:,} to {top:,}")


def integers(option: str, values: Any, least: int, most: int | None = None) -> list[int]:
    """``values`` as a list of integers, each as :func:`integer` wants it; at least one.

    Raises:
        UsageError: it is no list, is empty, or one of its values is not right.
    """
    if isinstance(values, str) or not isinstance(values, Sequence) or not values:
        raise UsageError(f"{option}={shown(values)}: must be a list of integers of at least {least:,}, as [1024,4096]")
    return [integer(option, value, least, most) for value in values]


def number(option: str, value: Any, least: float, most: float) -> float:
    """``value`` as a finite number from ``least`` to ``most``."""
    if isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most:
        return float(value)
    raise UsageError(f"{option}={shown(value)}: must be a number from {least:g} to {most:g}")


def boolean(option: str, value: Any) -> bool:
    """``value`` as true or false; neither "maybe" nor 1 is one."""
    if isinstance(value, bool):
        return value
    raise UsageError(f"{option}={shown(value)}: must be true or false")


def one_of(option: str, value: Any, choices: Iterable[str]) -> str:
    """``value`` as one of ``choices``."""
    known = list(choices)
    if isinstance(value, str) and value in known:
        return value
    raise UsageError(f"{option}={shown(value)}: must be one of {', '.join(known)}{closest(value, known)}")


def closest(word: Any, known: Iterable[str]) -> str:
    """`` (did you mean tova?)`` where one of ``known`` is close to ``word``."""
    match = difflib.get_close_matches(str(word), list(known), n=1)
    return f" (did you mean {match[0]}?)" if match else ""


def shown(value: Any) -> str:
    """``value`` as it is written on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(shown(v) for v in value)}]"
    text = str(value)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text):,} characters)"


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None
