"""The interface of message filters, the filter by tag, and single properties out of a stored record.

A filter is applied twice: to consume-queue columns before a record is fetched, then to the record. The broker's tag
filter compares 32-bit hashes and leaves the rest to the client (DefaultMessageFilter); this one compares tags. SQL92 is
in fetcher/sql92. Properties are found without decoding the rest of a record. Sources: MessageDecoder.decodeProperties,
MessageDecoder.string2messageProperties.
"""

import array
import struct
from collections.abc import Iterable
from functools import lru_cache, reduce
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from tiered.errors import CorruptionError, UsageError
from tiered.formats.record import MAGIC_V2, SYS_BORN_HOST_V6, SYS_STORE_HOST_V6, decode_text

_MAGIC_AND_FLAG = struct.Struct(">4xI28xI")
_BODY_LENGTH_AT: Final = 84
"""Position with IPv4 hosts; an IPv6 host is longer by 12."""
_LENGTH = struct.Struct(">i")
_SHORT = struct.Struct(">h")
_V6: Final = SYS_BORN_HOST_V6 | SYS_STORE_HOST_V6
_NAME_END, _PAIR_END = b"\x01", b"\x02"
MARKERS_MAX: Final = 256
"""An expression's names may be as long as the expression."""


def properties_bytes(record: memoryview) -> bytes:
    """The properties of one record, as stored: the last part of it. Raises CorruptionError when the lengths inside the
    record do not fit its size."""
    try:
        magic, sys_flag = _MAGIC_AND_FLAG.unpack_from(record)
        at = _BODY_LENGTH_AT
        if sys_flag & _V6:
            at += 12 * (bool(sys_flag & SYS_BORN_HOST_V6) + bool(sys_flag & SYS_STORE_HOST_V6))
        body_bytes = _LENGTH.unpack_from(record, at)[0]
        at += 4 + body_bytes
        if magic == MAGIC_V2:
            topic_bytes = _SHORT.unpack_from(record, at)[0]
            at += 2 + topic_bytes
        else:
            topic_bytes = record[at]
            at += 1 + topic_bytes
        size = _SHORT.unpack_from(record, at)[0]
    except (struct.error, IndexError) as error:
        raise CorruptionError(
            f"the properties of a record of {len(record)} bytes cannot be found: {error}"
        ) from error
    if min(body_bytes, topic_bytes, size) < 0 or at + 2 + size != len(record):
        raise CorruptionError(
            f"a record of {len(record)} bytes does not end with its properties, {size} bytes from byte {at + 2} on"
        )
    return bytes(record[at + 2 :])


SEARCHED_MAX: Final = 16
"""Names that are searched for one by one; for more all properties are split."""


@lru_cache(MARKERS_MAX)
def _marker(name: str) -> bytes:
    return b"".join((_PAIR_END, name.encode("utf-8"), _NAME_END))


class Properties:
    """Looks up properties by name. The last of equal names wins, a pair without a value does not count."""

    __slots__ = ("_found", "_pairs", "_values")

    def __init__(self, stored: bytes) -> None:
        self._pairs = b"".join((_PAIR_END, stored, _PAIR_END))
        self._found: dict[str, str | None] = {}
        self._values: dict[bytes, bytes] | None = None

    def __call__(self, name: str) -> str | None:
        """The value of the property ``name`` as text, or None if the record lacks it. It is searched for once and then
        cached."""
        found = self._found
        if name in found:
            return found[name]
        stored = self._search(name) if len(found) < SEARCHED_MAX else self._split(name)
        value = None
        if stored is not None:
            value = stored.decode("ascii") if stored.isascii() else decode_text(stored)
        found[name] = value
        return value

    def _search(self, name: str) -> bytes | None:
        """The stored value of the property ``name``; None if the record lacks it. If the name occurs several times, the
        last one with a value counts, as in the broker."""
        pairs, wanted = self._pairs, _marker(name)
        found = pairs.rfind(wanted)
        if found < 0:
            return None
        begin = found + len(wanted)
        # The last pair of this name has no value: an earlier one counts.
        return pairs[begin : pairs.index(_PAIR_END, begin)] or self._split(name)

    def _split(self, name: str) -> bytes | None:
        if self._values is None:
            pairs = (pair.partition(_NAME_END) for pair in self._pairs.split(_PAIR_END))
            self._values = {key: value for key, _, value in pairs if value}
        return self._values.get(name.encode("utf-8"))


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
        if len(self._codes) == 1:
            found: NDArray[np.bool_] = tags_code == self._codes[0]
            return found
        return np.isin(tags_code, self._codes)

    def keep(self, record: memoryview) -> bool:
        """Whether the record has one of the tags: different tags may have equal codes ("Aa" and "BB")."""
        return Properties(properties_bytes(record))("TAGS") in self.tags


def tags_code(tag: str) -> int:
    """The code a broker stores for ``tag``: String.hashCode, over UTF-16 units (MessageExtBrokerInner)."""
    units = array.array("H", tag.encode("utf-16-le", "surrogatepass"))
    code = reduce(lambda hashed, unit: (31 * hashed + unit) & 0xFFFF_FFFF, units, 0)
    return code - (1 << 32) if code >> 31 else code


def tag_filter(expression: str | None) -> TagFilter | None:
    """The filter for a tag expression such as ``TagA || TagB``; None where it means every message (empty, ``*``).

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
        raise UsageError(
            f"filter {expression[:200]} has no tag", hint="write one tag, or several as TagA || TagB"
        )
    return TagFilter(tags)
