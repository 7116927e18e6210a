"""Arrow arrays of text fields: properties, hosts, ids, topics, inner batches.

Kernels copy the bytes of many records at once. Only rare records are handled one by one in Python: text that is not
UTF-8, IPv6 hosts, inner batches.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rocketmq_tiered.message_table.scan.object_rows import RowChunk
from tiered.errors import CorruptionError
from tiered.formats.fields import INNER_FIELD_TABLE
from tiered.formats.record import (
    BODY_BYTES_MAX,
    SYS_COMPRESSED,
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    decode_record,
    decode_text,
    decompress_body,
    host_text,
    parse_properties,
    record_to_json,
)
from tiered.kernels.record_fields import Number, RecordFields, copied, copy_to, message_ids, property_pairs


@dataclass(frozen=True)
class Bodies:
    """Bodies of the rows up to ``end``. ``inflated``: decompressed bodies by row of the batch, None where it failed.

    ``failures``: (row of the chunk, error).
    """

    end: int
    data: NDArray[np.uint8]
    at: NDArray[np.int64]
    stored: NDArray[np.int64]
    inflated: dict[int, bytes | None]
    failures: list[tuple[int, str]] = field(default_factory=list)

    def array(self) -> pa.Array:
        """The column of bodies; null where a compressed body could not be decompressed."""
        lengths, valid = self._lengths()
        offsets = np.zeros(len(lengths) + 1, np.int32)
        offsets[1:] = np.cumsum(lengths)
        out = np.empty(int(offsets[-1]), np.uint8)
        plain = self.stored.copy()
        plain[list(self.inflated)] = 0
        copy_to(self.data, self.at, plain, offsets, out)
        for row, body in self.inflated.items():
            if body:
                out[offsets[row] : offsets[row] + len(body)] = np.frombuffer(body, np.uint8)
        return pa.BinaryArray.from_buffers(
            pa.binary(), len(lengths), [validity(valid), pa.py_buffer(offsets), pa.py_buffer(out)]
        )

    def lengths(self) -> pa.Array:
        """Their sizes in bytes; null where decompression failed."""
        lengths, valid = self._lengths()
        return pa.array(lengths, mask=~valid)

    def each(self) -> Iterator[bytes | None]:
        """The bodies one by one."""
        for row, (begin, length) in enumerate(zip(self.at.tolist(), self.stored.tolist(), strict=True)):
            if row in self.inflated:
                yield self.inflated[row]
            else:
                yield self.data[begin : begin + length].tobytes()

    def _lengths(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        lengths, valid = self.stored.copy(), np.ones(len(self.stored), bool)
        for row, body in self.inflated.items():
            lengths[row], valid[row] = len(body or b""), body is not None
        return lengths, valid


class BodyReader:
    """Yields the bodies of a chunk, batch by batch."""

    def __init__(self, chunk: RowChunk, fields: RecordFields, batch_bytes: int) -> None:
        self._chunk = chunk
        self._fields = fields
        self._batch_bytes = batch_bytes
        self._ends = np.cumsum(chunk.size, dtype=np.int64)
        self._compressed = np.flatnonzero(fields[Number.SYS_FLAG] & SYS_COMPRESSED)
        self._ahead: dict[int, bytes | CorruptionError] = {}

    def take(self, begin: int) -> Bodies:
        """The bodies of the rows from ``begin`` on: as many rows as fit into ``batch_bytes``, which counts each record
        and, if its body was compressed, the decompressed body as well; at least one row."""
        before = int(self._ends[begin - 1]) if begin else 0
        limit = before + self._batch_bytes
        first = int(np.searchsorted(self._compressed, begin))
        inflated: dict[int, bytes | None] = {}
        failures: list[tuple[int, str]] = []
        end = self._end(limit, begin)
        for row in self._compressed[first:].tolist():
            if row >= end:
                break
            body = self._ahead.pop(row, None)
            if body is None:
                body = self._inflate(row)
            length = len(body) if isinstance(body, bytes) else 0
            if row > begin and int(self._ends[row]) + length > limit:
                self._ahead[row] = body
                end = row
                break
            limit -= length  # the decompressed body takes this from what is left for records
            end = max(min(end, self._end(limit, begin)), row + 1)
            inflated[row - begin] = body if isinstance(body, bytes) else None
            if isinstance(body, CorruptionError):
                failures.append((row, body.message))
        part = slice(begin, end)
        return Bodies(
            end,
            self._chunk.data,
            self._fields[Number.BODY_AT][part],
            self._fields[Number.BODY_BYTES][part],
            inflated,
            failures,
        )

    def _end(self, limit: int, begin: int) -> int:
        return max(int(np.searchsorted(self._ends, limit, side="right")), begin + 1)

    def _inflate(self, row: int) -> bytes | CorruptionError:
        """The decompressed body of a row, or the error with which decompression ended."""
        begin, length = int(self._fields[Number.BODY_AT][row]), int(self._fields[Number.BODY_BYTES][row])
        stored = self._chunk.data[begin : begin + length].tobytes()
        try:
            return decompress_body(
                stored, int(self._fields[Number.SYS_FLAG][row]), BODY_BYTES_MAX, source="body"
            )
        except CorruptionError as error:
            return error


_IPV4_HOST_BYTES = 8
_ARROW_TYPES = {"string": pa.string(), "int64": pa.int64(), "int32": pa.int32(), "hex": pa.string()}
_MAP = pa.map_(pa.string(), pa.string())
_INNER = pa.list_(pa.struct([(item.name, _ARROW_TYPES.get(item.kind, _MAP)) for item in INNER_FIELD_TABLE]))


class RecordText:
    """Properties of located records."""

    def __init__(self, data: NDArray[np.uint8], fields: RecordFields) -> None:
        self._data = data
        self._fields = fields

    def strings(self, begin_field: Number) -> pa.Array:
        """The column of one property as text, such as the tag. ``begin_field``: the field that says where it begins in
        each record; the next field says how long it is. Null where a record lacks it."""
        begins, lengths = self._fields[begin_field], self._fields[Number(begin_field + 1)]
        if self._is_utf8:
            return string_array(*copied(self._data, begins, lengths), valid=lengths > 0)
        found = [
            decode_text(self._bytes(begin, length)) if length else None
            for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True)
        ]
        return pa.array(found, pa.string())

    def maps(self) -> pa.Array:
        """The column of all properties, as a map from name to value."""
        if not self._is_utf8:
            begins, lengths = self._fields[Number.PROPERTIES_AT], self._fields[Number.PROPERTIES_BYTES]
            parsed = [
                list(parse_properties(self._bytes(begin, length)).items())
                for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True)
            ]
            return pa.array(parsed, _MAP)
        pairs = property_pairs(self._data, self._fields)
        names = string_array(*copied(self._data, pairs.name_at, pairs.name_bytes))
        values = string_array(*copied(self._data, pairs.value_at, pairs.value_bytes))
        return pa.MapArray.from_arrays(pa.array(pairs.starts), names, values)

    @cached_property
    def _is_utf8(self) -> bool:
        """Whether the properties of all records are valid UTF-8, so that all are copied at once."""
        return bool((self._fields[Number.IS_TEXT] == 1).all())

    def _bytes(self, begin: int, length: int) -> bytes:
        return self._data[begin : begin + length].tobytes()


def string_array(
    offsets: NDArray[np.int32], text: NDArray[np.uint8], *, valid: NDArray[np.bool_] | None = None
) -> pa.Array:
    """Strings from UTF-8 bytes, unchecked; null where not ``valid``."""
    return pa.StringArray.from_buffers(
        len(offsets) - 1, pa.py_buffer(offsets), pa.py_buffer(text), validity(valid)
    )


def validity(valid: NDArray[np.bool_] | None) -> pa.Buffer | None:
    """An Arrow validity bitmap; None if all are valid."""
    if valid is None or valid.all():
        return None
    return pa.py_buffer(np.packbits(valid, bitorder="little"))


def host_strings(data: NDArray[np.uint8], fields: RecordFields, at: Number) -> pa.Array:
    """The column of a host (``bornHost`` or ``storeHost``) as ``address:port``; ``at`` is where the records have it.
    Each distinct host is formatted once."""
    begins, lengths = fields[at], fields[Number(at + 1)]
    offsets, stored = copied(data, begins, lengths)
    if (lengths == _IPV4_HOST_BYTES).all():
        words = stored.view("<u8")
        if len(words) and (words == words[0]).all():  # always true of storeHost
            return pa.repeat(pa.scalar(host_text(words[:1].tobytes())), len(words))
        hosts, index = np.unique(words, return_inverse=True)
        names = [host_text(host.tobytes()) for host in hosts]
    else:
        known: dict[bytes, int] = {}
        whole, bounds = stored.tobytes(), offsets.tolist()
        index = np.array([known.setdefault(whole[begin:end], len(known)) for begin, end in pairwise(bounds)])
        names = [host_text(host) for host in known]
    return pa.array(names, pa.string()).take(pa.array(index))


def ids(data: NDArray[np.uint8], fields: RecordFields) -> pa.Array:
    """The broker's message ids."""
    return string_array(*message_ids(data, fields))


