"""A log that is not the one the archive was made from: another broker's, that of a new disk, an older copy.

Why offsets are missing, as earlier processes recorded it: only what they skipped behind a queue's last record.

What a backfill hides: queues of deleted topics, never those that the broker has merely expired or lost.

A broker is started on a store during its backfill: what it appends is archived only below its confirm offset.
"""

import json
import shutil
import struct
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from tests.broker_store.opened_store import consume_queues_of
from tests.broker_store.record_bytes import BLANK_MAGIC, rocksdb_queues
from tests.catalog.collection import run_gc
from tests.catalog.drafts import append_draft, queue
from tests.end_to_end.offloading import (
    BROKER,
    CLUSTER,
    FILTER,
    SMALL,
    archive_of,
    backfill,
    following,
    state_of,
)
from tests.object_store.fault_store import FaultStore
from tests.sweeps import sweep
from tests.uploader.halved_log import halved_log
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.conf import broker_conf
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.pages import RunIndex, living_runs
from tiered.catalog.state import CatalogState, LogCheck
from tiered.clock import Clock
from tiered.errors import LogDivergedError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.model.tables import GapReason
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.bound_source import no_offsets
from uploader.log_batch import DamagedRange, LogBatch, LostRange
from uploader.log_rule import LogLimits
from uploader.offload import Environment, Offloader, OffloadIdentity
from uploader.skipped_log import DAMAGED, SkippedLog, skipped_settings

MESSAGES = 4_000
FILES_GONE = 2
SPEC = StoreSpec(topics=2, queues_per_topic=2, body_bytes=200, file_bytes=256 << 10)
SETTINGS = replace(SMALL, batch_bytes=64 << 10, split_bytes=16 << 10, block_bytes=4 << 10, batch_age_ms=50)
COMMITS = 1_000


@pytest.fixture
def memory(tmp_path: Path) -> MemoryStore:
    """What is archived of ``tmp_path / "own"``."""
    write_store(tmp_path / "own", SPEC, messages=MESSAGES)
    memory = MemoryStore("memory://replaced-log")
    backfill(tmp_path / "own", memory, settings=SETTINGS)
    return memory


def data_keys(memory: MemoryStore, state: CatalogState) -> set[str]:
    pages = living_runs(RunIndex(archive_of(memory)), state)
    return {key for page in pages for key in page.chunk.object_keys}


def another_log(directory: Path, messages: int, files_gone: int = 0) -> Path:
    write_store(directory, replace(SPEC, seed=2), messages=messages)
    for file in CommitLog([directory / "commitlog"]).files[:files_gone]:
        file.path.unlink()
    return directory


def follow_a_while(
    directory: Path, memory: MemoryStore, limits: LogLimits | None = None, *, has_messages: bool = True
) -> None:
    """Until messages are committed; ``has_messages=False``: a log history."""
    before = len(state_of(memory).log_histories)

    def has_another_history() -> bool:
        return not has_messages and len(state_of(memory).log_histories) > before

    with open_broker_store(directory) as store:
        offloader = Offloader(
            store,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            SETTINGS,
            topic_filter=FILTER,
            offsets_source=no_offsets,
            log_limits=limits,
        )
        with following(offloader) as reached:
            status = reached(lambda status: status.counters.messages or has_another_history())
        assert has_another_history() or (status is not None and status.counters.messages)


