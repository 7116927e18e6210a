"""Cycles in flight, and the state of their attempts.

    attempt running → all PUTs acknowledged        → durable
                    → a PUT failed, none running   → failed: the whole attempt is abandoned, its memory released
    no attempt      → a new one is due at ``retry_at_s``

Attempts start in cycle_builder.py, commits are in cycle_upload.py.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field
from typing import Any

from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import WITHOUT_EFFECT
from tiered.formats.segment import BlockCodec, EncodedSegment
from tiered.formats.timer_object import EncodedTimers
from tiered.object_store.abandonment import Abandonment
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import TimerSettings
from uploader.attempts import AttemptPolicy
from uploader.cycle_plan import CyclePlan, CyclePlanner
from uploader.header_check import HeaderCheck
from uploader.log_batch import LogBatch, LogBatchPool
from uploader.queue_tails import QueueTails

PUT_GRACE_S = 5.0
"""Beyond its timeout, a PUT beside a failed one no longer delays the next attempt."""


@dataclass
class UploadCounters:
    """Counts so far; read by status and metrics without a lock."""

    messages: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    objects: int = 0
    commits: int = 0
    attempts_abandoned: int = 0
    gaps: int = 0
    damaged: int = 0
    """Ranges of the commitlog."""
    lost: int = 0
    """Ranges of the commitlog."""
    set_aside: int = 0
    """Messages that the broker's queue does not have, as it used their offsets again."""
    last_error: str = ""
    consecutive_failures: int = 0


@dataclass(frozen=True)
class UploadContext:
    """Values shared by all cycles."""

    archive: ObjectStore
    writer: CatalogWriter
    planner: CyclePlanner
    header_check: HeaderCheck
    tails: QueueTails
    pool: LogBatchPool
    codec: BlockCodec
    policy: AttemptPolicy
    cluster: str
    broker: str
    writer_name: str
    clock: Clock
    jitter: Callable[[], float]
    claim: Callable[[], None]
    """Claims the epoch before the first PUT."""
    new_settings: Callable[[CatalogState], dict[str, Any]] = lambda _state: {}
    """Settings of the archive that differ from those of a state: the next commit has them."""
    timers: TimerSettings = field(default_factory=TimerSettings)


@dataclass
class Attempt:
    """One try to put all objects of a cycle, under keys of its own. ``encoded`` has the objects' bytes: once it is
    cleared, their memory is free as soon as running PUTs end."""

    keys: list[str]
    encoded: list[EncodedSegment]
    puts: list[Future[None]]
    timeout_s: float
    """The longest of its PUTs."""
    abandonment: Abandonment
    timers: list[EncodedTimers] = field(default_factory=list)
    """The object with the cycle's timers, once it is encoded; empty if it has none."""
    timers_number: int = 0
    """The number in the key of that object."""
    _failure: Exception | None = None
    _failing_since_s: float = 0.0

    @property
    def is_durable(self) -> bool:
        """Every PUT was acknowledged; also true without objects."""
        return all(put.done() and _error_of(put) is None for put in self.puts)

    def keys_that_may_exist(self) -> list[str]:
        """The keys that become garbage if this attempt is abandoned. Those of PUTs that were refused without effect, or
        cancelled, are not among them, as no object exists: they would add up during an outage."""
        return [key for key, put in zip(self.keys, self.puts, strict=True) if not _left_nothing(put)]

    def failure(self, now_s: float) -> Exception | None:
        """Why this attempt must be abandoned at ``now_s``; None while no PUT has failed, and also after one failed,
        while others still run. The first failure cancels PUTs that have not begun, and ends running ones early."""
        if self._failure is None:
            answered = (put for put in self.puts if put.done() and not put.cancelled())
            self._failure = next((error for put in answered if (error := _error_of(put))), None)
            if self._failure is None:
                return None
            self._failing_since_s = now_s
            for put in self.puts:
                put.cancel()
            self.abandonment.cancel()
        is_over = all(put.done() for put in self.puts)
        # A PUT that hangs beyond its timeout no longer delays the next attempt.
        is_over = is_over or now_s - self._failing_since_s >= self.timeout_s + PUT_GRACE_S
        return self._failure if is_over else None


@dataclass
class Cycle:
    """One batch in flight. Without an attempt, a new one is due at ``retry_at_s``."""

    batch: LogBatch
    plan: CyclePlan
    attempt: Attempt | None = None
    failures: int = 0
    retry_at_s: float = 0.0

    def durable_attempt(self) -> Attempt | None:
        """The attempt to commit. Callers keep no reference to others, whose memory must be free once abandoned."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.is_durable else None


@dataclass
class CyclesInFlight:
    """Cycles in log order, and the garbage of abandoned attempts. Thread-safe."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    _cycles: deque[Cycle] = field(default_factory=deque)
    _pending_deletions: list[str] = field(default_factory=list)
    _changes: int = 0

    def __len__(self) -> int:
        return len(self._cycles)

    def all(self) -> list[Cycle]:
        """The cycles now, oldest first."""
        with self.changed:
            return list(self._cycles)

    def oldest(self) -> Cycle | None:
        """The one to commit next."""
        with self.changed:
            return self._cycles[0] if self._cycles else None

    def append(self, cycle: Cycle) -> None:
        """Add the newest cycle."""
        with self.changed:
            self._cycles.append(cycle)
            self._notify()

    def remove_oldest(self) -> None:
        """Remove a committed cycle."""
        with self.changed:
            self._cycles.popleft()
            self._notify()

    def add_garbage(self, keys: Sequence[str]) -> None:
        """Add the keys of an abandoned attempt."""
        with self.changed:
            self._pending_deletions += keys

    def pending_deletions(self) -> list[str]:
        """Keys of abandoned attempts that no commit names yet."""
        with self.changed:
            return list(self._pending_deletions)

    def garbage_committed(self, count: int) -> None:
        """A commit named the first ``count`` of ``pending_deletions``."""
        with self.changed:
            del self._pending_deletions[:count]

    def notify(self) -> None:
        """Wake waiting threads: a PUT was answered, or the writer stops."""
        with self.changed:
            self._notify()

    def _notify(self) -> None:
        self._changes += 1
        self.changed.notify_all()

    @property
    def changes(self) -> int:
        """Number of changes; read it before the cycles, then pass it to ``wait``."""
        return self._changes

    def wait(self, timeout_s: float, *, after: int) -> None:
        """Wait until ``changes`` differs from ``after``."""
        with self.changed:
            if self._changes == after:
                self.changed.wait(timeout_s)


def _left_nothing(put: Future[None]) -> bool:
    return put.cancelled() or (put.done() and isinstance(put.exception(), WITHOUT_EFFECT))


def _error_of(put: Future[None]) -> Exception | None:
    """The error of a PUT that is done; None if it succeeded. Raises what is no Exception, such as a KeyboardInterrupt
    in its thread."""
    if put.cancelled():
        return CancelledError(
            "the PUT was cancelled before it was sent, as another PUT of its attempt failed"
        )
    error = put.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error
