"""Arrow record batches from rows: each column of columns.py, from footer columns and the records' bytes.

Batches are bounded by message bytes. ``tiered.formats.record`` is the plain Python form that tests compare with.
"""

from __future__ import annotations

import hashlib
import logging
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rocketmq_tiered.message_table.batches.text_columns import (
    Bodies,
    BodyReader,
    RecordText,
    host_strings,
    ids,
    inner_lists,
    other_topics,
)
from rocketmq_tiered.message_table.options.columns import (
    CHANGE_TYPE,
    CORRUPT_RECORD,
    INNER,
    SPARK_TYPES,
    Column,
    Cost,
    cost_of,
)
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import Mode, SourceOptions, View
from rocketmq_tiered.message_table.plan.archive_plan import archive_store, opened
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.archive_scan import ArchiveScan, archive_chunks
from rocketmq_tiered.message_table.scan.object_rows import CorruptPlace, OnCorrupt, RowChunk
from rocketmq_tiered.message_table.scan.store_scan import LogRange, store_chunks
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.offset_map import entries_of, keep_latest
from tiered.errors import CorruptionError
from tiered.formats.fields import INNER_FIELD_TABLE
from tiered.formats.record import (
    MAGIC_V1,
    SYS_COMPRESSED,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    InnerMessage,
    decode_record,
    encode_properties,
    inner_messages,
    java_hash,
)
from tiered.kernels.record_fields import Number, RecordFields, record_fields, slice_crc32
from tiered.model.dates import DATES_BEGIN_MS, DATES_END_MS


def view_chunks(
    scan: ArchiveScan, part: Slices, view: View, explode: Callable[[RowChunk], RowChunk]
) -> Iterator[RowChunk]:
    """The rows of ``part``, which is of one queue, that ``view`` shows. Raises as ``archive_chunks``, and OSError."""
    if not len(part.table):
        return
    kept = KeptOffsets(int(part.table["begin"].min()), int(part.table["end"].max()))
    chunks = filter(len, map(explode, archive_chunks(scan, part)))
    entries = (entries_of(chunk.data, chunk.starts, chunk.size, chunk.queue_offset) for chunk in chunks)
    keep_latest(kept, entries, with_tombstones=view is View.CHANGES)
    # Damage was reported by the first pass.
    for chunk in map(explode, archive_chunks(replace(scan, on_corrupt=lambda place: None), part)):
        yield chunk.taken(np.flatnonzero(kept.mask(chunk.queue_offset)))


_HEAD = struct.Struct(">IIIiiqqiq")
"""Size, magic, body CRC, queue id, flag, queue offset, physical offset, sysFlag, born time."""
_BATCH = SYS_INNER_BATCH | SYS_NEED_UNWRAP
_COMPRESSION_TYPE = 0x700


def exploded(chunk: RowChunk) -> RowChunk:
    """``chunk`` with a row for each message of its inner batches. A batch that does not decode stays one row."""
    fields = record_fields(chunk.data, chunk.starts, chunk.size, properties=False)
    is_batch = (fields[Number.VALID] == 1) & ((fields[Number.SYS_FLAG] & _BATCH) != 0)
    found: dict[int, list[tuple[int, InnerMessage, bytes]]] = {}
    for row in np.flatnonzero(is_batch).tolist():
        begin = int(chunk.starts[row])
        stored = chunk.data[begin : begin + int(chunk.size[row])].tobytes()
        try:
            items = list(inner_messages(decode_record(stored)))
        except CorruptionError:
            continue
        last = int(chunk.inner_num[row]) - 1
        body = int(fields[Number.BODY_AT][row]) - begin, int(fields[Number.BODY_BYTES][row])
        topic_end = int(fields[Number.TOPIC_AT][row]) - begin + int(fields[Number.TOPIC_BYTES][row])
        found[row] = [
            (offset, item, _record(stored, body, topic_end, offset, item))
            for number, item in enumerate(items)
            for offset in [int(chunk.queue_offset[row]) + min(number, last)]
        ]
    return _with_items(chunk, found) if found else chunk


def _record(stored: bytes, body: tuple[int, int], topic_end: int, offset: int, item: InnerMessage) -> bytes:
    """The message as a stored record."""
    _, magic, _, queue_id, _, _, phys, sys_flag, born = _HEAD.unpack_from(stored)
    names = encode_properties(item.properties).encode()
    rest = b"".join(
        (
            stored[_HEAD.size : body[0] - 4],
            struct.pack(">i", len(item.body)),
            item.body,
            stored[sum(body) : topic_end],
            struct.pack(">H", len(names)),
            names,
        )
    )
    sys_flag &= ~(_BATCH | SYS_COMPRESSED | _COMPRESSION_TYPE)
    crc = zlib.crc32(item.body) & 0x7FFFFFFF
    size = _HEAD.size + len(rest)
    return _HEAD.pack(size, magic, crc, queue_id, item.flag, offset, phys, sys_flag, born) + rest


