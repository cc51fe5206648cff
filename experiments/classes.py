"""The class a group's ``_target_`` names: found, held against what is needed of it, made. Nothing else is called."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from experiments.options import closest, shown
from tova.errors import UsageError

if TYPE_CHECKING:
    from tova.policies import Policy

_METHODS = {
    "model": ("identity", "load"),
    "dataset": ("identity", "load"),
    "task": ("identity", "run", "summarise"),
}
"""What a class must have; its module says more."""
_ATTRIBUTES = {
    "model": ("label", "note"),
    "dataset": ("label", "tokens"),
    "task": ("name", "uses_model", "needs_reference", "length"),
}
"""And what an instance must."""
_SET_BY_US = ("budget", "layer", "num_layers")


def policy_class(target: Any) -> type[Policy]:
    """The policy's class; it is not made, and can be.

    Raises:
        UsageError: it cannot be imported, or is no policy.
    """
    from tova.policies import Policy

    found = _find("policy", target)
    option = f"policy._target_={target}"
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise UsageError(f"{option}: is not a subclass of tova.policies.Policy")
    _check_complete(option, found)
    if takes_budget(found) and found.score is Policy.score:
        raise UsageError(f"{option}: defines no score(slots), which says what is dropped first")
    return found


def takes_budget(policy: type[Policy]) -> bool:
    return any(f.name == "budget" and f.init for f in dataclasses.fields(policy))


def check_options(group: str, config: Mapping[str, Any]) -> None:
    """Raise for an option that the class of ``config`` does not have; its values are not looked at."""
    target = config.get("_target_")
    given = {str(k): v for k, v in config.items() if k != "_target_"}
    if group == "policy":
        _check_policy_options(policy_class(target), given)
    else:
        _check_options(group, _class(group, target), given)


def _check_policy_options(policy: type[Policy], given: Mapping[str, Any]) -> None:
    """Null is no option; and ``full`` lets those of any policy pass, so that a sweep may set them for the others."""
    from tova.policies import Policy

    fields = {f.name: f for f in dataclasses.fields(policy) if f.name not in _SET_BY_US}
    common = {f.name for f in dataclasses.fields(Policy)}
    known = [name for name, f in fields.items() if f.init]
    name = policy.name or policy.__name__
    takes = f"{name} takes {', '.join(known) or 'no options'}"
    for option, value in given.items():
        if option in known or (option in common and (value is None or not takes_budget(policy))):
            continue
        if option == "budget":
            raise UsageError(f"policy.budget={shown(value)}: is an option of its own, budget={shown(value)}; {takes}")
        if option in _SET_BY_US:
            raise UsageError(f"policy.{option}={shown(value)}: each layer is given its own; {takes}")
        if option in fields:
            raise UsageError(f"policy.{option}={shown(value)}: {name} decides that itself; {takes}")
        why = "" if option not in _annotated(policy) else f" (does {policy.__name__} lack @dataclass(frozen=True)?)"
        raise UsageError(f"policy.{option}: there is no such option{why or closest(option, known)}; {takes}")


def make(group: str, config: Mapping[str, Any]) -> Any:
    """The model, dataset or task that ``config`` describes: ``_target_`` and its parameters.

    Raises:
        UsageError: the class cannot be imported, is none of the kind, lacks a parameter, or raised something.
    """
    target = config.get("_target_")
    found = _class(group, target)
    given = {str(k): v for k, v in config.items() if k != "_target_"}
    parameters = inspect.signature(found).parameters
    if _is_own(found):  # what the group's file says of another class, and null, is nothing to this one
        given = {k: v for k, v in given.items() if k in parameters or v is not None}
    for p in parameters.values():
        required = p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)
        if p.name not in given and required:
            raise UsageError(f"{group}.{p.name} has no default and must be given: {group}.{p.name}=...")
    try:
        made = found(**given)
    except UsageError:
        raise
    except Exception as e:
        raise UsageError(f"{group}._target_={target}: cannot be made, {cause(e)}") from e
    for name in _ATTRIBUTES[group]:
        if not hasattr(made, name):
            raise UsageError(f"{group}._target_={target}: has no {name}, which every {group} has")
    for name in ("label", "note", "name"):
        if not isinstance(value := getattr(made, name, ""), str):
            raise UsageError(f"{group}.{name}={shown(value)}: must be text; put it in quotes")
    return made


def _class(group: str, target: Any) -> type:
    """The class of a model, dataset or task."""
    found = _find(group, target)
    option = f"{group}._target_={target}"
    if not isinstance(found, type) or not all(callable(getattr(found, name, None)) for name in _METHODS[group]):
        methods = ", ".join(_METHODS[group])
        raise UsageError(f"{option}: is no {group}, which is a class with the methods {methods}")
    _check_complete(option, found)
    return found


def _check_options(group: str, found: type, given: Mapping[str, Any]) -> None:
    parameters = inspect.signature(found).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    own = _is_own(found)
    for option, value in given.items():
        if option not in known and not (own and value is None):
            from_file = f"; if a file of conf/{group} set it, ~{group}.{option} takes it away" if own else ""
            raise UsageError(
                f"{group}.{option}: there is no such option{closest(option, known)}; {found.__name__} takes "
                f"{', '.join(known) or 'no options'}{from_file}"
            )


def _check_complete(option: str, found: Any) -> None:
    if inspect.isabstract(found):
        raise UsageError(f"{option}: is abstract, {', '.join(sorted(found.__abstractmethods__))} is not defined")


def _is_own(found: type) -> bool:
    """Whether a class is the user's."""
    return found.__module__.partition(".")[0] not in ("experiments", "tova")


