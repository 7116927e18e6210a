"""A backfill ends by archiving the broker's tables, also after failures on the way or in an earlier backfill.

Topics that were deleted while no process watched are noticed after the next start.

The owner commits the rules in force, whenever they change and also without messages; a backfill leaves them.
"""

import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.broker_store.mapping_documents import MAPPINGS
from tests.catalog.drafts import append_draft, queue, writer
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL, backfill
from tests.object_store.fault_store import Fault, FaultRule, FaultStore
from tests.uploader.small_broker import FILE_BYTES, QUEUE_UNITS, SmallBroker
from tiered.broker_store.store import open_broker_store
from tiered.catalog.broker_facts import TABLE_NAMES, BrokerFacts, facts_to_record, recorded_facts
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.state import CatalogState
from tiered.clock import Clock
from tiered.errors import CorruptionError, ThrottledError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.formats.state_object import decode_state
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.rules_in_force import RULES
from uploader.bound_source import no_offsets
from uploader.broker_state_archive import BrokerStateArchive
from uploader.metadata_commits import ABSENT_MS_MIN, DELETIONS_EVERY_MS, TABLE_ATTEMPTS, MetadataCommits
from uploader.offload import Environment, ObjectOptions, Offloader, OffloadIdentity

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
        archive,
        cluster=CLUSTER,
        broker=BROKER,
        instance="follows",
        kind="run",
        clock=Clock(wall_ms=lambda: 1),
    ).claim()
    consumed(tmp_path / "store")
    assert backfill(tmp_path / "store", memory).messages == 0
    assert not knows_what_was_consumed(memory)


def test_damaged_tables_are_reported_and_do_not_fail_a_backfill_with_nothing_to_do(
    real_store: RealStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(real_store("B") / "store", tmp_path / "store")
    memory = MemoryStore("memory://tables")
    backfill(tmp_path / "store", memory)
    for path in (tmp_path / "store" / "config").glob("*.json*"):
        path.write_text("{")
    assert backfill(tmp_path / "store", memory).messages == 0
    assert tables_of(memory) == set(TABLE_NAMES)
    assert caplog.messages == [
        "files of the broker's config directory are damaged: the archive keeps their last good copies"
    ]


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


TOPICS = ["kept", "deleted", *(f"t{number}" for number in range(20))]


class Flaky(MemoryStore):
    fails = False

    def get(self, key: str, *arguments: Any, **options: Any) -> Any:
        if self.fails:
            raise UnavailableError("the store is down")
        return super().get(key, *arguments, **options)


def archived(store: MemoryStore) -> CatalogWriter:
    """An archive with the queues and the table of all TOPICS."""
    made = writer(store)
    made.claim()
    made.append(append_draft(made.state, {queue(name): 1 for name in TOPICS}))
    tables = BrokerStateArchive(store, lambda: {"topics": {name: {} for name in TOPICS}})
    tables.refresh(made.state.epoch, 1)
    made.append(CommitDraft(CommitKind.MAINTENANCE, state_objects=tables.pending()))
    return made


def started(
    store: MemoryStore, made: CatalogWriter, path: Path, table: Sequence[str]
) -> tuple[MetadataCommits, list[QueueKey]]:
    """Metadata commits of a new process beside a broker with ``table``."""
    hidden: list[QueueKey] = []
    names: dict[str, Any] = {name: {} for name in table}
    tables = BrokerStateArchive(store, lambda: {"topics": names})
    tables.adopt(made.state.state_objects)
    broker = SimpleNamespace(path=path, conf=None, topics=lambda: names, consume_queues=lambda: None)

    def commit_metadata(*, hide: Sequence[QueueKey], unhide: Sequence[QueueKey]) -> None:
        assert not unhide
        hidden.extend(hide)

    uploader = SimpleNamespace(
        builder=SimpleNamespace(is_idle=True, next_attempt=lambda: 2),
        commit_metadata=commit_metadata,
        has_new_settings=lambda: False,
    )
    commits = MetadataCommits(
        broker,
        made,
        uploader,
        tables,  # type: ignore[arg-type]
        claim=lambda: None,
        wait=lambda seconds: None,
    )
    return commits, hidden


@pytest.fixture
def store() -> Flaky:
    return Flaky()


def test_a_topic_deleted_while_no_process_watched_is_hidden_after_an_hour(
    store: Flaky, tmp_path: Path
) -> None:
    made = archived(store)
    commits, hidden = started(store, made, tmp_path, [name for name in TOPICS if name != "deleted"])
    commits.step(0)
    commits.step(ABSENT_MS_MIN - DELETIONS_EVERY_MS)
    assert not hidden
    commits.step(ABSENT_MS_MIN)
    assert hidden == [queue("deleted")]


def test_a_disk_without_its_topics_deletes_nothing(store: Flaky, tmp_path: Path) -> None:
    commits, hidden = started(store, archived(store), tmp_path, ["kept"])
    commits.step(0)
    commits.step(2 * ABSENT_MS_MIN)
    assert not hidden


WEEK, DAY = {"retention.ttl": "7d"}, {"retention.ttl": "1d"}


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore("memory://rules")


def write(store: Path, memory: MemoryStore, kind: str, rules: Mapping[str, Any]) -> None:
    """A backfill, or what `tiered run` does until it is stopped at the end of the log."""
    stop = threading.Event()
    if kind == "run":
        stop.set()
    with open_broker_store(store) as opened:
        Offloader(
            opened,
            memory,
            OffloadIdentity(CLUSTER, BROKER, "test", kind),
            SMALL,
            topic_filter=FILTER,
            offsets_source=no_offsets,
            options=ObjectOptions(rules_document=rules),
        ).run(stop, follow=kind == "run")


def rules_of(memory: MemoryStore) -> object:
    state: CatalogState = load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)))
    return state.settings.get(RULES)


def test_rules_are_committed_by_their_owner(tmp_path: Path, memory: MemoryStore) -> None:
    broker = SmallBroker(tmp_path / "store")
    for kind, rules, expected in (
        ("backfill", {}, None),
        ("backfill", WEEK, WEEK),
        ("run", DAY, DAY),
        ("backfill", WEEK, DAY),
        ("backfill", {}, DAY),
        ("run", WEEK, WEEK),
    ):
        broker.send(20)
        write(broker.path, memory, kind, rules)
        assert rules_of(memory) == expected, (kind, rules)


def test_sizes_of_the_brokers_files_are_recorded(tmp_path: Path, memory: MemoryStore) -> None:
    broker = SmallBroker(tmp_path / "store")
    broker.send(20)
    write(broker.path, memory, "backfill", {})
    found = recorded_facts(load(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER))))
    assert found == BrokerFacts(FILE_BYTES, QUEUE_UNITS * 20, "")


def test_what_is_unknown_of_the_broker_leaves_what_is_recorded() -> None:
    known = BrokerFacts(1 << 30, 6_000_000, "V5_3_3")
    state = CatalogState(settings=facts_to_record(CatalogState(), known))
    assert recorded_facts(state) == known and recorded_facts(CatalogState()) == BrokerFacts()
    assert not facts_to_record(state, known) and not facts_to_record(state, BrokerFacts())
    newer = CatalogState(settings=facts_to_record(state, BrokerFacts(version="V5_5_0")))
    assert recorded_facts(newer) == known._replace(version="V5_5_0")
    with pytest.raises(CorruptionError, match="broker"):
        recorded_facts(CatalogState(settings={"broker": {"version": 5}}))
