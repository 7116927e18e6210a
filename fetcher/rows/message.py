"""Messages read from an archive: batches, which are records as bytes with their columns, without an object per message;
and one message, the broker's bytes, decoded on access.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.formats.record import InnerMessage, Record, decode_record, inner_messages, record_to_json
from tiered.model.queue import QueueKey


class MessageBatch:
    """Rows in ascending order. Record i is ``pieces[piece[i]][starts[i] : starts[i] + sizes[i]]``, verbatim.

    Arrays of one element per row; read-only, they share memory with caches. ``pieces``: uint8 arrays or memoryviews
    (decoded blocks, mapped files). ``inner_num``: queue offsets the row spans. ``store_timestamp``: ms since the epoch.
    ``phys``: offset in the broker's commitlog.
    """

    __slots__ = (
        "inner_num",
        "is_dense",
        "phys",
        "piece",
        "pieces",
        "queue_offsets",
        "sizes",
        "starts",
        "store_timestamp",
        "tags_code",
    )

    def __init__(
        self,
        pieces: Sequence[NDArray[np.uint8] | memoryview],
        piece: NDArray[np.int32],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int32],
        queue_offsets: NDArray[np.int64],
        inner_num: NDArray[np.int32],
        phys: NDArray[np.int64],
        tags_code: NDArray[np.int64],
        store_timestamp: NDArray[np.int64],
        *,
        is_dense: bool = False,
    ) -> None:
        """Keeps the arrays without a copy and without checks."""
        self.pieces = pieces
        self.piece = piece
        self.starts = starts
        self.sizes = sizes
        self.queue_offsets = queue_offsets
        self.inner_num = inner_num
        self.phys = phys
        self.tags_code = tags_code
        self.store_timestamp = store_timestamp
        self.is_dense = is_dense
        """Whether the records lie one behind the other without other bytes between them, from one in the first piece to
        one in the last, so that ``buffers`` needs to look at no other record."""

    def __len__(self) -> int:
        """Rows."""
        return len(self.starts)

    def __repr__(self) -> str:
        if not len(self):
            return "MessageBatch(empty)"
        return f"MessageBatch({len(self)} rows from {int(self.queue_offsets[0])}, {self.record_bytes} bytes)"

    @property
    def record_bytes(self) -> int:
        """Bytes of all records."""
        if self.is_dense:
            return sum(map(len, self.buffers()))
        return int(self.sizes.sum(dtype=np.int64))

    def record(self, row: int) -> memoryview:
        """The record of ``row``, verbatim. Keeps its whole piece in memory."""
        start = int(self.starts[row])
        return _view(self.pieces[int(self.piece[row])])[start : start + int(self.sizes[row])]

    def records(self) -> Iterator[memoryview]:
        """All records, in order."""
        views = [_view(piece) for piece in self.pieces]
        for piece, start, size in zip(
            self.piece.tolist(), self.starts.tolist(), self.sizes.tolist(), strict=True
        ):
            yield views[piece][start : start + size]

    def joined(self) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        """The pieces as one array, and where each record begins in it. Copies if there are several pieces."""
        pieces = [np.asarray(piece) for piece in self.pieces]
        begins = np.cumsum([0, *map(len, pieces[:-1])])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces), self.starts + begins[self.piece]

    def buffers(self) -> list[memoryview]:
        """The bytes of all records in order, as views without a copy, for the body of a reply to a client. Records that
        lie one behind the other share a view."""
        if not len(self):
            return []
        if self.is_dense:
            begin, end = int(self.starts[0]), int(self.starts[-1]) + int(self.sizes[-1])
            views = list(map(_view, self.pieces))
            views[-1] = views[-1][:end]
            views[0] = views[0][begin:]
            return views
        ends = self.starts + self.sizes
        is_new = (self.piece[1:] != self.piece[:-1]) | (self.starts[1:] != ends[:-1])
        first = np.flatnonzero(np.concatenate(([True], is_new)))
        last = np.append(first[1:], len(self)) - 1
        return [
            _view(self.pieces[piece])[start:end]
            for piece, start, end in zip(
                self.piece[first].tolist(), self.starts[first].tolist(), ends[last].tolist(), strict=True
            )
        ]

    def select(self, rows: NDArray[Any] | slice) -> MessageBatch:
        """A batch with only the given rows: ascending indexes, a mask or a slice. Copies columns of numbers, never the
        records' bytes."""
        return MessageBatch(
            self.pieces,
            self.piece[rows],
            self.starts[rows],
            self.sizes[rows],
            self.queue_offsets[rows],
            self.inner_num[rows],
            self.phys[rows],
            self.tags_code[rows],
            self.store_timestamp[rows],
        )


