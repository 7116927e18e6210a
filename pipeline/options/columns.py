"""The columns of the data source: names and meaning of the one field table, and what each one costs to read.

Owns the table of columns and their Spark types as text. Imports no Spark. Decoding is in message_batches.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from tiered.errors import UsageError
from tiered.formats.fields import FIELD_TABLE, Field

SPARK_TYPES = {
    "string": "string", "hex": "string", "int32": "int", "int64": "bigint", "uint32": "bigint",
    "bool": "boolean", "map<string,string>": "map<string,string>",
}  # fmt: skip


class Cost(IntEnum):
    """What must be read for a column."""

    CATALOG = 0
    """Nothing but the plan."""
    FOOTER = 1
    """The object's footer: no block."""
    RECORD = 2
    """The block with the record."""
    BODY = 3
    """The record and its body, decompressed."""


@dataclass(frozen=True)
class Column:
    """One column. ``is_default``: part of the schema when no columns are named."""

    name: str
    spark_type: str
    cost: Cost
    meaning: str
    is_default: bool = False
    is_nullable: bool = True
    """Whether a message can be without it."""


DEFAULT_NAMES = (
    "cluster", "brokerName", "topic", "generation", "queueId", "queueOffset", "commitLogOffset", "storeSize",
    "storeTimestamp", "bornTimestamp", "bornHost", "storeHost", "sysFlag", "flag", "reconsumeTimes", "ptOffset",
    "tags", "keys", "uniqKey", "properties", "body", "bodyCRC", "bodyCrcOk", "recCrc32", "offsetMsgId",
)  # fmt: skip

CORRUPT_RECORD = "_corrupt_record"

NEVER_NULL = frozenset({
    "cluster", "brokerName", "topic", "queueId", "queueOffset", "commitLogOffset", "storeSize", "storeTimestamp",
    "tagsCode", "innerNum", "bornTimestamp", "bornHost", "storeHost", "sysFlag", "flag", "reconsumeTimes", "ptOffset",
    "properties", "bodyCRC", "bodyCrcOk", "recCrc32", "offsetMsgId", "magic",
})  # fmt: skip
"""What every message has. Spark asks for each value of any other column whether it is null, twice."""

_COSTS = {
    "cluster": Cost.CATALOG, "brokerName": Cost.CATALOG, "topic": Cost.CATALOG, "generation": Cost.CATALOG,
    "queueId": Cost.CATALOG, CORRUPT_RECORD: Cost.CATALOG,
    "queueOffset": Cost.FOOTER, "commitLogOffset": Cost.FOOTER, "storeSize": Cost.FOOTER,
    "storeTimestamp": Cost.FOOTER, "tagsCode": Cost.FOOTER, "innerNum": Cost.FOOTER,
    "body": Cost.BODY, "bodyLen": Cost.BODY, "bodySha256": Cost.BODY, "inner": Cost.BODY,
}  # fmt: skip
_OWN_FIELDS = (
    Field("cluster", "string", "cluster whose archive it is"),
    Field("brokerName", "string", "broker whose archive it is"),
    Field("generation", "int32", "life of a deleted and recreated topic, from 0; null in a store directory"),
    Field("tagsCode", "int64", "Java hash of the tags; of a scheduled message its deliver time"),
    Field("innerNum", "int32", "queue offsets the row spans: 1, or the messages of an inner batch"),
    Field("bodyCrcOk", "bool", "whether bodyCRC is that of the stored body"),
    Field(CORRUPT_RECORD, "string", "null, or what could not be read here (mode PERMISSIVE)"),
)
INNER = "array<struct>"
"""Type of the column ``inner``; its fields are those of INNER_FIELD_TABLE."""


def _column(field: Field) -> Column:
    spark_type = INNER if field.name == "inner" else SPARK_TYPES[field.kind]
    cost = _COSTS.get(field.name, Cost.RECORD)
    return Column(
        field.name, spark_type, cost, field.meaning, field.name in DEFAULT_NAMES, field.name not in NEVER_NULL
    )


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in (
        *map(_column, (*_OWN_FIELDS, *FIELD_TABLE)),
        Column("body", "binary", Cost.BODY, "the body, decompressed", is_default=True),
    )
}
"""Every column there is, by name."""


def chosen(names: Sequence[str]) -> list[Column]:
    """The columns of these names, in this order; without names the default ones. Raises UsageError."""
    unknown = [name for name in names if name not in COLUMNS]
    if unknown:
        raise UsageError(f"no column {unknown[0]!r}", hint=f"there are {', '.join(sorted(COLUMNS))}")
    if len(set(names)) < len(names):
        raise UsageError(f"a column is named twice: {', '.join(names)}")
    return [COLUMNS[name] for name in names or DEFAULT_NAMES]


def cost_of(columns: Sequence[Column]) -> Cost:
    """What must be read for all of them."""
    return max((column.cost for column in columns), default=Cost.CATALOG)
