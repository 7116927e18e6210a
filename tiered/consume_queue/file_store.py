"""Writes consume queues in files, plain and BatchCQ, as a broker does.

A file has its whole size at once, or the broker refuses it; what is not written is a hole. A first file that begins
below its first unit starts with fillers (fillPreBlank). Tags codes are written into the units, not into
``consumequeue_ext``, whose bitmaps only save work. Sources: org.apache.rocketmq.store.ConsumeQueue,
BatchConsumeQueue.
"""

import ctypes
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from tiered.consume_queue.file_queue import STORED_DTYPES, FileQueue
from tiered.consume_queue.index import UNIT_DTYPE, BrokerQueue, QueueKind
from tiered.consume_queue.store import ENDED_PHYS, LogView, refuse_disorder
from tiered.consume_queue.unit_files import FILLER_SIZE, OpenFiles, UnitFile
from tiered.errors import UsageError
from tiered.model.tables import Table
from tiered.residency import NAME_DIGITS
from tiered.whole_file import file_error

OPEN_FILES_MAX: Final = 128
SYNCED_FILES_MAX: Final = 256
"""More files than these are synced by one call for the whole file system."""
TRUNCATED_UNITS: Final = 64 * 1024
"""Units that one step of a search from the end of a queue reads."""
_KINDS: Final = (QueueKind.PLAIN, QueueKind.BATCH)
_Key = tuple[str, int]
_libc = ctypes.CDLL(None, use_errno=True)


