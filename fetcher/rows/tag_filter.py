"""The interface of message filters, and the filter by tag.

A filter is applied twice: to consume-queue columns before a record is fetched, then to the record. The broker's tag
filter compares 32-bit hashes and leaves the rest to the client (DefaultMessageFilter); this one compares tags. SQL92 is
in fetcher/sql92.
"""

from __future__ import annotations

import array
from collections.abc import Iterable
from functools import reduce
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from fetcher.rows.record_properties import Properties, properties_bytes
from tiered.errors import UsageError

ANY_TAG = "*"
EXPRESSION_CHARS_MAX = 16 * 1024
"""Limit of a tag or SQL92 expression. Brokers have no limit of their own; Alibaba Cloud's service allows 1,024."""
TAGS_MAX = 1024


class MessageFilter(Protocol):
    """Selects messages. Immutable and thread-safe."""

    def tags_mask(self, tags_code: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Rows that may match by their tags codes; None if codes do not decide."""
        ...

    def keep(self, record: memoryview) -> bool:
        """Whether this record matches; called only for rows in ``tags_mask``. Raises CorruptionError."""
        ...


class TagFilter:
    """Keeps messages with one of ``tags``. Implements MessageFilter."""

    def __init__(self, tags: Iterable[str]) -> None:
        self.tags = frozenset(tags)
        self._codes = np.array(sorted({tags_code(tag) for tag in self.tags}), np.int64)

    def __repr__(self) -> str:
        return f"TagFilter({' || '.join(sorted(self.tags))!r})"

    def tags_mask(self, tags_code: NDArray[np.int64]) -> NDArray[np.bool_]:
        """See MessageFilter."""
        if len(self._codes) == 1:
            found: NDArray[np.bool_] = tags_code == self._codes[0]
            return found
        return np.isin(tags_code, self._codes)

    def keep(self, record: memoryview) -> bool:
        """See MessageFilter. Different tags may have equal codes ("Aa" and "BB")."""
        return Properties(properties_bytes(record))("TAGS") in self.tags


def tags_code(tag: str) -> int:
    """The code a broker stores for ``tag``: String.hashCode, over UTF-16 units (MessageExtBrokerInner)."""
    units = array.array("H", tag.encode("utf-16-le", "surrogatepass"))
    code = reduce(lambda hashed, unit: (31 * hashed + unit) & 0xFFFF_FFFF, units, 0)
    return code - (1 << 32) if code >> 31 else code


def tag_filter(expression: str | None) -> TagFilter | None:
    """The filter ``a || b || c`` means; None where it means every message (empty, ``*``).

    Raises UsageError when no tag is left (org.apache.rocketmq.remoting FilterAPI.buildSubscriptionData), and above
    EXPRESSION_CHARS_MAX and TAGS_MAX.
    """
    if not expression or expression == ANY_TAG:
        return None
    if len(expression) > EXPRESSION_CHARS_MAX:
        raise UsageError(
            f"filter has {len(expression)} characters, at most {EXPRESSION_CHARS_MAX} are allowed"
        )
    if expression.count("||") >= TAGS_MAX:
        raise UsageError(f"filter has more than {TAGS_MAX} tags")
    tags = [tag.strip() for tag in expression.split("||")]
    tags = [tag for tag in tags if tag]
    if not tags:
        raise UsageError(f"filter {expression[:200]} has no tag", hint="write a || b")
    return TagFilter(tags)
