"""No request holds the event loop: what takes long is refused, or done in slices between which others are served.

How long an event loop leaves a callback waiting that is due every millisecond.
"""

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

from fetcher.access import open_access
from fetcher.rows.pull import PullRequest, PullStatus
from fetcher.rows.tag_filter import EXPRESSION_CHARS_MAX
from rocketmq_tiered.server.backend.lookup_handlers import LookupHandlers
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.backend.served_archive import ServedArchive
from rocketmq_tiered.server.groups.client_table import (
    HEARTBEAT_GROUPS_MAX,
    NOTICES_MAX,
    PERIOD_S,
    SQL92,
    TAG,
    ClientTable,
    register_client_handlers,
)
from rocketmq_tiered.server.wire.listener import Listener, ServerOptions
from rocketmq_tiered.server.wire.request import HandlerTable
from rocketmq_tiered.server.wire.turns import Slots, Turns
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.server.serving_peer import RecordingPeer, request
from tests.server.small_archive import Archive
from tiered.clock import Clock
from tiered.errors import UsageError
from tiered.object_store.file import FileStore
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode, encode
from tiered.settings.sections import Settings

MESSAGES = 3_000
WORST = " OR ".join(f"p{{0}}{number}>1" for number in range(250))
"""As long as allowed, and each property is looked for."""


@pytest.fixture(scope="module")
def archive_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """MESSAGES messages in one queue."""
    path = tmp_path_factory.mktemp("long")
    store = WrittenStore(path / "store")
    for number in range(MESSAGES):
        store.put("t", 0, b"%d" % number)
    backfill(store.path, FileStore(path / "archive"))
    return path / "archive"


@pytest.fixture
async def archive(archive_path: Path) -> AsyncIterator[ServedArchive]:
    with closing(
        open_access(f"file://{archive_path}", cluster=CLUSTER, broker=BROKER, settings=Settings())
    ) as access:
        archive = ServedArchive(access)
        await archive.load()
        await archive.pull(PullRequest("t", 0, 0, 1, 1 << 20, "g"))
        yield archive


def pull_of(expression: str, kind: str, client: int, offset: int = 0) -> PullRequest:
    return PullRequest("t", 0, offset, 1024, 1 << 22, f"g{client}", expression, kind, client=client)


async def test_the_worst_filters_of_many_clients_leave_the_loop_to_others(archive: ServedArchive) -> None:
    async with gaps() as found:
        results = await asyncio.gather(
            *(archive.pull(pull_of(WORST.format(client), SQL92, client)) for client in range(8))
        )
    for result in results:
        assert result.status is PullStatus.NO_MATCHED_MESSAGE
        assert 0 < result.next_offset <= MESSAGES
    assert found.worst_s < 0.1, found.worst_s  # at once they take a second


async def test_a_pull_whose_filter_takes_long_ends_early_and_continues_where_it_ended(
    archive: ServedArchive,
) -> None:
    matching = WORST.format("a") + " OR UNIQ_KEY IS NULL"
    seen: list[int] = []
    offset, pulls = 0, 0
    while offset < MESSAGES:
        result = await archive.pull(pull_of(matching, SQL92, 1, offset))
        assert result.next_offset > offset
        seen += result.batch.queue_offsets.tolist()
        offset, pulls = result.next_offset, pulls + 1
    assert seen == list(range(MESSAGES))


@pytest.mark.parametrize(
    ("kind", "expression"),
    [(SQL92, " OR ".join(["a>1"] * 10_000)), (TAG, "||".join(str(number) for number in range(500_000)))],
)
async def test_expressions_that_are_too_long_are_refused_unread(
    archive: ServedArchive, kind: str, expression: str
) -> None:
    async with gaps() as found:
        for client in range(20):
            with pytest.raises(UsageError, match=str(EXPRESSION_CHARS_MAX)):
                await archive.pull(pull_of(expression, kind, client))
    assert found.worst_s < 0.1, found.worst_s


