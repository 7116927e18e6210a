"""At the end of a back-fill the broker's tables are archived, whatever happened on the way, or to an earlier one."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker_store.test_config import MAPPINGS
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tiered.catalog.reading import load
from tiered.errors import ThrottledError
from tiered.formats.keys import archive_prefix
from tiered.formats.state_object import decode_state
from tiered.object_store.faults import Fault, FaultRule, FaultStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.broker_marks import TABLE_ATTEMPTS, TABLE_NAMES
from uploader.offload import Environment, Offloader

RealStore = Callable[[str], Path]


def tables_of(memory: MemoryStore) -> set[str]:
    return set(load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).state_objects)


def refusing(memory: MemoryStore, fault: Fault, times: int | None = None) -> FaultStore:
    return FaultStore(memory, [FaultRule(fault, keys="*/state/*", times=times)], wait=lambda _: None)


@pytest.mark.parametrize("fault", [Fault.THROTTLED, Fault.LOST_BEFORE, Fault.LOST_AFTER])
def test_a_store_that_refuses_a_table_is_asked_again_after_a_wait(
    real_store: RealStore, fault: Fault
) -> None:
    memory = MemoryStore("memory://tables")
    waits: list[float] = []
    environment = Environment(wait=waits.append)
    backfill(real_store("B") / "store", refusing(memory, fault, times=2), environment=environment)
    assert tables_of(memory) == set(TABLE_NAMES)
    assert len(waits) == 2


def test_a_store_that_goes_on_refusing_ends_it_and_the_same_command_makes_up_for_it(
    real_store: RealStore,
) -> None:
    memory = MemoryStore("memory://tables")
    waits: list[float] = []
    environment = Environment(wait=waits.append)
    with pytest.raises(ThrottledError):
        backfill(real_store("B") / "store", refusing(memory, Fault.THROTTLED), environment=environment)
    assert len(waits) == TABLE_ATTEMPTS - 1
    assert waits == sorted(waits) and 1 < sum(waits) < 10
    assert tables_of(memory) == set()
    assert backfill(real_store("B") / "store", memory).messages == 0
    assert tables_of(memory) == set(TABLE_NAMES)


def test_tables_that_a_killed_back_fill_did_not_come_to_are_archived_by_the_next_one(
    real_store: RealStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(_: Offloader) -> None:
        raise KeyboardInterrupt

    memory = MemoryStore("memory://tables")
    with monkeypatch.context() as while_killed, pytest.raises(KeyboardInterrupt):
        while_killed.setattr(Offloader, "_finish_backfill", killed)
        backfill(real_store("B") / "store", memory)
    assert tables_of(memory) == set()
    assert backfill(real_store("B") / "store", memory).messages == 0
    assert tables_of(memory) == set(TABLE_NAMES)
    version = load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).version
    backfill(real_store("B") / "store", memory)
    assert load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).version == version


def test_a_back_fill_with_nothing_to_do_reads_no_table(real_store: RealStore, tmp_path: Path) -> None:
    """One that is damaged by now is no reason to fail."""
    shutil.copytree(real_store("B") / "store", tmp_path / "store")
    memory = MemoryStore("memory://tables")
    backfill(tmp_path / "store", memory)
    for path in (tmp_path / "store" / "config").glob("*.json*"):
        path.write_text("{")
    assert backfill(tmp_path / "store", memory).messages == 0
    assert tables_of(memory) == set(TABLE_NAMES)


def test_static_topics_are_archived_with_every_value_the_broker_wrote(
    real_store: RealStore, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("B") / "store", store)
    shutil.copy(MAPPINGS / "5.5.0.json", store / "config" / "topicQueueMapping.json")
    memory = MemoryStore("memory://tables")
    backfill(store, memory)
    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    key = load(archive).state_objects["topic_queue_mappings"]
    found = decode_state(archive.get(key), "topic_queue_mappings", source=key)
    text = (MAPPINGS / "5.5.0.json").read_text("utf-8")
    quoted = re.sub(r"([{,\s])(\d+):\[", r'\1"\2":[', text)  # as a reader of standard JSON needs it
    assert found == json.loads(quoted)["topicQueueMappingInfoMap"]
