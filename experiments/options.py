"""What the value of an option must be, asked in one place: a check returns it, or says in a sentence what is due."""

from __future__ import annotations

import difflib
import hashlib
import operator
import os
import re
import unicodedata
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tova.errors import UsageError

MOST = 2**62
"""The largest integer: what is reckoned with it still fits into 64 bits."""


def integer(option: str, value: Any, least: int, most: int | None = None, *, instead: str = "") -> int:
    """``value`` as an integer of at least ``least``, at most ``most``.

    Args:
        instead: what else it might have been, for the sentence: ``auto``.

    Raises:
        UsageError: it is none (true, 64.0 and "64" are none either), or out of this range.
    """
    number = _whole(value)
    if number is None or number < least:
        what = f"{instead}, or an integer" if instead else "an integer"
        raise UsageError(f"{option}={shown(value)}: must be {what} of at least {least:,}")
    if number > (most := MOST if most is None else most):
        raise UsageError(f"{option}={shown(value)}: must be at most {most:,}")
    return number


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
    if isinstance(value, str) and _reads_otherwise(value):
        text = f"'{value}'"
    text = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    return text if len(text) <= 120 else f"{text[:100]}... ({len(text):,} characters)"


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _reads_otherwise(text: str) -> bool:
    """Whether a text looks like a number or a switch, so that only its quotes say that it is none."""
    try:
        float(text)
    except ValueError:
        return text.lower() in ("true", "false", "null")
    return True


# -- options of the runner itself ----------------------------------------------------------------------------------

GROUPS = ("policy", "model", "dataset", "task")
"""Each is a class with its parameters."""
CHOSEN = (*GROUPS, "launcher")
"""Groups of which one file must be chosen."""
FIRST = {"tracking": "mode", "sweep": "name"}
"""Options that hold others, and the first of these."""
TRACKING = ("offline", "online", "disabled")


def several(key: str, value: Any) -> UsageError:
    """The sentence for a value where there are several options."""
    meant = value if isinstance(value, str) and value not in ("", "null") else "..."
    return UsageError(
        f"{key}={shown(value)}: {key} is several options; one of them is set as {key}.{FIRST[key]}={meant}"
    )


def tracking_mode(value: Any) -> str:
    """``tracking.mode``."""
    return one_of("tracking.mode", value, TRACKING)


def tracking_project(value: Any) -> str:
    """``tracking.project``, as W&B allows it."""
    if isinstance(value, str) and 0 < len(value.strip()) <= 128 and not set(value) & set("/\\#?%:\n"):
        return value
    raise UsageError(f"tracking.project={shown(value)}: must be 1 to 128 characters, none of them / \\ # ? % :")


def sweep_name(value: Any) -> str:
    """A sweep's name as a folder, W&B and the command line can bear it: ``a/b`` becomes ``a_b``.

    A name that is too long, or of which little would be left, gets some digits of its hash, so that two such names
    stay two. The same name always gives the same folder.

    Raises:
        UsageError: there is nothing in it that a sweep could be called.
    """
    text = str(value) if isinstance(value, int | float) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not any(c.isalnum() for c in text) or any(ord(c) < 32 for c in text):
        raise UsageError(f"sweep.name={shown(value)}: must be one line of text with a letter or a digit in it")
    plain = unicodedata.normalize("NFKD", text)
    plain = "".join(c for c in plain if not unicodedata.combining(c))
    safe = re.sub(r"[^A-Za-z0-9._-]+", "_", plain).strip("._-")
    lost = sum(c.isalnum() and not c.isascii() for c in plain)
    if lost or len(safe) > 64:
        digest = hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()[:8]
        safe = f"{safe[:48]}_{digest}".lstrip("_")
    return safe


