"""The consume queues of a stopped broker: written again, or compared with its commitlog.

Store timestamps of records in the commitlog, read where the records are, without scanning.
"""

import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.commit_log import CommitLog, LogFile
from tiered.broker_store.conf import integer_property
from tiered.broker_store.config import is_batch_topic
from tiered.broker_store.file_sizes import file_bytes_in
from tiered.broker_store.liveness import LOCK_NAME
from tiered.broker_store.store import BrokerStore
from tiered.consume_queue.file_store import FileSizes
from tiered.consume_queue.index import ConsumeQueueIndex, QueueKind
from tiered.consume_queue.open_store import open_for_writing
from tiered.consume_queue.store import ConsumeQueueStore, LogView, StoreKind, copy_queue
from tiered.errors import TieredError, UnavailableError, UsageError
from tiered.formats.record import RECORD_BYTES_MIN
from tiered.model.queue import LMQ_PREFIX
from tiered.model.tables import Table
from tiered.whole_file import file_error, save_whole, sync_directory
from uploader.queue_units import LogUnits, is_living_topic

_SYS_FLAG_AT: Final = 36
_STORED_AT: Final = 56
_V6_BYTES: Final = 12
_BORN_HOST_V6: Final = 0x10


def log_view(log: CommitLog) -> LogView:
    """What consume queues need of ``log``, whose broker does not run."""
    return LogView(lambda: log.broker_min_phys, lambda phys: store_timestamps(log, phys))


def store_timestamps(log: CommitLog, phys: NDArray[Any]) -> NDArray[np.int64]:
    """The store timestamps, in ms since the epoch, of the records that begin at the physical offsets ``phys``; 0 where
    the log has no bytes. That a record begins there is not checked."""
    wanted = np.asarray(phys, np.int64)
    found = np.zeros(len(wanted), np.int64)
    for file in log.files:
        rows = np.flatnonzero((wanted >= file.begin_phys) & (wanted + _STORED_AT + 24 <= file.end_phys))
        if len(rows):
            found[rows] = _in_file(file, wanted[rows] - file.begin_phys)
    return found


def _in_file(file: LogFile, at: NDArray[np.int64]) -> NDArray[np.int64]:
    """The store timestamps of the records that begin ``at`` bytes from the beginning of ``file``. The field is later
    in a record whose producer (born host) has an IPv6 address, as a flag of the record says."""
    try:
        data = np.memmap(file.path, np.uint8, "r")
    except OSError as error:
        raise file_error(error, file.path) from error
    is_v6 = data[at + _SYS_FLAG_AT + 3] & _BORN_HOST_V6 != 0
    places = (at + _STORED_AT + np.where(is_v6, _V6_BYTES, 0))[:, None] + np.arange(8)
    found: NDArray[np.int64] = np.asarray(data[places]).view(">i8")[:, 0].astype(np.int64)
    return found


WORK_NAME: Final = "consumequeue.new"
FLUSH_INTERVAL_S: Final = 10.0
_PROGRESS_NAME: Final = "progress.json"
_OLD_NAME: Final = "old"
_REPLACED: Final = ("consumequeue", "batchconsumequeue", "consumequeue_ext", "consumequeue_rocksdb")
_UNIT_BYTES: Final = 20
Observe = Callable[[int, int], None]
"""Called with (bytes done, bytes in all)."""


class QueuePlan(NamedTuple):
    """What is written: the queues of ``store`` as ``kind``, with files of ``sizes``."""

    store: BrokerStore
    kind: StoreKind
    sizes: FileSizes


@dataclass
class Written:
    """What was written, and how far: after an interruption the same command continues there.

    ``skipped``: BatchCQ queues, which RocksDB has not. ``damaged``: (begin, end) of the log that is no record.
    ``unknown_ends``: why the ends of queues without a message in the log could not be read from the old queues.
    """

    task: str
    queues: int = 0
    units: int = 0
    skipped: list[str] = field(default_factory=list)
    damaged: list[tuple[int, int]] = field(default_factory=list)
    unknown_ends: str = ""
    phys: int = -1
    after_queue: tuple[str, int] | None = None
    replaces: list[str] | None = None
    """Directories that are complete and replace the store's own."""


