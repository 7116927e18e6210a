"""The scan kernel: one test per rule, then equality with the oracle on generated and corrupted logs.

Logs end at an unreadable page: a read out of bounds kills the test run.

The scan over the commitlogs of real brokers equals what those brokers served, and their consume queues.
"""

import os
import random
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels import oracle
from tests.kernels.guarded_memory import GuardedMemory
from tests.kernels.record_builder import Message, blank, build_log, encode, properties
from tests.sweeps import examples, sweep
from tests.truth import archived_messages, truth_directories
from tiered.kernels.queue_table import ADMITTED, NOT_ADMITTED, QueueTable
from tiered.kernels.scan import (
    DOUBT_PLAIN,
    DOUBT_SLASH,
    DOUBT_TOPIC,
    FLAG_BATCH,
    FLAG_LMQ,
    InvalidReason,
    RecordColumns,
    ScanStop,
    StopReason,
    scan_log,
)

MEMORY = GuardedMemory(1 << 20)
FAR = 1 << 40
DELAY_LEVELS_MS = [1000, 5000, 10_000]


def scan(
    data: bytes,
    *,
    phys: int = 0,
    file_end: int = FAR,
    table: QueueTable | None = None,
    columns: RecordColumns | None = None,
    delay_levels_ms: Sequence[int] | None = None,
) -> tuple[ScanStop, RecordColumns, QueueTable]:
    table, columns = table or QueueTable(), columns or RecordColumns(1, 1, 1)
    levels = None if delay_levels_ms is None else np.array(delay_levels_ms, np.int64)
    arena = MEMORY.place(data)
    stop = scan_log(arena, 0, len(arena), phys, file_end, table, columns, delay_levels_ms=levels)
    return stop, columns, table


def rows_of(columns: RecordColumns, table: QueueTable) -> list[oracle.Row]:
    """The columns as the oracle's rows, with key hashes in place of key texts."""
    rows, key = [], 0
    lmq: dict[int, list[oracle.LmqEntry]] = {}
    for index in range(columns.lmq_rows):
        ordinal = int(columns.lmq_queue[index])
        queue = table.topic(ordinal), int(table.queue_id[ordinal])
        found = oracle.LmqEntry(queue, int(columns.lmq_queue_offset[index]), int(columns.lmq_doubt[index]))
        lmq.setdefault(int(columns.lmq_row[index]), []).append(found)
    for row in range(columns.rows):
        count = int(columns.key_count[row])
        ordinal = int(columns.queue[row])
        rows.append(
            oracle.Row(
                position=int(columns.position[row]),
                phys=int(columns.phys[row]),
                size=int(columns.size[row]),
                queue=(table.topic(ordinal), int(table.queue_id[ordinal])),
                queue_offset=int(columns.queue_offset[row]),
                store_timestamp=int(columns.store_timestamp[row]),
                tags_code=int(columns.tags_code[row]),
                inner_num=int(columns.inner_num[row]),
                flags=int(columns.flags[row]),
                key_texts=tuple(
                    struct.pack("<Q", int(code)) for code in columns.key_hashes[key : key + count]
                ),
                lmq_entries=tuple(lmq.get(row, ())),
            )
        )
        key += count
    assert key == columns.keys
    return rows


def with_hashes(rows: Sequence[oracle.Row]) -> list[oracle.Row]:
    return [
        replace(
            row, key_texts=tuple(struct.pack("<Q", xxhash.xxh64_intdigest(text)) for text in row.key_texts)
        )
        for row in rows
    ]


def one_row(message: Message, **options: object) -> oracle.Row:
    stop, columns, table = scan(encode(message, 0), **options)  # type: ignore[arg-type]
    assert stop.reason == StopReason.INPUT_END
    (row,) = rows_of(columns, table)
    return row


def test_a_plain_message_gives_one_row() -> None:
    text = properties((b"TAGS", b"TagA"), (b"KEYS", b"k1  k2 "), (b"UNIQ_KEY", b"U" * 32))
    message = Message(b"orders", 3, 17, b"hello", text)
    stop, columns, table = scan(encode(message, 1000), phys=1000)
    size = len(encode(message, 1000))
    assert stop == ScanStop(StopReason.INPUT_END, size)
    (row,) = rows_of(columns, table)
    texts = (b"orders#" + b"U" * 32, b"orders#k1", b"orders#k2")
    expected = oracle.Row(0, 1000, size, ("orders", 3), 17, message.store_timestamp, 2598919, 1, 0, texts)
    assert [row] == with_hashes([expected])


