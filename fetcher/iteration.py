"""Iterators over a walk that an error does not end: the next step goes on where the walk stands.

A generator that has raised is at its end, and says so to who asks again after an outage or a time limit: as if there
were no more messages. Owns that, and that one thread or task asks at a time. Does not own where a walk stands
(walk.py).
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
    """One at a time; another is no waiting caller, but a mistake."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise UsageError(
                "one walk is asked by two at once", hint="give each thread or task one of its own"
            )

    def __exit__(self, *_: object) -> None:
        self._lock.release()


class Batches(Iterator[MessageBatch]):
    """Batches of a walk, which begins with the first."""

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
        """Nothing more comes."""
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
            for message in self._rest:  # another thread was just done
                return message
            self._rest = iter(())  # what is held while the next one is waited for is missing for others
            self._rest = self._decode(next(self._batches))
            return next(self._rest)

    def close(self) -> None:
        """Nothing more comes."""
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
        """Nothing more comes."""
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
            self._rest = iter(())  # what is held while the next one is waited for is missing for others
            self._rest = self._decode(await anext(self._batches))
            return next(self._rest)

    async def aclose(self) -> None:
        """Nothing more comes."""
        await self._batches.aclose()
        self._rest = iter(())
