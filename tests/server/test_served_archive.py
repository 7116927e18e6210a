"""What is served of an archive whose topics were deleted, recreated, or numbered again."""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fetcher.access import open_access
from fetcher.io.waiting import Wait, new_future
from fetcher.policy.read_router import ArchivedQueues
from fetcher.rows.pull import PullRequest, PullStatus
from rocketmq_tiered.server.backend.backend import FOUND_BYTES_MAX, Bounds, TopicConfig
from rocketmq_tiered.server.backend.offset_handlers import OffsetHandlers
from rocketmq_tiered.server.backend.pull_handlers import COMMIT_OFFSET, SUSPEND, PullService
from rocketmq_tiered.server.backend.route_handlers import RouteTable, runtime_table
from rocketmq_tiered.server.backend.served_archive import QUERIES_MAX, ServedArchive
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog
from rocketmq_tiered.server.wire.request import Response
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.server.serving_peer import request
from tiered.broker_store.store import open_broker_store
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import AccessDeniedError, UnavailableError
from tiered.object_store.file import FileStore
from tiered.object_store.memory import MemoryStore
from tiered.remoting.command import FRAME_BYTES_MAX, RequestCode, ResponseCode
from tiered.settings.sections import Settings
from uploader.bound_source import no_offsets
from uploader.log_rule import LogLimits
from uploader.offload import Offloader, OffloadIdentity


def store_with(path: Path, queues: dict[int, int], word: bytes) -> Path:
    """A broker's store with so many messages of topic ``t`` by queue."""
    store = WrittenStore(path)
    for queue_id, count in queues.items():
        for number in range(count):
            store.put("t", queue_id, b"%s %d" % (word, number))
    return store.path


def on_another_disk(store: Path, root: FileStore) -> None:
    """What the sidecar does beside a broker that came back with nothing of what is archived."""
    with open_broker_store(store) as opened:
        identity = OffloadIdentity(CLUSTER, BROKER, "second", "run")
        offloader = Offloader(
            opened,
            root,
            identity,
            SMALL,
            topic_filter=FILTER,
            offsets_source=no_offsets,
            log_limits=LogLimits(replace_log=True),
        )
        offloader.run(threading.Event(), follow=False)


@pytest.fixture
def root(tmp_path: Path) -> FileStore:
    """An archive of three queues."""
    root = FileStore(tmp_path / "archive")
    backfill(store_with(tmp_path / "first", {0: 20, 1: 20, 3: 20}, b"first"), root)
    return root


@pytest.fixture
async def archive(root: FileStore, tmp_path: Path) -> AsyncIterator[ServedArchive]:
    with closing(
        open_access(f"file://{tmp_path / 'archive'}", cluster=CLUSTER, broker=BROKER, settings=Settings())
    ) as access:
        archive = ServedArchive(access)
        await archive.load()
        yield archive


async def grown(archive: ServedArchive) -> None:
    """The newest version is known."""
    watching = asyncio.create_task(archive.watch(0.0))
    await archive.changed(10)
    watching.cancel()


async def test_a_queue_of_an_earlier_generation_is_not_served_beside_those_of_the_new_one(
    archive: ServedArchive, root: FileStore, tmp_path: Path
) -> None:
    wish = PullRequest("t", 3, 0, 8, 1 << 20, "g")
    first = await archive.pull(wish)
    assert first.status is PullStatus.FOUND
    wish.offset = first.next_offset
    assert archive.pull_from_memory(wish) is not None
    # Another disk: the topic is created again, and has messages in two of its queues so far.
    on_another_disk(store_with(tmp_path / "second", {0: 5, 1: 5}, b"second"), root)
    await grown(archive)
    assert b"second 0" in b"".join((await archive.pull(PullRequest("t", 0, 0, 1, 1 << 20, "g"))).body)
    assert archive.pull_from_memory(wish) is None
    again = await archive.pull(wish)
    assert (again.status, again.next_offset, list(again.body)) == (
        PullStatus.NO_MATCHED_LOGIC_QUEUE,
        wish.offset,
        [],
    )
    assert archive.bounds("t", 3) is None
    assert await archive.offset_by_time("t", 3, 1 << 50, upper=False) == 0
    assert await archive.stored_ms("t", 3, 0) == -1
    assert archive.last_stored_ms("t", 3) == 0
    assert await archive.units("t", 3, 0, 5) == []
    queues = ArchivedQueues(archive._catalog)
    assert queues.find("t", 3).queue is None
    assert queues.find("t", 0).queue is not None


