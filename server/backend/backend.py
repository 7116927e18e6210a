"""What handlers ask of the archive they serve: tables, bounds, messages. The implementation is in served_archive.py.

One catalog version answers bounds and data of one reply.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

Buffer = bytes | bytearray | memoryview
FOUND_BYTES_MAX = 8 * 1024 * 1024
"""Of the messages that a query by key finds, but for a single larger one: an answer must fit into a frame."""


class PullStatus(Enum):
    """What a pull found; the names are RocketMQ's GetMessageStatus."""

    FOUND = "found"
    NO_MATCHED_MESSAGE = "no matched message"
    NO_MATCHED_LOGIC_QUEUE = "no matched logic queue"
    OFFSET_TOO_SMALL = "offset too small"
    OFFSET_OVERFLOW_ONE = "offset overflow one"
    OFFSET_OVERFLOW_BADLY = "offset overflow badly"
    NO_MESSAGE_IN_QUEUE = "no message in queue"


class Bounds(NamedTuple):
    """Queue offsets [minimum, maximum) that the archive holds."""

    minimum: int
    maximum: int


@dataclass(slots=True)
class PullWish:
    """What a pull asks for; never changed. ``expression`` is of ``expression_type`` TAG or SQL92."""

    topic: str
    queue_id: int
    offset: int
    count: int
    max_bytes: int
    group: str
    expression: str = "*"
    expression_type: str = "TAG"


class PullFound(NamedTuple):
    """``body``: whole records one behind the other; ``next_offset``: where to go on."""

    status: PullStatus
    next_offset: int
    bounds: Bounds
    body: Sequence[Buffer] = ()
    records: int = 0


@dataclass(frozen=True)
class Unit:
    """One consume-queue row, for tools."""

    phys: int
    size: int
    tags_code: int


@dataclass(frozen=True)
class TopicConfig:
    """A topic as routes and tools need it. ``perm`` bits: 4 read, 2 write."""

    name: str
    read_queues: int
    write_queues: int
    perm: int = 4
    order: bool = False
    attributes: dict[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """As Java writes it."""
        return {
            "attributes": self.attributes, "order": self.order, "perm": self.perm,
            "readQueueNums": self.read_queues, "topicFilterType": "SINGLE_TAG", "topicName": self.name,
            "topicSysFlag": 0, "writeQueueNums": self.write_queues,
        }  # fmt: skip


class Backend(Protocol):
    """One archive being served. Coroutines run on the server's event loop; they raise tiered.errors."""

    @property
    def cluster(self) -> str:
        """The archived broker's cluster."""
        ...

    @property
    def broker(self) -> str:
        """The archived broker's name."""
        ...

    def topics(self) -> dict[str, TopicConfig]:
        """Every topic that can be read, as of now."""
        ...

    def subscription_groups(self) -> dict[str, dict[str, Any]]:
        """Archived configurations of consumer groups, by name."""
        ...

    def archived_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """What the broker had as the group's offset when it was archived."""
        ...

    def consumed_end(self, topic: str, queue_id: int) -> int:
        """The largest offset that any group had of a queue when its broker was archived, 0 without any."""
        ...

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        """Offsets held of a queue, or None for one that does not exist."""
        ...

    def last_stored_ms(self, topic: str, queue_id: int) -> int:
        """Store time of the newest message of a queue, 0 without any."""
        ...

    async def pull(self, wish: PullWish) -> PullFound:
        """Messages from ``wish.offset`` on. Raises SqlError for an expression that does not parse."""
        ...

    def pull_in_hand(self, wish: PullWish) -> PullFound | None:
        """What ``pull`` would answer if that waits for nothing and is cheap to say; None: ask it."""
        ...

    async def offset_by_time(self, topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        """As the broker's SEARCH_OFFSET_BY_TIMESTAMP."""
        ...

    async def stored_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """Store time of the message at ``offset``, -1 when there is none."""
        ...

    async def units(self, topic: str, queue_id: int, offset: int, count: int) -> list[Unit]:
        """Consume-queue rows from ``offset`` on."""
        ...

    async def message_at_phys(self, phys: int) -> bytes | None:
        """The record whose physical offset is ``phys``."""
        ...

    async def messages_by_key(
        self, topic: str, key: str, *, is_unique: bool, count: int, begin_ms: int, end_ms: int
    ) -> list[bytes]:
        """Records with this key, as QUERY_MESSAGE orders them."""
        ...

    async def changed(self, timeout_s: float) -> None:
        """Returns when the archive grew, or after ``timeout_s``."""
        ...