def other_topics(chunk: RowChunk, fields: RecordFields) -> pa.Array:
    """The column of topics that differ from the topic of the message's queue, as an LMQ's do; null where they do
    not."""
    known: dict[bytes, str] = {}
    topics = [queue.topic for queue in chunk.queues]
    found: list[str | None] = []
    places = zip(
        chunk.queue.tolist(),
        fields[Number.TOPIC_AT].tolist(),
        fields[Number.TOPIC_BYTES].tolist(),
        strict=True,
    )
    for queue, begin, length in places:
        stored = chunk.data[begin : begin + length].tobytes()
        topic = known.get(stored)
        if topic is None:
            topic = known[stored] = decode_text(stored)
        found.append(None if topic == topics[queue] else topic)
    return pa.array(found, pa.string())


def inner_lists(chunk: RowChunk, fields: RecordFields) -> pa.Array:
    """The column of messages inside batches: a list for a record that is a batch, null for other records and for
    batches that cannot be decoded."""
    found: list[Any] = [None] * len(chunk)
    for row in np.flatnonzero(fields[Number.SYS_FLAG] & (SYS_INNER_BATCH | SYS_NEED_UNWRAP)).tolist():
        begin = int(chunk.starts[row])
        record = decode_record(chunk.data[begin : begin + int(chunk.size[row])].tobytes())
        queue = chunk.queues[int(chunk.queue[row])]
        document = record_to_json(record, queue=queue, queue_offset=int(chunk.queue_offset[row]))
        if document["inner"] is not None:
            found[row] = [
                item | {"properties": list(item["properties"].items())} for item in document["inner"]
            ]
    return pa.array(found, _INNER)
