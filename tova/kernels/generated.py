"""Code that is written by code: kept as files, since numba and Triton look for a function's source and cache by it.

A file goes where compiled code goes (:mod:`tova.kernels.compile`): into ``NUMBA_CACHE_DIR`` if that is set, else beside
the source, else into the user's own cache folder or the temporary one. What runs is never read from there, but always
what was just generated. Where no folder can be written it is kept in memory, and compiled anew in every process.
"""

from __future__ import annotations

import contextlib
import hashlib
import linecache
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from tova.kernels.compile import own_folder, sources

_FOLDER = "tova_generated"
_loaded: dict[str, ModuleType] = {}


def load(kind: str, source: str) -> ModuleType:
    """The module that ``source`` is, made once in a process.

    Args:
        kind: what it is of, part of its name: ``numba``, ``triton``.
    """
    digest = hashlib.sha256(f"{sources()}\n{source}".encode()).hexdigest()[:24]
    name = f"tova_{kind}_{digest}"
    found = _loaded.get(name)
    if found is not None:
        return found
    path = _file(name, source)
    module = ModuleType(name)
    module.__file__ = path
    exec(compile(source, path, "exec"), module.__dict__)
    sys.modules[name] = module
    _loaded[name] = module
    return module


def _file(name: str, source: str) -> str:
    """Where the source lies; a name that no file has if it can be written nowhere."""
    for folder in _folders():
        path = folder / f"{name}.py"
        try:
            if path.is_file() and path.read_text() == source:
                return str(path)
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _write(path, source)
        except (OSError, UnicodeError):
            continue
        return str(path)
    path = Path(f"<{name}>")
    linecache.cache[str(path)] = (len(source), None, source.splitlines(keepends=True), str(path))
    return str(path)


def _write(path: Path, source: str) -> None:
    """All of it or nothing, whoever else writes the same file at the same time."""
    handle, temporary = tempfile.mkstemp(suffix=".tmp", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as file:
            file.write(source)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _folders() -> Iterator[Path]:
    """Where it may go, best first."""
    asked = os.environ.get("NUMBA_CACHE_DIR")
    if asked:
        yield Path(asked) / _FOLDER
    else:
        yield Path(__file__).parent / "__pycache__" / _FOLDER
        with contextlib.suppress(RuntimeError):  # nobody's home
            yield Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / _FOLDER
    own = own_folder()
    if own is not None:
        yield own / _FOLDER
