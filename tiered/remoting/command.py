"""One remoting command and its frame, without I/O: JSON and ROCKETMQ headers, both ways.

    frame = length i32 | serialize type u8, header length u24 | header | body      (length counts all after itself)

A frame that breaks a rule is a ProtocolError: the connection cannot be used any more, because the next frame's
begin is unknown. Nothing is allocated for a frame before its length was checked.
Sources: RemotingCommand, RocketMQSerializable, NettyDecoder (FRAME_MAX_LENGTH).
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from tiered.errors import CorruptionError, UnavailableError
from tiered.formats import fastjson

FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Including the length field itself."""
LANGUAGES = (
    "JAVA", "CPP", "DOTNET", "PYTHON", "DELPHI", "ERLANG", "RUBY", "OTHER", "HTTP", "GO", "PHP", "OMS", "RUST",
    "NODE_JS",
)  # fmt: skip
VERSION = 409
"""4.9.8: understood by every broker since 4.9."""
_RESPONSE = 1
_ONEWAY = 2
_LENGTH = struct.Struct(">i")
_FIXED = struct.Struct(">hBhii")


class ProtocolError(UnavailableError):
    """The peer does not speak the protocol; the connection must be closed."""


class SerializeType(IntEnum):
    """How a header is written."""

    JSON = 0
    ROCKETMQ = 1


@dataclass(frozen=True)
class RemotingCommand:
    """A request or a response. ``ext_fields`` values are always text, as in Java."""

    code: int
    opaque: int
    flag: int = 0
    language: str = "PYTHON"
    version: int = VERSION
    remark: str | None = None
    ext_fields: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    serialize_type: SerializeType = SerializeType.JSON

    @property
    def is_response(self) -> bool:
        """Whether this answers the request with the same ``opaque``."""
        return bool(self.flag & _RESPONSE)

    @property
    def is_oneway(self) -> bool:
        """Whether no answer may be sent."""
        return bool(self.flag & _ONEWAY)


def encode(command: RemotingCommand) -> bytes:
    """The whole frame. Raises ValueError for what the header type cannot express or a frame that is too large."""
    return encode_head(command, len(command.body)) + command.body


def encode_head(command: RemotingCommand, body_bytes: int) -> bytes:
    """Everything of the frame before a body of ``body_bytes``, which is sent behind it. Raises as ``encode``."""
    header = (
        _json_header(command) if command.serialize_type == SerializeType.JSON else _binary_header(command)
    )
    length = 4 + len(header) + body_bytes
    if length + 4 > FRAME_BYTES_MAX or len(header) >= 1 << 24:
        raise ValueError(f"a frame of {length + 4} bytes is larger than {FRAME_BYTES_MAX}")
    marked = command.serialize_type << 24 | len(header)
    return _LENGTH.pack(length) + struct.pack(">I", marked) + header


class FrameDecoder:
    """Bytes in, commands out; keeps at most one frame. After a ProtocolError it must not be used again."""

    def __init__(self, *, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._max = frame_bytes_max
        self._data = bytearray()

    def feed(self, data: bytes) -> list[RemotingCommand]:
        """Take what a connection delivered; the commands that are complete now."""
        self._data += data
        commands = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if not 4 <= length <= self._max - _LENGTH.size:
                raise ProtocolError(f"a frame claims {length} bytes; 4 to {self._max - 4} are allowed")
            if len(self._data) < _LENGTH.size + length:
                break
            frame = bytes(self._data[_LENGTH.size : _LENGTH.size + length])
            del self._data[: _LENGTH.size + length]
            commands.append(decode(frame))
        return commands


def decode(frame: bytes) -> RemotingCommand:
    """A command from a frame without its length field. Raises ProtocolError."""
    if len(frame) < 4:
        raise ProtocolError(f"a frame of {len(frame)} bytes has no header length")
    (marked,) = struct.unpack_from(">I", frame)
    kind, header_length = marked >> 24, marked & 0xFFFFFF
    if header_length > len(frame) - 4:
        raise ProtocolError(f"a header of {header_length} bytes in a frame of {len(frame)}")
    header, body = frame[4 : 4 + header_length], frame[4 + header_length :]
    try:
        if kind == SerializeType.JSON:
            return _from_json(header, body)
        if kind == SerializeType.ROCKETMQ:
            return _from_binary(header, body)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        struct.error,
        RecursionError,
        CorruptionError,
    ) as error:
        raise ProtocolError(f"a header does not parse: {error}") from error
    raise ProtocolError(f"serialize type {kind} is unknown")


