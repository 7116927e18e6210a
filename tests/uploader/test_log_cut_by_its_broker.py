"""A log that its broker cut, with stale records still in the files: the broker's offsets says so, bytes do not."""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace as replaced
from pathlib import Path

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from rocketmq_tiered.maintenance.compaction_plan import CompactionLimits
from rocketmq_tiered.maintenance.compaction_round import plan_rounds, run_round
from tests.archive.queue_reader import QueueReader, records_of
from tests.catalog.collection import run_gc
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.uploader.living_broker import LivingBroker, offloader_of
from tiered.archive.rewrite.result import RewriteOptions
from tiered.archive.segment_reader import SegmentCache
from tiered.archive.verify import verify_archive
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.hidden_history import history_state
from tiered.catalog.pages import RunIndex
from tiered.clock import Clock
from tiered.formats.keys import archive_prefix
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.follow_loop import BrokerRestartedError
from uploader.offload import Offloader

pytestmark = pytest.mark.integration

MESSAGES, KEPT, AFTER = 8_000, 3_601, 1_200
SPEC = StoreSpec(topics=2, queues_per_topic=2, body_bytes=200)
RECORD = SPEC.record_bytes


@pytest.fixture
def cut(tmp_path: Path) -> Iterator[tuple[Path, MemoryStore, LivingBroker]]:
    """An archive of 8,000 messages, and the same store after its broker, started again as the slave of another
    master, has cut its log to 3,601 of them; nothing is overwritten yet."""
    write_store(tmp_path / "store", SPEC, messages=MESSAGES)
    memory = MemoryStore("memory://cut")
    backfill(tmp_path / "store", memory)
    broker = LivingBroker(tmp_path / "store")
    broker.end_phys = KEPT * RECORD
    yield tmp_path / "store", memory, broker
    broker.close()


def overwrite(store: Path, broker: LivingBroker, tmp_path: Path) -> None:
    """1,200 other messages come; behind them stale ones stand as before."""
    write_store(tmp_path / "other", replaced(SPEC, seed=2), messages=KEPT + AFTER)
    (old,), (new,) = (
        CommitLog([store / "commitlog"]).files,
        CommitLog([tmp_path / "other" / "commitlog"]).files,
    )
    data = new.path.read_bytes()[KEPT * RECORD : (KEPT + AFTER) * RECORD]
    with old.path.open("r+b") as opened:
        opened.seek(KEPT * RECORD)
        opened.write(data)
    shutil.rmtree(tmp_path / "other")
    broker.end_phys = (KEPT + AFTER) * RECORD


def archive_the_rest(directory: Path, memory: MemoryStore, broker: LivingBroker) -> None:
    with open_broker_store(directory) as store:
        offloader_of(store, memory, broker).run(threading.Event(), follow=False)


def assert_archive_equals_the_log(store: Path, memory: MemoryStore, messages: int) -> None:
    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    state, segments, run_index = load(archive), SegmentCache(archive), RunIndex(archive)
    log = CommitLog([store / "commitlog"])
    found = 0
    for queue in state.visible_queues():
        reader = QueueReader(archive, state, queue, segments=segments, run_index=run_index)
        assert reader.min_offset == 0
        for _, phys, record in records_of(reader):
            assert record == log.read(phys, len(record)), f"{queue} at {phys}"
            found += 1
    assert found == messages
    assert verify_archive(archive, depth="full").anomalies == []


def test_what_came_after_the_cut_is_archived(
    cut: tuple[Path, MemoryStore, LivingBroker], tmp_path: Path
) -> None:
    directory, memory, broker = cut
    overwrite(directory, broker, tmp_path)
    archive_the_rest(directory, memory, broker)
    assert_archive_equals_the_log(directory, memory, KEPT + AFTER)


