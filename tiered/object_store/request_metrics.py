"""Counts the requests of an object store: number, failures, bytes and latency by operation."""

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from tiered.clock import MACHINE_CLOCK, Clock
from tiered.object_store.body import size_bytes
from tiered.object_store.interface import GET_BYTES_MAX, Body, ObjectInfo, ObjectStore, Piece
from tiered.object_store.part_plan import sent_bytes
from tiered.object_store.wrapper import StoreWrapper

LATENCY_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


@dataclass
class OperationStats:
    """Totals of one operation. ``latency_counts``: one entry more than LATENCY_BOUNDS_S, for slower ones."""

    requests: int = 0
    bytes: int = 0
    seconds: float = 0.0
    failures: dict[str, int] = field(default_factory=dict)
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))


class StoreMetrics:
    """Totals since the start, shared by all stores. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._operations: dict[str, OperationStats] = {}

    def record(self, operation: str, seconds: float, transferred_bytes: int, failure: str | None) -> None:
        """Count one finished request. ``operation``: as in ``snapshot``; ``failure``: the name of the error's class,
        None if the request succeeded."""
        with self._lock:
            stats = self._operations.setdefault(operation, OperationStats())
            stats.requests += 1
            stats.bytes += transferred_bytes
            stats.seconds += seconds
            stats.latency_counts[bisect_left(LATENCY_BOUNDS_S, seconds)] += 1
            if failure is not None:
                stats.failures[failure] = stats.failures.get(failure, 0) + 1

    def snapshot(self) -> dict[str, OperationStats]:
        """A copy of the totals by operation: put, compose, get, get_range, list, delete, clock."""
        with self._lock:
            return {
                name: replace(stats, failures=dict(stats.failures), latency_counts=list(stats.latency_counts))
                for name, stats in self._operations.items()
            }

    def add(self, others: Mapping[str, OperationStats]) -> None:
        """Add the totals of another process, by operation, to those of this one."""
        with self._lock:
            for operation, other in others.items():
                stats = self._operations.setdefault(operation, OperationStats())
                stats.requests += other.requests
                stats.bytes += other.bytes
                stats.seconds += other.seconds
                for failure, count in other.failures.items():
                    stats.failures[failure] = stats.failures.get(failure, 0) + count
                counts = zip(stats.latency_counts, other.latency_counts, strict=True)
                stats.latency_counts = [own + added for own, added in counts]

    @property
    def requests(self) -> int:
        """All requests so far."""
        with self._lock:
            return sum(stats.requests for stats in self._operations.values())


class MetricsStore(StoreWrapper):
    """``store`` with every request counted. Inside retries, so each attempt counts."""

    def __init__(self, store: ObjectStore, metrics: StoreMetrics, *, clock: Clock = MACHINE_CLOCK) -> None:
        super().__init__(store)
        self._metrics = metrics
        self._clock = clock

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        """Create an object. Bytes count on success."""
        with self._timed("put") as request:
            self._store.put_if_absent(key, body, timeout_s=timeout_s)
            request.bytes = size_bytes(body)

    def compose_if_absent(
        self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None, spool: str = ""
    ) -> None:
        """Create an object of pieces. Bytes count on success, except those copied inside the store."""
        with self._timed("compose") as request:
            self._store.compose_if_absent(key, pieces, timeout_s=timeout_s, spool=spool)
            request.bytes = sent_bytes(pieces)

    def get(self, key: str, max_bytes: int = GET_BYTES_MAX) -> bytes:
        with self._timed("get") as request:
            content = self._store.get(key, max_bytes)
            request.bytes = len(content)
        return content

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        with self._timed("get_range") as request:
            content = self._store.get_range(key, offset, length)
            request.bytes = len(content)
        return content

    def list(self, prefix: str, *, start_after: str = "", limit: int | None = None) -> Iterator[ObjectInfo]:
        """List objects. Counted once per listing."""
        with self._timed("list"):
            yield from self._store.list(prefix, start_after=start_after, limit=limit)

    def delete(self, keys: Sequence[str]) -> None:
        with self._timed("delete"):
            self._store.delete(keys)

    def clock_ms(self, prefix: str = "") -> int:
        with self._timed("clock"):
            return self._store.clock_ms(prefix)

    @contextmanager
    def _timed(self, operation: str) -> Iterator[OperationStats]:
        """Count the request in the block when it ends, with its duration, its failure and the bytes that the block sets
        in the yielded object."""
        request = OperationStats()
        failure: str | None = None
        began_s = self._clock.monotonic_s()
        try:
            yield request
        except GeneratorExit:  # the reader of a listing stops early, which is no failure
            raise
        except BaseException as error:
            failure = type(error).__name__
            raise
        finally:
            elapsed_s = self._clock.monotonic_s() - began_s
            self._metrics.record(operation, elapsed_s, request.bytes, failure)
