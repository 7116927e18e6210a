"""Heartbeats of one client against the pulls of another one of the same group."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from rocketmq_tiered.server.backend.pull_handlers import SUSPEND, PullService
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog
from rocketmq_tiered.server.wire.request import Request
from tests.server.serving_peer import RecordingPeer, request
from tests.server.small_archive import Archive
from tiered.object_store.memory import MemoryStore
from tiered.remoting.codes import RequestCode

VICTIM, ATTACKER = RecordingPeer(1), RecordingPeer(2)


def heartbeat(client: str, peer: RecordingPeer, expression: str, version: int, kind: str = "TAG") -> Request:
    data = {"topic": "t", "subString": expression, "expressionType": kind, "subVersion": version}
    group = {"groupName": "g", "subscriptionDataSet": [data]}
    return request(RequestCode.HEART_BEAT, peer, {"clientID": client, "consumerDataSet": [group]})


class Recording(Archive):
    """Records the filter of each pull."""

    def __init__(self) -> None:
        self.pulls: list[PullRequest] = []

    async def pull(self, wish: PullRequest) -> PullResult:
        self.pulls.append(wish)
        return PullResult(PullStatus.NO_MATCHED_MESSAGE, 1, 0, 1)


@pytest.mark.parametrize("kind", ["TAG", "SQL92"])
def test_a_pull_has_the_filter_of_its_own_connection_only(kind: str) -> None:
    async def scene() -> None:
        archive: Any = Recording()
        clients = ClientTable(lambda: 0.0)
        offsets = GroupOffsets(GroupLog(MemoryStore(), "one", lambda: 1), lease_ms=60_000)
        service = PullService(archive, RouteTable(archive, "h:1"), clients, offsets)
        pull = request(
            RequestCode.PULL_MESSAGE,
            VICTIM,
            topic="t",
            consumerGroup="g",
            queueId=0,
            queueOffset=0,
            sysFlag=SUSPEND,
            suspendTimeoutMillis=0,
            subVersion=5,
            expressionType=kind,
        )
        clients.heartbeat(heartbeat("victim", VICTIM, "a", 5, kind))
        for client in ("other", "victim"):
            clients.heartbeat(heartbeat(client, ATTACKER, "none", 1 << 40, kind))
        await service.pull(pull)
        assert [(one.expression, one.expression_type) for one in archive.pulls] == [("a", kind)]
        clients.closed(ATTACKER)
        await service.pull(pull)
        assert archive.pulls[1].expression == "a"

    asyncio.run(scene())
