"""A bulk backfill makes the same archive as ``tiered backfill``, even if driver or tasks are killed."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from rocketmq_tiered.spark.jobs.backfill import backfill
from rocketmq_tiered.spark.jobs.backfill_options import BackfillOptions, StoreToBackfill
from rocketmq_tiered.spark.jobs.backfill_tasks import PutTask, ScanTask
from tests.bad_input.stale_checksum import copy_with_stale_checksum
from tests.broker_store.record_bytes import BLANK_MAGIC, log_file, queue_file, record, unit
from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL
from tests.end_to_end.offloading import backfill as backfill_alone
from tests.spark.jobs.backfill_runs import NO_SPARK, OPTIONS, own_archive, run, truth_of
from tests.spark.jobs.inline_tasks import InlineTasks
from tests.sweeps import sweep
from tests.uploader.damaged_headers import QUEUE_ID, QUEUE_OFFSET, flip
from tests.uploader.halved_log import halved_log
from tiered.archive.verify import verify_archive
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, FencedError, NotFoundError, UnavailableError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey, TopicFilter
from tiered.model.tables import GapReason
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.skipped_log import SkippedLog

pytestmark = pytest.mark.integration

if TYPE_CHECKING:
    pass

LOG_FILE_BYTES = 4096
RealStore = Callable[[str], Path]


@pytest.mark.parametrize("name", sweep(["C", "F", "G", "K"], fast=["C", "K"], rest="integration"))
def test_archive_equals_that_of_a_single_process_backfill(
    name: str, real_store: RealStore, tmp_path: Path
) -> None:
    directory = real_store(name)
    report = run(directory / "store", tmp_path / "bulk")
    single = backfill_alone(directory / "store", FileStore(tmp_path / "single"))
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")
    assert (report.messages, report.raw_bytes, report.hidden) == (
        single.messages, single.raw_bytes, single.hidden,
    )  # fmt: skip
    assert check_against_truth(FileStore(tmp_path / "bulk"), directory, name) > 400
    found = verify_archive(own_archive(tmp_path / "bulk"), full=True)
    assert (found.anomalies, found.leftovers) == ([], [])
    again = run(directory / "store", tmp_path / "bulk")
    assert (again.messages, again.commits) == (0, 0)


@pytest.mark.parametrize("batch_bytes", [SMALL.batch_bytes, 256])
@pytest.mark.parametrize("name", ["L", "M", "N"])
def test_lmqs_equal_those_of_a_single_process_backfill(
    name: str, batch_bytes: int, real_store: RealStore, tmp_path: Path
) -> None:
    """Although cycles are scanned without the previous ends of their queues."""
    store, topics = real_store(name) / "store", TopicFilter(include_system=True)
    settings = replace(SMALL, batch_bytes=batch_bytes)
    run(store, tmp_path / "bulk", options=BackfillOptions(settings=settings, topics=topics))
    backfill_alone(store, FileStore(tmp_path / "single"), topic_filter=topics, settings=settings)
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")
    assert verify_archive(own_archive(tmp_path / "bulk"), full=True).anomalies == []


def test_record_with_a_stale_checksum_is_no_damage(real_store: RealStore, tmp_path: Path) -> None:
    copy_with_stale_checksum(real_store("B"), tmp_path / "store")
    report = run(tmp_path / "store", tmp_path / "bulk")
    assert report.damaged == 0
    backfill_alone(tmp_path / "store", FileStore(tmp_path / "single"))
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")


def copy_with_flips(
    real_store: RealStore, tmp_path: Path, flips: Sequence[tuple[int, int]]
) -> tuple[Path, str]:
    """A copy of store B with a bit flipped in records of its longest queue, and the topic of that: (percent of the
    queue, byte of the record)."""
    store = tmp_path / "store"
    shutil.copytree(real_store("B") / "store", store)
    lines = max(load_truth(real_store("B"), "B", FILTER).queues.values(), key=len)
    log = CommitLog([store / "commitlog"])
    for percent, at in flips:
        flip(log, lines[len(lines) * percent // 100], at, 1)
    return store, lines[0]["topic"]


def test_records_that_consume_queues_contradict_are_damage(real_store: RealStore, tmp_path: Path) -> None:
    store, _ = copy_with_flips(real_store, tmp_path, [(20, QUEUE_ID[0] + 3), (50, QUEUE_OFFSET[0] + 7)])
    report = run(store, tmp_path / "bulk")
    backfill_alone(store, FileStore(tmp_path / "single"))
    assert report.damaged == 2
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")


def test_excluded_records_are_the_same_with_a_topic_filter(real_store: RealStore, tmp_path: Path) -> None:
    """A scan has the first rows of each queue before the topic filter decides, so row numbers differ between scans."""
    flips = [(percent, QUEUE_ID[0] + 3) for percent in (20, 50, 80)]
    store, topic = copy_with_flips(real_store, tmp_path, flips)
    topics = TopicFilter(include=(topic,))
    report = run(store, tmp_path / "bulk", options=replace(OPTIONS, topics=topics))
    backfill_alone(store, FileStore(tmp_path / "single"), topic_filter=topics, settings=SMALL)
    assert report.damaged == 3
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")
    assert verify_archive(own_archive(tmp_path / "bulk"), full=True).anomalies == []


def test_a_broker_started_during_the_backfill_ends_it(real_store: RealStore, tmp_path: Path) -> None:
    with (
        halved_log(real_store("A"), tmp_path / "store") as (broker, end_phys),
        pytest.raises(UnavailableError, match="a broker was started"),
    ):
        run(
            tmp_path / "store",
            tmp_path / "bulk",
            InlineTasks(lambda task: broker.start() if isinstance(task, PutTask) else None),
        )
    assert load(own_archive(tmp_path / "bulk")).cursor.phys <= end_phys


def test_cycles_are_uploaded_out_of_order_and_committed_in_order(
    real_store: RealStore, tmp_path: Path
) -> None:
    seen: list[tuple[str, int]] = []

    def note(task: object) -> None:
        part = cast("PutTask | ScanTask", task).part
        seen.append((type(task).__name__, part.from_phys))

    run(real_store("B") / "store", tmp_path, InlineTasks(note, parallelism=3))
    puts = [phys for kind, phys in seen if kind == "PutTask"]
    assert len(puts) > 5
    assert len(set(puts)) == len(puts)
    assert sum(kind == "ScanTask" for kind, _ in seen) > 1


@pytest.mark.parametrize("dies_at", sweep([0, 1, 4, 7], fast=[1, 7]))
def test_backfill_continues_after_the_driver_is_killed_anywhere(
    dies_at: int, real_store: RealStore, tmp_path: Path
) -> None:
    """To the archive, an uncaught exception equals kill -9: nothing is released or cleaned up."""
    left = [dies_at]

    def die(task: object) -> None:
        left[0] -= isinstance(task, PutTask)
        if left[0] < 0:
            raise KeyboardInterrupt

    store = real_store("B") / "store"
    with pytest.raises(KeyboardInterrupt):
        run(store, tmp_path / "bulk", InlineTasks(die, parallelism=1))
    report = run(store, tmp_path / "bulk")
    assert report.messages > 0
    backfill_alone(store, FileStore(tmp_path / "single"))
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")
    found = verify_archive(own_archive(tmp_path / "bulk"), full=True)
    assert found.anomalies == []
    epochs = {int(key.rsplit("-", 2)[1]) for key in found.leftovers if key.endswith("so")}
    assert all(epoch < load(own_archive(tmp_path / "bulk")).epoch for epoch in epochs), "garbage GC finds"


def test_a_repeated_task_uses_new_keys(
    real_store: RealStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spark repeats a task that died after its PUT."""
    numbers = iter(range(0, 10**9, 1000))
    monkeypatch.setattr("rocketmq_tiered.spark.jobs.backfill_cycles.attempt_number", lambda: next(numbers))

    class Twice(InlineTasks):
        def run(self, work: Any, tasks: Any, label: str) -> Any:
            super().run(work, tasks, label)
            return super().run(work, tasks, label)

    run(real_store("B") / "store", tmp_path / "bulk", Twice())
    backfill_alone(real_store("B") / "store", FileStore(tmp_path / "single"))
    assert truth_of(tmp_path / "bulk") == truth_of(tmp_path / "single")
    found = verify_archive(own_archive(tmp_path / "bulk"), full=True)
    assert found.anomalies == []
    assert len(found.leftovers) > 5


