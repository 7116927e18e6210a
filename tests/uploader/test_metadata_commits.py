"""Topics that were deleted while no process watched are noticed after the next start."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.catalog.drafts import append_draft, queue, writer
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.errors import UnavailableError
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from uploader.broker_state_archive import BrokerStateArchive
from uploader.metadata_commits import ABSENT_MS_MIN, DELETIONS_EVERY_MS, MetadataCommits

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
    made = archived(store)
    commits, hidden = started(store, made, tmp_path, ["kept"])
    commits.step(0)
    commits.step(2 * ABSENT_MS_MIN)
    assert not hidden
