"""A small archive behind the request handlers."""

import asyncio
from collections.abc import Iterable
from typing import Any

from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveService
from rocketmq_tiered.server.backend.backend import Bounds, TopicConfig, Unit
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog
from rocketmq_tiered.server.retries.retry_log import RetryLog
from rocketmq_tiered.server.retries.retry_queue import RetryLimits, RetryQueues
from tests.server.original_record import original
from tiered.clock import Clock
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import ServeSettings


class Archive:
    """One message in each of two queues of t."""

    cluster, broker = "c", "b"

    def topics(self) -> dict[str, TopicConfig]:
        return {"t": TopicConfig("t", 2, 2)}

    def subscription_groups(self) -> dict[str, dict[str, Any]]:
        return {}

    def archived_offset(self, group: str, topic: str, queue_id: int) -> int | None:
        return None

    def archived_topics(self, group: str) -> Iterable[str]:
        return ()

    def archived_groups(self, topic: str) -> Iterable[str]:
        return ()

    def consumed_end(self, topic: str, queue_id: int) -> int:
        return 0

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        return Bounds(0, 1) if topic == "t" and queue_id in (0, 1) else None

    def last_stored_ms(self, topic: str, queue_id: int) -> int:
        return 5

    async def pull(self, wish: PullRequest) -> PullResult:
        if wish.offset:
            return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, 1, 0, 1)
        return PullResult(PullStatus.FOUND, 1, 0, 1, (original(),), 1)

    def pull_from_memory(self, wish: PullRequest) -> PullResult | None:
        return None

    async def offset_by_time(self, topic: str, queue_id: int, store_ms: int, *, upper: bool) -> int:
        return 0

    async def stored_ms(self, topic: str, queue_id: int, offset: int) -> int:
        return 5

    async def units(self, topic: str, queue_id: int, offset: int, count: int) -> list[Unit]:
        return []

    async def message_at_phys(self, phys: int) -> bytes | None:
        return original() if phys == 777 else None

    async def messages_by_key(self, topic: str, key: str, **limits: Any) -> list[bytes]:
        return [original()]

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(min(timeout_s, 0.001))


def small_service(archive: Any = None, settings: ServeSettings | None = None) -> ArchiveService:
    """Archive mode over ``archive``, an ``Archive`` by default, with groups of its own; not started."""
    store = MemoryStore()
    offsets = GroupOffsets(GroupLog(store, "one", Clock(wall_ms=lambda: 1)), lease_ms=60_000)
    retries = RetryQueues(RetryLog(store, "one"), offsets, RetryLimits(), Clock(wall_ms=lambda: 1))
    return ArchiveService(
        archive or Archive(), offsets, retries, settings or ServeSettings(bind="127.0.0.1:0")
    )
