"""The index is built from the bucket alone, bounded, and survives every kind of failure."""

import itertools
import random
import re
import struct
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fetcher.queries.by_key import KeyQuery
from rocketmq_tiered.maintenance.expire import commit_pass, plan_pass
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.faults.crashing_store import CrashError, CrashingStore
from tests.fetcher.queries.counted import CountedQueries
from tests.maintenance.compaction_scene import Scene
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tests.peak_memory import peak_below
from tests.sweeps import sweep
from tiered.archive.index.footer import shape_of
from tiered.archive.index.items import ITEM_DTYPE
from tiered.archive.index.order import sorted_items
from tiered.archive.task import TaskLoop
from tiered.archive.verify import verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.index_refs import UNINDEXED
from tiered.catalog.pages import RunIndex, living_runs
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.errors import CorruptionError, UnavailableError
from tiered.formats.keys import object_of
from tiered.formats.segment_layout import TRAILER_BYTES
from tiered.model.queue import QueueKey
from tiered.model.tables import Table
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import IndexSettings
from tiered.settings.topic_rules import TopicRule
from uploader import index_builder, index_files, index_input
from uploader.index_builder import IndexBuilder
from uploader.index_input import stale_entries
from uploader.index_plan import SEGMENT_RUNS, groups_of

_seeds = itertools.count()
A, B = QueueKey("a", 0, 0), QueueKey("b", 3, 0)


def builder_of(store: ObjectStore, writer: CatalogWriter, **settings: Any) -> IndexBuilder:
    """A builder with small bounds."""
    return IndexBuilder(
        store,
        writer,
        IndexSettings(**{"unindexed_objects_max": 4, "day_files_max": 3} | settings),
        clock=Clock(wall_ms=lambda: NOW_MS),
        random_source=random.Random(next(_seeds)),
    )


def commit(archive: ArchiveBuilder, number: int) -> None:
    """Two messages with keys of their own and one they share."""
    archive.commit(
        [
            Sent(A, b"a%d" % number, keys=(f"a-{number}", "shared")),
            Sent(B, b"b%d" % number, keys=(f"b-{number}",)),
        ]
    )


def found(store: ObjectStore, topic: str, key: str) -> list[bytes]:
    """Bodies of what a query finds."""
    with CountedQueries(store, load(store)) as queries:
        return answered(queries, topic, key)


def answered(queries: CountedQueries, topic: str, key: str) -> list[bytes]:
    page = queries.by_key(KeyQuery(topic, key, max_messages=1000))
    return [message.record.body() for message in page.messages]


def check(store: ObjectStore, cycles: int) -> None:
    """Every key, indexed or not."""
    with CountedQueries(store, load(store)) as queries:
        for number in range(cycles):
            assert answered(queries, "a", f"a-{number}") == [b"a%d" % number]
            assert answered(queries, "b", f"b-{number}") == [b"b%d" % number]
            assert answered(queries, "b", f"a-{number}") == []
        assert answered(queries, "a", "shared") == [b"a%d" % number for number in reversed(range(cycles))]
    assert verify_archive(store, depth="full").anomalies == []


@pytest.mark.parametrize("limits", [CatalogLimits(root_every=4), CatalogLimits(root_every=3, spill_runs=6)])
def test_a_key_is_found_from_the_moment_it_is_visible(limits: CatalogLimits) -> None:
    store = MemoryStore()
    archive = ArchiveBuilder(store, limits=limits)
    builder = builder_of(store, archive.writer)
    unindexed = []
    for number in range(30):
        commit(archive, number)
        while builder.build_next():
            pass
        state = load(store)
        unindexed.append(state.cursor.phys and number + 1 - sum(ref.objects for ref in state.indexes))
        assert found(store, "a", f"a-{number}") == [b"a%d" % number]
    assert max(unindexed) <= 4
    assert len(load(store).indexes) < 8
    check(store, 30)


