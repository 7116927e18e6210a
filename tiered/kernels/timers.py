"""What messages of the gateway topic ask for, without a Python object for each. Oracle: ``tiered.model.timer``."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.checksums import xxh64
from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import load_be32, load_be64, load_le64, load_u8
from tiered.kernels.words import word
from tiered.model.timer import Refusal

ROW = 6
"""Columns: deliver ms (0: no timer), hash of its key, refusal, ms of the cancelled timer, hash of its key, whether it
cancels one."""
_TRANSACTION, _NO_KEY, _NO_TOPIC = int(Refusal.TRANSACTION), int(Refusal.NO_KEY), int(Refusal.NO_TOPIC)
_BAD_TIME, _TOO_FAR, _BAD_CANCEL = int(Refusal.BAD_TIME), int(Refusal.TOO_FAR), int(Refusal.BAD_CANCEL)
_UNIQ_KEY, _TIERED = word(b"UNIQ_KEY"), word(b"TIERED_T")
_TOPIC_TAIL, _DELIVER_TAIL, _CANCEL_TAIL = word(b"ED_TOPIC"), word(b"ELIVER_M"), word(b"D_CANCEL")
_TIERED_D, _TIERED_C = word(b"TIERED_D"), word(b"TIERED_C")
_SPACE = 32


def find_timers(
    arena: NDArray[np.uint8],
    position: NDArray[np.int64],
    size: NDArray[np.int64],
    *,
    max_delay_ms: int,
) -> NDArray[np.int64]:
    """A row of ROW columns for each valid record of ``size`` bytes at ``position``. Raises ValueError outside the
    arena."""
    found = np.zeros((len(position), ROW), np.int64)
    if len(position) and not (position.min() >= 0 and (position + size).max() <= len(arena)):
        raise ValueError(f"records outside of an arena of {len(arena)} bytes")
    _find(arena.ctypes.data, position.astype(np.int64), found, np.int64(max_delay_ms))
    return found


@kernel
def _find(arena: Int, position: NDArray[np.int64], found: NDArray[Any], max_delay_ms: Int) -> None:
    for row in range(len(position)):
        at = position[row]
        flag = load_be32(arena, at + 36)
        host = 20 if flag & 0x10 else 8
        stored_ms = load_be64(arena, at + 48 + host)
        body = at + 56 + host + (20 if flag & 0x20 else 8) + 12
        topic = body + 4 + load_be32(arena, body)
        # Magics of a topic length in one byte and in two differ in the last byte.
        wide = load_u8(arena, at + 7) == 0xAB
        length = load_u8(arena, topic)
        topic += 1
        if wide:
            length = length * 256 + load_u8(arena, topic)
            topic += 1
        properties = topic + length
        count = load_u8(arena, properties) * 256 + load_u8(arena, properties + 1)
        _row(arena, properties + 2, properties + 2 + count, stored_ms, flag, max_delay_ms, found[row])


@kernel
def _row(
    arena: Int, start: Int, end: Int, stored_ms: Int, flag: Int, max_delay_ms: Int, out: NDArray[Any]
) -> None:
    """As the scan reads properties: empty names and values are ignored, the last of equal names wins."""
    where = np.zeros(8, np.int64)
    split: Int = np.int64(-1)
    for at in range(start, end):
        byte = load_u8(arena, at)
        if byte > 2:
            continue
        if byte == 2:
            if start < split < at - 1:
                _note(arena, start, split, at, where)
            start, split = at + 1, np.int64(-1)
        elif byte == 1 and split < 0:
            split = at
    if start < split < end - 1:
        _note(arena, start, split, end, where)
    refusal = _TRANSACTION if flag & 0x8C else 0
    if where[7]:
        out[5] = 1
        at, stop = where[6], where[6] + where[7]
        space = at
        while space < stop and load_u8(arena, space) != _SPACE:
            space += 1
        cancelled_ms = _number(arena, at, space)
        if cancelled_ms < 0 or space + 1 >= stop:
            refusal = refusal or _BAD_CANCEL
        else:
            out[3], out[4] = cancelled_ms, np.int64(xxh64(arena, space + 1, stop - space - 1))
    if where[1] or where[3] or not where[7]:
        deliver_ms = max(_number(arena, where[2], where[2] + where[3]), 0)
        if not where[1]:
            refusal = refusal or _NO_TOPIC
        if not where[5]:
            refusal = refusal or _NO_KEY
        if not deliver_ms:
            refusal = refusal or _BAD_TIME
        if deliver_ms - stored_ms > max_delay_ms:
            refusal = refusal or _TOO_FAR
        out[0] = deliver_ms
        if where[5]:
            out[1] = np.int64(xxh64(arena, where[4], where[5]))
    out[2] = refusal


@kernel
def _note(arena: Int, name: Int, split: Int, end: Int, where: NDArray[Any]) -> None:
    length = split - name
    if length < 8:
        return
    head, field = load_le64(arena, name), -1
    if length == 8 and head == _UNIQ_KEY:
        field = 4
    elif length == 12 and head == _TIERED and load_le64(arena, name + 4) == _TOPIC_TAIL:
        field = 0
    elif length == 17 and head == _TIERED_D and load_le64(arena, name + 8) == _DELIVER_TAIL:
        field = 2 if load_u8(arena, name + 16) == 83 else -1
    elif length == 13 and head == _TIERED_C and load_le64(arena, name + 5) == _CANCEL_TAIL:
        field = 6
    if field >= 0:
        where[field], where[field + 1] = split + 1, end - split - 1


@kernel
def _number(arena: Int, at: Int, end: Int) -> Int:
    """At most 18 decimal digits, else -1."""
    if end - at < 1 or end - at > 18:
        return np.int64(-1)
    total = np.int64(0)
    while at < end:
        digit = load_u8(arena, at) - 48
        if digit < 0 or digit > 9:
            return np.int64(-1)
        total = total * 10 + digit
        at += 1
    return total
