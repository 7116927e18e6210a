"""Clients name groups, members and queues as they like: what a server remembers of them is bounded."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest

from fetcher.serving.group_offsets import GroupOffsets
from fetcher.serving.group_state import GroupLog
from fetcher.serving.locks import LockTable, MessageQueue
from fetcher.serving.session import ClientTable
from fetcher.serving.wire.codes import RequestCode
from fetcher.serving.wire.request import NAME_CHARS_MAX, BadRequestError
from tests.fetcher.serving.serving_peer import RecordingPeer, request
from tiered.object_store.memory import MemoryStore

BYTES_MAX = 1 << 20
PEER = RecordingPeer()


def heartbeat(client: str, group: str, *topics: str, expression: str = "*", version: int = 1) -> Any:
    data = [
        {"topic": topic, "subString": expression, "expressionType": "TAG", "subVersion": version}
        for topic in topics
    ]
    document = {"clientID": client, "consumerDataSet": [{"groupName": group, "subscriptionDataSet": data}]}
    return request(RequestCode.HEART_BEAT, PEER, document)


def refused_after(table: ClientTable, heartbeats: Any, most: int = 20_000) -> int:
    """How many were taken before one was refused."""
    for number, sent in enumerate(itertools.islice(heartbeats, most)):
        try:
            table.heartbeat(sent)
        except BadRequestError as error:
            assert "session_bytes_max" in str(error)
            return number
    raise AssertionError(f"{most} were taken")


@pytest.mark.parametrize("what", ["groups", "members", "subscriptions"])
def test_heartbeats_fill_no_memory(what: str) -> None:
    table = ClientTable(lambda: 0.0, bytes_max=BYTES_MAX)
    numbers = itertools.count()
    makers = {
        "groups": (heartbeat("c", f"g{n}", "t") for n in numbers),
        "members": (heartbeat(f"c{n}", "g", "t") for n in numbers),
        "subscriptions": (heartbeat("c", "g", *map(str, range(n)), expression="x" * 1000) for n in numbers),
    }
    taken = refused_after(table, makers[what])
    assert taken > 10
    assert table.held_bytes <= BYTES_MAX
    table.heartbeat(
        heartbeat("c0" if what == "members" else "c", "g0" if what == "groups" else "g", "t", version=9)
    )
    table.closed(PEER)
    assert (table.held_bytes, list(table.groups())) == (0, [])
    table.heartbeat(heartbeat("c", "another", "t"))


def test_members_that_come_and_go_cost_nothing() -> None:
    table = ClientTable(lambda: 0.0, bytes_max=BYTES_MAX)
    for number in range(3000):
        table.heartbeat(heartbeat(f"c{number}", f"g{number}", "t", expression="y" * 500))
        table.heartbeat(heartbeat(f"c{number}", f"g{number}", "t", "u", version=2))
        table.leave(f"c{number}", f"g{number}", PEER)
    assert table.held_bytes == 0


@pytest.mark.parametrize("sent", [
    heartbeat("c" * (NAME_CHARS_MAX + 1), "g", "t"), heartbeat("c", "g" * (NAME_CHARS_MAX + 1), "t"),
    heartbeat("c", "g", "t" * (NAME_CHARS_MAX + 1)), request(34, PEER, {"clientID": "c", "consumerDataSet": [7]}),
    request(34, PEER, {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": ["t"]}]}),
])  # fmt: skip
def test_what_is_no_heartbeat_is_refused_and_leaves_nothing(sent: Any) -> None:
    table = ClientTable(lambda: 0.0)
    with pytest.raises(BadRequestError):
        table.heartbeat(sent)
    assert (table.held_bytes, list(table.groups())) == (0, [])


def place(what: str, number: int) -> tuple[str, str, int]:
    """A queue of a group that differs in one respect from others."""
    return {
        "groups": (f"g{number}", "t", 0), "topics": ("g", f"t{number}", 0), "queues": ("g", "t", number),
    }[what]  # fmt: skip


@pytest.mark.parametrize("what", ["groups", "topics", "queues"])
def test_commits_fill_no_memory(what: str) -> None:
    async def run() -> None:
        store = MemoryStore()
        offsets = GroupOffsets(GroupLog(store, "one", lambda: 1), lease_ms=60_000, bytes_max=BYTES_MAX)
        await offsets.claim()
        writing = asyncio.create_task(offsets.run())
        await offsets.commit(*place(what, 0), 5)
        for number in range(20_000):  # commits that come with pulls are not acknowledged one by one
            offsets.note(*place(what, number), 7)
        assert offsets.find(*place(what, 19_999)) is None
        with pytest.raises(BadRequestError, match="offsets_bytes_max"):
            await offsets.commit(*place(what, 19_999), 7)
        await offsets.commit(*place(what, 0), 8)
        assert offsets.find(*place(what, 0)) == 8
        writing.cancel()
        await offsets.close()
        again = GroupOffsets(GroupLog(store, "two", lambda: 2), lease_ms=60_000, bytes_max=BYTES_MAX)
        await again.claim()
        with pytest.raises(BadRequestError, match="offsets_bytes_max"):
            await again.commit(*place(what, 19_999), 7)

    asyncio.run(run())


def test_locks_fill_no_memory_and_end() -> None:
    now_s = 0.0
    locks = LockTable(lambda: now_s, locks_max=100)
    queues = [MessageQueue("b", "t", number) for number in range(101)]
    assert locks.lock("g", "c", queues[:100]) == queues[:100]
    assert locks.lock("g", "c", queues[:100]) == queues[:100]
    with pytest.raises(BadRequestError, match="at most 100"):
        locks.lock("g", "c", queues[100:])
    now_s = 100.0
    assert locks.lock("other", "c", queues[100:]) == queues[100:]
