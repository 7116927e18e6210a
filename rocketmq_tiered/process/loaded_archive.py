"""Opens an archive for commands that read its catalog."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

from tiered.catalog.archives import Archive, list_archives, open_archive
from tiered.catalog.broker_facts import broker_table
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.errors import UsageError
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRule, TopicRules

_TOPICS: Final = "topics"


def archived_topic_table(store: ObjectStore, state: CatalogState) -> Mapping[str, Any]:
    """The broker's topic table, empty if none was archived. Raises ArchiveDamagedError if it cannot be read."""
    key = state.state_objects.get(_TOPICS)
    if key is None:
        return {}
    table = broker_table(store, key, _TOPICS)
    return table if isinstance(table, dict) else {}


def rules_of(archive: LoadedArchive, settings: Settings) -> Callable[[str], TopicRule]:
    """The rule of each topic of ``archive``. Reads the topic table once, and only if it counts."""
    return rules_in(archive.store, archive.state, settings)


def keyed_topics(
    rule_of: Callable[[str], TopicRule], settings: Settings, topic: str | None = None
) -> Callable[[str], bool]:
    """Whether the keys of a topic are compacted here: of all topics, or only ``topic``. Raises UsageError if its keys
    are not."""
    if topic is not None and not rule_of(topic).key_compaction:
        raise UsageError(
            f"keys of topic {topic} are not compacted",
            hint='set key_compaction = "on" in a [[topics.rules]] entry of the archive\'s owner',
        )
    return lambda one: topic in (None, one) and one != settings.timers.topic and rule_of(one).key_compaction


def rules_in(store: ObjectStore, state: CatalogState, settings: Settings) -> Callable[[str], TopicRule]:
    """``rules_of`` for the archive in ``store``, at ``state``."""
    rules = TopicRules.of(settings)
    uses_table = settings.retention.from_broker or settings.key_compaction.from_broker
    table = archived_topic_table(store, state) if uses_table else {}
    return cache(lambda topic: rules.of_topic(topic, table))


@dataclass(frozen=True)
class LoadedArchive:
    """One broker's archive, open for reading at one catalog version. ``store`` is rooted at the archive."""

    url: str
    cluster: str
    broker: str
    store: ObjectStore
    state: CatalogState

    @property
    def title(self) -> str:
        """Names and URL, for messages."""
        return f"{self.cluster}/{self.broker} in {self.url}"


@contextmanager
def open_all_for_reading(url: str, settings: Settings) -> Iterator[list[LoadedArchive]]:
    """Every archive below ``url`` that ``settings.archive`` does not exclude, by name.

    Raises NotFoundError when there is none.
    """
    wanted = settings.archive.cluster, settings.archive.broker
    root = open_store(url, StoreOptions(settings.object_store))
    try:
        names = [] if all(wanted) else [names for names in list_archives(root) if _fits(names, wanted)]
        every = [open_archive(root, *found) for found in names]
        every = every or [open_archive(root, *(want or None for want in wanted))]
        yield [LoadedArchive(url, one.cluster, one.broker, one.store, load(one.store)) for one in every]
    finally:
        root.close()


def _fits(names: tuple[str, str], wanted: tuple[str, str]) -> bool:
    return all(want in ("", name) for want, name in zip(wanted, names, strict=True))


@contextmanager
def open_archive_store(url: str, settings: Settings) -> Iterator[Archive]:
    """The archive that ``settings.archive`` names below ``url``, or the only one there, whose catalog is not read.

    Raises NotFoundError when there is none, UsageError listing the names when there are several.
    """
    root = open_store(url, StoreOptions(settings.object_store))
    try:
        yield open_archive(root, settings.archive.cluster or None, settings.archive.broker or None)
    finally:
        root.close()


@contextmanager
def open_for_reading(url: str, settings: Settings) -> Iterator[LoadedArchive]:
    """The archive of ``open_archive_store``, with its newest state."""
    with open_archive_store(url, settings) as found:
        yield LoadedArchive(url, found.cluster, found.broker, found.store, load(found.store))
