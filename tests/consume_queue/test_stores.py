"""The contract of consume queue stores, on files and on RocksDB."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from tests.consume_queue.stores import BATCH_TOPIC, SIZES, FakeLog, assert_units, opened, units_of
from tiered.consume_queue.file_queues import FileConsumeQueues
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.consume_queue.rocksdb_copy import RocksdbCopy
from tiered.consume_queue.rocksdb_queues import RocksdbConsumeQueues
from tiered.consume_queue.store import ConsumeQueueStore, StoreKind
from tiered.errors import UsageError


@pytest.fixture
def log() -> FakeLog:
    return FakeLog()


@pytest.fixture(params=list(StoreKind), ids=lambda kind: kind.value)
def kind(request: pytest.FixtureRequest) -> StoreKind:
    found: StoreKind = request.param
    return found


@pytest.fixture
def store(tmp_path: Path, kind: StoreKind, log: FakeLog) -> Iterator[ConsumeQueueStore]:
    found = opened(tmp_path, kind, log)
    yield found
    found.close()


def reader(path: Path, kind: StoreKind, log: FakeLog) -> ConsumeQueueIndex:
    """What reads a broker's queues."""
    if kind is StoreKind.FILE:
        return FileConsumeQueues(path, lambda: log.min_phys)
    return RocksdbConsumeQueues(path / "consumequeue", lambda: log.min_phys)


def test_a_queue_that_does_not_exist_is_empty(store: ConsumeQueueStore) -> None:
    assert store.queues() == []
    assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (0, 0)
    assert len(store.units("t", 0, 0, 10)) == 0


@pytest.mark.parametrize("first", [0, 3, 10, 27])
def test_units_are_read_back_also_by_the_reader_of_brokers(
    tmp_path: Path, kind: StoreKind, log: FakeLog, first: int
) -> None:
    log.min_phys = 1
    units = units_of(first, 35, 1000)
    store = opened(tmp_path, kind, log)
    for part in (units[:4], units[4:21], units[21:]):
        store.put("t", 2, part)
    store.put("t", 2, units[10:30])  # again
    for index in (store, None):
        if index is None:
            store.flush(9000)
            store.close()
        found = index or reader(tmp_path, kind, log)
        assert [(queue.topic, queue.queue_id) for queue in found.queues()] == [("t", 2)]
        assert (found.min_offset("t", 2), found.max_offset("t", 2)) == (first, first + 35)
        assert_units(found.units("t", 2, 0, 100), units)
        assert_units(found.units("t", 2, first + 9, 3), units[9:12])
        if index is None:
            found.close()
    log.min_phys = 2000
    again = opened(tmp_path, kind, log)
    assert again.min_offset("t", 2) == first + 10
    again.put("t", 2, units_of(first + 35, 1, 9000))
    assert again.max_offset("t", 2) == first + 36
    again.close()


def test_a_queue_with_nothing_kept_continues_at_its_end(
    tmp_path: Path, store: ConsumeQueueStore, kind: StoreKind, log: FakeLog
) -> None:
    log.min_phys = 500
    store.put("t", 0, units_of(0, 3, 0))
    store.put_empty_queue("t", 0, 42)
    assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (42, 42)
    store.put("t", 0, units_of(42, 2, 1000))
    store.flush(0)
    store.close()
    with closing(reader(tmp_path, kind, log)) as found:
        assert (found.min_offset("t", 0), found.max_offset("t", 0)) == (42, 44)
    if kind is StoreKind.FILE:
        raw = np.fromfile(tmp_path / "consumequeue/t/0" / f"{40 * 20:020d}", ">i4").reshape(-1, 5)
        assert raw[:2, 2].tolist() == [0x7FFFFFFF, 1]


def test_deleted_queues_start_again(store: ConsumeQueueStore) -> None:
    for topic, queue_id in (("t", 0), ("t", 1), ("t2", 0), ("s", 0)):
        store.put(topic, queue_id, units_of(0, 15, 0))
    store.delete_queue("t", 1)
    assert store.max_offset("t", 1) == 0
    store.delete_queue("t", 0)
    store.delete_queue("absent", 0)
    assert [queue.topic for queue in store.queues()] == ["s", "t2"]
    store.put("t", 0, units_of(0, 2, 5000))
    assert_units(store.units("t", 0, 0, 50), units_of(0, 2, 5000))
    assert store.max_offset("t2", 0) == 15


@pytest.mark.parametrize("first", [0, 7])
def test_truncation_removes_the_units_of_later_records(store: ConsumeQueueStore, first: int) -> None:
    units = units_of(first, 40, 1000)
    store.put("t", 0, units)
    store.put("u", 0, units_of(first, 4, 4900))
    for phys, kept in ((9999, 40), (4900, 39), (3001, 21), (2000, 10)):
        store.truncate(phys)
        assert store.max_offset("t", 0) == first + kept
        assert_units(store.units("t", 0, 0, 99), units[:kept])
    assert store.max_offset("u", 0) == first
    store.put("t", 0, units_of(first + 10, 3, 7000))
    assert store.max_offset("t", 0) == first + 13
    store.truncate(0)
    assert store.max_offset("t", 0) == first


