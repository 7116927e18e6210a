"""The TTL class of each queue of a table, and whether its topic has a key of its own: which runs may share an object.
Owns when topic attributes are read again."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.queue_table import QueueTable
from tiered.settings.topic_rules import RESERVE_TIME, TopicRules, reserve_hours

TTL_CLASS_DAYS: Final = (1, 3, 7, 14, 30, 90, 365)
FOREVER_CLASS: Final = 0
"""Messages whose time to live is similar share objects, so that an object's messages expire together. A class is a
number of days; this one holds what never expires or stays longer than every class, and objects from before there were
classes. Expiry never depends on classes: they only decide how much space a dead message occupies until its object is
deleted."""
_DAY_MS: Final = 86_400_000


def ttl_class(ttl_ms: int | None) -> int:
    """The smallest class that is not shorter than a time to live; None: forever."""
    if ttl_ms is None:
        return FOREVER_CLASS
    return next((days for days in TTL_CLASS_DAYS if ttl_ms <= days * _DAY_MS), FOREVER_CLASS)


class QueueTtlClasses:
    """Classes of one queue table, by ``rules`` and the broker's topic table. One thread may adopt a topic
    table while another plans."""

    def __init__(self, rules: TopicRules | None = None) -> None:
        self._rules = rules or TopicRules()
        self._attributes = attributes_in_use(self._rules, {})
        self._made_of = self._attributes
        self._days = np.empty(0, np.int64)
        self._is_alone = np.empty(0, np.bool_)

    def adopt(self, topics: Mapping[str, Any]) -> None:
        """Use the topic table of the broker from the next cycle on."""
        attributes = attributes_in_use(self._rules, topics)
        if attributes != self._attributes:
            self._attributes = attributes

    def is_alone(self, table: QueueTable) -> NDArray[np.bool_]:
        """Whether every queue of ``table``, by ordinal, shares no object with others."""
        if not self._rules.own_keys:
            return np.zeros(len(table), np.bool_)
        added = [self._rules.has_own_key(table.topic(at)) for at in range(len(self._is_alone), len(table))]
        self._is_alone = np.concatenate([self._is_alone, np.array(added, np.bool_)])
        return self._is_alone

    def days(self, table: QueueTable) -> NDArray[np.int64]:
        """The TTL class of every queue of ``table``, in days (FOREVER_CLASS: it never expires), by ordinal. Classes are
        kept from call to call, until another topic table is adopted."""
        attributes = self._attributes
        if attributes is not self._made_of:
            self._made_of, self._days = attributes, np.empty(0, np.int64)
        # Queues that a scan adds from now on are for the next call.
        first, count = len(self._days), len(table)
        if first < count:
            by_topic: dict[str, int] = {}
            added = np.full(count - first, FOREVER_CLASS, np.int64)
            for ordinal in range(first, count):
                topic = table.topic(ordinal)
                days = by_topic.get(topic)
                if days is None:
                    days = by_topic[topic] = ttl_class(self._rules.of_topic(topic, attributes).ttl_ms)
                added[ordinal - first] = days
            self._days = np.concatenate([self._days, added])
        return self._days


def attributes_in_use(rules: TopicRules, topics: Mapping[str, Any]) -> dict[str, Any]:
    """The topic table reduced to what ``rules`` use: tables are large, and change with every new topic."""
    if not rules.retention.from_broker:
        return {}
    hours = ((topic, reserve_hours(topic, topics)) for topic in topics)
    return {topic: {"attributes": {RESERVE_TIME: found}} for topic, found in hours if found is not None}