class FileSizes(NamedTuple):
    """Bytes of a file: mappedFileSizeConsumeQueue and mapperFileSizeBatchConsumeQueue, rounded up to whole units."""

    plain_bytes: int = 6_000_000
    batch_bytes: int = 13_800_000

    def units(self, kind: QueueKind) -> int:
        """Units of a file of ``kind``."""
        unit_bytes = STORED_DTYPES[kind].itemsize
        return -(-(self.batch_bytes if kind is QueueKind.BATCH else self.plain_bytes) // unit_bytes)


class FileQueueStore:
    """ConsumeQueueStore over files of ``store_path``. Topics of ``batch_topics`` are BatchCQ: their units come in
    order. Not thread-safe."""

    def __init__(
        self,
        store_path: Path,
        log: LogView,
        *,
        sizes: FileSizes | None = None,
        batch_topics: Collection[str] = (),
    ) -> None:
        """Continue the queues that are in ``store_path``. ``log``: the commitlog whose records the units refer to;
        ``sizes``: of new files; ``batch_topics``: whose new queues are BatchCQ."""
        self._path = store_path
        self._log = log
        self._sizes = sizes or FileSizes()
        self._batch_topics = frozenset(batch_topics)
        self._open_files = OpenFiles(OPEN_FILES_MAX)
        self._unsynced: set[Path] = set()
        self._queues: dict[_Key, FileQueue] = {}
        for kind in _KINDS:
            for topic in _subdirectories(store_path / kind.value):
                for directory in _subdirectories(topic):
                    if directory.name.isdecimal():
                        self._add(kind, topic.name, int(directory.name))

    def queues(self) -> list[BrokerQueue]:
        return [BrokerQueue(*key, self._queues[key].kind) for key in sorted(self._queues)]

    def min_offset(self, topic: str, queue_id: int) -> int:
        queue = self._queues.get((topic, queue_id))
        return queue.min_offset(self._log.min_phys()) if queue is not None else 0

    def max_offset(self, topic: str, queue_id: int) -> int:
        queue = self._queues.get((topic, queue_id))
        return queue.max_offset() if queue is not None else 0

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        queue = self._queues.get((topic, queue_id))
        if queue is None:
            return np.zeros(0, UNIT_DTYPE)
        return queue.read(queue.index_of(from_offset), count)

    def put(self, topic: str, queue_id: int, units: Table) -> None:
        """Write ``units`` at their queue offsets. Where offsets are missing between them, files of a plain queue get
        holes."""
        if len(units) == 0:
            return
        refuse_disorder(topic, queue_id, units)
        queue = self._queues.get((topic, queue_id)) or self._create(topic, queue_id)
        stored = queue.stored(units)
        if queue.kind is QueueKind.BATCH:
            self._write(queue, queue.files.lower_bound("base_offset", int(units["queue_offset"][0])), stored)
            return
        first, last = units["queue_offset"][[0, -1]].tolist()
        if last - first == len(units) - 1:
            self._write(queue, first, stored)
            return
        behind_holes = np.flatnonzero(np.diff(units["queue_offset"]) != 1) + 1
        for row, run in zip([0, *behind_holes], np.split(stored, behind_holes), strict=True):
            self._write(queue, int(units["queue_offset"][row]), run)

    def put_empty_queue(self, topic: str, queue_id: int, end_offset: int) -> None:
        """Create a queue without messages that ends at ``end_offset``. It has one unit, which refers to no record. A
        filler in its place would not do, as the broker would skip new units behind it."""
        last = np.zeros(1, UNIT_DTYPE)
        last["phys"] = last["size"] = ENDED_PHYS
        last["queue_offset"], last["inner_num"] = end_offset - 1, 1
        self.delete_queue(topic, queue_id)
        self.put(topic, queue_id, last)

    def delete_queue(self, topic: str, queue_id: int) -> None:
        queue = self._queues.pop((topic, queue_id), None)
        if queue is not None:
            queue.files.forget()
            self._remove(Path(queue.files.directory), self._path / "consumequeue_ext" / topic / str(queue_id))

    def truncate(self, phys: int) -> None:
        """Remove the units of all records that begin at or above physical offset ``phys``. A queue that has no others,
        and did not begin at 0, becomes an empty queue whose next message gets the first removed offset."""
        for (topic, queue_id), queue in list(self._queues.items()):
            end = queue.files.end()
            kept = _first_at_or_above(queue, phys)
            if kept == end:
                continue
            first = int(queue.read(kept, 1)["queue_offset"][0])
            if kept > queue.files.first and len(queue.read(kept - 1, 1)):
                self._cut(queue, kept)
            elif first > 0:
                self.put_empty_queue(topic, queue_id, first)
            else:
                self.delete_queue(topic, queue_id)

    def flush(self, dispatched_phys: int) -> None:
        """Make what was written durable. Files do not record ``dispatched_phys``, up to where all records have
        units."""
        del dispatched_phys
        paths = {path for file in self._unsynced for path in (file, *list(file.parents)[:3])}
        if len(self._unsynced) > SYNCED_FILES_MAX:
            with _opened(self._path, os.O_RDONLY) as fd:
                if _libc.syncfs(fd) != 0:
                    raise OSError(ctypes.get_errno(), "syncfs")
        else:
            for path in sorted(paths):
                if path.exists():
                    with _opened(path, os.O_RDONLY) as fd:
                        os.fsync(fd)
        self._unsynced.clear()

    def close(self) -> None:
        self._open_files.close()

    def _add(self, kind: QueueKind, topic: str, queue_id: int) -> FileQueue:
        """Add a queue, and return it. Where files of both kinds exist for it, those with units count."""
        directory, topic_ext = self._path / kind.value / topic, self._path / "consumequeue_ext" / topic
        queue = FileQueue(kind, directory, str(queue_id), topic_ext, self._open_files)
        if (topic, queue_id) not in self._queues or queue.has_places():
            self._queues[topic, queue_id] = queue
        return self._queues[topic, queue_id]

    def _create(self, topic: str, queue_id: int) -> FileQueue:
        """Add a new queue, and return it. Raises UsageError if no directory can have the topic's name."""
        if "/" in topic or topic in ("", ".", ".."):
            raise UsageError(
                f"topic {topic!r} can have no consume queue in files, as no directory can have its name",
                hint="write the consume queues into RocksDB: --to rocksdb",
            )
        return self._add(QueueKind.BATCH if topic in self._batch_topics else QueueKind.PLAIN, topic, queue_id)

    def _write(self, queue: FileQueue, index: int, stored: Table) -> None:
        """Write ``stored`` units of ``queue`` from ``index`` on, into as many files as they extend over."""
        per_file = self._sizes.units(queue.kind)
        while len(stored):
            begin = index // per_file * per_file
            part, stored = stored[: begin + per_file - index], stored[begin + per_file - index :]
            self._write_in_file(queue, begin, index, part)
            index += len(part)

    def _write_in_file(self, queue: FileQueue, begin: int, index: int, units: Table) -> None:
        """Write ``units`` of ``queue`` from ``index`` on into the file whose first unit has the index ``begin``. A new
        file has its whole size, and fillers before the first unit. Raises UsageError if the file has another size."""
        unit_bytes = units.dtype.itemsize
        file_bytes = self._sizes.units(queue.kind) * unit_bytes
        path = Path(queue.files.directory) / f"{begin * unit_bytes:0{NAME_DIGITS}d}"
        with _opened(path, os.O_RDWR | os.O_CREAT) as fd:
            size_bytes = os.fstat(fd).st_size
            if size_bytes not in (0, file_bytes):
                raise UsageError(
                    f"{path} has {size_bytes} bytes, but files of this consume queue have {file_bytes}",
                    hint="give --broker-conf FILE with the file size that the broker uses",
                )
            if size_bytes == 0:
                os.ftruncate(fd, file_bytes)
                fillers = np.zeros(index - begin, units.dtype)
                fillers["size"] = FILLER_SIZE
                os.pwrite(fd, fillers.tobytes(), 0)
            os.pwrite(fd, units.tobytes(), (index - begin) * unit_bytes)
        self._unsynced.add(path)
        if size_bytes == 0:
            queue.files.refresh()

    def _cut(self, queue: FileQueue, index: int) -> None:
        """Remove the units of ``queue`` from ``index`` on. Later files go first, so that an interruption leaves no
        hole."""
        for file in reversed(queue.files.listed):
            if file.first >= index:
                with _errors_of(file.path):
                    file.path.unlink()
            elif index < file.first + file.units:
                self._blank(file, (index - file.first) * STORED_DTYPES[queue.kind].itemsize)
        queue.files.refresh()

    def _blank(self, file: UnitFile, begin_byte: int) -> None:
        """Make everything from ``begin_byte`` on a hole, by cutting the file there and giving it its size again."""
        with _opened(file.path, os.O_RDWR) as fd:
            size_bytes = os.fstat(fd).st_size
            os.ftruncate(fd, begin_byte)
            os.ftruncate(fd, size_bytes)
        self._unsynced.add(file.path)

    def _remove(self, *directories: Path) -> None:
        for directory in directories:
            with _errors_of(directory):
                shutil.rmtree(directory, ignore_errors=not directory.exists())


def _first_at_or_above(queue: FileQueue, phys: int) -> int:
    """The index of the first unit of ``queue`` whose record begins at or above physical offset ``phys``; the queue's
    end if there is none. It searches backward from the end, as these are the last units."""
    end = first = queue.files.end()
    while end > queue.files.first:
        begin = max(queue.files.first, end - TRUNCATED_UNITS)
        stored, indices = queue.files.read(begin, end - begin)
        above = indices[stored["phys"] >= phys]
        if len(above) == 0:  # all units before these have lower physical offsets
            break
        first, end = int(above[0]), begin
    return first


def _subdirectories(directory: Path) -> list[Path]:
    if not directory.is_dir():
        return []
    with _errors_of(directory):
        return sorted(path for path in directory.iterdir() if path.is_dir())


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[int]:
    """Open the file ``path`` inside the block, and yield its descriptor; with O_CREAT in ``flags``, it and its
    directory are made if they are missing. OSError becomes an error of tiered.errors that names the path."""
    with _errors_of(path):
        try:
            fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            path.parent.mkdir(parents=True)
            fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
        try:
            yield fd
        finally:
            os.close(fd)


@contextmanager
def _errors_of(path: Path) -> Iterator[Any]:
    """Turn an OSError of the ``with`` block into an error of tiered.errors that names ``path``."""
    try:
        yield
    except OSError as error:
        raise file_error(error, path) from error
