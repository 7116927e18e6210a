"""A backfill ends by archiving the broker's tables, also after failures on the way or in an earlier backfill."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker_store.mapping_documents import MAPPINGS
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tiered.catalog.broker_facts import TABLE_NAMES
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.errors import ThrottledError
from tiered.formats.keys import archive_prefix
from tiered.formats.state_object import decode_state
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from uploader.metadata_commits import TABLE_ATTEMPTS
from uploader.offload import Environment, Offloader

RealStore = Callable[[str], Path]


def tables_of(memory: MemoryStore) -> set[str]:
    return set(load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).state_objects)


def refusing(memory: MemoryStore, fault: Fault, times: int | None = None) -> FaultStore:
    return FaultStore(memory, [FaultRule(fault, keys="*/state/*", times=times)], wait=lambda _: None)


def test_repeated_refusals_end_it_and_the_same_command_archives_the_rest(
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


def test_tables_missing_after_a_killed_backfill_are_archived_by_the_next_one(
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


def consumed(store: Path) -> None:
    """A consumer commits an offset: the broker writes its table again."""
    document = {"offsetTable": {"t@one_more": {"0": 7}}}
    (store / "config" / "consumerOffset.json").write_text(json.dumps(document), "utf-8")


def knows_what_was_consumed(memory: MemoryStore) -> bool:
    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    key = load(archive).state_objects["consumer_offsets"]
    return "t@one_more" in decode_state(archive.get(key), "consumer_offsets", source=key)


@pytest.fixture
def grown(real_store: RealStore, tmp_path: Path) -> tuple[Path, MemoryStore]:
    """A store that was archived without the last file of its log, and has gone on since."""
    store, memory = tmp_path / "store", MemoryStore("memory://tables")
    shutil.copytree(real_store("B") / "store", store)
    *_, last = sorted((store / "commitlog").iterdir())
    shutil.move(last, tmp_path)
    backfill(store, memory)
    assert tables_of(memory) == set(TABLE_NAMES)
    shutil.move(tmp_path / last.name, last)
    consumed(store)
    return store, memory


def test_tables_that_changed_since_an_earlier_backfill_are_archived_again(
    grown: tuple[Path, MemoryStore],
) -> None:
    store, memory = grown
    with pytest.raises(ThrottledError):
        backfill(store, refusing(memory, Fault.THROTTLED), environment=Environment(wait=lambda _: None))
    assert not knows_what_was_consumed(memory)
    assert backfill(store, memory).messages == 0
    assert knows_what_was_consumed(memory)


def test_tables_are_left_to_the_writer_that_follows(real_store: RealStore, tmp_path: Path) -> None:
    """Beside a live broker they change all the time; who holds the epoch is not to be fenced for them."""
    shutil.copytree(real_store("B") / "store", tmp_path / "store")
    memory = MemoryStore("memory://tables")
    backfill(tmp_path / "store", memory)
    archive = PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))
    CatalogWriter(
        archive, cluster=CLUSTER, broker=BROKER, instance="follows", kind="run", clock_ms=lambda: 1
    ).claim()
    consumed(tmp_path / "store")
    assert backfill(tmp_path / "store", memory).messages == 0
    assert not knows_what_was_consumed(memory)


def test_damaged_tables_are_reported_and_do_not_fail_a_backfill_with_nothing_to_do(
    real_store: RealStore, tmp_path: Path
) -> None:
    shutil.copytree(real_store("B") / "store", tmp_path / "store")
    memory = MemoryStore("memory://tables")
    backfill(tmp_path / "store", memory)
    for path in (tmp_path / "store" / "config").glob("*.json*"):
        path.write_text("{")
    lines: list[str] = []
    environment = Environment(log=lambda message, _: lines.append(message))
    assert backfill(tmp_path / "store", memory, environment=environment).messages == 0
    assert tables_of(memory) == set(TABLE_NAMES)
    assert lines == ["the broker's damaged tables are not archived: their earlier copies stay current"]


@pytest.mark.parametrize("file, table", [("topics", 0), ("consumerOffset", 2), ("delayOffset", 3)])
def test_a_damaged_table_takes_no_other_table_down(
    real_store: RealStore, tmp_path: Path, file: str, table: int
) -> None:
    """A power loss leaves zeros of the file's length."""
    store, memory = tmp_path / "store", MemoryStore("memory://tables")
    shutil.copytree(real_store("F") / "store", store)
    path = store / "config" / f"{file}.json"
    path.with_name(f"{path.name}.bak").unlink(missing_ok=True)
    path.write_bytes(bytes(path.stat().st_size))
    result = backfill(store, memory)
    assert result.messages and result.hidden == 0
    (damaged,) = result.damaged_tables
    assert damaged.startswith(TABLE_NAMES[table]) and path.name in damaged
    assert tables_of(memory) == set(TABLE_NAMES) - {TABLE_NAMES[table]}


def test_a_copy_without_tables_claims_nothing(real_store: RealStore, tmp_path: Path) -> None:
    shutil.copytree(real_store("B") / "store", tmp_path / "store")
    shutil.rmtree(tmp_path / "store" / "config")
    memory = MemoryStore("memory://tables")
    backfill(tmp_path / "store", memory)
    version = load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).version
    backfill(tmp_path / "store", memory)
    assert load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))).version == version


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