def test_a_writer_that_has_not_released_its_epoch_is_not_fenced(
    real_store: RealStore, tmp_path: Path
) -> None:
    archive = own_archive(tmp_path)
    sidecar = CatalogWriter(
        archive, cluster=CLUSTER, broker=BROKER, instance="sidecar", kind="run", clock_ms=lambda: 1
    )
    sidecar.claim()
    before = [info.key for info in archive.list("")]
    with pytest.raises(FencedError, match="sidecar"):
        run(real_store("B") / "store", tmp_path)
    assert [info.key for info in archive.list("")] == before, "not one object was put"


def test_a_fenced_backfill_stops_and_its_data_stays_invisible(real_store: RealStore, tmp_path: Path) -> None:
    store = real_store("B") / "store"
    puts = []

    def fence(task: object) -> None:
        if isinstance(task, PutTask):
            puts.append(task)
            if len(puts) == 5:
                other = CatalogWriter(
                    own_archive(tmp_path), cluster=CLUSTER, broker=BROKER, instance="other", kind="run",
                    clock_ms=lambda: 1,
                )  # fmt: skip
                other.claim(take_over=True)

    with pytest.raises(FencedError):
        run(store, tmp_path, InlineTasks(fence, parallelism=1))
    state = load(own_archive(tmp_path))
    assert state.owner is not None
    assert (state.owner.instance, state.epoch) == ("other", 2)
    assert verify_archive(own_archive(tmp_path), full=True).anomalies == []


