"""Single properties out of a stored record, without decoding the rest of it.

Owns finding the properties' bytes and one pair among them. Sources: MessageDecoder.decodeProperties,
MessageDecoder.string2messageProperties.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Final

from tiered.errors import CorruptionError
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
    """The properties of one record, as stored. Raises CorruptionError when its lengths do not fit it."""
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
        raise CorruptionError(f"record of {len(record)} bytes has no properties: {error}") from error
    if min(body_bytes, topic_bytes, size) < 0 or at + 2 + size != len(record):
        raise CorruptionError(f"properties of {size} bytes at byte {at} do not end a record of {len(record)}")
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
        """The value of ``name`` as text, or None. Takes long only once for a name."""
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
        pairs, wanted = self._pairs, _marker(name)
        found = pairs.rfind(wanted)
        if found < 0:
            return None
        begin = found + len(wanted)
        # Without a value, an earlier pair of this name counts.
        return pairs[begin : pairs.index(_PAIR_END, begin)] or self._split(name)

    def _split(self, name: str) -> bytes | None:
        if self._values is None:
            pairs = (pair.partition(_NAME_END) for pair in self._pairs.split(_PAIR_END))
            self._values = {key: value for key, _, value in pairs if value}
        return self._values.get(name.encode("utf-8"))