def test_a_filter_check_of_an_expression_that_is_too_long_is_refused() -> None:
    lookups = LookupHandlers(Archive(), RouteTable(Archive(), "127.0.0.1:1"))
    for kind, expression in ((TAG, "a||" * 50_000), (SQL92, "a>1 OR " * 10_000)):
        subscription = {"topic": "t", "subString": expression, "expressionType": kind}
        response = asyncio.run(lookups.check_client(request(46, body={"subscriptionData": subscription})))
        assert response.code == ResponseCode.SUBSCRIPTION_PARSE_FAILED


def test_clients_take_turns_at_what_takes_long() -> None:
    async def story() -> list[int]:
        turns, order = Turns(), list[int]()

        async def work(client: int) -> None:
            await asyncio.wrap_future(turns.turn(client))
            order.append(client)

        await asyncio.gather(*(work(client) for client in (1, 1, 1, 1, 2, 3)))
        return order

    assert asyncio.run(story()) == [1, 2, 3, 1, 1, 1]


def heartbeat(parts: bytes) -> bytes:
    return b'{"clientID":"c","consumerDataSet":[' + parts + b"]}"


async def test_heartbeats_of_many_clients_leave_the_loop_to_others() -> None:
    """As many as allowed in one body, from eight connections at once, three on each."""
    clients = ClientTable(Clock())
    table = HandlerTable()
    register_client_handlers(table, clients)
    groups = b",".join(b'{"groupName":"%d"}' % number for number in range(HEARTBEAT_GROUPS_MAX))
    frames = encode(RemotingCommand(RequestCode.HEART_BEAT, 1, body=heartbeat(groups))) * 3

    listener = Listener(table, ServerOptions())
    _, port = await listener.start()

    async def send() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(frames)
        for _ in range(3):
            await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
        writer.close()

    async with gaps() as found:
        await asyncio.gather(*(send() for _ in range(8)))
    await listener.close(drain_s=0)
    assert found.worst_s < 0.2, found.worst_s  # without turns as long as all together


async def test_consumers_that_join_and_leave_cost_a_bounded_number_of_notices() -> None:
    """Every change notified 200 members: 80,000 notices."""

    clients = ClientTable(Clock())
    peers = [RecordingPeer(number) for number in range(200)]
    begun_s = time.monotonic()
    for peer in peers:
        body = {"clientID": f"c{peer.id}", "consumerDataSet": [{"groupName": "g"}]}
        clients.heartbeat(request(RequestCode.HEART_BEAT, peer, body))
    for peer in peers[100:]:
        clients.closed(peer)
    stays = peers[0]
    before = len(stays.pushed)
    await asyncio.sleep(5 * PERIOD_S)
    assert len(stays.pushed) > before
    periods = (time.monotonic() - begun_s) / PERIOD_S + 1
    assert sum(len(peer.pushed) for peer in peers) <= NOTICES_MAX * periods


async def test_a_slot_is_passed_on_also_when_its_task_is_cancelled() -> None:
    slots, held = Slots(1), threading.Semaphore(1)

    async def work(client: int) -> None:
        async with slots.slot(client):
            assert held.acquire(blocking=False)
            try:
                await asyncio.sleep(0.001)
            finally:
                held.release()

    tasks = [asyncio.create_task(work(number % 3)) for number in range(12)]
    await asyncio.sleep(0.002)
    for task in tasks[1::2]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(5):
        await work(9)


EVERY_S = 0.001


class Gaps:
    """CPU seconds of the loop's thread between two ticks: a machine that is busy with others does not count."""

    def __init__(self) -> None:
        self.cpu_s: list[float] = []

    @property
    def worst_s(self) -> float:
        return max(self.cpu_s)


@asynccontextmanager
async def gaps() -> AsyncIterator[Gaps]:
    """Measured while the context lasts."""
    found = Gaps()

    async def tick() -> None:
        last_s = time.thread_time()
        while True:
            await asyncio.sleep(EVERY_S)
            now_s = time.thread_time()
            found.cpu_s.append(now_s - last_s)
            last_s = now_s

    gc.collect()
    gc.disable()  # a full collection of a test run's objects takes longer than what is measured
    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    try:
        yield found
        await asyncio.sleep(0.01)
    finally:
        ticking.cancel()
        gc.enable()
