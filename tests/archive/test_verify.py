"""`verify` says nothing of a whole archive and names every kind of damage; each kind has a test of its name."""

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.sweeps import examples
from tiered.archive import verify_progress
from tiered.archive.verify import (
    READ_THREADS,
    UNCHECKED_MAX,
    Anomaly,
    AnomalyKind,
    Depth,
    VerifyReport,
    verify_archive,
)
from tiered.archive.verify_catalog import check_queues
from tiered.archive.verify_progress import VerifyProgress
from tiered.catalog.catalog_reader import read_commit
from tiered.catalog.pages import sorted_page
from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import NotFoundError, UnavailableError
from tiered.formats.keys import catalog_key, parse_part_key, state_key
from tiered.formats.state_object import encode_state
from tiered.model.queue import QueueKey
from tiered.model.tables import Table
from tiered.object_store.memory import MemoryStore

ONE, TWO, BATCHED = QueueKey("topic", 0, 0), QueueKey("topic", 1, 0), QueueKey("batched", 0, 0)
LMQ = QueueKey("%LMQ%a", 0, 0)


def _archive(cycles: int = 6) -> ArchiveBuilder:
    limits = CatalogLimits(root_every=2)
    builder = ArchiveBuilder(MemoryStore(), limits=limits)
    for cycle in range(cycles):
        messages = [
            Sent(
                queue,
                b"%d" % number * 50,
                None,
                "Tag",
                (f"k{number}", "x"),
                lmq=[LMQ] if number % 3 == 0 else [],
            )
            for number in range(6)
            for queue in (ONE, TWO)
        ]
        messages.append(Sent(BATCHED, b"batch", inner_num=cycle + 1))
        messages.append(Sent(ONE, b"after a gap", offset=100 * cycle + 100))
        builder.commit(messages, as_set=cycle % 2 == 0)
    return builder


def _replace(builder: ArchiveBuilder, key: str, change: Callable[[bytearray], bytearray | None]) -> None:
    data = bytearray(builder.store.get(key))
    changed = change(data) or data
    builder.store.delete([key])
    builder.store.put_if_absent(key, [bytes(changed)])