def test_damage_and_a_missing_file_become_the_same_gaps_as_in_a_single_process_backfill(
    real_store: RealStore, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("A") / "store", store)
    files = sorted((store / "commitlog").iterdir())
    assert len(files) > 4
    with files[1].open("r+b") as file:
        file.seek(300_000)
        file.write(b"\xa5" * 5_000)
    files[3].unlink()
    report = run(store, tmp_path / "bulk")
    single = backfill_alone(store, FileStore(tmp_path / "single"))
    assert (report.damaged, report.lost, report.gaps) == (single.damaged, single.lost, single.gaps)
    assert report.damaged == 1
    assert report.lost == 1
    assert report.gaps > 5
    bulk, one = truth_of(tmp_path / "bulk"), truth_of(tmp_path / "single")
    assert bulk["queues"] == one["queues"]
    for queue, gaps in bulk["gaps"].items():
        # A cycle that holds both damage and a missing file names one reason; cycles may be cut elsewhere.
        assert [gap[1:] for gap in gaps] == [gap[1:] for gap in one["gaps"][queue]]


def test_scan_and_upload_agree_on_a_cycle_that_ends_with_a_damaged_size(tmp_path: Path) -> None:
    """The damaged size reaches beyond the cycle, and only later bytes disprove it."""
    store, settings = tmp_path / "store", replace(SMALL, batch_bytes=1000)
    bodies = [b"a", b"b" * 200, b"c" * 3000, b"d"]
    data, units = b"", b""
    for number, body in enumerate(bodies):
        units += unit(len(data), len(record(0, body)))
        data += record(len(data), body, queue_offset=number)
    damaged = bytearray(data)
    struct.pack_into(">i", damaged, len(record(0, bodies[0])), 1000)
    log_file(store / "commitlog", 0, bytes(damaged), 2 * LOG_FILE_BYTES)
    queue_file(store, "t", 0, units)
    report = run(store, tmp_path / "bulk", options=BackfillOptions(settings=settings))
    single = backfill_alone(store, FileStore(tmp_path / "single"), settings=settings)
    assert (report.messages, report.damaged) == (single.messages, single.damaged) == (3, 1)
    bulk, one = truth_of(tmp_path / "bulk"), truth_of(tmp_path / "single")
    assert {**bulk, "tables": one["tables"]} == one


def write_log_file(store: Path, number: int, messages: Sequence[tuple[str, int]]) -> Path:
    """A commitlog file of (topic, queue offset)."""
    begin, data = number * LOG_FILE_BYTES, b""
    for topic, queue_offset in messages:
        data += record(begin + len(data), topic=topic, queue_offset=queue_offset)
    data += struct.pack(">iI", LOG_FILE_BYTES - len(data), BLANK_MAGIC)
    return log_file(store / "commitlog", begin, data, LOG_FILE_BYTES)


@pytest.mark.parametrize("first_is_bulk", [True, False])
@pytest.mark.parametrize("second_is_bulk", [True, False])
def test_a_later_backfill_records_the_reason_of_missing_messages(
    first_is_bulk: bool, second_is_bulk: bool, tmp_path: Path
) -> None:
    """A queue has records in a missing file and in a later one."""
    store = tmp_path / "store"
    (store / "consumequeue").mkdir(parents=True)

    def archive(is_bulk: bool) -> CatalogState:
        if is_bulk:
            run(store, tmp_path / "archive")
        else:
            backfill_alone(store, FileStore(tmp_path / "archive"), instance="another process")
        return load(own_archive(tmp_path / "archive"))

    write_log_file(store, 0, [("often", 0), ("rare", 0)])
    write_log_file(store, 2, [("often", 2), ("often", 3)])
    state = archive(first_is_bulk)
    assert SkippedLog.of(state) == SkippedLog(0, 2 * LOG_FILE_BYTES)
    assert [key.topic for key in state.visible_queues() if len(state.gaps_of(key))] == ["often"]
    write_log_file(store, 3, [("often", 4), ("rare", 2)])
    state = archive(second_is_bulk)
    (gap,) = state.gaps_of(QueueKey("rare", 0, 0))
    assert GapReason(int(gap["reason"])) is GapReason.BROKER_DELETED


