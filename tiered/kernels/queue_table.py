"""The queue table: (topic, queue id) -> a small dense ordinal, shared by Python and the scan kernel.

An open-addressing hash table in numpy arrays that the scan kernel searches and extends, so that 100,000s of queues
need no Python object per message. Ordinals never change. Callers decide which topics are archived (``admitted``). Not
thread-safe: one scan at a time per table.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.checksums import is_utf8
from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import (
    copy_bytes,
    get_i32,
    get_i64,
    get_u64,
    load_le64,
    load_u8,
    put_i32,
    put_i64,
    put_u8,
)
from tiered.model.tables import Table

NOT_ADMITTED, ADMITTED, UNDECIDED = range(3)

# Results of find_or_insert that are not ordinals. After the first two the caller grows the table and repeats.
QUEUES_FULL, TOPIC_BYTES_FULL, TOPIC_INVALID, ABSENT = range(-1, -5, -1)

_QUEUES_MIN = 64
_TOPIC_BYTES_MIN = 4096
_TOPIC_BYTES_MAX = 0x7FFF

# The int64 words that kernels take: counts, capacities, addresses of the columns.
_WORDS = 12
(
    _COUNT,
    _BYTES_USED,
    _QUEUES_MAX,
    _BYTES_MAX,
    _SLOT_MASK,
    _SLOTS,
    _HASHES,
    _QUEUE_IDS,
    _TOPIC_BEGIN,
    _TOPIC_LENGTH,
    _ADMITTED,
    _TOPIC_BYTES,
) = range(_WORDS)

_COLUMNS = (
    ("hashes", np.uint64, _HASHES),
    ("queue_ids", np.int32, _QUEUE_IDS),
    ("topic_begin", np.int64, _TOPIC_BEGIN),
    ("topic_length", np.int32, _TOPIC_LENGTH),
    ("admitted", np.uint8, _ADMITTED),
)


class QueueTable:
    """Ordinals 0, 1, 2, … in order of insertion. Arrays returned are views: read them again after a scan."""

    def __init__(self) -> None:
        self._words = np.zeros(_WORDS, np.int64)
        self._columns: dict[str, NDArray[Any]] = {}
        self._topics: dict[int, str] = {}
        self._allocate(_QUEUES_MIN, _TOPIC_BYTES_MIN)

    def __len__(self) -> int:
        return int(self._words[_COUNT])

    @property
    def address(self) -> int:
        """Address of the table's words for kernels; constant while this object exists."""
        return self._words.ctypes.data

    @property
    def queue_id(self) -> NDArray[np.int32]:
        """Queue id per ordinal."""
        return self._columns["queue_ids"][: len(self)]

    @property
    def admitted(self) -> NDArray[np.uint8]:
        """Writable, per ordinal: NOT_ADMITTED rows are skipped by the scan; queues start as UNDECIDED."""
        return self._columns["admitted"][: len(self)]

    @property
    def nbytes(self) -> int:
        """Memory of the table's arrays."""
        return sum(column.nbytes for column in self._columns.values())

    def ordinal(self, topic: str, queue_id: int) -> int:
        """The number of a queue in this table, into which a new one is inserted. Raises ValueError for a topic that is
        empty or over 32,767 bytes."""
        encoded = np.frombuffer(topic.encode() + b"\0", np.uint8)
        length = len(encoded) - 1
        if not 0 < length <= _TOPIC_BYTES_MAX:
            raise ValueError(
                f"a topic's name has 1 to {_TOPIC_BYTES_MAX} bytes, not {length}: {topic[:100]!r}"
            )
        while True:
            ordinal = int(find_or_insert(encoded.ctypes.data, 0, length, queue_id, self.address))
            if ordinal >= 0:
                return ordinal
            self.grow(ordinal)  # a negative result says which array is full

    def ordinals(self, topics: Sequence[str], queues: Table) -> NDArray[np.int64]:
        """The numbers in this table of ``queues`` (QUEUE_DTYPE, without regard to generations), whose ``topic`` indexes
        ``topics``. New ones are inserted; negative where a topic cannot be one of a record."""
        names = [topic.encode(errors="surrogatepass") for topic in topics]
        begin = np.cumsum([0, *map(len, names)])
        encoded, topic = np.frombuffer(b"".join(names) + b"\0", np.uint8), queues["topic"].astype(np.int64)
        found, done = np.empty(len(queues), np.int64), 0
        while done < len(found):
            done = find_all(
                encoded.ctypes.data, begin, topic, queues["queue_id"].copy(), done, self.address, found
            )
            if done < len(found):
                self.grow(int(found[done]))
        return found

    def find(self, topic: str, queue_id: int) -> int | None:
        """The queue's ordinal, None if it was never inserted."""
        encoded = np.frombuffer(topic.encode() + b"\0", np.uint8)
        found = int(_find(encoded.ctypes.data, 0, len(encoded) - 1, queue_id, self.address))
        return None if found < 0 else found

    def topic(self, ordinal: int) -> str:
        """The topic of the queue number ``ordinal``, decoded at the first call. Raises IndexError for an unknown
        number."""
        topic = self._topics.get(ordinal)
        if topic is None:
            if not 0 <= ordinal < len(self):
                raise IndexError(
                    f"the queue table has {len(self)} queues, and none with the number {ordinal}"
                )
            begin = int(self._columns["topic_begin"][ordinal])
            length = int(self._columns["topic_length"][ordinal])
            encoded = self._columns["topic_bytes"][begin : begin + length].tobytes()
            topic = self._topics[ordinal] = encoded.decode()
        return topic

    def grow(self, shortage: int) -> None:
        """Double the array that an insertion found full: ``shortage`` is QUEUES_FULL or TOPIC_BYTES_FULL."""
        queues, topic_bytes = int(self._words[_QUEUES_MAX]), int(self._words[_BYTES_MAX])
        if shortage == QUEUES_FULL:
            self._allocate(2 * queues, topic_bytes)
        elif shortage == TOPIC_BYTES_FULL:
            self._allocate(queues, max(2 * topic_bytes, topic_bytes + _TOPIC_BYTES_MAX))
        else:
            raise ValueError(
                f"the queue table cannot grow, as the kernel gave no reason for it that is known: {shortage}"
            )

    def _allocate(self, queues: int, topic_bytes: int) -> None:
        """Replace the arrays by larger ones of the same content, with room for ``queues``, a power of two, and
        ``topic_bytes`` of names, and write their addresses to the words that kernels read."""
        used, bytes_used = len(self), int(self._words[_BYTES_USED])
        old, new = self._columns, dict[str, NDArray[Any]]()
        for name, kind, _ in _COLUMNS:
            new[name] = np.zeros(queues, kind)
        new["slots"] = np.full(2 * queues, -1, np.int32)
        new["topic_bytes"] = np.zeros(topic_bytes, np.uint8)
        if used:
            for name, _, _ in _COLUMNS:
                new[name][:used] = old[name][:used]
            new["topic_bytes"][:bytes_used] = old["topic_bytes"][:bytes_used]
        for name, _, word in _COLUMNS:
            self._words[word] = new[name].ctypes.data
        self._words[_SLOTS] = new["slots"].ctypes.data
        self._words[_TOPIC_BYTES] = new["topic_bytes"].ctypes.data
        self._words[_QUEUES_MAX], self._words[_BYTES_MAX] = queues, topic_bytes
        self._words[_SLOT_MASK] = 2 * queues - 1
        self._columns = new
        if used:
            _fill_slots(self.address)


