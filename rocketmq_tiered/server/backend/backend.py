"""The interface between request handlers and the archive they serve. Implemented by served_archive.py.

Bounds and data of one reply come from one catalog version.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from fetcher.rows.pull import PullRequest, PullResult

FOUND_BYTES_MAX = 8 * 1024 * 1024
"""Limit of the messages that a query by key returns, except a single larger one: a reply must fit into a frame."""


class Bounds(NamedTuple):
    """Archived offsets [minimum, maximum) of a queue."""

    minimum: int
    maximum: int


@dataclass(frozen=True)
class Unit:
    """One consume-queue row, for tools."""

    phys: int
    size: int
    tags_code: int


@dataclass(frozen=True)
class TopicConfig:
    """A topic's configuration for routes and tools. ``perm`` bits: 4 read, which an archive always offers; 2 write, as
    at the broker: a client sends nothing to a topic that it may not write, and would report a missing route instead of
    the refusal."""

    name: str
    read_queues: int
    write_queues: int
    perm: int = 6
    order: bool = False
    attributes: dict[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return the JSON object that RocketMQ's class TopicConfig is written as."""
        return {
            "attributes": self.attributes,
            "order": self.order,
            "perm": self.perm,
            "readQueueNums": self.read_queues,
            "topicFilterType": "SINGLE_TAG",
            "topicName": self.name,
            "topicSysFlag": 0,
            "writeQueueNums": self.write_queues,
        }


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
        """All topics of the archive and of the broker's table."""
        ...

    def subscription_groups(self) -> dict[str, dict[str, Any]]:
        """Archived configurations of consumer groups, by name."""
        ...

    def archived_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """The group's offset at the broker when that was archived."""
        ...

    def archived_topics(self, group: str) -> Iterable[str]:
        """Topics with an offset of the group at the broker."""
        ...

    def archived_groups(self, topic: str) -> Iterable[str]:
        """Groups with an offset of the topic at the broker."""
        ...

    def consumed_end(self, topic: str, queue_id: int) -> int:
        """The largest offset of any group in a queue when its broker was archived, 0 without any."""
        ...

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        """Archived offsets of a queue, or None for an unknown one."""
        ...

    def last_stored_ms(self, topic: str, queue_id: int) -> int:
        """Store time of the newest message of a queue, 0 without any."""
        ...

    async def pull(self, request: PullRequest) -> PullResult:
        """Messages from ``request.offset`` on. For an offset beyond the end, but within an earlier generation, the next
        offset is the minimum. Raises SqlError for an expression that does not parse."""
        ...

    def pull_from_memory(self, request: PullRequest) -> PullResult | None:
        """The result of ``pull`` if memory has all of it; None: call ``pull``."""
        ...

    async def offset_by_time(self, topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        """The offset that a broker returns to SEARCH_OFFSET_BY_TIMESTAMP, with ``upper`` as its boundary type."""
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
        """Returns when the archive has grown, or after ``timeout_s``."""
        ...
