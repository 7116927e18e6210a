"""What messages of the gateway topic ask for, without a Python object for each, and the order of their times. Oracles:
``tiered.model.timer``, ``np.argsort``."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.checksums import xxh64
from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import load_le64, load_u8
from tiered.kernels.queue_table import same_bytes
from tiered.kernels.record_fields import Number, decimal, pair_at, record_fields
from tiered.kernels.words import word
from tiered.model.dates import PLAUSIBLE_MS
from tiered.model.timer import QUEUES_MAX, Refusal

ROW = 11
"""Numbers for each message. 0: deliver time in ms, 0 if it is no timer; 1, 2: hashes of its key, 0 without one, and of
its topic; 3: why it is refused; 4, 5: deliver time and hash of the key of the timers that it cancels; 6: 1 if it
cancels by key, 2 if by place; 7, 8: queue id and offset of that place; 9, 10: where its topic is, and the topic's
length."""
_TRANSACTION, _NO_TOPIC, _BAD_TIME = int(Refusal.TRANSACTION), int(Refusal.NO_TOPIC), int(Refusal.BAD_TIME)
_TOO_FAR, _BAD_CANCEL = int(Refusal.TOO_FAR), int(Refusal.BAD_CANCEL)
_SECONDS, _BAD_QUEUE = int(Refusal.SECONDS), int(Refusal.BAD_QUEUE)
_FIRST_MS, _END_MS, _QUEUES_MAX = PLAUSIBLE_MS.start, PLAUSIBLE_MS.stop, QUEUES_MAX
_UNIQ_KEY, _TIERED_T, _TIERED_D = word(b"UNIQ_KEY"), word(b"TIERED_T"), word(b"TIERED_D")
_TIERED_C, _TIERED_Q = word(b"TIERED_C"), word(b"TIERED_Q")
_TOPIC_TAIL, _DELIVER_TAIL, _CANCEL_TAIL = word(b"ED_TOPIC"), word(b"ELIVER_M"), word(b"D_CANCEL")
_PLACE_MIDDLE, _PLACE_TAIL, _QUEUE_TAIL = word(b"ANCEL_PL"), word(b"EL_PLACE"), word(b"ED_QUEUE")
_TOPIC, _DELIVER, _KEY, _CANCEL, _PLACE, _QUEUE = 0, 2, 4, 6, 8, 10
"""Where ``_note`` puts begin and length of a value."""
_COLON, _CAPITAL_S = 58, 83
_SPACE = 32
_LAST = (1 << 62) - 1
_DIGIT_BITS = 12
_DIGITS, _DIGIT = 1 << _DIGIT_BITS, (1 << _DIGIT_BITS) - 1
_PROPERTIES_AT, _PROPERTIES_BYTES = int(Number.PROPERTIES_AT), int(Number.PROPERTIES_BYTES)
_STORED, _SYS_FLAG = int(Number.STORE_TIMESTAMP), int(Number.SYS_FLAG)


def find_timers(
    arena: NDArray[np.uint8], position: NDArray[np.int64], size: NDArray[np.int64], *, max_delay_ms: int
) -> NDArray[np.int64]:
    """What the records of ``size`` bytes at ``position`` in ``arena``, a buffer with part of the commitlog, say as
    timers.

    Returns an array of ROW rows, the fields of a timer (delivery time, place of its key, why it is refused, …), with a
    column for each record; all 0 where a record is no timer. A timer more than ``max_delay_ms`` ahead is refused.
    Raises ValueError if a record lies outside the arena.
    """
    fields = record_fields(arena, position, size, properties=False)
    found = np.zeros((ROW, len(position)), np.int64)
    _find(arena.ctypes.data, fields, found, np.int64(max_delay_ms))
    return found


@kernel
def _find(arena: Int, fields: NDArray[np.int64], found: NDArray[Any], max_delay_ms: Int) -> None:
    """Find, for each message of the gateway topic, the timer that it creates or cancels, or why it is refused, and
    write it to its column of ``found``. ``fields``: where the messages' properties are in ``arena``; ``max_delay_ms``:
    how far ahead a timer may be."""
    where = np.zeros(12, np.int64)  # place and length of each property that timers have
    for row in range(found.shape[1]):
        where[:] = 0
        begin = fields[_PROPERTIES_AT, row]
        end = begin + fields[_PROPERTIES_BYTES, row]
        while begin < end:
            split, stop = pair_at(arena, begin, end)
            if begin < split < stop - 1:
                _note(arena, begin, split, stop, where)
            begin = stop + 1
        _row(arena, where, fields[_STORED, row], fields[_SYS_FLAG, row], max_delay_ms, found[:, row])


@kernel
def same_texts(
    arena: Int, at: NDArray[np.int64], length: NDArray[np.int64], like: NDArray[np.int64]
) -> NDArray[Any]:
    """Whether the text of each row, of ``length`` bytes at ``arena + at``, equals that of the row ``like``, which has
    the same hash: two different texts may have one hash."""
    is_same: NDArray[Any] = length == length[like]
    for row in range(len(at)):
        is_same[row] &= same_bytes(arena, at[row], arena, at[like[row]], length[row] if is_same[row] else 0)
    return is_same


def time_order(times: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indexes that sort ``times``; equal ones keep their order. A radix sort: a fifth of the time of numpy's."""
    rows = np.arange(len(times)), np.empty(len(times), np.int64)
    return _time_order(times, np.int64(times.min(initial=_LAST)), *rows, np.empty(_DIGITS, np.int64))


