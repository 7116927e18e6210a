"""Frames: both header types round-trip, Java's own bytes parse, hostile bytes cost an error and nothing else."""

import json
import struct
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered.remoting.command import (
    DIALECT_BYTES_MAX,
    FRAME_BYTES_MAX,
    HEADER_BYTES_MAX,
    HEADER_FIELDS_MAX,
    LANGUAGES,
    FrameDecoder,
    ProtocolError,
    RemotingCommand,
    SerializeType,
    decode,
    encode,
    encode_answer,
)

TEXT = st.text(max_size=30)
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


@st.composite
def commands(draw: st.DrawFn, kind: SerializeType) -> RemotingCommand:
    is_binary = kind == SerializeType.ROCKETMQ
    return RemotingCommand(
        code=draw(st.integers(-0x8000, 0x7FFF) if is_binary else INT32),
        opaque=draw(INT32),
        flag=draw(INT32),
        language=draw(st.sampled_from(LANGUAGES)),
        version=draw(st.integers(0, 0x7FFF)),
        remark=draw(st.none() | st.text(min_size=1, max_size=30)),
        ext_fields=draw(st.dictionaries(TEXT, st.text(min_size=1, max_size=30), max_size=5)),
        body=draw(st.binary(max_size=200)),
        serialize_type=kind,
    )


@given(
    st.lists(commands(SerializeType.JSON) | commands(SerializeType.ROCKETMQ), max_size=5), st.integers(1, 50)
)
def test_commands_round_trip_however_the_stream_is_cut(sent: list[RemotingCommand], piece: int) -> None:
    stream = b"".join(encode(command) for command in sent)
    decoder = FrameDecoder()
    received: list[RemotingCommand] = []
    for begin in range(0, len(stream), piece):
        received += decoder.feed(stream[begin : begin + piece])
    assert received == sent


@given(
    st.lists(commands(SerializeType.JSON) | commands(SerializeType.ROCKETMQ), min_size=1, max_size=4),
    st.data(),
)
def test_one_whole_frame_is_taken_at_once_and_anything_else_is_left_alone(
    sent: list[RemotingCommand], data: st.DataObject
) -> None:
    stream = b"".join(encode(command) for command in sent)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=3)))
    whole = len(encode(sent[0]))
    cuts = data.draw(st.sampled_from([cuts, sorted([*cuts, whole])]))
    decoder = FrameDecoder()
    received: list[RemotingCommand] = []
    at_once = 0
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        piece, held = stream[begin:end], decoder.held_bytes
        command = decoder.only(piece)
        assert decoder.held_bytes == held
        if command is None:
            received += decoder.feed(piece)
        else:
            at_once += 1
            received.append(command)
    assert received == sent
    if cuts and whole == cuts[0]:
        assert at_once


def test_fields_of_a_header_are_in_the_order_in_which_java_writes_them() -> None:
    names = list(json.loads(encode(RemotingCommand(0, 7, 1, remark="FOUND", ext_fields={"a": "1"}))[8:]))
    assert names == sorted(names) and "extFields" in names and "remark" in names


@given(commands(SerializeType.JSON) | commands(SerializeType.ROCKETMQ), st.data())
def test_an_answer_is_the_same_with_and_without_a_command_of_it(
    request: RemotingCommand, data: st.DataObject
) -> None:
    answer = data.draw(commands(request.serialize_type))
    answer.flag, answer.opaque, answer.language = 1, request.opaque, "PYTHON"
    head = encode_answer(
        request, answer.code, answer.version, answer.remark, answer.ext_fields, len(answer.body)
    )
    assert head + answer.body == encode(answer)
    assert decode((head + answer.body)[4:]) == answer


def test_a_header_as_java_writes_it() -> None:
    header = (
        b'{"code":0,"extFields":{"queueId":3,"ok":true,"none":null},"flag":1,"language":"JAVA","opaque":17,'
        b'"serializeTypeCurrentRPC":"JSON","version":479}'
    )
    command = decode(struct.pack(">I", len(header)) + header + b"body")
    assert (command.code, command.opaque, command.is_response, command.is_oneway) == (0, 17, True, False)
    assert command.ext_fields == {"queueId": "3", "ok": "true"}
    assert command.body == b"body"


