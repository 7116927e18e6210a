"""Bounds the memory of decoding an object by its stored size, and names the object when memory runs out.

A few kilobytes can claim gigabytes: a compressed payload, a table without columns, nested JSON. Decoders charge what
they are about to allocate. An object that needs more than its allowance is damaged, whatever its checksums say; one
that needs more than the process may use (``limit_decoding``) is too large for its settings.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tiered.errors import CorruptionError, ObjectTooLargeError, OutOfMemoryError

logger = logging.getLogger(__name__)

MIB = 1 << 20


class Allowance(NamedTuple):
    """``free_bytes`` for any object, and ``ratio`` bytes more for each stored byte."""

    free_bytes: int
    ratio: int


SMALL = Allowance(64 * MIB, 256)
"""Commits and footers."""
LARGE = Allowance(256 * MIB, 1024)
"""Pages, the broker's tables, groups: names and numbers in millions, which may compress a thousand times."""

JSON_BYTE_COST_MAX = 116
"""No JSON text costs more for each of its bytes: ``{},`` in a list."""
_JSON_COST = np.full(256, 4, np.uint16)
"""Memory for each byte of a JSON text, at most: the text itself, and Python's objects where they begin."""
for _mark, _cost in {"{": 272, "[": 104, ",": 72, ":": 100}.items():
    _JSON_COST[ord(_mark)] += _cost
_COUNTED_AT_ONCE = 1 << 20


@dataclass
class Shortages:
    """How often memory did not suffice to decode an object, since the start."""

    count: int = 0


SHORTAGES = Shortages()


@dataclass
class DecodingLimit:
    """Memory for decoding one object, whatever its stored size; ``hint`` says what raises it."""

    limit_bytes: int = 1 << 30
    hint: str = ""


LIMIT = DecodingLimit()
"""The limit of this process."""


def limit_decoding(fetch_memory_bytes: int) -> None:
    """No object may take more memory than ``fetch.memory_bytes``."""
    LIMIT.limit_bytes, LIMIT.hint = (
        fetch_memory_bytes,
        "raise fetch.memory_bytes if the object is not damaged",
    )


def stored_bytes_max() -> int:
    """Size of the largest object that may be read whole."""
    return LIMIT.limit_bytes


def require_stored_bytes(byte_count: int, source: str) -> None:
    """Check that a part of an object, of ``byte_count`` bytes, may be read into memory as a whole. ``source`` names it
    in messages. Raises ObjectTooLargeError if it is too large, and CorruptionError for a negative length."""
    if byte_count < 0:
        raise CorruptionError(f"{source} is damaged: it has a length of {byte_count} bytes")
    if byte_count > LIMIT.limit_bytes:
        raise ObjectTooLargeError(
            f"{source} has {byte_count} bytes, more than the {LIMIT.limit_bytes} that may be read at once",
            hint=LIMIT.hint,
        )


class MemoryBound:
    """What may still be allocated to decode ``source``, of ``stored_bytes``. Without ``source``, a text of the broker's
    or a client's, the process's limit does not apply."""

    def __init__(self, stored_bytes: int, allowance: Allowance, source: str | None = None) -> None:
        self._left_bytes = allowance.free_bytes + allowance.ratio * stored_bytes
        self._room_bytes = self._left_bytes if source is None else LIMIT.limit_bytes
        self._stored_bytes = stored_bytes
        self._source = source

    def charge(self, byte_count: int, what: str) -> None:
        """Count ``byte_count`` bytes of memory for ``what``, before it is allocated. Raises ValueError if the object,
        by its stored size, may not take as much, so that it is damaged; and ObjectTooLargeError above the process's
        limit."""
        self._left_bytes -= byte_count
        self._room_bytes -= byte_count
        if self._left_bytes < 0:
            raise ValueError(
                f"{what} takes {byte_count} bytes of memory, too many for {self._stored_bytes} stored bytes"
            )
        if self._room_bytes < 0:
            raise ObjectTooLargeError(
                f"{self._source}: decoding its {what} takes {byte_count} bytes of memory, more than is left of the "
                f"{LIMIT.limit_bytes} for one object",
                hint=LIMIT.hint,
            )

    def charge_json(self, text: bytes | memoryview, what: str) -> None:
        """Charge ``text`` before it is parsed. Raises ValueError."""
        if len(text) * JSON_BYTE_COST_MAX <= min(self._left_bytes, self._room_bytes):
            return
        self.charge(json_cost_bytes(text), what)


def json_cost_bytes(text: bytes | memoryview) -> int:
    """Memory that parsing ``text`` takes at most, roughly."""
    found = np.frombuffer(text, np.uint8)
    pieces = range(0, len(found), _COUNTED_AT_ONCE)
    return sum(int(_JSON_COST[found[at : at + _COUNTED_AT_ONCE]].sum(dtype=np.int64)) for at in pieces)


@contextmanager
def memory_contained(source: str) -> Iterator[None]:
    """Turns a MemoryError of the ``with`` block into an OutOfMemoryError that names ``source``, and counts it."""
    try:
        yield
    except MemoryError:
        raise out_of_memory(source) from None


def out_of_memory(source: str) -> OutOfMemoryError:
    """The error for an object, named ``source``, that cannot be decoded as the machine has no memory left. It is
    counted for a metric, and logged."""
    SHORTAGES.count += 1
    logger.warning("the machine has not enough memory to decode %s", source)
    return OutOfMemoryError(
        f"{source} cannot be decoded, as the machine has not enough memory",
        hint="lower the memory settings, or give the process more memory",
    )
