"""Encodes and decodes remoting commands, without I/O: JSON and ROCKETMQ headers.

    frame = length i32 | serialize type u8, header length u24 | header | body      (length counts all after itself)

An invalid frame is a ProtocolError: the connection is unusable, because the begin of the next frame is unknown.
Nothing is allocated for a frame before its length is checked, and the header has a limit of its own: it is parsed
before authentication.

Sources: RemotingCommand, RocketMQSerializable, NettyDecoder (FRAME_MAX_LENGTH).

Request and response codes of the remoting protocol.

Sources: org.apache.rocketmq.remoting.protocol.RequestCode of 4.9.7 to 5.5.0, ResponseCode, RemotingSysResponseCode.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import orjson

from tiered.errors import CorruptionError, UnavailableError
from tiered.formats import fastjson

RequestCode = IntEnum(
    "RequestCode",
    {
        "SEND_MESSAGE": 10,
        "PULL_MESSAGE": 11,
        "QUERY_MESSAGE": 12,
        "QUERY_BROKER_OFFSET": 13,
        "QUERY_CONSUMER_OFFSET": 14,
        "UPDATE_CONSUMER_OFFSET": 15,
        "UPDATE_AND_CREATE_TOPIC": 17,
        "UPDATE_AND_CREATE_TOPIC_LIST": 18,
        "GET_ALL_TOPIC_CONFIG": 21,
        "GET_TOPIC_CONFIG_LIST": 22,
        "GET_TOPIC_NAME_LIST": 23,
        "UPDATE_BROKER_CONFIG": 25,
        "GET_BROKER_CONFIG": 26,
        "TRIGGER_DELETE_FILES": 27,
        "GET_BROKER_RUNTIME_INFO": 28,
        "SEARCH_OFFSET_BY_TIMESTAMP": 29,
        "GET_MAX_OFFSET": 30,
        "GET_MIN_OFFSET": 31,
        "GET_EARLIEST_MSG_STORETIME": 32,
        "VIEW_MESSAGE_BY_ID": 33,
        "HEART_BEAT": 34,
        "UNREGISTER_CLIENT": 35,
        "CONSUMER_SEND_MSG_BACK": 36,
        "END_TRANSACTION": 37,
        "GET_CONSUMER_LIST_BY_GROUP": 38,
        "CHECK_TRANSACTION_STATE": 39,
        "NOTIFY_CONSUMER_IDS_CHANGED": 40,
        "LOCK_BATCH_MQ": 41,
        "UNLOCK_BATCH_MQ": 42,
        "GET_ALL_CONSUMER_OFFSET": 43,
        "GET_ALL_DELAY_OFFSET": 45,
        "CHECK_CLIENT_CONFIG": 46,
        "GET_CLIENT_CONFIG": 47,
        "UPDATE_AND_CREATE_ACL_CONFIG": 50,
        "DELETE_ACL_CONFIG": 51,
        "GET_BROKER_CLUSTER_ACL_INFO": 52,
        "UPDATE_GLOBAL_WHITE_ADDRS_CONFIG": 53,
        "GET_BROKER_CLUSTER_ACL_CONFIG": 54,
        "GET_TIMER_CHECK_POINT": 60,
        "GET_TIMER_METRICS": 61,
        "PUT_KV_CONFIG": 100,
        "GET_KV_CONFIG": 101,
        "DELETE_KV_CONFIG": 102,
        "REGISTER_BROKER": 103,
        "UNREGISTER_BROKER": 104,
        "GET_ROUTEINFO_BY_TOPIC": 105,
        "GET_BROKER_CLUSTER_INFO": 106,
        "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP": 200,
        "GET_ALL_SUBSCRIPTIONGROUP_CONFIG": 201,
        "GET_TOPIC_STATS_INFO": 202,
        "GET_CONSUMER_CONNECTION_LIST": 203,
        "GET_PRODUCER_CONNECTION_LIST": 204,
        "WIPE_WRITE_PERM_OF_BROKER": 205,
        "GET_ALL_TOPIC_LIST_FROM_NAMESERVER": 206,
        "DELETE_SUBSCRIPTIONGROUP": 207,
        "GET_CONSUME_STATS": 208,
        "SUSPEND_CONSUMER": 209,
        "RESUME_CONSUMER": 210,
        "RESET_CONSUMER_OFFSET_IN_CONSUMER": 211,
        "RESET_CONSUMER_OFFSET_IN_BROKER": 212,
        "ADJUST_CONSUMER_THREAD_POOL": 213,
        "WHO_CONSUME_THE_MESSAGE": 214,
        "DELETE_TOPIC_IN_BROKER": 215,
        "DELETE_TOPIC_IN_NAMESRV": 216,
        "REGISTER_TOPIC_IN_NAMESRV": 217,
        "GET_KVLIST_BY_NAMESPACE": 219,
        "RESET_CONSUMER_CLIENT_OFFSET": 220,
        "GET_CONSUMER_STATUS_FROM_CLIENT": 221,
        "INVOKE_BROKER_TO_RESET_OFFSET": 222,
        "INVOKE_BROKER_TO_GET_CONSUMER_STATUS": 223,
        "GET_TOPICS_BY_CLUSTER": 224,
        "UPDATE_AND_CREATE_SUBSCRIPTIONGROUP_LIST": 225,
        "QUERY_TOPIC_CONSUME_BY_WHO": 300,
        "REGISTER_FILTER_SERVER": 301,
        "REGISTER_MESSAGE_FILTER_CLASS": 302,
        "QUERY_CONSUME_TIME_SPAN": 303,
        "GET_SYSTEM_TOPIC_LIST_FROM_NS": 304,
        "GET_SYSTEM_TOPIC_LIST_FROM_BROKER": 305,
        "CLEAN_EXPIRED_CONSUMEQUEUE": 306,
        "GET_CONSUMER_RUNNING_INFO": 307,
        "QUERY_CORRECTION_OFFSET": 308,
        "CONSUME_MESSAGE_DIRECTLY": 309,
        "SEND_MESSAGE_V2": 310,
        "GET_UNIT_TOPIC_LIST": 311,
        "GET_HAS_UNIT_SUB_TOPIC_LIST": 312,
        "GET_HAS_UNIT_SUB_UNUNIT_TOPIC_LIST": 313,
        "CLONE_GROUP_OFFSET": 314,
        "VIEW_BROKER_STATS_DATA": 315,
        "CLEAN_UNUSED_TOPIC": 316,
        "GET_BROKER_CONSUME_STATS": 317,
        "UPDATE_NAMESRV_CONFIG": 318,
        "GET_NAMESRV_CONFIG": 319,
        "SEND_BATCH_MESSAGE": 320,
        "QUERY_CONSUME_QUEUE": 321,
        "QUERY_DATA_VERSION": 322,
        "RESUME_CHECK_HALF_MESSAGE": 323,
        "SEND_REPLY_MESSAGE": 324,
        "SEND_REPLY_MESSAGE_V2": 325,
        "PUSH_REPLY_MESSAGE_TO_CLIENT": 326,
        "ADD_WRITE_PERM_OF_BROKER": 327,
        "GET_ALL_PRODUCER_INFO": 328,
        "DELETE_EXPIRED_COMMITLOG": 329,
        "QUERY_TOPICS_BY_CONSUMER": 343,
        "QUERY_SUBSCRIPTION_BY_CONSUMER": 345,
        "GET_TOPIC_CONFIG": 351,
        "GET_SUBSCRIPTIONGROUP_CONFIG": 352,
        "UPDATE_AND_GET_GROUP_FORBIDDEN": 353,
        "CHECK_ROCKSDB_CQ_WRITE_PROGRESS": 354,
        "EXPORT_ROCKSDB_CONFIG_TO_JSON": 355,
        "LITE_PULL_MESSAGE": 361,
        "RECALL_MESSAGE": 370,
        "QUERY_ASSIGNMENT": 400,
        "SET_MESSAGE_REQUEST_MODE": 401,
        "GET_ALL_MESSAGE_REQUEST_MODE": 402,
        "UPDATE_AND_CREATE_STATIC_TOPIC": 513,
        "GET_BROKER_MEMBER_GROUP": 901,
        "ADD_BROKER": 902,
        "REMOVE_BROKER": 903,
        "BROKER_HEARTBEAT": 904,
        "NOTIFY_MIN_BROKER_ID_CHANGE": 905,
        "EXCHANGE_BROKER_HA_INFO": 906,
        "GET_BROKER_HA_STATUS": 907,
        "RESET_MASTER_FLUSH_OFFSET": 908,
        "CONTROLLER_ALTER_SYNC_STATE_SET": 1001,
        "CONTROLLER_ELECT_MASTER": 1002,
        "CONTROLLER_REGISTER_BROKER": 1003,
        "CONTROLLER_GET_REPLICA_INFO": 1004,
        "CONTROLLER_GET_METADATA_INFO": 1005,
        "CONTROLLER_GET_SYNC_STATE_DATA": 1006,
        "GET_BROKER_EPOCH_CACHE": 1007,
        "NOTIFY_BROKER_ROLE_CHANGED": 1008,
        "UPDATE_CONTROLLER_CONFIG": 1009,
        "GET_CONTROLLER_CONFIG": 1010,
        "CLEAN_BROKER_DATA": 1011,
        "CONTROLLER_GET_NEXT_BROKER_ID": 1012,
        "CONTROLLER_APPLY_BROKER_ID": 1013,
        "UPDATE_COLD_DATA_FLOW_CTR_CONFIG": 2001,
        "REMOVE_COLD_DATA_FLOW_CTR_CONFIG": 2002,
        "GET_COLD_DATA_FLOW_CTR_INFO": 2003,
        "SET_COMMITLOG_READ_MODE": 2004,
        "AUTH_CREATE_USER": 3001,
        "AUTH_UPDATE_USER": 3002,
        "AUTH_DELETE_USER": 3003,
        "AUTH_GET_USER": 3004,
        "AUTH_LIST_USER": 3005,
        "AUTH_CREATE_ACL": 3006,
        "AUTH_UPDATE_ACL": 3007,
        "AUTH_DELETE_ACL": 3008,
        "AUTH_GET_ACL": 3009,
        "AUTH_LIST_ACL": 3010,
        "SWITCH_TIMER_ENGINE": 5001,
        "POP_MESSAGE": 200_050,
        "ACK_MESSAGE": 200_051,
        "PEEK_MESSAGE": 200_052,
        "CHANGE_MESSAGE_INVISIBLETIME": 200_053,
        "NOTIFICATION": 200_054,
        "POLLING_INFO": 200_055,
        "POP_ROLLBACK": 200_056,
        "POP_LITE_MESSAGE": 200_070,
        "LITE_SUBSCRIPTION_CTL": 200_071,
        "ACK_LITE_MESSAGE": 200_072,
        "NOTIFY_UNSUBSCRIBE_LITE": 200_073,
        "GET_BROKER_LITE_INFO": 200_074,
        "GET_PARENT_TOPIC_INFO": 200_075,
        "GET_LITE_TOPIC_INFO": 200_076,
        "GET_LITE_CLIENT_INFO": 200_077,
        "GET_LITE_GROUP_INFO": 200_078,
        "TRIGGER_LITE_DISPATCH": 200_079,
        "BATCH_ACK_MESSAGE": 200_151,
    },
)
"""Sent by clients, tools, brokers and proxies: every one that a version knows, so that messages name each."""


def request_name(code: int) -> str:
    """The name of a request code, or its number if no version has it."""
    return RequestCode(code).name if code in _KNOWN else f"code {code}"


_KNOWN = frozenset(map(int, RequestCode))


class ResponseCode(IntEnum):
    """Sent in replies."""

    SUCCESS = 0
    SYSTEM_ERROR = 1
    SYSTEM_BUSY = 2
    REQUEST_CODE_NOT_SUPPORTED = 3
    FLUSH_DISK_TIMEOUT = 10
    SLAVE_NOT_AVAILABLE = 11
    FLUSH_SLAVE_TIMEOUT = 12
    MESSAGE_ILLEGAL = 13
    SERVICE_NOT_AVAILABLE = 14
    NO_PERMISSION = 16
    TOPIC_NOT_EXIST = 17
    PULL_NOT_FOUND = 19
    PULL_RETRY_IMMEDIATELY = 20
    PULL_OFFSET_MOVED = 21
    QUERY_NOT_FOUND = 22
    SUBSCRIPTION_PARSE_FAILED = 23
    SUBSCRIPTION_NOT_EXIST = 24
    SUBSCRIPTION_GROUP_NOT_EXIST = 26
    CONSUMER_NOT_ONLINE = 206
    NO_MESSAGE = 208
    POLLING_TIMEOUT = 210


STORED = (
    ResponseCode.SUCCESS,
    ResponseCode.FLUSH_DISK_TIMEOUT,
    ResponseCode.SLAVE_NOT_AVAILABLE,
    ResponseCode.FLUSH_SLAVE_TIMEOUT,
)
"""Of a reply to a sent message: the broker has it, perhaps not yet on disk or at a slave."""


FRAME_BYTES_MAX = 16 * 1024 * 1024
"""Including the length field itself."""
HEADER_BYTES_MAX = 256 * 1024
"""The longest headers contain a message's properties, 32,767 characters, each encoded as up to six."""
HEADER_FIELDS_MAX = 512
"""The request with the most fields, SEND_MESSAGE, has fewer than 30."""
HEADER_VALUES_MAX = 65_536
"""Limit of the commas in a header, those in the properties included: a list that is two bytes long in JSON takes much
more memory, and time, when it is parsed."""
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
"""Kept as names of this module, because looking them up in the enumeration costs as much as a call."""


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
    """The bytes of the frame of ``command`` up to its body, which has ``body_bytes``. Raises ValueError for values that
    the encoding does not support, or if the frame is too large."""
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
    """The bytes, up to the body of ``body_bytes``, of the frame of a response to ``request``. It has the encoding of
    the request. No RemotingCommand is made for the common encoding: servers spend much of their time here."""
    if request.serialize_type == _JSON:
        header = _json_header(code, _RESPONSE, "PYTHON", request.opaque, version, remark, ext_fields)
        return _framed(header, body_bytes, _JSON)
    answer = RemotingCommand(
        code, request.opaque, _RESPONSE, "PYTHON", version, remark, ext_fields, b"", _ROCKETMQ
    )
    return _framed(_binary_header(answer), body_bytes, _ROCKETMQ)


