"""Kernels that decide whether the bytes at a commitlog position are a valid record.

They make every test of CommitLog.checkMessageAndReturnSize, and some that the broker does not make: the blank marker
spans the rest of its file, PHYSICALOFFSET is the record's own position, a consume queue can hold QUEUEOFFSET, all
lengths stay inside the record. They fill the parsed fields of the words (record_columns). Oracle:
``tests.kernels.oracle.check_record``.
"""

from tiered.kernels.checksums import crc32, crc32_ending
from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import (
    get_i64,
    load_be16,
    load_be32,
    load_be64,
    load_i8,
    load_le64,
    load_u8,
    put_i64,
)
from tiered.kernels.record_columns import (
    BODY,
    BODY_LENGTH,
    PROPERTIES,
    PROPERTIES_LENGTH,
    SIZE,
    STOP_DETAIL,
    STORE_TIMESTAMP,
    SYS_FLAG,
    TOPIC,
    TOPIC_LENGTH,
    InvalidReason,
    StopReason,
)
from tiered.kernels.words import word

MAGIC_V1 = -626843481  # 0xDAA320A7
MAGIC_V2 = -626843477  # 0xDAA320AB: the topic's length is two bytes
MAGIC_BLANK = -875286124  # 0xCBD43194: the rest of the file is padding
RECORD_BYTES_MIN = 91
END_OF_FILE_BYTES = 8
"""The broker writes a record only if this much room remains behind it in its file."""
RESERVED_CRC_BYTES = 20
"""``__CRC32#``, separator, ten digits, separator."""
QUEUE_OFFSET_MAX = ((1 << 63) - 1) // 20
"""The broker counts the bytes of a consume queue, 20 a unit, in a long."""
VALID = -1

_INPUT_END, _FILE_END, _NO_RECORD, _INVALID = map(int, StopReason)
(
    _NONE,
    _SIZE,
    _MAGIC,
    _PHYSICAL_OFFSET,
    _LENGTH,
    _BODY_CRC,
    _RECORD_CRC,
    _TOPIC,
    _PROPERTIES,
    _QUEUE_OFFSET,
) = map(int, InvalidReason)

CRC32_NAME = word(b"__CRC32#")
NAME_SEPARATOR, PAIR_SEPARATOR = 1, 2
BORN_HOST_V6, STORE_HOST_V6 = 0x10, 0x20
"""In the system flag: the host is an IPv6 address."""


@kernel
def check_record(arena: Int, position: Int, end: Int, phys: Int, file_end_phys: Int, out: Int) -> Int:
    """Whether a valid record begins at ``arena + position``, which is commitlog offset ``phys`` in a file that ends at
    ``file_end_phys``. Returns VALID and writes its fields to the words of ``out``; or a StopReason, with the failed
    test in the word STOP_DETAIL. A record of which only a part is before ``end`` is tested as far as possible."""
    available = end - position
    if available < END_OF_FILE_BYTES:
        return _INPUT_END
    size, magic, room = load_be32(arena, position), load_be32(arena, position + 4), file_end_phys - phys
    if magic == MAGIC_BLANK:
        put_i64(out, STOP_DETAIL, _SIZE)
        return _FILE_END if size == room else _INVALID
    if magic not in (MAGIC_V1, MAGIC_V2):
        put_i64(out, STOP_DETAIL, _MAGIC)
        return _NO_RECORD if magic == 0 and size == 0 else _INVALID
    if size < RECORD_BYTES_MIN or size > room - END_OF_FILE_BYTES:
        put_i64(out, STOP_DETAIL, _SIZE)
        return _INVALID
    if available >= 36 and load_be64(arena, position + 28) != phys:
        put_i64(out, STOP_DETAIL, _PHYSICAL_OFFSET)
        return _INVALID
    if available >= 28 and not 0 <= load_be64(arena, position + 20) <= QUEUE_OFFSET_MAX:
        put_i64(out, STOP_DETAIL, _QUEUE_OFFSET)
        return _INVALID
    if size > available:
        return _INPUT_END
    put_i64(out, SIZE, size)
    detail = _check_structure(arena, position, position + size, magic == MAGIC_V2, out)
    if detail == _NONE:
        detail = _check_sums(arena, position, position + size, out)
    if detail == _NONE:
        return VALID
    put_i64(out, STOP_DETAIL, detail)
    return _INVALID