def test_row_positions_count_from_the_arena_and_rows_append() -> None:
    log = build_log([Message(queue_offset=index) for index in range(3)], 500)
    arena = np.zeros(100 + len(log), np.uint8)
    arena[100:] = np.frombuffer(log, np.uint8)
    table, columns = QueueTable(), RecordColumns()
    first = len(log) // 3
    stop = scan_log(arena, 100, 100 + first, 500, FAR, table, columns, delay_levels_ms=None)
    assert stop == ScanStop(StopReason.INPUT_END, 100 + first)
    scan_log(arena, 100 + first, len(arena), 500 + first, FAR, table, columns, delay_levels_ms=None)
    assert columns.position[:3].tolist() == [100, 100 + first, 100 + 2 * first]
    assert columns.phys[:3].tolist() == [500, 500 + first, 500 + 2 * first]
    columns.reset()
    assert (columns.rows, columns.keys, columns.lmq_rows, columns.skipped) == (0, 0, 0, 0)


def test_a_range_outside_the_arena_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be scanned"):
        scan_log(np.zeros(8, np.uint8), 0, 9, 0, FAR, QueueTable(), RecordColumns(), delay_levels_ms=None)


def test_every_cut_of_a_record_ends_the_input() -> None:
    record = encode(Message(body=b"x" * 100, properties=properties((b"TAGS", b"a"))), 0)
    for length in range(len(record)):
        stop, columns, _ = scan(record[:length])
        assert (stop, columns.rows) == (ScanStop(StopReason.INPUT_END, 0), 0)


def test_the_blank_marker_ends_the_file_only_if_it_spans_the_rest() -> None:
    log = build_log([Message()])
    stop, _, _ = scan(log + blank(50), file_end=len(log) + 50)
    assert stop == ScanStop(StopReason.FILE_END, len(log))
    stop, _, _ = scan(log + blank(8), file_end=len(log) + 50)
    assert stop == ScanStop(StopReason.INVALID, len(log), InvalidReason.SIZE)


def test_zeros_are_no_record() -> None:
    log = build_log([Message()])
    stop, columns, _ = scan(log + bytes(64))
    assert (stop, columns.rows) == (ScanStop(StopReason.NO_RECORD, len(log)), 1)


def test_a_record_leaves_room_for_the_end_marker() -> None:
    record = encode(Message(), 0)
    assert scan(record, file_end=len(record) + 8)[0].reason == StopReason.INPUT_END
    assert scan(record, file_end=len(record) + 7)[0].detail == InvalidReason.SIZE


def patched(record: bytes, at: int, layout: str, value: int) -> bytes:
    data = bytearray(record)
    struct.pack_into(layout, data, at, value)
    return bytes(data)