def plan_of(store: BrokerStore, kind: StoreKind) -> QueuePlan:
    """How to write the consume queues of ``store`` as ``kind``, files or RocksDB. Files get the sizes that broker.conf
    names or, without one, those of the store's present files; RocketMQ's defaults where there is neither."""
    default = FileSizes()
    if store.conf is None:
        found = (file_bytes_in(store.path / kind.value) for kind in (QueueKind.PLAIN, QueueKind.BATCH))
        sizes = FileSizes(*(size or other for size, other in zip(found, default, strict=True)))
    else:
        names = ("mappedFileSizeConsumeQueue", "mapperFileSizeBatchConsumeQueue")
        properties = store.conf.properties
        sizes = FileSizes(*(integer_property(properties, *item) for item in zip(names, default, strict=True)))
    return QueuePlan(store, kind, sizes)


def build(plan: QueuePlan, observe: Observe) -> Written:
    """Write all queues from the commitlog alone, without those of topics that the topic table does not have."""
    with plan.store.without_broker():
        return _Rewrite(plan, "build", observe).run()


def convert(plan: QueuePlan, observe: Observe) -> Written:
    """Write all queues from the store's own, which are of the other kind."""
    with plan.store.without_broker():
        return _Rewrite(plan, "convert", observe).run()


