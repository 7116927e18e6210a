"""Encodes and decodes remoting commands, without I/O: JSON and ROCKETMQ headers.

    frame = length i32 | serialize type u8, header length u24 | header | body      (length counts all after itself)

An invalid frame is a ProtocolError: the connection is unusable, because the begin of the next frame is unknown.
Nothing is allocated for a frame before its length is checked, and the header has a limit of its own: it is parsed
before authentication.

Sources: RemotingCommand, RocketMQSerializable, NettyDecoder (FRAME_MAX_LENGTH).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import orjson

from tiered.errors import CorruptionError, UnavailableError
from tiered.formats import fastjson

FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Including the length field itself."""
HEADER_BYTES_MAX = 256 * 1024
"""The longest headers contain a message's properties, 32,767 characters, each encoded as up to six."""
HEADER_FIELDS_MAX = 512
"""The longest list of a broker, SEND_MESSAGE's, has fewer than 30."""
HEADER_VALUES_MAX = 65_536
"""Commas, those in the properties included. A list takes two bytes to write, but memory and time to make."""
DIALECT_BYTES_MAX = 1024
"""Limit of a header or request body that is not strict JSON: it takes a thousand times as long to parse. Clients write
strict JSON."""
LANGUAGES = (
    "JAVA",
    "CPP",
    "DOTNET",
    "PYTHON",
    "DELPHI",
    "ERLANG",
    "RUBY",
    "OTHER",
    "HTTP",
    "GO",
    "PHP",
    "OMS",
    "RUST",
    "NODE_JS",
)
VERSION = 409
"""4.9.8: supported by every broker since 4.9."""
_INT_MIN, _INT_MAX = -(1 << 31), (1 << 31) - 1
_RESPONSE = 1
_ONEWAY = 2
_LENGTH = struct.Struct(">i")
_SHORT = struct.Struct(">h")
_HEAD = struct.Struct(">iI")
_LENGTHS = struct.Struct(">I")
_FIXED = struct.Struct(">hBhii")
_LANGUAGE_CODES = {name: code for code, name in enumerate(LANGUAGES)}


class ProtocolError(UnavailableError):
    """The peer violates the protocol; the connection must be closed."""


class SerializeType(IntEnum):
    """Header encoding."""

    JSON = 0
    ROCKETMQ = 1


_JSON, _ROCKETMQ = SerializeType.JSON, SerializeType.ROCKETMQ
"""An enum lookup costs as much as a call."""


