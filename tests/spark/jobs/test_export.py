"""Exports have every message once, with kills, repeated tasks, concurrent exports and a growing archive.

Jobs work with any damaged store timestamp: most records have no checksum over it.
"""

import shutil
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark.sql import SparkSession

from rocketmq_tiered.export.export_progress import DIRECTORY, ExportProgress
from rocketmq_tiered.export.parquet_parts import PartTask, partition_directory
from rocketmq_tiered.message_table.options.source_options import Mode
from rocketmq_tiered.message_table.plan.archive_plan import pinned_versions, plan
from rocketmq_tiered.spark.jobs.export import batch_frame, export
from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.spark.jobs.export_runs import NO_SPARK, exported, run, source
from tests.spark.jobs.inline_tasks import InlineTasks, Twice
from tests.sweeps import sweep
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.clock import Clock
from tiered.errors import CorruptionError, NotFoundError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.bound_source import no_offsets
from uploader.log_rule import LogLimits
from uploader.offload import Offloader, OffloadIdentity

pytestmark = pytest.mark.integration

RealStore = Callable[[str], Path]
Rows = Counter[tuple[str, int, int, int]]


@pytest.fixture(scope="module")
def grown(real_store: RealStore, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Store A archived twice: its first files only, and then, into a copy of that archive, all of it."""
    root = tmp_path_factory.mktemp("grown")
    store = root / "store"
    shutil.copytree(real_store("A") / "store", store)
    for file in sorted((store / "commitlog").iterdir())[2:]:
        file.unlink()
    backfill(store, FileStore(root / "early"))
    shutil.copytree(root / "early", root / "late")
    backfill(real_store("A") / "store", FileStore(root / "late"))
    return root / "early", root / "late"


def test_every_message_is_exported_once_and_a_second_call_adds_nothing(
    real_store: RealStore, tmp_path: Path
) -> None:
    backfill(real_store("K") / "store", FileStore(tmp_path / "archive"))
    report = run(source(tmp_path / "archive"), tmp_path / "table")
    truth = load_truth(real_store("K"), "K", FILTER)
    rows = exported(tmp_path / "table")
    assert set(rows.values()) == {1}
    by_queue = Counter((topic, queue_id) for topic, queue_id, _, _ in rows)
    for queue, lines in truth.queues.items():
        assert by_queue[queue] == len(lines), queue
    assert report.rows == sum(rows.values())
    assert report.files == len(list((tmp_path / "table").rglob("*.parquet")))
    again = run(source(tmp_path / "archive"), tmp_path / "table")
    assert (again.batches, again.rows) == (0, 0)


def test_files_are_partitioned_by_topic_and_day_with_the_selected_columns(
    real_store: RealStore, tmp_path: Path
) -> None:
    backfill(real_store("K") / "store", FileStore(tmp_path / "archive"))
    run(source(tmp_path / "archive", columns=("queueOffset", "tags", "topic", "body")), tmp_path / "table")
    files = list((tmp_path / "table").rglob("*.parquet"))
    assert {file.parent.parent.name.split("=")[0] for file in files} == {"topic"}
    assert pq.read_schema(files[0]).names == ["queueOffset", "tags", "body"]
    assert any("topic=%25LMQ%25" in str(file) for file in files)
    assert partition_directory("a:b%c", 20_000) == "topic=a%3Ab%25c/date=2024-10-04"
    long = [partition_directory("%" * 100 + "x" * 155 + end, 0).partition("/")[0] for end in "ab"]
    assert long[0] != long[1] and all(250 < len(name) <= 255 for name in long)


@pytest.fixture(scope="module")
def whole(grown: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Rows:
    """What one export of the late archive has."""
    target = tmp_path_factory.mktemp("whole")
    run(source(grown[1]), target)
    return exported(target)


def test_later_messages_are_added(grown: tuple[Path, Path], whole: Rows, tmp_path: Path) -> None:
    early, late = grown
    shutil.copytree(early, tmp_path / "archive")
    first = run(source(tmp_path / "archive"), tmp_path / "table")
    files = sorted((tmp_path / "table").rglob("*.parquet"))
    shutil.rmtree(tmp_path / "archive")
    shutil.copytree(late, tmp_path / "archive")
    second = run(source(tmp_path / "archive"), tmp_path / "table")
    assert first.rows > 1000 < second.rows
    rows = exported(tmp_path / "table")
    assert set(rows.values()) == {1}
    # What the early archive showed of topics that were deleted since has been exported, and stays.
    assert whole - rows == Counter()
    assert set(files) < set((tmp_path / "table").rglob("*.parquet"))


@pytest.mark.parametrize("dies_at", sweep([0, 1, 3], fast=[1]))
def test_the_next_export_finishes_a_killed_one_after_the_archive_grew(
    dies_at: int, grown: tuple[Path, Path], whole: Rows, tmp_path: Path
) -> None:
    early, late = grown
    shutil.copytree(early, tmp_path / "archive")
    left = [dies_at]

    def die(task: object) -> None:
        left[0] -= isinstance(task, PartTask)
        if left[0] < 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(source(tmp_path / "archive"), tmp_path / "table", InlineTasks(die))
    shutil.rmtree(tmp_path / "archive")
    shutil.copytree(late, tmp_path / "archive")
    assert run(source(tmp_path / "archive"), tmp_path / "table").batches == 2
    rows = exported(tmp_path / "table")
    assert set(rows.values()) == {1}
    assert whole - rows == Counter()


def test_a_repeated_task_writes_the_same_files(
    grown: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also two exports at a time: parts are written twice, and change nothing."""
    monkeypatch.setattr(ExportProgress, "part", lambda self, number, part: None)

    report = run(source(grown[0]), tmp_path / "table", Twice())
    rows = exported(tmp_path / "table")
    assert set(rows.values()) == {1}
    assert report.rows == sum(rows.values())


def test_offsets_filled_into_a_gap_later_are_exported(real_store: RealStore, tmp_path: Path) -> None:
    """A gap of the last batch that is none any more: as if a lost commitlog file had been found."""
    backfill(real_store("K") / "store", FileStore(tmp_path / "archive"))
    run(source(tmp_path / "archive"), tmp_path / "table")
    whole = exported(tmp_path / "table")
    progress = ExportProgress(FileStore(tmp_path / "table"))
    done = progress.done(1)
    assert done is not None
    (ends,) = done.ends
    queue = next(one for one in ends.queues if one[3] > 10 and not one[0].startswith("%LMQ%"))
    gapped = replace(done, ends=(replace(ends, gaps=[(*queue[:3], 3, 7)]),))
    (tmp_path / "table" / DIRECTORY / f"{1:010d}.done").unlink()
    progress.finish(gapped)
    assert run(source(tmp_path / "archive"), tmp_path / "table").batches == 1
    added = exported(tmp_path / "table") - whole
    assert {offset for _, _, _, offset in added} <= set(range(3, 7))
    assert {row[:2] for row in added} == {queue[:2]}


def test_rows_that_a_replaced_log_took_back_are_an_error(real_store: RealStore, tmp_path: Path) -> None:
    backfill(real_store("K") / "store", FileStore(tmp_path / "archive"))
    run(source(tmp_path / "archive"), tmp_path / "table")
    archive = PrefixedStore(FileStore(tmp_path / "archive"), archive_prefix(CLUSTER, BROKER))
    writer = CatalogWriter(
        archive, cluster=CLUSTER, broker=BROKER, instance="x", kind="run", clock=Clock(wall_ms=lambda: 10**14)
    )
    state = writer.claim()
    writer.append_history(common_version=3, phys=_cursor_at(archive, 3))
    assert writer.state.cursor.history == state.cursor.history + 1
    with pytest.raises(UsageError, match="log was replaced"):
        run(source(tmp_path / "archive"), tmp_path / "table")


def _cursor_at(archive: PrefixedStore, version: int) -> int:
    return load(archive, version=version).cursor.phys


@pytest.mark.parametrize("is_same_log", [True, False], ids=["recreated topic", "another disk"])
def test_the_rest_of_a_partly_exported_queue_is_exported_after_it_was_hidden(
    tmp_path: Path, is_same_log: bool
) -> None:
    def put(store: WrittenStore, count: int) -> None:
        for number in range(count):
            store.put("t", 0, b"%s %d" % (store.path.name.encode(), number))
        with open_broker_store(store.path) as opened:
            identity = OffloadIdentity(CLUSTER, BROKER, store.path.name, "run")
            archive = FileStore(tmp_path / "archive")
            offloader = Offloader(
                opened,
                archive,
                identity,
                SMALL,
                topic_filter=FILTER,
                offsets_source=no_offsets,
                log_limits=LogLimits(replace_log=True),
            )
            offloader.run(threading.Event(), follow=False)

    first = WrittenStore(tmp_path / "first")
    put(first, 50)
    assert run(source(tmp_path / "archive"), tmp_path / "table").rows == 50
    put(first, 30)
    if is_same_log:  # deleted and created again: offsets begin at 0, the log continues
        first.records.clear()
        shutil.rmtree(first.path / "consumequeue" / "t")
        put(first, 20)
    else:
        put(WrittenStore(tmp_path / "second"), 20)
    assert run(source(tmp_path / "archive"), tmp_path / "table").rows == 50
    assert exported(tmp_path / "table") == Counter(
        [("t", 0, 0, offset) for offset in range(80)] + [("t", 0, 1, offset) for offset in range(20)]
    )
    assert run(source(tmp_path / "archive"), tmp_path / "table").batches == 0


def test_changed_choices_and_unknown_topics_are_refused(real_store: RealStore, tmp_path: Path) -> None:
    backfill(real_store("K") / "store", FileStore(tmp_path / "archive"))
    run(source(tmp_path / "archive", topics=("t_k*",)), tmp_path / "table")
    with pytest.raises(UsageError, match="was started with"):
        run(source(tmp_path / "archive", columns=("body",)), tmp_path / "table")
    with pytest.raises(NotFoundError, match="no topic"):
        run(source(tmp_path / "archive", topics=("nowhere",)), tmp_path / "other")
    with pytest.raises(UsageError, match="an archive cannot be exported as csv"):
        export(NO_SPARK, source(tmp_path / "archive"), f"file://{tmp_path}/x", format="csv")


def test_a_corrupt_block_fails_the_export_and_names_it(real_store: RealStore, tmp_path: Path) -> None:
    backfill(real_store("K") / "store", FileStore(tmp_path / "archive"))
    (file, *_) = sorted((tmp_path / "archive").rglob("*.sso"))
    data = bytearray(file.read_bytes())
    data[5_000] ^= 0xFF
    file.chmod(0o644)
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match=file.name):
        run(source(tmp_path / "archive"), tmp_path / "table")
    assert ExportProgress(FileStore(tmp_path / "table")).done(1) is None