def _json_header(command: RemotingCommand) -> bytes:
    document: dict[str, Any] = {
        "code": command.code,
        "flag": command.flag,
        "language": command.language,
        "opaque": command.opaque,
        "serializeTypeCurrentRPC": "JSON",
        "version": command.version,
    }
    if command.remark is not None:
        document["remark"] = command.remark
    if command.ext_fields:
        document["extFields"] = dict(command.ext_fields)
    return json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()


def _from_json(header: bytes, body: bytes) -> RemotingCommand:
    document = fastjson.loads(header)
    if not isinstance(document, dict):
        raise ValueError("the header is no object")
    language = document.get("language", "OTHER")
    return RemotingCommand(
        code=_int32(document["code"]),
        opaque=_int32(document["opaque"]),
        flag=_int32(document.get("flag", 0)),
        language=_language(language) if isinstance(language, int) else str(language),
        version=_int32(document.get("version", 0)),
        remark=None if document.get("remark") is None else str(document["remark"]),
        ext_fields={str(k): _text(v) for k, v in (document.get("extFields") or {}).items() if v is not None},
        body=body,
        serialize_type=SerializeType.JSON,
    )


def _binary_header(command: RemotingCommand) -> bytes:
    if not -0x8000 <= command.code <= 0x7FFF:
        raise ValueError(f"code {command.code} does not fit the binary header")
    language = LANGUAGES.index(command.language)
    remark = b"" if command.remark is None else command.remark.encode()
    fields = b"".join(
        struct.pack(">h", len(key)) + key + struct.pack(">i", len(value)) + value
        for key, value in ((k.encode(), v.encode()) for k, v in command.ext_fields.items())
    )
    fixed = _FIXED.pack(command.code, language, command.version, command.opaque, command.flag)
    return fixed + _LENGTH.pack(len(remark)) + remark + _LENGTH.pack(len(fields)) + fields


def _from_binary(header: bytes, body: bytes) -> RemotingCommand:
    code, language, version, opaque, flag = _FIXED.unpack_from(header)
    remark, position = _piece(header, _FIXED.size, ">i")
    fields, _ = _piece(header, position, ">i")
    found: dict[str, str] = {}
    position = 0
    while position < len(fields):
        key, position = _piece(fields, position, ">h")
        value, position = _piece(fields, position, ">i")
        if value:
            found[key.decode()] = value.decode()
    return RemotingCommand(
        code=code,
        opaque=opaque,
        flag=flag,
        language=_language(language),
        version=version,
        remark=remark.decode() if remark else None,
        ext_fields=found,
        body=body,
        serialize_type=SerializeType.ROCKETMQ,
    )


def _piece(data: bytes, position: int, length_format: str) -> tuple[bytes, int]:
    (length,) = struct.unpack_from(length_format, data, position)
    begin = position + struct.calcsize(length_format)
    if not 0 <= length <= len(data) - begin:
        raise ValueError(f"a piece of {length} bytes where {len(data) - begin} are left")
    return data[begin : begin + length], begin + length


def _language(number: int) -> str:
    return LANGUAGES[number] if 0 <= number < len(LANGUAGES) else "OTHER"


def _int32(value: Any) -> int:
    number = int(value)
    if not -(1 << 31) <= number < 1 << 31:
        raise ValueError(f"{number} is no 32-bit number")
    return number


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return value if isinstance(value, str) else json.dumps(value)
