"""Kernels that turn one valid, visible record into a row, its key hashes and its LMQ entries.

Sources: MessageDecoder.string2messageProperties; tagsCode and deliver time of CommitLog.checkMessageAndReturnSize; keys
of IndexService; LMQs of MultiDispatch. LMQ entries that only some versions of the broker make carry DOUBT bits, and
callers decide. Oracle: ``tests.kernels.oracle.scan_log``.
"""

import numpy as np

from tiered.kernels.checksums import java_hash, xxh64
from tiered.kernels.jit import Int, kernel
from tiered.kernels.loads import (
    copy_bytes,
    get_i64,
    load_be32,
    load_be64,
    load_le32,
    load_le64,
    load_u8,
    put_i32,
    put_i64,
    put_u8,
    put_u16,
)
from tiered.kernels.queue_table import QUEUES_FULL, TOPIC_INVALID, find_or_insert, is_not_admitted
from tiered.kernels.record_checks import NAME_SEPARATOR, PAIR_SEPARATOR, VALID
from tiered.kernels.record_columns import (
    A_FLAGS,
    A_INNER_NUM,
    A_KEY_COUNT,
    A_KEY_HASHES,
    A_KEY_TEXT,
    A_LMQ_DOUBT,
    A_LMQ_QUEUE,
    A_LMQ_QUEUE_OFFSET,
    A_LMQ_ROW,
    A_PHYS,
    A_POSITION,
    A_QUEUE,
    A_QUEUE_OFFSET,
    A_SIZE,
    A_STORE_TIMESTAMP,
    A_TAGS_CODE,
    DELAY,
    DOUBT_PLAIN,
    DOUBT_SLASH,
    DOUBT_TOPIC,
    FLAG_BATCH,
    FLAG_LMQ,
    GROW_KEYS,
    GROW_LMQ_ROWS,
    GROW_QUEUES,
    GROW_ROWS,
    GROW_TOPIC_BYTES,
    INNER_BASE,
    INNER_NUM,
    KEY_LIST,
    KEYS,
    KEYS_MAX,
    LMQ_ROWS,
    LMQ_ROWS_MAX,
    MULTI_DISPATCH,
    MULTI_OFFSET,
    PROPERTIES,
    PROPERTIES_LENGTH,
    ROWS,
    ROWS_MAX,
    SIZE,
    SKIPPED,
    STOP_DETAIL,
    STORE_TIMESTAMP,
    SYS_FLAG,
    TAGS,
    TOPIC,
    TOPIC_LENGTH,
    UNIQ_KEY,
    InvalidReason,
    StopReason,
)
from tiered.kernels.record_fields import decimal
from tiered.kernels.words import word

_INVALID, _TOPIC_REASON = int(StopReason.INVALID), int(InvalidReason.TOPIC)
_PARSE_FAILED = np.int64(-(1 << 63))
_HASH_SIGN, _COMMA, _SLASH, _SPACE, _PLUS, _MINUS = b"#,/ +-"

_TAGS_NAME, _KEYS_NAME = word(b"TAGS"), word(b"KEYS")
_DELAY_HEAD, _DELAY_TAIL = word(b"DELA"), word(b"ELAY")
_UNIQ_KEY_NAME = word(b"UNIQ_KEY")
_NUM_HEAD, _NUM_TAIL = word(b"INNER_NU"), word(b"NNER_NUM")
_BASE_HEAD, _BASE_TAIL = word(b"INNER_BA"), word(b"NER_BASE")
_MULTI_HEAD = word(b"INNER_MU")
_DISPATCH_MIDDLE, _DISPATCH_TAIL = word(b"LTI_DISP"), word(b"DISPATCH")
_OFFSET_MIDDLE, _OFFSET_TAIL = word(b"LTI_QUEU"), word(b"E_OFFSET")
_LMQ_HEAD, _LMQ_TAIL = word(b"%LMQ"), word(b"LMQ%")
_RETRY_HEAD, _RETRY_TAIL = word(b"%RET"), word(b"TRY%")
_RMQ_SYS = word(b"rmq_sys_")
_SCHEDULE_HEAD, _SCHEDULE_MIDDLE, _SCHEDULE_TAIL = word(b"SCHEDULE"), word(b"_TOPIC_X"), word(b"PIC_XXXX")


