"""Which rows key compaction keeps, as values that a rewrite asks: a bit for each offset up to the cut of a queue."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tiered.model.queue import QueueKey


class KeptOffsets:
    """Of offsets [begin, end) of a queue, those that stay. All from ``end``, the cut, on stay too, and none below
    ``begin``, its floor."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self._bits = np.zeros((end - begin + 7) // 8, np.uint8)

    @staticmethod
    def bytes_of(begin: int, end: int) -> int:
        """The memory that it takes."""
        return (end - begin + 7) // 8

    def keep(self, offsets: NDArray[np.int64]) -> None:
        """Keep ``offsets``, all below the cut."""
        at = offsets - self.begin
        np.bitwise_or.at(self._bits, at >> 3, np.left_shift(1, at & 7).astype(np.uint8))

    def mask(self, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of ``offsets`` key compaction keeps: those noted with ``keep``, and all from ``end`` on; none below
        ``begin``."""
        kept = offsets >= self.begin
        inside = np.flatnonzero((offsets >= self.begin) & (offsets < self.end))
        at = offsets[inside] - self.begin
        kept[inside] = (self._bits[at >> 3] >> (at & 7).astype(np.uint8)) & 1
        return kept

    def count(self, begin: int, end: int) -> int:
        """How many of the offsets from ``begin`` up to, but not including, ``end`` are kept, of those below the offset
        up to which key compaction works."""
        first, last = max(begin, self.begin) - self.begin, min(end, self.end) - self.begin
        if first >= last:
            return 0
        bits = np.unpackbits(self._bits[first >> 3 : (last + 7) >> 3], bitorder="little")
        return int(bits[first & 7 : (first & 7) + last - first].sum(dtype=np.int64))


@dataclass(frozen=True)
class KeptRows:
    """Which rows a round of key compaction keeps: of ``queues``, those of their KeptOffsets; of other queues, all."""

    queues: Mapping[QueueKey, KeptOffsets]

    def __call__(self, queue: QueueKey, offsets: NDArray[np.int64]) -> NDArray[np.bool_]:
        kept = self.queues.get(queue)
        return np.ones(len(offsets), bool) if kept is None else kept.mask(offsets)