_PRIME_TOPIC = np.uint64(0x9E3779B185EBCA87)
_PRIME_QUEUE = np.uint64(0xC2B2AE3D27D4EB4F)
_SHIFT = np.uint64(29)


@kernel
def _queue_hash(data: Int, position: Int, length: Int, queue_id: Int) -> Int:
    """A hash of a queue, its topic of ``length`` bytes at ``data + position`` and its queue id, for this table only: it
    is never stored."""
    total = np.uint64(queue_id) * _PRIME_QUEUE + np.uint64(length)
    end = position + length
    while end - position >= 8:
        total = (total ^ load_le64(data, position)) * _PRIME_TOPIC
        total ^= total >> _SHIFT
        position += 8
    if length >= 8:
        total = (total ^ load_le64(data, end - 8)) * _PRIME_TOPIC
    else:
        while position < end:
            total = (total ^ np.uint64(load_u8(data, position))) * _PRIME_TOPIC
            position += 1
    return total ^ (total >> _SHIFT)


@kernel
def same_bytes(left: Int, left_at: Int, right: Int, right_at: Int, length: Int) -> bool:
    """Whether two ranges of bytes are equal, compared eight at a time."""
    step = 0
    while length - step >= 8:
        if load_le64(left, left_at + step) != load_le64(right, right_at + step):
            return False
        step += 8
    while step < length:
        if load_u8(left, left_at + step) != load_u8(right, right_at + step):
            return False
        step += 1
    return True


