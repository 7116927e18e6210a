"""Runs work a few items ahead of the consumer, in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")
R = TypeVar("R")


def ahead(pool: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], count: int) -> Iterator[R]:
    """Only the results of ``ahead_with``."""
    return (result for _, result in ahead_with(pool, work, items, count))


def ahead_with(
    pool: ThreadPoolExecutor, work: Callable[[T], R], items: Iterable[T], count: int
) -> Iterator[tuple[T, R]]:
    """(item, work(item)) in order; up to ``count`` items are worked on ahead of the consumer."""
    pending: deque[tuple[T, Future[R]]] = deque()
    try:
        for item in items:
            pending.append((item, pool.submit(work, item)))
            if len(pending) > count:
                first, future = pending.popleft()
                yield first, future.result()
        while pending:
            first, future = pending.popleft()
            yield first, future.result()
    finally:
        for _, future in pending:
            future.cancel()
