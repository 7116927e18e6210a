"""Decompressed bodies of located records, in batches bounded by decompressed size."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rocketmq_tiered.message_table.batches.text_columns import validity
from rocketmq_tiered.message_table.scan.row_chunk import RowChunk
from tiered.errors import CorruptionError
from tiered.formats.record import BODY_BYTES_MAX, SYS_COMPRESSED, decompress_body
from tiered.kernels.record_fields import Number, RecordFields, copy_to


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
        """The bodies; null where decompression failed."""
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
        """Bodies from row ``begin`` on. Records plus decompressed bytes stay within ``batch_bytes``, except for a
        single larger message."""
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
            limit -= length
            end = max(min(end, self._end(limit, begin)), row + 1)
            inflated[row - begin] = body if isinstance(body, bytes) else None
            if isinstance(body, CorruptionError):
                failures.append((row, body.message))
        part = slice(begin, end)
        return Bodies(
            end, self._chunk.data, self._fields[Number.BODY_AT][part], self._fields[Number.BODY_BYTES][part],
            inflated, failures,
        )  # fmt: skip

    def _end(self, limit: int, begin: int) -> int:
        return max(int(np.searchsorted(self._ends, limit, side="right")), begin + 1)

    def _inflate(self, row: int) -> bytes | CorruptionError:
        begin, length = int(self._fields[Number.BODY_AT][row]), int(self._fields[Number.BODY_BYTES][row])
        stored = self._chunk.data[begin : begin + length].tobytes()
        try:
            return decompress_body(
                stored, int(self._fields[Number.SYS_FLAG][row]), BODY_BYTES_MAX, source="body"
            )
        except CorruptionError as error:
            return error