@pytest.mark.integration
def test_later_messages_are_added_to_the_same_queues(real_store: RealStore, tmp_path: Path) -> None:
    """First some files of the store, then all."""
    store = tmp_path / "store"
    shutil.copytree(real_store("A") / "store", store)
    for file in sorted((store / "commitlog").iterdir())[3:]:
        file.unlink()
    first = run(store, tmp_path / "bulk")
    second = run(real_store("A") / "store", tmp_path / "bulk")
    assert second.from_phys == first.to_phys
    assert first.messages > 0 < second.messages
    assert check_against_truth(FileStore(tmp_path / "bulk"), real_store("A"), "A") > 400


@pytest.mark.parametrize("first_is_bulk", [True, False])
def test_a_copy_without_tables_keeps_the_archived_tables(
    first_is_bulk: bool, real_store: RealStore, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("A") / "store", store)
    for file in sorted((store / "commitlog").iterdir())[3:]:
        file.unlink()
    if first_is_bulk:
        run(store, tmp_path / "bulk")
    else:
        backfill_alone(store, FileStore(tmp_path / "bulk"), instance="another process")
    tables = load(own_archive(tmp_path / "bulk")).state_objects
    assert len(tables) == 5
    shutil.rmtree(store)
    shutil.copytree(real_store("A") / "store", store, ignore=shutil.ignore_patterns("config"))
    assert run(store, tmp_path / "bulk").messages > 0
    assert load(own_archive(tmp_path / "bulk")).state_objects == tables


def test_a_log_that_changes_during_the_backfill_is_an_error_and_not_committed(
    real_store: RealStore, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("B") / "store", store)
    (file, *_) = sorted((store / "commitlog").iterdir())

    def change(task: object) -> None:
        if isinstance(task, PutTask):
            with file.open("r+b") as log:
                log.seek(task.part.from_phys + 5000)
                log.write(b"\x5a" * 3000)

    with pytest.raises(CorruptionError, match="changed while"):
        run(store, tmp_path / "bulk", InlineTasks(change))
    assert load(own_archive(tmp_path / "bulk")).queue_count == 0


def test_stores_of_one_broker_a_missing_one_and_a_running_broker_are_refused(
    real_store: RealStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = str(real_store("B") / "store")
    one = StoreToBackfill(store, CLUSTER, BROKER)
    with pytest.raises(UsageError, match="two stores"):
        backfill(NO_SPARK, [one, one], f"file://{tmp_path}", tasks=InlineTasks())
    with pytest.raises(NotFoundError):
        backfill(NO_SPARK, [str(tmp_path / "nothing")], f"file://{tmp_path}", tasks=InlineTasks())
    shutil.copytree(store, tmp_path / "store")
    (tmp_path / "store" / "lock").unlink(missing_ok=True)
    (tmp_path / "store" / "abort").touch()
    with pytest.raises(UnavailableError, match="may run"):
        run(tmp_path / "store", tmp_path / "bulk")


def test_several_stores_at_a_time(real_store: RealStore, tmp_path: Path) -> None:
    names = ["B", "F", "K"]
    stores = [StoreToBackfill(str(real_store(name) / "store"), CLUSTER, name) for name in names]
    done: dict[str, tuple[int, int]] = {}
    reports = backfill(
        NO_SPARK, stores, f"file://{tmp_path}", options=OPTIONS, tasks=InlineTasks(),
        report=lambda path, so_far, total: done.__setitem__(path, (so_far, total)),
    )  # fmt: skip
    assert [report.broker for report in reports] == names
    assert all(so_far == total > 0 for so_far, total in done.values())
    for name, report in zip(names, reports, strict=True):
        archive = PrefixedStore(FileStore(tmp_path), archive_prefix(CLUSTER, name))
        assert verify_archive(archive).counts["rows"] == report.messages


def test_an_older_copy_of_the_store_removes_nothing(tmp_path: Path) -> None:
    spec = StoreSpec(topics=2, queues_per_topic=2, body_bytes=200)
    for name, messages in (("now", 8_000), ("copy", 3_000)):
        write_store(tmp_path / name, spec, messages=messages)
    run(tmp_path / "now", tmp_path / "bulk")
    before = truth_of(tmp_path / "bulk")
    with pytest.raises(UsageError, match="an older copy"):
        run(tmp_path / "copy", tmp_path / "bulk")
    assert truth_of(tmp_path / "bulk") == before
    run(tmp_path / "copy", tmp_path / "bulk", options=replace(OPTIONS, replace_log=True))
    assert truth_of(tmp_path / "bulk")["cursor"][0] == 2
