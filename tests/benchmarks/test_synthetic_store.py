"""A synthetic store is a broker's: every record valid, every consume-queue unit true, the same every time."""

import filecmp
from pathlib import Path

import numpy as np
import pytest
import zstandard

from benchmarks.json_bodies import JsonBodies
from benchmarks.synthetic_store import (
    UNIT_DTYPE,
    StoreSpec,
    StoreWriter,
    topic_name,
    write_store,
)
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.scan import RecordColumns, ScanStop, StopReason, scan_log

SMALL = StoreSpec(topics=3, queues_per_topic=2, body_bytes=300, file_bytes=64 * 1024, body_jitter=0.3)
MESSAGES = 1_000


def _scan(store: Path, spec: StoreSpec) -> tuple[RecordColumns, QueueTable, list[ScanStop]]:
    columns, table, stops = RecordColumns(), QueueTable(), []
    for path in sorted((store / "commitlog").iterdir()):
        data = np.fromfile(path, np.uint8)
        begin = int(path.name)
        end = begin + spec.file_bytes
        stops.append(scan_log(data, 0, len(data), begin, end, table, columns, delay_levels_ms=None))
    return columns, table, stops


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "store"
    write_store(path, SMALL, messages=MESSAGES)
    return path


def test_every_record_is_valid_and_in_its_queue(store: Path) -> None:
    columns, table, stops = _scan(store, SMALL)
    assert [stop.reason for stop in stops[:-1]] == [StopReason.FILE_END] * (len(stops) - 1)
    assert stops[-1].reason == StopReason.NO_RECORD
    assert len(stops) > 5, "several files"
    assert columns.rows == MESSAGES
    assert columns.keys == 2 * MESSAGES
    queues = [table.ordinal(topic_name(n // 2), n % 2) for n in range(SMALL.queues)]
    indices = np.arange(MESSAGES)
    assert columns.queue[:MESSAGES].tolist() == [queues[n] for n in indices % SMALL.queues]
    assert columns.queue_offset[:MESSAGES].tolist() == (indices // SMALL.queues).tolist()


def test_consume_queues_say_what_the_log_says(store: Path) -> None:
    columns, _, _ = _scan(store, SMALL)
    for number in range(SMALL.queues):
        topic, queue_id = divmod(number, SMALL.queues_per_topic)
        (path,) = (store / "consumequeue" / topic_name(topic) / str(queue_id)).iterdir()
        rows = np.arange(number, MESSAGES, SMALL.queues)
        units = np.fromfile(path, UNIT_DTYPE)
        assert path.stat().st_size == 6_000_000
        assert units["phys"][: len(rows)].tolist() == columns.phys[rows].tolist()
        assert units["size"][: len(rows)].tolist() == columns.size[rows].tolist()
        assert units["tags_code"][: len(rows)].tolist() == columns.tags_code[rows].tolist()
        assert not units["size"][len(rows) :].any()


def test_same_spec_same_bytes_even_in_steps(store: Path, tmp_path: Path) -> None:
    (tmp_path / "again").mkdir()
    writer = StoreWriter(tmp_path / "again", SMALL)
    for count in (1, 399, 0, 600):
        writer.append(count)
        writer.flush()
    writer.close()
    assert writer.totals.messages == MESSAGES
    names = [path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file()]
    same, different, missing = filecmp.cmpfiles(store, tmp_path / "again", names, shallow=False)
    assert sorted(same) == sorted(names)
    assert not different
    assert not missing


def test_bodies_shrink_as_real_json_does() -> None:
    bodies = JsonBodies(1, pool_bytes=8 << 20).bodies(0, np.full(1_000, 1024, np.int64))
    assert len(set(bodies)) == 1_000
    text = b"".join(bodies)
    assert 2.5 < len(text) / len(zstandard.ZstdCompressor(level=1).compress(text)) < 5
