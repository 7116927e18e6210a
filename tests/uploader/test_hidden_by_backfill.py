"""What a backfill hides: queues of deleted topics, never those that the broker has merely expired or lost.

A broker is started on a store during its backfill: what it appends is archived only below its confirm offset.
"""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.synthetic_store import StoreSpec, write_store
from tests.broker_store.record_bytes import rocksdb_queues
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, backfill
from tests.uploader.halved_log import halved_log
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.conf import broker_conf
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.bound_source import no_offsets
from uploader.offload import Environment, Offloader, OffloadIdentity


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
    for queue in (*expired, deleted):
        without_units(store, queue)
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
        index = store.consume_queues()
        assert index is not None
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
