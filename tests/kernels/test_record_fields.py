"""Fields by columns equal those of the plain decoder, for generated and for damaged records."""

import zlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.kernels.record_builder import Message, encode
from tiered.errors import CorruptionError
from tiered.formats.record import decode_record
from tiered.kernels.record_fields import (
    Number,
    RecordFields,
    copied,
    copy_to,
    message_ids,
    property_pairs,
    record_fields,
    slice_crc32,
)

NAMES = st.sampled_from([b"TAGS", b"KEYS", b"UNIQ_KEY", b"a", b"bb", b"\xff", "имя".encode(), b""])
VALUES = st.sampled_from([b"", b"v", b"w\x01x", "значение".encode(), b"\xed\xa0\x80", b"0" * 70])
PAIRS = st.lists(st.tuples(NAMES, VALUES), max_size=6)
MESSAGES = st.builds(
    Message,
    topic=st.sampled_from([b"t", b"x" * 127, b"y" * 128, b"z" * 300]),
    queue_id=st.integers(0, 2**31 - 1),
    queue_offset=st.integers(0, 2**63 - 1),
    body=st.binary(max_size=100),
    properties=st.builds(
        lambda pairs, ends: b"".join(n + b"\x01" + v + b"\x02" for n, v in pairs)[: None if ends else -1],
        PAIRS,
        st.booleans(),
    ),
    sys_flag=st.sampled_from([0, 0x10, 0x20, 0x30]),
    with_record_crc=st.booleans(),
)


def laid_out(records: list[bytes]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The records with three foreign bytes before each: (data, starts, sizes)."""
    sizes = np.array([len(record) for record in records], np.int32)
    starts = np.cumsum(sizes + 3) - sizes
    return np.frombuffer(b"".join(b"???" + record for record in records), np.uint8), starts, sizes


def slices(data: np.ndarray, fields: RecordFields, at: Number) -> list[bytes]:
    offsets, out = copied(data, fields[at], fields[Number(at + 1)])
    return [out[begin:end].tobytes() for begin, end in pairwise(offsets)]


@given(st.lists(MESSAGES, min_size=1, max_size=5))
def test_every_field_is_that_of_the_plain_decoder(messages: list[Message]) -> None:
    records = [encode(message, 1000 * i) for i, message in enumerate(messages)]
    data, starts, sizes = laid_out(records)
    fields = record_fields(data, starts, sizes, properties=True)
    assert (fields[Number.VALID] == 1).all()
    expected = [decode_record(record) for record in records]
    for number, name in (
        (Number.BODY_CRC, "body_crc"),
        (Number.QUEUE_ID, "queue_id"),
        (Number.FLAG, "flag"),
        (Number.QUEUE_OFFSET, "queue_offset"),
        (Number.PHYS, "physical_offset"),
        (Number.SYS_FLAG, "sys_flag"),
        (Number.BORN_TIMESTAMP, "born_timestamp"),
        (Number.STORE_TIMESTAMP, "store_timestamp"),
        (Number.RECONSUME_TIMES, "reconsume_times"),
        (Number.PT_OFFSET, "prepared_transaction_offset"),
    ):
        assert fields[number].tolist() == [getattr(record, name) for record in expected], name
    assert (fields[Number.MAGIC] & 0xFFFFFFFF).tolist() == [record.magic for record in expected]
    assert slices(data, fields, Number.BODY_AT) == [record.stored_body for record in expected]
    assert slices(data, fields, Number.TOPIC_AT) == [message.topic for message in messages]
    offsets, text = message_ids(data, fields)
    ids = [text[begin:end].tobytes().decode() for begin, end in pairwise(offsets)]
    assert ids == [record.offset_msg_id for record in expected]
    assert slice_crc32(data, starts, sizes).tolist() == [zlib.crc32(record) for record in records]


@given(st.lists(MESSAGES, min_size=1, max_size=5))
def test_properties_are_those_of_the_plain_decoder(messages: list[Message]) -> None:
    records = [encode(message, 0) for message in messages]
    data, starts, sizes = laid_out(records)
    fields = record_fields(data, starts, sizes, properties=True)
    pairs = property_pairs(data, fields)
    for row, record in enumerate(map(decode_record, records)):
        stored = slices(data, fields, Number.PROPERTIES_AT)[row]
        try:
            stored.decode()
        except UnicodeDecodeError:
            assert fields[Number.IS_TEXT][row] == 0
            continue
        assert fields[Number.IS_TEXT][row] == 1
        found = {}
        for pair in range(pairs.starts[row], pairs.starts[row + 1]):
            name, value = (
                data[at[pair] : at[pair] + length[pair]].tobytes().decode()
                for at, length in ((pairs.name_at, pairs.name_bytes), (pairs.value_at, pairs.value_bytes))
            )
            assert name not in found
            found[name] = value
        assert found == record.properties
        for at, name in (
            (Number.TAGS_AT, "TAGS"),
            (Number.KEYS_AT, "KEYS"),
            (Number.UNIQ_KEY_AT, "UNIQ_KEY"),
        ):
            assert slices(data, fields, at)[row].decode() == record.properties.get(name, "")


@given(MESSAGES, st.data())
def test_damaged_lengths_are_seen_and_nothing_is_read_beyond(message: Message, draw: st.DataObject) -> None:
    record = bytearray(encode(message, 0))
    for _ in range(draw.draw(st.integers(1, 3))):
        record[draw.draw(st.integers(0, len(record) - 1))] = draw.draw(st.integers(0, 255))
    cut = draw.draw(st.integers(0, len(record)))
    data = np.frombuffer(bytes(record[:cut]), np.uint8)
    fields = record_fields(data, np.array([0]), np.array([cut]), properties=True)
    try:
        decode_record(bytes(record[:cut]))
        decodes = True
    except CorruptionError:
        decodes = False
    assert bool(fields[Number.VALID][0]) == decodes


def test_places_outside_the_data_are_refused() -> None:
    data = np.zeros(10, np.uint8)
    for starts, sizes in ((np.array([5]), np.array([6])), (np.array([-1]), np.array([1]))):
        with pytest.raises(ValueError, match="outside"):
            record_fields(data, starts, sizes, properties=False)
        with pytest.raises(ValueError, match="outside"):
            copied(data, starts, sizes)
        with pytest.raises(ValueError, match="outside"):
            slice_crc32(data, starts, sizes)
    with pytest.raises(ValueError, match="outside"):
        copy_to(data, np.array([0]), np.array([4]), np.array([7, 11], np.int32), np.zeros(10, np.uint8))
    with pytest.raises(ValueError, match="32-bit"):
        copied(data, np.zeros(2, np.int64), np.full(2, 1 << 30))
