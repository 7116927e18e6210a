"""What a back-fill hides: queues of deleted topics, never those that the broker has merely expired."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.reading import load
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore


def without_units(store: Path, queue: QueueKey) -> None:
    """What mqadmin cleanExpiredCQ, RocksDB's compaction filter and deleting a topic all come to."""
    shutil.rmtree(store / "consumequeue" / queue.topic / str(queue.queue_id), ignore_errors=True)


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

    assert backfill(store, memory).hidden == 1
    assert set(load(archive).visible_queues()) == visible - {deleted}