async def test_a_topic_without_messages_is_as_in_the_archived_table(
    archive: ServedArchive, root: FileStore, tmp_path: Path
) -> None:
    second = store_with(tmp_path / "second", {0: 5}, b"second")
    (second / "config").mkdir()
    table = {
        "idle": {"topicName": "idle", "readQueueNums": 3, "writeQueueNums": 2, "perm": 4, "order": True},
        "%DLQ%g": {"topicName": "%DLQ%g", "readQueueNums": 1, "writeQueueNums": 1, "perm": 2},
        "closed": {"topicName": "closed", "readQueueNums": 1, "writeQueueNums": 1, "perm": 0},
    }
    (second / "config/topics.json").write_text(json.dumps({"topicConfigTable": table}))
    on_another_disk(second, root)
    await grown(archive)
    assert archive.topics()["idle"] == TopicConfig("idle", 3, 2, perm=4, order=True)
    assert archive.topics()["t"].perm == 6
    # An archive may always be read: dead letter topics have no read permission at the broker.
    routes = RouteTable(archive, "host:9876")
    for topic, perm in (("%DLQ%g", 6), ("closed", 4)):
        assert (routes.route(topic) or {})["queueDatas"][0]["perm"] == perm


async def test_the_runtime_information_names_the_time_of_the_first_message(archive: ServedArchive) -> None:
    """clusterList shows how many hours ago that was."""

    first_ms = min([await archive.stored_ms("t", queue_id, 0) for queue_id in (0, 1)])
    assert runtime_table(5, archive.earliest_stored_ms())["earliestMessageTimeStamp"] == str(first_ms)
    assert runtime_table(5)["earliestMessageTimeStamp"] == "5"


async def test_groups_may_read_the_archive_whatever_the_broker_permitted(
    archive: ServedArchive, root: FileStore, tmp_path: Path
) -> None:
    second = store_with(tmp_path / "second", {0: 5}, b"second")
    (second / "config").mkdir()
    stopped = {"consumeEnable": False, "consumeBroadcastEnable": False, "brokerId": 3, "retryMaxTimes": 7}
    table = {"subscriptionGroupTable": {"g": {"groupName": "g", **stopped}}}
    (second / "config/subscriptionGroup.json").write_text(json.dumps(table))
    on_another_disk(second, root)
    await grown(archive)
    config = RouteTable(archive, "host:9876").group_config("g")
    assert (config["consumeEnable"], config["consumeBroadcastEnable"], config["brokerId"]) == (
        True,
        True,
        0,
    )
    assert config["retryMaxTimes"] == 7


