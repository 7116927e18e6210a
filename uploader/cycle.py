"""Cycles on their way, and what the answers of the attempt that runs mean.

    attempt running → all PUTs acknowledged       → durable, for good
                    → any PUT failed, none running → failed: abandoned as a whole, its memory released
    no attempt      → a new one is due at ``retry_at_s``

Owns that judgement, and the order of the cycles in flight. Starts no attempt (cycle_builder.py), commits nothing
(cycle_upload.py).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass, field

from tiered.catalog.catalog_writer import CatalogWriter
from tiered.errors import WITHOUT_EFFECT
from tiered.formats.segment import BlockCodec, EncodedSegment
from tiered.object_store.abandonment import Abandonment
from tiered.object_store.interface import ObjectStore
from uploader.attempts import AttemptPolicy
from uploader.cycle_plan import CyclePlan, CyclePlanner
from uploader.header_check import HeaderCheck
from uploader.log_batch import LogBatch, LogBatchPool
from uploader.queue_tails import QueueTails

PUT_GRACE_S = 5.0
"""A PUT that outlives its own time-out by this, beside one that failed, no longer holds up the next attempt."""


@dataclass
class UploadCounters:
    """What was done so far; read by status and metrics without a lock."""

    messages: int = 0
    raw_bytes: int = 0
    stored_bytes: int = 0
    objects: int = 0
    commits: int = 0
    attempts_abandoned: int = 0
    gaps: int = 0
    damaged_ranges: int = 0
    lost_ranges: int = 0
    last_error: str = ""
    consecutive_failures: int = 0


@dataclass(frozen=True)
class UploadContext:
    """What every cycle shares."""

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
    clock_ms: Callable[[], int]
    monotonic_s: Callable[[], float]
    jitter: Callable[[], float]
    claim: Callable[[], None]
    """Owns the epoch, at the latest before the first PUT."""
    log: Callable[[str, dict[str, object]], None]


@dataclass
class Attempt:
    """All objects of a cycle under keys of their own; complete once made, only the PUTs' answers change.

    ``encoded`` is all that holds the bodies: emptied, their memory is free once running PUTs are over.
    """

    keys: list[str]
    encoded: list[EncodedSegment]
    puts: list[Future[None]]
    timeout_s: float
    """The longest of its PUTs'."""
    abandonment: Abandonment
    """Of its PUTs."""
    _failure: Exception | None = None
    _failing_since_s: float = 0.0

    @property
    def is_durable(self) -> bool:
        """Every PUT was acknowledged; of no object at all that is true as well."""
        return all(put.done() and _error_of(put) is None for put in self.puts)

    def keys_that_may_exist(self) -> list[str]:
        """Garbage if it is abandoned. A PUT that was refused before any effect, or withdrawn, left nothing: listed,
        such keys would grow in number as long as the store is away."""
        return [key for key, put in zip(self.keys, self.puts, strict=True) if not _left_nothing(put)]

    def failure(self, now_s: float) -> Exception | None:
        """Why it is to be abandoned now, or None: it may still become durable, or its PUTs are not yet closed.

        With the first failure it cannot become durable any more: PUTs that have not begun are withdrawn, and those that
        run are given up.
        """
        if self._failure is None:
            answered = (put for put in self.puts if put.done() and not put.cancelled())
            self._failure = next((error for put in answered if (error := _error_of(put))), None)
            if self._failure is None:
                return None
            self._failing_since_s = now_s
            for put in self.puts:
                put.cancel()
            self.abandonment.give_up()
        is_over = all(put.done() for put in self.puts)
        is_over = is_over or now_s - self._failing_since_s >= self.timeout_s + PUT_GRACE_S
        return self._failure if is_over else None


@dataclass
class Cycle:
    """One batch on its way. Without an attempt, a new one is due at ``retry_at_s``."""

    batch: LogBatch
    plan: CyclePlan
    attempt: Attempt | None = None
    failures: int = 0
    retry_at_s: float = 0.0

    def durable_attempt(self) -> Attempt | None:
        """The attempt to commit. Who waits for it must hold no other: its memory is to go when it is abandoned."""
        attempt = self.attempt
        return attempt if attempt is not None and attempt.is_durable else None


@dataclass
class CyclesInFlight:
    """Cycles in log order, and the keys that abandoned attempts left. Thread-safe."""

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
        """The newest."""
        with self.changed:
            self._cycles.append(cycle)
            self._notify()

    def remove_oldest(self) -> None:
        """It is committed."""
        with self.changed:
            self._cycles.popleft()
            self._notify()

    def doom(self, keys: Sequence[str]) -> None:
        """Keys of an attempt that will never be committed."""
        with self.changed:
            self._pending_deletions += keys

    def pending_deletions(self) -> list[str]:
        """Keys that no commit has given up yet."""
        with self.changed:
            return list(self._pending_deletions)

    def given_up(self, count: int) -> None:
        """A commit named the first ``count`` of ``pending_deletions``."""
        with self.changed:
            del self._pending_deletions[:count]

    def notify(self) -> None:
        """A PUT was answered, or everything ends."""
        with self.changed:
            self._notify()

    def _notify(self) -> None:
        self._changes += 1
        self.changed.notify_all()

    @property
    def changes(self) -> int:
        """To be read before looking at the cycles, and given to ``wait`` after."""
        return self._changes

    def wait(self, timeout_s: float, *, after: int) -> None:
        """Until something changed since ``changes`` was ``after``."""
        with self.changed:
            if self._changes == after:
                self.changed.wait(timeout_s)


def _left_nothing(put: Future[None]) -> bool:
    return put.cancelled() or (put.done() and isinstance(put.exception(), WITHOUT_EFFECT))


def _error_of(put: Future[None]) -> Exception | None:
    """The error of a PUT that is done."""
    if put.cancelled():
        return CancelledError("withdrawn before it was put")
    error = put.exception()
    if error is not None and not isinstance(error, Exception):
        raise error
    return error
