"""Writes an index file from sorted items, piece by piece, in bounded memory."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from tiered.archive.index.footer import Covered, IndexMeta, encode_footer
from tiered.archive.index.items import ITEM_DTYPE, encode_items
from tiered.archive.index.key_hash import xxh64
from tiered.archive.index.layout import (
    HEADER_BYTES,
    PAGE_ITEMS,
    SLOT,
    Form,
    Shape,
    encode_header,
    encode_slot,
    encode_trailer,
    page_crc,
)
from tiered.archive.index.order import in_order
from tiered.archive.index.places import PAGE_DTYPE, Places, encode_places
from tiered.model.tables import Table, concatenated

_SLOTS_AT_ONCE = 65_536


class Sink(Protocol):
    """Receives bytes."""

    def write(self, data: bytes, /) -> object:
        """Append ``data``."""


def write_index(
    sink: Sink,
    key: str,
    chunks: Iterable[Table],
    meta: IndexMeta,
    covered: Covered,
    form: Form,
    places: Iterable[Places] = (),
) -> Shape:
    """Write the index file that will be put as ``key`` to ``sink``, and return its sizes. ``chunks``: its items
    (ITEM_DTYPE) in order, no two equal; ``meta`` and ``covered``: the versions and data objects that it covers;
    ``places``: the commitlog offsets of their records, in pages; ``form``: how wide its columns are.

    Raises ValueError for items out of order or too large for ``form``, as a reader would refuse the file.
    """
    pages = _Pages(sink, key, form)
    sink.write(encode_header())
    for chunk in chunks:
        pages.add(chunk)
    pages.flush()
    identity, counts = xxh64(key.encode()), pages.slot_items
    first_item = 0
    for begin in range(0, len(counts), _SLOTS_AT_ONCE):
        parts = []
        for slot, count in enumerate(counts[begin : begin + _SLOTS_AT_ONCE].tolist(), begin):
            parts.append(encode_slot(identity, slot, first_item, count))
            first_item += count
        sink.write(b"".join(parts))
    directory = [np.zeros(0, PAGE_DTYPE)]
    for page in places:
        stored = encode_places(page)
        sink.write(stored)
        directory.append(np.array([(page.rows["phys"][0], len(page), len(stored))], PAGE_DTYPE))
    covered = replace(covered, pages=np.concatenate(directory))
    footer = encode_footer(meta, covered)
    items = pages.items
    page_count = -(-items // PAGE_ITEMS)
    places_offset = HEADER_BYTES + items * form.widths.item_bytes + 4 * page_count + SLOT.size * len(counts)
    footer_offset = places_offset + int(covered.pages["stored_bytes"].sum(dtype=np.int64))
    trailer = encode_trailer(footer_offset, items, footer, form)
    sink.write(footer + trailer)
    tail_bytes = len(footer) + len(trailer)
    return Shape(
        key, items, form.slot_bits, form.widths, form.base_ms, footer_offset + tail_bytes, tail_bytes
    )


class _Pages:
    """Cuts a stream of items into checked pages and counts the items of each slot."""

    def __init__(self, sink: Sink, key: str, form: Form) -> None:
        """``key``: of the index file, which every checksum includes; ``form``: how wide its columns are."""
        self._sink = sink
        self._form = form
        self._identity = xxh64(key.encode())
        self._rest = np.zeros(0, ITEM_DTYPE)
        self._last: Table | None = None
        self._page = 0
        self.slot_items: NDArray[np.uint32] = np.zeros(1 << form.slot_bits, np.uint32)
        self.items = 0

    def add(self, chunk: Table) -> None:
        """Write the next items as pages of PAGE_ITEMS, and keep those of an incomplete page for the next call. Counts
        the items of each slot. Raises ValueError if an item is not greater than the one before it."""
        if len(chunk) == 0:
            return
        edge = chunk[:1] if self._last is None else np.concatenate([self._last, chunk[:1]])
        if not (in_order(edge) and in_order(chunk)):
            raise ValueError("the items for an index file are not in order, or two are equal")
        self._last = chunk[-1:].copy()
        self.items += len(chunk)
        bits = self._form.slot_bits
        shift = np.uint64(64 - bits)
        slots = (chunk["hash"] >> shift).astype(np.int64) if bits else np.zeros(len(chunk), np.int64)
        low = int(slots[0])
        counts = np.bincount(slots - low)
        self.slot_items[low : low + len(counts)] += counts.astype(np.uint32)
        waiting = concatenated([self._rest, chunk], ITEM_DTYPE) if len(self._rest) else chunk
        whole = len(waiting) // PAGE_ITEMS * PAGE_ITEMS
        self._write(waiting[:whole])
        self._rest = waiting[whole:].copy()

    def flush(self) -> None:
        """Write the last, shorter page."""
        if len(self._rest):
            self._write(self._rest)
            self._rest = self._rest[:0]

    def _write(self, items: Table) -> None:
        """Writes ``items`` as pages, of which only the last may be incomplete, each followed by its checksum of four
        bytes."""
        data = memoryview(encode_items(items, self._form.widths, self._form.base_ms))
        size = PAGE_ITEMS * self._form.widths.item_bytes
        parts: list[bytes | memoryview] = []
        for begin in range(0, len(data), size):
            content = data[begin : begin + size]
            parts += [content, page_crc(self._identity, self._page, content).to_bytes(4, "little")]
            self._page += 1
        if parts:
            self._sink.write(b"".join(parts))
