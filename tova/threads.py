"""Threads that compute with one thread each, beside torch's own: for work that does not split by itself.

Waking torch's own threads for every small operation costs more than many of them take; a :class:`Team` is woken once
or twice per chunk of a text instead.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

_MOST = 16
"""Threads of a team; more would wait for each other longer than they work."""


def workers(count: int) -> ThreadPoolExecutor:
    """A pool of ``count`` threads in each of which torch uses one thread; the caller's number stays as it is."""
    usual = torch.get_num_threads()
    begun = threading.Barrier(count + 1)
    pool = ThreadPoolExecutor(count, thread_name_prefix="tova", initializer=torch.set_num_threads, initargs=(1,))
    for _ in range(count):
        pool.submit(begun.wait)
    begun.wait()
    # What a thread sets is also what threads made later begin with; that is put back.
    torch.set_num_threads(usual)
    return pool


class Team:
    """The calling thread and ``size - 1`` helpers."""

    def __init__(self, helpers: ThreadPoolExecutor, size: int) -> None:
        self._helpers = helpers
        self.size = size

    def beside(self, work: Callable[..., Any], *arguments: Any) -> Future:
        """Do ``work`` in a helper, with or without gradients as in the caller."""
        inference, gradients = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

        def run() -> Any:
            with torch.inference_mode(inference), torch.set_grad_enabled(gradients):
                return work(*arguments)

        return self._helpers.submit(run)

    def parts(self, count: int, *, helpers_only: bool = False) -> list[slice]:
        """``range(count)`` in about equal parts, one per thread."""
        parts = min(self.size - helpers_only, count)
        return [slice(count * part // parts, count * (part + 1) // parts) for part in range(parts)]

    def share(
        self,
        work: Callable[..., Any],
        pieces: Sequence[tuple[Any, ...]],
        after: Callable[[], None] | None = None,
    ) -> None:
        """``work(*piece)`` for every piece, the first by the caller; all are done then.

        Args:
            after: called once the helpers have got their pieces, to give them more that is not waited for.

        Raises:
            Exception: the first that ``work`` raised, after every piece has ended.
        """
        others = [self.beside(work, *piece) for piece in pieces[1:]]
        if after is not None:
            after()
        try:
            work(*pieces[0])
        finally:
            wait(others)


def wait(work: Sequence[Future]) -> None:
    """Until all is done; raises what the first to fail raised."""
    failed = [error for error in [one.exception() for one in work] if error is not None]
    if failed:
        raise failed[0]


@lru_cache(maxsize=1)
def _helpers(process: int, count: int) -> ThreadPoolExecutor:
    return workers(count)


@contextmanager
def team() -> Iterator[Team | None]:
    """As many threads as torch has; the caller computes with one meanwhile. None where torch has only one.

    torch has no number of threads for one caller only: a Python thread that uses torch for the first time meanwhile
    keeps one.
    """
    usual = torch.get_num_threads()
    size = min(usual, _MOST)
    if size == 1:
        yield None
        return
    helpers = _helpers(os.getpid(), size - 1)
    torch.set_num_threads(1)
    try:
        yield Team(helpers, size)
    finally:
        torch.set_num_threads(usual)