def _flip(position: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[position] ^= 0x10

    return change


def _kinds(report: VerifyReport) -> set[AnomalyKind]:
    return {anomaly.kind for anomaly in report.anomalies}


@pytest.fixture
def builder() -> ArchiveBuilder:
    return _archive()


@pytest.mark.parametrize("full", [False, True])
def test_a_whole_archive_has_no_anomalies(builder: ArchiveBuilder, full: bool) -> None:
    seen: list[tuple[int, int]] = []
    report = verify_archive(
        builder.store,
        depth="full" if full else "tails",
        progress=lambda done, total: seen.append((done, total)),
    )
    assert (report.anomalies, report.leftovers) == ([], [])
    messages = sum(row.inner_num for truth in builder.truth.values() for row in truth.rows)
    assert report.counts["messages"] == messages
    assert report.counts["objects"] == len(builder.keys)
    assert (report.counts["blocks"] > 0) == full
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("depth", ["names", "tails"])
def test_an_empty_store_is_not_an_archive(depth: Depth) -> None:
    with pytest.raises(NotFoundError):
        verify_archive(MemoryStore(), depth=depth)


def test_what_cannot_be_read_is_counted_and_a_store_that_is_away_ends_the_run() -> None:
    class Away(MemoryStore):
        is_away = False

        def get_range(self, key: str, offset: int, length: int) -> bytes:
            if self.is_away:
                raise UnavailableError("not now")
            return super().get_range(key, offset, length)

    store = Away()
    builder = ArchiveBuilder(store)
    builder.commit([Sent(ONE)])
    store.is_away = True
    report = verify_archive(builder.store)
    assert (report.anomalies, set(report.unchecked)) == ([], set(builder.keys))
    assert "NOT CHECKED" in list(report.lines("title"))[-1]
    store.is_away = False
    for _ in range(UNCHECKED_MAX):
        builder.commit([Sent(ONE)])
    store.is_away = True
    with pytest.raises(UnavailableError, match="in a row"):
        verify_archive(builder.store)


def test_a_killed_pass_reads_few_objects_twice_and_a_sample_reads_some() -> None:
    saved: list[bytes] = []

    class Killed(MemoryStore):
        reads: ClassVar[dict[str, int]] = {}
        left = 1 << 30

        def get_range(self, key: str, offset: int, length: int) -> bytes:
            if key.startswith(("data/", "sets/")) and key not in self.reads:
                self.left -= 1
                if self.left < 0:
                    raise KeyboardInterrupt
            self.reads[key] = self.reads.get(key, 0) + 1
            return super().get_range(key, offset, length)

    store = Killed()
    builder = ArchiveBuilder(store)
    for number in range(60):
        builder.commit([Sent(ONE, b"%d" % number)])
    _replace(builder, builder.keys[3], _flip(20))
    whole = verify_archive(builder.store, depth="full")
    assert len(whole.anomalies) == 1
    once = {key: store.reads[key] for key in builder.keys}
    passes, store.reads = 0, {}
    while True:
        passes, store.left = passes + 1, 15
        try:
            document = saved[-1] if saved else None
            with patch.object(verify_progress, "SAVE_EVERY_S", 0.0):
                progress = VerifyProgress(builder.store.url, document, saved.append)
                report = verify_archive(builder.store, depth="full", saved=progress)
            break
        except KeyboardInterrupt:
            continue
    assert passes == 4 and (report.anomalies, report.counts) == (whole.anomalies, whole.counts)
    twice = [key for key in builder.keys if store.reads[key] > once[key]]
    assert len(twice) <= passes * 2 * READ_THREADS
    store.reads, store.left = {}, 1 << 30
    verify_archive(builder.store, depth="full", sample=0.2)
    assert 2 < len([key for key in builder.keys if key in store.reads]) < 30


def test_a_damaged_deletion_list_and_a_kept_root_are_named() -> None:
    builder = ArchiveBuilder(MemoryStore(), limits=CatalogLimits(root_every=2, spill_deletions=2))
    for _ in range(30):
        builder.commit([Sent(ONE)])
    (listed, *_), (kept, *_) = builder.state.deletion_lists, builder.state.kept_roots
    _replace(builder, listed.key, _flip(-3))
    _replace(builder, kept.key, _flip(-3))
    found = {(anomaly.kind, anomaly.key) for anomaly in verify_archive(builder.store).anomalies}
    assert found == {(AnomalyKind.DELETIONS, listed.key), (AnomalyKind.ROOT, kept.key)}


def test_chain_a_missing_commit(builder: ArchiveBuilder) -> None:
    builder.store.delete([catalog_key(3)])
    (anomaly,) = verify_archive(builder.store).anomalies
    assert (anomaly.kind, anomaly.key) == (AnomalyKind.CHAIN, catalog_key(3))
    assert "version 3 is missing" in str(anomaly)


def test_chain_a_damaged_head(builder: ArchiveBuilder) -> None:
    _replace(builder, catalog_key(builder.state.version), _flip(-60))  # in front of it lies what it carries
    assert _kinds(verify_archive(builder.store)) == {AnomalyKind.CHAIN}


def test_chain_a_commit_of_another_archive(builder: ArchiveBuilder) -> None:
    other = ArchiveBuilder(MemoryStore())
    other.commit([Sent(TWO)])
    stolen = other.store.get(catalog_key(2))
    _replace(builder, catalog_key(2), lambda data: bytearray(stolen))
    assert AnomalyKind.CHAIN in _kinds(verify_archive(builder.store))


def test_page_damaged_or_missing_root(builder: ArchiveBuilder) -> None:
    key = builder.state.root.key
    _replace(builder, key, _flip(70))
    (anomaly,) = verify_archive(builder.store).anomalies
    assert (anomaly.kind, anomaly.key) == (AnomalyKind.ROOT, key), "the chain replaces it, and it is named"
    builder.store.delete([key])
    report = verify_archive(builder.store)
    assert _kinds(report) == {AnomalyKind.MISSING}, "the chain replaces the root"


def test_page_an_older_root_that_is_damaged_is_no_anomaly() -> None:
    """It is no longer needed: an archive with a newer root is clean."""
    builder = _archive(20)
    older = read_commit(builder.store, builder.state.root.version).place.root
    assert older.key in builder.state.pending_deletions, "replaced, and not kept"
    _replace(builder, older.key, _flip(70))
    assert not verify_archive(builder.store, depth="full").anomalies


def test_hole_and_overlap_in_a_queue() -> None:
    state = _archive().state
    memory = state.memory

    def found(runs: Table) -> list[Anomaly]:
        return list(
            check_queues(state, [sorted_page(state.directory.roster.keys, replace(memory, runs=runs))])
        )

    assert found(memory.runs) == []
    run = memory.runs[2]
    (hole,) = found(np.delete(memory.runs, 2))
    assert hole.kind == AnomalyKind.HOLE
    assert hole.range == (run["base_queue_offset"], run["end_queue_offset"])
    assert hole.key.startswith(state.key_of(int(run["queue"])).topic)
    twice = found(np.concatenate([memory.runs, memory.runs[2:3]]))
    assert {anomaly.kind for anomaly in twice} == {AnomalyKind.OVERLAP}


def test_missing_object(builder: ArchiveBuilder) -> None:
    builder.store.delete([builder.keys[1]])
    report = verify_archive(builder.store)
    assert [(anomaly.kind, anomaly.key) for anomaly in report.anomalies] == [
        (AnomalyKind.MISSING, builder.keys[1])
    ]


@pytest.mark.parametrize("depth", ["names", "tails"])
def test_missing_object_that_maintenance_moved_during_the_check_is_no_anomaly(depth: Depth) -> None:
    class Moving(MemoryStore):
        """Before it is read, or listed, the object is replaced, and collected."""

        builder: ArchiveBuilder | None = None

        def move(self) -> None:
            if self.builder is not None:
                builder, self.builder = self.builder, None
                builder.rewrite(ONE)
                builder.store.delete(builder.keys[:1])

        def get_range(self, key: str, offset: int, length: int) -> bytes:
            self.move()
            return super().get_range(key, offset, length)

        def list(self, prefix: str, **place: Any) -> Any:
            if (prefix, depth) == ("data/", "names"):
                self.move()
            return super().list(prefix, **place)

    store = Moving()
    builder = ArchiveBuilder(store)
    builder.commit([Sent(ONE)])
    store.builder = builder
    assert verify_archive(store, depth=depth).anomalies == []
    assert len(builder.keys) == 2


def test_damaged_tail(builder: ArchiveBuilder) -> None:
    _replace(builder, builder.keys[0], _flip(-60))
    assert _kinds(verify_archive(builder.store)) == {AnomalyKind.DAMAGED}


def test_damaged_block_is_seen_only_in_full(builder: ArchiveBuilder) -> None:
    _replace(builder, builder.keys[0], _flip(20))
    assert verify_archive(builder.store).anomalies == []
    (anomaly,) = verify_archive(builder.store, depth="full").anomalies
    assert (anomaly.kind, anomaly.key) == (AnomalyKind.DAMAGED, builder.keys[0])
    assert anomaly.range is not None
    assert anomaly.range[0] <= 20 < anomaly.range[1]


def test_damaged_header(builder: ArchiveBuilder) -> None:
    _replace(builder, builder.keys[0], _flip(9))
    assert _kinds(verify_archive(builder.store, depth="full")) == {AnomalyKind.DAMAGED}


def test_contradiction_of_catalog_and_footer() -> None:
    builder = ArchiveBuilder(MemoryStore())

    def later(runs: Table) -> None:
        runs["max_store_timestamp"] += 1

    builder.doctor_runs = later
    builder.commit([Sent(ONE, b"aaaa")])
    (anomaly,) = verify_archive(builder.store).anomalies
    assert anomaly.kind == AnomalyKind.CONTRADICTION
    assert "max_store_timestamp" in str(anomaly)


@pytest.mark.parametrize("change", ["body", "offset", "keys", "queue"])
def test_record_that_is_not_what_its_row_says(change: str) -> None:
    """A writer's defect: everything is whole and consistent, but the bytes are not those of the row."""
    builder = ArchiveBuilder(MemoryStore())
    builder.doctor = {
        "body": lambda record: record.replace(b"body", b"BODY"),
        "offset": lambda record: record[:27] + b"\x07" + record[28:],
        "keys": lambda record: record.replace(b"KEYS\x01k", b"KEYS\x01j"),
        "queue": lambda record: record[:15] + b"\x09" + record[16:],
    }[change]
    builder.commit([Sent(ONE, b"body", keys=["k1"]) for _ in range(3)])
    assert verify_archive(builder.store).anomalies == []
    assert _kinds(verify_archive(builder.store, depth="full")) == {AnomalyKind.RECORD}


def test_lmq_row_whose_parent_is_nowhere() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.parent_offset_error = 50
    builder.commit([Sent(ONE, lmq=[LMQ])])
    assert _kinds(verify_archive(builder.store)) == {AnomalyKind.LMQ}


def test_lmq_row_whose_parent_expired_is_fine() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(ONE, lmq=[LMQ])])
    builder.commit([Sent(ONE, lmq=[LMQ])])
    builder.expire_first_run(ONE)
    assert verify_archive(builder.store, depth="full").anomalies == []


