"""Predicates on catalog and footer columns, from pushed-down filters: ranges of numbers, tags. Pure; imports no Spark.

A predicate never excludes a message that the filters admit. Spark need not apply filters that it decides exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
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
    """Values in ``ranges``: first and last of each, ascending, with others between two of them."""

    ranges: tuple[tuple[int, int], ...] = ((INT64_MIN, INT64_MAX),)

    @classmethod
    def of(cls, values: Iterable[int]) -> Allowed:
        """Only ``values``."""
        return cls(()).either(cls(tuple((value, value) for value in values)))

    @classmethod
    def between(cls, low: int = INT64_MIN, high: int = INT64_MAX) -> Allowed:
        """Those from ``low`` to ``high``."""
        low, high = max(low, INT64_MIN), min(high, INT64_MAX)
        return cls(((low, high),) if low <= high else ())

    @property
    def low(self) -> int:
        """The lowest allowed value."""
        return self.ranges[0][0] if self.ranges else INT64_MAX

    @property
    def high(self) -> int:
        """The highest allowed value."""
        return self.ranges[-1][1] if self.ranges else INT64_MIN

    def either(self, other: Allowed) -> Allowed:
        """The values that one of both allows."""
        found: list[tuple[int, int]] = []
        for one in sorted(self.ranges + other.ranges):
            is_joined = found and one[0] <= found[-1][1] + 1
            found.append((found[-1][0], max(found.pop()[1], one[1])) if is_joined else one)
        return Allowed(tuple(found))

    def outside(self) -> Allowed:
        """The other values."""
        edges = [INT64_MIN - 1, *chain.from_iterable(self.ranges), INT64_MAX + 1]
        gaps = zip(edges[::2], edges[1::2], strict=True)
        return Allowed(tuple((last + 1, first - 1) for last, first in gaps if last + 1 < first))

    def meets(self, other: Allowed) -> Allowed:
        """The values that both allow."""
        return self.outside().either(other.outside()).outside()

    def admits(self, value: int) -> bool:
        """Whether ``value`` is allowed."""
        return any(first <= value <= last for first, last in self.ranges)

    def may_hold(self, low: NDArray[Any], high: NDArray[Any]) -> NDArray[np.bool_]:
        """Which ranges [low[i], high[i]] contain an allowed value."""
        first, last = np.array(self.ranges, np.int64).reshape(-1, 2).T
        found: NDArray[np.bool_] = np.searchsorted(last, low, "left") < np.searchsorted(first, high, "right")
        return found


COMPARISONS: Mapping[str, Callable[[int, int], Allowed]] = {
    "equal": lambda below, above: Allowed.between(above, below),
    "greater": lambda below, above: Allowed.between(low=below + 1),
    "greater_equal": lambda below, above: Allowed.between(low=above),
    "less": lambda below, above: Allowed.between(high=above - 1),
    "less_equal": lambda below, above: Allowed.between(high=below),
}
"""Comparison -> the integers for which it is true. Its arguments are the number compared with, rounded down and rounded
up, which are equal for a whole number."""


@dataclass(frozen=True)
class Predicate:
    """A conjunction of conditions. ``topics`` and ``tags``: names, or None for any; ``keys``: each message has one of
    them, which the key index can find."""

    numbers: Mapping[str, Allowed] = field(default_factory=dict)
    topics: frozenset[str] | None = None
    tags: frozenset[str] | None = None
    keys: frozenset[str] | None = None

    def allowed(self, column: str) -> Allowed:
        """The allowed values of ``column``."""
        return self.numbers.get(column, Allowed())

    def admits_topic(self, topic: str) -> bool:
        """Whether messages of ``topic`` may match."""
        return self.topics is None or topic in self.topics

    def mask(self, columns: Mapping[str, NDArray[Any]]) -> NDArray[np.bool_] | None:
        """Rows that match the conditions on these columns, or None for all. Tags are compared by hash code."""
        masks = [
            self.numbers[name].may_hold(column, column)
            for name, column in columns.items()
            if name in self.numbers
        ]
        codes = self.tags_codes
        if codes is not None and "tagsCode" in columns:
            masks.append(np.isin(columns["tagsCode"], codes))
        return np.logical_and.reduce(masks) if masks else None

    def also(self, other: Predicate) -> Predicate:
        """A predicate that admits only what both this one and ``other`` admit (AND)."""
        numbers = dict(self.numbers)
        for name, allowed in other.numbers.items():
            numbers[name] = self.allowed(name).meets(allowed)
        topics = self.topics if other.topics is None else _both(self.topics, other.topics)
        tags = self.tags if other.tags is None else _both(self.tags, other.tags)
        return Predicate(numbers, topics, tags, other.keys if self.keys is None else self.keys)

    def either(self, other: Predicate) -> Predicate:
        """A predicate that admits what this one or ``other`` admits (OR). It may admit more, because each column is
        combined alone; rows are compared with the whole condition afterwards."""
        numbers = {
            name: allowed.either(other.numbers[name])
            for name, allowed in self.numbers.items()
            if name in other.numbers
        }
        topics = None if self.topics is None or other.topics is None else self.topics | other.topics
        tags = None if self.tags is None or other.tags is None else self.tags | other.tags
        keys = None if self.keys is None or other.keys is None else self.keys | other.keys
        return Predicate(numbers, topics, tags, keys)

    @property
    def tags_codes(self) -> NDArray[np.int64] | None:
        """Hash codes of ``tags``; None for any."""
        return None if self.tags is None else np.array([java_hash(tag) for tag in self.tags], np.int64)

    def for_topics(self, topics: Collection[str]) -> Predicate:
        """The part that columns of ``topics`` decide: the tagsCode of a scheduled message is a time."""
        return replace(self, tags=None) if SCHEDULE_TOPIC in topics else self


def stored_between(since_ms: int | None, until_ms: int | None) -> Predicate:
    """Messages stored in [``since_ms``, ``until_ms``), ms since the epoch; None is no bound."""
    if since_ms is None and until_ms is None:
        return Predicate()
    low = INT64_MIN if since_ms is None else since_ms
    high = INT64_MAX if until_ms is None else until_ms - 1
    return Predicate({"storeTimestamp": Allowed.between(low, high)})


def push_down(
    filters: Sequence[Filter], numbers: Collection[str] = NUMBER_COLUMNS
) -> tuple[Predicate, list[Filter]]:
    """Take from Spark's filters what the archive can use to read less: (the predicate, the filters that Spark must
    still apply to the rows). ``numbers``: the columns of numbers, which are never null."""
    predicate, left = Predicate(), list[Filter]()
    for one in filters:
        path: tuple[str, ...] = getattr(one, "attribute", ())  # the filter Not has no attribute
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
        return Allowed.of(given) if all(map(_is_number, given)) else None
    return COMPARISONS[_SPARK[kind]](given, given) if _is_number(given) and kind in _SPARK else None


_SPARK = {
    "EqualTo": "equal",
    "EqualNullSafe": "equal",
    "GreaterThan": "greater",
    "GreaterThanOrEqual": "greater_equal",
    "LessThan": "less",
    "LessThanOrEqual": "less_equal",
}


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
