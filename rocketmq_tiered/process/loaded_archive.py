"""Opens an archive for commands that read its catalog."""

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
from tiered.formats.keys import archive_prefix
from tiered.object_store.interface import ObjectStore, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRule, TopicRules

_TOPICS: Final = "topics"


def archived_topic_table(store: ObjectStore, state: CatalogState) -> Mapping[str, Any]:
    """The broker's topic table as the archive has it, by topic name; empty if none was archived. Raises
    ArchiveDamagedError if it is damaged."""
    key = state.state_objects.get(_TOPICS)
    if key is None:
        return {}
    table = broker_table(store, key, _TOPICS)
    return table if isinstance(table, dict) else {}


def keyed_topics(
    rule_of: Callable[[str], TopicRule], settings: Settings, only: str | None = None
) -> Callable[[str], bool]:
    """A predicate of topic names for key compaction, which keeps the latest message of each key: whether it works on
    the topic. ``only`` restricts it to one topic. Raises UsageError if that one's rule is against key compaction."""
    if only is not None and not rule_of(only).key_compaction:
        raise UsageError(
            f"the settings do not have the keys of topic {only} compacted",
            hint='set key_compaction = "on" in a [[topics.rules]] entry of the sidecar that archives the topic',
        )
    return lambda topic: (
        only in (None, topic) and topic != settings.timers.topic and rule_of(topic).key_compaction
    )


def rules_in(store: ObjectStore, state: CatalogState, settings: Settings) -> Callable[[str], TopicRule]:
    """A function from a topic name to the rule (retention, key compaction) in force for it in the archive at
    ``state``. The broker's topic table is read once, and only if the settings take rules from it."""
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
    """Open every archive below ``url`` whose cluster and broker are those of ``settings.archive``; an empty name there
    fits all. They are in the order of their names, each with its newest catalog state.

    Raises NotFoundError when there is none.
    """
    wanted = settings.archive.cluster, settings.archive.broker
    root = open_store(url, StoreOptions(settings.object_store))
    try:
        names = [] if all(wanted) else [names for names in list_archives(root) if _fits(names, wanted)]
        archives = [open_archive(root, *found) for found in names]
        # One that is named needs no listing; where none fits, this raises what says so.
        archives = archives or [open_archive(root, *(want or None for want in wanted))]
        yield [
            LoadedArchive(url, found.cluster, found.broker, found.store, load(found.store))
            for found in archives
        ]
    finally:
        root.close()


def _fits(names: tuple[str, str], wanted: tuple[str, str]) -> bool:
    return all(want in ("", name) for want, name in zip(wanted, names, strict=True))


@contextmanager
def open_archive_store(url: str, settings: Settings, *, is_rewritten: bool = False) -> Iterator[Archive]:
    """Open the archive below ``url`` that ``settings.archive`` names, or the only one there, without reading its
    catalog. Data objects that are to be rewritten (``is_rewritten``) take the archive's keys, without which nothing
    may begin.

    Raises NotFoundError when there is none, UsageError listing the names when there are several, EncryptionKeyError.
    """
    root = open_store(url, StoreOptions(settings.object_store))
    try:
        found = open_archive(root, settings.archive.cluster or None, settings.archive.broker or None)
        if is_rewritten:
            root.keys(archive_prefix(found.cluster, found.broker)).check()
        yield found
    finally:
        root.close()


@contextmanager
def open_for_reading(url: str, settings: Settings, *, is_rewritten: bool = False) -> Iterator[LoadedArchive]:
    """The archive of ``open_archive_store``, with its newest state."""
    with open_archive_store(url, settings, is_rewritten=is_rewritten) as found:
        yield LoadedArchive(url, found.cluster, found.broker, found.store, load(found.store))
