"""Runs a blocking store in the thread pool of an event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import ParamSpec, TypeVar

from tiered.object_store.interface import ObjectInfo, ObjectStore

T = TypeVar("T")
P = ParamSpec("P")

LIST_CHUNK = 1000


class ThreadedStore:
    """AsyncObjectStore over ``store``. The thread of a cancelled call runs to its end."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """The wrapped store's."""
        return self._store.url

    def __repr__(self) -> str:
        return f"ThreadedStore({self._store!r})"

    async def get(self, key: str) -> bytes:
        """See AsyncObjectStore."""
        return await _in_thread(self._store.get, key)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See AsyncObjectStore."""
        return await _in_thread(self._store.get_range, key, offset, length)

    async def get_tail(self, key: str, length: int) -> bytes:
        """See AsyncObjectStore."""
        return await _in_thread(self._store.get_tail, key, length)

    async def list(
        self, prefix: str, *, start_after: str = "", limit: int | None = None
    ) -> AsyncIterator[ObjectInfo]:
        """See AsyncObjectStore. Listed in chunks, so that a long listing does not occupy a thread."""
        left = limit
        while left is None or left > 0:
            wanted = LIST_CHUNK if left is None else min(LIST_CHUNK, left)
            chunk = await _in_thread(self._chunk, prefix, start_after, wanted)
            for info in chunk:
                yield info
            if len(chunk) < wanted:
                return
            start_after = chunk[-1].key
            left = None if left is None else left - len(chunk)

    def _chunk(self, prefix: str, start_after: str, wanted: int) -> Sequence[ObjectInfo]:
        return [*self._store.list(prefix, start_after=start_after, limit=wanted)]

    async def close(self) -> None:
        """See AsyncObjectStore."""
        await _in_thread(self._store.close)


async def _in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    import asyncio  # import takes 0.07 s

    return await asyncio.to_thread(work, *args, **kwargs)
