"""A truncated log is reported, whichever queues had messages in the missing part."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.broker_store.record_bytes import log_file, queue_file, record, rocksdb_queues, unit
from tests.end_to_end.offloading import FILTER, backfill
from tiered.model.queue import TopicFilter
from tiered.object_store.memory import MemoryStore

FILE_BYTES = 64 * 1024
QUEUES = 100
Queue = tuple[str, int]


def store_without_end(path: Path, lost: Queue, form: str) -> tuple[Path, int]:
    """A hundred queues with a message each, and where their log ends, behind which ``lost`` has one more."""
    data, units = b"", dict[Queue, list[tuple[int, int]]]()
    for number in range(QUEUES):
        one = record(len(data), queue_id=number)
        units["t", number] = [(len(data), len(one))]
        data += one
    gone = record(len(data), topic=lost[0], queue_id=lost[1], queue_offset=len(units.get(lost, ())))
    units.setdefault(lost, []).append((len(data), len(gone)))
    log_file(path / "commitlog", 0, data, FILE_BYTES)
    if form == "rocksdb":
        rocksdb_queues(path / "consumequeue", units)
    else:
        for (topic, queue_id), its in units.items():
            queue_file(path, topic, queue_id, b"".join(unit(*one) for one in its))
    return path, len(data)


def lost_ranges(store: Path, topics: TopicFilter = FILTER) -> int:
    """Lost ranges that a backfill counts."""
    done = backfill(store, MemoryStore("memory://lost"), topic_filter=topics)
    assert done.messages == QUEUES
    return done.lost


@pytest.mark.parametrize("form", ["files", "rocksdb"])
@pytest.mark.parametrize("lost", [("t", 0), ("t", QUEUES // 2), ("t", QUEUES - 1), ("new", 0)])
def test_of_a_queue_archived_first_or_last_or_not_at_all(
    tmp_path: Path, lost: Queue, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    store, end_phys = store_without_end(tmp_path / "store", lost, form)
    assert lost_ranges(store) == 1
    (fields,) = (vars(line) for line in caplog.records if "commitlog truncated" in line.getMessage())
    assert fields["begin_phys"] == end_phys
    assert fields["end_phys"] == end_phys + len(record(0, topic=lost[0]))


def test_of_a_topic_that_was_deleted_and_created_again(tmp_path: Path) -> None:
    """Its earlier generation is archived and hidden; all of the new one is lost."""
    store, end_phys = store_without_end(tmp_path / "store", ("t", 0), "files")
    units = store / "consumequeue" / "t" / "0"
    shutil.move(units, tmp_path)
    (store / "config").mkdir()
    (store / "config" / "topics.json").write_text('{"topicConfigTable":{"other":{}}}')
    memory = MemoryStore("memory://lost")
    assert backfill(store, memory).hidden == 1
    shutil.move(tmp_path / "0", units)
    queue_file(store, "t", 0, unit(end_phys, len(record(0))))
    assert backfill(store, memory).lost == 1


@pytest.mark.parametrize("form", ["files", "rocksdb"])
def test_of_a_queue_that_began_again_and_has_fewer_units_than_before(tmp_path: Path, form: str) -> None:
    """Nothing stands behind what is archived of it."""
    store, end_phys = store_without_end(tmp_path / "store", ("t", 0), "files")
    log = store / "commitlog" / f"{0:020d}"
    with log.open("r+b") as file:
        file.seek(end_phys)
        file.write(record(end_phys, queue_offset=1))
    memory = MemoryStore("memory://lost")
    assert backfill(store, memory).lost == 0
    size = len(record(0))
    if form == "rocksdb":
        shutil.rmtree(store / "consumequeue")
        units = {("t", number): [(number * size, size)] for number in range(1, QUEUES)}
        rocksdb_queues(store / "consumequeue", units | {("t", 0): [(end_phys + size, size)]})
    else:
        queue_file(store, "t", 0, unit(end_phys + size, size))
    assert backfill(store, memory).lost == 1


def test_of_a_topic_that_is_not_archived_nothing_is_lost(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, _ = store_without_end(tmp_path / "store", ("new", 0), "files")
    assert lost_ranges(store, replace(FILTER, exclude=("new",))) == 0 and "truncated" not in caplog.text


def test_a_queue_whose_records_the_broker_has_expired_lost_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store, end_phys = store_without_end(tmp_path / "store", ("t", 0), "files")
    with (store / "commitlog" / f"{0:020d}").open("r+b") as log:
        log.seek(end_phys)
        log.write(record(end_phys, queue_offset=1))
    queue_file(store, "idle", 0, unit(0, 100))
    done = backfill(store, MemoryStore("memory://lost"))
    assert (done.messages, done.lost) == (QUEUES + 1, 0) and "lost" not in caplog.text
