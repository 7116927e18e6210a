"""Iterators over a walk that continue after an error.

A generator that has raised is exhausted: after an outage or a time limit it would report the end of the queue. One
thread or task uses an iterator at a time. Does not own the position of the walk (walk.py).
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from fetcher.io.waiting import run_async, run_sync
from fetcher.rows.batch import MessageBatch
from fetcher.rows.message import Message
from fetcher.walk import Walk
from tiered.errors import UsageError

Decode = Callable[[MessageBatch], Iterator[Message]]


class _Turn:
    """Exclusive use; concurrent use is an error, not a wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                "iterator already in use by another thread or task",
                hint="use one iterator per thread or task",
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Batches(Iterator[MessageBatch]):
    """Batches of a walk, which starts with the first."""

    def __init__(self, begin: Callable[[], Walk]) -> None:
        self._begin = begin
        self._walk: Walk | None = None
        self._is_over = False
        self._turn = _Turn()

    def __next__(self) -> MessageBatch:
        with self._turn:
            if self._is_over:
                raise StopIteration
            if self._walk is None:
                self._walk = self._begin()
            batch = run_sync(self._walk.next_batch())
            if batch is None:
                self._is_over = True
                raise StopIteration
            return batch

    def close(self) -> None:
        """End the iteration."""
        self._is_over = True


class Messages(Iterator[Message]):
    """Messages of batches."""

    def __init__(self, batches: Batches, decode: Decode) -> None:
        self._batches = batches
        self._decode = decode
        self._rest: Iterator[Message] = iter(())
        self._turn = _Turn()

    def __next__(self) -> Message:
        for message in self._rest:
            return message
        with self._turn:
            for message in self._rest:  # another thread has just refilled it
                return message
            self._rest = iter(())  # free its memory while the next batch is read
            self._rest = self._decode(next(self._batches))
            return next(self._rest)

    def close(self) -> None:
        """End the iteration."""
        self._batches.close()
        self._rest = iter(())


class AsyncBatches(AsyncIterator[MessageBatch]):
    """See Batches."""

    def __init__(self, begin: Callable[[], Awaitable[Walk]]) -> None:
        self._begin = begin
        self._walk: Walk | None = None
        self._is_over = False
        self._turn = _Turn()

    async def __anext__(self) -> MessageBatch:
        with self._turn:
            if self._is_over:
                raise StopAsyncIteration
            if self._walk is None:
                self._walk = await self._begin()
            batch = await run_async(self._walk.next_batch())
            if batch is None:
                self._is_over = True
                raise StopAsyncIteration
            return batch

    async def aclose(self) -> None:
        """End the iteration."""
        self._is_over = True


class AsyncMessages(AsyncIterator[Message]):
    """See Messages."""

    def __init__(self, batches: AsyncBatches, decode: Decode) -> None:
        self._batches = batches
        self._decode = decode
        self._rest: Iterator[Message] = iter(())
        self._turn = _Turn()

    async def __anext__(self) -> Message:
        for message in self._rest:
            return message
        with self._turn:
            self._rest = iter(())  # free its memory while the next batch is read
            self._rest = self._decode(await anext(self._batches))
            return next(self._rest)

    async def aclose(self) -> None:
        """End the iteration."""
        await self._batches.aclose()
        self._rest = iter(())