class _Rewrite:
    def __init__(self, plan: QueuePlan, task: str, observe: Observe) -> None:
        """``task``: "build" writes the queues from the commitlog, "convert" from the queues of the other kind. What an
        interrupted command left is continued only by the same task, for the same kind of store."""
        self._plan, self._store, self._observe = plan, plan.store, observe
        self._is_build = task == "build"
        self._work = plan.store.path / WORK_NAME
        # A broker writes its lock file when it starts: what was written before may be of a log that it truncated.
        started_ns = (plan.store.path / LOCK_NAME).stat().st_mtime_ns
        self._done = self._unfinished(f"{task} {plan.kind.value} {started_ns}")
        self._flushed_s = time.monotonic()
        self._topics = plan.store.topics()
        self._batch_topics = {name for name, topic in self._topics.items() if is_batch_topic(topic)}

    def run(self) -> Written:
        """Write all queues into a directory of their own, then put them in the place of the store's queues. If an
        earlier command was interrupted while it replaced them, only that is repeated. Returns what was written."""
        if self._done.replaces is None:
            log = log_view(self._store.commit_log)
            with closing(
                open_for_writing(
                    self._work, self._plan.kind, log, sizes=self._plan.sizes, batch_topics=self._batch_topics
                )
            ) as target:
                if self._is_build:
                    self._write_from_log(target)
                else:
                    self._write_from_queues(target)
                self._done.queues = len(target.queues())
            self._store.close()
            _give_to_owner(self._work, self._store.path)
            self._done.replaces = [name for name in _REPLACED if (self._work / name).is_dir()]
            self._save()
        _replace(self._store.path, self._work, self._done.replaces)
        return self._done

    def _unfinished(self, task: str) -> Written:
        """The progress of an interrupted command with the same ``task``, to continue there; nothing done if there is
        none. What one with another task left is removed; if it was replacing the store's queues, that is completed
        first."""
        path = self._work / _PROGRESS_NAME
        try:
            done = Written(**json.loads(path.read_bytes()))
        except (FileNotFoundError, NotADirectoryError, ValueError, TypeError):
            _remove(self._work)
            return Written(task)
        except OSError as error:
            raise file_error(error, path) from error
        if done.task != task:
            if done.replaces is not None:
                _replace(self._store.path, self._work, done.replaces)
            _remove(self._work)
            return Written(task)
        done.after_queue = done.after_queue and (done.after_queue[0], done.after_queue[1])  # a list in JSON
        return done

    def _write_from_log(self, target: ConsumeQueueStore) -> None:
        """Write into ``target`` the consume-queue units of all records of the commitlog, whose topics still exist; from
        where an interrupted command had come to, if there was one."""
        begin = self._store.commit_log.broker_min_phys
        ends = {}
        if self._done.phys >= 0:
            begin = self._done.phys
            target.truncate(begin)
            ends = {key[:2]: target.max_offset(*key[:2]) for key in target.queues()}
        log = LogUnits(self._store, self._plan.kind, ends=ends, fills_gap=self._fills_gap)
        total = self._store.commit_log.data_end_phys() - begin
        for part in log.parts(begin):
            for queue in part.queues:
                if self._is_wanted(queue.topic, queue.queue_id):
                    if queue.is_restart:  # its offsets restart, as the topic was deleted and created again
                        target.delete_queue(queue.topic, queue.queue_id)
                    target.put(queue.topic, queue.queue_id, queue.units)
                    self._done.units += len(queue.units)
            self._done.damaged += [(damage.begin_phys, damage.end_phys) for damage in part.damaged]
            self._done.phys = part.to_phys
            self._observe(part.to_phys - begin, max(total, part.to_phys - begin))
            self._flush_sometimes(target)
        self._keep_ends(target)
        target.flush(max(self._done.phys, 0))

    def _write_from_queues(self, target: ConsumeQueueStore) -> None:
        """Copy into ``target`` the units of the store's queues, one queue after the other; after the one to which an
        interrupted command had come, if there was one."""
        source = self._store.consume_queues()
        present = StoreKind.ROCKSDB if self._store.has_rocksdb_queues else StoreKind.FILE
        if source is None:
            raise UsageError(
                f"{self._store.path} has no consume queues to copy",
                hint="to write them from the commitlog, run tiered consumequeue build",
            )
        if present is self._plan.kind:
            raise UsageError(
                f"the consume queues of {self._store.path} are in {self._plan.kind.value} already",
                hint="to write them again all the same, run tiered consumequeue build",
            )
        keys = [(topic, queue_id) for topic, queue_id, *_ in source.queues()]
        left = [key for key in keys if self._done.after_queue is None or key > self._done.after_queue]
        sizes = {key: source.max_offset(*key) - source.min_offset(*key) for key in left}
        done, total = 0, sum(sizes.values()) * _UNIT_BYTES
        for key in left:
            target.delete_queue(*key)
            if self._is_wanted(*key):
                count = copy_queue(key, source, target, 0)
                self._refuse_hole(key, count, sizes[key])
                self._done.units += count
            done += sizes[key] * _UNIT_BYTES
            self._done.after_queue = key
            self._observe(done, total)
            self._flush_sometimes(target)
        target.flush(source.frontier_phys())

    def _refuse_hole(self, key: tuple[str, int], count: int, offsets: int) -> None:
        """Raise UsageError if only ``count`` of a queue's ``offsets`` (a number) have a unit and files are to hold it,
        whose units are one after the other. A light message queue (LMQ) in RocksDB may lack units."""
        if self._plan.kind is not StoreKind.ROCKSDB and count < offsets and key[0] not in self._batch_topics:
            raise UsageError(
                f"consume queue {key[0]}/{key[1]} has no unit at {offsets - count} of its offsets, so that it cannot "
                "be written to files",
                hint="write the queues from the commitlog: tiered consumequeue build",
            )

    def _fills_gap(self, topic: str) -> bool:
        """BatchCQ units say their offsets; an LMQ in RocksDB may have holes."""
        is_lmq_in_rocksdb = self._plan.kind is StoreKind.ROCKSDB and topic.startswith(LMQ_PREFIX)
        return topic not in self._batch_topics and not is_lmq_in_rocksdb

    def _is_wanted(self, topic: str, queue_id: int) -> bool:
        """Whether a queue is written: its topic was not deleted, and it is no queue of batches (BatchCQ) for RocksDB,
        which has none: such a queue is noted as skipped."""
        if self._plan.kind is StoreKind.ROCKSDB and topic in self._batch_topics:
            name = f"{topic}/{queue_id}"
            if name not in self._done.skipped:
                self._done.skipped.append(name)
            return False
        return is_living_topic(topic, self._topics)

    def _keep_ends(self, target: ConsumeQueueStore) -> None:
        """Give each queue that has no messages any more, as they expired, the end that the store's queue has: only that
        one knows at which offset the next message goes."""
        try:
            source = self._store.consume_queues()
            for queue in source.queues() if source is not None else ():
                key = queue.topic, queue.queue_id
                end = source.max_offset(*key) if source is not None else 0
                if end > 0 and target.max_offset(*key) == 0 and self._is_wanted(*key):
                    target.put_empty_queue(*key, end)
        except TieredError as error:
            self._done.unknown_ends = error.message

    def _flush_sometimes(self, target: ConsumeQueueStore) -> None:
        if time.monotonic() - self._flushed_s >= FLUSH_INTERVAL_S:
            target.flush(max(self._done.phys, 0))
            self._save()
            self._flushed_s = time.monotonic()

    def _save(self) -> None:
        save_whole(self._work / _PROGRESS_NAME, json.dumps(asdict(self._done)).encode())


