"""Blocks and tails of one read, each requested once, adjacent blocks together.

Owns what a read keeps for the next one of the same reader. Does not own caches nor requests (segment_source.py).
"""

from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import gather
from fetcher.rows.run_list import QueueView, RunPlace
from fetcher.rows.run_rows import RunRows
from tiered.errors import CorruptionError
from tiered.formats.segment import RowTable
from tiered.formats.segment_index import SegmentIndex
from tiered.formats.segment_layout import PART_RUNS

Block = NDArray[np.uint8]
BlockId = tuple[str, int]
"""Object key, number of the block."""


class BlockSource(Protocol):
    """Where decoded blocks come from: segment_source.SegmentSource."""

    def index(
        self, key: str, size_bytes: int, tail_bytes: int, priority: Priority, ordinal: int | None = None
    ) -> Coroutine[Any, Any, SegmentIndex]:
        """The decoded tail of an object, or its part that has the run ``ordinal``."""
        ...

    def index_in_memory(self, key: str, ordinal: int) -> SegmentIndex | None:
        """The decoded tail if it is in memory; None if it must be requested."""
        ...

    def block_in_memory(self, object_key: str, number: int) -> Block | None:
        """The raw bytes of a block for a user read, or None if it must be requested."""
        ...

    def blocks_at(
        self, index: SegmentIndex, run: int, numbers: Sequence[int], priority: Priority
    ) -> Coroutine[Any, Any, Sequence[Block]]:
        """Raw bytes of blocks ``numbers`` (ascending) of the object, one array each; near ones share a request.

        ``run`` is any run of the object that is not an LMQ's; the blocks may hold rows of others.
        """
        ...


class BlockSlices(NamedTuple):
    """Rows of a plain run in one block, all visible in ``view``: offset ``base + i`` is bytes [starts[i], ends[i]) of
    ``data``. Plain integers and memory: a pull takes three look-ups."""

    view: QueueView
    base: int
    starts: Sequence[int]
    ends: Sequence[int]
    data: memoryview


@dataclass
class BufferedRows:
    """Rows and blocks a reader keeps between reads, so that sequential reads find their block here, checked once."""

    blocks: dict[BlockId, Block] = field(default_factory=dict)
    rows: RunRows | None = None
    """Rows of the block read last, unless of an LMQ; it is among ``blocks``."""
    ahead: RunRows | None = None
    """``rows`` with those of the blocks after it, if their columns were decoded too."""
    table: tuple[RunPlace, RowTable] | None = None
    """All rows of the run read last, if it is an LMQ's."""
    slices: BlockSlices | None = None
    """``rows`` in the form most pulls need, after the first pull from them."""
    history: int = -1
    """Log history of the catalog it was read from. Stored with the rows, as another thread may replace both."""

    @property
    def nbytes(self) -> int:
        """Approximate memory; blocks may be shared with a cache."""
        columns = self.ahead or self.rows
        rows = 0 if columns is None else columns.nbytes
        table = 0 if self.table is None else 80 * len(self.table[1])
        return sum(block.nbytes for block in self.blocks.values()) + rows + table


class Needed(NamedTuple):
    """Blocks ``numbers`` of ``rows``, which are of ``place``, whose object's tail is ``segment``."""

    segment: SegmentIndex
    place: RunPlace
    rows: RunRows
    numbers: range


class BlockFetch:
    """Tails and blocks of one read at one priority. ``buffered``: left by the previous read."""

    def __init__(self, source: BlockSource, priority: Priority, buffered: BufferedRows) -> None:
        self._source = source
        self._priority = priority
        self.buffered = buffered
        self.touched: dict[BlockId, Block] = {}

    @property
    def touched_bytes(self) -> int:
        """Raw bytes of all blocks read so far."""
        return sum(block.nbytes for block in self.touched.values())

    async def indexes(self, places: Sequence[RunPlace]) -> list[SegmentIndex]:
        """Open the tails of the objects that hold the runs ``places``, concurrently, and return one for each run.
        Raises CorruptionError if an object does not hold the run that the catalog names."""
        if len(places) == 1:
            found = [await self._index(places[0])]
        else:
            keys = {(place.object_key, place.ordinal // PART_RUNS): place for place in places}
            opened = await gather(self._index(place) for place in keys.values())
            by_key = dict(zip(keys, opened, strict=True))
            found = [by_key[place.object_key, place.ordinal // PART_RUNS] for place in places]
        for place, index in zip(places, found, strict=True):
            place.check(index)
        return found

    def _index(self, place: RunPlace) -> Coroutine[Any, Any, SegmentIndex]:
        key, size_bytes, tail_bytes = place.object_key, place.size_bytes, place.tail_bytes
        return self._source.index(key, size_bytes, tail_bytes, self._priority, place.ordinal)

    async def fetch(self, needed: Iterable[Needed]) -> None:
        """Read the blocks that ``needed`` names and keep them in ``touched``; blocks that the reader has buffered are
        taken from there."""
        missing: dict[str, dict[int, Needed]] = {}
        for need in needed:
            key = need.segment.key
            for number in need.numbers:
                block_id = key, number
                if block_id in self.touched:
                    continue
                found = self.buffered.blocks.get(block_id)
                if found is not None:
                    self.touched[block_id] = found
                else:
                    missing.setdefault(key, {})[number] = need
        groups = list(missing.values())
        if len(groups) == 1:
            await self._fetch_group(groups[0])
        elif groups:
            await gather(self._fetch_group(group) for group in groups)

    async def _fetch_group(self, needs: dict[int, Needed]) -> None:
        """Read blocks of one object, given by number, and keep them in ``touched``; blocks near each other share a
        request. Raises CorruptionError if a block has another size than the tail says."""
        numbers = sorted(needs)
        index = needs[numbers[0]].segment
        blocks = await self._source.blocks_at(index, needs[numbers[0]].place.ordinal, numbers, self._priority)
        for number, block in zip(numbers, blocks, strict=True):
            raw_bytes = needs[number].rows.block_raw_bytes(number)
            if len(block) != raw_bytes:
                raise CorruptionError(
                    f"{index.key}: block {number} has {len(block)} bytes, expected {raw_bytes}"
                )
            self.touched[index.key, number] = block

    def blocks(self, need: Needed) -> list[Block]:
        """The blocks of ``need``, fetched before."""
        return [self.touched[need.segment.key, number] for number in need.numbers]
