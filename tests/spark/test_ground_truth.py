"""Every message of every real store as a DataFrame row, field by field, through Spark and without it."""

from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from rocketmq_tiered.spark import read
from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import FILTER
from tests.spark.conftest import STORES
from tests.spark.plain_read import read_without_spark
from tests.spark.row_truth import EVERY_COLUMN, differences, rows_by_place
from tests.sweeps import sweep

pytestmark = pytest.mark.integration

SPARK_COLUMNS = [
    "brokerName",
    "topic",
    "queueId",
    "queueOffset",
    "commitLogOffset",
    "tags",
    "properties",
    "bodySha256",
    "recCrc32",
]


@pytest.mark.parametrize("name", sweep(STORES, fast=["D", "H2", "K"], rest="integration"))
def test_every_field_of_every_message_equals_the_truth(
    name: str, archive_of: Callable[[str], Path], real_store: Callable[[str], Path]
) -> None:
    options = {
        "path": f"file://{archive_of(name)}",
        "broker": name,
        "batchBytes": "500000",
        "partitionBytes": "2000000",
    }
    rows = rows_by_place(read_without_spark(options, EVERY_COLUMN))
    truth = load_truth(real_store(name), name, FILTER)
    compared = 0
    for (topic, queue_id), lines in truth.queues.items():
        for line in lines:
            row = rows.pop((name, topic, queue_id, line["queueOffset"]))
            assert differences(row, line) == {}, line
            assert row["bodyCrcOk"]
            compared += 1
    assert compared == truth.messages > 200
    assert {topic for _, topic, _, _ in rows} <= truth.compaction_topics


@pytest.mark.parametrize("name", sweep(["B", "D", "G", "K"], fast=["D", "K"], rest="integration"))
def test_a_store_directory_reads_like_its_archive(name: str, real_store: Callable[[str], Path]) -> None:
    store = real_store(name)
    options = {"path": str(store / "store"), "source": "store", "broker": name, "batchBytes": "300000"}
    rows = rows_by_place(read_without_spark(options, EVERY_COLUMN))
    truth = load_truth(store, name, FILTER)
    for (topic, queue_id), lines in truth.queues.items():
        for line in lines:
            row = rows.pop((name, topic, queue_id, line["queueOffset"]))
            line.pop("nonConsecutive", None)  # the log alone does not say which queues are BatchCQ
            assert differences(row, line) == {}, line
            assert row["generation"] is None
    assert {place[1] for place in rows} <= truth.compaction_topics, "deleted topics are not read"


@pytest.mark.integration
@pytest.mark.parametrize("way", ["read", "spark.read"])
def test_the_dataframe_of_all_stores_equals_the_truth(
    spark: SparkSession, all_archives: Path, real_store: Callable[[str], Path], way: str
) -> None:
    if way == "read":
        frame = read(spark, f"file://{all_archives}", columns=SPARK_COLUMNS)
    else:
        reader = spark.read.format("rocketmq-tiered").option("columns", ",".join(SPARK_COLUMNS))
        frame = reader.load(f"file://{all_archives}")
    rows = rows_by_place(frame.toArrow().to_batches())
    for name in STORES:
        for (topic, queue_id), lines in load_truth(real_store(name), name, FILTER).queues.items():
            for line in lines:
                row = rows.pop((name, topic, queue_id, line["queueOffset"]))
                wanted = {field: value for field, value in line.items() if field in SPARK_COLUMNS}
                assert differences(row, wanted) == {}, line


def test_a_plain_session_reads_without_push_down(spark: SparkSession, small_archive: Path) -> None:
    setting = "spark.sql.python.filterPushdown.enabled"
    reader = spark.read.format("rocketmq-tiered").options(topic="t_sizes", pushFilters="true")
    assert spark.conf.get(setting) == "true"
    pushed = reader.load(f"file://{small_archive}").where("queueId = 1").count()
    spark.conf.set(setting, "false")
    try:
        assert reader.load(f"file://{small_archive}").where("queueId = 1").count() == pushed > 0
    finally:
        spark.conf.set(setting, "true")


def test_a_schema_chooses_columns(spark: SparkSession, small_archive: Path) -> None:
    reader = spark.read.format("rocketmq-tiered").schema("queueOffset bigint, body binary, topic string")
    frame = reader.load(f"file://{small_archive}")
    assert frame.columns == ["queueOffset", "body", "topic"]
    assert frame.where("topic = 't_sizes' and length(body) = 4096").count() > 0
    wrong = spark.read.format("rocketmq-tiered").schema("queueOffset string").load(f"file://{small_archive}")
    with pytest.raises(Exception, match="column queueOffset as string, but it is bigint"):
        wrong.count()


def test_a_store_directory_as_a_dataframe(spark: SparkSession, real_store: Callable[[str], Path]) -> None:
    store = real_store("K") / "store"
    frame = read(spark, str(store), source="store", topic="t_sizes", columns=["queueId", "bodyCrcOk"])
    assert frame.where("bodyCrcOk").groupBy("queueId").count().count() > 1
