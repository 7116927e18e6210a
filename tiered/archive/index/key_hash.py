"""The 64-bit hash of a message key: XXH64 with seed 0 of the UTF-8 of ``topic#key``, as key sections store it.

Plain Python for the few keys of a query, which must not wait for a compiler. The uploader hashes with
``tiered.kernels.checksums``; tests compare both with the reference implementation.
"""

import struct

_P1, _P2, _P3 = 0x9E3779B185EBCA87, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9
_P4, _P5 = 0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5
_MASK = (1 << 64) - 1


def key_hash(topic: str, key: str) -> int:
    """Hash of ``key`` in ``topic``. Lone surrogates, which no stored key has, are replaced."""
    return xxh64(f"{topic}#{key}".encode("utf-8", "replace"))


def xxh64(data: bytes) -> int:
    """The 64-bit hash XXH64 of ``data``, with seed 0, as the xxHash specification 0.1.1 describes it in the section
    "XXH64 algorithm description"."""
    length, at = len(data), 0
    if length >= 32:
        lanes = [(_P1 + _P2) & _MASK, _P2, 0, -_P1 & _MASK]
        while at + 32 <= length:
            words = struct.unpack_from("<4Q", data, at)
            lanes = [_round(lane, word) for lane, word in zip(lanes, words, strict=True)]
            at += 32
        total = sum(_rotate(lane, by) for lane, by in zip(lanes, (1, 7, 12, 18), strict=True)) & _MASK
        for lane in lanes:
            total = ((total ^ _round(0, lane)) * _P1 + _P4) & _MASK
    else:
        total = _P5
    total = (total + length) & _MASK
    while at + 8 <= length:
        (word,) = struct.unpack_from("<Q", data, at)
        total = (_rotate(total ^ _round(0, word), 27) * _P1 + _P4) & _MASK
        at += 8
    if at + 4 <= length:
        (word,) = struct.unpack_from("<I", data, at)
        total = (_rotate(total ^ (word * _P1 & _MASK), 23) * _P2 + _P3) & _MASK
        at += 4
    for byte in data[at:]:
        total = _rotate(total ^ (byte * _P5 & _MASK), 11) * _P1 & _MASK
    total = (total ^ (total >> 33)) * _P2 & _MASK
    total = (total ^ (total >> 29)) * _P3 & _MASK
    return total ^ (total >> 32)


def _round(lane: int, word: int) -> int:
    return _rotate((lane + word * _P2) & _MASK, 31) * _P1 & _MASK


def _rotate(value: int, by: int) -> int:
    return (value << by | value >> (64 - by)) & _MASK
