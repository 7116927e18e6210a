"""What the schema promises: columns that are never null, and what a schema of the user's may say."""

import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from rocketmq_tiered.message_table.batches.message_batches import read_partition
from rocketmq_tiered.message_table.options.columns import COLUMNS, CORRUPT_RECORD, NEVER_NULL, chosen
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import parse_options
from rocketmq_tiered.message_table.plan.archive_plan import pinned_versions, plan
from rocketmq_tiered.spark.source.data_source import columns_of, schema_of
from tiered.errors import UsageError


@pytest.mark.parametrize(
    ("archives", "rows_min"),
    [("small_archive", 7_000), pytest.param("all_archives", 300_000, marks=pytest.mark.integration)],
)
def test_not_null_columns_have_no_nulls(archives: str, rows_min: int, request: pytest.FixtureRequest) -> None:
    """Spark reads a null of such a column as whatever bytes are there: of ten real stores there is none."""
    path = request.getfixturevalue(archives)
    options = parse_options({"path": f"file://{path}", "batchBytes": "300000", "generation": "all"})
    columns = chosen(sorted(NEVER_NULL))
    schema = to_arrow_schema(schema_of(columns), timezone="UTC")
    assert not any(field.nullable for field in schema)
    rows = 0
    for part in plan(options, pinned_versions(options), Predicate(), is_header_only=False):
        for batch in read_partition(part, options, Predicate(), columns, schema):
            batch.validate(full=True)
            assert [name for name in NEVER_NULL if batch.column(name).null_count] == []
            rows += batch.num_rows
    assert rows > rows_min


def test_rows_that_report_damage_make_every_column_nullable() -> None:
    schema = schema_of(chosen(["topic", "queueOffset", CORRUPT_RECORD]))
    assert all(field.nullable for field in schema.fields)


def test_the_schema_of_the_default_columns_is_accepted_as_a_schema() -> None:
    columns = chosen(())
    assert columns_of(schema_of(columns)) == columns
    assert columns_of(StructType([StructField("queueOffset", LongType())])) == [COLUMNS["queueOffset"]]


def test_a_column_that_can_be_null_cannot_be_declared_otherwise() -> None:
    with pytest.raises(UsageError, match="column tags as NOT NULL, but it can be null"):
        columns_of(StructType([StructField("tags", StringType(), nullable=False)]))