def test_what_compaction_joined_is_cut_as_the_log_is(
    cut: tuple[Path, MemoryStore, LivingBroker], tmp_path: Path
) -> None:
    directory, memory, broker = cut
    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    before = load(archive)
    limits = CompactionLimits()
    options = RewriteOptions(tmp_path / "spool", 1 << 30)
    planned = next(plan_rounds(archive, before, limits, before_version=1 << 40))
    assert run_round(archive, before, planned, options, clock=Clock(wall_ms=archive.clock_ms)) is not None
    joined = load(archive)
    overwrite(directory, broker, tmp_path)
    archive_the_rest(directory, memory, broker)
    assert_archive_equals_the_log(directory, memory, KEPT + AFTER)
    state = load(archive)
    (history,) = state.log_histories
    assert history.begin_phys == KEPT * RECORD
    run_gc(archive, state, apply=True, grace_ms=0, diverged_grace_ms=1 << 40, clock=archive.clock_ms)
    superseded = history_state(archive, load(archive), 1)
    for queue in joined.visible_queues():
        old = QueueReader(archive, superseded, queue)
        row = joined.queue(queue)
        assert row is not None and old.max_offset == row["end_queue_offset"]
        batch = old.read(old.min_offset, max_rows=100_000, max_bytes=1 << 30)
        assert len(batch) == old.max_offset - old.min_offset
        assert batch.phys[0] >= history.begin_phys
    assert_archive_equals_the_log(directory, memory, KEPT + AFTER)


def test_a_broker_that_tells_only_later_is_believed_then(
    cut: tuple[Path, MemoryStore, LivingBroker], tmp_path: Path
) -> None:
    """At the start it does not answer: nothing is uploaded. Its first offsets makes following start again."""
    directory, memory, broker = cut
    overwrite(directory, broker, tmp_path)
    broker.answers = False

    def answer() -> None:
        broker.answers = True

    assert "but was read up to" in followed(directory, memory, broker, answer)
    archive_the_rest(directory, memory, broker)
    assert_archive_equals_the_log(directory, memory, KEPT + AFTER)


def test_a_log_that_only_grew_keeps_its_history(cut: tuple[Path, MemoryStore, LivingBroker]) -> None:
    directory, memory, broker = cut
    broker.end_phys = MESSAGES * RECORD
    line = load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).cursor.history
    archive_the_rest(directory, memory, broker)
    assert load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).cursor.history == line
    assert_archive_equals_the_log(directory, memory, MESSAGES)


def followed(directory: Path, memory: MemoryStore, broker: LivingBroker, during: Callable[[], None]) -> str:
    """Follow; once everything is archived do ``during``. What ends following."""
    failures: list[BaseException] = []
    stop = threading.Event()

    def run(following: Offloader) -> None:
        try:
            following.run(stop, follow=True)
        except BrokerRestartedError as error:
            failures.append(error)

    with open_broker_store(directory) as store:
        following = offloader_of(store, memory, broker)
        thread = threading.Thread(target=run, args=(following,))
        thread.start()
        while (status := following.status()) is None or status.bound_phys == 0:
            assert thread.is_alive()
            time.sleep(0.002)
        during()
        thread.join(20)
        stop.set()
        thread.join(20)
    return str(failures[0])


def test_a_broker_that_cuts_its_log_as_it_runs_is_noticed_while_nothing_comes(
    cut: tuple[Path, MemoryStore, LivingBroker], tmp_path: Path
) -> None:
    """One that becomes a slave is not started again; what comes next stands below what was read."""
    directory, memory, broker = cut
    broker.end_phys = MESSAGES * RECORD
    said = followed(directory, memory, broker, lambda: overwrite(directory, broker, tmp_path))
    assert "but was read up to" in said
    archive_the_rest(directory, memory, broker)
    assert_archive_equals_the_log(directory, memory, KEPT + AFTER)


def test_a_log_that_grew_beyond_its_cut_is_another_one(
    cut: tuple[Path, MemoryStore, LivingBroker], tmp_path: Path
) -> None:
    directory, memory, broker = cut
    broker.end_phys = MESSAGES * RECORD

    def replace() -> None:
        write_store(tmp_path / "other", replaced(SPEC, seed=2), messages=MESSAGES + AFTER)
        (old,), (new,) = (CommitLog([root / "commitlog"]).files for root in (directory, tmp_path / "other"))
        data = new.path.read_bytes()
        broker.end_phys = (MESSAGES + AFTER) * RECORD
        with old.path.open("r+b") as opened:
            opened.seek(KEPT * RECORD)
            opened.write(data[KEPT * RECORD : broker.end_phys])

    assert "has other bytes than were read of it" in followed(directory, memory, broker, replace)
    archive_the_rest(directory, memory, broker)
    assert_archive_equals_the_log(directory, memory, MESSAGES + AFTER)
