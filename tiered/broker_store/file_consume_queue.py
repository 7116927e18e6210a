"""Consume queues kept in files: ``consumequeue`` (20-byte units, tags perhaps in ``consumequeue_ext``) and
``batchconsumequeue`` (46-byte units with base offset and count).

Owns which queues there are and what a unit means. The frontier is asked for again and again while following,
so the queues that moved last are looked at first and the search ends once it has seen enough. Sources:
org.apache.rocketmq.store.ConsumeQueue, BatchConsumeQueue, ConsumeQueueExt.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from tiered.broker_store.consume_queue_ext import resolve_tags_codes
from tiered.broker_store.consume_queue_index import UNIT_DTYPE, BrokerQueue, QueueKind, empty_units
from tiered.broker_store.residency import open_failure
from tiered.broker_store.unit_files import OpenFiles, UnitFiles, is_filler
from tiered.model.tables import Table

OPEN_FILES_MAX: Final = 128
RECENT_MAX: Final = 64
SEARCH_QUEUES_MAX: Final = 512
"""One look at the frontier costs at most this many queues, or its price would follow their number."""
PLAIN_DTYPE: Final = np.dtype([("phys", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
BATCH_DTYPE: Final = np.dtype([
    ("phys", ">i8"), ("size", ">i4"), ("tags_code", ">i8"), ("store_timestamp", ">i8"),
    ("base_offset", ">i8"), ("count", ">i2"), ("compacted_offset", ">i4"), ("reserved", ">i4"),
])  # fmt: skip
_STORED: Final[dict[QueueKind, np.dtype[Any]]] = {QueueKind.PLAIN: PLAIN_DTYPE, QueueKind.BATCH: BATCH_DTYPE}
_Key = tuple[str, int]


class _Queue:
    """One queue's files and its meaning of a unit."""

    def __init__(self, kind: QueueKind, directory: Path, ext: Path, open_files: OpenFiles) -> None:
        self.kind = kind
        self.files = UnitFiles(directory, _STORED[kind], open_files)
        self._ext = ext
        self._open_files = open_files

    def read(self, first: int, count: int) -> Table:
        """Units by index, as UNIT_DTYPE."""
        stored, indices = self.files.read(first, count)
        units = np.zeros(len(stored), UNIT_DTYPE)
        units["phys"], units["size"] = stored["phys"], stored["size"]
        if self.kind is QueueKind.BATCH:
            units["tags_code"] = stored["tags_code"]
            units["queue_offset"], units["inner_num"] = stored["base_offset"], stored["count"]
        else:
            codes = stored["tags_code"].astype(np.int64)
            units["tags_code"] = resolve_tags_codes(codes, self._ext, self._open_files)
            units["queue_offset"], units["inner_num"] = indices, 1
        return units

    def end_phys(self) -> int:
        """Physical end of the last unit's record, 0 without any."""
        _, last = self.files.tail()
        return int(last["phys"][0] + last["size"][0]) if len(last) and not is_filler(last)[0] else 0

    def last(self) -> Table:
        end = self.files.end()
        return self.read(end - 1, 1) if end > self.files.first else empty_units()

    def max_offset(self) -> int:
        last = self.last()
        if len(last):
            return int(last["queue_offset"][0] + last["inner_num"][0])
        return self.files.end() if self.kind is QueueKind.PLAIN else 0

    def min_offset(self, min_phys: int) -> int:
        unit = self.read(self.files.lower_bound("phys", min_phys), 1)
        return int(unit["queue_offset"][0]) if len(unit) else self.max_offset()

    def index_of(self, queue_offset: int) -> int:
        """Index of the unit that holds ``queue_offset``, or of the first after it."""
        if self.kind is QueueKind.PLAIN:
            return max(queue_offset, self.files.first)
        after = self.files.lower_bound("base_offset", queue_offset + 1)
        before = self.read(after - 1, 1) if after > self.files.first else empty_units()
        holds = len(before) and before["queue_offset"][0] + before["inner_num"][0] > queue_offset
        return after - 1 if holds else after


