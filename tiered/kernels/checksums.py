"""Checksums and hashes inside kernels: CRC-32 (IEEE), XXH64, Java's String.hashCode over UTF-8.

Each reads ``length`` bytes at ``address + position``; the caller proves that they are readable.
Oracles: ``zlib.crc32``, the ``xxhash`` package in tests, ``tiered.formats.record.java_hash``.
"""

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import can_fold_crc32, fold_crc32, load_le32, load_le64, load_u8

_POLYNOMIAL = 0xEDB88320


def _crc32_tables() -> NDArray[np.uint32]:
    """Eight tables of 256 entries, one behind the other, by which a CRC-32 takes eight bytes at once: entry b of table
    k is the CRC register of the byte b followed by k zero bytes."""
    table = np.arange(256, dtype=np.uint64)
    for _ in range(8):
        table = np.where(table & 1, (table >> 1) ^ _POLYNOMIAL, table >> 1)
    tables = [table]
    for _ in range(7):
        tables.append((tables[-1] >> 8) ^ table[tables[-1] & 0xFF])
    return np.concatenate(tables).astype(np.uint32)


_TABLES = _crc32_tables()
_LOW_BYTE = np.uint64(0xFF)
_INVERTED = np.uint64(0xFFFFFFFF)
_U8, _U16, _U24, _U32 = np.uint64(8), np.uint64(16), np.uint64(24), np.uint64(32)
_U40, _U48, _U56 = np.uint64(40), np.uint64(48), np.uint64(56)


@kernel
def _crc32_word(word: Int) -> Int:
    """The CRC-32 register after eight bytes: ``word`` has these bytes, XORed with the register before them."""
    return np.uint64(
        _TABLES[np.int64(word >> _U56)]
        ^ _TABLES[256 + np.int64((word >> _U48) & _LOW_BYTE)]
        ^ _TABLES[512 + np.int64((word >> _U40) & _LOW_BYTE)]
        ^ _TABLES[768 + np.int64((word >> _U32) & _LOW_BYTE)]
        ^ _TABLES[1024 + np.int64((word >> _U24) & _LOW_BYTE)]
        ^ _TABLES[1280 + np.int64((word >> _U16) & _LOW_BYTE)]
        ^ _TABLES[1536 + np.int64((word >> _U8) & _LOW_BYTE)]
        ^ _TABLES[1792 + np.int64(word & _LOW_BYTE)]
    )


@kernel
def crc32(address: Int, position: Int, length: Int) -> Int:
    """CRC-32, as ``zlib.crc32``, of ``length`` bytes at ``address + position``, as an int64. Uses the processor's
    instruction for 64 bytes at once where there is one."""
    register = _INVERTED
    end = position + length
    if length >= 64 and can_fold_crc32():
        blocks = length // 64
        low, high = fold_crc32(address, position, blocks, register)
        register = _crc32_word(high ^ _crc32_word(low))
        position += blocks * 64
    while end - position >= 8:
        register = _crc32_word(load_le64(address, position) ^ register)
        position += 8
    while position < end:
        low = (register ^ np.uint64(load_u8(address, position))) & _LOW_BYTE
        register = (register >> _U8) ^ np.uint64(_TABLES[np.int64(low)])
        position += 1
    return np.int64(register ^ _INVERTED)


@kernel
def crc32_ending(address: Int, position: Int, length: Int, last: Int) -> Int:
    """``crc32`` of ``length`` >= 1 bytes as if the last of them were ``last``."""
    register = np.uint64(crc32(address, position, length - 1)) ^ _INVERTED
    low = (register ^ np.uint64(last)) & _LOW_BYTE
    return np.int64((register >> _U8) ^ np.uint64(_TABLES[np.int64(low)]) ^ _INVERTED)


_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_U1, _U7, _U11, _U12, _U18 = np.uint64(1), np.uint64(7), np.uint64(11), np.uint64(12), np.uint64(18)
_U23, _U27, _U29, _U31, _U33 = np.uint64(23), np.uint64(27), np.uint64(29), np.uint64(31), np.uint64(33)
_U64 = np.uint64(64)


@kernel
def _rotate(word: Int, count: Int) -> Int:
    return (word << count) | (word >> (_U64 - count))


@kernel
def _xxh64_round(lane: Int, word: Int) -> Int:
    return _rotate(lane + word * _P2, _U31) * _P1


@kernel
def _xxh64_merge(total: Int, lane: Int) -> Int:
    return (total ^ _xxh64_round(np.uint64(0), lane)) * _P1 + _P4


