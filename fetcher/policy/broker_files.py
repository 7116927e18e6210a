"""The state of a broker's queues by its files: offsets, positions in the commitlog, residency in the page cache, and
which topics it compacts.

The broker is neither contacted nor locked, and its page cache stays unchanged. The RocksDB of a live broker hides its
consume queues: then they count as unreadable. Residency is checked with the kernel at every read, which loads no page:
cachestat(2) (Linux 6.5) needs no mapping of the file, and is refused without permission (6.14). mincore(2) reports "all
resident" to a process that neither owns nor may write the file: for such a process the result is UNKNOWN. Does not own
the choice between broker and archive.
"""

import ctypes
import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from fetcher.policy.read_policy import BrokerSide, HeldOffsets, LocalView, Residency
from tiered.broker_store.commit_log import CommitLog, LogFile
from tiered.broker_store.config import topics_fingerprint
from tiered.broker_store.store import BrokerStore
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.consume_queue.index import ConsumeQueueIndex, empty_units
from tiered.errors import AccessDeniedError, NotFoundError, TieredError, UnavailableError
from tiered.model.tables import Table
from tiered.residency import PAGE_BYTES, ResidencyProbe, ResidentPages, best_probe, open_failure
from tiered.settings.topic_rules import is_compacted

_SYS_CACHESTAT: Final = 451
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


class _Range(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_uint64), ("length", ctypes.c_uint64))


class _CacheStat(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64) for name in ("cached", "dirty", "writeback", "evicted", "recently_evicted")
    )


ByteRange = tuple[int, int]
"""[begin, end) in a file."""
CachedPages = Callable[[int, int, int], int]
"""(fd, begin, length) -> pages in the cache; OSError if it is unknown."""


def cached_pages(fd: int, begin: int, length: int) -> int:
    """How many pages of the file's bytes [begin, begin + length) are in the page cache, by cachestat(2). Raises OSError
    where the kernel lacks the call (ENOSYS) or forbids it (EPERM)."""
    wanted, found = _Range(begin, length), _CacheStat()
    status = _libc.syscall(
        ctypes.c_long(_SYS_CACHESTAT),
        ctypes.c_int(fd),
        ctypes.byref(wanted),
        ctypes.byref(found),
        ctypes.c_uint(0),
    )
    if status != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return int(found.cached)


class PageResidency:
    """Checks ranges of files. Thread-safe. Tests replace ``cached_pages``."""

    def __init__(self, cached_pages: CachedPages = cached_pages) -> None:
        self._cached_pages = cached_pages

    def of(self, path: Path, ranges: Sequence[ByteRange]) -> Residency:
        """Whether every page of the file that the byte ranges touch is in the page cache. Raises NotFoundError,
        AccessDeniedError or UnavailableError if the file cannot be opened."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise open_failure(path, error) from error
        try:
            return self._by_cachestat(fd, ranges)
        except OSError:
            # The kernel is old, or a sandbox forbids cachestat. For a file that this process owns or may write,
            # mincore tells the truth as well.
            return self._by_mincore(path, fd, ranges)
        finally:
            os.close(fd)

    def _by_cachestat(self, fd: int, ranges: Sequence[ByteRange]) -> Residency:
        is_resident = all(
            self._cached_pages(fd, begin, end - begin) >= -(-end // PAGE_BYTES) - begin // PAGE_BYTES
            for begin, end in ranges
        )
        return Residency.RESIDENT if is_resident else Residency.COLD

    def _by_mincore(self, path: Path, fd: int, ranges: Sequence[ByteRange]) -> Residency:
        """Whether all byte ranges of the open file are in the page cache, by mincore(2). UNKNOWN where the kernel does
        not tell this process, because it neither owns nor may write the file."""
        if best_probe(fd) is not ResidencyProbe.MINCORE:
            return Residency.UNKNOWN
        try:
            pages = ResidentPages(fd, os.fstat(fd).st_size)
            try:
                is_resident = all(bool(pages.query(begin, end).all()) for begin, end in ranges)
            finally:
                pages.close()
        except OSError as error:
            raise open_failure(path, error) from error
        return Residency.RESIDENT if is_resident else Residency.COLD


REFRESH_S: Final = 5.0


class CompactionTopics:
    """The broker's compaction topics as of the last ``refresh``."""

    def __init__(self, store: BrokerStore) -> None:
        self._store = store
        self._fingerprint: tuple[tuple[str, int, int], ...] | None = None
        self._names: frozenset[str] = frozenset()

    def __contains__(self, topic: object) -> bool:
        return topic in self._names

    def refresh(self) -> None:
        """Read the broker's topic table again if the broker has written it since. Blocks. Raises CorruptionError,
        UnavailableError or AccessDeniedError, and keeps the topics it knows then."""
        fingerprint = topics_fingerprint(self._store.path)
        if fingerprint == self._fingerprint:
            return
        table = self._store.topics()
        self._names = frozenset(name for name, config in table.items() if is_compacted(config))
        self._fingerprint = fingerprint