def test_damaged_state_object() -> None:
    builder = ArchiveBuilder(MemoryStore())
    key = state_key("topics", builder.state.epoch, 1, "abcd")
    builder.store.put_if_absent(key, [encode_state("topics", {"topic": {"readQueueNums": 8}})])
    builder.commit([Sent(ONE)], state_objects={"topics": key})
    assert verify_archive(builder.store).anomalies == []
    for at in range(len(builder.store.get(key))):
        _replace(builder, key, _flip(at))
        assert [(a.kind, a.key) for a in verify_archive(builder.store).anomalies] == [
            (AnomalyKind.DAMAGED, key)
        ]
        _replace(builder, key, _flip(at))
    other = encode_state("subscription_groups", {})
    _replace(builder, key, lambda _: bytearray(other))
    assert _kinds(verify_archive(builder.store)) == {AnomalyKind.DAMAGED}


def test_leftovers_are_no_anomalies(builder: ArchiveBuilder) -> None:
    builder.store.put_if_absent("data/00/topic/0/0/00000000000000000000-1-99.so", [b"abandoned"])
    report = verify_archive(builder.store)
    assert report.anomalies == []
    assert report.leftovers == ["data/00/topic/0/0/00000000000000000000-1-99.so"]


def test_runs_in_pages_are_checked_and_a_lost_page_shows() -> None:
    limits = CatalogLimits(root_every=2, spill_runs=4, page_runs_max=6)
    builder = ArchiveBuilder(MemoryStore(), limits=limits)
    for cycle in range(12):
        builder.commit([Sent(queue, b"%d" % cycle, lmq=[LMQ]) for queue in (ONE, TWO)])
    assert len(builder.state.pages) > 1
    assert verify_archive(builder.store, depth="full").anomalies == []
    page = parse_part_key(builder.state.pages[0].key)
    assert page is not None
    stored = builder.store.get(page.key)
    _replace(builder, page.key, _flip(page.offset + page.length - 1))
    assert _kinds(verify_archive(builder.store)) == {AnomalyKind.PAGE, AnomalyKind.HOLE}
    _replace(builder, page.key, lambda _: bytearray(stored))
    builder.store.delete([page.key])
    assert _kinds(verify_archive(builder.store)) == {AnomalyKind.PAGE, AnomalyKind.HOLE, AnomalyKind.MISSING}


