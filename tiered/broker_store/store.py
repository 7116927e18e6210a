"""Opens a broker's store directory: finds its parts and refuses unsupported layouts.

Writes nothing into the store. Sources: org.apache.rocketmq.store.config.StorePathConfigHelper, MessageStoreConfig.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from types import TracebackType
from typing import Final

from tiered.broker_store.commit_log import BLANK_MAGIC, RECORD_MAGICS, CommitLog, LogFile
from tiered.broker_store.conf import BrokerConf, BrokerNames, find_names
from tiered.broker_store.config import (
    BrokerState,
    Document,
    read_broker_state,
    read_topics,
    refuse_unknown_configuration,
)
from tiered.broker_store.liveness import (
    LOCK_NAME,
    Liveness,
    LivenessReport,
    ask_liveness,
    broker_locked_out,
)
from tiered.consume_queue.file_queues import FileConsumeQueues
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.consume_queue.rocksdb_copy import is_rocksdb
from tiered.consume_queue.rocksdb_queues import RocksdbConsumeQueues
from tiered.errors import MissingBrokerFileError, StoreLayoutError
from tiered.residency import NAME_DIGITS, open_failure

_DLEDGER_PREFIX: Final = "dledger-"
_DLEDGER_ENTRY_MAGIC: Final = 1
_PROBE_BYTES: Final = 1024 * 1024
_PROBE_FILES_MAX: Final = 4
"""Bytes of one of the first files of a log, which show whether it is a log of RocketMQ."""


class BrokerStore:
    """An open store. ``conf`` is None without a broker.conf. Not thread-safe except ``commit_log``."""

    def __init__(self, path: Path, conf: BrokerConf | None, commit_log: CommitLog) -> None:
        self.path = path
        self.conf = conf
        self.commit_log = commit_log
        self._lock = threading.Lock()
        self._index: ConsumeQueueIndex | None = None
        self._is_locked = False

    def zone(self) -> BrokerZone:
        """The time zone in which the broker deletes files."""
        return broker_zone(self.path)

    @property
    def has_rocksdb_queues(self) -> bool:
        """Whether the consume queues are in RocksDB, whose new entries are invisible while the broker runs. If there
        are files as well, the configuration says which the broker reads."""
        if self._rocksdb_dir() is None:
            return False
        return self.conf is None or self.conf.reads_rocksdb_queues or not self._has_queue_files()

    def shown_queues(self) -> set[tuple[str, int]]:
        """(topic, queue id) of all consume queues that have a unit, in files or in RocksDB: a broker may write both,
        and light message queues (LMQs) to one only. Requires that no broker runs."""
        directory = self._rocksdb_dir()
        index = self.consume_queues()
        queues = index.shown() if index is not None else set()
        if directory is not None and self._has_queue_files():
            is_rocksdb_read = self.has_rocksdb_queues
            other = self._file_index() if is_rocksdb_read else self._rocksdb_index(directory)
            try:
                queues |= other.shown()
            finally:
                other.close()
        return queues

    @property
    def has_rocksdb_lmqs(self) -> bool:
        """Whether light message queues (LMQs) are in RocksDB, where 5.5 may keep them alone
        (combineCQUseRocksdbForLmq). If the store has no consume queues yet, the configuration decides."""
        if self.conf is not None and self.conf.keeps_lmqs_in_rocksdb:
            return True
        if self._rocksdb_dir() is not None:
            return self.has_rocksdb_queues
        return self.conf is not None and self.conf.reads_rocksdb_queues and not self._has_queue_files()

    def _rocksdb_dir(self) -> Path | None:
        """The directory of the RocksDB with consume queues, if there is one. Brokers of 5.5 may give it a name of its
        own (useSeparateStorePathForRocksdbCQ)."""
        places = (self.path / name for name in ("consumequeue_rocksdb", "consumequeue"))
        return next((place for place in places if is_rocksdb(place)), None)

    def _has_queue_files(self) -> bool:
        directory = self.path / "consumequeue"
        return directory.is_dir() and any(entry.is_dir() for entry in directory.iterdir())

    def liveness(self) -> LivenessReport:
        """Whether a broker runs on the store, with the reason; none does while this process holds the store's lock."""
        if self._is_locked:
            return LivenessReport(
                Liveness.DEAD,
                0,
                False,
                f"this process holds {self.path / LOCK_NAME}, so that no broker can start",
            )
        return ask_liveness(self.path)

    @contextmanager
    def without_broker(self) -> Iterator[None]:
        """Keep any broker from starting on this store inside the block, by holding its lock. Raises UnavailableError
        while one runs."""
        with broker_locked_out(self.path):
            self._is_locked = True
            try:
                yield
            finally:
                self._is_locked = False

    def state(self) -> BrokerState:
        """The broker's tables, as they are now: topics, subscription groups, offsets."""
        return read_broker_state(self.path, is_broker_dead=self.liveness().is_dead)

    def topics(self) -> dict[str, Document]:
        """The topic table alone, as it is now."""
        return read_topics(self.path, is_broker_dead=self.liveness().is_dead)

    def names(self) -> BrokerNames:
        """Names of cluster and broker; empty if unknown."""
        if self.conf is not None and self.conf.cluster and self.conf.broker:
            return BrokerNames(self.conf.cluster, self.conf.broker)
        return find_names(self.conf, self.topics())

    def consume_queues(self) -> ConsumeQueueIndex | None:
        """The consume queues of the store; None if they are in RocksDB and a broker may run, as another process does
        not see what it writes there.

        They are opened once; their ``refresh`` finds new queues. Raises what opening them raises.
        """
        are_invisible = self.has_rocksdb_queues and not self.liveness().is_dead
        with self._lock:
            if are_invisible:
                self._close_index()
                return None
            if self._index is None:
                self._index = self._open_index()
            return self._index

    def close(self) -> None:
        """Release what is open."""
        self._close_index()
        self.commit_log.close()

    def __enter__(self) -> BrokerStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _open_index(self) -> ConsumeQueueIndex:
        directory = self._rocksdb_dir()
        if directory is not None and self.has_rocksdb_queues:
            return self._rocksdb_index(directory)
        return self._file_index()

    def _file_index(self) -> ConsumeQueueIndex:
        return FileConsumeQueues(self.path, lambda: self.commit_log.broker_min_phys)

    def _rocksdb_index(self, directory: Path) -> ConsumeQueueIndex:
        return RocksdbConsumeQueues(directory, lambda: self.commit_log.broker_min_phys)

    def _close_index(self) -> None:
        if self._index is not None:
            self._index.close()
            self._index = None