@pytest.mark.parametrize(
    "garbage", [bytes(64), b"\xff" * 64, encode(RemotingCommand(1, 1))[:4] + b"\x07" * 500]
)
def test_frames_before_a_broken_one_are_delivered(garbage: bytes) -> None:
    good = [RemotingCommand(code, code) for code in range(3)]
    received = []
    with pytest.raises(ProtocolError):
        for command in FrameDecoder().feed(b"".join(map(encode, good)) + garbage):
            received.append(command)
    assert received == good


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\x00\x00\x00\x05{}",
        b"\x07\x00\x00\x02{}",
        b"\x00\x00\x00\x02[]",
        b"\x00\x00\x00\x02{}",
        b"\x00\x00\x00\x04" + b"{{{{",
        b"\x01\x00\x00\x04" + b"\x00\x01\x00\x01",
        b"\x01\x00\x00\x19" + bytes(13) + b"\x7f\xff\xff\xff" + bytes(8),
        b"\x00\x00\x4e\x20" + b"[" * 20_000,
    ],
)
def test_broken_frames_are_protocol_errors(frame: bytes) -> None:
    with pytest.raises(ProtocolError):
        decode(frame)


def frame_of(header: bytes, kind: SerializeType = SerializeType.JSON) -> bytes:
    return struct.pack(">I", kind << 24 | len(header)) + header


@pytest.mark.parametrize(
    "header",
    [
        b"{" * 60 + b'"a":1' + b"}:1" * 59 + b"}",  # a key of 2^60 characters, if it were made
        b"{" + b'\\"' * 100_000,
        b"{" + b"," * DIALECT_BYTES_MAX,
        b"{code:11,opaque:1,extFields:{a:['" + b"\\v" * 100_000 + b"']}}",
        b'{"code":11,"opaque":1,"extFields":{"a":[' + b"[]," * 80_000 + b"[]]}}",
        b'{"code":11,"opaque":1,"extFields":{' + b",".join(b'"%d":1' % n for n in range(20_000)) + b"}}",
    ],
)
def test_a_header_that_is_costly_to_parse_is_not_parsed(header: bytes) -> None:
    begun_s = time.thread_time()
    with pytest.raises(ProtocolError):
        decode(frame_of(header))
    assert time.thread_time() - begun_s < 0.05


@pytest.mark.parametrize("kind", list(SerializeType))
def test_the_fields_of_a_header_are_bounded(kind: SerializeType) -> None:
    fields = {str(number): "x" for number in range(HEADER_FIELDS_MAX + 1)}
    with pytest.raises(ProtocolError, match="fields"):
        decode(encode(RemotingCommand(11, 1, ext_fields=fields, serialize_type=kind))[4:])
    fields.popitem()
    assert (
        decode(encode(RemotingCommand(11, 1, ext_fields=fields, serialize_type=kind))[4:]).ext_fields
        == fields
    )


@pytest.mark.parametrize("kind", list(SerializeType))
def test_headers_have_a_bound_of_their_own_that_properties_of_any_message_keep(kind: SerializeType) -> None:
    longest = RemotingCommand(310, 1, ext_fields={"i": "\x01" * 32_767}, serialize_type=kind)
    assert decode(encode(longest)[4:]) == longest
    with pytest.raises(ProtocolError, match="header of"):
        decode(frame_of(bytes(HEADER_BYTES_MAX + 1), kind))


@given(st.binary(max_size=300))
def test_any_bytes_parse_or_are_a_protocol_error(data: bytes) -> None:
    for prefix in (b"", struct.pack(">I", len(data)), struct.pack(">I", 1 << 24 | len(data))):
        try:
            decode(prefix + data)
        except ProtocolError:
            continue


def test_what_cannot_be_sent_is_refused() -> None:
    with pytest.raises(ValueError, match="that clients accept"):
        encode(RemotingCommand(1, 1, body=bytes(FRAME_BYTES_MAX)))
    with pytest.raises(ValueError, match="200050"):
        encode(RemotingCommand(200050, 1, serialize_type=SerializeType.ROCKETMQ))
