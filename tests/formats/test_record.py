"""Decoding of single records: properties as Java reads them, hosts, bodies, and damage as typed errors."""

import json
import struct
import zlib

import lz4.frame
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.record_builder import Message, encode, properties
from tiered.errors import CorruptionError
from tiered.formats.record import (
    SYS_COMPRESSED,
    decode_record,
    decompress_body,
    inner_messages,
    parse_properties,
    record_to_json,
)
from tiered.model.queue import QueueKey

BODY = b"a body that compresses well " * 40


@pytest.mark.parametrize(
    ("encoded", "expected"),
    [
        (b"", {}),
        (b"a\x01b\x02", {"a": "b"}),
        (b"a\x01b", {"a": "b"}),
        (b"a\x01b\x02a\x01c\x02", {"a": "c"}),
        (b"a\x01b\x01c\x02", {"a": "b\x01c"}),
        (b"a\x01\x02\x01b\x02c\x02d\x01e", {"d": "e"}),
        (b"k\x01\xed\xa0\x80\x02", {"k": "\ufffd"}),
        ("ключ\x01значение\x02".encode(), {"ключ": "значение"}),
    ],
)
def test_properties_as_in_java(encoded: bytes, expected: dict[str, str]) -> None:
    assert parse_properties(encoded) == expected


def test_keys_are_split_on_single_spaces() -> None:
    record = decode_record(encode(Message(properties=properties((b"KEYS", b"  lead  double "))), 0))
    assert record.keys == ["lead", "double"]
    assert decode_record(encode(Message(), 0)).keys == []


def test_hosts_and_message_ids() -> None:
    record = decode_record(encode(Message(), 0x0102))
    assert (record.born_host, record.store_host) == ("0.0.0.0:1234", "0.0.0.0:5678")
    assert record.offset_msg_id == "00000000" + "0000162E" + "0000000000000102"
    record = decode_record(encode(Message(sys_flag=0x30), 0))
    assert record.store_host == "0:0:0:0:0:0:0:0:5678"
    assert len(record.offset_msg_id) == 56


def test_a_mapped_address_prints_as_java_does() -> None:
    data = bytearray(encode(Message(sys_flag=0x10), 0))
    data[48:64] = bytes(10) + b"\xff\xff" + bytes([10, 0, 0, 7])
    assert decode_record(data).born_host == "10.0.0.7:1234"


@pytest.mark.parametrize(
    ("flag", "stored"),
    [
        (0x001, zlib.compress(BODY)),
        (0x301, zlib.compress(BODY)),
        (0x101, lz4.frame.compress(BODY)),
        (0x201, zstandard.ZstdCompressor(write_content_size=False).compress(BODY)),
    ],
)
def test_bodies_decompress_bounded(flag: int, stored: bytes) -> None:
    assert decode_record(encode(Message(body=stored, sys_flag=flag), 0)).body() == BODY
    assert decompress_body(stored, flag, len(BODY), source="x") == BODY
    with pytest.raises(CorruptionError, match=f"x decompresses to more than {len(BODY) - 1} bytes"):
        decompress_body(stored, flag, len(BODY) - 1, source="x")
    with pytest.raises(CorruptionError, match="x"):
        decompress_body(stored[:-9], flag, 1 << 20, source="x")
    with pytest.raises(CorruptionError, match="does not decompress"):
        decompress_body(b"\x99" * 30, flag, 1 << 20, source="x")


_ZSTD = zstandard.ZstdCompressor().compress
ONE, TWO = b"hello " * 3, b"world " * 3


