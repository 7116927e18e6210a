"""``read``: planned in the call, one task for each part, one copy in Spark, errors at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import parse_options
from rocketmq_tiered.message_table.plan.archive_plan import pinned_versions, plan
from rocketmq_tiered.spark import read
from rocketmq_tiered.spark.source.reading import frame_of_parts
from tests.end_to_end.offloading import CLUSTER
from tiered.errors import NotFoundError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

COLUMNS = ["topic", "queueId", "queueOffset"]


def _plan_text(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


@pytest.mark.integration
def test_spark_does_not_copy_rows_again(spark: SparkSession, small_archive: Path) -> None:
    frame = read(spark, f"file://{small_archive}")
    assert "MapInArrow ReadParts" in _plan_text(frame)
    assert "Project" not in _plan_text(frame)
    source = spark.read.format("rocketmq-tiered").load(f"file://{small_archive}")
    assert source.schema == frame.schema
    assert "Project" in _plan_text(source), "Spark now copies only once: one way to read is enough"


def test_wrong_options_and_names_fail_in_the_call(
    spark: SparkSession, small_archive: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="unknown option topics"):
        read(spark, f"file://{small_archive}", topics="t_sizes")
    for wrong in ({"startingOffsets": "latest"}, {"maxRowsPerTrigger": 5}, {"maxBytesPerTrigger": 5}):
        with pytest.raises(UsageError, match="to streams only"):
            read(spark, f"file://{small_archive}", **wrong)
        with pytest.raises(Exception, match="to streams only"):
            spark.read.format("rocketmq-tiered").options(**wrong).load(f"file://{small_archive}").count()
    with pytest.raises(NotFoundError, match="has no topic nothing"):
        read(spark, f"file://{small_archive}", topic="nothing")
    with pytest.raises(NotFoundError):
        read(spark, f"file://{tmp_path}")


def test_a_range_without_messages_is_an_empty_frame(spark: SparkSession, small_archive: Path) -> None:
    nothing = read(spark, f"file://{small_archive}", until="2020-01-01", columns=COLUMNS)
    assert nothing.columns == COLUMNS
    assert nothing.count() == 0


def test_credentials_are_not_shown(spark: SparkSession, small_archive: Path) -> None:
    keys = {"accessKey": "AKIA-shown-nowhere", "secretKey": "secret-shown-nowhere"}
    frame = read(spark, f"file://{small_archive}", columns=COLUMNS, **keys)
    frame.createOrReplaceTempView("with_keys")
    shown = spark.sql("EXPLAIN EXTENDED SELECT * FROM with_keys").collect()[0][0]
    assert "ReadParts" in shown
    assert "shown-nowhere" not in shown


def test_a_plan_of_more_than_a_megabyte_has_each_part_once(spark: SparkSession, small_archive: Path) -> None:
    """Spark ships what is so large in another way, once to each executor."""
    options = parse_options(
        {"path": f"file://{small_archive}", "topic": "t_sizes", "columns": ",".join(COLUMNS)}
    )
    columns = chosen(options.columns)
    parts = plan(options, pinned_versions(options), Predicate(), is_header_only=True)
    rows = frame_of_parts(spark, columns, [(options, part) for part in parts]).count()
    filler = tuple(f"{CLUSTER}-{number}" * 8 for number in range(20_000))
    large = replace(options, topics=filler)  # not used: the parts are given
    nothing = replace(large, until_ms=1)
    assert frame_of_parts(spark, columns, [(options, part) for part in parts * 3]).count() == 3 * rows > 0
    assert frame_of_parts(spark, columns, [(large, part) for part in parts * 3]).count() == 3 * rows
    assert frame_of_parts(spark, columns, [(nothing, part) for part in parts * 3]).count() == 0
