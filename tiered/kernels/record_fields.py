"""Fields of many records as columns: their positions, and copies of them as offset-and-data buffers.

For tables: no Python object exists per record. A record whose lengths do not fill it is reported, and never read beyond
its end. Oracle: ``tiered.formats.record.decode_record``.
"""

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.checksums import crc32, is_utf8
from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import (
    copy_bytes,
    load_be16,
    load_be32,
    load_be64,
    load_i8,
    load_le32,
    load_le64,
    load_u8,
    put_u16,
)
from tiered.kernels.queue_table import same_bytes
from tiered.kernels.record_checks import (
    BORN_HOST_V6,
    MAGIC_V1,
    MAGIC_V2,
    NAME_SEPARATOR,
    PAIR_SEPARATOR,
    RECORD_BYTES_MIN,
    STORE_HOST_V6,
)
from tiered.kernels.words import word


class Number(IntEnum):
    """Rows of ``RecordFields.numbers``. ``_AT``: byte of the data where the field begins; ``_BYTES``: its length."""

    VALID = 0
    """1: the lengths fill the record; 0: they do not, and no other number is set."""
    MAGIC = 1
    BODY_CRC = 2
    QUEUE_ID = 3
    FLAG = 4
    QUEUE_OFFSET = 5
    PHYS = 6
    SYS_FLAG = 7
    BORN_TIMESTAMP = 8
    STORE_TIMESTAMP = 9
    RECONSUME_TIMES = 10
    PT_OFFSET = 11
    BORN_HOST_AT = 12
    BORN_HOST_BYTES = 13
    STORE_HOST_AT = 14
    STORE_HOST_BYTES = 15
    BODY_AT = 16
    BODY_BYTES = 17
    TOPIC_AT = 18
    TOPIC_BYTES = 19
    PROPERTIES_AT = 20
    PROPERTIES_BYTES = 21
    TAGS_AT = 22
    TAGS_BYTES = 23
    """0: there is none; also KEYS and UNIQ_KEY."""
    KEYS_AT = 24
    KEYS_BYTES = 25
    UNIQ_KEY_AT = 26
    UNIQ_KEY_BYTES = 27
    PAIRS = 28
    """Properties with a name and a value; equal names count each."""
    IS_TEXT = 29
    """1: the properties are UTF-8."""


_FIELDS = len(Number)
(
    _VALID,
    _MAGIC,
    _BODY_CRC,
    _QUEUE_ID,
    _FLAG,
    _QUEUE_OFFSET,
    _PHYS,
    _SYS_FLAG,
    _BORN,
    _STORED,
    _RECONSUMED,
    _PT_OFFSET,
    _BORN_HOST,
    _BORN_HOST_BYTES,
    _STORE_HOST,
    _STORE_HOST_BYTES,
    _BODY,
    _BODY_BYTES,
    _TOPIC,
    _TOPIC_BYTES,
    _PROPERTIES,
    _PROPERTIES_BYTES,
    _TAGS,
    _TAGS_BYTES,
    _KEYS,
    _KEYS_BYTES,
    _UNIQ_KEY,
    _UNIQ_KEY_BYTES,
    _PAIRS,
    _IS_TEXT,
) = range(_FIELDS)

_HEX_DIGITS = np.frombuffer("".join(f"{byte:02X}" for byte in range(256)).encode(), np.uint16).copy()
"""The two digits of each byte, in memory order."""
_THREES, _TOP_BITS = word(b"\x03" * 8), word(b"\x80" * 8)
_TAGS_NAME, _KEYS_NAME, _UNIQ_KEY_NAME = word(b"TAGS"), word(b"KEYS"), word(b"UNIQ_KEY")


RecordFields: TypeAlias = NDArray[np.int64]
"""Fields of records, ``fields[Number.X, row]``; positions are in the data they were read from."""


@dataclass(frozen=True)
class Pairs:
    """Properties of many records: those of row i are ``[starts[i], starts[i + 1])``; positions are in the data."""

    starts: NDArray[np.int32]
    name_at: NDArray[np.int64]
    name_bytes: NDArray[np.int64]
    value_at: NDArray[np.int64]
    value_bytes: NDArray[np.int64]


