"""Retry messages: as a broker writes them, durable, fenced, delivered in a stable order, bounded."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rocketmq_tiered
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveService
from rocketmq_tiered.server.backend.backend import Backend, Bounds, TopicConfig
from rocketmq_tiered.server.backend.route_handlers import RouteTable
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import GroupLog, load_snapshot
from rocketmq_tiered.server.retries.retry_log import (
    MESSAGE_BYTES,
    PHYS_BASE,
    RETRY_KEYS,
    Delivery,
    EncodedRetry,
    RetryLog,
    RetryMessage,
    RetryObject,
    RetryState,
    assign_offsets,
    decode_object,
    delivered,
    encode_object,
    encode_retry,
    load_objects,
    object_key,
    queue_bytes,
)
from rocketmq_tiered.server.retries.retry_queue import OBJECTS_MAX, RetryHandlers, RetryLimits, RetryQueues
from rocketmq_tiered.server.retries.retry_topics import ArchiveWithRetries
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tests.end_to_end.offloading import backfill
from tests.server.group_clock import Time
from tests.server.original_record import original
from tests.server.serving_peer import request
from tests.sweeps import examples
from tiered.clock import Clock
from tiered.errors import CorruptionError, FencedError, UnansweredError
from tiered.formats.record import Record, decode_record
from tiered.object_store.file import FileStore
from tiered.object_store.interface import Body
from tiered.object_store.memory import MemoryStore
from tiered.remoting.command import RequestCode, ResponseCode
from tiered.settings.sections import ServeSettings

RETRY, DEAD = "%RETRY%g", "%DLQ%g"


def again(source: bytes, **options: Any) -> tuple[EncodedRetry, Record]:
    """What is written for ``source``, and as a client decodes it once delivered."""
    given_options = {"delay_level": 0, "times_max": 16} | options
    found = encode_retry(decode_record(source), "g", **given_options)
    return found, decode_record(delivered(found.data, number=8, queue_offset=30, stored_ms=1234))


def test_a_message_comes_again_as_a_broker_writes_it() -> None:
    first, record = again(original(), address="127.0.0.1:9876")
    assert (first.topic, first.delay_ms) == (RETRY, 10_000)  # level 3: three more than the times consumed
    assert (record.topic, record.queue_id, record.queue_offset, record.physical_offset) == (
        RETRY,
        0,
        30,
        PHYS_BASE + 8,
    )
    assert (record.reconsume_times, record.store_timestamp, record.store_host) == (1, 1234, "127.0.0.1:9876")
    assert (record.body(), record.flag, record.born_timestamp, record.born_host) == (
        b"hello",
        7,
        4,
        "10.0.0.1:10911",
    )
    assert record.properties == {
        "KEYS": "k",
        "TAGS": "a",
        "RETRY_TOPIC": "t",
        "WAIT": "false",
        "REAL_TOPIC": RETRY,
        "REAL_QID": "0",
        "ORIGIN_MESSAGE_ID": decode_record(original()).offset_msg_id,
    }
    second, twice = again(record.data, delay_level=2)
    assert (second.delay_ms, twice.reconsume_times) == (5_000, 2)
    assert twice.properties == record.properties  # its origin stays the first
    last, dead = again(twice.data, times_max=2)
    assert (last.topic, last.delay_ms, dead.topic, dead.properties["RETRY_TOPIC"]) == (DEAD, 0, DEAD, "t")
    assert again(original(), delay_level=-1)[0].topic == DEAD


def test_every_stored_form_comes_again(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    backfill(real_store("A") / "store", FileStore(tmp_path / "a"))
    with rocketmq_tiered.open(f"file://{tmp_path}/a") as archive:
        for topic in ("t_sizes", "t_props", "t_batch", "%LMQ%t_all"):
            for message in list(archive.queue(topic, 0).messages())[:40]:
                source = decode_record(message.data)
                _, record = again(bytes(message.data))
                kept = (record.stored_body, record.body_crc, record.flag)
                assert kept == (source.stored_body, source.body_crc, source.flag)
                assert source.properties.items() - record.properties.items() <= {
                    ("WAIT", "true"),
                    ("DELAY", "1"),
                }
                assert record.properties["RETRY_TOPIC"] == source.topic


MESSAGES = st.lists(st.tuples(st.sampled_from([RETRY, DEAD, "%RETRY%h"]), st.integers(0, 50)), max_size=30)


@given(MESSAGES, st.integers(1, 7), st.integers(0, 40))
def test_a_base_says_what_all_objects_said(sent: list[tuple[str, int]], step: int, below: int) -> None:
    state, replayed, now_ms, version = RetryState(), RetryState(), 0, 0
    while sent or state.next_due_ms() is not None:
        now_ms, version = now_ms + step, version + 1
        added = tuple(
            RetryMessage(state.next_number + n, topic, now_ms + delay_ms, original())
            for n, (topic, delay_ms) in enumerate(sent[:step])
        )
        sent = sent[step:]
        due = [*state.due(now_ms), *(message for message in added if message.due_ms <= now_ms)]
        nexts = {m.topic: state.queues[m.topic].next_offset if m.topic in state.queues else 5 for m in due}
        found = RetryObject(
            version,
            "me",
            "h",
            state.next_number + len(added),
            added,
            tuple(assign_offsets(due, nexts, now_ms)),
        )
        read = decode_object(encode_object(found), source="s")
        assert read == found
        state.apply(found)
        replayed.apply(read)
    state.release(RETRY, below)
    replayed.release(RETRY, below)
    based = RetryState()
    based.apply(decode_object(encode_object(state.base(version + 1, "me", "h")), source="s"))
    for other in (replayed, based):
        assert other.messages == state.messages
        assert other.queues == state.queues
        assert (other.next_number, other.held_bytes) == (state.next_number, state.held_bytes)
    for queue in state.queues.values():
        assert queue.offsets == sorted(set(queue.offsets))
        assert queue.min_offset == (queue.offsets[0] if queue.offsets else queue.next_offset)


@settings(max_examples=examples(60))
@given(st.integers(0, 10_000), st.integers(0, 7))
def test_a_flipped_bit_is_noticed(at: int, bit: int) -> None:
    message = RetryMessage(0, RETRY, 9, original())
    data = bytearray(encode_object(RetryObject(1, "me", "h", 1, (message,), (Delivery(0, 5, 6),))))
    data[at % len(data)] ^= 1 << bit
    with pytest.raises(Exception, match=r"^s\b") as found:
        decode_object(bytes(data), source="s")
    assert type(found.value).__name__ in ("CorruptionError", "UnsupportedFormatError")


def test_a_fenced_writer_acknowledges_nothing_that_its_successor_did_not_read() -> None:
    store = MemoryStore()
    first, second = RetryLog(store, "one"), RetryLog(store, "two")
    first.claim()
    message = RetryMessage(0, RETRY, 9, original())
    first.write(RetryObject(2, first.owner, "one", 1, (message,)))
    assert second.claim().messages == {0: message}
    with pytest.raises(FencedError, match="two"):
        first.write(RetryObject(3, first.owner, "one", 2, (RetryMessage(1, RETRY, 9, original()),)))
    second.remove_replaced()
    assert [info.key for info in store.list(RETRY_KEYS)] == [object_key(3)]
    assert RetryLog(store, "three").claim().messages == {0: message}
    store.delete([object_key(4)])
    store.delete([object_key(3)])
    assert load_objects(store) == []


def test_a_claim_whose_version_a_successor_wrote_and_removed_is_refused() -> None:
    class Stalls(MemoryStore):
        successor: RetryLog | None = None

        def get(self, key: str, max_bytes: int = 1 << 30) -> bytes:
            if self.successor is not None and key == object_key(2):
                successor, self.successor = self.successor, None
                successor.claim()
                successor.remove_replaced()
            return super().get(key, max_bytes)

    store = Stalls()
    first, second = RetryLog(store, "one"), RetryLog(store, "two")
    first.claim()
    second.claim()
    store.successor = RetryLog(store, "three")
    with pytest.raises(FencedError):
        first.write(RetryObject(2, first.owner, "one", 1))


def test_an_object_that_lacks_its_base_is_damage() -> None:
    store = MemoryStore()
    log = RetryLog(store, "one")
    log.claim()
    for version in (2, 3):
        log.write(RetryObject(version, log.owner, "one", 0))
    store.delete([object_key(2)])
    with pytest.raises(CorruptionError, match="a copy of another object: it has version 1 "):
        load_objects(store)


class ArchiveWithRetryTopic(Backend):
    """An archive whose dead broker left messages 10..12 in the group's retry topic."""

    cluster, broker = "c", "b"

    def topics(self) -> dict[str, TopicConfig]:
        return {"t": TopicConfig("t", 1, 1), RETRY: TopicConfig(RETRY, 1, 1)}

    def subscription_groups(self) -> dict[str, dict[str, Any]]:
        return {}

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        return Bounds(10, 13) if (topic, queue_id) == (RETRY, 0) else None

    def consumed_end(self, topic: str, queue_id: int) -> int:
        return 0

    def last_stored_ms(self, topic: str, queue_id: int) -> int:
        return 500

    async def pull(self, wish: PullRequest) -> PullResult:
        if wish.offset < 10:
            return PullResult(PullStatus.OFFSET_TOO_SMALL, 10, 10, 13)
        if wish.offset < 13:
            return PullResult(PullStatus.FOUND, 13, 10, 13, (b"archived",), 13 - wish.offset)
        return PullResult(PullStatus.OFFSET_OVERFLOW_ONE, 13, 10, 13)

    async def message_at_phys(self, phys: int) -> bytes | None:
        return original() if phys == 777 else None

    async def changed(self, timeout_s: float) -> None:
        await asyncio.sleep(timeout_s)


