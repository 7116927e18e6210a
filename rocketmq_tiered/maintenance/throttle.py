"""How much of its budget maintenance may use: uploads and reads go first. Pure, but for the clock."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from tiered.archive.task import StoppedError
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.object_store.body import size_bytes
from tiered.object_store.interface import GET_BYTES_MAX, Body, ObjectRange, ObjectStore, Piece
from tiered.object_store.part_plan import sent_bytes
from tiered.object_store.wrapper import StoreWrapper

BURST_S = 1.0
"""A budget that is not used is saved up, but only that of so many seconds."""
POLL_S = 0.25
COPIED_WEIGHT = 0.25
"""Weight of a byte that the store copies itself, beside one that is sent."""


class Stopping:
    """Whether a process ends its tasks: at once, or because it drains and uploads go first."""

    def __init__(self) -> None:
        self.stopped, self.drain = threading.Event(), threading.Event()

    def is_set(self) -> bool:
        """Whether no request may begin."""
        return self.stopped.is_set() or self.drain.is_set()

    def wait(self, seconds: float) -> None:
        """Sleep, but not longer than the process runs."""
        self.stopped.wait(seconds)


class YieldingStore(StoreWrapper):
    """``store`` with at most ``bytes_per_s`` and ``requests_per_s``, times ``share()`` (0 to 1; 0 waits).

    Once ``stopping`` is set, requests raise StoppedError. Thread-safe.
    """

    def __init__(
        self,
        store: ObjectStore,
        *,
        bytes_per_s: int,
        requests_per_s: float,
        share: Callable[[], float] = lambda: 1.0,
        stopping: Stopping | threading.Event | None = None,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        """``share`` is called at each request: the part of both limits that may be used now. ``stopping``: once it is
        set, requests raise StoppedError; None: they never do."""
        super().__init__(store)
        self._bytes_per_s, self._requests_per_s = bytes_per_s, requests_per_s
        self._share, self._stopping, self._clock = share, stopping or threading.Event(), clock
        self._lock = threading.Lock()
        self._debt_s = 0.0
        """Seconds at the whole limits that earlier requests still cost; below 0: saved up for a burst."""
        self._debt_at_s = clock.monotonic_s()
        """When ``_debt_s`` was computed, by ``clock``."""

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        """Put an object after the wait that its bytes cost."""
        self._wait(size_bytes(body))
        self._store.put_if_absent(key, body, timeout_s=timeout_s)

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        """Put an object of pieces after the wait that they cost; a copied byte costs less than a sent one."""
        copied = sum(piece.length for piece in pieces if isinstance(piece, ObjectRange))
        self._wait(sent_bytes(pieces) + COPIED_WEIGHT * copied)
        self._store.compose_if_absent(key, pieces, timeout_s=timeout_s, spool=spool)

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        """Get an object after the wait for a request."""
        self._wait(0)
        return self._store.get(key, max_bytes)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Get a range after the wait that its bytes cost."""
        self._wait(length)
        return self._store.get_range(key, offset, length)

    def _wait(self, byte_count: float) -> None:
        """Wait until the time that earlier requests cost has passed; then add the cost of this request, with
        ``byte_count`` bytes. Raises StoppedError once the process stops."""
        while True:
            with self._lock:
                if self._stopping.is_set():
                    raise StoppedError
                share, now_s = self._share(), self._clock.monotonic_s()
                self._debt_s = max(-BURST_S, self._debt_s - (now_s - self._debt_at_s) * share)
                self._debt_at_s = now_s
                if share > 0 and self._debt_s <= 0:
                    self._debt_s += max(byte_count / self._bytes_per_s, 1 / self._requests_per_s)
                    return
                wait_s = min(POLL_S, self._debt_s / share) if share > 0 else POLL_S
            self._stopping.wait(max(wait_s, 0.001))


READING_S = 5.0
"""Clients read if one has read in so many seconds."""


class Level(Enum):
    """How much of its budget maintenance uses."""

    FULL = "full"
    REDUCED = "reduced"
    PAUSED = "paused"
    FORCED = "forced"
    """Would be paused, but is overdue: slow."""


SHARES = {Level.FULL: 1.0, Level.REDUCED: 0.25, Level.PAUSED: 0.0, Level.FORCED: 0.0625}


@dataclass(frozen=True)
class Load:
    """What else the process does: ``lag_bytes`` of the log to upload, ``batch_bytes`` at a time."""

    lag_bytes: int = 0
    batch_bytes: int = 1
    store_problem: str = ""
    reads: int = 0
    """Reads by clients so far."""


def level_of(load: Load, *, is_reading: bool, is_overdue: bool) -> Level:
    """Paused while uploads fall behind or the object store has a problem, and slow beside work."""
    if load.store_problem or load.lag_bytes > 4 * load.batch_bytes:
        return Level.FORCED if is_overdue and not load.store_problem else Level.PAUSED
    if is_reading or load.lag_bytes > load.batch_bytes // 4:
        return Level.REDUCED
    return Level.FULL


class Throttle:
    """The throttle of all tasks of a process. ``load`` is called several times a second."""

    def __init__(self, load: Callable[[], Load]) -> None:
        self._load = load
        self._reads, self._read_s = 0, -READING_S

    def level(self, *, is_overdue: bool = False) -> Level:
        """How much of its budget a task may use now. Work that is overdue continues slowly even while uploads are
        behind."""
        load, now_s = self._load(), time.monotonic()
        if load.reads != self._reads:
            self._reads, self._read_s = load.reads, now_s
        is_reading = now_s - self._read_s < READING_S
        return level_of(load, is_reading=is_reading, is_overdue=is_overdue)
