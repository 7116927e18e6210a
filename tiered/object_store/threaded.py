"""Runs a blocking store in the thread pool of an event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from tiered.object_store.interface import GET_BYTES_MAX, ObjectStore

T = TypeVar("T")
P = ParamSpec("P")


class ThreadedStore:
    """AsyncObjectStore over ``store``. The thread of a cancelled call runs to its end."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    @property
    def url(self) -> str:
        """The wrapped store's."""
        return self._store.url

    async def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        return await _in_thread(self._store.get, key, max_bytes)

    async def get_range(self, key: str, offset: int, length: int) -> bytes:
        return await _in_thread(self._store.get_range, key, offset, length)

    async def close(self) -> None:
        await _in_thread(self._store.close)


async def _in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    import asyncio  # import takes 0.07 s

    return await asyncio.to_thread(work, *args, **kwargs)
