"""The rules of an archive's topics: the settings of this command, and the topic table that the archive holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from rocketmq_tiered.process.loaded_archive import LoadedArchive
from tiered.catalog.state import CatalogState
from tiered.errors import UsageError
from tiered.formats.memory_bound import stored_bytes_max
from tiered.formats.state_object import decode_state
from tiered.object_store.interface import ObjectStore
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRule, TopicRules

_TOPICS: Final = "topics"


def archived_topic_table(store: ObjectStore, state: CatalogState) -> Mapping[str, Any]:
    """The broker's topic table, empty if none was archived. Raises what reading an object raises."""
    key = state.state_objects.get(_TOPICS)
    if key is None:
        return {}
    table = decode_state(store.get(key, stored_bytes_max()), _TOPICS, source=f"{store.url}/{key}")
    return table if isinstance(table, dict) else {}


def rules_of(archive: LoadedArchive, settings: Settings) -> Callable[[str], TopicRule]:
    """The rule of each topic of ``archive``. Reads the topic table once, and only if it counts."""
    return rules_in(archive.store, archive.state, settings)


def require_keyed(topic: str | None, rule_of: Callable[[str], TopicRule]) -> None:
    """Raises UsageError if keys of ``topic`` are not compacted."""
    if topic is not None and not rule_of(topic).key_compaction:
        raise UsageError(
            f"keys of topic {topic} are not compacted",
            hint='set key_compaction = "on" in a [[topics.rules]] entry of the archive\'s owner',
        )


def rules_in(store: ObjectStore, state: CatalogState, settings: Settings) -> Callable[[str], TopicRule]:
    """``rules_of`` for the archive in ``store``, at ``state``."""
    rules = TopicRules.of(settings)
    uses_table = settings.retention.from_broker or settings.key_compaction.from_broker
    table = archived_topic_table(store, state) if uses_table else {}
    return cache(lambda topic: rules.of_topic(topic, table))
