"""Consume queues in files: ``consumequeue`` (20-byte units, tags perhaps in ``consumequeue_ext``) and
``batchconsumequeue`` (46-byte units with base offset and count).

The frontier, the physical end of the newest record with a unit, is read repeatedly while following the log. So the
queues that changed last are checked first, and the search ends once it has found enough. It skips a queue with
unreadable files, which never counts as empty.

Queues are directories, and a broker may have 100,000: listing all of them repeatedly would cost more than following
the log. So one stat tells whether a directory's entries have changed: its mtime changes whenever an entry is added or
removed. The mtime is only as fine as the kernel's clock ticks, so that a directory that changed a moment ago counts as
changed until it has been quiet.

Sources: org.apache.rocketmq.store.ConsumeQueue, BatchConsumeQueue, ConsumeQueueExt.
"""

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from tiered.clock import MACHINE_CLOCK, Clock
from tiered.consume_queue.file_queue import STORED_DTYPES, FileQueue
from tiered.consume_queue.index import BrokerQueue, QueueKind, empty_units
from tiered.consume_queue.unit_files import OpenFiles
from tiered.consume_queue.unit_tails import last_valid_units, may_end_elsewhere, surely_written
from tiered.errors import AccessDeniedError, UnreadableError
from tiered.model.tables import Table
from tiered.residency import open_failure

QUIET_NS: Final = 2_000_000_000

_Token = tuple[int, int, int] | None
"""Device, inode and time of the last change (ns) of a directory; None: there is none."""


class DirectoryChanges:
    """Tells whether the entries of directories have changed since the last check. ``now_ns``: the wall clock, as on
    file timestamps."""

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._seen: dict[Path, _Token] = {}

    def has_changed(self, directory: Path) -> bool:
        """Whether entries of ``directory`` may have been added or removed since the last call for it; True at the first
        call. A directory that was missing and still is has not changed."""
        token = _token(directory)
        is_same = directory in self._seen and self._seen[directory] == token
        if token is not None and self._now_ns() - token[2] < QUIET_NS:
            # Another change within the resolution of its timestamp would not be seen.
            self._seen.pop(directory, None)
        else:
            self._seen[directory] = token
        return not is_same


def _token(directory: Path) -> _Token:
    try:
        status = os.stat(directory)
    except OSError:
        # Listing it reports the error.
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns


logger = logging.getLogger(__name__)

OPEN_FILES_MAX: Final = 128
RECENT_MAX: Final = 64
"""So many of the queues that changed last are checked first by each search for the frontier."""
SEARCH_QUEUES_MAX: Final = 256
"""Other queues that one search for the frontier checks at most."""
SEARCH_TOPICS_MAX: Final = 64
"""Topics in which one search looks for new queues at most."""
UNREADABLE_AGAIN_S: Final = 60.0
"""Interval at which an unreadable queue is checked for the frontier: a bad sector keeps the disk busy."""
_Key = tuple[str, int]
_Item = TypeVar("_Item")
_Answer = TypeVar("_Answer")