def _view(piece: NDArray[np.uint8] | memoryview) -> memoryview:
    return piece if isinstance(piece, memoryview) else piece.data


def _no(kind: type) -> NDArray[Any]:
    return np.zeros(0, kind)


EMPTY_BATCH = MessageBatch(
    (),
    _no(np.int32),
    _no(np.int64),
    _no(np.int32),
    _no(np.int64),
    _no(np.int32),
    _no(np.int64),
    _no(np.int64),
    _no(np.int64),
)


def joined_batch(batches: Sequence[MessageBatch]) -> MessageBatch:
    """Join several batches into one, in their order. Copies the columns of numbers, never the records' bytes."""
    batches = [batch for batch in batches if len(batch)]
    if len(batches) <= 1:
        return batches[0] if batches else EMPTY_BATCH
    pieces = [piece for batch in batches for piece in batch.pieces]
    shifted = []
    done = 0
    for batch in batches:
        shifted.append(batch.piece + np.int32(done))
        done += len(batch.pieces)
    columns = ("starts", "sizes", "queue_offsets", "inner_num", "phys", "tags_code", "store_timestamp")
    return MessageBatch(
        pieces,
        np.concatenate(shifted),
        *(np.concatenate([getattr(batch, name) for batch in batches]) for name in columns),
    )


class Message:
    """A message at ``queue_offset`` of ``queue``. Its record is decoded by the first property that needs it.

    ``data``: the record verbatim, as the broker stored it. It may share memory with a whole batch: keep ``bytes(data)``
    or decoded parts rather than the message when few of many are kept. ``store_timestamp``: ms since the epoch.
    Properties raise CorruptionError for a record that does not decode.
    """

    def __init__(
        self,
        queue: QueueKey,
        queue_offset: int,
        data: memoryview,
        store_timestamp: int,
        *,
        inner_num: int = 1,
        is_in_batch_queue: bool = False,
    ) -> None:
        self.queue = queue
        self.queue_offset = queue_offset
        self.data = data
        self.store_timestamp = store_timestamp
        self.inner_num = inner_num
        """Queue offsets the message spans: more than one for an inner batch."""
        self.is_in_batch_queue = is_in_batch_queue
        """Whether its queue is one of batches (BatchCQ), whose offsets are the records' own and may jump."""

    def __repr__(self) -> str:
        return f"Message({self.queue.topic!r}, {self.queue.queue_id}, {self.queue_offset}, {len(self.data)} bytes)"

    @cached_property
    def record(self) -> Record:
        """Everything the broker stored, decoded."""
        return decode_record(self.data)

    @property
    def topic(self) -> str:
        """The topic it was read from; an LMQ's is not the record's own."""
        return self.queue.topic

    @property
    def queue_id(self) -> int:
        """The queue it was read from."""
        return self.queue.queue_id

    @cached_property
    def body(self) -> bytes:
        """The body as a Java client hands it out: decompressed. An inner batch has its messages in ``inner``."""
        return self.record.body()

    @property
    def properties(self) -> Mapping[str, str]:
        """User properties and the system's own."""
        return self.record.properties

    @property
    def tags(self) -> str | None:
        """TAGS."""
        return self.record.tags

    @property
    def keys(self) -> Sequence[str]:
        """KEYS, split."""
        return self.record.keys

    @property
    def unique_key(self) -> str | None:
        """The id the producer's client gave it."""
        return self.record.uniq_key

    @property
    def offset_msg_id(self) -> str:
        """The id the broker gave it: its address and physical offset."""
        return self.record.offset_msg_id

    @property
    def born_timestamp(self) -> int:
        """When the producer made it, ms since the epoch."""
        return self.record.born_timestamp

    @property
    def inner(self) -> Sequence[InnerMessage]:
        """Messages of an inner batch, in order; empty for any other."""
        return list(inner_messages(self.record))

    def to_json(self) -> dict[str, Any]:
        """The message as ``tiered cat --format jsonl`` prints it; docs/FORMATS.md describes the names."""
        return record_to_json(
            self.record,
            queue=self.queue,
            queue_offset=self.queue_offset,
            is_own_offset=self.is_in_batch_queue,
        )