@pytest.mark.parametrize("instance", ["test", "another host"])
def test_an_older_copy_takes_nothing_out(memory: MemoryStore, tmp_path: Path, instance: str) -> None:
    before = load(archive_of(memory))
    write_store(tmp_path / "copy", SPEC, messages=MESSAGES * 2 // 5)
    with pytest.raises(LogDivergedError, match=r"an older copy.*--replace-log"):
        backfill(tmp_path / "copy", memory, settings=SETTINGS, instance=instance)
    assert load(archive_of(memory)).version == before.version


def test_a_run_beside_a_much_shorter_log_stops_and_one_beside_a_little_shorter_continues(
    memory: MemoryStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive = archive_of(memory)
    before = load(archive)
    write_store(tmp_path / "copy", SPEC, messages=MESSAGES * 2 // 5)
    with open_broker_store(tmp_path / "copy") as store:
        lost_bytes = before.cursor.phys - store.commit_log.max_file_end
    with open_broker_store(tmp_path / "copy") as store:
        offloader = Offloader(
            store,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            SETTINGS,
            topic_filter=FILTER,
            offsets_source=no_offsets,
            log_limits=LogLimits(truncate_max_bytes=lost_bytes // 2),
        )
        with pytest.raises(LogDivergedError, match=r"more than .*archive.replace_log"):
            offloader.run(threading.Event(), follow=True)
    after = load(archive)
    assert after.version == before.version, "a retry each half minute claims no epoch"
    follow_a_while(tmp_path / "copy", memory, has_messages=False)
    after = load(archive)
    assert [history.common_version > 0 for history in after.log_histories] == [True]
    assert any("are hidden; " in record.getMessage() for record in caplog.records)
    reasons = {pending.reason for pending in after.pending_deletions.values()}
    assert "diverged" in reasons
    gone = {key for key, pending in after.pending_deletions.items() if pending.reason == "diverged"}
    for grace_ms, stays in ((1 << 40, True), (0, False)):
        run_gc(
            archive, load(archive), apply=True, grace_ms=0, diverged_grace_ms=grace_ms, clock=archive.clock_ms
        )
        left = {info.key for prefix in ("data/", "sets/") for info in archive.list(prefix)}
        assert (gone <= left) == stays


def test_padding_where_the_archive_ends_is_a_different_continuation(tmp_path: Path) -> None:
    """Its records did not fit there: a broker that was restored from a copy, and used."""
    write_store(tmp_path / "own", SPEC, messages=MESSAGES)
    first, *others = CommitLog([tmp_path / "own" / "commitlog"]).files
    for file in others:
        file.path.unlink()
    memory = MemoryStore("memory://padding")
    backfill(tmp_path / "own", memory, settings=SETTINGS)
    end_phys = load(archive_of(memory)).cursor.check.end_phys
    room = 2 * SPEC.record_bytes + first.end_phys - end_phys
    data = first.path.read_bytes()[:-room] + struct.pack(">iI", room, BLANK_MAGIC)
    first.path.write_bytes(data.ljust(first.size_bytes, b"\0"))
    backfill(tmp_path / "own", memory, settings=SETTINGS)
    state = load(archive_of(memory))
    assert state.cursor.history == 2 and state.cursor.check.end_phys == end_phys - 2 * SPEC.record_bytes
    assert (
        sum(int(row["row_count"]) for _, row in state.queues())
        == (first.size_bytes - room) // SPEC.record_bytes
    )


@pytest.mark.parametrize("files_gone", sweep([0, FILES_GONE], fast=[FILES_GONE]))
@pytest.mark.parametrize("messages", [MESSAGES // 2, MESSAGES * 3 // 2])
def test_another_brokers_log_is_refused_also_when_its_first_files_are_gone(
    memory: MemoryStore, tmp_path: Path, messages: int, files_gone: int
) -> None:
    before = load(archive_of(memory))
    other = another_log(tmp_path / "other", messages, files_gone)
    with pytest.raises(LogDivergedError, match=r"another broker's.*--replace-log"):
        backfill(other, memory, settings=SETTINGS)
    assert load(archive_of(memory)).version == before.version


def test_beside_a_broker_that_lost_its_disk_what_is_archived_stays(
    memory: MemoryStore, tmp_path: Path
) -> None:
    """Its new log has lost its first files already, as the archive's old one had: that makes it no continuation."""
    archive = archive_of(memory)
    before = data_keys(memory, load(archive))
    other = another_log(tmp_path / "other", MESSAGES * 3 // 2, FILES_GONE)
    follow_a_while(other, memory, LogLimits(replace_log=True))
    after = load(archive)
    assert [line.common_version for line in after.log_histories] == [0]
    assert after.visible_queues()
    run_gc(archive, after, apply=True, grace_ms=0, clock=archive.clock_ms)
    assert before <= {info.key for prefix in ("data/", "sets/") for info in archive.list(prefix)}


def test_long_history_costs_a_new_disk_few_requests(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(real_store("F") / "store", tmp_path / "store")
    memory = MemoryStore("memory://long-history")
    before = CatalogWriter(
        archive_of(memory),
        cluster=CLUSTER,
        broker=BROKER,
        instance="test",
        kind="run",
        clock=Clock(wall_ms=lambda: 1),
    )
    before.claim()
    for _ in range(COMMITS):
        draft = append_draft(before.state, {queue("q"): 1})
        before.append(replace(draft, check=LogCheck(draft.to_phys - 100, draft.to_phys, 12345)))
    before.release()
    counted = FaultStore(memory)
    with open_broker_store(tmp_path / "store") as store:
        offloader = Offloader(
            store,
            counted,
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            SETTINGS,
            topic_filter=FILTER,
            offsets_source=no_offsets,
            log_limits=LogLimits(replace_log=True),
        )
        assert offloader._owner.open(claim_now=True) == 0
    operations = Counter(request.operation for request in counted.requests)
    assert operations.total() < COMMITS // 10, operations


def state_after(batch: LogBatch, *, line: int = 1) -> CatalogState:
    return replace(CatalogState(), settings=skipped_settings(batch, line))


def test_only_what_was_skipped_behind_a_queues_last_record_is_a_reason() -> None:
    batch = LogBatch(1 << 16)
    assert skipped_settings(batch, 1) == {}
    assert SkippedLog.of(state_after(batch)) == SkippedLog()
    batch.damaged += [DamagedRange(100, 200, "", ""), DamagedRange(300, 400, "", "")]
    batch.lost += [LostRange(500, 600, "no commitlog file has this range: the broker has deleted it")]
    skipped = SkippedLog.of(state_after(batch))
    assert skipped == SkippedLog(400, 600)
    assert skipped.reason(300) is GapReason.DAMAGED
    assert skipped.reason(450) is GapReason.BROKER_DELETED
    assert skipped.reason(600) is GapReason.NEVER_WRITTEN


def test_physical_offsets_of_another_log_history_say_nothing() -> None:
    batch = LogBatch(1 << 16)
    batch.damaged += [DamagedRange(100, 200, "", "")]
    assert SkippedLog.of(state_after(batch, line=2)) == SkippedLog()


@pytest.mark.parametrize("value", [None, 3, [1], [1, "x"], {"a": 1}])
def test_impossible_values_are_ignored(value: object) -> None:
    assert SkippedLog.of(replace(CatalogState(), settings={DAMAGED: value})) == SkippedLog()


def without_units(store: Path, queue: QueueKey) -> None:
    """What mqadmin cleanExpiredCQ, RocksDB's compaction filter and deleting a topic all come to."""
    shutil.rmtree(store / "consumequeue" / queue.topic / str(queue.queue_id), ignore_errors=True)


def without_topic(store: Path, topic: str) -> None:
    """What deleting a topic does to the broker's table."""
    for path in (store / "config").glob("topics.json*"):
        document = json.loads(path.read_text("utf-8"))
        document["topicConfigTable"].pop(topic, None)
        path.write_text(json.dumps(document), "utf-8")


def test_a_queue_that_the_broker_has_expired_stays_visible_and_a_deleted_one_does_not(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("G") / "store", store)
    memory = MemoryStore("memory://expired")
    backfill(store, memory)
    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    before = load(archive)
    visible = set(before.visible_queues())
    log = CommitLog([store / "commitlog"])
    for file in log.files[:-1]:
        file.path.unlink()
    last = log.files[-1].begin_phys
    expired = {key for key, row in before.queues() if key in visible and row["end_phys"] <= last}
    assert len(expired) > 20
    deleted = max(visible - expired)
    for gone in (*expired, deleted):
        without_units(store, gone)
    without_topic(store, deleted.topic)

    assert backfill(store, memory).hidden == 1
    assert set(load(archive).visible_queues()) == visible - {deleted}


def test_a_queue_that_lost_its_files_is_missing_and_one_hidden_by_mistake_is_shown_again(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    """A topic in the broker's table is not deleted, whatever became of its consume queue."""
    store, memory = tmp_path / "store", MemoryStore("memory://lost")
    shutil.copytree(real_store("B") / "store", store)
    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    shutil.move(store / "consumequeue" / "t_one", tmp_path / "t_one")
    lost = backfill(store, memory)
    visible = load(archive).visible_queues()
    assert (lost.hidden, lost.missing, lost.shown_again) == (3, 1, 0)  # three queues of deleted topics
    assert "t_one" in {queue.topic for queue in visible}

    topics = (store / "config" / "topics.json").read_bytes()
    without_topic(store, "t_one")
    assert backfill(store, memory).hidden == 1
    assert "t_one" not in {queue.topic for queue in load(archive).visible_queues()}

    (store / "config" / "topics.json").write_bytes(topics)
    without_its_queue = backfill(store, memory)
    assert (without_its_queue.hidden, without_its_queue.shown_again) == (0, 0)
    shutil.move(tmp_path / "t_one", store / "consumequeue" / "t_one")
    assert backfill(store, memory).shown_again == 1
    assert load(archive).visible_queues() == visible


@pytest.mark.parametrize("store_type", ["default", "defaultRocksDB"])
def test_queues_with_units_in_files_only_are_not_hidden_by_a_rocksdb_beside_them(
    tmp_path: Path, store_type: str
) -> None:
    """A broker that writes both kinds has not dispatched again to RocksDB what was there before."""
    spec = StoreSpec(topics=2, queues_per_topic=2, body_bytes=200)
    write_store(tmp_path / "store", spec, messages=400)
    with open_broker_store(tmp_path / "store") as store:
        index = consume_queues_of(store)
        queues = sorted(index.shown())
        end_phys = index.frontier_phys()
    last = (end_phys - spec.record_bytes, spec.record_bytes)
    rocksdb_queues(tmp_path / "store" / "consumequeue", {queues[-1]: [last]}, first=99)
    memory = MemoryStore("memory://both-kinds")
    conf = broker_conf({"storeType": store_type, "rocksdbCQDoubleWriteEnable": "true"})
    assert backfill(tmp_path / "store", memory, conf=conf).hidden == 0
    visible = load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).visible_queues()
    assert sorted((key.topic, key.queue_id) for key in visible) == queues


def test_a_backfill_takes_nothing_that_a_broker_appends(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    memory = MemoryStore("memory://started")
    with (
        halved_log(real_store("A"), tmp_path / "store") as (broker, end_phys),
        open_broker_store(tmp_path / "store") as store,
        pytest.raises(UnavailableError, match="a broker was started"),
    ):
        Offloader(
            store,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", "backfill"),
            SMALL,
            topic_filter=FILTER,
            offsets_source=no_offsets,
            environment=Environment(committed=lambda _: broker.start()),
        ).run(threading.Event(), follow=False)
    assert 0 < load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).cursor.phys <= end_phys
