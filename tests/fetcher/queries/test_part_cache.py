"""What queries keep: no part is read twice, memory is bounded and charged, and damaged parts are read again."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fetcher.queries.by_key as key_queries
import rocketmq_tiered
from fetcher.archive import Archive
from fetcher.blocks.budget import ByteBudget
from fetcher.io.request_scheduler import Priority
from fetcher.queries.by_key import KeyQuery
from fetcher.queries.source import ENTRY_BYTES, INDEX_WHOLE_BYTES, PartCache
from fetcher.rows.message import Message
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.end_to_end.offloading import SMALL, backfill
from tests.fetcher.queries.counted import CountedQueries
from tiered.catalog.catalog_reader import load
from tiered.clock import Clock
from tiered.errors import CorruptionError
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import FetchSettings, IndexSettings, Settings
from uploader.index_builder import IndexBuilder

A = QueueKey("a", 0, 0)


@pytest.fixture(scope="module", params=["indexed", "not indexed"])
def url(
    request: pytest.FixtureRequest,
    real_store: Callable[[str], Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> str:
    """An archive of store B: three index files or none."""
    directory = tmp_path_factory.mktemp("kept")
    is_indexed = request.param == "indexed"
    index = IndexSettings(enabled=is_indexed, after_backfill=True, memory_bytes=1 << 20, day_files_max=64)
    backfill(real_store("B") / "store", FileStore(directory), settings=SMALL, index_settings=index)
    return f"file://{directory}"


@pytest.fixture
def archive(url: str) -> Iterator[Archive]:
    # Without a cache of blocks by time, so that only what is kept can make a query warm.
    with rocketmq_tiered.open(url) as opened:
        yield opened


def requests(archive: Archive) -> int:
    """Of all kinds so far."""
    return archive.access.source.statistics().requests


def with_rare_keys(archive: Archive) -> list[Message]:
    """Messages whose first key few others have: a query answers with all of them."""
    messages = list(archive.queue("t_keys", 0).messages())
    counts = Counter(key for message in messages for key in message.keys)
    return [m for m in messages if m.unique_key and m.keys and counts[m.keys[0]] <= 20]


def by_unique_key(archive: Archive, message: Message) -> list[str]:
    """Ids of what is found."""
    return [found.offset_msg_id for found in archive.find_by_unique_key("t_keys", str(message.unique_key))]


def by_key(archive: Archive, message: Message) -> list[str]:
    """Ids of what is found."""
    return [found.offset_msg_id for found in archive.find_by_key("t_keys", message.keys[0])]


def by_id(archive: Archive, message: Message) -> list[str]:
    """Ids of what is found."""
    found = archive.find_by_id(message.offset_msg_id)
    return [] if found is None else [found.offset_msg_id]


def test_a_warm_query_asks_for_nothing(archive: Archive, url: str) -> None:
    state = archive.access.state
    messages = with_rare_keys(archive)[:40]
    with rocketmq_tiered.open(url) as cold:
        assert cold.find_by_key("t_keys", "none has this", since=0) == []
        assert requests(cold) <= 2 * len(state.indexes) + len(state.memory.objects) + len(state.pages)
        for message in messages:
            for find in (by_unique_key, by_key, by_id):
                first = find(cold, message)
                assert message.offset_msg_id in first
                before = requests(cold)
                assert find(cold, message) == first
                assert requests(cold) == before
        before = requests(cold)
        assert cold.find_by_key("t_keys", "no such key") == []
        after_first = requests(cold)
        assert after_first - before <= 2 * len(state.indexes)
        assert cold.find_by_key("t_keys", "no such key") == []
        assert requests(cold) == after_first
        assert cold.access._kept.held_bytes <= FetchSettings().query_cache_bytes


def test_a_cold_query_takes_at_most_three_requests_an_overlapping_index_file_and_two_a_message(
    archive: Archive, url: str
) -> None:
    state = archive.access.state
    unindexed = 0 if state.indexes else len(state.memory.objects)
    messages = with_rare_keys(archive)[::50]
    assert messages
    for message in messages:
        stamp = message.store_timestamp
        files = [ref for ref in state.indexes if ref.begin_ms <= stamp <= ref.end_ms]
        with CountedQueries(archive.access.store, state) as queries:
            query = KeyQuery("t_keys", message.keys[0], begin_ms=stamp, end_ms=stamp)
            found = queries.by_key(query).messages
            assert found
            pages = sum(ref.first.topic <= "t_keys" <= ref.last.topic for ref in state.pages)
            assert queries.requests <= 3 * len(files) + unindexed + 2 * len(found) + pages
            cold = queries.requests
            assert [m.data for m in queries.by_key(query).messages] == [m.data for m in found]
            assert queries.requests == cold


def test_nothing_is_kept_where_there_is_no_room(url: str, archive: Archive) -> None:
    message = with_rare_keys(archive)[0]
    with rocketmq_tiered.open(url, settings=Settings(fetch=FetchSettings(query_cache_bytes=0))) as bare:
        for _ in range(2):
            before = requests(bare)
            assert message.offset_msg_id in [
                m.offset_msg_id for m in bare.find_by_key("t_keys", message.keys[0])
            ]
            assert requests(bare) > before
        assert bare.access._kept.held_bytes == 0


class LyingStore(MemoryStore):
    """Answers ranges of some objects with flipped bits, so many times."""

    lies = 0
    of = "index/"

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        data = super().get_range(key, offset, length)
        if self.lies and key.startswith(self.of):
            self.lies -= 1
            return bytes(byte ^ 1 for byte in data)
        return data


def large_index() -> LyingStore:
    """An archive whose one index file is too large to be read at once."""
    store = LyingStore()
    builder = ArchiveBuilder(store)
    count = INDEX_WHOLE_BYTES // 8
    builder.commit([Sent(A, b"x", keys=[f"k{n}-{m}" for m in range(count // 40)]) for n in range(40)])
    index = IndexBuilder(
        store,
        builder.writer,
        IndexSettings(after_backfill=True),
        clock=Clock(wall_ms=lambda: NOW_MS),
    )
    index.run_to_end(threading.Event())
    return store


def test_neighbours_of_a_slot_are_known_already_and_a_bad_answer_is_requested_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = large_index()
    state = load(store)
    (ref,) = state.indexes
    assert ref.size_bytes - ref.tail_bytes > INDEX_WHOLE_BYTES
    with CountedQueries(store, state) as queries:
        assert len(queries.by_key(KeyQuery("a", "k3-7")).messages) == 1
        assert queries.requests <= 4
        for number in range(40):
            queries.requests = 0
            assert len(queries.by_key(KeyQuery("a", f"k{number}-9")).messages) == 1
            assert queries.requests <= 4 - 1  # the tail at least is known
        pieces = -(-(ref.size_bytes - ref.tail_bytes) // (INDEX_WHOLE_BYTES // 8))
        queries.requests = 0
        for number in range(300):
            queries.by_key(KeyQuery("a", f"absent-{number}"))
        assert queries.requests <= pieces
    with CountedQueries(store, state) as queries:
        store.lies = 1
        assert len(queries.by_key(KeyQuery("a", "k3-7")).messages) == 1
        assert store.lies == 0
    with CountedQueries(store, state) as queries:
        store.lies = 1 << 30
        assert len(queries.by_key(KeyQuery("a", "k3-7")).messages) == 1, "the segments tell"
        with monkeypatch.context() as patched:
            patched.setattr(key_queries, "SEGMENTS_INSTEAD_MAX", 0)
            with pytest.raises(CorruptionError, match=ref.key):
                queries.by_key(KeyQuery("a", "k3-7"))
        store.lies = 0
        assert len(queries.by_key(KeyQuery("a", "k3-7")).messages) == 1, "what was wrong is not kept"


def test_a_part_that_went_bad_in_memory_is_fetched_again() -> None:
    store = large_index()
    with CountedQueries(store, load(store)) as queries:
        assert len(queries.by_key(KeyQuery("a", "k3-7")).messages) == 1
        for key, value in queries.access._kept._parts:
            if isinstance(value, bytes):
                bad = bytes(byte ^ 0x40 for byte in value)
                queries.access._kept._parts.put(key, bad, len(bad) + ENTRY_BYTES)
        assert len(queries.by_key(KeyQuery("a", "k3-7")).messages) == 1


# -- the container ----------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "drop", "shrink"]), st.integers(0, 5), st.integers(0, 400))
)


@given(STEPS)
def test_what_is_held_is_what_is_charged(steps: list[tuple[str, int, int]]) -> None:
    budget = ByteBudget(4000)
    kept = PartCache(3000, budget)
    for what, number, size in steps:
        if what == "put":
            kept.put(f"o{number % 3}", number, (number, size), size)
        elif what == "get":
            found = kept.get(f"o{number % 3}", number)
            assert found is None or found[0] == number
        elif what == "drop":
            kept.drop(f"o{number % 3}")
            assert kept.get(f"o{number % 3}", number) is None
        else:
            kept.evict(kept.held_bytes - size)
            assert kept.held_bytes <= size
        assert kept.held_bytes == budget.charged_bytes <= 3000
        assert (kept.held_bytes == 0) == (len(kept) == 0)


def test_a_user_gets_the_room_and_a_prefetch_does_not() -> None:
    budget = ByteBudget(10_000)
    kept = PartCache(10_000, budget)
    for number in range(8):
        kept.put("object", number, b"", 1_000)
    held = kept.held_bytes
    assert held == 8 * (1_000 + ENTRY_BYTES)
    assert not budget.try_charge(5_000, Priority.PREFETCH)
    assert kept.held_bytes == held
    assert budget.try_charge(5_000, Priority.USER)
    assert kept.held_bytes <= 5_000
    assert kept.get("object", 7) is not None and kept.get("object", 0) is None
    kept.put("object", 9, b"", 9_000)  # no room now: nothing else goes for it
    assert kept.get("object", 9) is None and kept.get("object", 7) is not None


def test_many_threads() -> None:
    budget = ByteBudget(50_000)
    kept = PartCache(30_000, budget)

    def work(seed: int) -> None:
        for number in range(400):
            kept.put(f"o{(seed + number) % 7}", number % 40, number, 500)
            kept.get(f"o{number % 7}", seed)
            if number % 50 == 0:
                kept.drop(f"o{number % 7}")

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept.evict(kept.held_bytes)
    assert (kept.held_bytes, budget.charged_bytes) == (0, 0)
