"""Arrow types of the columns: those that Spark uses for its own types."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from rocketmq_tiered.message_table.options.columns import CORRUPT_RECORD, INNER, SPARK_TYPES, Column
from tiered.formats.fields import INNER_FIELD_TABLE

_TYPES: dict[str, pa.DataType] = {
    "string": pa.string(), "int": pa.int32(), "bigint": pa.int64(), "boolean": pa.bool_(), "binary": pa.binary(),
    "timestamp": pa.timestamp("us", "UTC"),
    "map<string,string>": pa.map_(pa.string(), pa.field("value", pa.string(), nullable=False)),
}  # fmt: skip
_TYPES[INNER] = pa.list_(
    pa.field(
        "element", pa.struct([(item.name, _TYPES[SPARK_TYPES[item.kind]]) for item in INNER_FIELD_TABLE])
    )
)


def arrow_schema(columns: Sequence[Column]) -> pa.Schema:
    """The schema of ``columns``. With _corrupt_record all are nullable, as rows that report damage are mostly null."""
    reports = any(column.name == CORRUPT_RECORD for column in columns)
    return pa.schema([
        pa.field(column.name, _TYPES[column.spark_type], nullable=column.is_nullable or reports)
        for column in columns
    ])  # fmt: skip
