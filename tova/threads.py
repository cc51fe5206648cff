"""Threads that compute with one thread each, beside torch's own: for work that does not split by itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any

import torch


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


@lru_cache(maxsize=1)
def _helper(process: int) -> ThreadPoolExecutor:
    return workers(1)


def beside(work: Callable[..., Any], *arguments: Any) -> Future:
    """Do ``work`` in a helper thread, in the caller's inference mode."""
    inference = torch.is_inference_mode_enabled()

    def run() -> Any:
        with torch.inference_mode(inference):
            return work(*arguments)

    return _helper(os.getpid()).submit(run)
