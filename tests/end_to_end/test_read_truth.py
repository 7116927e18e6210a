"""What real brokers answered about bounds and times, against the archive of what they stored: equal, every answer."""

from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import rocketmq_tiered
from fetcher.archive import Archive
from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import run_sync
from fetcher.queries.time_search import Boundary, TimeReader
from tests.end_to_end.ground_truth import TRUTH_OF_ROUND, read_jsonl
from tests.end_to_end.offloading import FILTER, backfill
from tests.sweeps import sweep
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.object_store.open_store import open_store

BROKERS_5 = ["A", "B", "C", "D", "F", "G", "H", "H2", "K"]
REQUESTS_MAX = 2
UNITS_PER_FILE = 2000
"""Of the recorded brokers' consume queues."""


class Searched:
    """An archive and the objects each answer by time looks into, cached or not."""

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._opened: set[str] = set()
        self._times = TimeReader(archive.access.catalog, self)

    def queue(self, topic: str, queue_id: int) -> QueueKey | None:
        """The queue, or None when nothing of it was archived (it never held a message)."""
        generation = self._archive.access.state.current_generation(topic, queue_id)
        return None if generation is None else QueueKey(topic, queue_id, generation)

    def bounds(self, queue: QueueKey) -> tuple[int, int]:
        """[minimum, maximum) offset."""
        return self._archive.access.bounds(queue)

    def earliest(self, queue: QueueKey) -> int | None:
        """Time of the first message."""
        return run_sync(self._times.earliest_time(queue))

    def index(
        self, key: str, size_bytes: int, tail_bytes: int, priority: Priority, ordinal: int | None = None
    ) -> Awaitable[SegmentIndex]:
        """A tail; counts the object."""
        self._opened.add(key)
        return self._archive.access.source.index(key, size_bytes, tail_bytes, priority, ordinal)

    def find(self, queue: QueueKey, timestamp_ms: int, boundary: Boundary) -> int:
        """Offset by time, within the allowed requests; the public call returns the same."""
        self._opened.clear()
        found = run_sync(self._times.offset_by_time(queue, timestamp_ms, boundary))
        assert len(self._opened) <= REQUESTS_MAX
        assert self._archive.queue(*queue[:2]).offset_by_time(timestamp_ms, boundary) == found
        return found


@contextmanager
def archived(directory: Path) -> Iterator[Searched]:
    """The store in ``directory``, archived."""
    url = f"memory://truth-{directory.name}"
    root = open_store(url)
    backfill(directory / "store", root)
    with rocketmq_tiered.open(url) as archive:
        yield Searched(archive)


def truth_of(directory: Path, name: str) -> Path:
    """The directory of the truth that belongs to the store as it lies there."""
    return directory / "truth" / TRUTH_OF_ROUND.get(name, "")


@pytest.mark.parametrize("name", sweep(BROKERS_5, fast=["F", "K"], rest="integration"))
def test_bounds_and_offsets_by_time_are_the_brokers(name: str, real_store: Callable[[str], Path]) -> None:
    directory = real_store(name)
    with archived(directory) as archive:
        queues = compare_bounds(archive, truth_of(directory, name))
        answers = compare_searches(archive, truth_of(directory, name))
    assert queues >= 5 and answers >= 200, (queues, answers)


def compare_bounds(archive: Searched, truth: Path) -> int:
    """Minimum, maximum and earliest time of every archived queue; their number."""
    queues = 0
    for line in read_jsonl(truth / "queues.jsonl.zst"):
        queue = archive.queue(line["topic"], line["queueId"])
        if queue is None:
            assert not FILTER.admits(line["topic"]) or line["maxOffset"] == line["minOffset"], line
            continue
        assert archive.bounds(queue) == (line["minOffset"], line["maxOffset"]), line
        assert archive.earliest(queue) == line["earliestStoreTime"], line
        queues += 1
    return queues


def compare_searches(archive: Searched, truth: Path) -> int:
    """Every recorded offset by time of archived queues; their number."""
    answers = 0
    for line in read_jsonl(truth / "search_offset.jsonl.zst"):
        queue = archive.queue(line["topic"], line["queueId"])
        if queue is None:
            assert not FILTER.admits(line["topic"]) or line["lower"] == line["upper"] == line["offset"], line
            continue
        assert archive.find(queue, line["timestamp"], Boundary.LOWER) == line["lower"] == line["offset"], line
        assert archive.find(queue, line["timestamp"], Boundary.UPPER) == line["upper"], line
        answers += 1
    return answers


def test_a_4_9_broker_answers_with_an_offset_between_ours(real_store: Callable[[str], Path]) -> None:
    """4.9 takes no boundary: any message of that very time, else the nearest in time, never beyond the last one."""
    directory = real_store("E")
    stamps: dict[tuple[str, int], list[int]] = {}
    for line in read_jsonl(directory / "truth" / "messages.jsonl.zst"):
        stamps.setdefault((line["topic"], line["queueId"]), []).append(line["storeTimestamp"])
    answers = strays = 0
    with archived(directory) as archive:
        for line in read_jsonl(directory / "truth" / "search_offset.jsonl.zst"):
            queue, timestamp = archive.queue(line["topic"], line["queueId"]), line["timestamp"]
            if queue is None:
                continue
            stored = stamps[queue[:2]]
            lower = archive.find(queue, timestamp, Boundary.LOWER)
            upper = archive.find(queue, timestamp, Boundary.UPPER)
            low, high = archive.bounds(queue)
            assert lower == low + bisect_left(stored, timestamp), line
            assert upper == low + max(0, bisect_right(stored, timestamp) - 1), line
            assert low <= line["offset"] < high
            if min(lower, upper) <= line["offset"] <= max(lower, upper):
                answers += 1
            else:
                # 4.9 chooses the consume-queue file by its modification time, and may take the one after the right one.
                assert line["offset"] == UNITS_PER_FILE and timestamp < stored[UNITS_PER_FILE - low], line
                strays += 1
    assert answers > 1000 and strays == 7