def has_tables_in_rocksdb(store: Path) -> bool:
    """Whether the topic table is in RocksDB only, where a broker with consume queues in files does not look."""
    config = store / "config"
    return config.is_dir() and not (config / "topics.json").exists()


def has_compaction_logs(store: Path) -> bool:
    """Whether a broker compacted topics of the store."""
    return next((store / "compaction" / "compactionLog").glob("*/*/*"), None) is not None


def _replace(store: Path, work: Path, replaces: list[str]) -> None:
    """Put the directories named ``replaces`` from ``work`` in the place of the queue directories of ``store``, which
    are removed. May be repeated after a kill at any point."""
    old = work / _OLD_NAME
    try:
        old.mkdir(exist_ok=True)
        for name in _REPLACED:
            is_moved = name in replaces and not (work / name).exists()
            if not is_moved and (store / name).exists():
                (store / name).rename(old / name)
            if name in replaces and not is_moved:
                (work / name).rename(store / name)
        sync_directory(store)
    except OSError as error:
        raise file_error(error, work) from error
    _remove(old)  # the progress is removed last: it says that nothing is left to do
    _remove(work)


def _remove(directory: Path) -> None:
    try:
        if directory.exists():
            shutil.rmtree(directory)
    except OSError as error:
        raise file_error(error, directory) from error


def _give_to_owner(directory: Path, store: Path) -> None:
    """Make the owner of ``store``, the user of the broker, the owner of all files in ``directory`` if this command runs
    as root."""
    status = store.stat()
    if os.geteuid() != 0 or status.st_uid == 0:
        return
    for folder, names, files in os.walk(directory):
        for name in (".", *names, *files):
            os.chown(os.path.join(folder, name), status.st_uid, status.st_gid)


NAMED_QUEUES: Final = 20
_UNITS: Final = 64 * 1024
_FIELDS: Final = ("phys", "size", "tags_code", "inner_num")


@dataclass
class QueueProblems:
    """``missing``: records without a unit; ``wrong``: units that differ from their records; ``extra``: units without a
    record. ``begin`` and ``end``: offsets of the records."""

    topic: str
    queue_id: int
    begin: int = 0
    end: int = 0
    missing: int = 0
    wrong: int = 0
    extra: int = 0

    @property
    def count(self) -> int:
        """The number of all problems."""
        return self.missing + self.wrong + self.extra