@pytest.mark.parametrize("damage", ["missing", "a flipped byte"])
def test_a_permissive_export_has_what_is_readable_and_names_what_is_not(
    real_store: RealStore, tmp_path: Path, damage: str
) -> None:
    backfill(real_store("K") / "store", FileStore(tmp_path / "archive"))
    run(source(tmp_path / "archive"), tmp_path / "whole")
    (file, *_) = sorted((tmp_path / "archive").rglob("*.sso"))
    data = bytearray(file.read_bytes())
    file.unlink()
    if damage != "missing":
        data[5_000] ^= 0xFF
        file.write_bytes(data)
    report = run(source(tmp_path / "archive", mode=Mode.PERMISSIVE), tmp_path / "table")
    assert report.unreadable and all(file.name in line for line in report.unreadable)
    whole, found = exported(tmp_path / "whole"), exported(tmp_path / "table")
    assert 0 < len(found) < len(whole) and not found - whole


USUAL_MS = 1_700_000_000_000
STAMPS_MS = (USUAL_MS, -1, 1 << 62, 1 - (1 << 63), (1 << 63) - 1, 253_402_300_800_000, USUAL_MS)
DAYS = {
    date(2023, 11, 14): [0, 6],
    date(1969, 12, 31): [1],
    date.min: [3],
    date.max: [2, 4, 5],
}


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """One message for each of STAMPS_MS."""
    store = WrittenStore(tmp_path / "store")
    for stamp_ms in STAMPS_MS:
        store.put("t", 0, b"body", later_ms=stamp_ms - USUAL_MS)
    backfill(store.path, FileStore(tmp_path / "archive"))
    return tmp_path / "archive"


def test_export_clips_them_to_the_first_and_last_day(archive: Path, tmp_path: Path) -> None:
    assert run(source(archive), tmp_path / "table").rows == len(STAMPS_MS)
    assert set(exported(tmp_path / "table").values()) == {1}
    days = {directory.name for directory in (tmp_path / "table" / "topic=t").iterdir()}
    assert days == {f"date={day.isoformat()}" for day in DAYS}


def test_a_delta_table_has_the_same_days(spark: SparkSession, archive: Path) -> None:
    options = source(archive)
    parts = plan(options, pinned_versions(options), options.times, is_header_only=False)
    frame = batch_frame(spark, options, ("queueOffset", "topic"), parts)
    found: dict[date, list[int]] = {}
    for row in frame.orderBy("queueOffset").collect():
        found.setdefault(row["date"], []).append(row["queueOffset"])
    assert found == DAYS
