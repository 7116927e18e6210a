"""Limits upload bandwidth: a token bucket in bytes before every PUT.

The wait precedes the request, so it does not count towards a PUT's timeout.
"""

import threading
from collections.abc import Sequence

from tiered.clock import MACHINE_CLOCK, Clock
from tiered.object_store.body import size_bytes
from tiered.object_store.interface import Body, ObjectStore, Piece
from tiered.object_store.part_plan import sent_bytes
from tiered.object_store.wrapper import StoreWrapper


class TokenBucket:
    """Gives ``rate`` tokens a second, and saves up to ``burst`` that are not taken. A request may take more than there
    are: those after it wait until the debt is earned."""

    def __init__(self, rate: float, burst: float, *, clock: Clock = MACHINE_CLOCK) -> None:
        self._rate = rate
        self._burst = burst
        self._clock = clock
        self._lock = threading.Lock()
        self._tokens = burst
        self._filled_s = clock.monotonic_s()

    def take(self, amount: float) -> float:
        """Take ``amount`` tokens, and return how many seconds the caller has to wait before it uses them: until what
        was taken before is earned."""
        with self._lock:
            now_s = self._clock.monotonic_s()
            self._tokens = min(self._burst, self._tokens + (now_s - self._filled_s) * self._rate)
            self._filled_s = now_s
            wait_s = max(0.0, -self._tokens / self._rate)
            self._tokens -= amount
            return wait_s


class ThrottledStore(StoreWrapper):
    """``store`` with PUTs limited to ``bytes_per_s`` on average."""

    def __init__(
        self,
        store: ObjectStore,
        bytes_per_s: int,
        *,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        """While nothing is sent, the bandwidth of up to one second is saved for later."""
        super().__init__(store)
        self._bucket = TokenBucket(bytes_per_s, bytes_per_s, clock=clock)
        self._clock = clock

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self._wait(size_bytes(body))
        self._store.put_if_absent(key, body, timeout_s=timeout_s)

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        """Create an object of pieces. Copies inside the store do not count."""
        self._wait(sent_bytes(pieces))
        self._store.compose_if_absent(key, pieces, timeout_s=timeout_s, spool=spool)

    def _wait(self, byte_count: int) -> None:
        wait_s = self._bucket.take(byte_count)
        if wait_s > 0:
            self._clock.sleep(wait_s)