class ConsumedFurther(ArchiveWithRetryTopic):
    """The group had consumed ``end`` messages of its retry topic when its broker was archived: of those, the last ones
    were not archived, or none at all."""

    def __init__(self, end: int, bounds: Bounds | None) -> None:
        self._end, self._bounds = end, bounds

    def consumed_end(self, topic: str, queue_id: int) -> int:
        return self._end if (topic, queue_id) == (RETRY, 0) else 0

    def bounds(self, topic: str, queue_id: int) -> Bounds | None:
        return self._bounds if (topic, queue_id) == (RETRY, 0) else None


class Scene:
    """One server's retry queues over a store."""

    def __init__(
        self,
        store: MemoryStore,
        clock: Time,
        limits: RetryLimits | None = None,
        archive: ArchiveWithRetryTopic | None = None,
    ) -> None:
        self.offsets = GroupOffsets(
            GroupLog(store, "one", Clock(wall_ms=clock)), lease_ms=60_000, take_over=True
        )
        self.queues = RetryQueues(
            RetryLog(store, "one"), self.offsets, limits or RetryLimits(), Clock(wall_ms=clock)
        )
        archive = archive or ArchiveWithRetryTopic()
        self.archive = ArchiveWithRetries(archive, self.queues)  # type: ignore[arg-type]
        self.clock = clock
        self.table = HandlerTable()
        routes = RouteTable(self.archive, "127.0.0.1:9876")
        RetryHandlers(self.archive, routes, self.queues).register(self.table)
        self._work: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        await self.offsets.claim()
        await self.queues.claim()
        self._work = [asyncio.create_task(work) for work in (self.offsets.run(), self.queues.run())]

    async def die(self) -> None:
        """As by kill -9: nothing more is written."""
        for task in self._work:
            task.cancel()
        await asyncio.gather(*self._work, return_exceptions=True)

    async def send_back(self, phys: int = 777, **fields: object) -> Response:
        handler = self.table.find(RequestCode.CONSUMER_SEND_MSG_BACK)
        assert handler is not None
        sent = {"group": "g", "offset": phys, "delayLevel": 1, "maxReconsumeTimes": 16} | fields
        response = await handler(request(RequestCode.CONSUMER_SEND_MSG_BACK, None, **sent))
        assert response is not None
        return response

    async def pull(self, offset: int, topic: str = RETRY, count: int = 32) -> PullResult:
        return await self.archive.pull(PullRequest(topic, 0, offset, count, 1 << 20, "g"))

    async def until_end(self, end: int, topic: str = RETRY) -> None:
        """Wait until the queue ends at ``end``."""
        for _ in range(400):
            bounds = self.archive.bounds(topic, 0)
            if bounds is not None and bounds.maximum == end:
                return
            self.queues._wake.set()
            await asyncio.sleep(0.01)
        raise AssertionError(f"{topic} ends at {self.archive.bounds(topic, 0)}, not {end}")