@dataclass(slots=True)
class RemotingCommand:
    """A request or a response; immutable. ``ext_fields`` values are text, as in Java."""

    code: int
    opaque: int
    flag: int = 0
    language: str = "PYTHON"
    version: int = VERSION
    remark: str | None = None
    ext_fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    serialize_type: SerializeType = SerializeType.JSON
    frame_bytes: int = field(default=0, compare=False)
    """Size of its frame without the length field; 0 if it was not received."""

    @property
    def is_response(self) -> bool:
        """Whether this is the response to the request with the same ``opaque``."""
        return bool(self.flag & _RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """Whether no response may be sent."""
        return bool(self.flag & _ONEWAY)


def encode(command: RemotingCommand) -> bytes:
    """The frame. Raises ValueError for values that the encoding does not support or a frame that is too large."""
    return encode_head(command, len(command.body)) + command.body


def encode_head(command: RemotingCommand, body_bytes: int) -> bytes:
    """The frame without its body of ``body_bytes``. Raises as ``encode``."""
    if command.serialize_type != _JSON:
        return _framed(_binary_header(command), body_bytes, _ROCKETMQ)
    header = _json_header(
        command.code,
        command.flag,
        command.language,
        command.opaque,
        command.version,
        command.remark,
        command.ext_fields,
    )
    return _framed(header, body_bytes, _JSON)


def encode_answer(
    request: RemotingCommand,
    code: int,
    version: int,
    remark: str | None,
    ext_fields: Mapping[str, str],
    body_bytes: int,
) -> bytes:
    """``encode_head`` of the response to ``request``, without making a command: the hot path of servers."""
    if request.serialize_type == _JSON:
        header = _json_header(code, _RESPONSE, "PYTHON", request.opaque, version, remark, ext_fields)
        return _framed(header, body_bytes, _JSON)
    answer = RemotingCommand(
        code, request.opaque, _RESPONSE, "PYTHON", version, remark, ext_fields, b"", _ROCKETMQ
    )
    return _framed(_binary_header(answer), body_bytes, _ROCKETMQ)


def _framed(header: bytes, body_bytes: int, kind: SerializeType) -> bytes:
    header_bytes = len(header)
    length = 4 + header_bytes + body_bytes
    if length + 4 > FRAME_BYTES_MAX or header_bytes >= 1 << 24:
        raise ValueError(f"frame of {length + 4} bytes exceeds {FRAME_BYTES_MAX}")
    return _HEAD.pack(length, kind << 24 | header_bytes) + header


class FrameDecoder:
    """Decodes a stream of bytes. Unusable after a ProtocolError."""

    def __init__(self, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._max = frame_bytes_max
        self._data: bytes | bytearray = b""
        self._at = 0

    @property
    def held_bytes(self) -> int:
        """Buffered bytes of an incomplete command."""
        return len(self._data) - self._at

    def feed(self, data: bytes) -> Iterator[RemotingCommand]:
        """Add received bytes; yields the complete commands, to be consumed before the next call.

        Raises ProtocolError at an invalid frame, after the commands before it.
        """
        self.push(data)
        return iter(self.pop, None)

    def forget(self) -> None:
        """Discard buffered bytes."""
        self._data, self._at = b"", 0

    def push(self, data: bytes) -> None:
        """Add received bytes."""
        held = self._data
        if self._at == len(held):
            self._data = data
        else:
            if not isinstance(held, bytearray):
                held = self._data = bytearray(held)
            del held[: self._at]
            held += data
        self._at = 0

    def only(self, data: bytes) -> RemotingCommand | None:
        """The command of ``data`` if it is exactly one frame and nothing is buffered; else None, without effect. The
        common case of clients that wait for responses. Raises ProtocolError."""
        if self._at != len(self._data) or len(data) < 8:
            return None
        (length,) = _LENGTH.unpack_from(data)
        if length + 4 != len(data) or length > self._max - 4:
            return None
        return decode(data[4:])

    def pop(self) -> RemotingCommand | None:
        """The next complete command, or None. Raises ProtocolError."""
        data, at = self._data, self._at
        left = len(data) - at
        if left < 4:
            return None
        (length,) = _LENGTH.unpack_from(data, at)
        if not 4 <= length <= self._max - 4:
            raise ProtocolError(f"frame length {length} is not in 4 to {self._max - 4}")
        if left < 4 + length:
            return None
        end = self._at = at + 4 + length
        frame = data[at + 4 : end]
        if end == len(data):
            self._data, self._at = b"", 0
        return decode(frame if type(frame) is bytes else bytes(frame))


def decode(frame: bytes) -> RemotingCommand:
    """A command from a frame without its length field. Raises ProtocolError."""
    if len(frame) < 4:
        raise ProtocolError(f"frame of {len(frame)} bytes has no header length")
    (lengths,) = _LENGTHS.unpack_from(frame)
    kind, header_end = lengths >> 24, 4 + (lengths & 0xFFFFFF)
    if header_end > len(frame):
        raise ProtocolError(f"header of {header_end - 4} bytes in a frame of {len(frame)}")
    if header_end - 4 > HEADER_BYTES_MAX:
        raise ProtocolError(f"header of {header_end - 4} bytes exceeds {HEADER_BYTES_MAX}")
    header, body = frame[4:header_end], frame[header_end:]
    try:
        if kind == _JSON:
            return _from_json(header, body, len(frame))
        if kind == _ROCKETMQ:
            return _from_binary(header, body, len(frame))
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        struct.error,
        OverflowError,
        RecursionError,
        CorruptionError,
    ) as error:
        raise ProtocolError(f"malformed header: {error}") from error
    raise ProtocolError(f"serialize type {kind} is unknown")


def parse_json(text: bytes, values_max: int) -> Any:
    """The value of a received header or body of at most ``values_max`` values. Raises CorruptionError."""
    if len(text) > values_max and text.count(b",") >= values_max:
        raise CorruptionError(f"JSON of more than {values_max} values")
    return fastjson.loads(text, dialect_max=DIALECT_BYTES_MAX)


def _json_header(
    code: int,
    flag: int,
    language: str,
    opaque: int,
    version: int,
    remark: str | None,
    fields: Mapping[str, str],
) -> bytes:
    # Sorted by name, as fastjson writes them: its parser is fastest then.
    document: dict[str, Any] = {"code": code}
    if fields:
        document["extFields"] = fields if type(fields) is dict else dict(fields)
    document["flag"], document["language"], document["opaque"] = flag, language, opaque
    if remark is not None:
        document["remark"] = remark
    document["serializeTypeCurrentRPC"], document["version"] = "JSON", version
    try:
        return orjson.dumps(document)
    except TypeError:  # numbers beyond 64 bits, invalid Unicode; the latter fails below as a ValueError
        return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _from_json(header: bytes, body: bytes, frame_bytes: int) -> RemotingCommand:
    document = parse_json(header, HEADER_VALUES_MAX)
    if not isinstance(document, dict):
        raise ValueError("the header is not a JSON object")
    get = document.get
    fields = get("extFields") or {}
    if not isinstance(fields, dict):
        raise ValueError("extFields is not a JSON object")
    if len(fields) > HEADER_FIELDS_MAX:
        raise ValueError(f"{len(fields)} fields")
    texts = [value for part in (document, fields) for value in part.values() if type(value) is str]
    quotes = header.count(b'"') - 2 * (len(document) + len(fields) + len(texts))
    if quotes > 0 and quotes > sum(text.count('"') for text in (*document, *fields, *texts)):
        raise ValueError("a name is there twice")
    for value in fields.values():
        if type(value) is not str:
            fields = {name: _text(other) for name, other in fields.items() if other is not None}
            break
    language, remark = get("language", "OTHER"), get("remark")
    if type(language) is not str:
        language = _language(language) if isinstance(language, int) else str(language)
    if remark is not None and type(remark) is not str:
        remark = str(remark)
    code, opaque, flag, version = document["code"], document["opaque"], get("flag", 0), get("version", 0)
    if not (
        type(code) is type(opaque) is type(flag) is type(version) is int
        and _INT_MIN <= code <= _INT_MAX
        and _INT_MIN <= opaque <= _INT_MAX
        and _INT_MIN <= flag <= _INT_MAX
        and _INT_MIN <= version <= _INT_MAX
    ):
        code, opaque, flag, version = map(_int32, (code, opaque, flag, version))
    return RemotingCommand(code, opaque, flag, language, version, remark, fields, body, _JSON, frame_bytes)


def _binary_header(command: RemotingCommand) -> bytes:
    if not -0x8000 <= command.code <= 0x7FFF:
        raise ValueError(f"code {command.code} does not fit the binary header")
    language = _LANGUAGE_CODES.get(command.language)
    if language is None:
        raise ValueError(f"language {command.language} is unknown")
    remark = b"" if command.remark is None else command.remark.encode()
    pieces: list[bytes] = []
    for name, text in command.ext_fields.items():
        key, value = name.encode(), text.encode()
        pieces += (_SHORT.pack(len(key)), key, _LENGTH.pack(len(value)), value)
    fields = b"".join(pieces)
    fixed = _FIXED.pack(command.code, language, command.version, command.opaque, command.flag)
    return b"".join((fixed, _LENGTH.pack(len(remark)), remark, _LENGTH.pack(len(fields)), fields))


def _from_binary(header: bytes, body: bytes, frame_bytes: int) -> RemotingCommand:
    code, language, version, opaque, flag = _FIXED.unpack_from(header)
    remark, position = _piece(header, _FIXED.size)
    fields, _ = _piece(header, position)
    return RemotingCommand(
        code=code,
        opaque=opaque,
        flag=flag,
        language=_language(language),
        version=version,
        remark=remark.decode() if remark else None,
        ext_fields=_binary_fields(fields),
        body=body,
        serialize_type=_ROCKETMQ,
        frame_bytes=frame_bytes,
    )


def _binary_fields(fields: bytes) -> dict[str, str]:
    found: dict[bytes, bytes] = {}
    size, position, count = len(fields), 0, 0
    while position < size:
        (length,) = _SHORT.unpack_from(fields, position)
        position += 2
        end = position + length
        if length < 0 or end > size:
            raise ValueError(f"key of {length} bytes, {size - position} left")
        key = fields[position:end]
        value, position = _piece(fields, end)
        count += 1
        if count > HEADER_FIELDS_MAX:
            raise ValueError(f"more than {HEADER_FIELDS_MAX} fields")
        if key in found:
            raise ValueError("a name is there twice")
        found[key] = value
    return {key.decode(): value.decode() for key, value in found.items() if value}


def _piece(data: bytes, position: int) -> tuple[bytes, int]:
    (length,) = _LENGTH.unpack_from(data, position)
    begin = position + 4
    end = begin + length
    if length < 0 or end > len(data):
        raise ValueError(f"value of {length} bytes, {len(data) - begin} left")
    return data[begin:end], end


def _language(number: int) -> str:
    return LANGUAGES[number] if 0 <= number < len(LANGUAGES) else "OTHER"


def _int32(value: Any) -> int:
    number = value if type(value) is int else int(value)
    if not _INT_MIN <= number <= _INT_MAX:
        raise ValueError(f"{number} is not a 32-bit integer")
    return number


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)
