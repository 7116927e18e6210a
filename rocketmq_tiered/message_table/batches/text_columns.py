"""Arrow arrays of text fields: properties, hosts, ids, topics, inner batches.

Kernels copy the bytes of many records at once. Only rare records are handled one by one in Python: text that is not
UTF-8, IPv6 hosts, inner batches.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rocketmq_tiered.message_table.scan.row_chunk import RowChunk
from tiered.formats.fields import INNER_FIELD_TABLE
from tiered.formats.record import (
    SYS_INNER_BATCH,
    SYS_NEED_UNWRAP,
    decode_record,
    decode_text,
    host_text,
    parse_properties,
    record_to_json,
)
from tiered.kernels.record_fields import Number, RecordFields, copied, message_ids, property_pairs

_IPV4_HOST_BYTES = 8
_ARROW_TYPES = {"string": pa.string(), "int64": pa.int64(), "int32": pa.int32(), "hex": pa.string()}
_MAP = pa.map_(pa.string(), pa.string())
_INNER = pa.list_(pa.struct([(item.name, _ARROW_TYPES.get(item.kind, _MAP)) for item in INNER_FIELD_TABLE]))


class RecordText:
    """Properties of located records."""

    def __init__(self, data: NDArray[np.uint8], fields: RecordFields) -> None:
        self._data = data
        self._fields = fields

    def strings(self, at: Number) -> pa.Array:
        """The property located by ``at``; null where a record lacks it."""
        begins, lengths = self._fields[at], self._fields[Number(at + 1)]
        if self._is_text:
            return string_array(*copied(self._data, begins, lengths), valid=lengths > 0)
        found = [
            decode_text(self._bytes(begin, length)) if length else None
            for begin, length in zip(begins.tolist(), lengths.tolist(), strict=True)
        ]
        return pa.array(found, pa.string())

    def maps(self) -> pa.Array:
        """All properties."""
        if not self._is_text:
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
    def _is_text(self) -> bool:
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
    """``address:port``, each distinct host formatted once."""
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
        index = np.array([
            known.setdefault(whole[begin:end], len(known))
            for begin, end in pairwise(bounds)
        ])  # fmt: skip
        names = [host_text(host) for host in known]
    return pa.array(names, pa.string()).take(pa.array(index))


def ids(data: NDArray[np.uint8], fields: RecordFields) -> pa.Array:
    """The broker's message ids."""
    return string_array(*message_ids(data, fields))


def other_topics(chunk: RowChunk, fields: RecordFields) -> pa.Array:
    """The record's topic where it differs from its queue's; else null."""
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
    """Messages of inner batches; null for other records and for batches that do not decode."""
    found: list[Any] = [None] * len(chunk)
    flags = fields[Number.SYS_FLAG]
    for row in np.flatnonzero(flags & (SYS_INNER_BATCH | SYS_NEED_UNWRAP)).tolist():
        begin = int(chunk.starts[row])
        record = decode_record(chunk.data[begin : begin + int(chunk.size[row])].tobytes())
        queue = chunk.queues[int(chunk.queue[row])]
        offset = int(chunk.queue_offset[row])
        document = record_to_json(record, queue=queue, queue_offset=offset)
        if document["inner"] is not None:
            found[row] = [
                item | {"properties": list(item["properties"].items())} for item in document["inner"]
            ]
    return pa.array(found, _INNER)