@kernel
def _check_structure(arena: Int, position: Int, end: Int, long_topic: bool, out: Int) -> Int:
    """Check that the lengths inside the record from ``position`` to ``end``, at least RECORD_BYTES_MIN, fill it
    exactly, and write the places of its fields to the words of ``out``. Returns the failed test, or _NONE.
    ``long_topic``: the length of the topic has two bytes."""
    system_flag = load_be32(arena, position + 36)
    cursor = position + 48 + (20 if system_flag & BORN_HOST_V6 else 8)
    put_i64(out, SYS_FLAG, system_flag)
    put_i64(out, STORE_TIMESTAMP, load_be64(arena, cursor))
    cursor += 8 + (20 if system_flag & STORE_HOST_V6 else 8) + 12
    if cursor + 7 > end:
        return _LENGTH
    length = load_be32(arena, cursor)
    cursor += 4
    if length < 0 or length > end - cursor - 3:
        return _LENGTH
    put_i64(out, BODY, cursor)
    put_i64(out, BODY_LENGTH, length)
    cursor += length
    if long_topic:
        length = load_be16(arena, cursor)
        cursor += 2
    else:
        length = load_i8(arena, cursor)
        cursor += 1
    if length <= 0:
        return _TOPIC
    if length > end - cursor - 2:
        return _LENGTH
    put_i64(out, TOPIC, cursor)
    put_i64(out, TOPIC_LENGTH, length)
    cursor += length
    length = load_be16(arena, cursor)
    cursor += 2
    if length < 0:
        return _PROPERTIES
    put_i64(out, PROPERTIES, cursor)
    put_i64(out, PROPERTIES_LENGTH, length)
    return _NONE if cursor + length == end else _LENGTH


@kernel
def _check_sums(arena: Int, position: Int, end: Int, out: Int) -> Int:
    """Check the checksum of the body (an empty one has none, as in the broker), then that of the whole record in the
    property ``__CRC32#``, if it is the last one. Returns the failed test, or _NONE.

    If another byte than the separator is before that name, it is the end of a longer name, and no checksum; but if the
    checksum matches with the separator there, that byte is damaged.
    """
    body_length = get_i64(out, BODY_LENGTH)
    if body_length > 0:
        computed = crc32(arena, get_i64(out, BODY), body_length) & 0x7FFFFFFF
        if computed != load_be32(arena, position + 8):
            return _BODY_CRC
    length = get_i64(out, PROPERTIES_LENGTH)
    reserved = end - RESERVED_CRC_BYTES
    if (
        length < RESERVED_CRC_BYTES
        or load_le64(arena, reserved) != CRC32_NAME
        or load_u8(arena, reserved + 8) != NAME_SEPARATOR
        or load_u8(arena, end - 1) != PAIR_SEPARATOR
    ):
        return _NONE
    is_own = length == RESERVED_CRC_BYTES or load_u8(arena, reserved - 1) == PAIR_SEPARATOR
    wanted = 0
    for step in range(10):  # least significant digit first, so read backwards
        digit = load_u8(arena, end - 2 - step) - 48
        if digit < 0 or digit > 9:
            return _RECORD_CRC if is_own else _NONE
        wanted = wanted * 10 + digit
    if not is_own:
        computed = crc32_ending(arena, position, reserved - position, PAIR_SEPARATOR) & 0x7FFFFFFF
        return _RECORD_CRC if computed == wanted else _NONE
    computed = crc32(arena, position, reserved - position) & 0x7FFFFFFF
    return _NONE if computed == wanted else _RECORD_CRC
