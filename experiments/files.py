"""Files written whole or not at all, however the process ends, with the permissions the user's umask gives."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self


class Scratch:
    """A file beside ``path``, on its file system; gone when the block is left, unless :meth:`replace` was called."""

    def __init__(self, path: Path) -> None:
        self._target = path
        self.path = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")

    def __enter__(self) -> Self:
        return self

    def write(self, content: str | bytes) -> None:
        """Put ``content`` into it, to the disk."""
        data = content.encode() if isinstance(content, str) else content
        with self.path.open("xb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())

    def replace(self) -> None:
        """Let it become ``path``."""
        os.replace(self.path, self._target)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(OSError):
            self.path.unlink()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all."""
    with Scratch(path) as scratch:
        scratch.write(content)
        scratch.replace()


def sweep_up(folder: Path) -> None:
    """Remove what a killed process was writing in ``folder``; only its owner may."""
    for left in [*folder.glob(".*.tmp"), *folder.glob("*/.*.tmp")]:
        if not left.name.startswith(".claim"):  # others may just be asking whether the owner is alive
            with contextlib.suppress(OSError):
                left.unlink()