async def test_how_far_groups_were_is_known_also_of_queues_that_are_not_archived(
    archive: ServedArchive, root: FileStore, tmp_path: Path
) -> None:
    assert archive.consumed_end("t", 0) == 0
    second = store_with(tmp_path / "second", {0: 5}, b"second")
    (second / "config").mkdir()
    table = {"%RETRY%g@g": {"0": 500}, "t@g": {"0": 3, "1": 9}, "t@h": {"0": 7}, "t2@g": {"0": 99}}
    (second / "config/consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    on_another_disk(second, root)
    await grown(archive)
    found = [archive.consumed_end(*queue) for queue in (("%RETRY%g", 0), ("t", 0), ("t", 1), ("t", 2))]
    assert found == [500, 7, 9, 0]
    assert archive.archived_offset("g", "t", 0) == 3
    assert archive.bounds("%RETRY%g", 0) is None
    assert sorted(archive.archived_topics("g")) == ["%RETRY%g", "t", "t2"]
    assert (sorted(archive.archived_groups("t")), list(archive.archived_groups("t3"))) == (["g", "h"], [])


@pytest.mark.parametrize(
    ("count", "archived", "expected"),
    [
        (5, 3, 3),
        (5, 5, 5),
        (5, 15, 0),  # brokers of 4.9 keep offsets of topics that are deleted
        (5, 20, 0),
        (5, 21, 21),  # no life had it yet: the table is ahead of what is archived
        (25, 22, 22),
        (25, 27, 27),
    ],
)
async def test_a_group_gets_no_offset_of_an_earlier_generation_that_its_broker_had_kept(
    archive: ServedArchive, root: FileStore, tmp_path: Path, count: int, archived: int, expected: int
) -> None:
    second = store_with(tmp_path / "second", {0: count}, b"second")
    (second / "config").mkdir()
    table = {"t@g": {"0": archived}}
    (second / "config/consumerOffset.json").write_text(json.dumps({"offsetTable": table}))
    on_another_disk(second, root)
    await grown(archive)
    assert archive.archived_offset("g", "t", 0) == expected
    assert archive.archived_offset("g", "t", 1) is None
    assert archive.archived_offset("h", "t", 0) is None


async def test_a_member_that_is_connected_while_its_topic_is_recreated_gets_the_new_messages(
    archive: ServedArchive, root: FileStore, tmp_path: Path
) -> None:
    """It continues where it was, commits that every few seconds, and waits for more there."""

    log = GroupLog(MemoryStore(), "one", Clock(wall_ms=lambda: 1), generation_of=archive._access.generation)
    offsets = GroupOffsets(log, lease_ms=60_000)
    assert await offsets.claim()
    running = asyncio.create_task(offsets.run())
    clients, routes = ClientTable(Clock(monotonic_s=lambda: 0.0)), RouteTable(archive, "h:1")
    handlers = OffsetHandlers(archive, routes, clients, offsets)
    pulls = PullService(archive, routes, clients, offsets)
    place = {"consumerGroup": "g", "topic": "t", "queueId": 0}

    async def pull(at: int) -> Response:
        fields = place | {"queueOffset": at, "sysFlag": COMMIT_OFFSET | SUSPEND, "commitOffset": at}
        return await pulls.pull(request(RequestCode.PULL_MESSAGE, suspendTimeoutMillis=5_000, **fields))

    first = await pull(0)
    end = int(first.ext["nextBeginOffset"])
    assert (first.code, end) == (0, 20)
    held = asyncio.create_task(pull(end))
    await asyncio.sleep(0.05)
    watching = asyncio.create_task(archive.watch(0.05))
    on_another_disk(store_with(tmp_path / "second", {0: 25}, b"second"), root)
    moved = await held
    assert (moved.code, moved.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "0")
    on_another_disk(store_with(tmp_path / "third", {0: 5}, b"third"), root)
    await archive.changed(5)
    watching.cancel()
    commit = request(RequestCode.UPDATE_CONSUMER_OFFSET, commitOffset=end, **place)
    assert (await handlers.update(commit)).code == 0
    answer = await handlers.query(request(RequestCode.QUERY_CONSUMER_OFFSET, **place))
    assert answer.ext["offset"] == "0"
    moved = await pull(end)
    assert (moved.code, moved.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "0")
    again = await pull(0)
    assert b"third 0" in b"".join(map(bytes, again.body))
    # A group that read the earlier generation at the broker has no offset of it here.
    place["consumerGroup"] = "h"
    moved = await pull(end)
    assert (moved.code, moved.ext["nextBeginOffset"]) == (ResponseCode.PULL_OFFSET_MOVED, "0")
    running.cancel()


async def test_what_queries_by_key_hold_at_once_is_bounded(archive: ServedArchive) -> None:
    """Each finds no more than fits into an answer, and some wait for the others."""

    access: Any = archive._access
    find, found, asked = access.find_by_key, new_future(), list[int]()

    async def read(*arguments: Any) -> Any:
        asked.append(arguments[-1])
        await Wait(found)  # as from a bucket
        return await find(*arguments)

    access.find_by_key = read
    queries = asyncio.gather(
        *(
            archive.messages_by_key("t", f"k{number}", is_unique=False, count=64, begin_ms=0, end_ms=1 << 60)
            for number in range(3 * QUERIES_MAX)
        )
    )
    await asyncio.sleep(0.1)
    assert asked == [FOUND_BYTES_MAX] * QUERIES_MAX
    found.set_result(None)
    assert await queries == [[]] * (3 * QUERIES_MAX)
    assert asked == [FOUND_BYTES_MAX] * (3 * QUERIES_MAX)
    assert FOUND_BYTES_MAX < FRAME_BYTES_MAX


@pytest.mark.parametrize("refusal", [AccessDeniedError, UnavailableError])
async def test_who_waits_is_woken_also_after_the_store_refused_once(
    archive: ServedArchive, root: FileStore, tmp_path: Path, refusal: Callable[[str], Exception]
) -> None:
    """Credentials are renewed, and clocks put right."""

    catalog: Any = archive._catalog
    refreshed, refusals = catalog.refreshed, 0

    async def refused() -> CatalogState:
        nonlocal refusals
        refusals += 1
        raise refusal("403 RequestTimeTooSkewed")

    catalog.refreshed = refused
    watching = asyncio.create_task(archive.watch(0.02))
    await asyncio.sleep(0.1)
    assert refusals and not watching.done()
    catalog.refreshed = refreshed
    waiting = asyncio.create_task(archive.changed(5))
    await asyncio.sleep(0)
    on_another_disk(store_with(tmp_path / "second", {0: 5}, b"second"), root)
    await asyncio.wait({waiting, watching}, return_when=asyncio.FIRST_COMPLETED)
    assert archive.bounds("t", 0) == Bounds(0, 5)
    watching.cancel()