@pytest.mark.parametrize(
    ("flag", "stored", "expected"),
    [
        (0x101, lz4.frame.compress(ONE) + lz4.frame.compress(TWO), ONE + TWO),
        (0x201, _ZSTD(ONE) + _ZSTD(TWO), ONE + TWO),
        (0x201, _ZSTD(ONE) + _ZSTD(TWO * 1000) + _ZSTD(b"") + _ZSTD(ONE), ONE + TWO * 1000 + ONE),
        (0x101, lz4.frame.compress(b"") + lz4.frame.compress(ONE), ONE),
        (0x201, _ZSTD(ONE) + b"xx", ONE),
        (0x301, zlib.compress(ONE) + zlib.compress(TWO), ONE),
        (0x301, zlib.compress(ONE) + b"garbage", ONE),
        (0x201, b"", b""),
        (0x301, b"", b""),
    ],
)
def test_bodies_of_several_frames_are_what_a_java_client_hands_out(
    flag: int, stored: bytes, expected: bytes
) -> None:
    """Asked of CompressorFactory's compressors of RocketMQ 5.3.3."""
    assert decompress_body(stored, flag, 1 << 20, source="x") == expected
    if expected:
        with pytest.raises(CorruptionError, match="more than"):
            decompress_body(stored, flag, len(expected) - 1, source="x")


@pytest.mark.parametrize(
    ("flag", "stored"),
    [
        (0x101, lz4.frame.compress(ONE) + b"xx"),
        (0x101, lz4.frame.compress(ONE) + b"garbage!garbage"),
        (0x101, lz4.frame.compress(ONE) + lz4.frame.compress(TWO)[:-3]),
        (0x101, b""),
        (0x201, _ZSTD(ONE) + b"garbage!garbage"),
        (0x201, _ZSTD(ONE) + _ZSTD(TWO)[:-3]),
    ],
)
def test_bodies_that_java_refuses_are_errors(flag: int, stored: bytes) -> None:
    with pytest.raises(CorruptionError, match="x"):
        decompress_body(stored, flag, 1 << 20, source="x")


def test_an_unknown_compression_is_an_error() -> None:
    with pytest.raises(CorruptionError, match="the unknown compression type 5"):
        decompress_body(b"", SYS_COMPRESSED | 0x500, 10, source="x")


def test_inner_messages_of_a_batch() -> None:
    items = [(b"one", properties((b"TAGS", b"T"))), (b"", b"")]
    body = b"".join(
        struct.pack(">iIIii", 0, 0, 0, 7, len(text)) + text + struct.pack(">h", len(pairs)) + pairs
        for text, pairs in items
    )
    record = decode_record(encode(Message(body=body, sys_flag=0xC0, queue_offset=40), 0))
    assert [(item.body, item.properties, item.flag) for item in inner_messages(record)] == [
        (b"one", {"TAGS": "T"}, 7),
        (b"", {}, 7),
    ]
    row = record_to_json(record, queue=QueueKey("topic", 0, 0), queue_offset=40, is_own_offset=True)
    assert [item["queueOffset"] for item in row["inner"]] == [40, 41]
    cut = decode_record(encode(Message(body=body[:-1], sys_flag=0xC0), 0))
    with pytest.raises(CorruptionError, match="inner batch of topic at physical offset 0"):
        list(inner_messages(cut))
    assert list(inner_messages(decode_record(encode(Message(body=body), 0)))) == []


def test_an_lmq_shows_its_parents_record() -> None:
    record = decode_record(encode(Message(queue_id=2, queue_offset=9), 0))
    row = record_to_json(record, queue=QueueKey("%LMQ%x", 0, 0), queue_offset=3)
    assert (row["topic"], row["queueId"], row["queueOffset"]) == ("%LMQ%x", 0, 3)
    assert (row["recTopic"], row["recQueueId"], row["recQueueOffset"]) == ("topic", 2, 9)


@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 255))
def test_damage_is_a_typed_error_or_a_record_of_the_same_length(body: bytes, at: int, value: int) -> None:
    data = bytearray(encode(Message(body=body, properties=properties((b"KEYS", b"k"))), 0))
    data[at % len(data)] = value
    try:
        record = decode_record(data)
    except CorruptionError:
        return
    assert record.data == bytes(data)
    json.dumps(record.properties)


def test_every_cut_is_a_typed_error() -> None:
    data = encode(Message(properties=properties((b"KEYS", b"k"))), 0)
    for length in range(len(data)):
        with pytest.raises(CorruptionError, match="is damaged"):
            decode_record(data[:length])
    with pytest.raises(CorruptionError, match="its parts add up"):
        decode_record(data + b"\0")
