"""The Python API on a real broker's store: blocking and asynchronous, the same answers; examples that run."""

import asyncio
import itertools
import json
import logging
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

import rocketmq_tiered
from fetcher.archive import Archive
from fetcher.io.waiting import run_sync
from fetcher.rows.tag_filter import TagFilter
from fetcher.sql92.message_filter import Sql92Filter
from fetcher.walk import Span, Walk
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.end_to_end.offloading import backfill
from tests.truth import read_lines
from tiered.catalog.catalog_reader import refresh
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, NotFoundError, UnavailableError, UsageError
from tiered.formats.record import decode_record
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import FetchSettings, PrefetchSettings, Settings

EXAMPLES = Path(__file__).parents[2] / "examples"
_numbers = itertools.count()
Queues = dict[tuple[str, int], list[dict[str, Any]]]


@pytest.fixture(scope="module")
def directory(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Store K, archived in many small objects."""
    target = tmp_path_factory.mktemp("archive")
    backfill(real_store("K") / "store", FileStore(target))
    return target


@pytest.fixture(scope="module")
def truth(real_store: Callable[[str], Path]) -> Queues:
    """What a Java client pulled, by queue."""
    queues: Queues = {}
    for line in read_lines(real_store("K") / "truth" / "messages.jsonl.zst"):
        queues.setdefault((line["topic"], line["queueId"]), []).append(line)
    return queues


@pytest.fixture
def archive(directory: Path) -> Any:
    """Open."""
    with rocketmq_tiered.open(f"file://{directory}") as opened:
        yield opened


def test_queues_are_listed_with_their_bounds(archive: Archive, truth: Queues) -> None:
    assert "FxCluster/fx-a" in archive.title
    for listing in archive.queues():
        lines = truth[listing.topic, listing.queue_id]
        queue = archive.queue(listing.topic, listing.queue_id)
        assert (queue.min_offset, queue.max_offset) == (listing.min_offset, listing.max_offset)
        assert queue.min_offset == lines[0]["queueOffset"]
    assert archive.topics() == sorted({listing.topic for listing in archive.queues()})
    assert [listing.queue_id for listing in archive.queues("t_four")] == [0, 1, 2, 3]


def test_messages_are_what_a_java_client_saw(archive: Archive, truth: Queues) -> None:
    for topic in ("t_one", "t_tags", "t_bcq", "%LMQ%t_all"):
        messages = list(archive.queue(topic, 0).messages())
        lines = truth[topic, 0]
        assert [message.queue_offset for message in messages] == [line["queueOffset"] for line in lines]
        for message, line in zip(messages, lines, strict=True):
            shown = message.to_json()
            assert {name: shown[name] for name in line if name in shown and name != "inner"} == {
                name: line[name] for name in line if name in shown and name != "inner"
            }
            assert shown.get("nonConsecutive") == line.get("nonConsecutive")
            assert message.store_timestamp == line["storeTimestamp"]
            assert message.tags == line["tags"]
            assert message.unique_key == line.get("uniqKey", message.unique_key)
            assert len(message.body) == line["bodyLen"]
            assert len(message.inner) == len(line.get("inner", ()))


def test_a_walk_begins_at_an_offset_or_a_time_and_ends_at_its_bound(archive: Archive, truth: Queues) -> None:
    queue, lines = archive.queue("t_one", 0), truth["t_one", 0]
    assert [m.queue_offset for m in queue.messages(5, limit=3)] == [5, 6, 7]
    stamp = lines[len(lines) // 2]["storeTimestamp"]
    expected = [line["queueOffset"] for line in lines if line["storeTimestamp"] >= stamp]
    assert [m.queue_offset for m in queue.messages(since=stamp)] == expected
    as_datetime = datetime.fromtimestamp(stamp // 1000, UTC).replace(microsecond=stamp % 1000 * 1000)
    assert [m.queue_offset for m in queue.messages(since=as_datetime, limit=2)] == expected[:2]
    assert list(queue.messages(since=datetime(2100, 1, 1))) == []
    until = [m.queue_offset for m in queue.messages(until=stamp)]
    assert until == [m.queue_offset for m in queue.messages() if m.store_timestamp < stamp]
    assert list(queue.messages(until=0)) == []
    assert list(queue.messages(queue.max_offset)) == []


def test_a_walk_from_a_time_in_a_batch_queue_begins_with_messages_of_that_time(
    archive: Archive, truth: Queues
) -> None:
    """Unlike its offset by time, which is the last batch for every later time."""
    queue, lines = archive.queue("t_bcq", 0), truth["t_bcq", 0]
    after = lines[-1]["storeTimestamp"] + 1
    assert list(queue.messages(since=after)) == []
    assert queue.offset_by_time(after) == lines[-1]["queueOffset"]


def test_batches_are_arrays_over_the_stored_bytes(archive: Archive, truth: Queues) -> None:
    lines = truth["t_one", 0]
    batches = list(archive.queue("t_one", 0).batches(batch_messages=100))
    assert max(len(batch) for batch in batches) <= 100
    assert sum(len(batch) for batch in batches) == len(lines)
    assert sum(batch.record_bytes for batch in batches) == sum(line["storeSize"] for line in lines)


def test_filters(archive: Archive, truth: Queues) -> None:
    lines = truth["t_tags", 0]
    tag = lines[0]["tags"]
    expected = [line["queueOffset"] for line in lines if line["tags"] == tag]
    queue = archive.queue("t_tags", 0)
    assert [m.queue_offset for m in queue.messages(message_filter=TagFilter([tag]))] == expected
    by_property = Sql92Filter(f"TAGS = '{tag}'")
    assert [m.queue_offset for m in queue.messages(message_filter=by_property)] == expected


def test_times(archive: Archive, truth: Queues) -> None:
    queue, lines = archive.queue("t_one", 0), truth["t_one", 0]
    assert queue.earliest_time() == lines[0]["storeTimestamp"]
    assert queue.timestamp_of(7) == lines[7]["storeTimestamp"]
    assert queue.timestamp_of(queue.max_offset) is None
    assert queue.offset_by_time(0, rocketmq_tiered.Boundary.UPPER) == queue.min_offset


def test_keys_and_ids_are_found(archive: Archive, truth: Queues) -> None:
    line = next(line for line in truth["t_keys", 0] if line["keys"] and line.get("uniqKey"))
    key = line["keys"].split(" ")[0]
    found = archive.find_by_key("t_keys", key)
    assert (line["queueId"], line["queueOffset"]) in {(m.queue_id, m.queue_offset) for m in found}
    assert all(key in message.keys for message in found)
    (message,) = archive.find_by_unique_key("t_keys", line["uniqKey"])
    assert message.queue_offset == line["queueOffset"]
    by_id = archive.find_by_id(line["offsetMsgId"])
    assert by_id is not None and bytes(by_id.data) == bytes(message.data)
    later = line["storeTimestamp"] + 1
    stamps = [m.store_timestamp for m in archive.find_by_key("t_keys", key, since=later)]
    assert all(stamp >= later for stamp in stamps)
    assert archive.find_by_key("t_keys", "no such key") == []


def test_an_inner_batch_is_found_as_it_is_read(archive: Archive) -> None:
    batch = next(message for message in archive.queue("t_bcq", 0).messages() if message.inner_num > 1)
    found = [archive.find_by_id(batch.offset_msg_id)]
    found += [one for key in batch.keys for one in archive.find_by_key("t_bcq", key)]
    found += archive.find_by_unique_key("t_bcq", batch.unique_key) if batch.unique_key else []
    assert {(one.queue_offset, one.inner_num) for one in found if one} == {
        (batch.queue_offset, batch.inner_num)
    }


def test_what_does_not_exist_and_what_is_wrong(archive: Archive, directory: Path) -> None:
    with pytest.raises(NotFoundError, match="no queue 9 of t_one"):
        archive.queue("t_one", 9)
    with pytest.raises(NotFoundError, match="generation 7"):
        archive.queue("t_one", 0, generation=7)
    with pytest.raises(UsageError, match="cannot be combined"):
        next(archive.queue("t_one", 0).messages(1, since=2))
    with pytest.raises(UsageError, match="negative"):
        next(archive.queue("t_one", 0).messages(-1))
    with pytest.raises(UsageError, match="offsetMsgId"):
        archive.find_by_id("what")
    with pytest.raises(NotFoundError, match="holds no archive"):
        rocketmq_tiered.open(f"file://{directory}/nothing")
    with pytest.raises(NotFoundError, match="no archive of"):
        rocketmq_tiered.open(f"file://{directory}", broker="other")


def test_a_damaged_object_is_an_error_that_names_it_and_hurts_no_other_read(
    directory: Path, tmp_path: Path, truth: Queues
) -> None:
    copy = tmp_path / "archive"
    shutil.copytree(directory, copy)
    with rocketmq_tiered.open(f"file://{copy}") as archive:
        chunk = run_sync(archive.access.catalog.all_runs_of(_view(archive, "t_one")))
        (place, *_) = chunk.objects
        key = chunk.object_keys[int(place["key"])]
    (victim,) = copy.rglob(key)
    content = bytearray(victim.read_bytes())
    content[len(content) // 3] ^= 1
    victim.chmod(0o644)
    victim.write_bytes(content)
    with rocketmq_tiered.open(f"file://{copy}") as archive:
        names = [listing.key for listing in archive.queues()]
        outcomes: dict[QueueKey, object] = {}
        for name in names:
            try:
                outcomes[name] = len(list(archive.queue(*name[:2]).messages()))
            except CorruptionError as error:
                assert victim.name in str(error)
                outcomes[name] = None
        intact = [name for name in names if outcomes[name] is not None]
        assert 0 < len(intact) < len(names)
        assert all(outcomes[name] == len(truth[name[:2]]) for name in intact)


def _view(archive: Archive, topic: str) -> Any:
    view = archive.access.catalog.view(archive.access.state, (topic, 0, None))
    assert view is not None
    return view


class AwayStore(FileStore):
    """A directory that can be away for a while."""

    away = False

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        """Refused while away."""
        if self.away:
            raise UnavailableError("the store is away")
        return super().get_range(key, offset, length)


def test_a_walk_continues_where_it_stood_when_the_store_is_back(
    directory: Path, truth: Queues, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tiered.object_store.open_store.FileStore", AwayStore)
    small = Settings(fetch=FetchSettings(cache_bytes=0))
    with rocketmq_tiered.open(f"file://{directory}", settings=small) as archive:
        walk = archive.queue("t_one", 0).walk(Span(batch_messages=50))
        offsets: list[int] = []
        failures = 0
        while True:
            monkeypatch.setattr(AwayStore, "away", len(offsets) >= 100 and failures < 2)
            try:
                batch = run_sync(walk.next_batch())
            except UnavailableError:
                failures += 1
                continue
            if batch is None:
                break
            offsets += batch.queue_offsets.tolist()
    assert offsets == [line["queueOffset"] for line in truth["t_one", 0]]


def test_a_boundary_may_be_its_text_and_nothing_else() -> None:
    url = "memory://boundaries"
    builder = ArchiveBuilder(PrefixedStore(open_store(url), "cluster/broker"))
    builder.commit([Sent(QueueKey("t", 0, 0), stored_ms=stamp) for stamp in (1000, 1010, 1020)])
    with rocketmq_tiered.open(url) as archive:
        queue = archive.queue("t", 0)
        for text in ("lower", "upper"):
            side: Any = text
            assert queue.offset_by_time(1005, side) == queue.offset_by_time(
                1005, rocketmq_tiered.Boundary(text)
            )
        odd: Any = "last"
        with pytest.raises(UsageError, match="boundary last is neither lower nor upper"):
            queue.offset_by_time(1005, odd)


def test_gaps_are_passed_and_said(caplog: pytest.LogCaptureFixture) -> None:
    url = "memory://gaps"
    builder = ArchiveBuilder(PrefixedStore(open_store(url), "cluster/broker"))
    queue = QueueKey("t", 0, 0)
    builder.commit([Sent(queue), Sent(queue, offset=5), Sent(queue)])
    with rocketmq_tiered.open(url) as archive, caplog.at_level(logging.WARNING):
        assert [m.queue_offset for m in archive.queue("t", 0).messages()] == [0, 5, 6]
    assert "offsets 1 to 4 are missing" in caplog.text


def test_an_archive_that_grows_is_seen_after_a_refresh() -> None:
    url = "memory://grows"
    builder = ArchiveBuilder(PrefixedStore(open_store(url), "cluster/broker"))
    queue = QueueKey("t", 0, 0)
    builder.commit([Sent(queue)])
    with rocketmq_tiered.open(url) as archive:
        walk = archive.queue("t", 0).walk(Span())
        first = run_sync(walk.next_batch())
        assert first is not None and first.queue_offsets.tolist() == [0]
        assert run_sync(walk.next_batch()) is None
        before = archive.version
        builder.commit([Sent(queue), Sent(queue)])
        assert archive.refresh() == before + 1
        assert archive.queue("t", 0).max_offset == 3
        second = run_sync(walk.next_batch())
        assert second is not None and second.queue_offsets.tolist() == [1, 2]


class Grown:
    """An archive opened before its second commit: three messages at offsets 0 to 2, and three at 3 to 5 later."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        url = f"memory://{name}"
        builder = ArchiveBuilder(PrefixedStore(open_store(url), "cluster/broker"))
        queue = QueueKey("t", 0, 0)
        builder.commit([Sent(queue, stored_ms=1000 + number, keys=["k"]) for number in range(3)])
        self.archive = rocketmq_tiered.open(url)
        builder.commit([Sent(queue, stored_ms=2000 + number, keys=["k"]) for number in range(3)])
        self.record = builder.truth[queue].rows[4].record
        # As after an hour without a request; and reading on takes a while, as from a store far away.
        monkeypatch.setattr(self.archive.access.catalog, "_refresh_s", 0.0)
        monkeypatch.setattr("fetcher.rows.catalog_view.refresh", _slow_refresh)


def _slow_refresh(store: ObjectStore, state: CatalogState) -> CatalogState:
    time.sleep(0.05)
    return refresh(store, state)


def test_a_key_is_found_in_what_was_archived_since_the_last_read(monkeypatch: pytest.MonkeyPatch) -> None:
    with Grown("grown-key", monkeypatch).archive as archive:
        assert [m.queue_offset for m in archive.find_by_key("t", "k")] == [5, 4, 3, 2, 1, 0]


def test_an_id_is_found_in_what_was_archived_since_the_last_read(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = Grown("grown-id", monkeypatch)
    with grown.archive as archive:
        found = archive.find_by_id(decode_record(grown.record).offset_msg_id)
        assert found is not None and bytes(found.data) == grown.record


@pytest.mark.parametrize(
    ("ask", "expected"),
    [
        (lambda queue: queue.offset_by_time(2001), 4),
        (lambda queue: queue.offset_by_time(9999, rocketmq_tiered.Boundary.UPPER), 5),
        (lambda queue: queue.offset_by_time(1002, rocketmq_tiered.Boundary.UPPER), 2),
        (lambda queue: queue.timestamp_of(4), 2001),
        (lambda queue: [m.store_timestamp for m in queue.messages(since=2001)], [2001, 2002]),
    ],
)
def test_a_time_at_the_end_is_answered_by_what_was_archived_since_the_last_read(
    ask: Callable[[rocketmq_tiered.Queue], object], expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Grown(f"grown-time-{next(_numbers)}", monkeypatch).archive as archive:
        assert ask(archive.queue("t", 0)) == expected


def test_times_that_do_not_ascend_hide_no_message() -> None:
    """The broker's clock was ahead for a while: what is stored later has earlier times."""
    url = f"memory://clock-{next(_numbers)}"
    builder = ArchiveBuilder(PrefixedStore(open_store(url), "cluster/broker"))
    queue_key = QueueKey("t", 0, 0)
    for stamps in ([1000, 1001, 9000], [1002, 9001, 2000], [8000], [2001, 2002], [500, 501]):
        builder.commit([Sent(queue_key, stored_ms=stamp) for stamp in stamps])
    with rocketmq_tiered.open(url) as archive:
        queue = archive.queue("t", 0)

        def offsets(**span: int) -> list[int]:
            return [message.queue_offset for message in queue.messages(**span)]

        assert offsets(since=1001, until=2002) == [1, 3, 5, 7]
        assert offsets(since=1001, until=2002, limit=3) == [1, 3, 5]
        assert offsets(since=2001) == [2, 3, 4, 5, 6, 7, 8, 9, 10]
        assert offsets(until=1002) == [0, 1, 9, 10]
        assert offsets(start=4, until=2001) == [5, 9, 10]
        assert offsets(since=3000, until=7000) == offsets(since=9002) == []


def test_while_the_catalog_cannot_be_read_only_what_is_known_for_sure_is_returned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grown = Grown("grown-away", monkeypatch)

    def away(store: ObjectStore, state: CatalogState) -> CatalogState:
        raise UnavailableError("the store is away")

    monkeypatch.setattr("fetcher.rows.catalog_view.refresh", away)
    with grown.archive as archive:
        queue = archive.queue("t", 0)
        assert queue.offset_by_time(1001) == 1
        assert queue.offset_by_time(9999) == 3  # who begins there misses nothing
        assert queue.timestamp_of(2) == 1002
        with pytest.raises(UnavailableError):
            queue.timestamp_of(4)
        with pytest.raises(UnavailableError):
            archive.find_by_id(decode_record(grown.record).offset_msg_id)
        with pytest.raises(UnavailableError):
            archive.find_by_key("t", "k")
        with pytest.raises(UnavailableError):
            next(queue.messages(since=2001))


def test_a_walk_from_a_time_ahead_begins_with_the_first_message_of_that_time() -> None:
    url = "memory://ahead"
    builder = ArchiveBuilder(PrefixedStore(open_store(url), "cluster/broker"))
    queue = QueueKey("t", 0, 0)
    builder.commit([Sent(queue, stored_ms=1000)])
    with rocketmq_tiered.open(url) as archive:
        walk = archive.queue("t", 0).walk(Span(since_ms=2000))
        assert run_sync(walk.next_batch()) is None
        builder.commit([Sent(queue, stored_ms=1500), Sent(queue, stored_ms=1999)])
        archive.refresh()
        assert run_sync(walk.next_batch()) is None
        builder.commit(
            [Sent(queue, stored_ms=1999), Sent(queue, stored_ms=2000), Sent(queue, stored_ms=1999)]
        )
        archive.refresh()
        batch = run_sync(walk.next_batch())
        assert batch is not None and batch.queue_offsets.tolist() == [4, 5]


def test_a_queue_that_is_gone_ends_its_walk_with_an_error(archive: Archive) -> None:
    walk = Walk(archive.access.fetcher, QueueKey("t_one", 0, 7), 5, Span())
    with pytest.raises(NotFoundError, match="read up to offset 5"):
        run_sync(walk.next_batch())
    assert walk.offset == 5


def test_a_child_process_gets_an_error_since_it_has_none_of_the_threads(directory: Path) -> None:
    """Nothing would ever come: a fork copies pools, but not their threads."""
    idle = Settings(prefetch=PrefetchSettings(enabled=False))  # no thread holds a lock at the fork
    with rocketmq_tiered.open(f"file://{directory}", settings=idle) as archive:
        assert len(list(archive.queue("t_one", 0).messages(limit=1))) == 1
        assert "before a fork" in _error_in_a_child(archive)


def _error_in_a_child(archive: Archive) -> str:
    """What reading there fails with. The child closes its copy: left with `with`, it ends all the same."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of fork, which is what is tested
        child = os.fork()
    if child == 0:
        try:
            list(archive.queue("t_four", 0).messages())
        except UnavailableError as error:
            archive.close()
            os.write(writing, error.message.encode())
        finally:
            os._exit(0)
    os.close(writing)
    with open(reading, encoding="utf-8") as answer:
        if not select.select([answer], [], [], 20)[0]:
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return answer.read()


@pytest.mark.parametrize("name", ["plain", "with blank", "100%25", "a#b?c=d", "Größe", "not UTF-8: \udcff"])
def test_a_path_is_a_local_directory(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    (tmp_path / name).symlink_to(directory)
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / name, Path(name), Path("..", tmp_path.name, name)):
        with rocketmq_tiered.open(path) as archive:
            assert "t_one" in archive.topics()


def test_a_negative_number_of_messages_is_refused(archive: Archive) -> None:
    with pytest.raises(UsageError, match="-1"):
        archive.find_by_key("t_keys", "k", limit=-1)
    assert archive.find_by_key("t_keys", "k", limit=0) == []


# -- the asynchronous form ------------------------------------------------------------------------------------


async def test_the_asynchronous_form_answers_the_same(directory: Path, truth: Queues) -> None:
    url = f"file://{directory}"
    with rocketmq_tiered.open(url) as blocking:
        async with rocketmq_tiered.open_async(url) as archive:
            assert archive.title == blocking.title and archive.version == blocking.version
            assert archive.topics() == blocking.topics()
            assert archive.queues("t_four") == blocking.queues("t_four")
            queue, twin = archive.queue("t_one", 0), blocking.queue("t_one", 0)
            read = [bytes(message.data) async for message in queue.messages()]
            assert read == [bytes(message.data) for message in twin.messages()]
            sizes = [len(batch) async for batch in queue.batches(batch_messages=64, start=3)]
            assert sum(sizes) == twin.max_offset - 3
            assert await queue.earliest_time() == twin.earliest_time()
            stamp = truth["t_one", 0][9]["storeTimestamp"]
            assert await queue.timestamp_of(9) == stamp
            for boundary in rocketmq_tiered.Boundary:
                assert await queue.offset_by_time(stamp, boundary) == twin.offset_by_time(stamp, boundary)
            line = next(line for line in truth["t_keys", 0] if line["keys"] and line.get("uniqKey"))
            key = line["keys"].split(" ")[0]
            found = [m.queue_offset for m in await archive.find_by_key("t_keys", key)]
            assert found == [m.queue_offset for m in blocking.find_by_key("t_keys", key)]
            (message,) = await archive.find_by_unique_key("t_keys", line["uniqKey"])
            by_id = await archive.find_by_id(line["offsetMsgId"])
            assert by_id is not None and by_id.queue_offset == message.queue_offset == line["queueOffset"]
            assert await archive.refresh() == blocking.version


@pytest.fixture(scope="module")
def four_long_queues(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Four queues of 48 messages, 10 MB each, which do not compress."""
    url = f"file://{tmp_path_factory.mktemp('long')}"
    codec = BlockCodec(block_bytes=256 * 1024)
    builder = ArchiveBuilder(PrefixedStore(open_store(url), "cluster/broker"), codec=codec)
    chance = random.Random(1)
    queues = [QueueKey("t", number, 0) for number in range(4)]
    for _ in range(2):
        builder.commit(
            [Sent(queue, chance.randbytes(200_000)) for _ in range(24) for queue in queues], as_set=False
        )
    return url


def _little_memory(wait_ms: int) -> Settings:
    return Settings(
        fetch=FetchSettings(memory_bytes=14 << 20, cache_bytes=2 << 20, memory_wait_ms=wait_ms),
        prefetch=PrefetchSettings(memory_bytes=2 << 20),
    )


@pytest.mark.parametrize(("by_batch", "wait_ms"), [(False, 60_000), (True, 200)])
async def test_walks_side_by_side_hold_no_batch_while_they_wait_for_the_next(
    four_long_queues: str, by_batch: bool, wait_ms: int
) -> None:
    """Else all would wait for each other's memory, until none gets any. A program that walks batch by batch holds
    its last one while it waits: batches get smaller where memory has no room for large ones."""
    async with rocketmq_tiered.open_async(four_long_queues, settings=_little_memory(wait_ms)) as archive:

        async def count(queue_id: int) -> int:
            queue = archive.queue("t", queue_id)
            if by_batch:
                return sum([len(batch) async for batch in queue.batches()])
            return len([message.queue_offset async for message in queue.messages()])

        async with asyncio.timeout(30):
            assert await asyncio.gather(*map(count, range(4))) == [48] * 4


def test_threads_that_walk_side_by_side_hold_no_batch_while_they_wait_for_the_next(
    four_long_queues: str,
) -> None:
    with (
        rocketmq_tiered.open(four_long_queues, settings=_little_memory(20_000)) as archive,
        ThreadPoolExecutor(4) as threads,
    ):
        queues = [archive.queue("t", queue_id) for queue_id in range(4)]
        assert list(threads.map(lambda queue: sum(1 for _ in queue.messages()), queues)) == [48] * 4


class Opened:
    """Stands for an archive that was opened."""

    def __init__(self) -> None:
        self.is_closed = threading.Event()

    def close(self) -> None:
        self.is_closed.set()


async def test_a_cancelled_opening_leaves_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a time limit around a store that is slow to answer: each attempt would leave a thread and a client."""
    opened, may_continue = Opened(), threading.Event()

    def slowly(url: str, **_: object) -> Opened:
        may_continue.wait(20)
        return opened

    monkeypatch.setattr("fetcher.async_archive.open_async_access", slowly)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            async with rocketmq_tiered.open_async("memory://slow"):
                pass
    may_continue.set()
    assert await asyncio.to_thread(opened.is_closed.wait, 20)


async def test_queues_are_read_side_by_side(directory: Path, truth: Queues) -> None:
    async with rocketmq_tiered.open_async(f"file://{directory}") as archive:

        async def count(queue: rocketmq_tiered.AsyncQueue) -> int:
            return len([message async for message in queue.messages()])

        names = [listing.key for listing in archive.queues()]
        counts = await asyncio.gather(*(count(archive.queue(*name[:2])) for name in names))
    assert dict(zip(names, counts, strict=True)) == {name: len(truth[name[:2]]) for name in names}


async def test_the_asynchronous_form_must_be_entered_and_says_what_does_not_exist(directory: Path) -> None:
    with pytest.raises(UsageError, match="not open"):
        rocketmq_tiered.open_async(f"file://{directory}").topics()
    with pytest.raises(NotFoundError, match="holds no archive"):
        async with rocketmq_tiered.open_async(f"file://{directory}/nothing"):
            pass


async def test_the_asynchronous_form_is_entered_once(directory: Path) -> None:
    """A second time would leak what the first opened: threads, connections."""
    async with rocketmq_tiered.open_async(directory) as archive:
        with pytest.raises(UsageError, match="opened already"):
            await archive.__aenter__()
        assert "t_one" in archive.topics()
    with pytest.raises(UsageError, match="opened already"):
        await archive.__aenter__()


async def test_the_asynchronous_form_may_be_entered_again_when_it_did_not_open(
    directory: Path, tmp_path: Path
) -> None:
    archive = rocketmq_tiered.open_async(tmp_path / "later")
    with pytest.raises(NotFoundError, match="holds no archive"):
        await archive.__aenter__()
    (tmp_path / "later").symlink_to(directory)
    async with archive:
        assert "t_one" in archive.topics()


async def test_a_path_is_a_local_directory_in_an_event_loop_too(directory: Path) -> None:
    async with rocketmq_tiered.open_async(directory) as archive:
        assert "t_one" in archive.topics()


# -- examples -------------------------------------------------------------------------------------------------


def _run_example(name: str, *arguments: str) -> str:
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=EXAMPLES.parent)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_the_blocking_example_runs(directory: Path, truth: Queues) -> None:
    out = _run_example("read_queue.py", f"file://{directory}", "t_one", "0")
    assert f"all: {len(truth['t_one', 0])} messages" in out


def test_the_asynchronous_example_runs(directory: Path, truth: Queues) -> None:
    out = _run_example("read_async.py", f"file://{directory}", "t_four")
    for queue_id in range(4):
        assert f"t_four/{queue_id}: {len(truth['t_four', queue_id])} messages" in out


def test_messages_show_themselves(archive: Archive) -> None:
    (message,) = archive.queue("t_one", 0).messages(2, limit=1)
    assert repr(message).startswith("Message('t_one', 0, 2, ")
    assert json.dumps(message.to_json())
    assert repr(archive.queue("t_one", 0)).startswith("Queue('t_one', 0, [0, ")
