"""Results of a scan: row columns, stop reasons, and the words through which the scan kernels write them."""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

FLAG_COMPRESSED = 0x1
"""Body is compressed."""
FLAG_BATCH = 0x80
"""Row spans ``inner_num`` queue offsets (system flag INNER_BATCH)."""
FLAG_LMQ = 0x100
"""Row has LMQ entries, if only doubtful ones."""
DOUBT_TOPIC = 1
"""A topic %RETRY%… or rmq_sys_…, or a scheduled message: 4.9 and 5.0 dispatch it, 5.1 some of these, later none."""
DOUBT_SLASH = 2
"""The name holds a path separator: brokers with consume queues in files skip it, or lose it when they stop."""
DOUBT_PLAIN = 4
"""The name is not an LMQ's, and the queue id the record's own: only 4.9 dispatches it."""


class StopReason(IntEnum):
    """Why a scan stopped."""

    INPUT_END = 0
    """The next record, if any, is not wholly inside the input."""
    FILE_END = 1
    """The blank marker: only padding follows in this file."""
    NO_RECORD = 2
    """Size and magic are zero: nothing was written here."""
    INVALID = 3
    """The bytes are not a valid record; see InvalidReason."""


class InvalidReason(IntEnum):
    """Which test a record fails; NONE unless the stop is INVALID."""

    NONE = 0
    SIZE = 1
    """Too small for a record, or it does not fit its file."""
    MAGIC = 2
    PHYSICAL_OFFSET = 3
    """PHYSICALOFFSET is not the record's own position: recycled or misplaced bytes."""
    LENGTH = 4
    """The lengths inside do not add up to TOTALSIZE."""
    BODY_CRC = 5
    RECORD_CRC = 6
    """``__CRC32#`` does not match the rest of the record."""
    TOPIC = 7
    """Empty, or not UTF-8."""
    PROPERTIES = 8
    """Negative length."""
    QUEUE_OFFSET = 9
    """Negative, or above what any consume queue can hold: QUEUEOFFSET is in no checksum of most records."""


@dataclass(frozen=True)
class ScanStop:
    """Where and why a scan stopped; ``position`` is in the arena, at a record boundary."""

    reason: StopReason
    position: int
    detail: InvalidReason = InvalidReason.NONE


# Words of the block, in one int64 array.
(
    # Counters, and where the scan stopped:
    ROWS,
    KEYS,
    LMQ_ROWS,
    SKIPPED,
    STOP_POSITION,
    STOP_DETAIL,
    # capacities,
    ROWS_MAX,
    KEYS_MAX,
    LMQ_ROWS_MAX,
    # addresses of columns,
    A_POSITION,
    A_PHYS,
    A_SIZE,
    A_QUEUE,
    A_QUEUE_OFFSET,
    A_STORE_TIMESTAMP,
    A_TAGS_CODE,
    A_INNER_NUM,
    A_FLAGS,
    A_KEY_COUNT,
    A_KEY_HASHES,
    A_LMQ_QUEUE,
    A_LMQ_QUEUE_OFFSET,
    A_LMQ_ROW,
    A_LMQ_DOUBT,
    A_KEY_TEXT,
    # and parsed fields of the current record: positions are in the arena.
    SIZE,
    SYS_FLAG,
    STORE_TIMESTAMP,
    BODY,
    BODY_LENGTH,
    TOPIC,
    TOPIC_LENGTH,
    PROPERTIES,
    PROPERTIES_LENGTH,
) = range(34)
_WORDS = 50
# Its properties have two words each: position and length of the value, length 0 when absent.
TAGS, KEY_LIST, UNIQ_KEY, DELAY, INNER_NUM, INNER_BASE, MULTI_DISPATCH, MULTI_OFFSET = range(34, _WORDS, 2)

# Returned by the scan kernel instead of a StopReason: the caller grows a capacity and calls again.
GROW_ROWS, GROW_KEYS, GROW_LMQ_ROWS, GROW_QUEUES, GROW_TOPIC_BYTES = range(16, 21)

_KEY_TEXT_BYTES = 0x7FFF + 1 + 0x7FFF  # topic, '#', key: both lengths are positive shorts
_CAPACITY = {GROW_ROWS: ROWS_MAX, GROW_KEYS: KEYS_MAX, GROW_LMQ_ROWS: LMQ_ROWS_MAX}
_COLUMNS = (
    ("position", np.int64, A_POSITION, GROW_ROWS),
    ("phys", np.int64, A_PHYS, GROW_ROWS),
    ("size", np.int32, A_SIZE, GROW_ROWS),
    ("queue", np.int32, A_QUEUE, GROW_ROWS),
    ("queue_offset", np.int64, A_QUEUE_OFFSET, GROW_ROWS),
    ("store_timestamp", np.int64, A_STORE_TIMESTAMP, GROW_ROWS),
    ("tags_code", np.int64, A_TAGS_CODE, GROW_ROWS),
    ("inner_num", np.int32, A_INNER_NUM, GROW_ROWS),
    ("flags", np.uint32, A_FLAGS, GROW_ROWS),
    ("key_count", np.uint16, A_KEY_COUNT, GROW_ROWS),
    ("key_hashes", np.uint64, A_KEY_HASHES, GROW_KEYS),
    ("lmq_queue", np.int32, A_LMQ_QUEUE, GROW_LMQ_ROWS),
    ("lmq_queue_offset", np.int64, A_LMQ_QUEUE_OFFSET, GROW_LMQ_ROWS),
    ("lmq_row", np.int32, A_LMQ_ROW, GROW_LMQ_ROWS),
    ("lmq_doubt", np.uint8, A_LMQ_DOUBT, GROW_LMQ_ROWS),
)