@kernel
def _probe(data: Int, position: Int, length: Int, queue_id: Int, code: Int, table: Int) -> tuple[Int, Int]:
    """Look for a queue in the hash table, from the slot of its hash ``code`` on. Returns its number, or ABSENT, and the
    slot where it is or belongs. Ends, as at least half of all slots are always free."""
    mask = get_i64(table, _SLOT_MASK)
    slots = get_i64(table, _SLOTS)
    slot = np.int64(code) & mask
    while True:
        ordinal = get_i32(slots, slot)
        if ordinal < 0:
            return ABSENT, slot
        if (
            get_u64(get_i64(table, _HASHES), ordinal) == code
            and get_i32(get_i64(table, _QUEUE_IDS), ordinal) == queue_id
            and get_i32(get_i64(table, _TOPIC_LENGTH), ordinal) == length
        ):
            begin = get_i64(get_i64(table, _TOPIC_BEGIN), ordinal)
            if same_bytes(data, position, get_i64(table, _TOPIC_BYTES), begin, length):
                return ordinal, slot
        slot = (slot + 1) & mask


@kernel
def _find(data: Int, position: Int, length: Int, queue_id: Int, table: Int) -> Int:
    code = _queue_hash(data, position, length, queue_id)
    return _probe(data, position, length, queue_id, code, table)[0]


@kernel
def find_or_insert(data: Int, position: Int, length: Int, queue_id: Int, table: Int) -> Int:
    """The number in ``table`` of the queue whose topic is ``length`` UTF-8 bytes at ``data + position``; a new one is
    inserted. Negative, without an insertion: QUEUES_FULL or TOPIC_BYTES_FULL, if an array is full, or TOPIC_INVALID, if
    the topic of a new queue is not UTF-8.
    """
    code = _queue_hash(data, position, length, queue_id)
    ordinal, slot = _probe(data, position, length, queue_id, code, table)
    if ordinal >= 0:
        return ordinal
    return _insert(data, position, length, queue_id, code, slot, table)


@kernel
def find_all(
    names: Int,
    begin: NDArray[np.int64],
    topic: NDArray[np.int64],
    queue_id: NDArray[np.int32],
    done: Int,
    table: Int,
    found: NDArray[np.int64],
) -> Int:
    """Find or insert queues from number ``done`` on, and write the number of each in ``table`` to ``found``. Topic i is
    at ``begin[i]`` of ``names``. Returns the first queue for which an array is full, or the number of queues."""
    while done < len(found):
        at = begin[topic[done]]
        found[done] = find_or_insert(names, at, begin[topic[done] + 1] - at, queue_id[done], table)
        if found[done] == QUEUES_FULL or found[done] == TOPIC_BYTES_FULL:
            return done
        done += 1
    return done


@kernel
def _insert(data: Int, position: Int, length: Int, queue_id: Int, code: Int, slot: Int, table: Int) -> Int:
    """Add a queue, with hash ``code``, at the free ``slot``, and return its number; or a negative code, if the topic is
    not UTF-8, or an array is full, which the caller enlarges."""
    if not is_utf8(data, position, length):
        return TOPIC_INVALID
    ordinal, begin = get_i64(table, _COUNT), get_i64(table, _BYTES_USED)
    if ordinal >= get_i64(table, _QUEUES_MAX):
        return QUEUES_FULL
    if begin + length > get_i64(table, _BYTES_MAX):
        return TOPIC_BYTES_FULL
    copy_bytes(data, position, get_i64(table, _TOPIC_BYTES), begin, length)
    put_i64(get_i64(table, _HASHES), ordinal, code)
    put_i32(get_i64(table, _QUEUE_IDS), ordinal, queue_id)
    put_i64(get_i64(table, _TOPIC_BEGIN), ordinal, begin)
    put_i32(get_i64(table, _TOPIC_LENGTH), ordinal, length)
    put_u8(get_i64(table, _ADMITTED), ordinal, UNDECIDED)
    put_i32(get_i64(table, _SLOTS), slot, ordinal)
    put_i64(table, _COUNT, ordinal + 1)
    put_i64(table, _BYTES_USED, begin + length)
    return ordinal


@kernel
def is_not_admitted(table: Int, ordinal: Int) -> Int:
    """Whether this queue is not archived."""
    return load_u8(get_i64(table, _ADMITTED), ordinal) == NOT_ADMITTED


@kernel
def _fill_slots(table: Int) -> Int:
    """Enter all queues into new, empty slots after the table was enlarged."""
    mask = get_i64(table, _SLOT_MASK)
    slots, hashes = get_i64(table, _SLOTS), get_i64(table, _HASHES)
    for ordinal in range(get_i64(table, _COUNT)):
        slot = np.int64(get_u64(hashes, ordinal)) & mask
        while get_i32(slots, slot) >= 0:
            slot = (slot + 1) & mask
        put_i32(slots, slot, ordinal)
    return 0
