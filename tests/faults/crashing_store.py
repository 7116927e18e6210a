"""An object store that crashes its user at the n-th request."""

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tiered.object_store.interface import Body, ObjectInfo, Piece
from tiered.object_store.memory import MemoryStore


class CrashError(Exception):
    """The process is gone: no request after this one has an effect."""


class CrashingStore:
    """Dies at request number ``crash_at`` (from 1), before or after its effect; dead for all requests from then on."""

    def __init__(self, store: MemoryStore, crash_at: int, *, after_effect: bool) -> None:
        self._store, self._crash_at, self._after_effect = store, crash_at, after_effect
        self._lock = threading.Lock()
        self.requests = 0

    @property
    def url(self) -> str:
        return self._store.url

    def _do(self, act: Callable[[], Any]) -> Any:
        # One at a time: an effect is wholly before the crash, or it never happens.
        with self._lock:
            self.requests += 1
            if self.requests > self._crash_at or (self.requests == self._crash_at and not self._after_effect):
                raise CrashError
            answer = act()
            if self.requests == self._crash_at:
                raise CrashError
            return answer

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self._do(lambda: self._store.put_if_absent(key, body))

    def compose_if_absent(self, key: str, pieces: Sequence[Piece], *, spool: str = "") -> None:
        self._do(lambda: self._store.compose_if_absent(key, pieces, spool=spool))

    def get(self, key: str, max_bytes: int = 1 << 30) -> bytes:
        return bytes(self._do(lambda: self._store.get(key, max_bytes)))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return bytes(self._do(lambda: self._store.get_range(key, offset, length)))

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        found: Iterator[ObjectInfo] = self._do(
            lambda: self._store.list(prefix, start_after=start_after, limit=limit)
        )
        return found

    def delete(self, keys: Sequence[str]) -> None:
        self._do(lambda: self._store.delete(keys))

    def clock_ms(self, prefix: str = "") -> int:
        return int(self._do(lambda: self._store.clock_ms(prefix)))

    def close(self) -> None:
        """Nothing to release."""