def test_the_minimum_follows_the_log(store: ConsumeQueueStore, log: FakeLog) -> None:
    store.put("t", 0, units_of(0, 35, 1000))
    for min_phys, offset in ((0, 0), (3000, 20), (9999, 35)):
        log.min_phys = min_phys
        assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (offset, 35)


def test_units_out_of_order_are_refused(store: ConsumeQueueStore) -> None:
    units = units_of(0, 3, 0)
    for wrong in (units[::-1], units_of(-1, 2, 0), units[[0, 0]]):
        with pytest.raises(UsageError, match="t/0"):
            store.put("t", 0, wrong)
    store.put("t", 0, units[:0])
    assert store.queues() == []


def test_lmqs_have_holes_and_any_name_in_rocksdb(tmp_path: Path, log: FakeLog) -> None:
    store = opened(tmp_path, StoreKind.ROCKSDB, log)
    for name in ("%LMQ%t", "%LMQ%a/b"):
        store.put(name, 0, np.concatenate([units_of(0, 2, 0), units_of(5, 2, 500)]))
        assert store.units(name, 0, 0, 9)["queue_offset"].tolist() == [0, 1, 5, 6]
    store.truncate(500)
    assert store.max_offset("%LMQ%t", 0) == 2
    store.close()
    files = opened(tmp_path / "files", StoreKind.FILE, log)
    with pytest.raises(UsageError, match="directory"):
        files.put("%LMQ%a/b", 0, units_of(0, 2, 0))


def test_batches_below_earlier_ones_complete_a_queue(tmp_path: Path, store: ConsumeQueueStore) -> None:
    units = units_of(13, 40, 1000)
    store.put("t", 0, units[[*range(25, 30), *range(35, 40)]])
    for begin, end in ((30, 35), (15, 25), (0, 10), (10, 15)):
        store.put("t", 0, units[begin:end])
    assert_units(store.units("t", 0, 0, 99), units)
    assert (store.min_offset("t", 0), store.max_offset("t", 0)) == (13, 53)


def test_batches_in_files(tmp_path: Path, log: FakeLog) -> None:
    store = opened(tmp_path, StoreKind.FILE, log)
    units = units_of(0, 12, 0, inner=4)
    store.put(BATCH_TOPIC, 1, units[:7])
    store.put(BATCH_TOPIC, 1, units[3:])
    assert store.max_offset(BATCH_TOPIC, 1) == 48
    assert_units(store.units(BATCH_TOPIC, 1, 0, 99), units)
    assert_units(store.units(BATCH_TOPIC, 1, 18, 2), units[4:6])
    assert store.units(BATCH_TOPIC, 1, 0, 99)["store_timestamp"].tolist() == units["phys"].tolist()
    store.truncate(500)
    assert store.max_offset(BATCH_TOPIC, 1) == 20
    assert {path.stat().st_size for path in (tmp_path / "batchconsumequeue").rglob("0*")} == {
        SIZES.batch_bytes
    }
    store.close()


def test_files_of_another_size_are_refused(tmp_path: Path, log: FakeLog) -> None:
    store = opened(tmp_path, StoreKind.FILE, log)
    store.put("t", 0, units_of(0, 3, 0))
    path = tmp_path / "consumequeue" / "t" / "0" / f"{0:020d}"
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(UsageError, match=r"has 400 bytes, but files .* have 200; give --broker-conf"):
        store.put("t", 0, units_of(3, 3, 300))
    store.close()


def test_rocksdb_keeps_what_was_flushed_and_says_how_far(tmp_path: Path, log: FakeLog) -> None:
    store = opened(tmp_path, StoreKind.ROCKSDB, log)
    store.put("t", 0, units_of(0, 10, 0))
    store.flush(1000)
    store.put("t", 0, units_of(10, 10, 1000))
    with RocksdbCopy(tmp_path / "consumequeue", link_tables=False) as crashed:
        offsets = dict(crashed.items("offset"))
        assert len(list(crashed.items())) == 10
    assert offsets[b"\0\0\0\x10\x01CHECKPOINT_TOPIC\x01max\x01\0\0\0\0"] == (1000).to_bytes(8, "big")
    assert offsets[b"\0\0\0\1\1t\1max\1\0\0\0\0"] == (900).to_bytes(8, "big") + (9).to_bytes(8, "big")
    store.close()
    assert not list((tmp_path / "consumequeue").glob("rocksdict*"))
