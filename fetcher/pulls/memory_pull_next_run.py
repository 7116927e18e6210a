"""Pulls that go on behind the rows a reader knows, most often into the next run: calls, where memory has all of it.

A consumer meets a run's end every few dozen pulls, and what a pull by coroutines costs there was half of what all its
pulls cost.

Owns what such an answer is made of. Does not own what is done after it (memory_pull.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fetcher.prefetch.readers import InHand, Reader
from fetcher.rows.block_fetch import Block, BlockId, BlockSource, Held
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.queue_view import QueueView
from fetcher.rows.read_plan import Limits, take
from fetcher.rows.row_reader import BYTES_AHEAD, ROWS_AHEAD
from fetcher.rows.run_rows import RunRows, rows_of_run
from tiered.errors import CorruptionError
from tiered.model.tables import RunKind


class Beyond(NamedTuple):
    """An answer, what the reader has in hand then, and the bytes of message an offset stands for there."""

    answer: InHand
    held: Held
    bytes_per_offset: float


class _Behind(NamedTuple):
    """Rows from an offset on, and the block that holds the first."""

    rows: RunRows
    blocks: dict[BlockId, Block]
    bytes_per_offset: float


class BeyondHand:
    """Looks at memory only. Holds no state: threads may share it."""

    def __init__(self, source: BlockSource, catalog: CatalogView) -> None:
        self._source, self._catalog = source, catalog

    def __repr__(self) -> str:
        return f"BeyondHand({self._source!r})"

    def find(self, reader: Reader, view: QueueView, offset: int, count: int, max_bytes: int) -> Beyond | None:
        """What an unfiltered pull of a reader that goes on at ``offset`` is answered; None: by another way."""
        held = reader.held
        known = held.ahead or held.rows
        if known is None or reader.window.position != offset or held.line != view.state.cursor.history:
            return None
        at = known.end
        if not (known.base <= offset <= at < view.max_offset and view.existing(offset) == offset):
            return None
        body: list[memoryview] = []
        limits = Limits(count, max_bytes, True)
        if offset < at:
            part = take(known.sizes, known.ends, known.row_of(offset), limits, None)
            assert isinstance(part.rows, slice)  # nothing is filtered out
            found = None if part.is_full else self._bodies(known, part.rows, held.blocks)
            if found is None:
                return None
            body, _ = found
            limits = Limits(count - part.row_count, max_bytes - part.bytes, False)
        try:
            behind = self._behind(view, at, limits, held.blocks)
        except CorruptionError:
            return None  # whoever asks by the other way is told, and what is wrong fetched anew
        return None if behind is None else self._answer(view, at, behind, body, count, limits)

    def _behind(
        self, view: QueueView, at: int, limits: Limits, held: Mapping[BlockId, Block]
    ) -> _Behind | None:
        runs = self._catalog.known_runs_of(view)
        number = -1 if runs is None or view.existing(at) != at else runs.at(at)
        if runs is None or number < 0:
            return None
        place = runs.place(number)
        index = self._source.index_in_memory(place.object_key) if place.kind == RunKind.PLAIN else None
        if index is None:
            return None
        place.check(index)
        row = at - place.base
        block_id = index.key, index.block_span(place.ordinal, row, row + 1).first_block
        block = held.get(block_id)
        if block is None:
            block = self._source.block_in_memory(*block_id)
        if block is None:
            return None
        rows = rows_of_run(
            index,
            place,
            at,
            count=limits.rows + ROWS_AHEAD,
            max_bytes=max(limits.bytes, BYTES_AHEAD),
        )
        return _Behind(rows, {block_id: block}, place.byte_count / (place.end - place.base))

    def _answer(
        self, view: QueueView, at: int, behind: _Behind, body: list[memoryview], count: int, limits: Limits
    ) -> Beyond | None:
        rows = behind.rows
        part = take(rows.sizes, rows.ends, rows.row_of(at), limits, None)
        assert isinstance(part.rows, slice)  # nothing is filtered out
        next_offset = rows.end_offset(part.end_row)
        is_whole = part.is_full or next_offset >= view.max_offset
        if rows.end > view.max_offset or not part.row_count or not is_whole:
            return None
        found = self._bodies(rows, part.rows, behind.blocks)
        if found is None:
            return None
        further, block = found
        last = rows.in_block_of(part.rows.stop - 1)
        held = Held(
            {(rows.object_key, last.first_block): block},
            last,
            rows if rows.end > last.end else None,
            line=view.state.cursor.history,
        )
        records = count - limits.rows + part.row_count
        answer = InHand([*body, *further], records, next_offset, view.min_offset, view.max_offset)
        return Beyond(answer, held, behind.bytes_per_offset)

    def _bodies(
        self, rows: RunRows, taken: slice, at_hand: Mapping[BlockId, Block]
    ) -> tuple[list[memoryview], Block] | None:
        """The records of ``taken``, and the block of the last of them."""
        blocks: list[Block] = []
        for number in rows.blocks_of(taken):
            block = at_hand.get((rows.object_key, number))
            if block is None:
                block = self._source.block_in_memory(rows.object_key, number)
            if block is None or len(block) != rows.block_raw_bytes(number):
                return None
            blocks.append(block)
        return rows.bodies(taken, blocks), blocks[-1]
