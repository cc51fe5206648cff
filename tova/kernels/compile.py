"""How the numba engines are compiled, and where what was compiled is kept: the one place that knows of either.

Compiled code is kept where numba keeps it: in ``NUMBA_CACHE_DIR`` if that is set, else beside the source, else in the
user's own cache folder. Where none of these can be written (a read-only installation, run as a user without a home) it
is kept in a folder of this user's in the system's temporary folder, and where even that fails it is compiled anew in
every process. A cache that breaks later, on a full disk or by other hands, costs a compilation and nothing else.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

# Sums may be reassociated and multiplied-and-added in one rounding; infinities and NaN keep their meaning.
_FASTMATH = {"reassoc", "contract", "arcp", "nsz"}


@lru_cache(maxsize=1)
def available() -> bool:
    """Whether numba is there and can be imported."""
    try:
        import llvmlite.ir  # noqa: F401
        import numba  # noqa: F401
    except Exception:  # what a broken installation raises is not to be foreseen: numba itself raises several kinds
        return False
    return True


def jit(function: Callable[..., Any]) -> Any:
    """``function`` compiled at its first call; sums may be reassociated."""
    return _compiled(function, fastmath=_FASTMATH)


def inline(function: Callable[..., Any]) -> Any:
    """As :func:`jit`, for a small function that becomes part of those that call it."""
    return _compiled(function, fastmath=_FASTMATH, inline="always")


def strict(function: Callable[..., Any]) -> Any:
    """``function`` compiled at its first call, with sums in the order they are written in.

    What is called from a function under :func:`jit` first is compiled with that one's freedom: so numba has it.
    """
    return _compiled(function)


def c_function(function: Callable[..., Any], signature: Any) -> Any:
    """``function`` compiled at once as a C function, to be called by its ``address``; sums in the order written."""
    from numba.core.ccallback import CFunc
    from numba.core.sigutils import normalize_signature

    made: Any = CFunc(function, normalize_signature(signature), locals={}, options={"error_model": "numpy"})
    cache = _cache_of(function)
    if cache is not None:
        made._cache = cache
    made.compile()
    return made


def _compiled(function: Callable[..., Any], **options: Any) -> Any:
    import numba

    made = numba.njit(error_model="numpy", nogil=True, **options)(function)
    cache = _cache_of(function)
    if cache is not None and hasattr(made, "_cache"):
        made._cache = cache
    return made


def _cache_of(function: Callable[..., Any]) -> Any:
    """Where compiled forms of ``function`` are kept; None if they cannot be."""
    from numba.core import config

    kind = _cache_class()
    try:
        return kind(function)
    except (RuntimeError, OSError):  # numba: "no locator available"
        pass
    folder = own_folder()
    if folder is None:
        return None
    usual = config.CACHE_DIR
    config.CACHE_DIR = str(folder)
    try:
        return kind(function)
    except (RuntimeError, OSError):
        return None
    finally:
        config.CACHE_DIR = usual


def own_folder() -> Path | None:
    """A folder for this user alone in the system's temporary one, made if need be; None if it cannot be had.

    Compiled code is loaded from it and run, so one that belongs to somebody else, that others may write, or that is a
    link is never used.
    """
    user = getattr(os, "getuid", lambda: 0)()
    try:
        folder = Path(tempfile.gettempdir()) / f"tova-numba-{user}"
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(found.st_mode):
        return None
    if os.name == "posix" and (found.st_uid != user or found.st_mode & 0o077):
        return None
    return folder


_WITH_NUMBA = ("kernels/*.py", "rules/*.py", "scan/*.py", "decode/*.py", "simulation_engine.py", "measures_cpu.py")
"""Files of the package that hold compiled code, or write it."""


@lru_cache(maxsize=1)
def sources() -> str:
    """A checksum of all compiled code. numba looks at a function's own file only, not at those it calls."""
    total = hashlib.sha256()
    package = Path(__file__).parent.parent
    for pattern in _WITH_NUMBA:
        for path in sorted(package.glob(pattern)):
            total.update(path.read_bytes())
    return total.hexdigest()


@lru_cache(maxsize=1)
def _cache_class() -> Any:
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):  # type: ignore[misc]
        """numba's, but nothing that goes wrong with it reaches the caller, and an entry says what it is of.

        numba writes the index before the code it points to, and two processes may write under one name; so an entry
        that is not what the index calls it is not taken.
        """

        def _index_key(self, sig: Any, codegen: Any) -> Any:
            return (*super()._index_key(sig, codegen), sources())

        def load_overload(self, sig: Any, target_context: Any) -> Any:
            target_context.refresh()
            try:
                key = self._index_key(sig, target_context.codegen())
                entry = self._cache_file.load(key)
                if entry is None or entry[0] != key:
                    return None
                return self._impl.rebuild(target_context, entry[1])
            except Exception:
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                if self._impl.check_cachable(data):
                    self._impl.locator.ensure_cache_path()
                    key = self._index_key(sig, data.codegen)
                    self._cache_file.save(key, (key, self._impl.reduce(data)))
            except Exception:  # it is compiled already; only the next process has to do it again
                return

    return Cache