async def test_what_was_acknowledged_survives_and_keeps_its_offset() -> None:
    store, clock = MemoryStore(), Time()
    one = Scene(store, clock)
    await one.start()
    answers = await asyncio.gather(*(one.send_back() for _ in range(3)), one.send_back(delayLevel=2))
    assert {answer.code for answer in answers} == {0}
    assert (await one.pull(13)).status is PullStatus.OFFSET_OVERFLOW_ONE  # its delay lasts
    clock.now_ms += 1_000
    await one.until_end(16)
    before = await one.pull(13)
    assert before[:4] + before[5:6] == (
        PullStatus.FOUND,
        16,
        10,
        16,
        3,
    )
    assert [decode_record(data).queue_offset for data in before.body] == [13, 14, 15]
    assert (await one.pull(11)).body == (b"archived",)  # the dead broker's own come first
    assert (await one.pull(3)).next_offset == 10
    await one.die()

    two = Scene(store, clock)
    await two.start()
    assert (await two.pull(13)) == before
    clock.now_ms += 4_000
    await two.until_end(17)
    back = await two.pull(16)
    assert decode_record(back.body[0]).reconsume_times == 1
    assert (await two.send_back(decode_record(back.body[0]).physical_offset)).code == 0  # once more
    clock.now_ms += 1_000
    await two.until_end(18)
    assert decode_record((await two.pull(17)).body[0]).reconsume_times == 2
    await two.die()


