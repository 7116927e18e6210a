"""Runs that name some rows of an object's run: every reader finds the same messages, and no others."""

import random
import threading
from pathlib import Path

import numpy as np
import pytest

import rocketmq_tiered
from tests.archive.archive_builder import NOW_MS, ArchiveBuilder, Sent
from tests.archive.queue_reader import QueueReader, records_of
from tests.maintenance.compaction_scene import LMQ, QUEUES, Scene
from tiered.archive.verify import AnomalyKind, verify_archive
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex
from tiered.clock import Clock
from tiered.errors import CorruptionError
from tiered.formats.run_part import CatalogRun, cut_run
from tiered.object_store.file import FileStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import IndexSettings
from uploader.index_builder import IndexBuilder

ROWS = [1, 3, 100]
WRONG = [("first_row", 6), ("first_row", -4), ("rows", 9), ("base_queue_offset", 1), ("base_byte", -999)]


@pytest.fixture(params=ROWS)
def rows_max(request: pytest.FixtureRequest) -> int:
    count: int = request.param
    return count


def built(path: Path) -> ArchiveBuilder:
    made = ArchiveBuilder(PrefixedStore(FileStore(path), "cluster/broker"))
    rng = random.Random(5)
    for cycle in range(6):
        made.commit(
            [
                Sent(
                    queue,
                    rng.randbytes(40),
                    keys=[f"k{cycle}-{number}"],
                    stored_ms=NOW_MS + 1000 * cycle + number,
                    lmq=[LMQ] if queue == QUEUES[0] else [],
                    inner_num=2 if queue == QUEUES[1] else 1,
                )
                for number in range(8)
                for queue in QUEUES[:3]
            ],
            as_set=cycle % 2 == 0,
        )
    return made


def index(made: ArchiveBuilder) -> None:
    builder = IndexBuilder(
        made.store,
        made.writer,
        IndexSettings(day_files_max=2),
        clock=Clock(wall_ms=lambda: NOW_MS),
        random_source=random.Random(2),
    )
    builder.run_to_end(threading.Event())


def read_all(made: ArchiveBuilder) -> None:
    """Every queue has what was sent, as two readers find it."""
    for queue, truth in made.truth.items():
        reader = QueueReader(made.store, made.state, queue)
        found = [record for _, _, record in records_of(reader, max_rows=2)]
        assert found == [row.record for row in truth.rows if row.offset >= reader.min_offset], queue


def test_every_row_is_read_once(tmp_path: Path, rows_max: int) -> None:
    made = built(tmp_path)
    made.cut_runs(rows_max)
    runs = RunIndex(made.store).runs_of(made.state, QUEUES[0]).runs
    assert int(runs["rows"].max()) <= rows_max and bool(runs["first_row"].any()) == (rows_max < 8)
    assert verify_archive(made.store, depth="full").anomalies == []
    read_all(made)


@pytest.mark.parametrize("is_indexed", [False, True])
def test_walks_and_queries_find_the_same_messages(tmp_path: Path, rows_max: int, is_indexed: bool) -> None:
    made = built(tmp_path)
    made.cut_runs(rows_max)
    if is_indexed:
        index(made)
        assert verify_archive(made.store, depth="full").anomalies == []
    with rocketmq_tiered.open(f"file://{tmp_path}") as archive:
        for queue, truth in made.truth.items():
            walked = [bytes(one.data) for one in archive.queue(queue.topic, queue.queue_id).messages()]
            assert walked == [row.record for row in truth.rows], queue
        for queue in QUEUES[:3]:
            for cycle, number in ((0, 0), (3, 5), (5, 7)):
                found = list(archive.find_by_key(queue.topic, f"k{cycle}-{number}"))
                assert len(found) == 1
                again = archive.find_by_id(found[0].offset_msg_id)
                assert again is not None and bytes(again.data) == bytes(found[0].data)


def test_no_reader_finds_what_was_cut_off(tmp_path: Path) -> None:
    made = built(tmp_path)
    queue = QUEUES[2]
    made.cut_runs(3)
    made.expire_first_run(queue)
    row = made.state.queue(queue)
    assert row is not None and int(row["min_queue_offset"]) == 3
    read_all(made)
    assert verify_archive(made.store, depth="full").anomalies == []
    with rocketmq_tiered.open(f"file://{tmp_path}") as archive:
        assert [one.queue_offset for one in archive.queue(queue.topic, queue.queue_id).messages()][:1] == [3]
        assert list(archive.find_by_key(queue.topic, "k0-1")) == []
        assert len(list(archive.find_by_key(queue.topic, "k0-4"))) == 1


@pytest.mark.parametrize("cut_at", [1, 2])
def test_cut_runs_are_compacted(tmp_path: Path, cut_at: int) -> None:
    scene = Scene(tmp_path)
    scene.owner.cut_runs(cut_at)
    scene.check()
    while scene.plan() is not None and scene.run() is not None:
        scene.check()
    scene.collect()
    scene.check()


def test_a_part_that_the_object_does_not_have_is_damage(tmp_path: Path) -> None:
    made = built(tmp_path)
    made.cut_runs(3)
    run = RunIndex(made.store).runs_of(made.state, QUEUES[0]).runs[1].copy()
    segment, _ = QueueReader(made.store, made.state, QUEUES[0])._run_at(int(run["base_queue_offset"]))
    segment.index.check_run(run, QUEUES[0])
    for name, change in WRONG:
        wrong = np.array([run])[0]
        wrong[name] += change
        with pytest.raises(CorruptionError, match="differs from the catalog"):
            segment.index.check_run(wrong, QUEUES[0])


def test_a_part_that_the_catalog_describes_wrongly_is_found() -> None:
    made = ArchiveBuilder(MemoryStore())
    made.commit([Sent(QUEUES[2], b"%d" % number) for number in range(6)])
    cut = made._parts

    def wrong(*arguments: object) -> list[np.void]:
        parts = cut(*arguments)  # type: ignore[arg-type]
        parts[1]["end_phys"] += 1
        return parts

    made._parts = wrong  # type: ignore[method-assign]
    made.cut_runs(3)
    assert {found.kind for found in verify_archive(made.store).anomalies} == {AnomalyKind.CONTRADICTION}


def test_a_cut_of_a_cut_is_a_cut_of_the_whole(tmp_path: Path) -> None:
    made = built(tmp_path)
    state = load(made.store)
    for queue in (*QUEUES[:3], LMQ):
        reader = QueueReader(made.store, state, queue)
        segment, part = reader._run_at(reader.min_offset)
        run = RunIndex(made.store).runs_of(state, queue).runs[0]
        rows = segment.row_columns(part)
        inner = cut_run(run, rows, 2, len(rows))
        columns = segment.row_columns(CatalogRun.of(inner))
        assert cut_run(inner, columns, 1, 3) == cut_run(run, rows, 3, 5)
        with pytest.raises(ValueError, match="rows"):
            cut_run(run, columns, 0, 1)