class FileConsumeQueues:
    """ConsumeQueueIndex over files. ``min_phys`` gives the broker's oldest physical offset. Thread-safe."""

    def __init__(
        self,
        store_path: Path,
        min_phys: Callable[[], int],
        *,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        """List the queues of the store at ``store_path``; units are read when they are needed. ``min_phys``: as in the
        class."""
        self._roots = {kind: store_path / kind.value for kind in (QueueKind.PLAIN, QueueKind.BATCH)}
        self._ext_root = store_path / "consumequeue_ext"
        self._min_phys = min_phys
        self._clock = clock
        self._lock = threading.RLock()
        self._open_files = OpenFiles(OPEN_FILES_MAX)
        self._changes = DirectoryChanges()
        self._topics: dict[QueueKind, list[str]] = {QueueKind.PLAIN: [], QueueKind.BATCH: []}
        self._by_topic: dict[tuple[QueueKind, str], dict[_Key, FileQueue]] = {}
        self._queues: dict[_Key, FileQueue] = {}
        self._order: list[_Key] = []
        self._unreadable: dict[_Key, float] = {}  # not checked for the frontier before this time
        self._recent: dict[_Key, None] = {}  # the queue that changed last is at the end
        self._queue_turn = self._topic_turn = self._frontier = self._frontier_wanted = 0
        """Of the search for the frontier (the physical end of the newest record with a unit): how many queues and
        topics it has checked, what it has found, and up to where the last call wanted it."""
        self.refresh()

    def refresh(self) -> None:
        """Find topics, queues and files that were added or removed since the last call. Only directories that have
        changed are listed."""
        with self._lock:
            for kind, topic in self._list_topics():
                self._list_queues(kind, topic)
            for queue in self._queues.values():
                if queue.files.is_listed and self._changes.has_changed(Path(queue.files.directory)):
                    queue.files.refresh()
            self._gather()

    def queues(self) -> list[BrokerQueue]:
        with self._lock:
            return [BrokerQueue(*key, self._queues[key].kind) for key in sorted(self._queues)]

    def contains(self, topic: str, queue_id: int) -> bool:
        return (topic, queue_id) in self._queues

    def min_offset(self, topic: str, queue_id: int) -> int:
        with self._lock:
            queue = self._queues.get((topic, queue_id))
            return queue.min_offset(self._min_phys()) if queue is not None else 0

    def max_offset(self, topic: str, queue_id: int) -> int:
        with self._lock:
            queue = self._queues.get((topic, queue_id))
            return queue.max_offset() if queue is not None else 0

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        with self._lock:
            queue = self._look_for_queue(topic, queue_id)
            return queue.read(queue.index_of(from_offset), count) if queue is not None else empty_units()

    def last_unit(self, topic: str, queue_id: int) -> Table:
        with self._lock:
            queue = self._queues.get((topic, queue_id))
            return queue.last() if queue is not None else empty_units()

    def last_records(self) -> dict[_Key, tuple[int, int]]:
        """(phys, size) of the last record of each queue that has one. The end of a queue's last file mostly shows it,
        which is read for all queues at once; the others are searched."""
        with self._lock:
            tails = [
                tail for kind, stored in STORED_DTYPES.items() for tail in self._quick_tails(kind, stored)
            ]
            records = {key: queue.record_of(unit) for key, queue, unit in tails if unit is not None}
            for key, queue, unit in tails:
                if unit is None:
                    records[key] = self._ask(key, queue, FileQueue.last_record, None)
        return {key: record for key, record in records.items() if record is not None}

    def that_end_elsewhere(self, ends: Mapping[_Key, int]) -> list[_Key]:
        """The queues of ``ends`` whose maximum is another than given there. Two units tell for most plain queues; the
        others are searched."""
        with self._lock:
            existing = [(key, self._queues[key], end) for key, end in ends.items() if key in self._queues]
            plain = [
                (queue.files.directory, end) for _, queue, end in existing if queue.kind is QueueKind.PLAIN
            ]
            may_differ = iter(may_end_elsewhere(plain))
            return [
                key
                for key, queue, end in existing
                if (queue.kind is not QueueKind.PLAIN or next(may_differ))
                and self._ask(key, queue, FileQueue.max_offset, end) != end
            ]

    def shown(self) -> set[_Key]:
        with self._lock:
            return {
                key
                for key, queue in self._queues.items()
                if surely_written(queue.files.directory) or self._ask(key, queue, FileQueue.has_units, True)
            }

    def _quick_tails(
        self, kind: QueueKind, stored: np.dtype[Any]
    ) -> Iterator[tuple[_Key, FileQueue, Table | None]]:
        """Each queue of ``kind``, whose units are ``stored`` as this type, with its last unit; None where a search is
        needed to find it."""
        queues = [(key, queue) for key, queue in self._queues.items() if queue.kind is kind]
        units = last_valid_units([queue.files.directory for _, queue in queues], stored)
        return ((key, queue, unit) for (key, queue), unit in zip(queues, units, strict=True))

    def frontier_phys(self, at_least: int | None = None) -> int:
        """The physical end of the newest record that has a unit in any queue: up to there the broker has written its
        queues. With ``at_least`` one call looks at a limited number of queues, those that changed last and some of the
        others in turn, until one reaches it; later calls look at the rest."""
        with self._lock:
            if at_least is None or at_least < self._frontier_wanted:
                self._frontier = 0  # search again: the log may have been truncated
            self._frontier_wanted = at_least or 0
            enough = at_least if at_least is not None else sys.maxsize
            self._advance_frontier(self._to_look_at(at_least is None), enough)
            if at_least is not None and self._frontier < at_least:
                self._advance_frontier(self._look_for_new_queues(), enough)
            return self._frontier

    def _advance_frontier(self, keys: Iterable[_Key], enough: int) -> None:
        """Raise the frontier, the physical end of the newest record with a unit, to the ends of the queues ``keys``
        until it is at ``enough``. A queue that raised it is looked at first next time; an unreadable one is left alone
        for a minute."""
        for key in keys:
            if self._frontier >= enough:
                break
            if self._clock.monotonic_s() < self._unreadable.get(key, 0):
                continue
            end = self._ask(key, self._queues[key], FileQueue.end_phys, 0)
            if end > self._frontier:
                self._frontier = end
                self._recent.pop(key, None)
                self._recent[key] = None
        while len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]

    def _ask(
        self, key: _Key, queue: FileQueue, question: Callable[[FileQueue], _Answer], if_unreadable: _Answer
    ) -> _Answer:
        """The result of ``question``, a method of FileQueue, for the files of ``queue``; ``if_unreadable`` if these
        cannot be read, which is logged once."""
        try:
            answer = question(queue)
        except (UnreadableError, AccessDeniedError) as error:
            if key not in self._unreadable:
                logger.warning(
                    "the broker's consume queue %s/%d cannot be read, so that how far uploads may go is found out "
                    "without it: %s",
                    *key,
                    error,
                )
            self._unreadable[key] = self._clock.monotonic_s() + UNREADABLE_AGAIN_S
            return if_unreadable
        self._unreadable.pop(key, None)
        return answer

    def _to_look_at(self, look_at_all: bool) -> list[_Key]:
        """The queues to search for the newest record: those that changed last, then all others or, unless
        ``look_at_all``, the next ones in turn."""
        recent = list(reversed(self._recent))
        if look_at_all:
            return recent + self._order
        others = _turn(self._order, self._queue_turn, SEARCH_QUEUES_MAX)
        self._queue_turn += len(others)
        return recent + others

    def _look_for_new_queues(self) -> list[_Key]:
        """The queues that were added since the last look to some of the topics: each call looks at the next ones in
        turn."""
        before = set(self._queues)
        topics = _turn(self._list_topics(), self._topic_turn, SEARCH_TOPICS_MAX)
        self._topic_turn += len(topics)
        for kind, topic in topics:
            self._list_queues(kind, topic)
        self._gather()
        return [key for key in self._order if key not in before]

    def _look_for_queue(self, topic: str, queue_id: int) -> FileQueue | None:
        """The queue of this name, also if it was created since the last listing; None if there is none. ``topic`` may
        be any text that a record contains."""
        queue = self._queues.get((topic, queue_id))
        if queue is not None:
            return queue
        root = self._roots[QueueKind.PLAIN]
        if "/" in topic or not os.path.isdir(root / topic / str(queue_id)):
            return None
        # A text such as ".." is a directory too, but the name of no topic.
        if topic in {name for kind, name in self._list_topics() if kind is QueueKind.PLAIN}:
            self._list_queues(QueueKind.PLAIN, topic)
            self._gather()
        return self._queues.get((topic, queue_id))

    def _list_topics(self) -> list[tuple[QueueKind, str]]:
        """All topics with their kind of queue, new ones of each kind first, so that searches look at them at once. A
        directory that has not changed is not listed again."""
        for kind, topics in self._topics.items():
            root = self._roots[kind]
            if self._changes.has_changed(root):
                found = _subdirectories(root)
                new = set(found) - set(topics)
                for gone in set(topics) - set(found):
                    self._by_topic.pop((kind, gone), None)
                self._topics[kind] = [
                    *(name for name in found if name in new),
                    *(n for n in found if n not in new),
                ]
        return [(kind, topic) for kind, topics in self._topics.items() for topic in topics]

    def _list_queues(self, kind: QueueKind, topic: str) -> None:
        """Find queues that were added to or removed from ``topic``, if its directory has changed. Queues that are known
        already keep what was read of them."""
        directory = self._roots[kind] / topic
        if not self._changes.has_changed(directory):
            return
        before = self._by_topic.get((kind, topic), {})
        topic_ext = self._ext_root / topic
        queues: dict[_Key, FileQueue] = {}
        for name in _subdirectories(directory):
            if name.isdecimal():
                key = topic, int(name)
                queues[key] = before.get(key) or FileQueue(kind, directory, name, topic_ext, self._open_files)
        self._by_topic[kind, topic] = queues

    def _gather(self) -> None:
        """Make the table of all queues from those of each topic, and discard what was noted of queues that are gone."""
        found: dict[_Key, FileQueue] = {}
        for kind in (QueueKind.PLAIN, QueueKind.BATCH):
            for topic in self._topics[kind]:
                for key, queue in self._by_topic.get((kind, topic), {}).items():
                    # A queue whose kind was changed has two directories; the one with units
                    # counts.
                    if key not in found or self._ask(key, queue, FileQueue.has_places, True):
                        found[key] = queue
        self._queues, self._order = found, list(found)
        self._recent = {key: None for key in self._recent if key in found}
        self._unreadable = {key: until_s for key, until_s in self._unreadable.items() if key in found}

    def units_between(self, begin_phys: int, end_phys: int) -> dict[_Key, Table]:
        """The units whose records begin in [begin_phys, end_phys) of the commitlog, by queue; queues without any are
        skipped."""
        found = {}
        with self._lock:
            keys = sorted(self._queues)
        for key in keys:
            units = self.units_of_records(*key, begin_phys, end_phys)
            if len(units):
                found[key] = units
        return found

    def units_of_records(self, topic: str, queue_id: int, begin_phys: int, end_phys: int) -> Table:
        with self._lock:  # locked per queue: the frontier is read in between
            queue = self._look_for_queue(topic, queue_id)
            if queue is None:
                return empty_units()
            first = queue.files.lower_bound("phys", begin_phys)
            return queue.read(first, queue.files.lower_bound("phys", end_phys) - first)

    def close(self) -> None:
        with self._lock:
            self._open_files.close()


def _turn(items: list[_Item], turn: int, count: int) -> list[_Item]:
    """``count`` of ``items`` from index ``turn`` on, and from the first again behind the last; all if there are fewer.
    The caller raises ``turn``, so that each item has its turn."""
    if len(items) <= count:
        return items
    begin = turn % len(items)
    return (items + items[:count])[begin : begin + count]


def _subdirectories(directory: Path) -> list[str]:
    """The names of directories below one, sorted; none if it does not exist."""
    try:
        with os.scandir(directory) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise open_failure(directory, error) from error