def test_messages_with_many_keys_take_the_same_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are counted before their keys are known; a file of fewer versions is made where they have many."""
    sizes: list[int] = []

    def counted(items: Table) -> Table:
        sizes.append(len(items))
        return sorted_items(items)

    monkeypatch.setattr(index_input, "sorted_items", counted)
    store = MemoryStore()
    archive = ArchiveBuilder(store)
    for cycle in range(6):
        archive.commit(
            [Sent(A, b"%d" % cycle, keys=[f"{cycle}-{row}-{n}" for n in range(500)]) for row in range(10)]
        )
    memory_bytes = 1 << 20
    index = builder_of(store, archive.writer, memory_bytes=memory_bytes, day_files_max=64)
    index.run_to_end(threading.Event())
    assert sum(sizes) == index.counters.items == 6 * 10 * 500
    assert max(sizes) <= memory_bytes // (2 * ITEM_DTYPE.itemsize)
    assert verify_archive(store, depth="full").anomalies == []
    assert found(store, "a", "3-7-499") == [b"3"]


def test_a_version_with_more_keys_than_memory_has_room_for_is_one_file() -> None:
    store = MemoryStore()
    archive = ArchiveBuilder(store)
    for _ in range(2):
        archive.commit([Sent(A, keys=[f"{row}-{n}" for n in range(2000)]) for row in range(10)])
    index = builder_of(store, archive.writer, memory_bytes=1 << 20, unindexed_objects_max=1, day_files_max=64)
    while index.build_next():
        pass
    assert (index.counters.files, index.counters.items) == (2, 40_000)
    assert verify_archive(store, depth="full").anomalies == []


@pytest.mark.parametrize(
    ("memory_bytes", "rows"), [(1 << 17, 3), pytest.param(1 << 20, 20, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize("as_set", sweep([True, False], fast=[True], rest="integration"))
def test_its_memory_is_that_of_the_setting_and_one_key_section(
    tmp_path: Path, as_set: bool, memory_bytes: int, rows: int
) -> None:
    """However many keys the messages of one version have: 32 KiB of them are 16,000 of one letter."""
    store = FileStore(tmp_path / "archive")
    archive = ArchiveBuilder(store)
    queues = [A._replace(queue_id=number) for number in range(8)]
    archive.commit(
        [Sent(queue, keys=[f"{row}-{n}" for n in range(2500)]) for row in range(rows) for queue in queues],
        as_set=as_set,
    )
    keys = rows * 8 * 2500
    index = builder_of(store, archive.writer, memory_bytes=memory_bytes, unindexed_objects_max=1)
    section_bytes = 8 * keys if as_set else keys
    with peak_below(memory_bytes + section_bytes * 5 // 4 + (3 << 19)):
        assert index.build_next()
    assert index.counters.items == keys and 8 * memory_bytes < keys * ITEM_DTYPE.itemsize
    assert verify_archive(store, depth="full").anomalies == []
    assert found(store, "a", f"{rows - 1}-2499") == [b"body"] * 8


def test_where_there_is_no_room_to_put_items_aside_the_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "away"))
    store = MemoryStore()
    archive = ArchiveBuilder(store)
    archive.commit([Sent(A, keys=[f"{row}-{n}" for n in range(2000)]) for row in range(10)])
    index = builder_of(store, archive.writer, memory_bytes=1 << 20)
    with pytest.raises(UnavailableError, match=r"away.*TMPDIR"):
        index.run_to_end(threading.Event())


def test_commits_for_the_index_are_rare() -> None:
    store = MemoryStore()
    archive = ArchiveBuilder(store)
    builder = builder_of(store, archive.writer, unindexed_objects_max=16, day_files_max=8)
    before = archive.state.version
    for number in range(64):
        commit(archive, number)
        while builder.build_next():
            pass
    assert archive.state.version - before <= 64 + 64 // 16 + 2


def test_idle_asks_nothing() -> None:
    store = CrashingStore(MemoryStore(), 1 << 60, after_effect=False)
    archive = ArchiveBuilder(store)  # type: ignore[arg-type]
    builder = builder_of(store, archive.writer)  # type: ignore[arg-type]
    commit(archive, 0)
    builder.run_to_end(threading.Event())
    asked = store.requests
    for _ in range(5):
        assert not builder.build_next()
        assert not builder.is_due(is_final=True)
    assert store.requests == asked


def test_a_crash_at_each_request_leaves_a_whole_archive() -> None:
    begin, end = run_until_crash(CrashingStore(MemoryStore("memory://clean"), 1 << 60, after_effect=False))
    for after_effect in (False, True):
        for crash_at in range(begin + 1, end + 1):
            memory = MemoryStore(f"memory://{after_effect}-{crash_at}")
            store = CrashingStore(memory, crash_at, after_effect=after_effect)
            with pytest.raises(CrashError):
                run_until_crash(store)
            writer = CatalogWriter(
                memory,
                cluster="cluster",
                broker="broker",
                instance="test",
                kind="run",
                clock=Clock(wall_ms=lambda: NOW_MS),
                wait=lambda seconds: None,
            )
            writer.claim()
            builder_of(memory, writer).run_to_end(threading.Event())
            assert not builder_of(memory, writer).is_due(is_final=True)
            check(memory, 6)


def run_until_crash(store: CrashingStore) -> tuple[int, int]:
    """Six cycles, indexed in two files that are merged; requests before and after the index was worked at."""
    archive = ArchiveBuilder(store)  # type: ignore[arg-type]
    for number in range(6):
        commit(archive, number)
        if number == 2:
            builder_of(store, archive.writer).run_to_end(threading.Event())  # type: ignore[arg-type]
    before = store.requests
    builder = builder_of(store, archive.writer, day_files_max=2)  # type: ignore[arg-type]
    builder.run_to_end(threading.Event())
    return before, store.requests


def test_another_builder_was_faster() -> None:
    store = MemoryStore()
    archive = ArchiveBuilder(store)
    for number in range(5):
        commit(archive, number)
    one, other = (builder_of(store, archive.writer) for _ in range(2))
    state = archive.writer.state
    assert one.build_next()
    other_ref = load(store).indexes
    other._build(state, _only_group(other, state))
    assert load(store).indexes == other_ref
    assert other._files.unnamed and other._files.unnamed[0] not in {ref.key for ref in other_ref}
    check(store, 5)


def _only_group(builder: IndexBuilder, state: Any) -> Any:
    (group,) = groups_of(builder._unindexed(state), 1 << 30, 1 << 30)
    return group


@pytest.mark.parametrize(("fault", "listed"), [(Fault.FULL, 0), (Fault.THROTTLED, 0), (Fault.LOST_AFTER, 3)])
def test_only_keys_that_may_exist_are_garbage(fault: Fault, listed: int) -> None:
    """A bucket that is full for a day refuses thousands of tries: listed, their keys would take memory and a commit."""
    store = FaultStore(MemoryStore(), wait=lambda seconds: None)
    archive = ArchiveBuilder(store)  # type: ignore[arg-type]
    for number in range(6):
        commit(archive, number)
    builder = builder_of(store, archive.writer)  # type: ignore[arg-type]
    store.add(FaultRule(fault, frozenset({"put"}), "index/*"))
    for _ in range(3):
        with pytest.raises(UnavailableError):
            builder.run_to_end(threading.Event())
    assert len(builder._files.unnamed) == listed
    store.clear()
    builder.run_to_end(threading.Event())
    assert (
        len(load(archive.store).pending_deletions.keys() & {info.key for info in store.list("index/")})
        == listed
    )


def check_continues(
    archive: ArchiveBuilder, caplog: pytest.LogCaptureFixture, repair: Callable[[], object]
) -> None:
    """Messages are committed while no index can be made; it is made as soon as ``repair`` is done."""
    builder, store = builder_of(archive.store, archive.writer, retry_ms=100), archive.store
    loop = TaskLoop(builder, lambda: archive.writer.state)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    for number in range(8):
        commit(archive, number)
        loop.wake()
    # A failure is counted before it is logged.
    until(lambda: loop.status.failures and caplog.text)
    assert "away" in caplog.text and not loop.status.problem  # a short outage is no finding
    repair()
    until(lambda: load(store).indexes)
    loop.stop()
    thread.join(5)
    assert not thread.is_alive()
    check(store, 8)


def until(condition: Callable[[], object]) -> None:
    for _ in range(300):
        if condition():
            return
        threading.Event().wait(0.02)
    raise AssertionError("it never was so")


def test_a_store_that_is_away_never_stops_the_uploader(caplog: pytest.LogCaptureFixture) -> None:
    class Away(MemoryStore):
        away = False

        def put_if_absent(self, key: str, body: Any, *, timeout_s: float | None = None) -> None:
            if self.away and key.startswith("index/"):
                raise UnavailableError("away")
            super().put_if_absent(key, body, timeout_s=timeout_s)

    store = Away()
    archive = ArchiveBuilder(store)
    store.away = True
    check_continues(archive, caplog, lambda: setattr(store, "away", False))


def test_a_disk_without_room_for_the_index_never_stops_the_uploader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(index_files, "SPOOL_BYTES", 1)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "away"))
    check_continues(ArchiveBuilder(MemoryStore()), caplog, (tmp_path / "away").mkdir)
    assert "TMPDIR" in caplog.text


C = QueueKey("c", 7, 0)
"""Its messages are in segments of their own."""


class Damaged:
    """Ten cycles with a segment of ``C`` in the middle, which ``damage`` makes unreadable."""

    def __init__(self, limits: CatalogLimits) -> None:
        self.store = MemoryStore()
        self.archive = ArchiveBuilder(self.store, limits=limits)
        for number in range(10):
            commit(self.archive, number)
            if number == 4:
                self.archive.commit([Sent(C, b"c", keys=("c-key",))])
                self.key = self.archive.keys[-1]
        self.whole = self.store.get(self.key)

    def put(self, data: bytes) -> None:
        """Instead of what is there."""
        self.store.delete([self.key])
        if data:
            self.store.put_if_absent(self.key, [data])

    def builder(self, **settings: Any) -> IndexBuilder:
        return IndexBuilder(
            self.store,
            self.archive.writer,
            IndexSettings(**{"unindexed_objects_max": 4, "day_files_max": 3} | settings),
            clock=Clock(wall_ms=lambda: NOW_MS),
            random_source=random.Random(next(_seeds)),
        )

    def check_others(self) -> None:
        """Nothing else suffers."""
        with CountedQueries(self.store, load(self.store)) as queries:
            for number in range(10):
                assert answered(queries, "a", f"a-{number}") == [b"a%d" % number]
            assert answered(queries, "a", "shared") == [b"a%d" % number for number in reversed(range(10))]


@pytest.fixture(params=[CatalogLimits(root_every=64), CatalogLimits(root_every=3, spill_runs=6)])
def damaged(request: pytest.FixtureRequest) -> Damaged:
    """In memory, or in pages."""
    return Damaged(request.param)


def flipped(data: bytes, at: int) -> bytes:
    changed = bytearray(data)
    changed[at] ^= 1
    return bytes(changed)


@pytest.mark.parametrize("what", ["tail", "keys", "gone"])
def test_a_damaged_segment_is_skipped_and_all_others_are_indexed(
    damaged: Damaged, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tail_offset,) = struct.unpack_from("<Q", damaged.whole, len(damaged.whole) - TRAILER_BYTES)
    at = {"tail": -60, "keys": tail_offset - 1}
    damaged.put(flipped(damaged.whole, at[what]) if what in at else b"")
    before = load(damaged.store).version
    builder = damaged.builder()
    builder.run_to_end(threading.Event())
    assert not builder.is_due(is_final=True) and not damaged.builder().is_due(is_final=True)
    state = load(damaged.store)
    assert state.indexed_version >= before - 1 and list(state.unindexed) == [damaged.key]
    (line,) = map(vars, caplog.records)
    assert line["segment"] == damaged.key and line["error"]
    assert builder.counters.excluded == 1
    damaged.check_others()
    anomalies = {anomaly.key for anomaly in verify_archive(damaged.store, depth="full").anomalies}
    assert anomalies == {damaged.key}


def test_an_unindexed_segment_never_looks_like_an_absent_key(damaged: Damaged) -> None:
    damaged.put(flipped(damaged.whole, -60))
    with pytest.raises(CorruptionError):
        found(damaged.store, "c", "c-key")
    damaged.builder().run_to_end(threading.Event())
    for key in ("c-key", "another"):
        with pytest.raises(CorruptionError, match=re.escape(damaged.key)):
            found(damaged.store, "c", key)
    with CountedQueries(damaged.store, load(damaged.store)) as queries:
        assert not queries.by_key(KeyQuery("c", "c-key", end_ms=NOW_MS - 1)).messages
    assert len(load(damaged.store).indexes) > 0
    damaged.put(damaged.whole)  # from a copy of the bucket
    assert found(damaged.store, "c", "c-key") == [b"c"]
    assert verify_archive(damaged.store, depth="full").anomalies == []


def test_files_that_are_merged_still_leave_it_out(damaged: Damaged) -> None:
    damaged.put(flipped(damaged.whole, -60))
    builder = damaged.builder(unindexed_objects_max=1, day_files_max=2)
    while builder.build_next():
        pass
    builder.run_to_end(threading.Event())
    assert builder.counters.merges > 0
    damaged.check_others()
    with pytest.raises(CorruptionError):
        found(damaged.store, "c", "c-key")


def test_bytes_that_were_damaged_on_their_way_are_read_again(
    damaged: Damaged, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    get_range, damaged_once = damaged.store.get_range, set[str]()

    def received(key: str, offset: int, length: int) -> bytes:
        data = get_range(key, offset, length)
        if key in damaged_once or key not in damaged.archive.keys:
            return data
        damaged_once.add(key)
        return flipped(data, -60)

    with monkeypatch.context() as patched:
        patched.setattr(damaged.store, "get_range", received)
        damaged.builder(day_files_max=64).run_to_end(threading.Event())
    assert caplog.records == [] and not load(damaged.store).unindexed
    assert found(damaged.store, "c", "c-key") == [b"c"]


def test_unindexed_segments_are_bounded(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is part of the catalog; an archive of damage alone is to be looked at."""
    monkeypatch.setattr(index_input, "UNINDEXED_MAX", 0)
    damaged.put(flipped(damaged.whole, -60))
    with pytest.raises(CorruptionError):
        damaged.builder().run_to_end(threading.Event())
    assert not load(damaged.store).unindexed