def _with_items(chunk: RowChunk, found: dict[int, list[tuple[int, InnerMessage, bytes]]]) -> RowChunk:
    """``chunk`` with one row for each message of the batches in ``found``, by row; their records are appended to the
    data."""
    counts = np.ones(len(chunk), np.int64)
    counts[list(found)] = [len(items) for items in found.values()]
    first = np.cumsum(counts) - counts
    wide = chunk.taken(np.repeat(np.arange(len(chunk)), counts))
    columns: dict[str, Any] = {
        name: np.array(getattr(wide, name))
        for name in ("queue_offset", "inner_num", "size", "tags_code", "starts")
    }
    parts, end = [chunk.data], len(chunk.data)
    for row, items in found.items():
        for at, (offset, item, record) in enumerate(items, int(first[row])):
            tags = item.properties.get("TAGS")
            columns["queue_offset"][at], columns["inner_num"][at] = offset, 1
            columns["size"][at], columns["starts"][at] = len(record), end
            columns["tags_code"][at] = java_hash(tags) if tags else 0
            parts.append(np.frombuffer(record, np.uint8))
            end += len(record)
    return replace(wide, data=np.concatenate(parts), **columns)


logger = logging.getLogger(__name__)


def read_partition(
    part: Slices | LogRange,
    options: SourceOptions,
    predicate: Predicate,
    columns: list[Column],
    schema: pa.Schema,
    skipped: Callable[[CorruptPlace], object] = lambda place: None,
) -> Iterator[pa.RecordBatch]:
    """The batches of ``part``. In mode FAILFAST, raises CorruptionError naming object and range; in the other one,
    ``skipped`` gets what was skipped."""
    damage = Damage(options.mode, any(column.name == CORRUPT_RECORD for column in columns), skipped)
    builder = BatchBuilder(columns, schema, batch_bytes=options.batch_bytes, on_corrupt=damage)
    with_records = options.cost_of(columns) > Cost.FOOTER
    for chunk in _chunks(part, options, predicate, damage, with_records=with_records):
        yield from builder.batches(chunk)
        yield from map(builder.corrupt_batch, damage.drained())
    yield from map(builder.corrupt_batch, damage.drained())


def _chunks(
    part: Slices | LogRange,
    options: SourceOptions,
    predicate: Predicate,
    damage: Damage,
    *,
    with_records: bool,
) -> Iterator[RowChunk]:
    """Reads a partition: a range of a store directory's commitlog, or slices of an archive in the view of
    ``options``. ``damage`` gets what cannot be read."""
    explode: Callable[[RowChunk], RowChunk] = exploded if options.explode_batches else lambda chunk: chunk
    if isinstance(part, LogRange):
        yield from map(explode, store_chunks(options, predicate, damage, part))
        return
    with opened(options) as store:
        scan = ArchiveScan(
            archive_store(store, part.archive.cluster, part.archive.broker),
            predicate,
            with_records=with_records,
            window_bytes=options.window_bytes,
            on_corrupt=damage,
            may_have_expired=not options.fail_on_data_loss,
        )
        if options.view is View.MESSAGES:
            yield from map(explode, archive_chunks(scan, part))
        else:
            yield from view_chunks(scan, part, options.view, explode)


class Damage:
    """What happens to damage, by ``mode``: FAILFAST raises CorruptionError, the others skip it, log it and pass it to
    ``skipped``. With ``wants_rows`` it is kept too, as it becomes rows of the table."""

    def __init__(
        self,
        mode: Mode,
        wants_rows: bool,
        skipped: Callable[[CorruptPlace], object] = lambda place: None,
    ) -> None:
        self._mode, self._skipped = mode, skipped
        self._wants_rows = wants_rows
        self._found: list[CorruptPlace] = []

    def __call__(self, place: CorruptPlace) -> None:
        """Handles one damaged place by the mode."""
        if self._mode is Mode.FAILFAST:
            raise CorruptionError(
                place.message, hint="mode=PERMISSIVE (--permissive of commands) skips and reports damage"
            )
        logger.warning("skipped: %s", place.message)
        self._skipped(place)
        if self._wants_rows:
            self._found.append(place)

    def drained(self) -> list[CorruptPlace]:
        """The damage found since the last call."""
        found, self._found = self._found, []
        return found