def record_fields(
    data: NDArray[np.uint8], starts: NDArray[Any], sizes: NDArray[Any], *, properties: bool
) -> RecordFields:
    """Where the fields of the records ``data[starts[i] : starts[i] + sizes[i]]`` are, and the numbers in them.

    Without ``properties`` these are not searched, and TAGS, KEYS, UNIQ_KEY, PAIRS and IS_TEXT stay 0. Raises ValueError
    for a record outside ``data``.
    """
    starts, sizes = np.ascontiguousarray(starts, np.int64), np.ascontiguousarray(sizes, np.int64)
    if not data.flags.c_contiguous or data.dtype != np.uint8 or len(starts) != len(sizes):
        raise ValueError(
            f"records must be contiguous uint8 with as many starts as sizes, not {data.dtype} with {len(starts)} "
            f"starts and {len(sizes)} sizes"
        )
    require_inside(data, starts, sizes)
    numbers = np.zeros((_FIELDS, len(starts)), np.int64)
    _record_fields(data, starts, sizes, properties, numbers)
    return numbers


def require_inside(data: NDArray[np.uint8], starts: NDArray[Any], sizes: NDArray[Any]) -> None:
    """Raise ValueError unless every ``data[starts[i] : starts[i] + sizes[i]]`` lies inside ``data``."""
    if len(starts) and (
        int(starts.min()) < 0 or int(sizes.min()) < 0 or int((starts + sizes).max()) > len(data)
    ):
        raise ValueError(f"a record or a field reaches outside the {len(data)} bytes that hold it")


def property_pairs(data: NDArray[np.uint8], fields: RecordFields) -> Pairs:
    """The places of all properties, names and values, of the records in ``data`` whose ``fields`` were found with
    ``properties``. Of equal names in one record the last counts, as in Java."""
    starts = np.zeros(fields.shape[1] + 1, np.int32)
    places = np.empty((4, int(fields[Number.PAIRS].sum())), np.int64)
    count = _property_pairs(
        data, fields[Number.PROPERTIES_AT], fields[Number.PROPERTIES_BYTES], starts, places
    )
    return Pairs(starts, *(places[column, :count] for column in range(4)))


