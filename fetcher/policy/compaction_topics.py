"""Which topics the broker compacts, by its own topic table.

A broker replaces what it serves of such a topic at every compaction: offsets without a message are not lost, and values
that it removed are superseded. The archive has what was sent. So clients get the broker's replies unchanged.
Source: org.apache.rocketmq.common.attribute.CQType, CleanupPolicyUtils; the attribute of a topic cannot be changed.
"""

from __future__ import annotations

from typing import Final

from tiered.broker_store.config import topics_fingerprint
from tiered.broker_store.store import BrokerStore
from tiered.settings.topic_rules import is_compacted

REFRESH_S: Final = 5.0


class CompactionTopics:
    """The broker's compaction topics as of the last ``refresh``."""

    def __init__(self, store: BrokerStore) -> None:
        self._store = store
        self._fingerprint: tuple[tuple[str, int, int], ...] | None = None
        self._names: frozenset[str] = frozenset()

    def __contains__(self, topic: object) -> bool:
        return topic in self._names

    def refresh(self) -> None:
        """Read the table if the broker has written it. Blocking. Raises CorruptionError, UnavailableError and
        AccessDeniedError; the topics then stay as they were."""
        fingerprint = topics_fingerprint(self._store.path)
        if fingerprint == self._fingerprint:
            return
        table = self._store.topics()
        self._names = frozenset(name for name, config in table.items() if is_compacted(config))
        self._fingerprint = fingerprint