@kernel
def emit_record(
    arena: Int, position: Int, phys: Int, table: Int, out: Int, delay_levels: Int, level_count: Int
) -> Int:
    """Append the row of columns, the key hashes and the LMQ entries of a checked record at ``arena + position``, whose
    fields are in the words of ``out``. A record that no archived queue has is only counted.

    Returns VALID; the code of a full array, after which the caller enlarges it and repeats the call, as only ``table``
    has changed; or INVALID for a topic that is not UTF-8.
    """
    row = get_i64(out, ROWS)
    if row >= get_i64(out, ROWS_MAX):
        return GROW_ROWS
    queue_id = load_be32(arena, position + 12)
    queue = find_or_insert(arena, get_i64(out, TOPIC), get_i64(out, TOPIC_LENGTH), queue_id, table)
    if queue < 0:
        put_i64(out, STOP_DETAIL, _TOPIC_REASON)
        return _INVALID if queue == TOPIC_INVALID else _grow_code(queue)
    _find_properties(arena, out)
    lmq_rows = get_i64(out, LMQ_ROWS)
    if get_i64(out, MULTI_DISPATCH + 1) > 0 and get_i64(out, MULTI_OFFSET + 1) > 0:
        lmq_rows = _emit_lmq_entries(arena, queue_id, row, table, out)
        if lmq_rows < 0:
            return -lmq_rows
    has_lmq_entries = lmq_rows > get_i64(out, LMQ_ROWS)
    if is_not_admitted(table, queue) and not has_lmq_entries:
        put_i64(out, SKIPPED, get_i64(out, SKIPPED) + 1)
        return VALID
    keys = _emit_keys(arena, out)
    if keys < 0:
        return GROW_KEYS
    put_u16(get_i64(out, A_KEY_COUNT), row, keys - get_i64(out, KEYS))
    system_flag = get_i64(out, SYS_FLAG)
    _put_offsets(arena, position, system_flag, row, out)
    put_i64(get_i64(out, A_POSITION), row, position)
    put_i64(get_i64(out, A_PHYS), row, phys)
    put_i32(get_i64(out, A_SIZE), row, get_i64(out, SIZE))
    put_i32(get_i64(out, A_QUEUE), row, queue)
    put_i64(get_i64(out, A_STORE_TIMESTAMP), row, get_i64(out, STORE_TIMESTAMP))
    put_i64(get_i64(out, A_TAGS_CODE), row, _tags_code(arena, out, delay_levels, level_count))
    put_i32(get_i64(out, A_FLAGS), row, (system_flag & 0xFF) | (FLAG_LMQ if has_lmq_entries else 0))
    put_i64(out, ROWS, row + 1)
    put_i64(out, KEYS, keys)
    put_i64(out, LMQ_ROWS, lmq_rows)
    return VALID


@kernel
def _grow_code(shortage: Int) -> Int:
    return GROW_QUEUES if shortage == QUEUES_FULL else GROW_TOPIC_BYTES


@kernel
def _put_offsets(arena: Int, position: Int, system_flag: Int, row: Int, out: Int) -> Int:
    """Write the queue offset of a record, and how many offsets it spans, to its row. A record that is a batch of
    messages has them in properties; without these, they are the record's own offset and 1."""
    offset, count = load_be64(arena, position + 20), np.int64(1)
    if system_flag & FLAG_BATCH:
        base = _parse_int(arena, get_i64(out, INNER_BASE), get_i64(out, INNER_BASE + 1))
        number = _parse_int(arena, get_i64(out, INNER_NUM), get_i64(out, INNER_NUM + 1))
        if base >= 0:
            offset = base
        if 1 <= number <= 0x7FFF:
            count = number
    put_i64(get_i64(out, A_QUEUE_OFFSET), row, offset)
    put_i32(get_i64(out, A_INNER_NUM), row, count)
    return 0


