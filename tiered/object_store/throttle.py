"""Limits upload bandwidth: a token bucket in bytes before every PUT.

The wait precedes the request, so it does not count towards a PUT's timeout.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence

from tiered.object_store.body import size_bytes
from tiered.object_store.interface import Body, ObjectInfo, ObjectStore


class TokenBucket:
    """``rate`` tokens a second, up to ``burst`` saved. A larger request goes into debt."""

    def __init__(self, rate: float, burst: float, *, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._rate = rate
        self._burst = burst
        self._clock_s = clock_s
        self._lock = threading.Lock()
        self._tokens = burst
        self._filled_s = clock_s()

    def take(self, amount: float) -> float:
        """Take ``amount`` tokens; returns the seconds to wait before using them."""
        with self._lock:
            now_s = self._clock_s()
            self._tokens = min(self._burst, self._tokens + (now_s - self._filled_s) * self._rate)
            self._filled_s = now_s
            wait_s = max(0.0, -self._tokens / self._rate)
            self._tokens -= amount
            return wait_s


class ThrottledStore:
    """``store`` with PUTs limited to ``bytes_per_s`` on average."""

    def __init__(
        self,
        store: ObjectStore,
        bytes_per_s: int,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._bucket = TokenBucket(bytes_per_s, bytes_per_s, clock_s=clock_s)
        self._sleep = sleep

    @property
    def url(self) -> str:
        """The wrapped store's."""
        return self._store.url

    def __repr__(self) -> str:
        return f"ThrottledStore({self._store!r})"

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        """See ObjectStore."""
        wait_s = self._bucket.take(size_bytes(body))
        if wait_s > 0:
            self._sleep(wait_s)
        self._store.put_if_absent(key, body, timeout_s=timeout_s)

    def get(self, key: str) -> bytes:
        """See ObjectStore."""
        return self._store.get(key)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """See ObjectStore."""
        return self._store.get_range(key, offset, length)

    def get_tail(self, key: str, length: int) -> bytes:
        """See ObjectStore."""
        return self._store.get_tail(key, length)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        """See ObjectStore."""
        return self._store.list(prefix, start_after=start_after, limit=limit)

    def delete(self, keys: Sequence[str]) -> None:
        """See ObjectStore."""
        self._store.delete(keys)

    def clock_ms(self) -> int:
        """See ObjectStore."""
        return self._store.clock_ms()

    def close(self) -> None:
        """See ObjectStore."""
        self._store.close()
