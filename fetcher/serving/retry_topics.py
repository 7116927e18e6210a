"""An archive with the retry and dead-letter topics that grow here: what was sent back continues archived queues.

Implements ArchiveSide over another one, so that consumers and tools see one queue. Offsets below those given here are
the archive's.
"""

from __future__ import annotations

import asyncio
from typing import Any

from fetcher.serving.archive_side import (
    ArchiveSide,
    Bounds,
    PullFound,
    PullStatus,
    PullWish,
    TopicConfig,
    Unit,
)
from fetcher.serving.retry_queue import RetryQueues
from fetcher.serving.retry_record import PHYS_BASE
from fetcher.tag_filter import tags_code
from tiered.formats.record import decode_record


class ArchiveWithRetries:
    """See ArchiveSide."""

    def __init__(self, archive: ArchiveSide, retries: RetryQueues) -> None:
        self.cluster, self.broker = archive.cluster, archive.broker
        self._archive, self._retries = archive, retries
        retries.archived_end = self._archived_end

    def _archived_end(self, topic: str) -> int:
        bounds = self._archive.bounds(topic, 0)
        return 0 if bounds is None else bounds.maximum

    def topics(self) -> dict[str, TopicConfig]:
        """See ArchiveSide."""
        archived = self._archive.topics()
        ours = {name: TopicConfig(name, 1, 1) for name in self._retries.topics() if name not in archived}
        return archived | ours if ours else archived

    def subscription_groups(self) -> dict[str, dict[str, Any]]:
        """See ArchiveSide."""
        return self._archive.subscription_groups()

    def archived_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        """See ArchiveSide."""
        return self._archive.archived_offset(group, topic, queue_id)

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        """See ArchiveSide."""
        archived = self._archive.bounds(topic, queue_id)
        queue = self._retries.queue(topic) if queue_id == 0 else None
        if queue is None:
            return archived
        if archived is not None and archived.minimum < min(archived.maximum, queue.first_offset):
            return Bounds(archived.minimum, queue.next_offset)
        return Bounds(queue.min_offset, queue.next_offset)

    def last_stored_ms(self, topic: str, queue_id: int) -> int:
        """See ArchiveSide."""
        queue = self._retries.queue(topic) if queue_id == 0 else None
        message = self._retries.message(queue.numbers[-1]) if queue is not None and queue.numbers else None
        return self._archive.last_stored_ms(topic, queue_id) if message is None else message.stored_ms

    async def pull(self, wish: PullWish) -> PullFound:
        """See ArchiveSide."""
        queue = self._retries.queue(wish.topic) if wish.queue_id == 0 else None
        bounds = self.bounds(wish.topic, wish.queue_id)
        if queue is None or bounds is None:
            return await self._archive.pull(wish)
        if wish.offset >= min(queue.first_offset, self._archived_end(wish.topic)):
            return self._retries.pull(wish, bounds)
        found = await self._archive.pull(wish)
        following = min(found.next_offset, queue.first_offset)
        if found.status in (PullStatus.OFFSET_TOO_SMALL, PullStatus.FOUND, PullStatus.NO_MATCHED_MESSAGE):
            return PullFound(found.status, following, bounds, found.body, found.records)
        return PullFound(PullStatus.NO_MATCHED_MESSAGE, queue.first_offset, bounds)

    async def offset_by_time(self, topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        """See ArchiveSide."""
        queue = self._retries.queue(topic) if queue_id == 0 else None
        if queue is None or self._archive.last_stored_ms(topic, queue_id) >= store_ms:
            return await self._archive.offset_by_time(topic, queue_id, store_ms, upper=upper)
        for message in self._retries.messages_from(topic, 0, len(queue.numbers)):
            if message.stored_ms >= store_ms:
                return message.queue_offset
        return queue.next_offset - 1 if upper and queue.numbers else queue.next_offset

    async def stored_ms(self, topic: str, queue_id: int, offset: int) -> int:
        """See ArchiveSide."""
        queue = self._retries.queue(topic) if queue_id == 0 else None
        if queue is None or offset < queue.first_offset:
            return await self._archive.stored_ms(topic, queue_id, offset)
        found = self._retries.messages_from(topic, offset, 1)
        return found[0].stored_ms if found and found[0].queue_offset == offset else -1

    async def units(self, topic: str, queue_id: int, offset: int, count: int) -> list[Unit]:
        """See ArchiveSide."""
        queue = self._retries.queue(topic) if queue_id == 0 else None
        if queue is None or offset < queue.first_offset:
            return await self._archive.units(topic, queue_id, offset, count)
        found = self._retries.messages_from(topic, offset, count)
        return [
            Unit(PHYS_BASE + m.number, len(m.data), tags_code(decode_record(m.data).tags or ""))
            for m in found
        ]

    async def message_at_phys(self, phys: int) -> bytes | None:
        """See ArchiveSide."""
        if phys >= PHYS_BASE:
            message = self._retries.message(phys - PHYS_BASE)
            return None if message is None else message.data
        return await self._archive.message_at_phys(phys)

    async def messages_by_key(
        self, topic: str, key: str, *, is_unique: bool, count: int, begin_ms: int, end_ms: int
    ) -> list[bytes]:
        """See ArchiveSide. What was sent back is not indexed: the archived message it came from is found."""
        return await self._archive.messages_by_key(
            topic, key, is_unique=is_unique, count=count, begin_ms=begin_ms, end_ms=end_ms
        )

    async def changed(self, timeout_s: float) -> None:
        """See ArchiveSide: also when something sent back is delivered."""
        loop = asyncio.get_running_loop()
        waits = {
            loop.create_task(self._archive.changed(timeout_s)),
            loop.create_task(self._retries.delivered()),
        }
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