class RecordColumns:
    """Columns of scanned rows, in log order, in memory reused from cycle to cycle.

    The first ``rows`` (``keys``, ``lmq_rows``) entries of each column are valid. Arrays are replaced when a
    scan needs more room: read the attributes after it. Capacities double; they never shrink.
    """

    position: NDArray[np.int64]
    """Byte in the arena where the record begins."""
    phys: NDArray[np.int64]
    """The same in the commitlog."""
    size: NDArray[np.int32]
    """Bytes of the record."""
    queue: NDArray[np.int32]
    """QueueTable ordinal."""
    queue_offset: NDArray[np.int64]
    """The record's queue offset; an inner batch: that of its first message."""
    store_timestamp: NDArray[np.int64]
    """Milliseconds since the epoch."""
    tags_code: NDArray[np.int64]
    inner_num: NDArray[np.int32]
    """Queue offsets the row spans: 1, or the count of an inner batch."""
    flags: NDArray[np.uint32]
    """Low byte of the system flag, and FLAG_LMQ."""
    key_count: NDArray[np.uint16]
    """How many of ``key_hashes`` are the row's."""
    key_hashes: NDArray[np.uint64]
    """XXH64 of ``topic#key``, row after row: UNIQ_KEY first, then each key of KEYS."""
    lmq_queue: NDArray[np.int32]
    """QueueTable ordinal of an LMQ."""
    lmq_queue_offset: NDArray[np.int64]
    """Its queue offset."""
    lmq_row: NDArray[np.int32]
    """The row of its record."""
    lmq_doubt: NDArray[np.uint8]
    """0 for an entry that every broker with LMQs makes; else DOUBT bits: why some do not."""

    def __init__(self, rows: int = 4096, keys: int = 8192, lmq_rows: int = 64) -> None:
        self._words = np.zeros(_WORDS, np.int64)
        self._key_text = np.empty(_KEY_TEXT_BYTES, np.uint8)
        self._words[A_KEY_TEXT] = self._key_text.ctypes.data
        self._columns: dict[str, NDArray[Any]] = {}
        for group, capacity in ((GROW_ROWS, rows), (GROW_KEYS, keys), (GROW_LMQ_ROWS, lmq_rows)):
            self._allocate(group, max(1, capacity))

    @property
    def rows(self) -> int:
        """Consume-queue rows of stored records."""
        return int(self._words[ROWS])

    @property
    def keys(self) -> int:
        """Key hashes."""
        return int(self._words[KEYS])

    @property
    def lmq_rows(self) -> int:
        """LMQ entries, doubtful ones too."""
        return int(self._words[LMQ_ROWS])

    @property
    def skipped(self) -> int:
        """Valid records without a row: prepared or rolled back transactions, queues that are not admitted."""
        return int(self._words[SKIPPED])

    @property
    def nbytes(self) -> int:
        """Memory of the columns, used or not."""
        return sum(column.nbytes for column in self._columns.values()) + self._key_text.nbytes

    @property
    def address(self) -> int:
        """Address of the words for kernels; constant while this object exists."""
        return self._words.ctypes.data

    @property
    def stop_position(self) -> int:
        """Where the last call of the scan kernel stopped."""
        return int(self._words[STOP_POSITION])

    @property
    def stop_detail(self) -> InvalidReason:
        """The test that the record there failed; NONE if the scan stopped for another reason."""
        return InvalidReason(int(self._words[STOP_DETAIL]))

    def reset(self) -> None:
        """Remove all rows, keep the memory."""
        self._words[[ROWS, KEYS, LMQ_ROWS, SKIPPED]] = 0

    def grow(self, shortage: int) -> None:
        """Double the columns a scan found full: GROW_ROWS, GROW_KEYS or GROW_LMQ_ROWS."""
        self._allocate(shortage, 2 * int(self._words[_CAPACITY[shortage]]))

    def _allocate(self, group: int, capacity: int) -> None:
        """Replace the columns of one group (rows, keys or LMQ rows) by ones of ``capacity`` items with the same
        content, and write their addresses to the words that kernels read."""
        for name, kind, word, member_of in _COLUMNS:
            if member_of != group:
                continue
            column = np.empty(capacity, kind)
            if name in self._columns:
                column[: len(self._columns[name])] = self._columns[name]
            self._columns[name] = column
            self._words[word] = column.ctypes.data
            setattr(self, name, column)
        self._words[_CAPACITY[group]] = capacity
