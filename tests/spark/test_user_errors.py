"""What users of Spark's own API meet: lists of paths, Kafka's options in a stream, errors in few lines."""

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession
from pyspark.sql.streaming import DataStreamReader

from tests.fetcher.broker_store_writer import WrittenStore
from tests.spark.conftest import archive_store

pytestmark = pytest.mark.integration
SOURCE = "rocketmq-tiered"


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two directories with an archive each, of the same broker name."""
    found = []
    for name in ("one", "two"):
        root = tmp_path_factory.mktemp(name)
        store = WrittenStore(root / "store")
        for number in range(5):
            store.put("orders", 0, f"{name} {number}".encode())
        archive_store(store.path, root / "archive", "a")
        found.append(str(root / "archive"))
    return found


def test_a_list_of_bare_paths(spark: SparkSession, roots: list[str]) -> None:
    frame = spark.read.format(SOURCE).option("columns", "body").load(roots)
    assert sorted(bytes(row["body"]) for row in frame.collect()) == sorted(
        f"{name} {number}".encode() for name in ("one", "two") for number in range(5)
    )


def rows_of_stream(stream: DataStreamReader, path: str, work: Path) -> list[int]:
    query = (
        stream.load(path)
        .writeStream.format("parquet")
        .option("checkpointLocation", str(work / "checkpoint"))
        .trigger(availableNow=True)
        .start(str(work / "rows"))
    )
    query.awaitTermination()
    return sorted(row["queueOffset"] for row in stream._spark.read.parquet(str(work / "rows")).collect())


def test_a_stream_with_the_options_of_kafka(spark: SparkSession, roots: list[str], tmp_path: Path) -> None:
    stream = spark.readStream.format(SOURCE).option("columns", "queueOffset")
    given = {"startingOffsets": json.dumps({"orders": {"0": 2}}), "maxOffsetsPerTrigger": "2"}
    assert rows_of_stream(stream.options(subscribe="orders", **given), roots[0], tmp_path) == [2, 3, 4]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"topic": "nowhere"}, "has no topic nowhere; tiered ls lists topics"),
        ({"tpic": "orders"}, "unknown option tpic"),
        ({"path": "/nowhere"}, "file:///nowhere has no archives"),
    ],
)
def test_an_error_has_no_trace(
    spark: SparkSession, roots: list[str], options: dict[str, str], words: str
) -> None:
    with pytest.raises(Exception) as failure:
        spark.read.format(SOURCE).options(**({"path": roots[0]} | options)).load().count()
    message = str(failure.value)
    assert words in message and message.strip().count("\n") <= 2, message


def test_an_unknown_topic_ends_a_stream(spark: SparkSession, roots: list[str], tmp_path: Path) -> None:
    stream = spark.readStream.format(SOURCE).option("subscribe", "orders,nowhere")
    with pytest.raises(Exception, match="has no topic nowhere") as failure:
        rows_of_stream(stream, roots[0], tmp_path)
    assert 'File "' not in str(failure.value)


def test_a_table_of_the_catalog_is_impossible(spark: SparkSession, roots: list[str]) -> None:
    with pytest.raises(Exception, match=r"CREATE TABLE is impossible.*use CREATE TEMPORARY VIEW"):
        spark.sql(f"CREATE TABLE orders USING `{SOURCE}` OPTIONS (path '{roots[0]}')")