@pytest.mark.parametrize("bounds", [None, Bounds(10, 13)])
async def test_retry_messages_come_behind_what_the_group_had_consumed_at_its_broker(
    bounds: Bounds | None,
) -> None:
    """Its consumers pull from there on: below that a message would count as consumed and never be delivered."""

    store, clock = MemoryStore(), Time()
    one = Scene(store, clock, archive=ConsumedFurther(500, bounds))
    await one.start()
    assert (await one.send_back()).code == 0
    await one.offsets.commit("g", RETRY, 0, 500)  # as consumers do that have nothing to consume
    clock.now_ms += 1_000
    await one.until_end(501)
    found = await one.pull(500)
    assert (found.status, found.next_offset, found.records) == (PullStatus.FOUND, 501, 1)
    assert decode_record(found.body[0]).queue_offset == 500
    led = await one.pull(13)
    assert (led.next_offset, led.records) == (501, 1)
    await one.die()


async def test_no_client_gets_a_message_that_it_may_not_read() -> None:
    """Of which he knows no more than its place in the log."""

    store, clock = MemoryStore(), Time()
    one = Scene(store, clock)
    await one.start()
    table, named = HandlerTable(), list[str]()

    def refusal(request: Request, data: bytes, phys: int) -> Response | None:
        named.append(f"{decode_record(data).topic} at {phys}")
        return Response(ResponseCode.NO_PERMISSION)

    routes = RouteTable(one.archive, "127.0.0.1:9876")
    RetryHandlers(one.archive, routes, one.queues, refusal).register(table)
    handler = table.find(RequestCode.CONSUMER_SEND_MSG_BACK)
    assert handler is not None
    sent: dict[str, object] = {"group": "g", "offset": 777, "delayLevel": 1, "originTopic": "mine"}
    response = await handler(request(RequestCode.CONSUMER_SEND_MSG_BACK, None, **sent))
    assert response is not None and response.code == ResponseCode.NO_PERMISSION
    assert named == ["t at 777"]
    assert not one.queues.state.messages
    await one.die()


async def test_what_a_group_consumed_is_kept_no_longer_and_offsets_continue() -> None:
    store, clock = MemoryStore(), Time()
    one = Scene(store, clock)
    await one.start()
    for _ in range(3):
        assert (await one.send_back()).code == 0
    clock.now_ms += 1_000
    await one.until_end(16)
    await one.offsets.commit("g", RETRY, 0, 16)
    assert load_snapshot(store).offsets["g", RETRY] == {0: 16}
    await one.send_back()
    clock.now_ms += 1_000
    await one.until_end(17)
    led = await one.pull(13)
    assert (led.status, led.next_offset, led.records) == (PullStatus.FOUND, 17, 1)
    await one.die()
    two = Scene(store, clock)
    await two.start()
    await two.until_end(17)
    assert (await two.pull(16)).records == 1
    await two.die()


