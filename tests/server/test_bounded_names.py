"""Clients name groups, members and queues as they like: a server's caches of them are bounded.

Heartbeats of one client against the pulls of another one of the same group.
"""

import asyncio
import contextlib
import gc
import itertools
import sys
import tracemalloc
from typing import Any

import pytest

from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from rocketmq_tiered.server.backend.pull_handlers import SUSPEND, PullService
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog
from rocketmq_tiered.server.groups.queue_locks import LOCK_BYTES, LockTable, MessageQueue
from rocketmq_tiered.server.wire.request import NAME_CHARS_MAX, BadRequestError, Request
from tests.server.serving_peer import RecordingPeer, request
from tests.server.small_archive import Archive, small_service
from tiered.clock import Clock
from tiered.errors import TieredError
from tiered.object_store.memory import MemoryStore
from tiered.remoting.command import RequestCode, ResponseCode

BYTES_MAX = 1 << 18
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
            assert "memory_bytes" in str(error)
            return number
    raise AssertionError(f"{most} were taken")


@pytest.mark.parametrize("what", ["groups", "members", "subscriptions"])
async def test_heartbeats_fill_no_memory(what: str) -> None:
    table = ClientTable(Clock(monotonic_s=lambda: 0.0), bytes_max=BYTES_MAX)
    numbers = itertools.count()
    makers = {
        "groups": (heartbeat("c", f"g{n}", "t") for n in numbers),
        "members": (heartbeat(f"c{n}", "g", "t") for n in numbers),
        "subscriptions": (heartbeat("c", "g", *map(str, range(n)), expression="x" * 1000) for n in numbers),
    }
    assert refused_after(table, makers[what]) > 10
    assert table.held_bytes <= BYTES_MAX
    table.heartbeat(
        heartbeat("c0" if what == "members" else "c", "g0" if what == "groups" else "g", "t", version=9)
    )
    table.closed(PEER)
    assert (table.held_bytes, list(table.groups())) == (0, [])
    table.heartbeat(heartbeat("c", "another", "t"))


@pytest.mark.parametrize(
    "sent",
    [
        heartbeat("c" * (NAME_CHARS_MAX + 1), "g", "t"),
        heartbeat("c", "g" * (NAME_CHARS_MAX + 1), "t"),
        heartbeat("c", "g", "t" * (NAME_CHARS_MAX + 1)),
        request(34, PEER, {"clientID": "c", "consumerDataSet": [7]}),
        request(
            34, PEER, {"clientID": "c", "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": ["t"]}]}
        ),
    ],
)
def test_what_is_no_heartbeat_is_refused_and_leaves_nothing(sent: Any) -> None:
    table = ClientTable(Clock(monotonic_s=lambda: 0.0))
    with pytest.raises(BadRequestError):
        table.heartbeat(sent)
    assert (table.held_bytes, list(table.groups())) == (0, [])


def place(what: str, number: int) -> tuple[str, str, int]:
    """A queue of a group that differs in one respect from others."""
    return {
        "groups": (f"g{number}", "t", 0),
        "topics": ("g", f"t{number}", 0),
        "queues": ("g", "t", number),
    }[what]


@pytest.mark.parametrize("what", ["groups", "topics", "queues"])
async def test_commits_fill_no_memory(what: str) -> None:
    store = MemoryStore()
    offsets = GroupOffsets(
        GroupLog(store, "one", Clock(wall_ms=lambda: 1)), lease_ms=60_000, bytes_max=BYTES_MAX
    )
    await offsets.claim()
    writing = asyncio.create_task(offsets.run())
    await offsets.commit(*place(what, 0), 5)
    for number in range(20_000):  # commits that come with pulls are not acknowledged one by one
        offsets.note(*place(what, number), 7)
    assert offsets.find(*place(what, 19_999)) is None
    with pytest.raises(BadRequestError, match="memory_bytes"):
        await offsets.commit(*place(what, 19_999), 7)
    await offsets.commit(*place(what, 0), 8)
    assert offsets.find(*place(what, 0)) == 8
    writing.cancel()
    await offsets.close()
    again = GroupOffsets(
        GroupLog(store, "two", Clock(wall_ms=lambda: 2)), lease_ms=60_000, bytes_max=BYTES_MAX
    )
    await again.claim()
    with pytest.raises(BadRequestError, match="memory_bytes"):
        await again.commit(*place(what, 19_999), 7)


