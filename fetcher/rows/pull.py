"""A pull of one queue: its request, its result and the result's status, for archive, proxy and slave mode alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from fetcher.io.waiting import SlicePace
from fetcher.rows.message import EMPTY_BATCH, MessageBatch
from fetcher.rows.tag_filter import ANY_TAG, MessageFilter
from tiered.object_store.interface import Buffer
from tiered.remoting.command import RemotingCommand


class PullStatus(Enum):
    """How a pull ended (org.apache.rocketmq.store.GetMessageStatus), by offset against [min, max).

    Failures are exceptions (tiered.errors), never a status.
    """

    FOUND = "FOUND"
    """Records from the offset on, or after a recorded gap; the next offset follows the last row examined."""
    NO_MATCHED_MESSAGE = "NO_MATCHED_MESSAGE"
    """Nothing between the offset and the next offset: all filtered out, a recorded gap, or parents expired."""
    NO_MESSAGE_IN_QUEUE = "NO_MESSAGE_IN_QUEUE"
    """The queue is empty and its maximum is 0; the next offset is the requested one."""
    NO_MATCHED_LOGIC_QUEUE = "NO_MATCHED_LOGIC_QUEUE"
    """Unknown queue; the next offset is the requested one."""
    OFFSET_TOO_SMALL = "OFFSET_TOO_SMALL"
    """Below the minimum; the next offset is the minimum."""
    OFFSET_OVERFLOW_ONE = "OFFSET_OVERFLOW_ONE"
    """At the maximum; the next offset is the maximum."""
    OFFSET_OVERFLOW_BADLY = "OFFSET_OVERFLOW_BADLY"
    """Beyond the maximum; the next offset is the maximum."""
    OFFSET_FOUND_NULL = "OFFSET_FOUND_NULL"
    """Proxy and slave mode: neither side has the offset yet; the client retries it."""
    REFUSED = "REFUSED"
    """Proxy and slave mode: the broker's reply is an error, which is relayed. Not one of Java's."""


@dataclass(slots=True)
class PullRequest:
    """At most ``count`` records and ``max_bytes`` from the row that spans ``offset`` on.

    ``group`` names the reader: its position decides what is prefetched, so readers that walk a queue side by side need
    names of their own. ``generation``: None for the newest one of the queue. ``until``: the reader reads every offset
    below it, so prefetch starts at once (scans; consumers are observed instead). ``filter`` and ``pace``: set from a
    client's ``expression`` (of type TAG or SQL92) by the archive that is read; a pull that has used its time ends
    before the next row. ``client``: clients take turns at filtered pulls.
    """

    topic: str
    queue_id: int
    offset: int
    count: int
    max_bytes: int
    group: str = ""
    expression: str = ANY_TAG
    expression_type: str = "TAG"
    filter: MessageFilter | None = None
    generation: int | None = None
    until: int | None = None
    pace: SlicePace | None = None
    client: int = field(default=0, compare=False)

    def at(self, offset: int) -> PullRequest:
        """The same unfiltered pull at another offset."""
        return PullRequest(self.topic, self.queue_id, offset, self.count, self.max_bytes, self.group)


class PullResult(NamedTuple):
    """The result of a pull; all of it from one catalog ``version`` (0: not from the archive).

    [min_offset, max_offset): the queue's offsets, 0 and 0 for an unknown one. ``records`` in ``body``, back to back.
    ``batch``: their columns, unless the result is ``buffers`` alone. ``gap``: offsets [begin, end) passed because no
    record carries them (a recorded gap, expired parents of an LMQ). ``reply``: the broker's own, if it was relayed.
    """

    status: PullStatus
    next_offset: int
    min_offset: int = 0
    max_offset: int = 0
    buffers: Sequence[Buffer] = ()
    records: int = 0
    batch: MessageBatch = EMPTY_BATCH
    gap: tuple[int, int] | None = None
    version: int = 0
    reply: RemotingCommand | None = None

    @property
    def body(self) -> Sequence[Buffer]:
        """Whole records, one after the other, without a copy."""
        return self.buffers or self.batch.buffers()
