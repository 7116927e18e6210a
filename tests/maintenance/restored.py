"""A broker's store of some queues, its archive, and what a restored store has of it."""

import json
from pathlib import Path

from tests.broker_store.opened_store import consume_queues_of
from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL, backfill
from tests.fetcher.broker_store_writer import FILE_BYTES, WrittenStore
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.store import open_broker_store
from tiered.object_store.file import FileStore

Queue = tuple[str, int]


def written(
    path: Path, *, messages: int = 600, body_bytes: int = 100, gap_at: int | None = None, begin_file: int = 0
) -> WrittenStore:
    """Messages of three topics by turns, and of a system topic at the end. ``gap_at``: an offset of the first queue
    from which on ten are missing. ``begin_file``: the first file of the log."""
    store = WrittenStore(path, begin_file * FILE_BYTES)
    (path / "config").mkdir()
    topics = {
        f"t{number}": {"topicName": f"t{number}", "readQueueNums": 2, "writeQueueNums": 2, "perm": 6}
        for number in range(3)
    }
    (path / "config" / "topics.json").write_text(json.dumps({"topicConfigTable": topics}))
    for number in range(messages):
        queue = (f"t{number % 3}", number // 3 % 2)
        if (
            gap_at is not None
            and queue == ("t0", 0)
            and max(store.records.get(queue, {-1: b""})) == gap_at - 1
        ):
            store.records[queue][gap_at + 9] = b""
        store.put(*queue, bytes(body_bytes + number % 50), tags=f"T{number % 5}", later_ms=number)
    for _ in range(5):
        store.put("rmq_sys_trace", 0, bytes(3_000))
    return store


def archived(store: WrittenStore, url: Path) -> None:
    """Archive ``store`` below the directory ``url``."""
    backfill(store.path, FileStore(url), settings=SMALL)


def expected(store: WrittenStore) -> dict[Queue, dict[int, bytes]]:
    """The records of each queue by offset, without those of system topics."""
    return {
        queue: {offset: record for offset, record in records.items() if record}
        for queue, records in store.records.items()
        if not queue[0].startswith("rmq_sys_")
    }


def found(path: Path) -> dict[Queue, tuple[int, int, dict[int, bytes]]]:
    """Minimum, maximum and records of each queue of a restored store."""
    with open_broker_store(path) as store:
        index = consume_queues_of(store)
        log = CommitLog([path / "commitlog"])
        result = {}
        for queue in index.queues():
            least, end = (read(queue.topic, queue.queue_id) for read in (index.min_offset, index.max_offset))
            units = index.units(queue.topic, queue.queue_id, least, end - least) if end > least else []
            records = {
                int(unit["queue_offset"]): log.read(int(unit["phys"]), int(unit["size"]))
                for unit in units
                if int(unit["size"]) != 2
            }
            result[queue.topic, queue.queue_id] = least, end, records
        return result


__all__ = ["BROKER", "CLUSTER", "FILE_BYTES", "archived", "expected", "found", "written"]
