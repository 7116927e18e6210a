"""Worker task of an export: writes a part as Parquet files, one for each topic and day.

    topic=<topic>/date=<UTC day of storeTimestamp>/<batch>-<part>.parquet

Names follow from the batch and the part, and files appear whole: writing a part again changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from rocketmq_tiered.export.export_progress import ExportProgress, PartDone
from rocketmq_tiered.message_table.batches.message_batches import arrow_schema, read_partition
from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.object_rows import CorruptPlace
from tiered.errors import UnavailableError
from tiered.model.dates import DATES_BEGIN_MS, DATES_END_MS
from tiered.object_store.open_store import open_store, parse_url
from tiered.object_store.store_options import StoreOptions
from tiered.whole_file import replace_whole

if TYPE_CHECKING:
    import pyarrow as pa

DAY_MS = 86_400_000
EPOCH_ORDINAL = date(1970, 1, 1).toordinal()
FIRST_DAY, LAST_DAY = DATES_BEGIN_MS // DAY_MS, DATES_END_MS // DAY_MS
"""Days since the epoch of the first and last date that Python supports. A damaged store timestamp, which no checksum
covers, may be any number and is clipped to them."""
ROW_GROUP_BYTES = 16 << 20
_ESCAPED = re.compile(r"[\x00-\x1f\"#%'*/:=?\\\x7f{\[\]^]")
"""Characters that Spark and Hive escape in names of partition directories."""


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
        if done is None:
            done = _write(task)
            progress.finish_part(task.batch, task.number, done)
    return done


def partition_directory(topic: str, day: int) -> str:
    """The directory of a topic and a UTC day, in days since the epoch."""
    escaped = _ESCAPED.sub(lambda found: f"%{ord(found[0]):02X}", topic)
    return f"topic={escaped}/date={date.fromordinal(EPOCH_ORDINAL + day).isoformat()}"


def _write(task: PartTask) -> PartDone:
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
    size_bytes, rows, written = 0, 0, list[str]()
    for (topic, day), file in files.items():
        data = file.finished()
        name = f"{partition_directory(topic, day)}/{task.batch:08d}-{task.number:08d}.parquet"
        written.append(f"data/{name}" if task.is_table else name)
        _put(task, written[-1], data)
        size_bytes, rows = size_bytes + len(data), rows + file.rows
    return PartDone(rows, len(files), size_bytes, unreadable, written)


def _by_directory(batch: pa.RecordBatch) -> Iterator[tuple[tuple[str, int], pa.RecordBatch]]:
    """((topic, day), its rows), rows in order."""
    import numpy as np
    import pyarrow as pa

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
        import pyarrow as pa
        from pyarrow import parquet

        if not self._buffered:
            return
        table = pa.Table.from_batches(self._buffered)
        if self._writer is None:
            self._sink = pa.BufferOutputStream()
            self._writer = parquet.ParquetWriter(self._sink, table.schema, compression="zstd")
        self._writer.write_table(table)
        self._buffered, self._buffered_bytes = [], 0


def _put(task: PartTask, name: str, data: memoryview) -> None:
    """Make the file durable as a whole. An existing file has the same rows."""
    address = parse_url(task.target)
    try:
        if address.scheme == "file":
            path = str(Path(address.place) / name)
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            replace_whole(Path(path), data)
        else:
            path = "/".join(filter(None, (address.place, address.prefix, name)))
            with _s3(task.store).open_output_stream(path) as stream:
                stream.write(data)
    except OSError as error:
        raise UnavailableError(f"{path} cannot be written: {error.strerror or error}") from error


def _s3(options: StoreOptions) -> Any:
    """Arrow's S3 file system: partition directories have characters that archive keys may not have."""
    from pyarrow import fs

    given = options.credentials
    endpoint = urlsplit(options.settings.endpoint_url)
    return fs.S3FileSystem(
        access_key=given.access_key if given else None,
        secret_key=given.secret_key if given else None,
        session_token=given.session_token if given else None,
        region=options.settings.region or None,
        endpoint_override=endpoint.netloc or None,
        scheme=endpoint.scheme or "https",
        force_virtual_addressing=options.settings.addressing_style == "virtual",
    )
