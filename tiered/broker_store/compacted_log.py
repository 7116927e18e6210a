"""Moves the records of a log together, file by file: they get other physical offsets, and keep everything else."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tiered.broker_store.restored_log import Batch, Piece, RestoredLog
from tiered.kernels.log_records import relocate
from tiered.kernels.record_checks import END_OF_FILE_BYTES


class MovedRecords:
    """Where the records of ranges of one log are in the other. Ranges are added in order."""

    def __init__(self) -> None:
        self._begins, self._moves = array("q"), array("q")

    def add(self, begin_phys: int, moved_by: int) -> None:
        """Records from ``begin_phys`` on are moved by so many bytes."""
        if not self._moves or self._moves[-1] != moved_by:
            self._begins.append(begin_phys)
            self._moves.append(moved_by)

    def __call__(self, phys: NDArray[np.int64]) -> NDArray[np.int64]:
        """The new physical offsets of records."""
        at = np.searchsorted(np.frombuffer(self._begins, np.int64), phys, side="right") - 1
        found: NDArray[np.int64] = phys + np.frombuffer(self._moves, np.int64)[at]
        return found


class _Placed(NamedTuple):
    """Records [first, end) of a batch, from ``offset`` on, counted from the begin of the log."""

    batch: Batch
    first: int
    end: int
    offset: int


def packed_bytes(source: RestoredLog, file_bytes: int) -> int:
    """The length of the log that ``compact`` makes of ``source``, up to its last record."""
    end = 0
    for placed in _placed(source, file_bytes):
        end = placed.offset + int(placed.batch.sizes[placed.first : placed.end].sum(dtype=np.int64))
    return end


def compact(source: RestoredLog, target: RestoredLog, begin_phys: int) -> MovedRecords:
    """Copy all records of ``source`` to ``target``, from ``begin_phys`` on. Raises what writing raises."""
    moved = MovedRecords()
    target.has_crc = source.has_crc
    for batch, first, end, offset in _placed(source, target.file_bytes):
        starts, sizes = batch.starts[first:end], batch.sizes[first:end]
        phys = begin_phys + offset + starts - starts[0]
        relocate(batch.data.ctypes.data, starts, sizes, phys)
        target.write([Piece(batch.data, starts, sizes, phys)])
        begin = batch.phys + int(starts[0])
        moved.add(begin, int(phys[0]) - begin)
    return moved


def _placed(source: RestoredLog, file_bytes: int) -> Iterator[_Placed]:
    offset = 0
    for batch in source.batches():
        first, ends = 0, batch.starts + batch.sizes
        while first < len(ends):
            room = file_bytes - END_OF_FILE_BYTES - offset % file_bytes
            end = int(np.searchsorted(ends, batch.starts[first] + room, side="right"))
            if end == first:
                offset = (offset // file_bytes + 1) * file_bytes
                continue
            yield _Placed(batch, first, end, offset)
            offset += int(ends[end - 1] - batch.starts[first])
            first = end