def _framed(header: bytes, body_bytes: int, kind: SerializeType) -> bytes:
    """The lengths that begin a frame, and the header. Raises ValueError if the frame with its body is too large."""
    header_bytes = len(header)
    length = 4 + header_bytes + body_bytes
    if length + 4 > FRAME_BYTES_MAX or header_bytes >= 1 << 24:
        raise ValueError(
            f"the frame has {length + 4} bytes, more than the {FRAME_BYTES_MAX} that clients accept"
        )
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
        """Add received bytes, and return an iterator over the commands that are complete now. It must be consumed
        before the next call. It raises ProtocolError at an invalid frame, after the commands before it."""
        self.push(data)
        return iter(self.pop, None)

    def forget(self) -> None:
        """Discard buffered bytes."""
        self._data, self._at = b"", 0

    def push(self, data: bytes) -> None:
        """Add received ``data`` behind the bytes that are not decoded yet. If there are none, nothing is copied."""
        buffered = self._data
        if self._at == len(buffered):
            self._data = data
        else:
            if not isinstance(buffered, bytearray):
                buffered = self._data = bytearray(buffered)
            del buffered[: self._at]
            buffered += data
        self._at = 0

    def only(self, data: bytes) -> RemotingCommand | None:
        """The command of ``data`` if that is exactly one frame and no bytes are buffered, as from clients that wait for
        each response. Otherwise returns None, and ``data`` has to be added by ``push``. Raises ProtocolError for an
        invalid frame."""
        if self._at != len(self._data) or len(data) < 8:
            return None
        (length,) = _LENGTH.unpack_from(data)
        if length + 4 != len(data) or length > self._max - 4:
            return None
        return decode(data[4:])

    def pop(self) -> RemotingCommand | None:
        """Take the next command out of the buffered bytes; None if none is complete. Raises ProtocolError for an
        invalid frame."""
        data, at = self._data, self._at
        left = len(data) - at
        if left < 4:
            return None
        (length,) = _LENGTH.unpack_from(data, at)
        if not 4 <= length <= self._max - 4:
            raise ProtocolError(f"the frame's length, {length}, is not between 4 and {self._max - 4}")
        if left < 4 + length:
            return None
        end = self._at = at + 4 + length
        frame = data[at + 4 : end]
        if end == len(data):
            self._data, self._at = b"", 0
        return decode(frame if type(frame) is bytes else bytes(frame))


