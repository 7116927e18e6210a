"""Reads are made at once by the caller, or in threads when they take much of the time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from rocketmq_tiered.maintenance.prefetched_reads import SLOW_READ_S, SLOW_SHARE, PrefetchedReads


class Clock:
    """Stands still unless a read or other work takes time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s

    def read(self, seconds: float) -> threading.Thread:
        """Takes so long; the thread that it ran in."""
        self.now_s += seconds
        return threading.current_thread()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def reads(clock: Clock) -> Iterator[PrefetchedReads]:
    reads = PrefetchedReads(2, clock)
    yield reads
    reads.close()


def test_reads_that_take_little_of_the_time_are_made_at_once(reads: PrefetchedReads, clock: Clock) -> None:
    for _ in range(1000):
        done = reads.submit(clock.read, 0.001)
        assert done.done() and done.result() is threading.current_thread()
        clock.now_s += 0.001 / SLOW_SHARE  # other work


def test_slow_reads_are_made_in_threads_for_good(reads: PrefetchedReads, clock: Clock) -> None:
    assert reads.submit(clock.read, SLOW_READ_S).result() is threading.current_thread()
    assert reads.submit(clock.read, 0.001).result() is threading.current_thread()
    clock.now_s += 1000
    assert reads.submit(clock.read, 0.0).result() is not threading.current_thread()


def test_a_failed_read_raises_at_once_or_from_its_result(reads: PrefetchedReads, clock: Clock) -> None:
    def fail() -> None:
        raise OSError

    with pytest.raises(OSError):
        reads.submit(fail)
    reads.submit(clock.read, 2 * SLOW_READ_S)
    failed = reads.submit(fail)
    with pytest.raises(OSError):
        failed.result()


def test_after_close_nothing_is_read(reads: PrefetchedReads, clock: Clock) -> None:
    reads.submit(clock.read, 2 * SLOW_READ_S)
    reads.close()
    reads.close()
    with pytest.raises(RuntimeError):
        reads.submit(clock.read, 0.0)