@kernel
def _find_properties(arena: Int, out: Int) -> Int:
    """Find the properties of a record that the scan needs, and write place and length of their values to the words of
    ``out``; 0 for those that it does not have. As in the broker, pairs with an empty name or value are ignored, the
    first name separator splits a pair, and the last of equal names counts.
    """
    for field in range(TAGS, MULTI_OFFSET + 2):
        put_i64(out, field, 0)
    start: Int = get_i64(out, PROPERTIES)
    end = start + get_i64(out, PROPERTIES_LENGTH)
    split: Int = np.int64(-1)
    for at in range(start, end):  # 10 % of the scan less than pair_at, as most values are short
        byte = load_u8(arena, at)
        if byte > PAIR_SEPARATOR:
            continue
        if byte == PAIR_SEPARATOR:
            if start < split < at - 1:
                _note_property(arena, start, split, at, out)
            start, split = at + 1, np.int64(-1)
        elif byte == NAME_SEPARATOR and split < 0:
            split = at
    if start < split < end - 1:  # the last separator may be missing
        _note_property(arena, start, split, end, out)
    return 0


@kernel
def _note_property(arena: Int, name: Int, split: Int, end: Int, out: Int) -> Int:
    """If the property from ``name`` to ``end``, whose separator is at ``split``, is one that the scan needs, write the
    place and length of its value to the words of ``out``. Names are compared in words of eight bytes."""
    length = split - name
    field = -1
    if length == 4:
        head = load_le32(arena, name)
        if head == _TAGS_NAME:
            field = TAGS
        elif head == _KEYS_NAME:
            field = KEY_LIST
    elif length == 5:
        if load_le32(arena, name) == _DELAY_HEAD and load_le32(arena, name + 1) == _DELAY_TAIL:
            field = DELAY
    elif length >= 8:
        field = _long_name(length, load_le64(arena, name), load_le64(arena, split - 8), arena, name)
    if field >= 0:
        put_i64(out, field, split + 1)
        put_i64(out, field + 1, end - split - 1)
    return 0


@kernel
def _long_name(length: Int, head: Int, tail: Int, arena: Int, name: Int) -> Int:
    """Which property that the scan needs has this name of at least eight bytes, by its first eight (``head``) and last
    eight (``tail``); -1: none."""
    if length == 8 and head == _UNIQ_KEY_NAME:
        return UNIQ_KEY
    if length == 9 and head == _NUM_HEAD and tail == _NUM_TAIL:
        return INNER_NUM
    if length == 10 and head == _BASE_HEAD and tail == _BASE_TAIL:
        return INNER_BASE
    if head == _MULTI_HEAD and length >= 16:
        middle = load_le64(arena, name + 8)
        if length == 20 and middle == _DISPATCH_MIDDLE and tail == _DISPATCH_TAIL:
            return MULTI_DISPATCH
        if length == 24 and middle == _OFFSET_MIDDLE and tail == _OFFSET_TAIL:
            return MULTI_OFFSET
    return -1


@kernel
def _tags_code(arena: Int, out: Int, delay_levels: Int, level_count: Int) -> Int:
    """The tags code of a record, as in the broker's consume queue: Java's hash of its tags; of a scheduled message, if
    delay levels are known, its deliver time in ms."""
    delay_length = get_i64(out, DELAY + 1)
    if delay_length > 0 and level_count > 0 and _is_schedule_topic(arena, out):
        level = _parse_int(arena, get_i64(out, DELAY), delay_length)
        if level > 0:
            return get_i64(out, STORE_TIMESTAMP) + get_i64(delay_levels, min(level, level_count) - 1)
    length = get_i64(out, TAGS + 1)
    return java_hash(arena, get_i64(out, TAGS), length) if length > 0 else np.int64(0)