def open_broker_store(
    path: Path,
    *,
    conf: BrokerConf | None = None,
    commitlog_dirs: Sequence[Path] | None = None,
    pinned: Callable[[], Iterable[LogFile]] | None = None,
) -> BrokerStore:
    """Open the store directory of a broker at ``path`` for reading.

    The commitlog directories are ``commitlog_dirs``, else those of ``conf``, else ``path``/commitlog. ``pinned``
    returns commitlog files that hard links keep although the broker has deleted them.

    Raises StoreLayoutError for DLedger or an unknown layout, MissingBrokerFileError,
    AccessDeniedError.
    """
    names = _list_names(path)
    _refuse_foreign_layout(path, names, conf)
    refuse_unknown_configuration(path)
    dirs = tuple(commitlog_dirs or ()) or _commitlog_dirs(path, conf)
    log = CommitLog(dirs, pinned=pinned)
    _refuse_foreign_log(log)
    return BrokerStore(path, conf, log)


def _list_names(path: Path) -> set[str]:
    try:
        return set(os.listdir(path))
    except NotADirectoryError as error:
        raise StoreLayoutError(f"{path} is a file, not a store directory of a broker") from error
    except OSError as error:
        raise open_failure(path, error) from error


def _refuse_foreign_layout(path: Path, names: set[str], conf: BrokerConf | None) -> None:
    """Raise StoreLayoutError if ``path``, with entries ``names``, is no store directory of a broker, or one of DLedger,
    whose log is not supported."""
    is_dledger = conf is not None and conf.is_dledger
    if is_dledger or any(name.startswith(_DLEDGER_PREFIX) for name in names):
        raise StoreLayoutError(
            f"{path} is a DLedger store, which is not supported",
            hint="use controller mode, or master and slave without DLedger",
        )
    if any(len(name) == NAME_DIGITS and name.isdecimal() for name in names):
        raise StoreLayoutError(
            f"{path} is a commitlog directory, not a store directory",
            hint=f"use the store directory: {path.parent}",
        )


def _commitlog_dirs(path: Path, conf: BrokerConf | None) -> tuple[Path, ...]:
    """The directories of the commitlog: those of broker.conf, else ``commitlog`` in the store at ``path``. Raises an
    error for a missing one, as its disk may not be mounted: the log must not look empty."""
    configured = conf.commitlog_paths if conf is not None else ()
    dirs = tuple(
        _moved(directory, path, conf.store_path if conf is not None else None) for directory in configured
    )
    if not dirs:
        dirs = (path / "commitlog",)
    missing = [directory for directory in dirs if not directory.is_dir()]
    if not missing:
        return dirs
    if configured:
        raise MissingBrokerFileError(
            f"commitlog directory {missing[0]} of broker.conf does not exist",
            hint="mount its disk, or give --broker-conf with a copy of broker.conf that has the right "
            "storePathCommitLog",
        )
    raise StoreLayoutError(
        f"{path} has no commitlog directory",
        hint="mount its disk, or give the broker's storePathRootDir; for a commitlog elsewhere add --broker-conf",
    )


