"""The same ten questions of an archive, of its exports, and by Spark have the same answers.

Ten questions on two topics, `one` and `two`, in SQL of DuckDB and Spark alike, and who answers them.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import duckdb
import pytest
from pyiceberg.catalog import load_catalog
from pyspark.sql import DataFrame, SparkSession

import rocketmq_tiered
from rocketmq_tiered.cli import main
from rocketmq_tiered.maintenance.key_job import compact_keys
from rocketmq_tiered.spark import read
from rocketmq_tiered.sql.topic import TABLE_NAMES, snake_case
from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL, backfill
from tests.sweeps import sweep
from tiered.archive.rewrite.result import RewriteOptions
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import Settings

TOPICS = "t_sixteen", "t_keys"
Made = Callable[[str], tuple[str, tuple[str, str]]]


@pytest.fixture(scope="module")
def made(real_store: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory, orders: str) -> Made:
    """Name -> (URL of the archive, two topics)."""

    def make(name: str) -> tuple[str, tuple[str, str]]:
        if name == "orders":
            return orders, ("orders", "payments")
        root = tmp_path_factory.mktemp(f"questions-{name.replace(' ', '-')}-")
        url = f"file://{root}"
        backfill(real_store(name.split(maxsplit=1)[0]) / "store", FileStore(root), settings=SMALL)
        if name.endswith("expired and compacted"):
            _expire_half(url)
            assert main(["compact", url, "--apply", "--older-than", "1ms", "--json"]) == 0
        if name.endswith("key-compacted"):
            _compact_keys(root)
            return url, ("t_compact_hot", "t_plain")
        return url, TOPICS

    return make


def _expire_half(url: str) -> None:
    with rocketmq_tiered.open(url) as archive:
        median = archive.sql(f"SELECT median(store_timestamp)::BIGINT FROM {TOPICS[0]}")
        ttl_ms = time.time_ns() // 1_000_000 - median.fetchall()[0][0]
    rules = ("--set", f"retention.ttl={ttl_ms}ms", "--set", "retention.min_archived=1ms")
    assert main(["expire", url, *rules, "--apply", "--yes", "--json"]) == 0
    with rocketmq_tiered.open(url) as archive:
        assert any(one.min_offset > 0 for one in archive.queues(TOPICS[0]))


def _compact_keys(root: Path) -> None:
    store, settings = PrefixedStore(FileStore(root), archive_prefix(CLUSTER, BROKER)), Settings()
    own = replace(settings, key_compaction=replace(settings.key_compaction, min_age_ms=-(10**12)))
    options = RewriteOptions(root.parent / "spool", 1 << 30)
    report = compact_keys(
        store, load(store), own, options, lambda topic: topic == "t_compact_hot", apply=True
    )
    assert report.rounds


def _window(url: str, topic: str) -> tuple[str, str]:
    """The middle half of the topic's time."""
    with rocketmq_tiered.open(url) as archive:
        found = archive.sql(f'SELECT min(store_timestamp), max(store_timestamp) FROM "{topic}"')
        first, last = found.fetchall()[0]
    bounds = (first + (last - first) // 4, last - (last - first) // 4 + 1)
    since, until = (datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f") for ms in bounds)
    return since, until


@pytest.mark.parametrize(
    "name",
    sweep(
        ["orders", "H2 key-compacted", "A", "B", "C", "E", "E expired and compacted"],
        fast=["orders", "H2 key-compacted"],
        rest="integration",
    ),
)
def test_an_archive_and_its_exports_answer_alike(name: str, made: Made, tmp_path: Path) -> None:
    url, topics = made(name)
    since, until = _window(url, topics[0])
    expected = of_archive(url, topics, since, until)
    assert all(rows for question, rows in expected.items() if question != "top keys")
    assert expected["count"][0][0] > 100
    for form in ("parquet", "iceberg"):
        assert (
            main(
                [
                    "export",
                    url,
                    f"file://{tmp_path}/{form}",
                    "--format",
                    form,
                    "--json",
                    "--columns",
                    ",".join(COLUMNS),
                ]
            )
            == 0
        )
    files = sorted(map(str, (tmp_path / "parquet").rglob("*.parquet")))
    assert of_files(files, topics, since, until) == expected
    catalog = load_catalog("tiered", type="sql", uri=f"sqlite:///{tmp_path}/iceberg/catalog.db")
    scan = catalog.load_table("rocketmq.messages").scan()
    named = sorted(task.file.file_path.removeprefix("file://") for task in scan.plan_files())
    assert of_files(named, topics, since, until) == expected
    assert of_files(scan.to_arrow(), topics, since, until) == expected


@pytest.mark.integration
@pytest.mark.parametrize(
    "name", ["orders", "B", "C", "E", "E expired and compacted", "H2 key-compacted", "A"]
)
def test_spark_answers_like_duckdb(spark: SparkSession, name: str, made: Made, tmp_path: Path) -> None:
    url, topics = made(name)
    since, until = _window(url, topics[0])
    expected = of_archive(url, topics, since, until)
    columns = ("--columns", ",".join(COLUMNS))
    assert main(["export", url, f"file://{tmp_path}/iceberg", "--format", "iceberg", "--json", *columns]) == 0
    spark.conf.set("spark.sql.session.timeZone", "UTC")
    whole = [read(spark, url, topic=topic, columns=list(COLUMNS)) for topic in topics]
    files = spark.read.parquet(f"{tmp_path}/iceberg/data")
    for frames in (whole, [files.where(f"topic = '{topic}'") for topic in topics]):
        for view, frame in zip(("one", "two"), frames, strict=True):
            _view(frame, view)
        assert answers_of(lambda sql: spark.sql(sql).collect(), since, until) == expected


def _view(frame: DataFrame, view: str) -> None:
    names = [f"{name} AS {snake_case(name)}" for name in COLUMNS]
    frame.selectExpr(*names, f"get_json_object(text, '$.amount') AS {JSON}").createOrReplaceTempView(view)


JSON = "json_field"
"""A column of the tables: field `amount` of a JSON body."""
QUESTIONS = {
    "count": "SELECT count(*) FROM one",
    "by tag": "SELECT tags, count(*) AS n FROM two GROUP BY tags",
    "by queue": "SELECT queue_id, count(*), min(queue_offset), max(queue_offset), sum(store_size) FROM one GROUP BY 1",
    "window": "SELECT count(*), sum(store_size) FROM one "
    "WHERE store_time >= TIMESTAMP '{since}' AND store_time < TIMESTAMP '{until}'",
    "rates": "SELECT c, count(*) FROM "
    "(SELECT date_trunc('second', store_time) AS s, count(*) AS c FROM one GROUP BY 1) AS x GROUP BY c",
    "top keys": "SELECT keys, count(*) AS n FROM two WHERE keys IS NOT NULL GROUP BY keys "
    "ORDER BY n DESC, keys LIMIT 10",
    "join": "SELECT count(*), sum(b.store_size) FROM one AS a "
    "JOIN two AS b ON a.queue_offset = b.queue_offset AND a.queue_id = b.queue_id",
    "json": f"SELECT {JSON}, count(*) FROM one GROUP BY {JSON}",
    "properties": "SELECT properties['CLUSTER'] AS c, properties['TAGS'] AS t, count(*) FROM two GROUP BY 1, 2",
    "bodies": "SELECT min(octet_length(body)), sum(octet_length(body)), count(DISTINCT text), "
    "count(DISTINCT born_time) FROM one WHERE queue_id IN (0, 1, 2) AND (tags IS NULL OR tags <> 'R0')",
}
COLUMNS = (
    "queueId",
    "queueOffset",
    "storeTime",
    "bornTime",
    "storeSize",
    "tags",
    "keys",
    "properties",
    "body",
    "text",
    "topic",
)
"""What they need, in the message table's names."""
Answers = dict[str, list[tuple[Any, ...]]]


def answers_of(ask: Any, since: str, until: str) -> Answers:
    """The rows of each question, in an order of their own. ``ask``: SQL -> rows."""
    found = {name: ask(sql.format(since=since, until=until)) for name, sql in QUESTIONS.items()}
    return {name: sorted((tuple(row) for row in rows), key=repr) for name, rows in found.items()}


def of_archive(url: str, topics: tuple[str, str], since: str, until: str) -> Answers:
    """By `archive.sql`."""
    with rocketmq_tiered.open(url) as archive:
        session = archive.session()
        for view, topic in zip(("one", "two"), topics, strict=True):
            session.query(
                f"""CREATE TEMP VIEW {view} AS SELECT *, json->>'$.amount' AS {JSON} FROM "{topic}" """
            )

        def ask(sql: str) -> list[tuple[Any, ...]]:
            with session.errors():
                return session.execute(sql).fetchall()

        return answers_of(ask, since, until)


def of_files(source: Any, topics: tuple[str, str], since: str, until: str) -> Answers:
    """By DuckDB alone, on an Arrow table or names of Parquet files."""
    connection = duckdb.connect()
    connection.execute("SET TimeZone = 'UTC'")
    if isinstance(source, list):
        connection.read_parquet(source, hive_partitioning=True).create_view("rows")
    else:
        connection.register("rows", source)
    columns = ", ".join(f'"{table}" AS {name}' for name, table in TABLE_NAMES.items() if table in COLUMNS)
    field = f"CASE WHEN json_valid(text) THEN text->>'$.amount' END AS {JSON}"
    for view, topic in zip(("one", "two"), topics, strict=True):
        connection.execute(
            f"CREATE VIEW {view} AS SELECT {columns}, {field} FROM rows WHERE topic = '{topic}'"
        )
    return answers_of(lambda sql: connection.execute(sql).fetchall(), since, until)
