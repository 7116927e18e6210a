"""The fields of a message as JSON, in order: name, type and meaning.

Documents, table schemas and ``record_to_json`` follow this table. Names are those of the Java client (MessageExt)
where it has one.
"""

from dataclasses import dataclass
from typing import Literal

FieldKind = Literal[
    "string", "int32", "int64", "uint32", "bool", "hex", "map<string,string>", "array<object>"
]


@dataclass(frozen=True)
class Field:
    """One field. ``optional``: absent unless it applies; ``nullable``: always present, null when not set."""

    name: str
    kind: FieldKind
    meaning: str
    nullable: bool = False
    optional: bool = False


FIELD_TABLE: tuple[Field, ...] = (
    Field("topic", "string", "topic of the queue the message was read from"),
    Field("queueId", "int32", "id of the queue the message was read from"),
    Field("queueOffset", "int64", "queue offset of the message there"),
    Field("commitLogOffset", "int64", "physical offset in the broker's commitlog"),
    Field("storeSize", "int32", "bytes of the stored record"),
    Field("storeTimestamp", "int64", "when the broker stored it, ms since the epoch"),
    Field("bornTimestamp", "int64", "when the producer made it, ms since the epoch"),
    Field("bornHost", "string", "address:port of the producer"),
    Field("storeHost", "string", "address:port of the broker"),
    Field(
        "sysFlag",
        "int32",
        "system flag: 1 compressed, 8 committed transaction, 16/32 IPv6 hosts, 128 inner batch",
    ),
    Field("flag", "int32", "the producer's own flag"),
    Field("reconsumeTimes", "int32", "how often it was delivered again"),
    Field("ptOffset", "int64", "prepared transaction offset"),
    Field("magic", "hex", "daa320a7, or daa320ab for topics over 127 bytes"),
    Field("tags", "string", "property TAGS", nullable=True),
    Field("keys", "string", "property KEYS, separated by spaces", nullable=True),
    Field("uniqKey", "string", "property UNIQ_KEY, the client's message id", nullable=True),
    Field("properties", "map<string,string>", "all properties, sorted by name"),
    Field("bodyCRC", "int32", "CRC-32 of the stored body, without its highest bit"),
    Field(
        "bodyLen", "int32", "bytes of the body, decompressed; null if it does not decompress", nullable=True
    ),
    Field("bodySha256", "hex", "SHA-256 of the body, decompressed", nullable=True),
    Field("offsetMsgId", "hex", "store host and physical offset: the broker's message id"),
    Field("recCrc32", "uint32", "CRC-32 of the whole stored record"),
    Field("wireBodyLen", "int32", "bytes of the stored body, if compressed", optional=True),
    Field("wireBodySha256", "hex", "SHA-256 of the stored body, if compressed", optional=True),
    Field("bodyDecompressedByClient", "bool", "true if the stored body is compressed", optional=True),
    Field("recTopic", "string", "the record's own topic, if it differs from topic (LMQs)", optional=True),
    Field("recQueueId", "int32", "the record's own queue id, if it differs from queueId", optional=True),
    Field(
        "recQueueOffset",
        "int64",
        "the record's own queue offset, if it differs from queueOffset",
        optional=True,
    ),
    Field(
        "nonConsecutive",
        "bool",
        "true if queue offsets are those in the records and need not be consecutive",
        optional=True,
    ),
    Field("inner", "array<object>", "messages of an inner batch", optional=True),
)
"""A message; see ``tiered.formats.record.record_to_json``."""

INNER_FIELD_TABLE: tuple[Field, ...] = (
    Field("queueOffset", "int64", "offset in the queue"),
    Field("tags", "string", "property TAGS", nullable=True),
    Field("keys", "string", "property KEYS", nullable=True),
    Field("uniqKey", "string", "property UNIQ_KEY", nullable=True),
    Field("properties", "map<string,string>", "all properties, sorted by name"),
    Field("bodyLen", "int32", "bytes of the body"),
    Field("bodySha256", "hex", "SHA-256 of the body"),
    Field("flag", "int32", "the producer's own flag"),
)
"""One message of an inner batch."""