@pytest.mark.parametrize(
    ("at", "layout", "value", "detail"),
    [
        (0, ">i", 90, InvalidReason.SIZE),
        (0, ">i", -5, InvalidReason.SIZE),
        (0, ">i", 100, InvalidReason.LENGTH),
        (4, ">I", 0xDAA320A6, InvalidReason.MAGIC),
        (4, ">I", 0, InvalidReason.MAGIC),
        (8, ">i", 1, InvalidReason.BODY_CRC),
        (20, ">q", -1, InvalidReason.QUEUE_OFFSET),
        (20, ">q", -(1 << 63), InvalidReason.QUEUE_OFFSET),
        (20, ">q", (1 << 63) // 20 + 1, InvalidReason.QUEUE_OFFSET),
        (28, ">q", 1, InvalidReason.PHYSICAL_OFFSET),
        (36, ">i", 0x10, InvalidReason.LENGTH),
        (84, ">i", -1, InvalidReason.LENGTH),
        (84, ">i", 1 << 30, InvalidReason.LENGTH),
        (92, ">b", 0, InvalidReason.TOPIC),
        (92, ">b", -1, InvalidReason.TOPIC),
        (92, ">b", 120, InvalidReason.LENGTH),
        (98, ">h", -1, InvalidReason.PROPERTIES),
        (98, ">h", 1, InvalidReason.LENGTH),
    ],
)
def test_each_damaged_field_is_named(at: int, layout: str, value: int, detail: InvalidReason) -> None:
    record = encode(Message(properties=properties((b"TAGS", b"abcdef"))), 0)
    assert record[92:98] == b"\x05topic"
    stop, columns, _ = scan(patched(record, at, layout, value) + bytes(200))
    assert (stop, columns.rows) == (ScanStop(StopReason.INVALID, 0, detail), 0)


def test_the_largest_queue_offset_is_valid() -> None:
    assert one_row(Message(queue_offset=(1 << 63) // 20)).queue_offset == (1 << 63) // 20


def test_recycled_bytes_are_refused_before_all_of_them_are_there() -> None:
    stale = encode(Message(body=b"x" * 500), 12345)
    assert scan(stale[:40], phys=0)[0].detail == InvalidReason.PHYSICAL_OFFSET


def test_a_torn_tail_with_a_good_body_fails_the_record_crc() -> None:
    record = encode(Message(properties=properties((b"KEYS", b"abcdef")), with_record_crc=True), 0)
    assert scan(record)[0].reason == StopReason.INPUT_END
    for at in (12, 20, 40, 60, 100, 105):
        torn = bytearray(record)
        torn[at] ^= 1
        assert scan(bytes(torn))[0].detail == InvalidReason.RECORD_CRC


def test_crc_like_text_elsewhere_is_no_crc() -> None:
    inside = properties((b"__CRC32#", b"0123456789"), (b"TAGS", b"x"))
    longer_name = properties((b"x__CRC32#", b"0123456789"))
    for text in (inside, longer_name):
        assert scan(encode(Message(properties=text), 0))[1].rows == 1


def test_a_damaged_separator_before_the_record_crc_does_not_hide_it() -> None:
    text = properties((b"KEYS", b"abcdef"))
    for body in (b"", b"body", b"x" * 100):
        record = encode(Message(body=body, properties=text, with_record_crc=True), 0)
        assert scan(record)[1].rows == 1
        for bit in range(8):
            torn = bytearray(record)
            torn[-21] ^= 1 << bit
            assert scan(bytes(torn))[0].detail == InvalidReason.RECORD_CRC
            assert_equal_to_oracle(bytes(torn), 0, FAR)
            torn[-10] = ord("x")  # no digit: nothing says that it was a checksum
            assert_equal_to_oracle(bytes(torn), 0, FAR)


def test_an_empty_body_has_no_crc() -> None:
    assert scan(patched(encode(Message(body=b""), 0), 8, ">i", 77))[1].rows == 1


def test_a_topic_that_is_not_utf8_is_invalid() -> None:
    stop, columns, table = scan(encode(Message(topic=b"\xff\xfe"), 0))
    assert stop == ScanStop(StopReason.INVALID, 0, InvalidReason.TOPIC)
    assert (columns.rows, len(table)) == (0, 0)


def test_long_topics_and_ipv6_hosts() -> None:
    row = one_row(Message(topic=b"%RETRY%" + b"g" * 200, sys_flag=0x30, queue_offset=9))
    assert (row.queue, row.queue_offset) == (("%RETRY%" + "g" * 200, 0), 9)


@pytest.mark.parametrize(("flag", "visible"), [(0, True), (0x4, False), (0x8, True), (0xC, False)])
def test_only_visible_transactions_give_rows(flag: int, visible: bool) -> None:
    _, columns, _ = scan(encode(Message(sys_flag=flag), 0))
    assert (columns.rows, columns.skipped) == (int(visible), int(not visible))


def test_an_inner_batch_spans_its_count_from_its_base() -> None:
    text = properties((b"INNER_BASE", b"40"), (b"INNER_NUM", b"6"))
    row = one_row(Message(sys_flag=FLAG_BATCH | 0x40, queue_offset=40, properties=text))
    assert (row.queue_offset, row.inner_num, row.flags) == (40, 6, 0xC0)
    row = one_row(Message(sys_flag=0, queue_offset=40, properties=text.replace(b"40", b"41")))
    assert (row.queue_offset, row.inner_num) == (40, 1)


def test_the_last_of_equal_properties_wins_and_the_last_separator_may_be_missing() -> None:
    row = one_row(Message(properties=b"TAGS\x01first\x02x\x01\x02\x01y\x02TAGS\x01TagA"))
    assert row.tags_code == 2598919
    row = one_row(Message(properties=b"TAGS\x01TagA\x02TAGS\x01"))
    assert row.tags_code == 2598919


def test_a_value_may_hold_the_name_separator() -> None:
    row = one_row(Message(properties=b"KEYS\x01a\x01b\x02"))
    assert row.key_texts == (struct.pack("<Q", xxhash.xxh64_intdigest(b"topic#a\x01b")),)


def test_scheduled_messages_carry_their_deliver_time() -> None:
    text = properties((b"DELAY", b"2"), (b"TAGS", b"TagA"))
    message = Message(topic=b"SCHEDULE_TOPIC_XXXX", queue_id=1, properties=text, store_timestamp=1000)
    assert one_row(message).tags_code == 2598919
    assert one_row(message, delay_levels_ms=DELAY_LEVELS_MS).tags_code == 6000
    beyond = message.with_(properties=text.replace(b"\x012", b"\x0199"))
    assert one_row(beyond, delay_levels_ms=DELAY_LEVELS_MS).tags_code == 11_000
    unreadable = message.with_(properties=text.replace(b"\x012", b"\x01z"))
    assert one_row(unreadable, delay_levels_ms=DELAY_LEVELS_MS).tags_code == 2598919
    assert one_row(message.with_(topic=b"other"), delay_levels_ms=DELAY_LEVELS_MS).tags_code == 2598919


LMQ = properties(
    (b"INNER_MULTI_DISPATCH", b"%LMQ%a,plain,%LMQ%b/c,%LMQ%b"), (b"INNER_MULTI_QUEUE_OFFSET", b"4,9,5,6")
)


def test_lmq_references_follow_the_record() -> None:
    row = one_row(Message(queue_id=3, properties=LMQ))
    assert sure(row) == [("%LMQ%a", 4), ("%LMQ%b", 6)]
    assert row.flags == FLAG_LMQ


def sure(row: oracle.Row) -> list[tuple[str, int]]:
    """(LMQ, offset) of entries that every broker with LMQs makes."""
    assert all(found.queue[1] == 0 for found in row.lmq_entries if not found.doubt)
    return [(found.queue[0], found.queue_offset) for found in row.lmq_entries if not found.doubt]


def test_what_only_some_brokers_dispatch_is_named_with_its_doubt() -> None:
    """Which of them wrote a record it does not say: 4.9 dispatches plain names too, RocksDB those with a slash."""
    found = one_row(Message(queue_id=3, properties=LMQ)).lmq_entries
    assert found == (
        (("%LMQ%a", 0), 4, 0),
        (("plain", 3), 9, DOUBT_PLAIN),
        (("%LMQ%b/c", 0), 5, DOUBT_SLASH),
        (("%LMQ%b", 0), 6, 0),
    )


@pytest.mark.parametrize("topic", [b"%RETRY%group", b"rmq_sys_wheel_timer", b"SCHEDULE_TOPIC_XXXX"])
def test_what_some_topics_dispatch_is_doubtful(topic: bytes) -> None:
    """Up to 5.1.0 all did, from 5.2 on none of these."""
    row = one_row(Message(topic=topic, properties=LMQ))
    assert [found.doubt & DOUBT_TOPIC for found in row.lmq_entries] == [DOUBT_TOPIC] * 4
    assert row.flags == FLAG_LMQ, "in several queues, perhaps"


@pytest.mark.parametrize(
    ("names", "offsets", "expected"),
    [
        (b"%LMQ%a,%LMQ%b", b"1", []),
        (b"%LMQ%a,x", b"1,", []),
        (b"%LMQ%a,,", b"1,", [("%LMQ%a", 1)]),
        (b"x,%LMQ%a", b",1", []),
        (b"%LMQ%a,%LMQ%b,%LMQ%c", b"1,z,3", [("%LMQ%a", 1)]),
        (b"%LMQ%a", b"-1", []),
        (b"%LMQ%a", b"+7", [("%LMQ%a", 7)]),
        (b",,", b",,", []),
        (b"%LMQ%", b"1", []),
        (b"%LMQ%a/b,%LMQ%c", b"z,3", [("%LMQ%c", 3)]),
    ],
)
def test_malformed_lmq_lists_end_where_they_do_in_the_broker(
    names: bytes, offsets: bytes, expected: list[tuple[str, int]]
) -> None:
    text = properties((b"INNER_MULTI_DISPATCH", names), (b"INNER_MULTI_QUEUE_OFFSET", offsets))
    assert sure(one_row(Message(properties=text))) == expected


def test_topics_not_admitted_give_no_row_unless_an_lmq_needs_it() -> None:
    table = QueueTable()
    table.ordinal("topic", 0)
    table.admitted[0] = NOT_ADMITTED
    _, columns, _ = scan(encode(Message(), 0), table=table)
    assert (columns.rows, columns.skipped) == (0, 1)
    _, columns, _ = scan(encode(Message(properties=LMQ), 0), table=table)
    assert (columns.rows, columns.lmq_rows) == (1, 4)
    for name, admitted in (
        ("%LMQ%a", NOT_ADMITTED),
        ("%LMQ%b", ADMITTED),
        ("%LMQ%b/c", NOT_ADMITTED),
        ("plain", NOT_ADMITTED),
    ):
        table.admitted[table.ordinal(name, 0)] = admitted
    _, columns, _ = scan(encode(Message(properties=LMQ), 0), table=table)
    assert (columns.rows, columns.lmq_rows) == (1, 1)
    table.admitted[table.ordinal("%LMQ%b", 0)] = NOT_ADMITTED
    _, columns, _ = scan(encode(Message(properties=LMQ), 0), table=table)
    assert (columns.rows, columns.lmq_rows, columns.skipped) == (0, 0, 1)


def test_the_largest_topic_and_key_fit() -> None:
    topic, key = b"t" * 32_767, b"k" * (32_767 - len(b"KEYS\x01\x02"))
    row = one_row(Message(topic=topic, properties=properties((b"KEYS", key))))
    assert row.key_texts == (struct.pack("<Q", xxhash.xxh64_intdigest(topic + b"#" + key)),)


def test_a_record_with_thousands_of_keys_grows_the_columns() -> None:
    keys = b" ".join(b"%d" % index for index in range(6000))
    assert len(one_row(Message(properties=properties((b"KEYS", keys)))).key_texts) == 6000


def test_importing_the_scan_does_not_import_numba() -> None:
    code = "import sys, tiered.kernels.scan, tiered.kernels.split; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_guard_page_catches_a_read_behind_the_end() -> None:
    """Else the tests below would show nothing."""
    code = """
from tests.kernels.guarded_memory import GuardedMemory
from tiered.kernels.checksums import crc32
array = GuardedMemory(4096).place(b"x" * 100)
crc32(array.ctypes.data, 0, 100)
print("inside", flush=True)
crc32(array.ctypes.data, 0, 101)
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=False, capture_output=True, text=True
    )
    assert (done.stdout, done.returncode) == ("inside\n", -signal.SIGSEGV)


TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=12).map(str.encode)
SOME_TEXT = st.one_of(
    TEXT,
    st.sampled_from(
        [
            b"TagA",
            b"1",
            b"3",
            b"-2",
            b"17",
            b"a b  c",
            b"%LMQ%x,%LMQ%y",
            b"4,5",
            b",",
            b"%LMQ%x/y,x",
            b"%LMQ%",
            b"a/b,%LMQ%",
        ]
    ),
)
NAMES = st.one_of(
    TEXT,
    st.sampled_from(
        [
            b"TAGS",
            b"KEYS",
            b"UNIQ_KEY",
            b"DELAY",
            b"INNER_NUM",
            b"INNER_BASE",
            b"INNER_MULTI_DISPATCH",
            b"INNER_MULTI_QUEUE_OFFSET",
            b"INNER_MULTI_DISPATCX",
            b"WAIT",
            b"UNIQ_KEZ",
        ]
    ),
)
PROPERTIES = st.one_of(
    st.lists(st.tuples(NAMES, SOME_TEXT), max_size=8).map(lambda pairs: properties(*pairs)),
    st.lists(st.sampled_from([b"\x01", b"\x02", b"TAGS", b"KEYS", b"a", b" ", b"UNIQ_KEY"]), max_size=30).map(
        b"".join
    ),
)
MESSAGES = st.builds(
    Message,
    topic=st.sampled_from(
        [b"a", b"topic", b"SCHEDULE_TOPIC_XXXX", b"%RETRY%g", b"rmq_sys_x", b"t" * 130, b"\xff", b"\xc3\xa9"]
    ),
    queue_id=st.integers(0, 3),
    queue_offset=st.integers(0, 50),
    body=st.binary(max_size=200),
    properties=PROPERTIES,
    sys_flag=st.sampled_from([0, 0, 0, 0x4, 0x8, 0xC, 0x10, 0x20, 0x30, 0x80, 0xC0, 0x301]),
    store_timestamp=st.integers(0, 1 << 45),
    with_record_crc=st.booleans(),
)
LOGS = st.lists(MESSAGES, max_size=12)


def assert_equal_to_oracle(data: bytes, phys: int, file_end: int) -> None:
    expected = oracle.scan_log(data, phys, file_end, delay_levels_ms=DELAY_LEVELS_MS)
    stop, columns, table = scan(data, phys=phys, file_end=file_end, delay_levels_ms=DELAY_LEVELS_MS)
    assert stop == expected.stop
    assert columns.skipped == expected.skipped
    assert rows_of(columns, table) == with_hashes(expected.rows)


@given(LOGS, st.integers(0, 1 << 40), st.sampled_from(["nothing", "zeros", "blank"]))
def test_valid_logs_scan_as_the_oracle(messages: list[Message], phys: int, end: str) -> None:
    log = build_log(messages, phys)
    tail = {"nothing": b"", "zeros": bytes(40), "blank": blank(64)}[end]
    assert_equal_to_oracle(log + tail, phys, phys + len(log) + 64)


@given(LOGS, st.randoms(use_true_random=False), st.integers(1, 4))
def test_corrupted_logs_stop_where_the_oracle_stops(
    messages: list[Message], rng: random.Random, flips: int
) -> None:
    log = bytearray(build_log(messages))
    for _ in range(flips if log else 0):
        log[rng.randrange(len(log))] = rng.choice([0, 1, 2, 0x7F, 0x80, 0xFF, rng.randrange(256)])
    assert_equal_to_oracle(bytes(log), 0, len(log) + rng.choice([8, 4096]))


@given(LOGS, st.randoms(use_true_random=False))
def test_lengths_gone_wrong_never_read_outside(messages: list[Message], rng: random.Random) -> None:
    """Only the fields that steer the parser are damaged, and to values at its limits."""
    log = bytearray(build_log(messages))
    at = 0
    for message in messages:
        size = len(encode(message, at))
        if rng.random() < 0.5:
            field = rng.choice([0, 36, 84, 96, 97, rng.randrange(size)])
            if field + 4 <= size:
                value = rng.choice(
                    [0, 1, -1, size, size - 1, size + 1, 0x7FFFFFFF, -0x80000000, 91, 0x30, 0xFF00]
                )
                struct.pack_into(">i", log, at + field, value)
        at += size
    assert_equal_to_oracle(bytes(log), 0, len(log) + 8)


@given(st.binary(max_size=400))
def test_random_bytes_never_crash_the_scan(data: bytes) -> None:
    assert_equal_to_oracle(data, 0, 1 << 20)


@settings(max_examples=examples(30))
@given(LOGS.filter(bool), st.integers(1, 200))
def test_reading_in_pieces_gives_the_same_rows(messages: list[Message], piece: int) -> None:
    """Every input may end anywhere: what was not whole is offered again."""
    valid = [message for message in messages if message.topic != b"\xff"]
    log = build_log(valid)
    _, whole, whole_table = scan(log)
    table, columns, begin, end = QueueTable(), RecordColumns(), 0, 0
    arena = MEMORY.place(log)
    while end < len(log):
        end = min(len(log), end + piece)
        stop = scan_log(arena, begin, end, begin, FAR, table, columns, delay_levels_ms=None)
        assert stop.reason == StopReason.INPUT_END
        begin = stop.position
    assert begin == len(log)
    assert rows_of(columns, table) == rows_of(whole, whole_table)


STORES = ("A", "B", "C", "D", "E", "F", "G", "H", "H2", "K")
FILE_STORES = ("A", "B", "E", "F", "G", "H", "H2", "K")
DELAYS_MS = np.array(
    [seconds * 1000 for seconds in (1, 5, 10, 30)]
    + [minutes * 60_000 for minutes in (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 30, 60, 120)],
    np.int64,
)
Unit = tuple[int, int, int]
"""(physical offset, size, tagsCode) of a consume-queue unit."""


@dataclass
class ScannedStore:
    """What the scan finds, by (topic, queue id, queue offset): a recreated topic has an offset twice."""

    units: dict[tuple[str, int, int], list[Unit]] = field(default_factory=dict)
    timestamps: dict[int, int] = field(default_factory=dict)
    crcs: dict[int, int] = field(default_factory=dict)
    batches: dict[tuple[str, int, int], tuple[int, int, int]] = field(default_factory=dict)
    stops: list[ScanStop] = field(default_factory=list)
    min_phys: int = 0


def scan_store(store: Path) -> ScannedStore:
    scanned, table, columns = ScannedStore(), QueueTable(), RecordColumns(1, 1, 1)
    files = sorted((store / "store" / "commitlog").iterdir())
    scanned.min_phys = int(files[0].name)
    for file in files:
        data, begin = file.read_bytes(), int(file.name)
        columns.reset()
        arena = np.frombuffer(data, np.uint8)
        stop = scan_log(
            arena, 0, len(data), begin, begin + len(data), table, columns, delay_levels_ms=DELAYS_MS
        )
        scanned.stops.append(stop)
        add_rows(scanned, table, columns, data)
    return scanned


def add_rows(scanned: ScannedStore, table: QueueTable, columns: RecordColumns, data: bytes) -> None:
    def column(values: np.ndarray, count: int) -> list[int]:
        return [int(value) for value in values[:count].tolist()]

    rows = columns.rows
    phys, size, tags = column(columns.phys, rows), column(columns.size, rows), column(columns.tags_code, rows)
    position, offset = column(columns.position, rows), column(columns.queue_offset, rows)
    names = [(table.topic(ordinal), int(table.queue_id[ordinal])) for ordinal in range(len(table))]
    for row, ordinal in enumerate(column(columns.queue, rows)):
        unit = (phys[row], size[row], tags[row])
        scanned.units.setdefault((*names[ordinal], offset[row]), []).append(unit)
        scanned.timestamps[phys[row]] = int(columns.store_timestamp[row])
        scanned.crcs[phys[row]] = zlib.crc32(data[position[row] : position[row] + size[row]])
        if columns.flags[row] & FLAG_BATCH:
            scanned.batches[(*names[ordinal], offset[row])] = (
                phys[row],
                size[row],
                int(columns.inner_num[row]),
            )
    count = columns.lmq_rows
    parents, offsets = column(columns.lmq_row, count), column(columns.lmq_queue_offset, count)
    for index, ordinal in enumerate(column(columns.lmq_queue, count)):
        row = parents[index]
        scanned.units.setdefault((*names[ordinal], offsets[index]), []).append(
            (phys[row], size[row], tags[row])
        )


@pytest.fixture(scope="session")
def scanned_store(real_store: Callable[[str], Path]) -> Callable[[str], ScannedStore]:
    cache: dict[str, ScannedStore] = {}

    def get(name: str) -> ScannedStore:
        if name not in cache:
            cache.clear()  # one store at a time in memory
            cache[name] = scan_store(real_store(name))
        return cache[name]

    return get


@pytest.mark.parametrize("name", sweep(STORES, fast=["D", "E", "F", "H", "K"], rest="integration"))
def test_scan_gives_every_message_the_broker_served(
    name: str, real_store: Callable[[str], Path], scanned_store: Callable[[str], ScannedStore]
) -> None:
    scanned, compared = scanned_store(name), 0
    for truth in truth_directories(real_store(name)):
        for line in archived_messages(truth):
            phys = line["commitLogOffset"]
            if phys < scanned.min_phys:  # served before the broker removed the file
                continue
            found = scanned.units.get((line["topic"], line["queueId"], line["queueOffset"]), [])
            assert (phys, line["storeSize"]) in [unit[:2] for unit in found], line
            assert scanned.timestamps[phys] == line["storeTimestamp"], line
            assert "recCrc32" not in line or scanned.crcs[phys] == line["recCrc32"], line
            compared += 1
    assert compared >= 240


@pytest.mark.parametrize("name", STORES)
def test_scan_stops_only_at_the_ends_of_real_logs(
    name: str, scanned_store: Callable[[str], ScannedStore]
) -> None:
    stops = [stop.reason for stop in scanned_store(name).stops]
    complete = stops.index(StopReason.NO_RECORD)
    assert set(stops[:complete]) <= {StopReason.FILE_END}
    assert set(stops[complete:]) == {StopReason.NO_RECORD}
    assert all(stop.position == 0 for stop in scanned_store(name).stops[complete + 1 :])


def consume_queue_units(store: Path, unit_bytes: int, kind: str) -> Iterator[tuple[str, int, int, bytes]]:
    """(topic, queue id, index of the unit, its bytes)."""
    for queue in sorted((store / "store" / kind).glob("*/*")):
        for file in sorted(queue.iterdir()):
            data, first = file.read_bytes(), int(file.name) // unit_bytes
            for at in range(0, len(data) - unit_bytes + 1, unit_bytes):
                unit = data[at : at + unit_bytes]
                if struct.unpack_from(">i", unit, 8)[0] <= 0:
                    break
                yield queue.parent.name, int(queue.name), first + at // unit_bytes, unit


@pytest.mark.parametrize("name", FILE_STORES)
def test_scan_equals_the_consume_queues_on_disk(
    name: str, real_store: Callable[[str], Path], scanned_store: Callable[[str], ScannedStore]
) -> None:
    store, scanned, compared = real_store(name), scanned_store(name), 0
    for topic, queue_id, offset, unit in consume_queue_units(store, 20, "consumequeue"):
        phys, size, tags_code = struct.unpack(">qiq", unit)
        if phys < scanned.min_phys:
            continue
        if tags_code < -0x80000001:
            tags_code = extended_tags_code(store, topic, queue_id, tags_code)
        assert (phys, size, tags_code) in scanned.units.get((topic, queue_id, offset), []), (
            topic,
            queue_id,
            offset,
        )
        compared += 1
    assert compared > 2000


def extended_tags_code(store: Path, topic: str, queue_id: int, address: int) -> int:
    (file,) = (store / "store" / "consumequeue_ext" / topic / str(queue_id)).iterdir()
    with file.open("rb") as extension:
        extension.seek(address + (1 << 63))
        _, tags_code = struct.unpack(">hq", extension.read(10))
    return int(tags_code)


@pytest.mark.parametrize("name", ["A", "B", "K"])
def test_scan_equals_the_batch_consume_queues_on_disk(
    name: str, real_store: Callable[[str], Path], scanned_store: Callable[[str], ScannedStore]
) -> None:
    scanned, batches = scanned_store(name), 0
    for topic, queue_id, _, unit in consume_queue_units(real_store(name), 46, "batchconsumequeue"):
        phys, size, _, stored, base, number = struct.unpack_from(">qiqqqh", unit)
        assert scanned.timestamps[phys] == stored
        if (topic, queue_id, base) in scanned.batches:
            assert scanned.batches[topic, queue_id, base] == (phys, size, number)
            batches += 1
        else:  # a single message in a batch queue
            assert number == 1
            assert (phys, size) in [found[:2] for found in scanned.units[topic, queue_id, base]]
    assert batches > 0


def test_one_flipped_bit_in_a_real_log_is_found(real_store: Callable[[str], Path]) -> None:
    """Bit rot anywhere in what ``__CRC32#`` covers stops the scan at that record."""
    file = sorted((real_store("K") / "store" / "commitlog").iterdir())[0]
    data, table, columns = np.frombuffer(file.read_bytes(), np.uint8), QueueTable(), RecordColumns()
    scan_log(data, 0, len(data), 0, len(data), table, columns, delay_levels_ms=None)
    rng = np.random.default_rng(7)
    for row in rng.integers(0, columns.rows, 50).tolist():
        begin, size = int(columns.position[row]), int(columns.size[row])
        damaged = data.copy()
        damaged[begin + int(rng.integers(4, size - 20))] ^= 1 << int(rng.integers(8))
        stop = scan_log(
            damaged,
            begin,
            begin + size,
            begin,
            len(data),
            QueueTable(),
            RecordColumns(),
            delay_levels_ms=None,
        )
        assert (stop.reason, stop.position) == (StopReason.INVALID, begin)
