"""How many object requests a query makes, and what it says when objects are gone or damaged."""

import random
import threading
from pathlib import Path

import pytest

from fetcher.queries.by_id import OffsetMsgId
from fetcher.queries.by_key import READ_AT_ONCE, KeyQuery
from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits
from rocketmq_tiered.maintenance.compaction_round import plan_rounds, run_round
from rocketmq_tiered.maintenance.expire import Erasure, commit_pass, plan_pass
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.catalog.collection import run_gc
from tests.fetcher.queries.counted import CountedQueries
from tests.sweeps import sweep
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.errors import CorruptionError, UnavailableError, UsageError
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import FetchSettings, IndexSettings, Settings
from tiered.settings.topic_rules import TopicRule
from uploader.index_builder import IndexBuilder

A, B = QueueKey("a", 0, 0), QueueKey("b", 1, 0)


def archive_of(cycles: int, *, index_every: int = 0) -> tuple[MemoryStore, ArchiveBuilder]:
    """Set objects of two queues each; most of their runs are in pages."""
    store = MemoryStore()
    archive = ArchiveBuilder(store, limits=CatalogLimits(root_every=64, spill_runs=50, page_runs_max=40))
    index = index_builder(store, archive)
    for number in range(cycles):
        archive.commit([Sent(A, b"%d" % number, keys=(f"k{number}",)), Sent(B, b"b", keys=("same",))])
        if index_every and number % index_every == index_every - 1:
            index.run_to_end(threading.Event())
    return store, archive


def index_builder(store: MemoryStore, archive: ArchiveBuilder) -> IndexBuilder:
    """Of what is in ``archive``."""
    return IndexBuilder(
        store,
        archive.writer,
        IndexSettings(day_files_max=64),
        clock=Clock(wall_ms=lambda: NOW_MS),
        random_source=random.Random(1),
    )