def test_locks_fill_no_memory_and_end() -> None:
    now_s = 0.0
    lock_bytes = LOCK_BYTES + sum(map(sys.getsizeof, ("g", "c", "b", "t")))
    locks = LockTable(Clock(monotonic_s=lambda: now_s), bytes_max=400 * lock_bytes)
    queues = [MessageQueue("b", "t", number) for number in range(101)]
    assert locks.lock("g", "c", queues[:100]) == queues[:100]
    assert locks.lock("g", "c", queues[:100]) == queues[:100]
    with pytest.raises(BadRequestError, match="100 are locked already"):
        locks.lock("g", "c", queues[100:])
    now_s = 100.0
    assert locks.lock("g", "c", queues[100:]) == queues[100:]
    locks.unlock("g", "c", queues)
    assert locks.held_bytes == 0


LONG = "x" * 300_000
"""A header may have a mebibyte."""


def test_what_pulls_repeat_is_cached_only_where_it_is_short() -> None:
    def traced(count: int) -> int:
        for number in range(count):
            with contextlib.suppress(TieredError):
                asked = request(
                    11, PEER, topic="t", consumerGroup=f"{number}{LONG}", queueId=0, queueOffset=0
                )
                assert service.pull_from_memory(asked) is None
                del asked
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    archive: Any = Archive()
    offsets = GroupOffsets(GroupLog(MemoryStore(), "one", Clock(wall_ms=lambda: 1)), lease_ms=60_000)
    service = PullService(
        archive, RouteTable(archive, "a:1"), ClientTable(Clock(monotonic_s=lambda: 0.0)), offsets
    )
    tracemalloc.start()
    try:
        assert traced(40) - traced(1) < 2 * len(LONG)
    finally:
        tracemalloc.stop()


# -- names that no broker would take --------------------------------------------------------------------------------

ILLEGAL = ["g" * 256, "my.group", "a group", "gruppe-ä", "", "g\n"]


@pytest.mark.parametrize("group", ILLEGAL)
@pytest.mark.parametrize(
    "code",
    [
        RequestCode.PULL_MESSAGE,
        RequestCode.LITE_PULL_MESSAGE,
        RequestCode.UPDATE_CONSUMER_OFFSET,
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET,
        RequestCode.POP_MESSAGE,
        RequestCode.CONSUMER_SEND_MSG_BACK,
        RequestCode.SET_MESSAGE_REQUEST_MODE,
    ],
)
async def test_a_group_that_cannot_be_does_not_exist(code: RequestCode, group: str) -> None:
    archive: Any = Archive()
    groups = dict[str, dict[str, Any]]()
    archive.subscription_groups = lambda: groups
    service = small_service(archive)
    await service.start()
    table = service.table
    fields = {
        "topic": "t",
        "consumerGroup": group,
        "group": group,
        "queueId": 0,
        "queueOffset": 0,
        "offset": 0,
        "commitOffset": 1,
        "timestamp": 0,
        "invisibleTime": 1,
        "delayLevel": 0,
    }
    body = {"topic": "t", "consumerGroup": group, "mode": "POP"}
    handler = table.find(code)
    assert handler is not None
    answer = await handler(request(code, PEER, body, **fields))
    assert answer is not None and answer.code == ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    assert "does not exist" in (answer.remark or "") and len(answer.remark or "") < 400
    groups[group] = {"groupName": group}  # the archived broker had it: its rule was another
    answer = await handler(request(code, PEER, body, **fields))
    assert answer is None or answer.code != ResponseCode.SUBSCRIPTION_GROUP_NOT_EXIST
    await service.close(0.0)