_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "boolean": pa.bool_(),
    "binary": pa.binary(),
    "timestamp": pa.timestamp("us", "UTC"),
    "map<string,string>": pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False)),
}
_TYPES[INNER] = pa.list_(
    pa.field(
        "element", pa.struct([(item.name, _TYPES[SPARK_TYPES[item.kind]]) for item in INNER_FIELD_TABLE])
    )
)


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """The schema of ``columns``. With _corrupt_record all are nullable, as rows that report damage are mostly null."""
    reports = any(column.name == CORRUPT_RECORD for column in columns)
    return pa.schema(
        [
            pa.field(column.name, _TYPES[column.spark_type], nullable=column.is_nullable or reports)
            for column in columns
        ]
    )


_PROPERTY_COLUMNS = frozenset({"tags", "keys", "uniqKey", "properties"})
_NUMBERS = {
    "bornTimestamp": Number.BORN_TIMESTAMP,
    "sysFlag": Number.SYS_FLAG,
    "flag": Number.FLAG,
    "reconsumeTimes": Number.RECONSUME_TIMES,
    "ptOffset": Number.PT_OFFSET,
    "bodyCRC": Number.BODY_CRC,
}
_TEXTS = {"tags": Number.TAGS_AT, "keys": Number.KEYS_AT, "uniqKey": Number.UNIQ_KEY_AT}


class BatchBuilder:
    """Builds batches of one schema. ``columns`` and ``schema`` have the same order."""

    def __init__(
        self, columns: Sequence[Column], schema: pa.Schema, *, batch_bytes: int, on_corrupt: OnCorrupt
    ) -> None:
        self._columns = columns
        self._schema = schema
        self._batch_bytes = batch_bytes
        self._on_corrupt = on_corrupt
        self._names = {column.name for column in columns}
        self.cost = cost_of(columns)

    def batches(self, chunk: RowChunk) -> Iterator[pa.RecordBatch]:
        """The rows of ``chunk`` in pieces of about ``batch_bytes``, which fit a core's cache."""
        if len(chunk) == 0:
            return
        if self.cost <= Cost.FOOTER:
            yield self._batch(chunk, None, None)
            return
        for begin, end in _pieces(chunk.size, self._batch_bytes):
            yield from self._record_batches(_rows(chunk, begin, end))

    def _record_batches(self, chunk: RowChunk) -> Iterator[pa.RecordBatch]:
        """One batch, or several if decompressed bodies make it too large."""
        fields = record_fields(
            chunk.data, chunk.starts, chunk.size, properties=bool(self._names & _PROPERTY_COLUMNS)
        )
        chunk, fields = self._valid(chunk, fields)
        if self.cost == Cost.RECORD:
            yield self._batch(chunk, fields, None)
            return
        bodies = BodyReader(chunk, fields, self._batch_bytes)
        begin = 0
        while begin < len(chunk):
            piece = bodies.take(begin)
            if piece.failures:
                row, message = piece.failures[0]
                # Such a body is null: its producer may have sent it damaged, and later messages must stay readable.
                logger.warning(
                    "the bodies of %d messages cannot be decompressed, and are null; the first: %s",
                    len(piece.failures),
                    _place(chunk, row, message).message,
                )
            yield self._batch(_rows(chunk, begin, piece.end), _part(fields, begin, piece.end), piece)
            begin = piece.end

    def corrupt_batch(self, place: CorruptPlace) -> pa.RecordBatch:
        """Rows that report damage: one for each message, or for each range of offsets, or one."""
        if place.rows is not None:
            columns = _Columns(place.rows, None, None)
            message = pa.repeat(pa.scalar(place.message), len(place.rows))
            found = [
                message if field.name == CORRUPT_RECORD else columns.footer_column(field)
                for field in self._schema
            ]
            return pa.RecordBatch.from_arrays(found, schema=self._schema)
        base = {"cluster": place.cluster, "brokerName": place.broker, CORRUPT_RECORD: place.message}
        rows: list[dict[str, Any]] = [
            base
            | {"topic": queue.topic, "queueId": queue.queue_id, "queueOffset": begin, "innerNum": end - begin}
            for queue, begin, end in place.ranges
        ] or [base]
        arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _valid(self, chunk: RowChunk, fields: RecordFields) -> tuple[RowChunk, RecordFields]:
        """The rows whose records have consistent lengths and the row's physical offset. Others are reported."""
        good = (fields[Number.VALID] == 1) & (fields[Number.PHYS] == chunk.phys)
        if good.all():
            return chunk, fields
        for row in np.flatnonzero(~good).tolist():
            self._on_corrupt(_place(chunk, row, "the record does not decode or does not match its row"))
        index = np.flatnonzero(good)
        return chunk.taken(index), np.ascontiguousarray(fields[:, index])

    def _batch(self, chunk: RowChunk, fields: RecordFields | None, bodies: Bodies | None) -> pa.RecordBatch:
        columns = _Columns(chunk, fields, bodies)
        arrays = [columns.array(field) for field in self._schema]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)