@pytest.mark.parametrize("cycles", sweep([40, 400], fast=[40]))
def test_an_id_takes_at_most_four_requests_however_many_segments(cycles: int) -> None:
    store, archive = archive_of(cycles, index_every=cycles // 2)
    ids = [row.record for row in archive.truth[A].rows]
    with CountedQueries(store, load(store)) as queries:
        for record in ids[:: cycles // 20]:
            phys = int.from_bytes(record[28:36], "big")
            text = (record[64:72] + phys.to_bytes(8, "big")).hex()
            queries.requests = 0
            found = queries.by_id(OffsetMsgId.parse(text))
            assert found is not None and found.data == record
            assert queries.requests <= 4
        assert queries.by_id(OffsetMsgId.parse("00" * 8 + f"{1 << 50:016x}")) is None


def id_of(record: bytes) -> OffsetMsgId:
    """What a client shows of a record of archive_of: its store host, and its physical offset."""
    return OffsetMsgId.parse((record[64:72] + record[28:36]).hex())


@pytest.mark.parametrize(
    ("cycles", "runs", "is_lagging"), [pytest.param(100, 500, False, marks=pytest.mark.soak), (40, 200, True)]
)
def test_an_id_takes_at_most_four_requests_among_ten_thousand_segments(
    cycles: int, runs: int, is_lagging: bool
) -> None:
    """A catalog of many pages. ``is_lagging``: the newest segments are in no index file, and no longer in memory."""
    store = MemoryStore()
    archive = ArchiveBuilder(store, limits=CatalogLimits(root_every=8, spill_runs=runs, page_runs_max=runs))
    index = IndexBuilder(
        store,
        archive.writer,
        IndexSettings(day_files_max=8),
        clock=Clock(wall_ms=lambda: NOW_MS),
        random_source=random.Random(1),
    )
    queues = [QueueKey("t", number, 0) for number in range(cycles)]
    for number in range(cycles):
        archive.commit([Sent(queue, b"%d" % number) for queue in queues], as_set=False)
        if not is_lagging or number < cycles - 20:
            while index.build_next():
                pass
    state = load(store)
    keys = {key for chunk in state.chunks for key in chunk.object_keys}
    assert len(archive.keys) == cycles * cycles and len(keys) < 2_000 and len(state.pages) > 5
    assert is_lagging == any(page.to_version > state.indexed_version for page in state.pages)
    rows = [archive.truth[queue].rows for queue in queues]
    for cycle in range(0, cycles, 7):
        with CountedQueries(store, state) as queries:
            row = rows[cycle][cycle]
            found = queries.by_id(id_of(row.record))
            assert found is not None and found.data == row.record
            # One that an index file does not cover yet costs the catalog's pages of these runs, once.
            newer = sum(page.to_version > state.indexed_version for page in state.pages)
            assert queries.requests <= 4 + (newer if cycle >= cycles - 20 else 0)
            cold = queries.requests
            again = queries.by_id(id_of(row.record))
            assert again is not None and again.data == found.data
            assert queries.requests == cold


def test_messages_of_compacted_objects_are_found_without_reading_all_tails(tmp_path: Path) -> None:
    """Each of 40 queues has an object over the same range of the log: the index names the queue of a record."""
    store = MemoryStore()
    archive = ArchiveBuilder(store, limits=CatalogLimits(root_every=64, spill_runs=50, page_runs_max=40))
    queues = [QueueKey(f"t{number:02}", 0, 0) for number in range(40)]
    for number in range(96):
        some = queues[number % 8 :: 8]
        archive.commit([Sent(queue, b"x" * 50, keys=(f"{queue.topic}-{number // 8}",)) for queue in some])
    index_builder(store, archive).run_to_end(threading.Event())
    limits = CompactionLimits(split_bytes=1000, block_bytes=600, object_bytes_max=1 << 20, row_bytes=0)
    (planned,) = plan_rounds(store, load(store), limits, before_version=1 << 40)
    options = RewriteOptions(tmp_path, 1 << 20)
    assert run_round(store, load(store), planned, options, clock=Clock(wall_ms=lambda: NOW_MS)) is not None
    for is_collected in (False, True):
        if is_collected:
            run_gc(store, load(store), apply=True, grace_ms=0, clock=lambda: store.clock_ms() + 10)
        state = load(store)
        assert len(list(store.list("data/"))) >= 40
        for queue in queues[::7]:
            for row in archive.truth[queue].rows[::5]:
                with CountedQueries(store, state) as queries:
                    found = queries.by_id(id_of(row.record))
                    assert found is not None and found.data == row.record
                    assert queries.requests <= 6 + 3
                with CountedQueries(store, state) as queries:
                    page = queries.by_key(KeyQuery(queue.topic, f"{queue.topic}-{row.offset}"))
                    assert [message.data for message in page.messages] == [row.record]
                    assert queries.requests <= 6 + 3
        with CountedQueries(store, state) as queries:
            assert queries.by_id(OffsetMsgId.parse("00" * 8 + f"{1:016x}")) is None
        assert verify_archive(store, depth="full").anomalies == []


def test_a_key_takes_one_request_an_index_file() -> None:
    store, _ = archive_of(60, index_every=20)
    state = load(store)
    with CountedQueries(store, state) as queries:
        assert not queries.by_key(KeyQuery("a", "not there")).messages
        assert queries.requests == len(state.indexes)
        queries.requests = 0
        assert not queries.by_key(KeyQuery("a", "k3", end_ms=NOW_MS - 1)).messages
        assert queries.requests == 0


def test_expired_messages_that_are_still_indexed_are_counted() -> None:
    store, archive = archive_of(20, index_every=20)
    rule = TopicRule("a", None, 0, "test", None, "test", "NOT_IN_DISK", "test")
    state, clock = load(store), store.clock_ms
    found = plan_pass(store, state, lambda _: rule, clock=Clock(wall_ms=clock), erase=Erasure("a"))
    commit_pass(store, state, found, clock=Clock(wall_ms=clock))
    archive.writer.load()
    archive.commit([Sent(A, b"new", keys=("k3",))])
    with CountedQueries(store, load(store)) as queries:
        page = queries.by_key(KeyQuery("a", "k3"))
        assert ([message.queue_offset for message in page.messages], page.expired) == ([20], 1)
        page = queries.by_key(KeyQuery("a", "k4"))
        assert (page.messages, page.expired) == ([], 1)
        assert queries.by_key(KeyQuery("b", "same")).expired == 0


def test_a_message_by_key_or_id_takes_as_many_requests_however_many_pages_its_queue_has() -> None:
    store = MemoryStore()
    limits = CatalogLimits(
        root_every=8, root_runs_max=16, page_runs_max=20, merge_sequences=4, merge_spills=4
    )
    archive = ArchiveBuilder(store, limits=limits)
    for number in range(300):
        at_ms = NOW_MS + number
        archive.commit(
            [
                Sent(A, b"%d" % number, keys=(f"k{number}",), stored_ms=at_ms),
                Sent(B, b"b", keys=("same",), stored_ms=at_ms),
            ]
        )
    index_builder(store, archive).run_to_end(threading.Event())
    state = load(store)
    assert len(state.pages) > 25 and len(state.indexes) == 2
    for row in archive.truth[A].rows[::17]:
        with CountedQueries(store, state) as queries:
            page = queries.by_key(KeyQuery("a", f"k{row.offset}"))
            assert [message.data for message in page.messages] == [row.record]
            assert queries.requests <= len(state.indexes) + 3  # a page, a tail and a block
        with CountedQueries(store, state) as queries:
            found = queries.by_id(id_of(row.record))
            assert found is not None and found.data == row.record
            assert queries.requests <= 4


def test_segments_not_indexed_take_one_request_each() -> None:
    store, _ = archive_of(10)
    with CountedQueries(store, load(store)) as queries:
        assert not queries.by_key(KeyQuery("a", "not there")).messages
        assert queries.requests == 10
        queries.requests = 0
        assert not queries.by_key(KeyQuery("no such topic", "k1")).messages
        assert queries.requests == 0
        assert queries.cost_of([KeyQuery("a", "k1")]).requests == 10


@pytest.mark.parametrize("page_size", [1, 7, 20, 25])
@pytest.mark.parametrize("is_indexed", [True, False])
def test_pages_continue_behind_a_millisecond_with_more_messages_than_are_read_at_once(
    page_size: int, is_indexed: bool
) -> None:
    store = MemoryStore()
    archive = ArchiveBuilder(store)
    stored_ms = [NOW_MS - 1] * 3 + [NOW_MS] * 40 + [NOW_MS + 1]
    archive.commit([Sent(A, b"%d" % at, keys=("same",), stored_ms=ms) for at, ms in enumerate(stored_ms)])
    if is_indexed:
        index_builder(store, archive).run_to_end(threading.Event())
    bodies: list[bytes] = []
    after = None
    with CountedQueries(store, load(store)) as queries:
        for _ in range(len(stored_ms) + 1):
            page = queries.by_key(KeyQuery("a", "same", max_messages=page_size, after=after))
            bodies += [message.record.body() for message in page.messages]
            after = page.next
            if after is None:
                break
    assert bodies == [b"%d" % at for at in reversed(range(len(stored_ms)))]


@pytest.mark.parametrize("max_bytes", [1, 700, 3_000])
def test_a_page_has_at_most_the_wanted_bytes_but_for_a_single_message(max_bytes: int) -> None:
    store = MemoryStore()
    archive = ArchiveBuilder(store)
    bodies = [b"%2d" % at + bytes(100 + 500 * (at % 3)) for at in range(24)]
    for at, body in enumerate(bodies):
        archive.commit([Sent(A, body, keys=("same",), stored_ms=NOW_MS + at // 2)])
    index_builder(store, archive).run_to_end(threading.Event())
    found: list[bytes] = []
    after = None
    with CountedQueries(store, load(store)) as queries:
        while after is not None or not found:
            page = queries.by_key(KeyQuery("a", "same", after=after, max_bytes=max_bytes))
            page_bytes = sum(len(message.data) for message in page.messages)
            assert page_bytes <= max_bytes or len(page.messages) == 1
            found += [message.record.body() for message in page.messages]
            after = page.next
    assert found == bodies[::-1]


def test_no_more_messages_are_read_than_their_bytes_allow() -> None:
    store = MemoryStore()
    archive = ArchiveBuilder(store)
    for at in range(4 * READ_AT_ONCE):
        archive.commit([Sent(A, bytes(1000), keys=("same",), stored_ms=NOW_MS + at)])
    index_builder(store, archive).run_to_end(threading.Event())
    state = load(store)
    with CountedQueries(store, state) as queries:
        assert len(queries.by_key(KeyQuery("a", "same", max_messages=200)).messages) == 4 * READ_AT_ONCE
        all_requests = queries.requests
    with CountedQueries(store, state) as queries:
        query = KeyQuery("a", "same", max_messages=200, max_bytes=READ_AT_ONCE * 1_000)
        assert 10 < len(queries.by_key(query).messages) <= READ_AT_ONCE
        assert queries.requests < all_requests / 2


def test_a_missing_index_file_is_an_error_and_never_an_empty_answer() -> None:
    store, _ = archive_of(20, index_every=10)
    state = load(store)
    store.delete([state.indexes[0].key])
    with CountedQueries(store, state) as queries:
        with pytest.raises(CorruptionError, match="names a missing object"):
            queries.by_key(KeyQuery("a", "k1"))
        with pytest.raises(CorruptionError, match="names a missing object"):
            queries.by_id(OffsetMsgId.parse("00" * 8 + f"{state.indexes[0].begin_phys:016x}"))


def test_a_replaced_index_file_is_looked_for_in_the_newer_catalog() -> None:
    store, archive = archive_of(20, index_every=10)
    old = load(store)
    for number in range(20, 40):
        archive.commit([Sent(A, b"%d" % number, keys=(f"k{number}",))])
    builder = IndexBuilder(
        store,
        archive.writer,
        IndexSettings(day_files_max=2),
        clock=Clock(wall_ms=lambda: NOW_MS),
    )
    builder.run_to_end(threading.Event())
    gone = {ref.key for ref in old.indexes} - {ref.key for ref in load(store).indexes}
    assert gone
    store.delete(sorted(gone))
    with CountedQueries(store, old) as queries:
        assert [m.record.body() for m in queries.by_key(KeyQuery("a", "k3")).messages] == [b"3"]


def test_a_store_that_is_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    store, _ = archive_of(4, index_every=2)

    def away(*_: object) -> bytes:
        raise UnavailableError("away")

    with CountedQueries(store, load(store)) as queries:
        monkeypatch.setattr(store, "get_range", away)
        with pytest.raises(UnavailableError):
            queries.by_key(KeyQuery("a", "k1"))


@pytest.mark.parametrize("text", ["", "zz" * 16, "00" * 15, "00" * 8 + "ff" * 8])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(UsageError):
        OffsetMsgId.parse(text)


def test_ids_of_both_address_families_are_read() -> None:
    assert OffsetMsgId.parse("7f00000100005b1e00000000031f37dd").phys == 52377565
    assert OffsetMsgId.parse("00" * 20 + "000000000000002a").phys == 42


@pytest.mark.parametrize("index_every", [0, 20])
def test_all_topics_read_a_key_section_once(index_every: int) -> None:
    """Without a cache; ``index_every``: the newest ten segments are in no index file, or all."""
    settings = Settings(fetch=FetchSettings(query_cache_bytes=0))
    cycles = 30
    store = MemoryStore()
    archive = ArchiveBuilder(store, limits=CatalogLimits(root_every=64, spill_runs=50, page_runs_max=40))
    index = index_builder(store, archive)
    queues = [QueueKey(f"t{number:02}", 0, 0) for number in range(12)]
    for number in range(cycles):
        archive.commit([Sent(queue, b"%d" % number, keys=(f"k{number % 7}",)) for queue in queues])
        if index_every and number == index_every - 1:
            index.run_to_end(threading.Event())
    wanted = [KeyQuery(queue.topic, "k3") for queue in queues]
    state = load(store)
    with (
        CountedQueries(store, state, settings) as one_by_one,
        CountedQueries(store, state, settings) as together,
    ):
        assert together.by_keys([]) == []
        expected = [one_by_one.by_key(query) for query in wanted]
        found = together.by_keys(wanted)
        assert [[m.data for m in page.messages] for page in found] == [
            [m.data for m in page.messages] for page in expected
        ]
        assert all(len(page.messages) == 4 for page in expected)
        scanned = cycles - index_every
        cost = together.cost_of(wanted)
        assert cost.segments == scanned and cost.index_files == (1 if index_every else 0)
        assert one_by_one.requests - together.requests >= (len(wanted) - 1) * scanned
