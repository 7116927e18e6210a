"""Index items in memory and in files.

A stored item is 8 bytes of hash and four columns as wide as the file's largest values need, so all items of a file
have one length and positions can be computed.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.model.tables import Table

ITEM_DTYPE = np.dtype(
    [
        ("hash", "<u8"),  # XXH64 of topic#key
        ("queue_offset", "<i8"),  # base offset of the message's row
        ("store_timestamp", "<i8"),  # ms since the epoch
        ("queue_id", "<i4"),
        ("generation", "<u4"),
    ]
)
"""One key of one message, in memory. The topic, which is hashed with the key, is not part of it."""

HASH_BYTES = 8


class Widths(NamedTuple):
    """Bytes of each column of a stored item after the hash. All are unsigned, little-endian."""

    queue_offset: int
    store_timestamp: int  # the distance from the file's base_ms
    queue_id: int  # zigzag
    generation: int

    @property
    def item_bytes(self) -> int:
        """Bytes of a stored item."""
        return HASH_BYTES + sum(self)


WIDTHS_MAX = Widths(8, 8, 5, 4)


def widths_for(items: Table, span_ms: int) -> Widths:
    """How many bytes each column of an index file needs for ``items``, whose times are at most ``span_ms`` apart.
    Raises ValueError for a negative queue offset."""
    if len(items) and int(items["queue_offset"].min()) < 0:
        raise ValueError("a message to be indexed has a negative queue offset")
    return Widths(
        _bytes_of(int(items["queue_offset"].max(initial=0))),
        _bytes_of(span_ms),
        _bytes_of(int(_zigzag(items["queue_id"]).max(initial=0))),
        _bytes_of(int(items["generation"].max(initial=0))),
    )


def widest(widths: Iterable[Sequence[int]], span_ms: int) -> Widths:
    """The widths of columns in an index file that is merged from files with columns of ``widths``; ``span_ms``: the
    span of time of all its items."""
    nothing = widths_for(np.zeros(0, ITEM_DTYPE), span_ms)
    most = Widths(*map(max, zip(nothing, *widths, strict=True)))
    return most._replace(store_timestamp=nothing.store_timestamp)


def _bytes_of(value: int) -> int:
    return (value.bit_length() + 7) // 8


def _zigzag(column: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Encode signed numbers as unsigned ones that are small if the number is near 0: 0, -1, 1, -2 as 0, 1, 2, 3."""
    wide = column.astype(np.int64)
    return ((wide << 1) ^ (wide >> 63)).astype(np.uint64)


def encode_items(items: Table, widths: Widths, base_ms: int) -> bytes:
    """``items`` as bytes, one behind the other: the hash, then the other columns in as many bytes as ``widths`` says;
    times as their distance from ``base_ms``. Raises ValueError when a value needs more bytes."""
    columns = (
        items["queue_offset"].astype(np.uint64),
        (items["store_timestamp"] - base_ms).astype(np.uint64),
        _zigzag(items["queue_id"]),
        items["generation"].astype(np.uint64),
    )
    stored = np.empty((len(items), widths.item_bytes), np.uint8)
    stored[:, :HASH_BYTES] = _byte_rows(items["hash"])
    at = HASH_BYTES
    for column, width in zip(columns, widths, strict=True):
        if len(column) and _bytes_of(int(column.max())) > width:
            raise ValueError(f"the keys to be indexed do not fit into columns of {tuple(widths)} bytes")
        stored[:, at : at + width] = _byte_rows(column)[:, :width]
        at += width
    return stored.tobytes()


def _byte_rows(column: NDArray[np.uint64]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(column, "<u8").view(np.uint8).reshape(len(column), 8)


def decode_items(data: bytes, widths: Widths, base_ms: int) -> Table:
    """The index items (ITEM_DTYPE) that ``encode_items`` has encoded as ``data``, whose checksum was verified."""
    stored = np.frombuffer(data, np.uint8).reshape(-1, widths.item_bytes)
    items = np.zeros(len(stored), ITEM_DTYPE)
    items["hash"] = np.ascontiguousarray(stored[:, :HASH_BYTES]).view("<u8")[:, 0]
    columns, at = [], HASH_BYTES
    for width in widths:
        wide = np.zeros((len(stored), 8), np.uint8)
        wide[:, :width] = stored[:, at : at + width]
        columns.append(wide.view("<u8")[:, 0])
        at += width
    offset, distance, zigzag, generation = columns
    items["queue_offset"] = offset.view(np.int64)
    items["store_timestamp"] = distance.view(np.int64) + base_ms
    items["queue_id"] = (zigzag >> np.uint64(1)).astype(np.int64) ^ -(zigzag & np.uint64(1)).astype(np.int64)
    items["generation"] = generation
    return items