@kernel
def xxh64(address: Int, position: Int, length: Int) -> Int:
    """The XXH64 hash, with seed 0, of ``length`` bytes at ``address + position``, as its specification describes it."""
    end = position + length
    if length >= 32:
        a, b, c, d = _P1 + _P2, _P2, np.uint64(0), np.uint64(0) - _P1
        while end - position >= 32:
            a = _xxh64_round(a, load_le64(address, position))
            b = _xxh64_round(b, load_le64(address, position + 8))
            c = _xxh64_round(c, load_le64(address, position + 16))
            d = _xxh64_round(d, load_le64(address, position + 24))
            position += 32
        total = _rotate(a, _U1) + _rotate(b, _U7) + _rotate(c, _U12) + _rotate(d, _U18)
        total = _xxh64_merge(_xxh64_merge(_xxh64_merge(_xxh64_merge(total, a), b), c), d)
    else:
        total = _P5
    total += np.uint64(length)
    while end - position >= 8:
        total = _rotate(total ^ _xxh64_round(np.uint64(0), load_le64(address, position)), _U27) * _P1 + _P4
        position += 8
    if end - position >= 4:
        total = _rotate(total ^ (load_le32(address, position) * _P1), _U23) * _P2 + _P3
        position += 4
    while position < end:
        total = _rotate(total ^ (np.uint64(load_u8(address, position)) * _P5), _U11) * _P1
        position += 1
    total = (total ^ (total >> _U33)) * _P2
    total = (total ^ (total >> _U29)) * _P3
    return total ^ (total >> _U32)


@kernel
def java_hash(address: Int, position: Int, length: Int) -> Int:
    """What Java's ``new String(bytes, UTF_8).hashCode()`` returns for ``length`` bytes at ``address + position``,
    sign-extended to int64: a tag's code in a consume queue.

    Invalid UTF-8 hashes as Java decodes it: U+FFFD for each maximal invalid part, one for a surrogate.
    """
    total = np.uint32(0)
    end = position + length
    while position < end:
        first = load_u8(address, position)
        if first < 0x80:
            total = np.uint32(total * np.uint32(31) + np.uint32(first))
            position += 1
            continue
        taken, code = _decode_sequence(address, position, end)
        position += taken
        if code >= 0x10000:  # Java has it as two chars, a surrogate pair
            total = np.uint32(total * np.uint32(31) + np.uint32(0xD7C0 + (code >> 10)))
            code = 0xDC00 + (code & 0x3FF)
        total = np.uint32(total * np.uint32(31) + np.uint32(code))
    return np.int64(np.int32(total))


@kernel
def _decode_sequence(address: Int, position: Int, end: Int) -> tuple[Int, Int]:
    """Decode the UTF-8 sequence at ``position``, of more than one byte and before ``end``. Returns the number of its
    bytes and its code point; where it is invalid, the bytes that Java skips and U+FFFD."""
    first = load_u8(address, position)
    # The range of the second byte: overlong forms and code points above U+10FFFF are invalid.
    low, high = 0x80, 0xBF
    if 0xC2 <= first <= 0xDF:
        needed, code = 1, first & 0x1F
    elif 0xE0 <= first <= 0xEF:
        needed, code = 2, first & 0x0F
        if first == 0xE0:
            low = 0xA0
    elif 0xF0 <= first <= 0xF4:
        needed, code = 3, first & 0x07
        if first == 0xF0:
            low = 0x90
        elif first == 0xF4:
            high = 0x8F
    else:
        return 1, 0xFFFD
    for step in range(1, needed + 1):
        if position + step >= end:
            return step, 0xFFFD
        following = load_u8(address, position + step)
        if following < low or following > high:
            return step, 0xFFFD
        low, high = 0x80, 0xBF
        code = (code << 6) | (following & 0x3F)
    if 0xD800 <= code <= 0xDFFF:
        return 3, 0xFFFD
    return needed + 1, code


@kernel
def is_utf8(address: Int, position: Int, length: Int) -> bool:
    """Whether ``length`` bytes are well-formed UTF-8."""
    end = position + length
    while position < end:
        if load_u8(address, position) < 0x80:
            position += 1
            continue
        taken, code = _decode_sequence(address, position, end)
        # U+FFFD may stand there itself, as the bytes EF BF BD.
        if code == 0xFFFD and not (taken == 3 and load_u8(address, position) == 0xEF):
            return False
        position += taken
    return True