def copied(
    data: NDArray[np.uint8], at: NDArray[Any], lengths: NDArray[Any]
) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """A copy of the slices ``data[at[i] : at[i] + lengths[i]]``, one behind the other, as Arrow stores texts: the
    offset of each slice and of the end, and the bytes. Raises ValueError when a slice reaches outside ``data``, or all
    are 2 GiB or more together."""
    at, lengths = np.ascontiguousarray(at, np.int64), np.ascontiguousarray(lengths, np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    if total >= 1 << 31:
        raise ValueError(f"the {total:,} bytes of one column are too many for its 32-bit offsets")
    require_inside(data, at, lengths)
    offsets = np.zeros(len(at) + 1, np.int32)
    offsets[1:] = ends
    out = np.empty(total, np.uint8)
    _copy_slices(data, at, lengths, offsets, out)
    return offsets, out


def copy_to(
    data: NDArray[np.uint8],
    at: NDArray[np.int64],
    lengths: NDArray[np.int64],
    offsets: NDArray[np.int32],
    out: NDArray[np.uint8],
) -> None:
    """Copy the slices ``data[at[i] : at[i] + lengths[i]]`` to ``out``, each to ``offsets[i]``. Raises ValueError when a
    slice reaches outside ``data``, or its copy outside ``out``."""
    require_inside(data, at, lengths)
    require_inside(out, offsets[: len(lengths)], lengths)
    _copy_slices(data, at, lengths, offsets, out)


def message_ids(data: NDArray[np.uint8], fields: RecordFields) -> tuple[NDArray[np.int32], NDArray[np.uint8]]:
    """(offsets, text) of the broker's message ids: store host and physical offset in upper-case hex digits."""
    lengths = np.where(fields[Number.VALID] == 1, 2 * (fields[Number.STORE_HOST_BYTES] + 8), 0)
    offsets = np.zeros(fields.shape[1] + 1, np.int32)
    offsets[1:] = np.cumsum(lengths)
    out = np.empty(int(offsets[-1]), np.uint8)
    _message_ids(
        data, fields[Number.STORE_HOST_AT], fields[Number.STORE_HOST_BYTES], fields[Number.PHYS], offsets, out
    )
    return offsets, out


def slice_crc32(data: NDArray[np.uint8], at: NDArray[Any], lengths: NDArray[Any]) -> NDArray[np.int64]:
    """CRC-32 of every slice, as ``zlib.crc32``. Raises ValueError for one outside ``data``."""
    at, lengths = np.ascontiguousarray(at, np.int64), np.ascontiguousarray(lengths, np.int64)
    require_inside(data, at, lengths)
    sums = np.zeros(len(at), np.int64)
    _slice_crc32(data, at, lengths, sums)
    return sums


@kernel
def _record_fields(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    properties: bool,
    numbers: NDArray[np.int64],
) -> None:
    """Find the fields of each record whose lengths fill it; the others' numbers stay as they were."""
    address = data.ctypes.data
    for row in range(len(starts)):
        begin = starts[row]
        if _locate(address, begin, begin + sizes[row], row, numbers) and properties:
            _find_properties(address, row, numbers)


@kernel
def _locate(address: Int, begin: Int, end: Int, row: Int, numbers: NDArray[np.int64]) -> bool:
    """Find the fields of the record from ``begin`` to ``end``, but for its properties, and write them to column ``row``
    of ``numbers``. Returns False, and writes nothing, when the lengths inside do not fill the record exactly."""
    if end - begin < RECORD_BYTES_MIN or load_be32(address, begin) != end - begin:
        return False
    magic, system_flag = load_be32(address, begin + 4), load_be32(address, begin + 36)
    if magic not in (MAGIC_V1, MAGIC_V2):
        return False
    born_bytes = np.int64(20 if system_flag & BORN_HOST_V6 else 8)
    store_bytes = np.int64(20 if system_flag & STORE_HOST_V6 else 8)
    store_at = begin + 48 + born_bytes + 8
    at = store_at + store_bytes
    if at + 16 + 3 > end:
        return False
    body_at, body_bytes = at + 16, load_be32(address, at + 12)
    if body_bytes < 0 or body_bytes > end - body_at - 3:
        return False
    topic_at = body_at + body_bytes + 1
    topic_bytes = load_i8(address, topic_at - 1)
    if magic == MAGIC_V2:
        topic_at += 1
        topic_bytes = load_be16(address, topic_at - 2)
    if topic_bytes < 0 or topic_bytes > end - topic_at - 2:
        return False
    properties_at = topic_at + topic_bytes + 2
    properties_bytes = load_be16(address, properties_at - 2)
    if properties_bytes < 0 or properties_at + properties_bytes != end:
        return False
    numbers[_VALID, row] = 1
    numbers[_MAGIC, row] = magic
    numbers[_BODY_CRC, row] = load_be32(address, begin + 8)
    numbers[_QUEUE_ID, row] = load_be32(address, begin + 12)
    numbers[_FLAG, row] = load_be32(address, begin + 16)
    numbers[_QUEUE_OFFSET, row] = load_be64(address, begin + 20)
    numbers[_PHYS, row] = load_be64(address, begin + 28)
    numbers[_SYS_FLAG, row] = system_flag
    numbers[_BORN, row] = load_be64(address, begin + 40)
    numbers[_BORN_HOST, row], numbers[_BORN_HOST_BYTES, row] = begin + 48, born_bytes
    numbers[_STORED, row] = load_be64(address, store_at - 8)
    numbers[_STORE_HOST, row], numbers[_STORE_HOST_BYTES, row] = store_at, store_bytes
    numbers[_RECONSUMED, row] = load_be32(address, at)
    numbers[_PT_OFFSET, row] = load_be64(address, at + 4)
    numbers[_BODY, row], numbers[_BODY_BYTES, row] = body_at, body_bytes
    numbers[_TOPIC, row], numbers[_TOPIC_BYTES, row] = topic_at, topic_bytes
    numbers[_PROPERTIES, row], numbers[_PROPERTIES_BYTES, row] = properties_at, properties_bytes
    return True


@kernel
def _find_properties(address: Int, row: Int, numbers: NDArray[np.int64]) -> None:
    """Find the properties TAGS, KEYS and UNIQ_KEY of the record in column ``row`` of ``numbers``, count all its
    properties, and note whether they are UTF-8. A pair with an empty name or value is no property."""
    begin = numbers[_PROPERTIES, row]
    end = begin + numbers[_PROPERTIES_BYTES, row]
    numbers[_IS_TEXT, row] = 1 if is_utf8(address, begin, end - begin) else 0
    while begin < end:
        split, stop = pair_at(address, begin, end)
        if split > begin and split < stop - 1:
            numbers[_PAIRS, row] += 1
            field = _known_name(address, begin, split - begin)
            if field >= 0:
                numbers[field, row], numbers[field + 1, row] = split + 1, stop - split - 1
        begin = stop + 1


@kernel
def pair_at(address: Int, begin: Int, end: Int) -> tuple[Int, Int]:
    """Where the name of the property that begins at ``begin`` ends (its first name separator, or -1), and where the
    property ends, at ``end`` at the latest. Looks at eight bytes at once."""
    split, at = np.int64(-1), begin
    while at < end:
        if at + 8 <= end:
            eight = load_le64(address, at)
            if not (eight - _THREES) & ~eight & _TOP_BITS:  # no byte of them is 2 or less
                at += 8
                continue
        byte = load_u8(address, at)
        if byte == PAIR_SEPARATOR:
            break
        if byte == NAME_SEPARATOR and split < 0:
            split = at
        at += 1
    return split, at


@kernel
def decimal(address: Int, at: Int, end: Int) -> Int:
    """The number whose decimal digits, 1 to 18 of them, are from ``at`` to ``end``; -1 for anything else."""
    if end - at < 1 or end - at > 18:
        return np.int64(-1)
    total = np.int64(0)
    while at < end:
        digit = load_u8(address, at) - 48
        if digit < 0 or digit > 9:
            return np.int64(-1)
        total = total * 10 + digit
        at += 1
    return total


@kernel
def _known_name(address: Int, name: Int, length: Int) -> Int:
    """The column of TAGS, KEYS or UNIQ_KEY; -1 for other names."""
    if length == 4:
        head = load_le32(address, name)
        if head == _TAGS_NAME:
            return _TAGS
        if head == _KEYS_NAME:
            return _KEYS
    elif length == 8 and load_le64(address, name) == _UNIQ_KEY_NAME:
        return _UNIQ_KEY
    return -1


@kernel
def _property_pairs(
    data: NDArray[np.uint8],
    properties_at: NDArray[np.int64],
    properties_bytes: NDArray[np.int64],
    starts: NDArray[np.int32],
    places: NDArray[np.int64],
) -> Int:
    """Find all properties of many records, whose properties are at ``properties_at``. ``places`` gets four numbers for
    each: place and length of the name, place and length of the value; ``starts`` gets the number of each record's first
    property. Of equal names in a record the last counts. Returns the number of properties."""
    address = data.ctypes.data
    count = np.int64(0)
    for row in range(len(properties_at)):
        first, begin = count, properties_at[row]
        end = begin + properties_bytes[row]
        while begin < end:
            split, stop = pair_at(address, begin, end)
            if split > begin and split < stop - 1:
                slot = _slot_of(address, begin, split - begin, first, count, places)
                places[0, slot], places[1, slot] = begin, split - begin
                places[2, slot], places[3, slot] = split + 1, stop - split - 1
                count = max(count, slot + 1)
            begin = stop + 1
        starts[row + 1] = count
    return count


@kernel
def _slot_of(address: Int, name: Int, length: Int, first: Int, count: Int, places: NDArray[np.int64]) -> Int:
    """The number of the property, among those from ``first`` to ``count``, that has this name already; ``count`` if
    none has."""
    for slot in range(first, count):
        if places[1, slot] == length and same_bytes(address, places[0, slot], address, name, length):
            return slot
    return count


@kernel
def _copy_slices(
    data: NDArray[np.uint8],
    at: NDArray[np.int64],
    lengths: NDArray[np.int64],
    offsets: NDArray[np.int32],
    out: NDArray[np.uint8],
) -> None:
    """Copy slices to their places; a negative length, of an absent field, copies nothing."""
    source, target = data.ctypes.data, out.ctypes.data
    for row in range(len(at)):
        if lengths[row] > 0:
            copy_bytes(source, at[row], target, np.int64(offsets[row]), lengths[row])


@kernel
def _message_ids(
    data: NDArray[np.uint8],
    host_at: NDArray[np.int64],
    host_bytes: NDArray[np.int64],
    phys: NDArray[np.int64],
    offsets: NDArray[np.int32],
    out: NDArray[np.uint8],
) -> None:
    """Write each message id as hex digits: store host, then physical offset. An empty place stays empty."""
    source, target = data.ctypes.data, out.ctypes.data
    for row in range(len(host_at)):
        pair = np.int64(offsets[row]) // 2
        if offsets[row + 1] == offsets[row]:
            continue
        for step in range(host_bytes[row]):
            put_u16(target, pair + step, np.int64(_HEX_DIGITS[load_u8(source, host_at[row] + step)]))
        pair += host_bytes[row]
        for step in range(8):
            put_u16(target, pair + step, np.int64(_HEX_DIGITS[(phys[row] >> (56 - 8 * step)) & 0xFF]))


@kernel
def _slice_crc32(
    data: NDArray[np.uint8], at: NDArray[np.int64], lengths: NDArray[np.int64], sums: NDArray[np.int64]
) -> None:
    """Write the CRC-32 of each slice, of ``lengths`` bytes at ``at`` of ``data``, to ``sums``."""
    address = data.ctypes.data
    for row in range(len(at)):
        sums[row] = crc32(address, at[row], lengths[row])