@kernel
def _is_schedule_topic(arena: Int, out: Int) -> Int:
    """Whether the topic is that of scheduled messages, whose tags code is their deliver time."""
    topic = get_i64(out, TOPIC)
    return (
        get_i64(out, TOPIC_LENGTH) == 19
        and load_le64(arena, topic) == _SCHEDULE_HEAD
        and load_le64(arena, topic + 8) == _SCHEDULE_MIDDLE
        and load_le64(arena, topic + 11) == _SCHEDULE_TAIL
    )


@kernel
def _parse_int(arena: Int, position: Int, length: Int) -> Int:
    """The number in ``length`` bytes at ``arena + position``, as Java's Long.parseLong reads it: at most 18 ASCII
    digits with an optional sign; _PARSE_FAILED for anything else."""
    step, sign = np.int64(0), np.int64(1)
    if length > 1:
        first = load_u8(arena, position)
        if first in (_PLUS, _MINUS):
            step = np.int64(1)
            if first == _MINUS:
                sign = np.int64(-1)
    total = decimal(arena, position + step, position + length)
    return _PARSE_FAILED if total < 0 else sign * total


@kernel
def _emit_keys(arena: Int, out: Int) -> Int:
    """Append the hashes of a record's keys, as ``topic#key``: its UNIQ_KEY, then every key in KEYS, which are separated
    by spaces. Returns how many hashes there are then in all, or -1 if they do not fit."""
    count, limit = get_i64(out, KEYS), get_i64(out, KEYS_MAX)
    uniq_length, list_length = get_i64(out, UNIQ_KEY + 1), get_i64(out, KEY_LIST + 1)
    if uniq_length + list_length == 0:
        return count
    text, prefix = get_i64(out, A_KEY_TEXT), get_i64(out, TOPIC_LENGTH)
    copy_bytes(arena, get_i64(out, TOPIC), text, 0, prefix)
    put_u8(text, prefix, _HASH_SIGN)
    prefix += 1
    if uniq_length > 0:
        if count >= limit:
            return -1
        _put_key_hash(arena, get_i64(out, UNIQ_KEY), uniq_length, prefix, count, out)
        count += 1
    at = get_i64(out, KEY_LIST)
    end = at + list_length
    while at < end:
        start = at
        while at < end and load_u8(arena, at) != _SPACE:
            at += 1
        if at > start:
            if count >= limit:
                return -1
            _put_key_hash(arena, start, at - start, prefix, count, out)
            count += 1
        at += 1
    return count


@kernel
def _put_key_hash(arena: Int, position: Int, length: Int, prefix: Int, index: Int, out: Int) -> Int:
    text = get_i64(out, A_KEY_TEXT)
    copy_bytes(arena, position, text, prefix, length)
    put_i64(get_i64(out, A_KEY_HASHES), index, xxh64(text, 0, prefix + length))
    return 0


