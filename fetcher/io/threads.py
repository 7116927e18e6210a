"""A thread pool of an open archive that refuses work in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

T = TypeVar("T")
P = ParamSpec("P")


def check_process(process_id: int) -> None:
    """Raises RuntimeError, as pools that are shut down do, in another process than the one with this id."""
    if os.getpid() != process_id:
        raise RuntimeError("archive opened before a fork: open it in the child process")


class Threads(ThreadPoolExecutor):
    """A pool that refuses work after a fork: the child has none of its threads, and would wait for them for ever."""

    def __init__(self, count: int, *, name: str) -> None:
        super().__init__(count, thread_name_prefix=name)
        self._process_id = os.getpid()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """See Executor. Raises RuntimeError after ``shutdown``, and in a child."""
        check_process(self._process_id)
        return super().submit(fn, *args, **kwargs)