class FileConsumeQueues:
    """ConsumeQueueIndex over files. ``min_phys`` gives the broker's oldest physical offset. Not
    thread-safe."""

    def __init__(self, store_path: Path, min_phys: Callable[[], int]) -> None:
        self._store_path = store_path
        self._min_phys = min_phys
        self._open_files = OpenFiles(OPEN_FILES_MAX)
        self._queues: dict[_Key, _Queue] = {}
        self._order: list[_Key] = []
        self._recent: dict[_Key, None] = {}  # the queue that moved last is at the end
        self._turn = self._frontier = self._asked = 0
        self.refresh()

    def refresh(self) -> None:
        """See ConsumeQueueIndex."""
        found: dict[_Key, _Queue] = {}
        for kind in (QueueKind.PLAIN, QueueKind.BATCH):
            for topic, queue_id, directory in _queue_directories(self._store_path / kind.value):
                queue = self._queues.get((topic, queue_id))
                if queue is not None and queue.kind is kind:
                    queue.files.refresh()
                else:
                    ext = self._store_path / "consumequeue_ext" / topic / str(queue_id)
                    queue = _Queue(kind, directory, ext, self._open_files)
                if kind is QueueKind.PLAIN or queue.files.end() or (topic, queue_id) not in found:
                    found[topic, queue_id] = queue
        self._queues, self._order = found, list(found)
        self._recent = {key: None for key in self._recent if key in found}

    def queues(self) -> list[BrokerQueue]:
        """See ConsumeQueueIndex."""
        return [BrokerQueue(*key, self._queues[key].kind) for key in sorted(self._queues)]

    def contains(self, topic: str, queue_id: int) -> bool:
        """See ConsumeQueueIndex."""
        return (topic, queue_id) in self._queues

    def min_offset(self, topic: str, queue_id: int) -> int:
        """See ConsumeQueueIndex."""
        queue = self._queues.get((topic, queue_id))
        return queue.min_offset(self._min_phys()) if queue is not None else 0

    def max_offset(self, topic: str, queue_id: int) -> int:
        """See ConsumeQueueIndex."""
        queue = self._queues.get((topic, queue_id))
        return queue.max_offset() if queue is not None else 0

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        """See ConsumeQueueIndex."""
        queue = self._queues.get((topic, queue_id))
        return queue.read(queue.index_of(from_offset), count) if queue is not None else empty_units()

    def last_unit(self, topic: str, queue_id: int) -> Table:
        """See ConsumeQueueIndex."""
        queue = self._queues.get((topic, queue_id))
        return queue.last() if queue is not None else empty_units()

    def frontier_phys(self, at_least: int | None = None) -> int:
        """See ConsumeQueueIndex. With ``at_least`` one call looks at a bounded number of queues: those
        that moved last, and some of the others in turn; what it has not looked at it finds in a later
        call."""
        if at_least is None or at_least < self._asked:
            self._frontier = 0  # start over: the log may have been cut back
        self._asked = at_least or 0
        enough = at_least if at_least is not None else sys.maxsize
        for key in self._to_look_at(at_least is None):
            if self._frontier >= enough:
                break
            end = self._queues[key].end_phys()
            if end > self._frontier:
                self._frontier = end
                self._recent.pop(key, None)
                self._recent[key] = None
        while len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]
        return self._frontier

    def _to_look_at(self, look_at_all: bool) -> list[_Key]:
        recent = list(reversed(self._recent))
        others = self._order
        if not look_at_all and len(others) > SEARCH_QUEUES_MAX:
            begin = self._turn % len(others)
            self._turn = begin + SEARCH_QUEUES_MAX
            others = (others + others[:SEARCH_QUEUES_MAX])[begin : begin + SEARCH_QUEUES_MAX]
        return recent + others

    def units_between(self, begin_phys: int, end_phys: int) -> dict[_Key, Table]:
        """See ConsumeQueueIndex."""
        found = {}
        for key in sorted(self._queues):
            queue = self._queues[key]
            first = queue.files.lower_bound("phys", begin_phys)
            units = queue.read(first, queue.files.lower_bound("phys", end_phys) - first)
            if len(units):
                found[key] = units
        return found

    def close(self) -> None:
        """See ConsumeQueueIndex."""
        self._open_files.close()


def _queue_directories(root: Path) -> Iterator[tuple[str, int, Path]]:
    for topic in _subdirectories(root):
        for queue in _subdirectories(root / topic):
            if queue.isdecimal():
                yield topic, int(queue), root / topic / queue


def _subdirectories(directory: Path) -> list[str]:
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise open_failure(directory, error) from error
