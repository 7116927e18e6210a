"""Queue locks of two servers of one archive: only the owner of the groups grants them."""

from __future__ import annotations

import json
from typing import Any

from rocketmq_tiered.server.archive_mode.archive_service import ArchiveService
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog
from rocketmq_tiered.server.retries.retry_log import RetryLog
from rocketmq_tiered.server.retries.retry_queue import RetryLimits, RetryQueues
from rocketmq_tiered.server.wire.request import Response
from tests.server.group_clock import Time
from tests.server.serving_peer import request
from tests.server.small_archive import Archive
from tiered.clock import Clock
from tiered.object_store.memory import MemoryStore
from tiered.remoting.command import RequestCode, ResponseCode
from tiered.settings.sections import ServeSettings

QUEUE = {"brokerName": "b", "queueId": 0, "topic": "t"}


class Server:
    """A server of the archive in ``store``. ``now_s``: its monotonic clock."""

    def __init__(self, store: MemoryStore, name: str, *, take_over: bool = False) -> None:
        archive: Any = Archive()
        self.now_s = 0.0
        self.offsets = GroupOffsets(
            GroupLog(store, name, Clock(wall_ms=Time())),
            lease_ms=60_000,
            take_over=take_over,
            clock=Clock(monotonic_s=lambda: self.now_s),
        )
        retries = RetryQueues(RetryLog(store, name), self.offsets, RetryLimits(), Clock(wall_ms=lambda: 1))
        self.service = ArchiveService(archive, self.offsets, retries, ServeSettings(bind="127.0.0.1:0"))

    async def __aenter__(self) -> Server:
        await self.service.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.service.close(0.0)

    async def ask(self, code: int, client: str, *others: dict[str, object]) -> Response:
        handler = self.service.table.find(code)
        assert handler is not None
        body = {"consumerGroup": "g", "clientId": client, "mqSet": [QUEUE, *others]}
        answer = await handler(request(code, None, body))
        assert answer is not None
        return answer

    async def lock(self, client: str) -> list[Any] | int:
        """The locked queues, or the code of a refusal."""
        answer = await self.ask(RequestCode.LOCK_BATCH_MQ, client)
        return answer.code or json.loads(answer.body[0])["lockOKMQSet"]


async def test_a_fenced_server_grants_no_lock_and_releases_those_it_granted() -> None:
    store = MemoryStore()
    async with Server(store, "one") as one:
        assert await one.lock("a") == [QUEUE]
        async with Server(store, "two", take_over=True) as two:
            assert await two.lock("b") == [QUEUE]
            await one.offsets._flush()  # as every third of a lease
            assert not one.offsets.is_owner
            for client in ("a", "c"):
                assert await one.lock(client) == ResponseCode.NO_PERMISSION
            assert (await one.ask(RequestCode.UNLOCK_BATCH_MQ, "a")).code == 0


async def test_an_owner_that_releases_the_groups_hands_its_locks_over() -> None:
    """Its clients trust them; another client waits."""

    store = MemoryStore()
    async with Server(store, "one") as one:
        assert await one.lock("a") == [QUEUE]
        await one.service.release_groups()
        assert await one.lock("a") == ResponseCode.NO_PERMISSION
    async with Server(store, "two") as two:
        assert await two.lock("b") == []
        assert await two.lock("a") == [QUEUE]


async def test_an_owner_that_may_not_grant_locks_yet_hands_none_over() -> None:
    store = MemoryStore()
    async with Server(store, "one") as one:
        one.service.locks_from_s = 1e12
    log = GroupLog(store, "two", Clock(wall_ms=Time()))
    log.claim(60_000)
    assert log.locks is None


async def test_queues_that_the_archive_does_not_have_are_not_locked() -> None:
    async with Server(MemoryStore(), "one") as one:
        others = [{**QUEUE, "queueId": 99}, {**QUEUE, "topic": "none"}, {**QUEUE, "brokerName": "x"}]
        answer = await one.ask(RequestCode.LOCK_BATCH_MQ, "a", *others)
        assert json.loads(answer.body[0]) == {"lockOKMQSet": [QUEUE]}