logger = logging.getLogger(__name__)

REFRESH_SHARE_MAX: Final = 0.05
"""Listing files takes at most this share of the time, however many queues there are."""


class BrokerFiles:
    """One broker's store. Thread-safe. Blocks for as long as the disk takes."""

    def __init__(
        self,
        store: BrokerStore,
        *,
        refresh_s: float = 1.0,
        clock: Clock = MACHINE_CLOCK,
        residency: PageResidency | None = None,
    ) -> None:
        """Reads the files of ``store``, and closes it at the end. ``refresh_s``: seconds after which the directories
        are listed again."""
        self._store = store
        self._refresh_s = refresh_s
        self._clock = clock
        self._residency = residency or PageResidency()
        self._lock = threading.Lock()
        self._index: ConsumeQueueIndex | None = None
        self._has_index = False
        self._fresh_until_s = clock.monotonic_s() + refresh_s
        self._minimums: tuple[tuple[LogFile, ...], dict[tuple[str, int], int]] = (), {}
        self._warned: set[str] = set()

    def local_view(self, topic: str, queue_id: int, offset: int) -> LocalView:
        """What the broker's files say of a queue and of its message at ``offset``: the queue's bounds, and whether the
        message is on disk. Files that cannot be read raise nothing: the ``side`` of the result says so."""
        try:
            queues = self._queues()
            if queues is None:
                return self._hidden()
            log = self._store.commit_log
            if not queues.contains(topic, queue_id):
                return LocalView(BrokerSide.READABLE, oldest_phys=log.broker_min_phys)
            queue = self._range(queues, topic, queue_id)
            unit = queues.units(topic, queue_id, offset, 1) if offset < queue.max_offset else empty_units()
            phys = int(unit["phys"][0]) if _holds(unit, offset) else -1
            listed = log.files
            list_until(log, phys)  # the message may be in a file that was not there yet
            if log.files is not listed:
                queue = self._range(queues, topic, queue_id)
            is_record = phys >= 0 and log.file_at(phys) is not None
            last = queues.last_unit(topic, queue_id) if not is_record else empty_units()
            last_phys = int(last["phys"][0]) if len(last) else phys
            return LocalView(BrokerSide.READABLE, queue, is_record, phys, log.broker_min_phys, last_phys)
        except (AccessDeniedError, UnavailableError, NotFoundError) as error:
            self._warn_once(error)
            return self._hidden()

    def _hidden(self) -> LocalView:
        """Unreadable queues; the begin of the log if it is readable, else 0."""
        try:
            return LocalView(BrokerSide.UNREADABLE, oldest_phys=self._store.commit_log.broker_min_phys)
        except TieredError:
            return LocalView(BrokerSide.UNREADABLE)

    def oldest_file(self) -> LogFile | None:
        """The broker's oldest commitlog file, by a listing no older than ``refresh_s``."""
        try:
            self._queues()
        except (AccessDeniedError, UnavailableError, NotFoundError) as error:
            self._warn_once(error)
        return next((file for file in self._store.commit_log.files if not file.is_pinned), None)

    def expire(self) -> None:
        """The next call lists the directories again."""
        with self._lock:
            self._fresh_until_s = self._clock.monotonic_s()

    def offset_from(self, topic: str, queue_id: int, phys: int) -> int:
        """The queue offset of the queue's first message at or after the physical offset ``phys``, by a binary search in
        the consume queue. The queue's maximum if there is none; 0 if the broker has no such queue.

        Raises what reading the consume queue raises.
        """
        queues = self._queues()
        if queues is None or not queues.contains(topic, queue_id):
            return 0
        queue = self._range(queues, topic, queue_id)
        low, high = queue.min_offset, queue.max_offset
        while low < high:
            middle = (low + high) // 2
            unit = queues.units(topic, queue_id, middle, 1)
            if not len(unit) or int(unit["phys"][0]) >= phys:
                high = middle
            else:
                low = max(middle + 1, end_of(unit, 0))
        return low

    def residency(self, topic: str, queue_id: int, offset: int, *, count: int, max_bytes: int) -> Residency:
        """Whether a pull of ``count`` messages from ``offset`` would find all its bytes in the page cache.

        Raises NotFoundError if a file is deleted concurrently, or what reading the consume queue raises.
        """
        queues = self._queues()
        units = queues.units(topic, queue_id, offset, count) if queues is not None else empty_units()
        if not len(units):
            return Residency.COLD
        units = units[: max(1, int(np.searchsorted(np.cumsum(units["size"]), max_bytes, side="right")))]
        ranges: dict[LogFile, list[ByteRange]] = {}
        for phys, size in zip(units["phys"].tolist(), units["size"].tolist(), strict=True):
            file = self._store.commit_log.file_at(phys)
            if file is None:
                return Residency.COLD
            begin = phys - file.begin_phys
            ranges.setdefault(file, []).append((begin, min(begin + size, file.size_bytes)))
        answers = {self._residency.of(file.path, inside) for file, inside in ranges.items()}
        for answer in (Residency.COLD, Residency.UNKNOWN):
            if answer in answers:
                return answer
        return Residency.RESIDENT

    def close(self) -> None:
        """Release the store."""
        self._store.close()

    def _queues(self) -> ConsumeQueueIndex | None:
        """The broker's consume queues. The directories are listed again every ``refresh_s`` seconds, or less often if
        listing takes long, so that it takes no more than REFRESH_SHARE_MAX of the time."""
        with self._lock:
            started_s = self._clock.monotonic_s()
            is_due = started_s >= self._fresh_until_s
            if is_due or not self._has_index:
                self._index, self._has_index = self._store.consume_queues(), True
            queues = self._index
            if is_due:
                self._store.commit_log.refresh()
                if queues is not None:
                    queues.refresh()
                self._minimums = (), {}
                done_s = self._clock.monotonic_s()
                self._fresh_until_s = done_s + max(self._refresh_s, (done_s - started_s) / REFRESH_SHARE_MAX)
        return queues

    def _range(self, queues: ConsumeQueueIndex, topic: str, queue_id: int) -> HeldOffsets:
        """The minimum and maximum offset of a queue. To find the minimum takes a search, and it moves only when the
        broker deletes files, so it is cached until the directory is listed again."""
        maximum = queues.max_offset(topic, queue_id)
        files, minimums = self._minimums
        listed = self._store.commit_log.files
        if files is not listed:  # a read that misses a file lists them, too
            minimums = {}
            self._minimums = listed, minimums
        minimum = minimums.get((topic, queue_id))
        if minimum is None:
            minimum = queues.min_offset(topic, queue_id)
            if minimum < maximum:
                minimums[topic, queue_id] = minimum
        return HeldOffsets(min(minimum, maximum), maximum)

    def _warn_once(self, error: TieredError) -> None:
        if error.message not in self._warned and len(self._warned) < 100:
            self._warned.add(error.message)
            logger.warning(
                "the broker's files cannot be read, and pulls are read from the archive: %s", error
            )


def _holds(unit: Table, offset: int) -> bool:
    return bool(len(unit)) and int(unit["queue_offset"][0]) <= offset < end_of(unit, 0)


def list_until(log: CommitLog, phys: int) -> None:
    """List the files again if ``phys`` is in a newer one."""
    if phys >= log.max_file_end:
        log.refresh()


def end_of(units: Table, row: int) -> int:
    """The offset after the messages of unit ``row``."""
    return int(units["queue_offset"][row]) + int(units["inner_num"][row])
