"""Claims: the right of one process to work on a cell, kept as a file, for file systems on which locks may not work.

A claim is a numbered file in the cell's folder, ``claim-0001.json``, that says who works there; the highest holds.
Making the next number is atomic everywhere (a hard link, or exclusive creation), so of two processes that find a dead
owner only one takes over, and an owner that was only asleep finds a higher number and stops before it writes.

Whether an owner is alive is asked of the operating system where it is the same machine; elsewhere the owner's claim is
touched every ``BEAT`` seconds, and one that was not for ``PATIENCE`` seconds by the file system's own clock is dead.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import threading
import time
import uuid
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from experiments.files import Scratch

CREW = "TOVA_CREW"
"""Environment variable that says which workers a process belongs to."""
BEAT = 10.0
PATIENCE = 90.0
_NAME = re.compile(r"claim-(\d+)\.json")


class LostError(Exception):
    """Another process took this claim over: it took its owner for dead."""


@dataclass(frozen=True)
class Owner:
    """Who holds a claim.

    Attributes:
        host, pid: where it runs.
        job: the cluster's job, if it is one.
        crew: the workers it was started with, if it is one of several.
        alive: False if it will not come back.
    """

    host: str
    pid: int
    job: str | None
    crew: str | None
    alive: bool

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}" + (f" (job {self.job})" if self.job else "")


class Claim:
    """A claim that this process holds; :func:`take` makes them."""

    def __init__(self, folder: Path, number: int) -> None:
        self._path = folder / f"claim-{number:04d}.json"
        self._number = number
        _beating(self._path)

    def check(self) -> None:
        """Raises LostError unless it is still held."""
        numbers = _numbers(self._path.parent)
        if not numbers or max(numbers) != self._number:
            raise LostError(self._path.parent.name)

    def release(self) -> None:
        """Give it back; nothing happens if it was lost."""
        _quiet(self._path)
        with contextlib.suppress(OSError):
            self._path.unlink()


def take(folder: Path) -> Claim | Owner:
    """Claim a cell's folder; the owner that has it, if one that is alive does."""
    numbers = _numbers(folder)
    if numbers and (owner := _owner(folder, max(numbers))) is not None and owner.alive:
        return owner
    number = max(numbers, default=0) + 1
    path = folder / f"claim-{number:04d}.json"
    if not _create(path, json.dumps(_self())):
        owner = _owner(folder, number)
        return owner if owner is not None else take(folder)
    claim = Claim(folder, number)
    for old in numbers:
        with contextlib.suppress(OSError):
            (folder / f"claim-{old:04d}.json").unlink()
    return claim


def holder(folder: Path) -> Owner | None:
    """Who works, or died working, on a cell; None if nobody does."""
    numbers = _numbers(folder)
    return _owner(folder, max(numbers)) if numbers else None


def _numbers(folder: Path) -> list[int]:
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    return [int(match.group(1)) for name in names if (match := _NAME.fullmatch(name))]


def _create(path: Path, text: str) -> bool:
    """Make a file with this text, unless there is one; True if it was made."""
    with Scratch(path) as scratch:
        scratch.write(text)
        try:
            os.link(scratch.path, path)
            return True
        except FileExistsError:
            return False
        except OSError:  # a file system without hard links
            pass
    try:
        with path.open("x") as f:
            f.write(text)
        return True
    except FileExistsError:
        return False


def _owner(folder: Path, number: int) -> Owner | None:
    path = folder / f"claim-{number:04d}.json"
    try:
        said = json.loads(path.read_text())
        host, pid, job, crew = str(said["host"]), int(said["pid"]), said.get("job"), said.get("crew")
        same = said["place"] == _place()
        alive = _runs(pid, said["born"]) if same else _beats(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        # Being written on a file system without hard links, or broken: alive as long as it is young.
        return Owner("an unknown machine", 0, None, None, _beats(path))
    return Owner(host, pid, job, crew, alive)


def _beats(path: Path) -> bool:
    """Whether a claim was touched lately, by the clock of the file system it is on."""
    try:
        with Scratch(path) as scratch:
            scratch.write("")
            now = scratch.path.stat().st_mtime
        return now - path.stat().st_mtime < PATIENCE
    except OSError:
        return True


def _self() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "born": _born(os.getpid()),
        "job": this_job(),
        "crew": this_crew(),
        "place": _place(),
        "token": uuid.uuid4().hex,
        "since": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def this_job() -> str | None:
    """The cluster's job that this process is; None if it is none."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return "_".join(part for part in array if part) or os.environ.get("SLURM_JOB_ID")


def this_crew() -> str | None:
    """The workers that this process was started with; None if it is no worker."""
    return os.environ.get(CREW)


@lru_cache(maxsize=1)
def _place() -> str:
    """What process numbers are of: a machine, since it was started, and a container on it."""
    parts = [socket.gethostname()]
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    with contextlib.suppress(OSError):
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _born(pid: int) -> str:
    """When a process began, in the machine's own count; process numbers are used again."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _runs(pid: int, born: str) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    now = _born(pid)
    if not now or not born:
        return True
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return now == born and state not in ("Z", "X")


# -- the heartbeat -------------------------------------------------------------------------------------------

_held: set[Path] = set()
_thread: threading.Thread | None = None
_lock = threading.Lock()


def _beating(path: Path) -> None:
    global _thread
    with _lock:
        _held.add(path)
        if _thread is None or not _thread.is_alive():  # a forked child has none
            _thread = threading.Thread(target=_beat, name="claims", daemon=True)
            _thread.start()


def _quiet(path: Path) -> None:
    with _lock:
        _held.discard(path)


def _beat() -> None:
    while True:
        time.sleep(BEAT)
        with _lock:
            paths = list(_held)
        for path in paths:
            with contextlib.suppress(OSError):  # a full disk or a lost claim: noticed where something is written
                os.utime(path)
