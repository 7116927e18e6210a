"""The rule of each topic: time to live, size limit and read policy, and what set each of them. Pure.

The first entry of ``topics.rules`` whose pattern matches applies alone. What it leaves open comes from the topic's
attributes ``reserve.time`` (time to live) and ``cleanup.policy`` (key compaction), then from ``[retention]`` and
``[read]``. Messages of a topic whose keys are compacted stay forever unless a rule says how long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Final

from tiered.settings.quantities import written_duration
from tiered.settings.rule_entries import RuleEntry
from tiered.settings.sections import HOUR_MS, KeyCompactionSettings, ReadSettings, RetentionSettings, Settings

RESERVE_TIME: Final = "reserve.time"
"""The topic attribute of RocketMQ 5: hours, unset if not positive (org.apache.rocketmq.common.TopicAttributes)."""
NO_LIMIT: Final = "default"
TTL_KEY: Final = "retention.ttl"
POLICY_KEY: Final = "read.policy"
CLEANUP_POLICY: Final = "cleanup.policy"
COMPACTION: Final = "COMPACTION"
KEYS_FOREVER: Final = "key compaction"
"""What keeps the messages of a topic forever: the last one of a key has no age."""
_HOURS_MAX: Final = 100 * 366 * 24


@dataclass(frozen=True)
class TopicRule:
    """The rule of one topic. ``ttl_ms`` None: forever; ``max_bytes`` None: no limit; ``…_from``: what set the value.
    ``min_archived_ms``: messages stay this long after their commit, whatever their store time."""

    topic: str
    ttl_ms: int | None
    min_archived_ms: int
    ttl_from: str
    max_bytes: int | None
    max_bytes_from: str
    read_policy: str
    read_policy_from: str
    key_compaction: bool = False
    """The latest message of each key stays, older ones are dropped."""

    @property
    def ttl(self) -> str:
        """The TTL as text, such as ``7d``."""
        return written_duration(self.ttl_ms)

    def to_json(self) -> dict[str, Any]:
        """The rule as `tiered ls --json` prints it for each queue. A time to live of null is forever."""
        return {
            "ttlMs": self.ttl_ms,
            "ttlFrom": self.ttl_from,
            "maxBytes": self.max_bytes,
            "maxBytesFrom": self.max_bytes_from,
            "readPolicy": self.read_policy,
            "readPolicyFrom": self.read_policy_from,
            "keyCompaction": self.key_compaction,
        }


def ring_key_of(keys: Sequence[tuple[str, str]], topic: str) -> str:
    """The ring key of the first of ``keys``, pairs of pattern and ring key, that fits ``topic``; "": it has none of its
    own."""
    return next((key for pattern, key in keys if fnmatchcase(topic, pattern)), "")


@dataclass(frozen=True)
class TopicRules:
    """The rules of an archive: checked settings, and the broker's topic table by topic name."""

    entries: tuple[RuleEntry, ...] = ()
    retention: RetentionSettings = field(default_factory=RetentionSettings)
    read_policy: str = ReadSettings.policy
    compacts_broker_topics: bool = KeyCompactionSettings.from_broker

    @staticmethod
    def of(settings: Settings) -> TopicRules:
        """The rules that ``settings``, which were checked, give topics."""
        return TopicRules(
            settings.topics.rules,
            settings.retention,
            settings.read.default_policy(),
            settings.key_compaction.from_broker,
        )

    @property
    def own_keys(self) -> tuple[tuple[str, str], ...]:
        """Pattern and ring key of each entry ("": none), if any has one."""
        found = tuple((entry.pattern, entry.encryption_key or "") for entry in self.entries)
        return found if any(key for _, key in found) else ()

    def has_own_key(self, topic: str) -> bool:
        """Whether ``topic`` has a ring key of its own: its messages are in objects of their own."""
        return bool(ring_key_of(self.own_keys, topic))

    def of_topic(self, topic: str, table: Mapping[str, Any] | None = None) -> TopicRule:
        """The rule in force for ``topic``: each value from the first entry of topics.rules that matches, else from the
        topic's attributes at the broker, else from the defaults. ``table``: the broker's topic table as archived; None:
        unknown."""
        number, entry = next(
            (found for found in enumerate(self.entries, 1) if fnmatchcase(topic, found[1].pattern)),
            (0, RuleEntry(topic)),  # an entry that sets nothing
        )
        rule = f"rule {number}: {entry.pattern}"
        ttl_ms, ttl_from = self.retention.ttl_ms, TTL_KEY
        hours = reserve_hours(topic, table or {}) if self.retention.from_broker else None
        compacted_by_broker = self.compacts_broker_topics and is_compacted((table or {}).get(topic))
        key_compaction = compacted_by_broker if entry.key_compaction is None else entry.key_compaction == "on"
        if key_compaction and entry.ttl is None:
            ttl_ms, ttl_from = None, KEYS_FOREVER
        elif entry.ttl is not None:
            ttl_ms, ttl_from = RetentionSettings(ttl=entry.ttl).ttl_ms, rule
        elif hours is not None:
            ttl_ms, ttl_from = hours * HOUR_MS, f"topic attribute {RESERVE_TIME}"
        return TopicRule(
            topic,
            ttl_ms,
            self.retention.min_archived_ms(ttl_ms),
            ttl_from,
            entry.max_bytes,
            rule if entry.max_bytes is not None else NO_LIMIT,
            entry.read_policy or self.read_policy,
            rule if entry.read_policy is not None else POLICY_KEY,
            key_compaction,
        )


def is_compacted(config: object) -> bool:
    """Whether a topic's configuration asks for compaction."""
    attributes = config.get("attributes") if isinstance(config, Mapping) else None
    policy = attributes.get(CLEANUP_POLICY) if isinstance(attributes, Mapping) else None
    return isinstance(policy, str) and policy.upper() == COMPACTION


def reserve_hours(topic: str, table: Mapping[str, Any]) -> int | None:
    """How many hours the messages of ``topic`` stay by its attribute ``reserve.time`` in the broker's topic table; None
    if it is unset or not a positive number."""
    config = table.get(topic)
    attributes = config.get("attributes") if isinstance(config, Mapping) else None
    value = attributes.get(RESERVE_TIME) if isinstance(attributes, Mapping) else None
    try:
        hours = int(str(value))
    except ValueError:
        return None
    return min(hours, _HOURS_MAX) if hours > 0 else None