def _moved(directory: Path, path: Path, configured_root: Path | None) -> Path:
    """Where the commitlog directory ``directory`` of broker.conf is now. If it is missing, and is below the configured
    store directory, the store was copied to ``path``: then it is below that."""
    if directory.is_dir() or configured_root is None or not directory.is_relative_to(configured_root):
        return directory
    return path / directory.relative_to(configured_root)


def _refuse_foreign_log(log: CommitLog) -> None:
    """Raise StoreLayoutError if the log's first file has bytes but no record of a commitlog near its beginning. A file
    whose beginning the disk cannot read is skipped, as the next one shows as much. Raises UnreadableError if none of
    the first files is readable."""
    failure = None
    for file in log.files[:_PROBE_FILES_MAX]:
        head = bytearray(min(file.size_bytes, _PROBE_BYTES))
        got, failure = log.read_readable_part(memoryview(head), file.begin_phys)
        if got or failure is None:
            _refuse_foreign_file(file, bytes(head[:got]), is_whole=failure is None)
            return
    if failure is not None:
        raise failure


def _refuse_foreign_file(file: LogFile, head: bytes, *, is_whole: bool) -> None:
    """Raise StoreLayoutError if ``head``, the first bytes of the commitlog file ``file``, shows that it is of DLedger,
    or, if all of the probe was read (``is_whole``), that it has no record of RocketMQ."""
    if int.from_bytes(head[:4], "big") == _DLEDGER_ENTRY_MAGIC:
        raise StoreLayoutError(
            f"{file.path} contains DLedger entries, which are not supported",
            hint="use controller mode, or master and slave without DLedger",
        )
    magics = (magic.to_bytes(4, "big") for magic in (*RECORD_MAGICS, BLANK_MAGIC))
    if is_whole and head.strip(b"\0") and not any(magic in head for magic in magics):
        raise StoreLayoutError(f"{file.path} contains no records of a RocketMQ commitlog")


_BEGIN = struct.Struct(">q")
_FILES_READ = 3
_QUARTER_MS = 900_000
_DELAY_MS_MAX = 60_000
"""An index file is named at most so long after its first message was stored. One that was built again later shows no
time zone."""


@dataclass(frozen=True)
class BrokerZone:
    """A time zone, and where it comes from."""

    zone: timezone
    source: str

    def __str__(self) -> str:
        """``UTC+08:00, by the broker's index files``."""
        return f"{datetime.now(self.zone).tzname()}, {self.source}"


def broker_zone(store: Path) -> BrokerZone:
    """The time zone of the broker of this store, whose hours decide when it deletes files (deleteWhen): as its index
    files show, else this host's. An index file is named after the broker's local time when it was made, which is just
    after the time of the message that begins it (org.apache.rocketmq.store.index.IndexService)."""
    shown = _zone_of_index_files(store / "index")
    if shown is not None:
        return BrokerZone(shown, "by the broker's index files")
    here = timezone(timedelta(seconds=time.localtime().tm_gmtoff))
    return BrokerZone(
        here,
        "the time zone of this host; if the broker's is another, set the environment variable TZ of this process to it",
    )


def _zone_of_index_files(directory: Path) -> timezone | None:
    """The time zone that the names of the newest index files in ``directory`` show; None if there are none, or if they
    differ."""
    with suppress(OSError):
        names = sorted((path.name for path in directory.iterdir() if path.name.isdecimal()), reverse=True)
        offsets = {_offset_ms(directory / name) for name in names[:_FILES_READ]} - {None}
        if len(offsets) == 1:
            return timezone(timedelta(milliseconds=offsets.pop() or 0))
    return None


def _offset_ms(path: Path) -> int | None:
    """The offset from UTC in ms, in whole quarters of an hour, that the broker had when it made the index file
    ``path``: the file's name has its local time, and the file begins with a time in UTC from shortly before. None if
    the two are not that close, as the file was made again later."""
    try:
        local = datetime.strptime(path.name[:14], "%Y%m%d%H%M%S").replace(tzinfo=UTC)
        with path.open("rb") as file:
            (begin_ms,) = _BEGIN.unpack(file.read(_BEGIN.size))
    except (ValueError, struct.error, OSError):
        return None
    difference_ms = int(local.timestamp() * 1000) + int(path.name[14:17] or 0) - begin_ms
    offset_ms = difference_ms // _QUARTER_MS * _QUARTER_MS
    is_near = difference_ms - offset_ms <= _DELAY_MS_MAX
    return offset_ms if begin_ms > 0 and is_near and abs(offset_ms) <= 14 * 4 * _QUARTER_MS else None
