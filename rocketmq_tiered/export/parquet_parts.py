"""Worker task of an export: writes a part as Parquet files, one for each topic and day.

    topic=<topic>/date=<UTC day of storeTimestamp>/<batch>-<part>.parquet

Names follow from the batch and the part, and files appear whole: writing a part again changes nothing.
"""

import hashlib
import os
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import parquet

from rocketmq_tiered.export.export_progress import ExportProgress, PartDone
from rocketmq_tiered.message_table.batches.message_batches import arrow_schema, read_partition
from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.object_rows import CorruptPlace
from tiered.errors import AlreadyExistsError, UnavailableError, UsageError
from tiered.model.dates import DATES_BEGIN_MS, DATES_END_MS
from tiered.object_store.interface import GET_BYTES_MAX, Buffer, ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store

DAY_MS = 86_400_000
EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
FIRST_DAY, LAST_DAY = DATES_BEGIN_MS // DAY_MS, DATES_END_MS // DAY_MS
"""Days since the epoch of the first and last date that Python supports. A damaged store timestamp, which no checksum
covers, may be any number and is clipped to them."""
ROW_GROUP_BYTES = 16 << 20
_ESCAPED = re.compile(r"[^A-Za-z0-9._-]")
"""Characters that are escaped in names of partition directories; Spark and Hive understand any that is."""
DIRECTORY_BYTES_MAX = 255
"""The longest name of a directory in most file systems."""
TRIES = 3
"""A request to write a file is sent at most so many times."""


@dataclass(frozen=True)
class PartTask:
    """Write ``part``, number ``number`` of batch ``batch``, below ``target``."""

    source: SourceOptions
    columns: tuple[str, ...]
    part: Slices
    batch: int
    number: int
    target: str
    store: StoreOptions = field(default_factory=StoreOptions, repr=False)
    is_table: bool = False
    """Files of a table format: below data/, with the columns that Hive's layout has in names of directories."""


def write_part(task: PartTask) -> PartDone:
    """Write the part unless it is done. Raises what reading raises, and UnavailableError if the target fails."""
    with closing(open_store(task.target, task.store)) as store:
        progress = ExportProgress(store)
        done = progress.part(task.batch, task.number)
        if done is not None:
            return replace(done, rows_before=done.rows)
        done = _write(task, store)
        progress.finish_part(task.batch, task.number, done)
    return done


def partition_directory(topic: str, day: int) -> str:
    """The directory of a topic and a UTC day, in days since the epoch. A name that is too long for a directory ends in
    ``%_`` and a hash of the topic: no other topic has it, as ``%`` is escaped."""
    name = "topic=" + _ESCAPED.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode()), topic)
    if len(name) > DIRECTORY_BYTES_MAX:
        ending = f"%_{hashlib.sha256(topic.encode()).hexdigest()[:32]}"
        name = re.sub("%.?$", "", name[: DIRECTORY_BYTES_MAX - len(ending)]) + ending
    return f"{name}/date={date.fromordinal(EPOCH_ORDINAL + day).isoformat()}"


def _write(task: PartTask, store: ObjectStore) -> PartDone:
    """Reads the part and stores one Parquet file for each topic and UTC day. ``rows_before`` of the result: rows in
    files that an earlier attempt of this part has stored."""
    names = tuple(dict.fromkeys((*task.columns, "topic", "storeTimestamp")))
    columns = chosen(names)
    schema = arrow_schema(columns)
    dropped = [name for name in names if (name == "topic" and not task.is_table) or name not in task.columns]
    files: dict[tuple[str, int], _File] = {}
    unreadable: list[str] = []

    def skipped(place: CorruptPlace) -> None:
        unreadable.append(place.message if place.queue is None else f"{place.queue}: {place.message}")

    for batch in read_partition(task.part, task.source, Predicate(), columns, schema, skipped):
        for key, rows in _by_directory(batch):
            files.setdefault(key, _File()).add(rows.drop_columns(dropped))
    size_bytes, rows, rows_before, written = 0, 0, 0, list[str]()
    for (topic, day), file in files.items():
        data = file.finished()
        name = f"{partition_directory(topic, day)}/{task.batch:08d}-{task.number:08d}.parquet"
        written.append(f"data/{name}" if task.is_table else name)
        rows_before += 0 if write_file(store, written[-1], data) else file.rows
        size_bytes, rows = size_bytes + len(data), rows + file.rows
    return PartDone(rows, len(files), size_bytes, unreadable, written, rows_before)


