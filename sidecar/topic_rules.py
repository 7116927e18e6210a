"""The rules of an archive's topics: the settings of this command, and the topic table that the archive holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Final

from sidecar.archive import Archive
from tiered.formats.memory_bound import stored_bytes_max
from tiered.formats.state_object import decode_state
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import TopicRule, TopicRules

_TOPICS: Final = "topics"


def archived_topic_table(archive: Archive) -> Mapping[str, Any]:
    """The broker's topic table, empty if none was archived. Raises what reading an object raises."""
    key = archive.state.state_objects.get(_TOPICS)
    if key is None:
        return {}
    table = decode_state(
        archive.store.get(key, stored_bytes_max()), _TOPICS, source=f"{archive.store.url}/{key}"
    )
    return table if isinstance(table, dict) else {}


def rules_of(archive: Archive, settings: Settings) -> Callable[[str], TopicRule]:
    """The rule of each topic of ``archive``. Reads the topic table once, and only if it counts."""
    rules = TopicRules.of(settings)
    table = archived_topic_table(archive) if settings.retention.from_broker else {}
    return cache(lambda topic: rules.of_topic(topic, table))
