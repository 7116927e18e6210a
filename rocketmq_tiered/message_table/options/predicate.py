"""Predicates on catalog and footer columns, from pushed-down filters: ranges, sets, tags. Pure; imports no Spark.

A predicate never excludes a message that the filters admit. Spark need not apply filters that it decides exactly.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.formats.record import java_hash
from tiered.model.queue import SCHEDULE_TOPIC

INT64_MIN, INT64_MAX = -(1 << 63), (1 << 63) - 1
NUMBER_COLUMNS = (
    "queueId",
    "generation",
    "queueOffset",
    "storeTimestamp",
    "commitLogOffset",
    "storeSize",
    "innerNum",
    "tagsCode",
)
"""Columns decided exactly for every row: they are never null in an archive."""

Filter = Any
"""A filter of pyspark.sql.datasource: ``attribute`` is the path of the column, ``value`` the operand (In: a tuple)."""


@dataclass(frozen=True)
class Allowed:
    """Values in [low, high], and in the ascending ``values`` unless None."""

    low: int = INT64_MIN
    high: int = INT64_MAX
    values: tuple[int, ...] | None = None

    def meets(self, other: Allowed) -> Allowed:
        """The values that both allow."""
        low, high = max(self.low, other.low), min(self.high, other.high)
        values = self.values
        if values is None:
            values = other.values
        elif other.values is not None:
            values = tuple(sorted(set(values) & set(other.values)))
        if values is not None:
            values = tuple(value for value in values if low <= value <= high)
        return Allowed(low, high, values)

    def admits(self, value: int) -> bool:
        """Whether ``value`` is allowed."""
        return self.low <= value <= self.high and (self.values is None or value in self.values)

    def mask(self, column: NDArray[Any]) -> NDArray[np.bool_]:
        """Which entries are allowed."""
        inside: NDArray[np.bool_] = (column >= self.low) & (column <= self.high)
        if self.values is not None:
            inside &= np.isin(column, np.array(self.values, np.int64))
        return inside

    def may_hold(self, low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.bool_]:
        """Which ranges [low[i], high[i]] contain an allowed value."""
        touching: NDArray[np.bool_] = (high >= self.low) & (low <= self.high)
        if self.values is not None:
            values = np.array(self.values, np.int64)
            touching &= np.searchsorted(values, low, "left") < np.searchsorted(values, high, "right")
        return touching


@dataclass(frozen=True)
class Predicate:
    """A conjunction of conditions. ``topics`` and ``tags``: names, or None for any."""

    numbers: Mapping[str, Allowed] = field(default_factory=dict)
    topics: frozenset[str] | None = None
    tags: frozenset[str] | None = None

    def allowed(self, column: str) -> Allowed:
        """The allowed values of ``column``."""
        return self.numbers.get(column, Allowed())

    def admits_topic(self, topic: str) -> bool:
        """Whether messages of ``topic`` may match."""
        return self.topics is None or topic in self.topics

    def mask(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_] | None:
        """Rows that match the conditions on these columns, or None for all. Tags are compared by hash code."""
        masks = [self.numbers[name].mask(column) for name, column in columns.items() if name in self.numbers]
        codes = self.tags_codes
        if codes is not None and "tagsCode" in columns:
            masks.append(np.isin(columns["tagsCode"], codes))
        return np.logical_and.reduce(masks) if masks else None

    def also(self, other: Predicate) -> Predicate:
        """The conjunction of both."""
        numbers = dict(self.numbers)
        for name, allowed in other.numbers.items():
            numbers[name] = self.allowed(name).meets(allowed)
        topics = self.topics if other.topics is None else _both(self.topics, other.topics)
        tags = self.tags if other.tags is None else _both(self.tags, other.tags)
        return Predicate(numbers, topics, tags)

    @property
    def tags_codes(self) -> NDArray[np.int64] | None:
        """Hash codes of ``tags``; None for any."""
        return None if self.tags is None else np.array([java_hash(tag) for tag in self.tags], np.int64)

    def without_tags(self) -> Predicate:
        """The predicate for rows whose tagsCode is not a hash of their tags: those of LMQs may refer to any topic."""
        return replace(self, tags=None)

    def for_topics(self, topics: Collection[str]) -> Predicate:
        """The part that columns of ``topics`` decide: the tagsCode of a scheduled message is a time."""
        return self.without_tags() if SCHEDULE_TOPIC in topics else self


def stored_between(since_ms: int | None, until_ms: int | None) -> Predicate:
    """Messages stored in [``since_ms``, ``until_ms``), ms since the epoch; None is no bound."""
    if since_ms is None and until_ms is None:
        return Predicate()
    low = INT64_MIN if since_ms is None else since_ms
    high = INT64_MAX if until_ms is None else until_ms - 1
    return Predicate({"storeTimestamp": Allowed(low, high)})


def push_down(
    filters: Sequence[Filter], numbers: Collection[str] = NUMBER_COLUMNS
) -> tuple[Predicate, list[Filter]]:
    """(the predicate, the filters that Spark must still apply). ``numbers``: columns that are never null."""
    predicate, left = Predicate(), list[Filter]()
    for one in filters:
        path: tuple[str, ...] = getattr(one, "attribute", ())  # Not has none
        name = path[0] if len(path) == 1 else ""
        if name in numbers:
            allowed = Allowed() if type(one).__name__ == "IsNotNull" else _numbers(one)
            if allowed is None:
                left.append(one)
                continue
            met = {**predicate.numbers, name: predicate.allowed(name).meets(allowed)}
            predicate = replace(predicate, numbers=met)
            continue
        left.append(one)
        texts = _texts(one)
        if texts is None:
            continue
        if name == "topic":
            predicate = replace(predicate, topics=_both(predicate.topics, texts))
        elif name == "tags" and all(map(has_code, texts)):
            predicate = replace(predicate, tags=_both(predicate.tags, texts))
    return predicate, left


def has_code(tags: str) -> bool:
    """Whether the tagsCode of these tags is their hash: not of tags that were decoded with replacements."""
    return tags != "" and "\ufffd" not in tags and tags.encode("utf-8", "ignore").decode() == tags


def _both(known: frozenset[str] | None, texts: Iterable[str]) -> frozenset[str]:
    return frozenset(texts) if known is None else known & frozenset(texts)


def _numbers(one: Filter) -> Allowed | None:
    kind = type(one).__name__
    given: Any = getattr(one, "value", None)
    if kind == "In":
        given = [value for value in given if value is not None]  # x IN (1, null) is never true for null
        return Allowed(values=tuple(sorted(set(given)))) if all(map(_is_number, given)) else None
    if not _is_number(given):
        return None
    bounds = {
        "EqualTo": Allowed(given, given),
        "EqualNullSafe": Allowed(given, given),
        "GreaterThan": Allowed(low=given + 1),
        "GreaterThanOrEqual": Allowed(low=given),
        "LessThan": Allowed(high=given - 1),
        "LessThanOrEqual": Allowed(high=given),
    }
    return bounds.get(kind)


def _is_number(value: object) -> bool:
    """Whether ``value`` and its neighbours are integers that a column can hold."""
    return isinstance(value, int) and not isinstance(value, bool) and INT64_MIN < value < INT64_MAX


def _texts(one: Filter) -> tuple[str, ...] | None:
    kind = type(one).__name__
    if kind not in ("EqualTo", "EqualNullSafe", "In"):
        return None
    values = one.value if kind == "In" else (one.value,)
    texts = tuple(value for value in values if isinstance(value, str))
    return texts if len(texts) == len(values) else None