def _annotated(found: type) -> set[str]:
    return {name for c in found.__mro__ for name in inspect.get_annotations(c)}


def _find(group: str, target: Any) -> Any:
    """What ``target`` names; modules are imported for it, nothing is called."""
    option = f"{group}._target_={shown(target)}"
    if not isinstance(target, str) or not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)+", target):
        raise UsageError(f"{option}: must name a class, as package.module.Class")
    parts = target.split(".")
    found: Any = None
    for n, part in enumerate(parts, start=1):
        if found is not None and hasattr(found, part):
            found = getattr(found, part)
        elif found is None or isinstance(found, ModuleType):
            found = _import(option, ".".join(parts[:n]), found)
        else:
            raise UsageError(f"{option}: cannot be imported, {'.'.join(parts[: n - 1])} has no {part}")
    return found


def _import(option: str, name: str, parent: ModuleType | None) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as e:
        if e.name != name:
            raise UsageError(f"{option}: cannot be imported, {cause(e)}") from e
        if parent is None:
            raise UsageError(
                f"{option}: cannot be imported, there is no module {name}; run where it lies, or have its folder in "
                "PYTHONPATH"
            ) from e
        _, _, last = name.rpartition(".")
        known = [n for n in vars(parent) if not n.startswith("_")]
        raise UsageError(f"{option}: cannot be imported, {parent.__name__} has no {last}{closest(last, known)}") from e
    except (Exception, SystemExit) as e:
        raise UsageError(f"{option}: cannot be imported, {cause(e)}") from e


def cause(error: BaseException) -> str:
    """What was raised and where: ``ValueError: no luck (mine.py, line 12)``."""
    said = " ".join(str(error).split())
    what = f"{type(error).__name__}: {said}" if said else type(error).__name__
    if isinstance(error, SyntaxError):
        place = (error.filename, error.lineno)
        what = f"{type(error).__name__}: {error.msg}"
    else:
        frames = traceback.extract_tb(error.__traceback__)
        theirs = [f for f in frames if not _is_library(f.filename)]
        frame = (theirs or frames)[-1]
        place = (frame.filename, frame.lineno)
    if len(what) > 300:
        what = f"{what[:300]}..."
    path = Path(str(place[0]))
    shown_path = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{what} ({shown_path}, line {place[1]})"


def _is_library(filename: str) -> bool:
    """Whether a line is of Python, of an installed package, or of this file: not where a user looks first."""
    paths = sysconfig.get_paths()
    libraries = (paths["stdlib"], paths["purelib"], paths["platlib"])
    return filename.startswith(("<", *libraries)) or filename == __file__