def decode(frame: bytes) -> RemotingCommand:
    """The command that ``frame`` contains, without its length field. Raises ProtocolError for an invalid one."""
    if len(frame) < 4:
        raise ProtocolError(
            f"a remoting command of {len(frame)} bytes is too short for the length of its header"
        )
    (lengths,) = _LENGTHS.unpack_from(frame)
    kind, header_end = lengths >> 24, 4 + (lengths & 0xFFFFFF)
    if header_end > len(frame):
        raise ProtocolError(f"a header of {header_end - 4} bytes is longer than its frame of {len(frame)}")
    if header_end - 4 > HEADER_BYTES_MAX:
        raise ProtocolError(f"a header of {header_end - 4} bytes exceeds the limit of {HEADER_BYTES_MAX}")
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
        raise ProtocolError(f"the frame's header is malformed: {error}") from error
    raise ProtocolError(f"the frame's serialize type, {kind}, is unknown")


def parse_json(text: bytes, values_max: int) -> Any:
    """The value of a received header or body of at most ``values_max`` values. Raises CorruptionError."""
    if len(text) > values_max and text.count(b",") >= values_max:
        raise CorruptionError(f"the JSON has more than {values_max} values")
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
    """A command's header as JSON. Its members are sorted by name, as fastjson, RocketMQ's library, writes them: its
    parser is fastest then."""
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
    """The command that a JSON ``header`` and ``body`` make; ``frame_bytes``: the size of its frame. Raises ValueError
    for an invalid header, also for one that has a name twice: one reader would take the first value, another the
    last."""
    document = parse_json(header, HEADER_VALUES_MAX)
    if not isinstance(document, dict):
        raise ValueError("the header is not a JSON object")
    get = document.get
    fields = get("extFields") or {}
    if not isinstance(fields, dict):
        raise ValueError("extFields is not a JSON object")
    if len(fields) > HEADER_FIELDS_MAX:
        raise ValueError(f"the header has {len(fields)} fields, more than {HEADER_FIELDS_MAX}")
    texts = [value for part in (document, fields) for value in part.values() if type(value) is str]
    # A name that is there twice is once in the parsed document: then quotes are left over.
    quotes = header.count(b'"') - 2 * (len(document) + len(fields) + len(texts))
    if quotes > 0 and quotes > sum(text.count('"') for text in (*document, *fields, *texts)):
        raise ValueError("a field's name occurs twice")
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
    """The header of ``command`` in RocketMQ's binary form. Raises ValueError for values that JSON has but this form has
    not."""
    if not -0x8000 <= command.code <= 0x7FFF:
        raise ValueError(f"code {command.code} does not fit into the 16 bits of the binary header")
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
    """The command that a ``header`` in RocketMQ's binary form and ``body`` make; ``frame_bytes``: the size of its
    frame. Raises ValueError or struct.error for an invalid header."""
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
    """The fields of a binary header by name. A field with an empty value is left away, as RocketMQ reads it as none.
    Raises ValueError for lengths that do not fit, too many fields, and a name that occurs twice."""
    found: dict[bytes, bytes] = {}
    size, position, count = len(fields), 0, 0
    while position < size:
        (length,) = _SHORT.unpack_from(fields, position)
        position += 2
        end = position + length
        if length < 0 or end > size:
            raise ValueError(f"a field's name has {length} bytes, but only {size - position} are left")
        key = fields[position:end]
        value, position = _piece(fields, end)
        count += 1
        if count > HEADER_FIELDS_MAX:
            raise ValueError(f"the header has more than {HEADER_FIELDS_MAX} fields")
        if key in found:
            raise ValueError("a field's name occurs twice")
        found[key] = value
    return {key.decode(): value.decode() for key, value in found.items() if value}


def _piece(data: bytes, position: int) -> tuple[bytes, int]:
    """The value at ``position``, which begins with its length, and where it ends. Raises ValueError if the data are
    shorter."""
    (length,) = _LENGTH.unpack_from(data, position)
    begin = position + 4
    end = begin + length
    if length < 0 or end > len(data):
        raise ValueError(f"a value has {length} bytes, but only {len(data) - begin} are left")
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
