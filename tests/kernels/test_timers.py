"""The kernel finds what tiered.model.timer finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.record_builder import Message, encode
from tiered.archive.timers import hash_of
from tiered.formats.record import decode_record
from tiered.kernels.timers import find_timers, same_texts, time_order
from tiered.model.timer import (
    CANCEL,
    CANCEL_PLACE,
    DELIVER_MS,
    QUEUE,
    TOPIC,
    UNIQUE_KEY,
    Refusal,
    time_problem,
    timer_of,
)
from tiered.model.topic_names import refused_target

NOW = 1_700_000_000_000
YEAR = 365 * 86_400_000
NAMES = st.sampled_from(
    [
        TOPIC,
        DELIVER_MS,
        CANCEL,
        CANCEL_PLACE,
        QUEUE,
        UNIQUE_KEY,
        "TIERED_DELIVER_MT",
        "TIERED_CANCEL_PLACF",
        "KEYS",
        "",
    ]
)
TIMES = [0, -5, NOW // 1000, NOW + 5, NOW + 2 * YEAR, 946_684_799_999, 946_684_800_000, 946_684_800]
TIMES += [4_102_444_799_999, 4_102_444_800_000, 4_102_444_799, 4_102_444_800, 10**18 - 1, 10**18]
VALUES = st.one_of(
    st.sampled_from(TIMES).map(str),
    st.sampled_from(TIMES).map(lambda ms: f"{ms} K1"),
    st.sampled_from(
        ["", "orders", "rmq_sys_wheel_timer", "T", "x y", f"{NOW} ", f"x{NOW} K1", f"{NOW} k\u00fc 2", "5  k"]
    ),
    st.sampled_from(
        ["7:12", "65535:0", "65536:0", "012345:1", "1:", ":1", "1:1 ", f"0:{10**18 - 1}", f"0:{10**18}"]
    ),
    st.sampled_from(["3", "65535", "65536", "000003", "q"]),
).map(str.encode)
PAIRS = st.lists(st.tuples(NAMES.map(str.encode), VALUES), max_size=6)
LIKELY = PAIRS.map(
    lambda more: [(TOPIC.encode(), b"orders"), (DELIVER_MS.encode(), str(NOW + 5).encode()), *more]
)
FLAGS = st.sampled_from([0, 0, 0, 1, 0x8, 0x10, 0x30, 0x80])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(PAIRS | LIKELY, FLAGS, st.booleans()), min_size=1, max_size=4))
def test_the_kernel_finds_what_the_model_finds(
    given_messages: list[tuple[list[tuple[bytes, bytes]], int, bool]],
) -> None:
    records = [
        encode(
            Message(
                b"T" * (200 if is_long else 6),
                properties=b"\x02".join(b"\x01".join(pair) for pair in pairs),
                sys_flag=flag,
                store_timestamp=NOW,
            ),
            0,
        )
        for pairs, flag, is_long in given_messages
    ]
    sizes = np.array([len(record) for record in records])
    arena = np.frombuffer(b"".join(records), np.uint8).copy()
    found = find_timers(arena, np.cumsum(sizes) - sizes, sizes, max_delay_ms=YEAR)
    for record, row in zip(records, found.T.tolist(), strict=True):
        decoded = decode_record(record)
        wanted = timer_of(
            decoded.properties,
            stored_ms=decoded.store_timestamp,
            sys_flag=decoded.sys_flag,
            max_delay_ms=YEAR,
        )
        deliver_ms, key_hash, topic_hash, refusal, cancel_ms, cancel_hash, cancels, *place, at, length = row
        topic = arena[at : at + length].tobytes().decode()
        if wanted.refusal is Refusal.BAD_TARGET:
            # The write path asks that of each topic, not of each message.
            assert not refusal and refused_target(topic)
            continue
        assert Refusal(refusal) is wanted.refusal, decoded.properties
        if refusal:
            continue
        assert (deliver_ms, topic, topic_hash % 2**64) == (
            wanted.deliver_ms,
            wanted.topic,
            hash_of(wanted.topic),
        )
        assert key_hash % 2**64 == (hash_of(wanted.unique_key) if wanted.unique_key else 0)
        assert cancels == (wanted.cancel is not None) + (wanted.cancel_place is not None)
        if wanted.cancel:
            assert (cancel_ms, cancel_hash % 2**64) == (wanted.cancel[0], hash_of(wanted.cancel[1]))
        if wanted.cancel_place:
            assert tuple(place) == wanted.cancel_place


@pytest.mark.parametrize(
    ("ms", "words"),
    [
        (1_767_225_600, "1767225600 looks like seconds: give milliseconds"),
        (946_684_799_999, "is not a time of the years 2000 to 2099"),
        (4_102_444_800_000, "is not a time of the years 2000 to 2099"),
        (-5, "is not a time"),
        (946_684_800_000, ""),
        (4_102_444_799_999, ""),
    ],
)
def test_times_outside_of_a_century_are_refused(ms: int, words: str) -> None:
    assert words in time_problem(ms) and bool(words) == bool(time_problem(ms))


@given(
    st.lists(
        st.sampled_from([b"", b"a", b"orders", b"orders-A-eight", b"orders-B-eight", b"orders-A-eighT"]),
        min_size=1,
    )
)
def test_texts_are_compared_byte_by_byte(texts: list[bytes]) -> None:
    length = np.array([*map(len, texts)], np.int64)
    at, like = np.cumsum(length) - length, np.arange(len(texts))[::-1].copy()
    data = np.frombuffer(b"".join(texts) or b"x", np.uint8)  # held: the kernel gets its address only
    found = same_texts(data.ctypes.data, at, length, like)
    assert found.tolist() == [one == other for one, other in zip(texts, texts[::-1], strict=True)]


@given(st.lists(st.integers(0, 3) | st.integers(0, 1 << 60)))
def test_times_are_sorted_and_equal_ones_keep_their_order(times: list[int]) -> None:
    given_times = np.array(times, np.int64)
    assert time_order(given_times).tolist() == np.argsort(given_times, kind="stable").tolist()