def test_pending_deletions_are_counted_not_leftovers() -> None:
    builder = ArchiveBuilder(MemoryStore())
    builder.commit([Sent(ONE)])
    builder.rewrite(ONE)
    report = verify_archive(builder.store)
    assert (report.anomalies, report.leftovers, report.counts["pending_deletions"]) == ([], [], 1)


BUILDER = _archive(3)
WHOLE = {key: BUILDER.store.get(key) for key in BUILDER.keys}


@settings(max_examples=examples(80))
@given(st.data())
def test_any_flipped_bit_in_any_data_object_is_found_in_full(data: st.DataObject) -> None:
    key = data.draw(st.sampled_from(BUILDER.keys))
    bit = data.draw(st.integers(0, len(WHOLE[key]) * 8 - 1))
    damaged = bytearray(WHOLE[key])
    damaged[bit // 8] ^= 1 << bit % 8
    BUILDER.store.delete([key])
    BUILDER.store.put_if_absent(key, [bytes(damaged)])
    try:
        report = verify_archive(BUILDER.store, depth="full")
    finally:
        BUILDER.store.delete([key])
        BUILDER.store.put_if_absent(key, [WHOLE[key]])
    assert {anomaly.key for anomaly in report.anomalies} == {key}


class FourAtOnce(MemoryStore):
    """A read of one of the versions 5 to 8 returns once all four are requested."""

    def __init__(self, source: MemoryStore) -> None:
        super().__init__()
        self._objects, self._keys = source._objects, source._keys
        self._together = threading.Barrier(4)
        self._waiting = {catalog_key(version) for version in range(5, 9)}

    def get(self, key: str, max_bytes: int = 1 << 30) -> bytes:
        if key in self._waiting:
            self._waiting.discard(key)
            self._together.wait(30)
        return super().get(key, max_bytes)


def test_commits_are_read_side_by_side() -> None:
    assert verify_archive(FourAtOnce(_archive(12).store)).anomalies == []
