"""Retries reads, lists, deletes and the clock with tenacity. Never a PUT.

A PUT without a response may have taken effect: the uploader retries it under a new key, the catalog resolves it by put
id. Only UnavailableError is retried.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import UnavailableError
from tiered.object_store.interface import GET_BYTES_MAX, ObjectInfo, ObjectStore
from tiered.object_store.wrapper import StoreWrapper

if TYPE_CHECKING:
    from tenacity import RetryCallState

ATTEMPTS_MAX = 8
WAIT_FIRST_S = 0.1
WAIT_MAX_S = 5.0


class RetryingStore(StoreWrapper):
    """``store`` with all requests but PUTs retried for up to ``retry_seconds`` (exponential, full jitter)."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        retry_seconds: float,
        clock: Clock = MACHINE_CLOCK,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """``retry_seconds``: a request that fails this long after its first attempt is not tried again; ``jitter``, in
        [0, 1), makes waits longer by up to a half of their maximum."""
        # Loaded here: file:// archives do not retry, and the import costs 50 ms of a command's start.
        from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, stop_after_delay

        super().__init__(store)
        self._jitter = jitter
        self._retrying = Retrying(
            retry=retry_if_exception_type(UnavailableError),
            stop=stop_after_delay(retry_seconds) | stop_after_attempt(ATTEMPTS_MAX),
            wait=self._wait_s,
            sleep=clock.sleep,
            reraise=True,
        )

    def _wait_s(self, state: RetryCallState) -> float:
        ceiling_s: float = min(WAIT_MAX_S, WAIT_FIRST_S * 2 ** (state.attempt_number - 1))
        return ceiling_s * (0.5 + self._jitter() / 2)

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        return self._retrying(self._store.get, key, max_bytes)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._retrying(self._store.get_range, key, offset, length)

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        """List objects. After a failed request the listing continues behind the last object that was yielded, so that
        none is missing or doubled."""
        after, left = start_after, limit
        while left is None or left > 0:
            info: ObjectInfo | None = None
            try:
                for info in self._store.list(prefix, start_after=after, limit=left):
                    after = info.key
                    left = None if left is None else left - 1
                    yield info
            except UnavailableError:
                if info is not None:  # it made progress
                    continue
                first = self._retrying(self._first, prefix, after, left)
                if first is None:
                    return
                after = first.key
                left = None if left is None else left - 1
                yield first
                continue
            return

    def _first(self, prefix: str, after: str, left: int | None) -> ObjectInfo | None:
        return next(self._store.list(prefix, start_after=after, limit=left), None)

    def delete(self, keys: Sequence[str]) -> None:
        self._retrying(self._store.delete, keys)

    def clock_ms(self, prefix: str = "") -> int:
        return self._retrying(self._store.clock_ms, prefix)
