"""Spark's types of the columns, and the check of a schema that a user gives."""

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
)

from pipeline.columns import INNER, SPARK_TYPES, Column, chosen
from tiered.errors import UsageError
from tiered.formats.fields import INNER_FIELD_TABLE

_TYPES: dict[str, DataType] = {
    "string": StringType(), "int": IntegerType(), "bigint": LongType(), "boolean": BooleanType(),
    "binary": BinaryType(), "map<string,string>": MapType(StringType(), StringType()),
}  # fmt: skip
_TYPES[INNER] = ArrayType(
    StructType([StructField(item.name, _TYPES[SPARK_TYPES[item.kind]]) for item in INNER_FIELD_TABLE])
)


def schema_of(columns: list[Column]) -> StructType:
    """The schema of these columns."""
    return StructType([StructField(column.name, _TYPES[column.spark_type]) for column in columns])


def columns_of(schema: StructType) -> list[Column]:
    """The columns of a schema. Raises UsageError for an unknown name, or a type that is not the column's."""
    columns = chosen(schema.fieldNames()) if schema.fieldNames() else []
    for field, column in zip(schema.fields, columns, strict=True):
        if field.dataType != _TYPES[column.spark_type]:
            wanted = _TYPES[column.spark_type].simpleString()
            raise UsageError(
                f"column {column.name} is {wanted}, not {field.dataType.simpleString()}",
                hint="cast it afterwards",
            )
    return columns