def _by_directory(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, int], pa.RecordBatch]]:
    """((topic, day), its rows), rows in order."""
    if batch.num_rows == 0:
        return
    topic = batch.column("topic").dictionary_encode()
    codes = topic.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    days = np.clip(
        batch.column("storeTimestamp").to_numpy(zero_copy_only=False) // DAY_MS, FIRST_DAY, LAST_DAY
    )
    pairs, which = np.unique(np.stack([codes, days], axis=1), axis=0, return_inverse=True)
    for number, (code, day) in enumerate(pairs.tolist()):
        mine = np.flatnonzero(which.reshape(-1) == number)
        whole = len(mine) == batch.num_rows
        yield (topic.dictionary[code].as_py(), day), batch if whole else batch.take(pa.array(mine))


class _File:
    """A Parquet file in memory, compressed as it grows."""

    def __init__(self) -> None:
        self._buffered: list[pa.RecordBatch] = []
        self._buffered_bytes = 0
        self._writer: Any = None
        self._sink: Any = None
        self.rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Append rows, and compress the buffered ones when they fill a row group."""
        self._buffered.append(batch)
        self._buffered_bytes += batch.nbytes
        self.rows += batch.num_rows
        if self._buffered_bytes >= ROW_GROUP_BYTES:
            self._flush()

    def finished(self) -> memoryview:
        """The bytes of the file."""
        self._flush()
        self._writer.close()
        return memoryview(self._sink.getvalue())

    def _flush(self) -> None:
        """Writes the buffered batches to the file in memory, as row groups compressed with zstd."""
        if not self._buffered:
            return
        table = pa.Table.from_batches(self._buffered)
        if self._writer is None:
            self._sink = pa.BufferOutputStream()
            self._writer = parquet.ParquetWriter(self._sink, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._buffered, self._buffered_bytes = [], 0


def readable_as_umask(options: StoreOptions) -> StoreOptions:
    """``options`` for files that the same users may read as files of other programs, by the umask; never encrypted."""
    umask = os.umask(0o077)
    os.umask(umask)
    readers = "owner" if umask & 0o040 else "group" if umask & 0o004 else "all"
    return replace(options, settings=replace(options.settings, file_readers=readers, key_ring=""))


def write_file(store: ObjectStore, name: str, data: Buffer) -> bool:
    """Stores a file under ``name`` unless an earlier attempt has. Returns whether this call stored it. Raises
    UsageError if another file has the name, and the store's errors."""
    for left in reversed(range(TRIES)):
        try:
            store.put_if_absent(name, [data])
        except AlreadyExistsError:
            break
        except UnavailableError:
            if not left:
                raise
        else:
            return True
    if not _has_same_rows(store.get(name, GET_BYTES_MAX), data):
        raise UsageError(
            f"{store.url}/{name} exists, and has other rows than this export would write",
            hint="export to a target without other files",
        )
    return False


def _has_same_rows(found: Buffer, data: Buffer) -> bool:
    """Whether both are the same Parquet file, perhaps by versions of the library that encode it differently."""
    if found == data:
        return True
    try:
        tables = [parquet.read_table(pa.BufferReader(one)) for one in (found, data)]
    except pa.ArrowInvalid:
        return False
    return bool(tables[0].equals(tables[1]))
