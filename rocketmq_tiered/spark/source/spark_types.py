"""Spark types of the columns, and the check of a user's schema."""

from __future__ import annotations

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from rocketmq_tiered.message_table.options.columns import (
    CORRUPT_RECORD,
    INNER,
    SPARK_TYPES,
    TIMESTAMP,
    Column,
    chosen,
)
from tiered.errors import UsageError
from tiered.formats.fields import INNER_FIELD_TABLE

_TYPES: dict[str, DataType] = {
    "string": StringType(),
    "int": IntegerType(),
    "bigint": LongType(),
    "boolean": BooleanType(),
    "binary": BinaryType(),
    "map<string,string>": MapType(StringType(), StringType(), valueContainsNull=False),
}
_TYPES[TIMESTAMP] = TimestampType()
_TYPES[INNER] = ArrayType(
    StructType([StructField(item.name, _TYPES[SPARK_TYPES[item.kind]]) for item in INNER_FIELD_TABLE])
)


def schema_of(columns: list[Column]) -> StructType:
    """The schema of ``columns``. With _corrupt_record all are nullable, as rows that report damage are mostly null."""
    reports = any(column.name == CORRUPT_RECORD for column in columns)
    return StructType(
        [
            StructField(column.name, _TYPES[column.spark_type], nullable=column.is_nullable or reports)
            for column in columns
        ]
    )


def columns_of(schema: StructType) -> list[Column]:
    """The columns of a schema. Raises UsageError for an unknown name or a wrong type."""
    columns = chosen(schema.fieldNames()) if schema.fieldNames() else []
    for field, column, own in zip(schema.fields, columns, schema_of(columns), strict=True):
        wanted = _TYPES[column.spark_type].simpleString()
        if field.dataType.simpleString() != wanted:
            raise UsageError(
                f"column {column.name} is {wanted}, not {field.dataType.simpleString()}",
                hint="cast it after reading",
            )
        if own.nullable and not field.nullable:
            raise UsageError(f"column {column.name} can be null", hint="remove NOT NULL from the schema")
    return columns