async def test_the_bound_refuses_and_a_base_replaces_many_objects() -> None:
    store, clock = MemoryStore(), Time()
    size = MESSAGE_BYTES + len(again(original())[0].data)
    held_bytes = queue_bytes(RETRY) + size * (OBJECTS_MAX + 20)
    one = Scene(store, clock, RetryLimits(held_bytes_max=held_bytes + 1))
    await one.start()
    for _ in range(OBJECTS_MAX + 20):
        assert (await one.send_back()).code == 0
    refused = await one.send_back()
    assert (refused.code, "is used up" in (refused.remark or "")) == (
        ResponseCode.SYSTEM_BUSY,
        True,
    )
    for _ in range(100):
        if len(list(store.list(RETRY_KEYS))) < 60:
            break
        await asyncio.sleep(0.05)
    assert len(list(store.list(RETRY_KEYS))) < 60
    await one.die()
    two = Scene(store, clock)
    await two.start()
    clock.now_ms += 1_000
    await two.until_end(13 + OBJECTS_MAX + 20)
    await two.die()


async def test_dead_letters_go_when_they_are_old() -> None:
    clock = Time()
    one = Scene(MemoryStore(), clock, RetryLimits(dead_keep_ms=10_000))
    await one.start()
    assert (await one.send_back(delayLevel=-1)).code == 0
    await one.until_end(1, DEAD)
    clock.now_ms += 5_000
    await one.send_back(delayLevel=-1)
    await one.until_end(2, DEAD)
    clock.now_ms += 6_000
    for _ in range(100):
        one.queues._wake.set()
        await asyncio.sleep(0.01)
        if one.archive.bounds(DEAD, 0) == Bounds(1, 2):
            break
    assert one.archive.bounds(DEAD, 0) == Bounds(1, 2)
    assert DEAD in one.archive.topics()
    await one.die()


async def test_nothing_is_taken_for_a_group_of_another_server() -> None:
    store, clock = MemoryStore(), Time()
    one, two = Scene(store, clock), Scene(store, clock)
    await one.start()
    await two.start()  # takes over
    assert (await two.send_back()).code == 0
    async with asyncio.timeout(5):
        answer = await one.send_back()
    assert answer.code == ResponseCode.NO_PERMISSION
    unknown = await two.send_back(778)
    assert (unknown.code, "look message by offset failed" in (unknown.remark or "")) == (1, True)
    await one.die()
    await two.die()


async def test_an_archive_is_served_although_retry_messages_are_damaged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rocketmq_tiered.server.retries.retry_queue.CHECK_S", 0.02)
    monkeypatch.setattr("rocketmq_tiered.server.retries.retry_queue.AGAIN_S", 0.02)

    archive: Any = ArchiveWithRetryTopic()
    store = MemoryStore()
    store.put_if_absent(object_key(1), [b"damaged"])
    offsets = GroupOffsets(GroupLog(store, "one", Clock(wall_ms=Time())), lease_ms=60_000)
    retries = RetryQueues(RetryLog(store, "one"), offsets, RetryLimits(), Clock(wall_ms=Time()))
    service = ArchiveService(archive, offsets, retries, ServeSettings(bind="127.0.0.1:0"))
    await service.start()
    await offsets.commit("g", "t", 0, 5)
    message = EncodedRetry(RETRY, 0, original())
    with pytest.raises(FencedError):
        await retries.add(message)
    store.delete([object_key(1)])  # as an operator who put them aside
    for _ in range(100):
        if retries.is_owner:
            break
        await asyncio.sleep(0.02)
    async with asyncio.timeout(2):
        await retries.add(message)
    await service.close(0)


class LosesAnswers(MemoryStore):
    """Every other put has its effect and no answer."""

    def __init__(self) -> None:
        super().__init__()
        self._puts = 0

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        super().put_if_absent(key, body, timeout_s=timeout_s)
        self._puts += 1
        if key.startswith(RETRY_KEYS) and self._puts % 2:
            raise UnansweredError(f"{key}: no answer")


async def test_a_lost_answer_writes_nothing_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rocketmq_tiered.server.retries.retry_queue.AGAIN_S", 0.01)

    store, clock = LosesAnswers(), Time()
    one = Scene(store, clock)
    try:
        await one.start()
    except UnansweredError:
        await one.start()
    for _ in range(5):
        assert (await one.send_back()).code == 0
    clock.now_ms += 1_000
    await one.until_end(18)
    assert len((await one.pull(13)).body) == 5
    await one.die()