@dataclass
class QueueCheck:
    """``undispatched``: missing units at the log's end, which the broker writes when it starts. ``damaged``: (begin,
    end) of the log that is no record."""

    queues: int = 0
    units: int = 0
    undispatched: int = 0
    problems: list[QueueProblems] = field(default_factory=list)
    damaged: list[tuple[int, int]] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether queues and log agree."""
        return not self.problems and not self.damaged


def check_queues(store: BrokerStore, observe: Callable[[int, int], None]) -> QueueCheck:
    """Compare the consume queues of ``store`` with its commitlog and return what differs. ``observe`` gets the progress
    in bytes. Raises UnavailableError while a broker runs on the store."""
    index = store.consume_queues()
    if index is None or not store.liveness().is_dead:
        raise UnavailableError(
            f"the broker of {store.path} is running",
            hint="stop the broker: its queues change while they are checked",
        )
    return _Check(store, index).run(observe)


class _Check:
    def __init__(self, store: BrokerStore, index: ConsumeQueueIndex) -> None:
        self._store, self._index = store, index
        self._topics = store.topics()
        self._kind = StoreKind.ROCKSDB if store.has_rocksdb_queues else StoreKind.FILE
        self._found: dict[tuple[str, int], QueueProblems] = {}
        self._result = QueueCheck()
        self._frontier = index.frontier_phys()

    def run(self, observe: Callable[[int, int], None]) -> QueueCheck:
        """Read the log once and compare the units of its records with those of the queues, then count units whose
        records the log does not have. ``observe`` gets (bytes done, bytes in all)."""
        log = self._store.commit_log
        begin, total = log.broker_min_phys, log.data_end_phys()
        for part in LogUnits(self._store, self._kind).parts(begin):
            for queue in part.queues:
                if self._is_expected(queue.topic, queue.queue_id):
                    self._compare(queue.topic, queue.queue_id, queue.units, is_restart=queue.is_restart)
            self._result.damaged += [(damage.begin_phys, damage.end_phys) for damage in part.damaged]
            observe(part.to_phys - begin, max(total, part.to_phys) - begin)
        for stored in self._index.queues():
            if not self._is_batch_in_rocksdb(stored.topic):
                self._count_extra(stored.topic, stored.queue_id)
        self._result.queues = len(self._found)
        self._result.problems = [problems for problems in self._found.values() if problems.count]
        return self._result

    def _is_expected(self, topic: str, queue_id: int) -> bool:
        """Records of deleted topics stay in the log."""
        is_known = is_living_topic(topic, self._topics) or self._index.contains(topic, queue_id)
        return is_known and not self._is_batch_in_rocksdb(topic)

    def _is_batch_in_rocksdb(self, topic: str) -> bool:
        """RocksDB has no BatchCQ, but a broker may write units of such records all the same."""
        return self._kind is StoreKind.ROCKSDB and is_batch_topic(self._topics.get(topic))

    def _compare(self, topic: str, queue_id: int, units: Table, *, is_restart: bool) -> None:
        """Compare ``units``, made from records of the log for a range of one queue, with the stored units of that
        range, and count those that are missing, wrong or have no record. Units may be missing for records above the
        physical offset up to which the broker had written its queues (the frontier): it adds them when it starts.
        ``is_restart``: offsets of the queue restart at 0 here, so that what was counted before does not matter."""
        found = self._found.get((topic, queue_id))
        if found is None or is_restart:
            found = QueueProblems(topic, queue_id, begin=int(units["queue_offset"][0]))
            self._found[topic, queue_id] = found
        last = units[-1]
        found.end = int(last["queue_offset"] + last["inner_num"])
        first, offset_count = (
            int(units["queue_offset"][0]),
            int(last["queue_offset"] - units["queue_offset"][0]) + 1,
        )
        stored = self._index.units(topic, queue_id, first, offset_count)
        # A unit of fewer bytes than a record only fills a gap.
        is_of_record = (stored["queue_offset"] <= last["queue_offset"]) & (stored["size"] >= RECORD_BYTES_MIN)
        stored = stored[is_of_record]
        at = np.searchsorted(stored["queue_offset"], units["queue_offset"])
        is_there = at < len(stored)
        is_there[is_there] = stored["queue_offset"][at[is_there]] == units["queue_offset"][is_there]
        pairs = units[is_there], stored[at[is_there]]
        is_wrong = np.logical_or.reduce([pairs[0][name] != pairs[1][name] for name in _FIELDS])
        times = pairs[1]["store_timestamp"]
        is_wrong |= (times != 0) & (times != pairs[0]["store_timestamp"])
        absent = units[~is_there]
        undispatched = int((absent["phys"] >= self._frontier).sum())
        self._result.units += len(pairs[0])
        self._result.undispatched += undispatched
        found.missing += len(absent) - undispatched
        found.wrong += int(is_wrong.sum())
        found.extra += len(stored) - len(pairs[1])

    def _count_extra(self, topic: str, queue_id: int) -> None:
        """Count the stored units of a queue below and above the offsets of its records in the log: they have no record.
        A unit of fewer bytes than a record has only fills a gap and does not count."""
        found = self._found.setdefault((topic, queue_id), QueueProblems(topic, queue_id))
        at = self._index.min_offset(topic, queue_id)
        # First the units before the records' offsets, then those behind them.
        for end in (found.begin, self._index.max_offset(topic, queue_id)):
            while at < end and len(units := self._index.units(topic, queue_id, at, _UNITS)):
                units = units[units["queue_offset"] < end]
                found.extra += int((units["size"] >= RECORD_BYTES_MIN).sum())
                at = int(units["queue_offset"][-1] + units["inner_num"][-1]) if len(units) else end
            at = max(at, found.end)
