"""Shapes in signatures are checked while the tests run: by jaxtyping and beartype, in the modules named here.

jaxtyping's own import hook wraps every function of a module, compiled ones before they are compiled; this one only
plain functions (not numba's or Triton's) whose annotations have shapes, once the module is there, and only those
annotations. So it costs nothing elsewhere, and what is for type checkers only is not looked for.
"""

from __future__ import annotations

import functools
import importlib.machinery
import sys
import types
from typing import Any

import jaxtyping
from beartype import beartype

MODULES = ("tova.measures",)
NAMES = {name: getattr(jaxtyping, name) for name in ("Bool", "Float", "Int")}


def checked(function: types.FunctionType) -> types.FunctionType:
    """The same function, or one that checks the shapes in its signature where it has some."""
    said = function.__annotations__
    names = {**function.__globals__, **NAMES}
    hints = {
        name: eval(hint, names) if isinstance(hint, str) and any(f"{kind}[" in hint for kind in NAMES) else Any
        for name, hint in said.items()
    }
    if all(hint is Any for hint in hints.values()):
        return function
    copy = types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__, copy.__annotations__, copy.__qualname__ = function.__kwdefaults__, hints, function.__qualname__
    return functools.wraps(function)(jaxtyping.jaxtyped(beartype(copy), typechecker=None))


def check(place: Any, module: str) -> int:
    """Replace the functions of a module, and of its classes, by checking ones; how many there are."""
    count = 0
    for name, thing in list(vars(place).items()):
        inner = thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing
        if isinstance(inner, type) and inner.__module__ == module and inner is not place:
            count += check(inner, module)
        elif not isinstance(inner, types.FunctionType) or inner.__module__ != module:
            continue
        elif (new := checked(inner)) is not inner:
            setattr(place, name, new if inner is thing else type(thing)(new))
            count += 1
    return count


class _Loader(importlib.machinery.SourceFileLoader):
    def exec_module(self, module: types.ModuleType) -> None:
        super().exec_module(module)
        check(module, module.__name__)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if name not in MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


def install() -> None:
    """From now on the modules named above are checked; before any of them is imported."""
    already = [name for name in MODULES if name in sys.modules]
    assert not already, f"{already} were imported before their shapes could be checked"
    sys.meta_path.insert(0, _Finder)