@pytest.mark.parametrize(
    ("group", "is_there"), [("g" * 255, True), ("a%b|c_D-9", True), *((g, False) for g in ILLEGAL)]
)
def test_retry_topics_are_those_of_groups_that_can_be(group: str, is_there: bool) -> None:
    archive: Any = Archive()
    assert (RouteTable(archive, "a:1").route(f"%RETRY%{group}") is not None) is is_there


@pytest.mark.parametrize("what", ["groups", "topics", "queues"])
async def test_neither_a_group_nor_an_account_takes_the_share_of_all(what: str) -> None:
    """Also of one group after a restart: a snapshot has the groups, not the accounts."""

    store = MemoryStore()
    offsets = GroupOffsets(
        GroupLog(store, "one", Clock(wall_ms=lambda: 1)), lease_ms=60_000, bytes_max=BYTES_MAX
    )
    await offsets.claim()
    writing = asyncio.create_task(offsets.run())
    for number in range(20_000):
        offsets.note(*place(what, number), 7, "attacker")
    with pytest.raises(BadRequestError, match="memory_bytes"):
        await offsets.commit(*place(what, 20_001), 7, "attacker")
    await offsets.commit("of others", "t", 0, 8, "owner")
    writing.cancel()
    await offsets.close()
    again = GroupOffsets(
        GroupLog(store, "two", Clock(wall_ms=lambda: 2)), lease_ms=60_000, bytes_max=BYTES_MAX
    )
    await again.claim()
    writing = asyncio.create_task(again.run())
    if what != "groups":
        with pytest.raises(BadRequestError, match="memory_bytes"):
            await again.commit(*place(what, 20_001), 7, "attacker")
    await again.commit("of others", "t", 1, 8, "owner")
    writing.cancel()


@pytest.mark.parametrize("is_one_group", [True, False])
def test_locks_of_one_group_or_account_leave_room_for_others(is_one_group: bool) -> None:
    lock_bytes = LOCK_BYTES + sum(map(sys.getsizeof, ("g10", "c", "b", "t")))
    locks = LockTable(Clock(monotonic_s=lambda: 0.0), bytes_max=40 * lock_bytes)
    queues = [MessageQueue("b", "t", number) for number in range(40)]
    held = 0
    with pytest.raises(BadRequestError, match="no queue is locked"):
        for queue in queues:
            group = "g10" if is_one_group else f"g{queue.queue_id + 10}"
            held += len(locks.lock(group, "c", [queue], "attacker"))
    assert held == (10 if is_one_group else 20)
    assert locks.lock("other", "c", queues[:5], "owner") == queues[:5]
    locks.expire()
    assert locks.lock("other", "c", queues[:9], "owner") == queues[:9]


VICTIM, ATTACKER = RecordingPeer(1), RecordingPeer(2)


def foreign_heartbeat(
    client: str, peer: RecordingPeer, expression: str, version: int, kind: str = "TAG"
) -> Request:
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
async def test_a_pull_has_the_filter_of_its_own_connection_only(kind: str) -> None:
    archive: Any = Recording()
    clients = ClientTable(Clock(monotonic_s=lambda: 0.0))
    offsets = GroupOffsets(GroupLog(MemoryStore(), "one", Clock(wall_ms=lambda: 1)), lease_ms=60_000)
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
    clients.heartbeat(foreign_heartbeat("victim", VICTIM, "a", 5, kind))
    for client in ("other", "victim"):
        clients.heartbeat(foreign_heartbeat(client, ATTACKER, "none", 1 << 40, kind))
    await service.pull(pull)
    assert [(one.expression, one.expression_type) for one in archive.pulls] == [("a", kind)]
    clients.closed(ATTACKER)
    await service.pull(pull)
    assert archive.pulls[1].expression == "a"
