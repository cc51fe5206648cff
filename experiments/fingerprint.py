"""What code measures a cell, as a digest: edited code gives a new address, and is never mistaken for the old one.

A cell's numbers are made by the engine (``tova``), by its policy, its task, its model's and its dataset's class, and by
what these import. All of it that is not somebody else's library is read: comments and docstrings apart, every change
counts. Files are known by what is in them, not by what they are called or where they lie.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import io
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path

_OURS = ("tova", "experiments")
_REGISTRIES = ("tova", "tova.policies", "experiments", "experiments.report")
"""Packages whose ``__init__`` only lists what there is: one policy more changes no other's numbers."""
_PLUMBING = ("tova.check", "tova.spans", "experiments.cells", "experiments.store", "experiments.report")
"""Modules that judge, keep or print numbers and make none."""


def digest(modules: Iterable[str]) -> str:
    """Sixteen hex digits for the code of ``modules``, of the engine and of all they import."""
    found = sorted({_code(path) for path in files(modules).values()})
    return hashlib.sha256("".join(found).encode()).hexdigest()[:16]


def files(modules: Iterable[str]) -> dict[str, Path]:
    """Module -> file, for ``modules``, the engine and all of theirs and ours that they import."""
    waiting = [*modules, *_engine()]
    found: dict[str, Path] = {}
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        path = _own(name)
        if path is None or name.startswith(_PLUMBING):
            continue
        if name not in _REGISTRIES:
            found[name] = path
            waiting += imported(path, name, path.stat().st_mtime_ns)
    return found


@lru_cache(maxsize=1)
def _engine() -> tuple[str, ...]:
    """All of tova but the single policies, and how many tokens a budget comes to."""
    root = _own("tova")
    assert root is not None
    names = []
    for path in sorted(root.parent.rglob("*.py")):
        parts = path.relative_to(root.parent.parent).with_suffix("").parts
        if "__pycache__" in parts:  # code that rules were written as; it follows from what is counted
            continue
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if not name.startswith("tova.policies."):
            names.append(name)
    return (*names, "tova.policies.base", "experiments.lengths")


@lru_cache(maxsize=1024)
def _own(module: str) -> Path | None:
    """The file of a module that is ours or the user's; None for a library's, and for what is no module."""
    top, *rest = module.split(".")
    root = _root(top)  # only the top is looked up: looking up what lies below would import what lies above
    if root is None:
        return None
    if not rest:
        return root if root.is_file() else None
    if root.name != "__init__.py":
        return None
    place = root.parent.joinpath(*rest)
    for path in (place / "__init__.py", place.with_suffix(".py"), *sorted(place.parent.glob(f"{place.name}.*.so"))):
        if path.is_file():
            return path
    return None


@lru_cache(maxsize=256)
def _root(top: str) -> Path | None:
    if not top:
        return None
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    if spec.origin is None and spec.submodule_search_locations:  # a folder without __init__.py
        path = Path(next(iter(spec.submodule_search_locations)), "__init__.py")
    elif spec.origin is not None and spec.origin.endswith((".py", ".so")):
        path = Path(spec.origin)
    else:
        return None
    if top in _OURS:
        return path
    places = [sysconfig.get_paths()[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")]
    resolved = path.resolve()
    theirs = any(resolved.is_relative_to(Path(place).resolve()) for place in places)
    return None if theirs or {"site-packages", "dist-packages"} & set(resolved.parts) else path


@lru_cache(maxsize=1024)
def imported(path: Path, module: str, changed: int) -> tuple[str, ...]:
    """Names of the modules that a file, last changed then, imports anywhere; those for type checkers apart."""
    if path.suffix != ".py":
        return ()
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    names: list[str] = []
    for node in _statements(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            names += [base, *(f"{base}.{alias.name}" for alias in node.names)]
    return tuple(names)


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from _statements(child)


def _code(path: Path) -> str:
    """The digest of a file's code."""
    return _code_of(str(path), path.stat().st_mtime_ns, path.stat().st_size)


@lru_cache(maxsize=1024)
def _code_of(path: str, changed: int, size: int) -> str:
    data = Path(path).read_bytes()
    if path.endswith(".py"):
        data = "\x00".join(_tokens(data)).encode()
    return hashlib.sha256(data).hexdigest()


def _tokens(source: bytes) -> Iterator[str]:
    """A file's tokens without comments, blank lines and docstrings; the same on every version of Python."""
    text = io.BytesIO(source)
    at_start = True  # of a statement: a string there is a docstring, or has no effect
    pending = ""
    depth, f_string = 0, ""
    for token in tokenize.tokenize(text.readline):
        kind = tokenize.tok_name[token.type]
        # From Python 3.12 on an f-string comes in pieces; before, it was one string.
        if kind in ("FSTRING_START", "FSTRING_END"):
            depth += 1 if kind == "FSTRING_START" else -1
            f_string += token.string
            if depth == 0:
                yield "".join(f_string.split())
                f_string, at_start = "", False
            continue
        if depth:
            f_string += token.string
            continue
        if kind in ("COMMENT", "NL", "ENCODING", "ENDMARKER"):
            continue
        if kind == "STRING" and token.string[:2].lower().strip("r\"'") == "f":
            # One token before Python 3.12, pieces from then on: space inside it is not told apart.
            yield pending + "".join(token.string.split())
            pending, at_start = "", False
            continue
        if kind == "STRING" and at_start:
            pending = token.string
            at_start = False
            continue
        if kind == "NEWLINE" and pending:
            pending, at_start = "", True
            continue
        if pending:
            yield pending
            pending = ""
        at_start = kind in ("NEWLINE", "INDENT", "DEDENT")
        yield kind if at_start else token.string