# -- damaged index files ------------------------------------------------------------------------------------------


@dataclass
class Indexed:
    """Twelve cycles with an index of small files; one of the files is to be damaged."""

    limits: CatalogLimits
    store: MemoryStore = field(default_factory=MemoryStore)
    said: list[tuple[str, Mapping[str, object]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.archive = ArchiveBuilder(self.store, limits=self.limits)
        builder = self.builder(day_files_max=64)
        for number in range(12):
            commit(self.archive, number)
            if number % 2:
                while builder.build_next(is_final=False):
                    pass
        self.files = load(self.store).indexes
        assert len(self.files) >= 3

    def builder(self, **settings: Any) -> IndexBuilder:
        return IndexBuilder(
            self.store,
            self.archive.writer,
            IndexSettings(**{"unindexed_objects_max": 2, "day_files_max": 3} | settings),
            clock=Clock(wall_ms=lambda: NOW_MS),
            random_source=random.Random(next(_seeds)),
        )

    def damage(self, key: str, what: str) -> None:
        data = self.store.get(key)
        self.store.delete([key])
        if what != "gone":
            self.store.put_if_absent(key, [flipped(data, {"items": 20, "tail": -70}[what])])


@pytest.fixture(params=[CatalogLimits(root_every=64), CatalogLimits(root_every=3, spill_runs=6)])
def indexed(request: pytest.FixtureRequest) -> Indexed:
    """In memory, or in pages."""
    return Indexed(request.param)


@pytest.mark.parametrize("what", ["items", "tail", "gone"])
@pytest.mark.parametrize("number", sweep([0, 1, -1], fast=[1]))
def test_a_damaged_index_file_is_rebuilt_and_all_are_merged(
    indexed: Indexed, what: str, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    victim = indexed.files[number].key
    indexed.damage(victim, what)
    builder = indexed.builder()
    builder.run_to_end(threading.Event())
    state = load(indexed.store)
    assert victim not in {ref.key for ref in state.indexes} and victim in state.pending_deletions
    assert builder.counters.merges > 0 and builder.counters.rebuilt == 1
    assert [(line.getMessage(), vars(line)["file"]) for line in caplog.records] == [
        ("a damaged index file was rebuilt from its segments", victim)
    ]
    check(indexed.store, 12)


@pytest.mark.parametrize("what", ["items", "tail"])
def test_messages_are_found_while_an_index_file_is_damaged(indexed: Indexed, what: str) -> None:
    indexed.damage(indexed.files[1].key, what)
    for number in range(12):
        assert found(indexed.store, "a", f"a-{number}") == [b"a%d" % number]
    assert found(indexed.store, "a", "shared") == [b"a%d" % number for number in reversed(range(12))]
    assert {anomaly.key for anomaly in verify_archive(indexed.store, depth="full").anomalies} == {
        indexed.files[1].key
    }


def test_a_damaged_index_file_over_more_than_memory_has_room_for_becomes_several(indexed: Indexed) -> None:
    indexed.builder(day_files_max=2).run_to_end(threading.Event())
    while len(load(indexed.store).indexes) > 1:
        indexed.builder(day_files_max=2).run_to_end(threading.Event())
    (whole,) = load(indexed.store).indexes
    commit(indexed.archive, 12)
    indexed.builder(day_files_max=64, unindexed_objects_max=1).build_next()
    indexed.damage(whole.key, "tail")
    small = indexed.builder(memory_bytes=1, day_files_max=64)
    refs = load(indexed.store).indexes
    small._merge_or_rebuild(indexed.archive.state, refs)
    made = load(indexed.store).indexes
    assert len(made) > len(refs) and whole.key not in {ref.key for ref in made}
    check(indexed.store, 13)


def test_no_index_file_divides_what_compaction_has_joined(tmp_path: Path) -> None:
    """Neither the first one, nor those that replace a damaged one: one that ends inside a joined run is rebuilt without
    that run's keys."""
    scene = Scene(tmp_path)
    builder = builder_of(scene.store, scene.owner.writer, day_files_max=64)
    work = builder.plan(state := scene.owner.state)
    assert work is not None and scene.run() is not None
    builder.step(state, work)
    assert load(scene.store).indexes == ()
    scene.append(40)
    builder.run_to_end(threading.Event())
    while len(refs := load(scene.store).indexes) > 1:
        builder._merge(scene.owner.state, refs, [builder._footer(shape_of(ref)) for ref in refs])
    state = scene.owner.state
    assert scene.run() is not None
    small = builder_of(scene.store, scene.owner.writer, memory_bytes=1, day_files_max=64)
    assert not small._rebuild(state, refs[0]) and load(scene.store).indexes == refs
    assert small._rebuild(scene.owner.state, refs[0])
    scene.check()


def test_a_damaged_segment_is_skipped_when_a_damaged_file_is_rebuilt(indexed: Indexed) -> None:
    indexed.damage(indexed.files[0].key, "items")
    page = next(living_runs(RunIndex(indexed.store), load(indexed.store)))
    first = int(page.chunk.objects["key"][page.chunk.runs["object"][np.argmin(page.chunk.runs["version"])]])
    segment = page.chunk.object_keys[first]
    data = indexed.store.get(segment)
    indexed.store.delete([segment])
    indexed.store.put_if_absent(segment, [flipped(data, -60)])
    indexed.builder().run_to_end(threading.Event())
    assert list(load(indexed.store).unindexed) == [segment]
    with pytest.raises(CorruptionError, match=re.escape(segment)):
        found(indexed.store, "a", "shared")
    assert verify_archive(indexed.store, depth="full").anomalies[0].key == segment


def test_a_file_that_cannot_be_rebuilt_is_passed_by(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A page of the catalog that tells which segments it was made of is damaged too."""
    indexed = Indexed(CatalogLimits(root_every=3, spill_runs=6, merge_sequences=64))
    state = load(indexed.store)
    victim = next(
        ref for ref in indexed.files[:2] if any(page.to_version >= ref.from_version for page in state.pages)
    )
    indexed.damage(victim.key, "tail")
    page = next(page for page in state.pages if page.to_version >= victim.from_version)
    key = object_of(page.key)
    data = indexed.store.get(key)
    indexed.store.delete([key])
    indexed.store.put_if_absent(key, [flipped(data, len(data) // 2)])
    builder = indexed.builder(day_files_max=2)
    builder._run_index = builder._input._run_index = RunIndex(indexed.store)
    for _ in range(4):
        while builder.build_next():
            pass
    refs = load(indexed.store).indexes
    assert victim.key in {ref.key for ref in refs}
    assert builder.counters.merges > 0 and len(refs) < len(indexed.files)
    assert [(line.getMessage(), vars(line)["file"]) for line in caplog.records] == [
        ("a damaged index file cannot be rebuilt: it stays as it is, and is not merged", victim.key)
    ]


def test_a_damaged_file_that_another_builder_has_replaced(indexed: Indexed) -> None:
    one, other = indexed.builder(), indexed.builder()
    victim = indexed.files[0]
    indexed.damage(victim.key, "items")
    state = indexed.archive.state
    assert one._rebuild(state, victim)
    after = load(indexed.store).indexes
    assert not other._rebuild(state, victim)
    assert load(indexed.store).indexes == after
    check(indexed.store, 12)


# -- what is no longer there ---------------------------------------------------------------------------------------


def test_a_deleted_segment_is_no_longer_listed_as_unindexed(
    damaged: Damaged, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged.put(flipped(damaged.whole, -60))
    builder = damaged.builder(unindexed_objects_max=1, day_files_max=64)
    while builder.build_next():
        pass
    state = load(damaged.store)
    assert list(state.unindexed) == [damaged.key]
    ((key, versions),) = state.unindexed.items()
    assert stale_entries(state, RunIndex(damaged.store)) == {}, "it is damaged, not gone"
    extra = {UNINDEXED: {key: [*versions, 1], "data/long/gone": [2]}}
    damaged.archive.writer.maintain(
        lambda _: CommitDraft(CommitKind.MAINTENANCE, settings=extra, created_ms=NOW_MS)
    )
    assert stale_entries(load(damaged.store), RunIndex(damaged.store)) == {key: {1}, "data/long/gone": {2}}
    damaged.builder(unindexed_objects_max=1, day_files_max=2).run_to_end(threading.Event())
    assert load(damaged.store).unindexed == {key: versions}
    damaged.check_others()


def test_what_is_no_longer_there_makes_room(damaged: Damaged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_input, "UNINDEXED_MAX", 1)
    damaged.put(flipped(damaged.whole, -60))
    extra = {UNINDEXED: {"data/long/gone": [2]}}
    damaged.archive.writer.maintain(
        lambda _: CommitDraft(CommitKind.MAINTENANCE, settings=extra, created_ms=NOW_MS)
    )
    damaged.builder().run_to_end(threading.Event())
    assert list(load(damaged.store).unindexed) == [damaged.key]


@pytest.mark.parametrize("segments_max", [7, 1 << 20])
def test_a_backlog_is_found_in_one_pass_over_the_pages_for_many_files(
    monkeypatch: pytest.MonkeyPatch, segments_max: int
) -> None:
    monkeypatch.setattr(index_builder, "BACKLOG_RUNS_MAX", segments_max * (1 + SEGMENT_RUNS))
    monkeypatch.setattr(index_builder, "PAGES_BYTES", 0)
    memory = MemoryStore()
    archive = ArchiveBuilder(memory, limits=CatalogLimits(spill_runs=6, page_runs_max=4, merge_sequences=64))
    for number in range(40):
        commit(archive, number)
    archive.writer.load()
    store = FaultStore(memory, (), wait=lambda seconds: None)
    builder = builder_of(store, archive.writer, unindexed_objects_max=1, day_files_max=64)
    builder.run_to_end(threading.Event())
    pages = {page.key for page in archive.state.pages}
    reads = sum(
        request.operation == "get_range" and request.key.startswith("catalog/") for request in store.requests
    )
    windows = 1 if segments_max > 40 else -(-40 // (segments_max - 1)) + 1
    assert builder.counters.files >= 10
    assert reads <= windows * len(pages)
    assert archive.state.indexed_version >= 40
    assert verify_archive(memory, depth="full").anomalies == []
    check(memory, 40)


@pytest.mark.parametrize("limits", [CatalogLimits(root_every=64), CatalogLimits(root_every=3, spill_runs=6)])
def test_a_file_of_which_most_has_expired_is_rebuilt_once(limits: CatalogLimits) -> None:
    store = MemoryStore()
    archive = ArchiveBuilder(store, limits=limits)
    builder = builder_of(store, archive.writer, unindexed_objects_max=8, day_files_max=64)
    for number in range(12):
        messages = [
            Sent(A, b"a%d" % number * 20, keys=(f"a-{number}",)),
            Sent(B, b"b%d" % number, keys=(f"b-{number}",)),
        ]
        archive.commit(messages, as_set=False)
    builder.run_to_end(threading.Event())
    before = archive.state.indexes
    items = sum(ref.items for ref in before)
    assert not builder.build_next()
    rule = TopicRule("a", 1, 1, "", None, "", "", "")
    forever = replace(rule, ttl_ms=None)
    state = load(store)
    pass_ = plan_pass(
        store, state, lambda topic: rule if topic == "a" else forever, clock=Clock(wall_ms=store.clock_ms)
    )
    assert commit_pass(store, state, pass_, clock=Clock(wall_ms=store.clock_ms)).version > state.version
    archive.writer.refresh()
    while builder.build_next():
        pass
    after = archive.state.indexes
    assert {ref.key for ref in after}.isdisjoint({ref.key for ref in before})
    assert sum(ref.items for ref in after) == items // 2
    assert [(ref.from_version, ref.to_version) for ref in after] == [
        (ref.from_version, ref.to_version) for ref in before
    ]
    for number in range(12):
        assert found(store, "b", f"b-{number}") == [b"b%d" % number]
        assert found(store, "a", f"a-{number}") == []
    version = archive.state.version
    again = builder_of(store, archive.writer, unindexed_objects_max=8, day_files_max=64)
    assert not again.build_next() and archive.state.version == version
    assert verify_archive(store, depth="full").anomalies == []
