"""Topics that were deleted while no process watched are noticed after the next start.

The owner commits the rules in force, whenever they change and also without messages; a backfill leaves them.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.catalog.drafts import append_draft, queue, writer
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL
from tests.uploader.small_broker import FILE_BYTES, QUEUE_UNITS, SmallBroker
from tiered.broker_store.store import open_broker_store
from tiered.catalog.broker_facts import BrokerFacts, facts_to_record, recorded_facts
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.state import CatalogState
from tiered.errors import CorruptionError, UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.rules_in_force import RULES
from uploader.bound_source import no_offsets
from uploader.broker_state_archive import BrokerStateArchive
from uploader.metadata_commits import ABSENT_MS_MIN, DELETIONS_EVERY_MS, MetadataCommits
from uploader.offload import ObjectOptions, Offloader, OffloadIdentity

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
        is_idle=True, commit_metadata=commit_metadata, next_attempt=lambda: 2, has_new_settings=lambda: False
    )
    commits = MetadataCommits(
        broker,
        made,
        uploader,
        tables,  # type: ignore[arg-type]
        claim=lambda: None,
        log=lambda message, fields: None,
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