def _times(stamps: NDArray[Any]) -> pa.Array:
    """ms since the epoch as times. Damaged ones are clipped to those that have a date."""
    return pa.array(np.clip(stamps, DATES_BEGIN_MS, DATES_END_MS) * 1000).view(pa.timestamp("us", "UTC"))


def _texts(bodies: pa.Array) -> pa.Array:
    try:
        return bodies.cast(pa.string())
    except pa.ArrowInvalid:  # not UTF-8
        found = [None if one is None else one.decode("utf-8", "replace") for one in bodies.to_pylist()]
        return pa.array(found, pa.string())


def _place(chunk: RowChunk, row: int, message: str) -> CorruptPlace:
    queue = chunk.queues[int(chunk.queue[row])]
    where = f"{queue.topic} queue {queue.queue_id} offset {int(chunk.queue_offset[row])}"
    one = chunk.taken(slice(row, row + 1))
    return CorruptPlace(chunk.cluster, chunk.broker, f"{chunk.source}: {where}: {message}", rows=one)


def _pieces(sizes: NDArray[Any], piece_bytes: int) -> Iterator[tuple[int, int]]:
    """Rows [begin, end) of about ``piece_bytes`` each."""
    ends = np.cumsum(sizes, dtype=np.int64)
    begin = 0
    while begin < len(sizes):
        before = int(ends[begin - 1]) if begin else 0
        end = max(int(np.searchsorted(ends, before + piece_bytes, side="right")), begin + 1)
        yield begin, end
        begin = end


def _rows(chunk: RowChunk, begin: int, end: int) -> RowChunk:
    return chunk if (begin, end) == (0, len(chunk)) else chunk.taken(slice(begin, end))


def _part(fields: RecordFields, begin: int, end: int) -> RecordFields:
    if (begin, end) == (0, fields.shape[1]):
        return fields
    return np.ascontiguousarray(fields[:, begin:end])


