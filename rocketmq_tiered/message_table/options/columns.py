"""Columns of the message table: name, type, meaning, and what must be read for each."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tiered.errors import UsageError
from tiered.formats.fields import FIELD_TABLE, Field

SPARK_TYPES = {
    "string": "string",
    "hex": "string",
    "int32": "int",
    "int64": "bigint",
    "uint32": "bigint",
    "bool": "boolean",
    "map<string,string>": "map<string,string>",
}


class Cost(IntEnum):
    """What must be read for a column."""

    CATALOG = 0
    """Only the plan."""
    FOOTER = 1
    """The object's footer, no block."""
    RECORD = 2
    """The record's block."""
    BODY = 3
    """The record's block, and the body is decompressed."""


@dataclass(frozen=True)
class Column:
    """One column. ``is_nullable``: messages may lack it."""

    name: str
    spark_type: str
    cost: Cost
    meaning: str
    is_nullable: bool = True


DEFAULT_NAMES = (
    "cluster",
    "brokerName",
    "topic",
    "generation",
    "queueId",
    "queueOffset",
    "commitLogOffset",
    "storeSize",
    "storeTimestamp",
    "storeTime",
    "bornTimestamp",
    "bornTime",
    "bornHost",
    "storeHost",
    "sysFlag",
    "flag",
    "reconsumeTimes",
    "ptOffset",
    "tags",
    "keys",
    "uniqKey",
    "properties",
    "body",
    "bodyCRC",
    "bodyCrcOk",
    "recCrc32",
    "offsetMsgId",
)

CORRUPT_RECORD = "_corrupt_record"
CHANGE_TYPE = "_change_type"

NEVER_NULL = frozenset(
    {
        "cluster",
        "brokerName",
        "topic",
        "queueId",
        "queueOffset",
        "commitLogOffset",
        "storeSize",
        "storeTimestamp",
        "tagsCode",
        "innerNum",
        "bornTimestamp",
        "bornHost",
        "storeHost",
        "sysFlag",
        "flag",
        "reconsumeTimes",
        "ptOffset",
        "properties",
        CHANGE_TYPE,
        "bodyCRC",
        "bodyCrcOk",
        "recCrc32",
        "offsetMsgId",
        "magic",
    }
)
"""Columns that every message has. Spark checks each value of any other column for null, twice."""

_COSTS = {
    "cluster": Cost.CATALOG,
    "brokerName": Cost.CATALOG,
    "topic": Cost.CATALOG,
    "generation": Cost.CATALOG,
    "queueId": Cost.CATALOG,
    CORRUPT_RECORD: Cost.CATALOG,
    "queueOffset": Cost.FOOTER,
    "commitLogOffset": Cost.FOOTER,
    "storeSize": Cost.FOOTER,
    "storeTimestamp": Cost.FOOTER,
    "storeTime": Cost.FOOTER,
    "tagsCode": Cost.FOOTER,
    "innerNum": Cost.FOOTER,
    "body": Cost.BODY,
    "text": Cost.BODY,
    "bodyLen": Cost.BODY,
    "bodySha256": Cost.BODY,
    "inner": Cost.BODY,
}
_OWN_FIELDS = (
    Field("cluster", "string", "cluster of the archive"),
    Field("brokerName", "string", "broker of the archive"),
    Field(
        "generation",
        "int32",
        "generation of a deleted and recreated topic, from 0; null in a store directory",
    ),
    Field("tagsCode", "int64", "Java hash of the tags; the delivery time of a scheduled message"),
    Field(
        "innerNum", "int32", "how many queue offsets the row takes: 1, or the number of messages in a batch"
    ),
    Field("bodyCrcOk", "bool", "whether bodyCRC matches the stored body"),
    Field(CHANGE_TYPE, "string", "delete if the body is empty (a tombstone), else upsert"),
    Field(CORRUPT_RECORD, "string", "null, or the damage found here (mode PERMISSIVE)"),
)
TIMESTAMP = "timestamp"
INNER = "array<struct>"
"""Type of the column ``inner``, with the fields of INNER_FIELD_TABLE."""


def _column(field: Field) -> Column:
    spark_type = INNER if field.name == "inner" else SPARK_TYPES[field.kind]
    cost = _COSTS.get(field.name, Cost.RECORD)
    return Column(field.name, spark_type, cost, field.meaning, field.name not in NEVER_NULL)


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        *map(_column, (*_OWN_FIELDS, *FIELD_TABLE)),
        Column("body", "binary", Cost.BODY, "the decompressed body"),
        Column("text", "string", Cost.BODY, "the body as UTF-8; invalid bytes are replaced"),
        Column("storeTime", TIMESTAMP, Cost.FOOTER, "storeTimestamp as a time", is_nullable=False),
        Column("bornTime", TIMESTAMP, Cost.RECORD, "bornTimestamp as a time", is_nullable=False),
    )
}
"""All columns by name."""


def chosen(names: Sequence[str]) -> list[Column]:
    """The columns with these names, in this order; the default columns if ``names`` is empty. Raises UsageError for a
    name that is unknown or given twice."""
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise UsageError(f"unknown column {unknown[0]}", hint=f"columns: {', '.join(sorted(COLUMNS))}")
    if len(set(names)) < len(names):
        raise UsageError(f"columns has a name twice: {', '.join(names)}")
    return [COLUMNS[name] for name in names or DEFAULT_NAMES]


def cost_of(columns: Sequence[Column]) -> Cost:
    """The highest cost of ``columns``."""
    return max((column.cost for column in columns), default=Cost.CATALOG)
