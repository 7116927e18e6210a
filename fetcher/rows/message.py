"""One message read from an archive: the broker's bytes, decoded on access."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from tiered.formats.record import InnerMessage, Record, decode_record, inner_messages, record_to_json
from tiered.model.queue import QueueKey


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
        """The message as `tiered cat --format jsonl` prints it; names are in docs/FORMATS.md."""
        return record_to_json(
            self.record,
            queue=self.queue,
            queue_offset=self.queue_offset,
            is_own_offset=self.is_in_batch_queue,
        )
