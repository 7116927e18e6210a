"""The part of the commitlog that becomes one cycle: bytes in an arena, and their columns; reused from cycle to cycle.

A batch covers the physical range [from_phys, to_phys) for all queues; padding at file ends takes no arena space. The
pool is the byte budget: when it is empty, the dispatcher leaves the bytes in the commitlog, which is the retry buffer.
"""

import threading
from dataclasses import dataclass
from typing import NamedTuple

import fastcrc
import numpy as np
from numpy.typing import NDArray

from tiered.catalog.state import LogCheck
from tiered.kernels.scan import RecordColumns
from uploader.lmq_dispatch import LmqOffsets

CHECK_BYTES_MAX = 64 * 1024


@dataclass(frozen=True)
class DamagedRange:
    """Bytes [begin, end) of the commitlog below the bound that are no valid record, or a record whose header the
    consume queues contradict."""

    begin_phys: int
    end_phys: int
    path: str
    detail: str


class LostRange(NamedTuple):
    """Bytes [begin, end) of the commitlog that no longer exist, and ``why``."""

    begin_phys: int
    end_phys: int
    why: str


class LogBatch:
    """One batch. It is filled by one thread at a time, and passed from dispatcher to builder to uploader and back to
    the pool.

    ``is_wanted``: whether it has a row of a queue that is archived. ``excluded``: rows that are not archived, as their
    headers are damaged (header_check.py); ``aside``: rows that the broker's queue does not have, but perhaps LMQs
    (repeated_offsets.py). ``lmq``: LMQ entries that differ from what the records say (lmq_dispatch.py). ``repeated``:
    queues, by ordinal, whose records got the offsets that the broker's queue has for them, and how many messages are
    in no queue (repeated_offsets.py).
    """

    def __init__(self, capacity_bytes: int, *, pooled: bool = True) -> None:
        self.arena: NDArray[np.uint8] = np.empty(capacity_bytes, np.uint8)
        self.columns = RecordColumns()
        self.pooled = pooled
        self.reset(0, 0)

    def reset(self, phys: int, now_ms: int) -> None:
        """Empty the batch, for the log from ``phys`` on."""
        self.columns.reset()
        self.filled = 0
        """Bytes of the arena in use."""
        self.from_phys = self.to_phys = phys
        self.opened_ms = now_ms
        self.chunk_begin = 0
        self.chunk_phys = phys
        """Where the last contiguous bytes begin, in the arena and in the log."""
        self._kept_check: LogCheck | None = None
        """The checksum of bytes that were dropped, as they held filtered traffic only."""
        self.is_wanted = False
        self.damaged: list[DamagedRange] = []
        self.excluded: list[int] = []
        self.aside: list[int] = []
        self.lmq: LmqOffsets = {}
        self.lost: list[LostRange] = []
        self.repeated: dict[int, int] = {}

    @property
    def room(self) -> int:
        """Free arena bytes."""
        return len(self.arena) - self.filled

    @property
    def nbytes(self) -> int:
        """Memory held."""
        return self.arena.nbytes + int(self.columns.nbytes)

    def extend(self, byte_count: int, phys: int) -> None:
        """Count ``byte_count`` bytes as part of the batch that are scanned and lie behind its bytes in the arena; they
        begin at commitlog offset ``phys``."""
        # Padding at the end of a file, or a skipped part, lies between.
        if phys != self.chunk_phys + (self.filled - self.chunk_begin):
            self.chunk_begin, self.chunk_phys = self.filled, phys
        self.filled += byte_count
        self.to_phys = phys + byte_count

    def drop_bytes(self) -> None:
        """Drop the rows and bytes of the batch, all of topics that are not archived, but keep its range of the log."""
        self._kept_check = self.log_check()
        self.columns.reset()
        self.is_wanted = False
        self.filled = self.chunk_begin = 0
        self.chunk_phys = self.to_phys

    def log_check(self) -> LogCheck | None:
        """The checksum of the last bytes of the log in this batch, by which a later start recognises the log; None if
        the batch has no bytes."""
        length = min(CHECK_BYTES_MAX, self.filled - self.chunk_begin)
        if length <= 0:
            return self._kept_check
        end_phys = self.chunk_phys + (self.filled - self.chunk_begin)
        crc = fastcrc.crc32.iscsi(self.arena.data[self.filled - length : self.filled])
        return LogCheck(end_phys - length, end_phys, crc)


class LogBatchPool:
    """A fixed number of batches within a byte budget. An oversized record always gets its own batch."""

    def __init__(self, *, batch_bytes: int, count: int) -> None:
        self._lock = threading.Lock()
        self._batch_bytes = batch_bytes
        self._free: list[LogBatch] = []
        self._left = count
        self._in_use: dict[int, LogBatch] = {}

    def try_acquire(self, *, at_least_bytes: int = 0) -> LogBatch | None:
        """A batch that has room for ``at_least_bytes``, or None when all batches are in use. Never waits. A record that
        is larger than the pool's batches gets one of its own."""
        with self._lock:
            if self._free:
                batch = self._free.pop()
            elif self._left:
                self._left -= 1
                batch = LogBatch(self._batch_bytes)
            else:
                return None
            if len(batch.arena) < at_least_bytes:
                self._free.append(batch)
                batch = LogBatch(at_least_bytes, pooled=False)
            self._in_use[id(batch)] = batch
            return batch

    def release(self, batch: LogBatch) -> None:
        """Return a batch; an oversized one is freed."""
        with self._lock:
            self._in_use.pop(id(batch), None)  # records that are read again have a batch of their own
            if batch.pooled:
                self._free.append(batch)

    def shrink(self) -> None:
        """Free the memory of batches that are not in use."""
        with self._lock:
            self._left += len(self._free)
            self._free.clear()

    def used_bytes(self) -> int:
        """Bytes of batches in use, for the budget metric."""
        with self._lock:
            return sum(batch.nbytes for batch in self._in_use.values())
