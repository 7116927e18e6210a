"""A consume queue whose file cannot be read: the others and the confirm offset bound the log, and nothing is hidden."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.broker_store.bad_sectors import BadSectors
from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, backfill
from tests.uploader.living_broker import LivingBroker
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.formats.keys import archive_prefix
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.offload import Environment, Offloader, OffloadIdentity

CODES = pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
TIMEOUT_S = 30.0


def state_of(memory: MemoryStore) -> CatalogState:
    return load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)))


def copy_without_holes(store: Path, copy: Path) -> None:
    """As by most ways of copying: only its bytes tell whether a queue has units."""
    for path in store.rglob("*"):
        if path.is_file():
            target = copy / path.relative_to(store)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


def fullest_queue(store: Path) -> tuple[tuple[str, int], Path]:
    """Whose last record is the last of all, and its file."""
    with open_broker_store(store) as opened:
        index = opened.consume_queues()
        assert index is not None
        records = {queue: found for queue, found in index.last_records().items() if FILTER.admits(queue[0])}
    topic, queue_id = max(records, key=lambda queue: records[queue])
    return (topic, queue_id), max((store / "consumequeue" / topic / str(queue_id)).iterdir())


@CODES
def test_a_backfill_archives_and_hides_the_same(
    code: int, real_store: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    copy_without_holes(real_store("B") / "store", store)
    sound = MemoryStore(f"memory://sound-{code}")
    expected = backfill(store, sound)
    queue, path = fullest_queue(store)
    disk = BadSectors(monkeypatch)
    disk.code = code
    disk.break_all(path)
    memory = MemoryStore(f"memory://queue-{code}")
    result = backfill(store, memory)
    assert disk.reads > 0
    assert (result.messages, result.damaged, result.hidden) == (expected.messages, 0, expected.hidden)
    assert {key: row.tobytes() for key, row in state_of(memory).queues()} == {
        key: row.tobytes() for key, row in state_of(sound).queues()
    }
    assert queue in {key[:2] for key in state_of(memory).visible_queues()}
    disk.mend()
    assert check_against_truth(memory, real_store("B"), "B") > 400


@CODES
def test_beside_a_broker_its_word_bounds(
    code: int, real_store: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("B") / "store", store)
    sound = MemoryStore(f"memory://sound-live-{code}")
    backfill(store, sound)
    broker = LivingBroker(store)
    broker.behind_bytes = None  # so that queues are searched
    broker.end_phys = max(int(row["end_phys"]) for _, row in state_of(sound).queues())
    disk = BadSectors(monkeypatch)
    disk.code = code
    disk.break_all(fullest_queue(store)[1])
    memory, stop = MemoryStore(f"memory://live-{code}"), threading.Event()
    ended = threading.Timer(TIMEOUT_S, stop.set)

    def look(state: CatalogState) -> None:
        if state.cursor.phys >= broker.end_phys:
            stop.set()

    ended.start()
    with open_broker_store(store) as opened:
        Offloader(
            opened,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            replace(SMALL, batch_age_ms=50),
            topic_filter=FILTER,
            offsets_source=broker.offsets,
            environment=Environment(committed=look),
        ).run(stop, follow=True)
    ended.cancel()
    broker.close()
    assert disk.reads > 0
    assert state_of(memory).cursor.phys == broker.end_phys