@kernel
def _emit_lmq_entries(arena: Int, queue_id: Int, row: Int, table: Int, out: Int) -> Int:
    """Append the LMQ entries that a record lists in two properties, names and offsets, each with DOUBT bits: why the
    broker may not have made it. ``row``: the record's row. Returns how many LMQ rows there are then in all, or minus
    the code of a full array.

    As ConsumeQueue.multiDispatchLmqQueue: both lists must have the same length (trailing empty items do not
    count), and an offset that is no number ends the list, unless its name has a path separator.
    """
    count = get_i64(out, LMQ_ROWS)
    doubt = DOUBT_TOPIC if _is_of_doubtful_topic(arena, out) else 0
    name, number = get_i64(out, MULTI_DISPATCH), get_i64(out, MULTI_OFFSET)
    names_end = _trim_list(arena, name, get_i64(out, MULTI_DISPATCH + 1))
    numbers_end = _trim_list(arena, number, get_i64(out, MULTI_OFFSET + 1))
    if _count_items(arena, name, names_end) != _count_items(arena, number, numbers_end):
        return count
    while name < names_end:
        name_end, number_end = _item_end(arena, name, names_end), _item_end(arena, number, numbers_end)
        offset = _parse_int(arena, number, number_end - number)
        has_slash = _contains(arena, name, name_end, _SLASH)
        if offset < 0 and not has_slash:
            break
        if offset >= 0:
            is_plain = not _is_lmq_name(arena, name, name_end - name)
            queue = _lmq_ordinal(arena, name, name_end - name, queue_id if is_plain else 0, table)
            if queue >= 0:
                if count >= get_i64(out, LMQ_ROWS_MAX):
                    return -GROW_LMQ_ROWS
                put_i32(get_i64(out, A_LMQ_QUEUE), count, queue)
                put_i64(get_i64(out, A_LMQ_QUEUE_OFFSET), count, offset)
                put_i32(get_i64(out, A_LMQ_ROW), count, row)
                put_u8(
                    get_i64(out, A_LMQ_DOUBT),
                    count,
                    doubt | (DOUBT_SLASH if has_slash else 0) | (DOUBT_PLAIN if is_plain else 0),
                )
                count += 1
            elif queue != TOPIC_INVALID:
                return -_grow_code(queue)
        name, number = name_end + 1, number_end + 1
    return count


@kernel
def _is_lmq_name(arena: Int, name: Int, length: Int) -> Int:
    """MixAll.isLmq."""
    return length >= 5 and load_le32(arena, name) == _LMQ_HEAD and load_le32(arena, name + 1) == _LMQ_TAIL


@kernel
def _lmq_ordinal(arena: Int, name: Int, length: Int, queue_id: Int, table: Int) -> Int:
    """The number in ``table`` of the LMQ with this name, which is inserted if it is new. TOPIC_INVALID for one that is
    not archived or has an empty name; another negative code if an array is full."""
    if length == 0 or (length == 5 and _is_lmq_name(arena, name, length)):
        return TOPIC_INVALID
    queue = find_or_insert(arena, name, length, queue_id, table)
    if queue >= 0 and is_not_admitted(table, queue):
        return TOPIC_INVALID
    return queue


@kernel
def _is_of_doubtful_topic(arena: Int, out: Int) -> Int:
    """Whether some brokers ignore multi-dispatch properties of this topic: %RETRY%…, rmq_sys_…, scheduled."""
    topic, length = get_i64(out, TOPIC), get_i64(out, TOPIC_LENGTH)
    if length >= 7 and load_le32(arena, topic) == _RETRY_HEAD and load_le32(arena, topic + 3) == _RETRY_TAIL:
        return True
    if length >= 8 and load_le64(arena, topic) == _RMQ_SYS:
        return True
    return _is_schedule_topic(arena, out)


@kernel
def _trim_list(arena: Int, position: Int, length: Int) -> Int:
    """End of a comma list without its trailing commas."""
    end = position + length
    while end > position and load_u8(arena, end - 1) == _COMMA:
        end -= 1
    return end


@kernel
def _item_end(arena: Int, position: Int, end: Int) -> Int:
    while position < end and load_u8(arena, position) != _COMMA:
        position += 1
    return position


@kernel
def _count_items(arena: Int, position: Int, end: Int) -> Int:
    count = 0 if position >= end else 1
    for at in range(position, end):
        if load_u8(arena, at) == _COMMA:
            count += 1
    return count


@kernel
def _contains(arena: Int, position: Int, end: Int, value: Int) -> bool:
    for at in range(position, end):  # noqa: SIM110 - kernels have no generators
        if load_u8(arena, at) == value:
            return True
    return False