class _Columns:
    """Arrays of one batch by column name. ``fields`` and ``bodies`` are given if a column needs them."""

    def __init__(self, chunk: RowChunk, fields: RecordFields | None, bodies: Bodies | None) -> None:
        self._chunk = chunk
        self._fields = fields
        self._bodies = bodies
        self._text = RecordText(chunk.data, fields) if fields is not None else None

    def array(self, field: pa.Field) -> pa.Array:
        """The column, with the type of the schema."""
        made = self._footer_column(field.name)
        if made is None:
            made = self._record_column(field.name)
        return made if made.type == field.type else made.cast(field.type)

    def footer_column(self, field: pa.Field) -> pa.Array:
        """The column, or nulls if it requires records."""
        made = self._footer_column(field.name)
        return pa.nulls(len(self._chunk), field.type) if made is None else made.cast(field.type)

    def _footer_column(self, name: str) -> pa.Array | None:
        """A column that needs no record: only the footer's columns and the names of queues. None for the other ones."""
        chunk = self._chunk
        numbers: dict[str, NDArray[Any]] = {
            "queueOffset": chunk.queue_offset,
            "commitLogOffset": chunk.phys,
            "storeSize": chunk.size,
            "storeTimestamp": chunk.store_timestamp,
            "tagsCode": chunk.tags_code,
            "innerNum": chunk.inner_num,
        }
        if name in numbers:
            return pa.array(numbers[name])
        if name == "storeTime":
            return _times(chunk.store_timestamp)
        if name in ("cluster", "brokerName"):
            return pa.repeat(pa.scalar(chunk.cluster if name == "cluster" else chunk.broker), len(chunk))
        if name == CORRUPT_RECORD:
            return pa.nulls(len(chunk), pa.string())
        if name == "topic":
            by_queue = pa.array([queue.topic for queue in chunk.queues], pa.string())
        elif name == "queueId":
            by_queue = pa.array([queue.queue_id for queue in chunk.queues], pa.int32())
        elif name == "generation":
            generations = [queue.generation if queue.generation >= 0 else None for queue in chunk.queues]
            by_queue = pa.array(generations, pa.int32())
        else:
            return None
        return by_queue.take(pa.array(chunk.queue))

    def _record_column(self, name: str) -> pa.Array:
        """A column that needs fields of the records; those that need bodies are passed to ``_body_column``."""
        fields, text, chunk = self._fields, self._text, self._chunk
        assert fields is not None and text is not None
        if name in _NUMBERS:
            return pa.array(fields[_NUMBERS[name]])
        if name == "bornTime":
            return _times(fields[Number.BORN_TIMESTAMP])
        if name in _TEXTS:
            return text.strings(_TEXTS[name])
        if name == "properties":
            return text.maps()
        if name in ("bornHost", "storeHost"):
            at = Number.BORN_HOST_AT if name == "bornHost" else Number.STORE_HOST_AT
            return host_strings(chunk.data, fields, at)
        if name == "offsetMsgId":
            return ids(chunk.data, fields)
        if name == "recCrc32":
            return pa.array(slice_crc32(chunk.data, chunk.starts, chunk.size))
        if name == "bodyCrcOk":
            return pa.array(self._crc_is_right(fields))
        if name == CHANGE_TYPE:
            is_value = pa.array(fields[Number.BODY_BYTES] > 0)
            return pa.array(["delete", "upsert"]).take(is_value.cast(pa.int8()))
        if name == "magic":
            is_first = pa.array(fields[Number.MAGIC].astype(np.uint32) == MAGIC_V1)
            return pa.array(["daa320ab", "daa320a7"]).take(is_first.cast(pa.int8()))
        if name in ("recTopic", "recQueueId", "recQueueOffset", "nonConsecutive"):
            return self._own_column(name, fields)
        if name in ("wireBodyLen", "wireBodySha256", "bodyDecompressedByClient"):
            return self._wire_column(name, fields)
        return self._body_column(name)

    def _crc_is_right(self, fields: RecordFields) -> NDArray[np.bool_]:
        """Empty bodies count as right: clients do not check them, and brokers store 0 or another value."""
        lengths = fields[Number.BODY_BYTES]
        found = slice_crc32(self._chunk.data, fields[Number.BODY_AT], lengths) & 0x7FFFFFFF
        right: NDArray[np.bool_] = (found == fields[Number.BODY_CRC]) | (lengths == 0)
        return right

    def _own_column(self, name: str, fields: RecordFields) -> pa.Array:
        """Topic, queue id and queue offset as the record has them, null where they are the row's; or
        ``nonConsecutive``: true for rows of a BatchCQ, else null."""
        chunk = self._chunk
        if name == "recTopic":
            return other_topics(chunk, fields)
        if name == "recQueueId":
            ids_of = np.array([queue.queue_id for queue in chunk.queues])[chunk.queue]
            return pa.array(fields[Number.QUEUE_ID], mask=fields[Number.QUEUE_ID] == ids_of)
        if name == "recQueueOffset":
            same = fields[Number.QUEUE_OFFSET] == chunk.queue_offset
            return pa.array(fields[Number.QUEUE_OFFSET], mask=same)
        return pa.array(np.ones(len(chunk), bool), mask=~chunk.is_batch)

    def _wire_column(self, name: str, fields: RecordFields) -> pa.Array:
        """Columns of the stored form, null unless the body is compressed."""
        plain = (fields[Number.SYS_FLAG] & SYS_COMPRESSED) == 0
        lengths = fields[Number.BODY_BYTES]
        if name == "wireBodyLen":
            return pa.array(lengths, mask=plain)
        if name == "bodyDecompressedByClient":
            return pa.array(np.ones(len(plain), bool), mask=plain)
        data, at = self._chunk.data, fields[Number.BODY_AT]
        sums = [
            None if is_plain else hashlib.sha256(data[begin : begin + length].data).hexdigest()
            for is_plain, begin, length in zip(plain.tolist(), at.tolist(), lengths.tolist(), strict=True)
        ]
        return pa.array(sums, pa.string())

    def _body_column(self, name: str) -> pa.Array:
        """The decompressed bodies, their text, lengths, hashes, or the messages in a batch."""
        bodies = self._bodies
        assert bodies is not None and self._fields is not None
        if name == "body":
            return bodies.array()
        if name == "text":
            return _texts(bodies.array())
        if name == "bodyLen":
            return bodies.lengths()
        if name == "bodySha256":
            sums = [None if one is None else hashlib.sha256(one).hexdigest() for one in bodies.each()]
            return pa.array(sums, pa.string())
        assert name == "inner", name
        return inner_lists(self._chunk, self._fields)