def results_dir(value: Any) -> Path:
    """The folder results go to; it need not exist, but it must be possible to make it and to write there.

    Raises:
        UsageError: it is none, or cannot be written.
    """
    if not isinstance(value, str) or not value.strip() or "\0" in value:
        raise UsageError(f"results_dir={shown(value)}: must be the path of a folder, as results_dir=results/runs")
    path = Path(value).expanduser()
    try:
        there = next(p for p in (path, *path.parents, *path.absolute().parents) if p.exists() or p.is_symlink())
    except OSError as e:
        raise UsageError(f"results_dir={shown(value)}: {e.strerror or e}") from e
    if not there.is_dir():
        what = "is a file" if there == path else f"{there} is a file"
        raise UsageError(f"results_dir={value}: {what}; results need a folder")
    if not os.access(there, os.W_OK | os.X_OK):
        what = "it" if there == path else str(there)
        raise UsageError(f"results_dir={value}: {what} cannot be written; give another folder")
    return path


# -- the command line -----------------------------------------------------------------------------------------------


def relaxed(words: Sequence[str], own: Iterable[str] = ()) -> list[str]:
    """The words of a command line as Hydra should see them.

    Options of a group, ``policy.fade=0.8``, are set whether or not the group's file names them (Hydra's ``++``): what
    there is to be set is for the class to say, which :func:`experiments.planning.plan` asks. And ``-m`` may stand
    anywhere, not only before the first option.

    Args:
        words: the command line, or a sweep's choices out of an experiment's file.
        own: flags that are none of Hydra's and are left as they are.

    Raises:
        UsageError: a word begins with dashes and is no flag, or a group is given something that is no name.
    """
    from hydra._internal.utils import get_args_parser

    flags = [*get_args_parser()._option_string_actions, *own]
    found: list[str] = []
    multirun = False
    for word in words:
        if word in ("-m", "--multirun"):
            multirun = True
            continue
        if word[:1] in _DASHES and word not in flags:
            _no_flag(word, flags)
        if match := re.fullmatch(rf"\+?\+?((?:{'|'.join(GROUPS)})\.[\w.]*\w=.*)", word, re.DOTALL):
            word = f"++{match[1]}"
        elif match := re.fullmatch(rf"\+?\+?({'|'.join(FIRST)})=(?!\{{)(.*)", word, re.DOTALL):
            raise several(match[1], None if match[2] == "null" else match[2])
        elif match := re.fullmatch(rf"({'|'.join(CHOSEN)}|experiment|hydra/\w+)=.*", word, re.DOTALL):
            _check_choice(match[1], word)
        found.append(word)
    return ["-m", *found] if multirun else found


_DASHES = "-\u2010\u2011\u2012\u2013\u2014\u2015\u2212"


def _no_flag(word: str, flags: Iterable[str]) -> None:
    bare = word.lstrip(_DASHES)
    flag = "-" * (1 if len(bare) == 1 else 2) + bare
    if flag in flags:
        raise UsageError(f"{word}: begins with a dash that is none of the keyboard's, or with too few; type {flag}")
    if "=" in bare and not f"--{bare}".startswith(tuple(f"{f}=" for f in flags)):
        raise UsageError(f"{word}: options are written without dashes, {bare}")
    if "=" not in bare:
        long = [f for f in flags if f.startswith("--")]
        raise UsageError(f"{word}: there is no such flag{closest(flag, long)}; the flags are {', '.join(long)}")


def _check_choice(group: str, word: str) -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.core.override_parser.types import ChoiceSweep
    from hydra.errors import OverrideParseException

    try:
        value = OverridesParser.create().parse_override(word).value()
    except OverrideParseException:
        return  # Hydra says so itself
    if isinstance(value, list):
        choices = ",".join(shown(v) for v in value)
        raise UsageError(f"{group}={shown(value)}: a cell has one {group}; several make a sweep, -m {group}={choices}")
    for one in value.list if isinstance(value, ChoiceSweep) else [value]:
        if one is None and group not in CHOSEN:
            continue
        if one is None or one == "" or isinstance(one, bool | int | float):
            raise UsageError(f"{group}={shown(one)}: must be the name of a {group}; --help lists them")
