"""Consumer groups and retry messages of a server killed under c922a86 continue."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

import rocketmq_tiered
from rocketmq_tiered.server.groups.group_offsets import GroupOffsets
from rocketmq_tiered.server.groups.group_state import (
    GroupLog,
    decode_snapshot,
    encode_snapshot,
    load_snapshot,
)
from rocketmq_tiered.server.retries.retry_log import RetryLog, load_objects
from rocketmq_tiered.server.retries.retry_queue import RetryLimits, RetryQueues
from rocketmq_tiered.server.retries.retry_state import RetryState, encode_object
from tiered.errors import FencedError
from tiered.formats.keys import archive_prefix
from tiered.formats.record import decode_record
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

KILLED_MS = 1_700_000_000_000
LEASE_MS = 60_000
RETRY, DEAD = "%RETRY%g", "%DLQ%g"


@pytest.fixture
def store(left: Path) -> PrefixedStore:
    return PrefixedStore(FileStore(left / "reading" / "archive"), archive_prefix("cluster", "broker"))


def offsets_at(store: PrefixedStore, now_ms: int, **options: bool) -> GroupOffsets:
    return GroupOffsets(GroupLog(store, "new-server", lambda: now_ms), lease_ms=LEASE_MS, **options)


@pytest.mark.asyncio
async def test_offsets_are_found_and_continue(store: PrefixedStore) -> None:
    before = load_snapshot(store)
    assert (before.version, before.owner_name, before.released, before.has_generations) == (
        4,
        "killed-server",
        False,
        True,
    )
    offsets = offsets_at(store, KILLED_MS + 2 * LEASE_MS)
    assert await offsets.claim()
    found = [
        offsets.find(*place)
        for place in (("g", "one", 0), ("g", "other", 1), ("h", "one", 0), ("h", "other", 1))
    ]
    assert found == [7, 3, 20, None]
    work = asyncio.create_task(offsets.run())
    await offsets.commit("g", "one", 0, 9)
    work.cancel()
    after = load_snapshot(store)
    assert after.version == before.version + 2
    assert after.offsets == {("g", "one"): {0: 9}, ("g", "other"): {1: 3}, ("h", "one"): {0: 20}}


@pytest.mark.asyncio
async def test_the_lease_of_the_killed_server_holds(store: PrefixedStore) -> None:
    offsets = offsets_at(store, KILLED_MS + LEASE_MS // 2)
    assert not await offsets.claim()
    assert offsets.find("g", "one", 0) == 7
    with pytest.raises(FencedError):
        await offsets.commit("g", "one", 0, 9)
    assert await offsets_at(store, KILLED_MS + LEASE_MS // 2, take_over=True).claim()


@pytest.mark.asyncio
async def test_retry_messages_are_found_and_delivered_in_their_order(
    store: PrefixedStore, left: Path
) -> None:
    now_ms = KILLED_MS + 3 * 3_600_000  # the longest delay is over
    offsets = offsets_at(store, now_ms)
    await offsets.claim()
    queues = RetryQueues(RetryLog(store, "new-server"), offsets, RetryLimits(), lambda: now_ms)
    await queues.claim()
    delivered = queues.state.queues[RETRY]
    assert (delivered.first_offset, delivered.offsets) == (0, [0])
    assert queues.state.queues[DEAD].offsets == [0]
    assert queues.state.next_due_ms() == KILLED_MS + 1_500 + 2 * 3_600_000
    work = asyncio.create_task(queues.run())
    for _ in range(400):
        if delivered.next_offset == 2:
            break
        queues._wake.set()
        await asyncio.sleep(0.01)
    work.cancel()
    assert queues.state.queues[RETRY].offsets == [0, 1]
    with rocketmq_tiered.open((left / "reading" / "archive").as_uri()) as archive:
        body = next(iter(archive.queue("one", 0).messages())).body
    for number, offset in zip(queues.state.queues[RETRY].numbers, (0, 1), strict=True):
        record = decode_record(queues.state.messages[number].data)
        assert (record.topic, record.queue_offset, record.reconsume_times) == (RETRY, offset, 1)
        assert record.body() == body


def test_objects_written_today_are_the_same(store: PrefixedStore, left: Path) -> None:
    """An older version may run again: what it wrote is encoded to the same bytes."""
    archive = left / "reading" / "archive" / "cluster" / "broker"
    for path in (archive / "state" / "serve").glob("9*"):
        assert encode_snapshot(decode_snapshot(path.read_bytes(), source=path.name)) == path.read_bytes()
    state = RetryState()
    objects = load_objects(store)
    assert len(objects) == 5
    for found in objects:
        assert encode_object(found) == (archive / f"state/serve/retry/{found.version:020d}").read_bytes()
        state.apply(found)
    assert len(state.messages) == 3