@kernel
def _time_order(
    times: NDArray[np.int64], first: Int, source: NDArray[Any], target: NDArray[Any], at: NDArray[Any]
) -> NDArray[Any]:
    """The row numbers ``source`` sorted by ``times``, of which ``first`` is the earliest: a radix sort, in which rows
    of equal times keep their order. ``target`` and ``at`` are memory for the work."""
    span = np.int64(0)
    for time in times:
        span = max(span, time - first)
    shift = np.int64(0)
    while shift < 63 and span >> shift:
        at[:] = 0
        for time in times:
            at[time - first >> shift & _DIGIT] += 1
        total = np.int64(0)
        # The count of each digit becomes the position of its next row.
        for digit in range(_DIGITS):
            at[digit], total = total, total + at[digit]
        for row in source:
            digit = times[row] - first >> shift & _DIGIT
            target[at[digit]] = row
            at[digit] += 1
        source, target = target, source
        shift += _DIGIT_BITS
    return source


@kernel
def _row(
    arena: Int, where: NDArray[Any], stored_ms: Int, flag: Int, max_delay_ms: Int, out: NDArray[Any]
) -> None:
    """Write to ``out`` the timer that one message creates or cancels, or why it is refused: the first of several
    reasons. ``where``: place and length of its properties in ``arena``; ``flag``: its system flag."""
    refusal = _TRANSACTION if flag & 0x8C else 0  # also a batch
    cancels = where[_CANCEL + 1] or where[_PLACE + 1]
    if cancels and not _cancel(arena, where, out):
        refusal = refusal or _BAD_CANCEL
    if where[_TOPIC + 1]:
        out[2] = np.int64(xxh64(arena, where[_TOPIC], where[_TOPIC + 1]))
        out[9], out[10] = where[_TOPIC], where[_TOPIC + 1]
    else:
        refusal = refusal or _NO_TOPIC
    if where[_KEY + 1]:
        out[1] = np.int64(xxh64(arena, where[_KEY], where[_KEY + 1]))
    if where[_DELIVER + 1] or not cancels:
        deliver_ms = decimal(arena, where[_DELIVER], where[_DELIVER] + where[_DELIVER + 1])
        if not _FIRST_MS <= deliver_ms < _END_MS:
            # A common mistake gets a reason of its own.
            is_seconds = deliver_ms < _FIRST_MS <= deliver_ms * 1000 < _END_MS
            refusal = refusal or (_SECONDS if is_seconds else _BAD_TIME)
        if deliver_ms - stored_ms > max_delay_ms:
            refusal = refusal or _TOO_FAR
        at, length = where[_QUEUE], where[_QUEUE + 1]
        if length and not (length <= 5 and 0 <= decimal(arena, at, at + length) < _QUEUES_MAX):
            refusal = refusal or _BAD_QUEUE
        out[0] = deliver_ms
    out[3] = refusal


@kernel
def _cancel(arena: Int, where: NDArray[Any], out: NDArray[Any]) -> bool:
    """Write to ``out`` which timer a message cancels: the deliver time and key in its property, separated by a space,
    and the place (queue id and offset, separated by a colon) if it has that property. Returns whether they are
    valid."""
    at, stop = where[_CANCEL], where[_CANCEL] + where[_CANCEL + 1]
    space = _find_byte(arena, at, stop, _SPACE)
    out[4], out[6] = decimal(arena, at, space), 1
    if not _FIRST_MS <= out[4] < _END_MS or space + 1 >= stop:
        return False
    out[5] = np.int64(xxh64(arena, space + 1, stop - space - 1))
    if where[_PLACE + 1]:
        at, stop = where[_PLACE], where[_PLACE] + where[_PLACE + 1]
        colon = _find_byte(arena, at, stop, _COLON)
        out[6], out[7] = 2, decimal(arena, at, colon)
        out[8] = decimal(arena, colon + 1, stop)
        return bool(colon - at <= 5 and 0 <= out[7] < _QUEUES_MAX and out[8] >= 0)
    return True


@kernel
def _find_byte(arena: Int, at: Int, stop: Int, wanted: Int) -> Int:
    """The first in [at, stop), else ``stop``."""
    while at < stop and load_u8(arena, at) != wanted:
        at += 1
    return at


@kernel
def _note(arena: Int, name: Int, split: Int, end: Int, where: NDArray[Any]) -> None:
    """If the property from ``name`` to ``end``, whose separator is at ``split``, is one that timers have, write the
    place and length of its value to ``where``. Names are compared in words of eight bytes."""
    length = split - name
    if length < 8:
        return
    head, field = load_le64(arena, name), -1
    if length == 8 and head == _UNIQ_KEY:
        field = _KEY
    elif length == 12 and head == _TIERED_T and load_le64(arena, name + 4) == _TOPIC_TAIL:
        field = _TOPIC
    elif length == 12 and head == _TIERED_Q and load_le64(arena, name + 4) == _QUEUE_TAIL:
        field = _QUEUE
    elif length == 17 and head == _TIERED_D and load_le64(arena, name + 8) == _DELIVER_TAIL:
        field = _DELIVER if load_u8(arena, name + 16) == _CAPITAL_S else -1
    elif length == 13 and head == _TIERED_C and load_le64(arena, name + 5) == _CANCEL_TAIL:
        field = _CANCEL
    elif length == 19 and head == _TIERED_C and load_le64(arena, name + 8) == _PLACE_MIDDLE:
        field = _PLACE if load_le64(arena, name + 11) == _PLACE_TAIL else -1
    if field >= 0:
        where[field], where[field + 1] = split + 1, end - split - 1
