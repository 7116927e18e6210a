"""The kernel finds what tiered.model.timer finds."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.record_builder import Message, encode
from tiered.archive.index.key_hash import xxh64
from tiered.formats.record import decode_record
from tiered.kernels.timers import find_timers, time_order
from tiered.model.timer import Refusal, timer_of

NOW = 1_700_000_000_000
YEAR = 365 * 86_400_000
NAMES = st.sampled_from(
    [b"TIERED_TOPIC", b"TIERED_DELIVER_MS", b"TIERED_CANCEL", b"UNIQ_KEY", b"TIERED_DELIVER_MT", b"KEYS", b""]
)
VALUES = st.sampled_from(
    [
        b"",
        b"orders",
        b"0",
        b"-5",
        str(NOW + 5).encode(),
        str(NOW + 2 * YEAR).encode(),
        b"9" * 18,
        b"1" * 19,
        f"{NOW} K1".encode(),
        f"{NOW} ".encode(),
        f"x{NOW} K1".encode(),
        "5 k\u00fc 2".encode(),
        b"5  k",
    ]
)
PAIRS = st.lists(st.tuples(NAMES, VALUES), max_size=6)
FLAGS = st.sampled_from([0, 0, 0, 1, 0x8, 0x10, 0x30, 0x80])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(PAIRS, FLAGS, st.booleans()), min_size=1, max_size=4))
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
        deliver_ms, key_hash, refusal, cancel_ms, cancel_hash, _ = row
        assert Refusal(refusal) is wanted.refusal, decoded.properties
        if refusal:
            continue
        assert deliver_ms == wanted.deliver_ms
        if deliver_ms:
            assert key_hash % 2**64 == xxh64(wanted.unique_key.encode())
        if wanted.cancel:
            assert (cancel_ms, cancel_hash % 2**64) == (wanted.cancel[0], xxh64(wanted.cancel[1].encode()))


@given(st.lists(st.integers(0, 3) | st.integers(0, 1 << 60)))
def test_times_are_sorted_and_equal_ones_keep_their_order(times: list[int]) -> None:
    given_times = np.array(times, np.int64)
    assert time_order(given_times).tolist() == np.argsort(given_times, kind="stable").tolist()
