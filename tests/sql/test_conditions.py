"""No condition loses or adds a row: random conditions on random tables, pushed down and on a copy of the table."""

from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql import SparkSession

import rocketmq_tiered
from rocketmq_tiered.spark import read
from rocketmq_tiered.sql import SqlSession
from rocketmq_tiered.sql.topic import snake_case
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.sql.conftest import STORED_MS
from tests.sweeps import sweep
from tiered.model.dates import DATES_BEGIN_MS, DATES_END_MS
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore

PART = 50
HOUR_MS = 3_600_000
TAGS = [
    "",
    "TagA",
    "taga",
    "x" * 300,
    "x" * 299 + "y",
    "标签" * 60,
    "标签" * 59 + "标",
    '"',
    'a",\n  "b',
    "it's",
    "\\",
    "(tags == 1) and",
    "null",
    " ",
    "\ufffd",
    "Aa",
    "BB",  # the hash of Aa
]
KEYS = ["k1", "k2", "k3", "键" * 50, "�"]
TIMES = [STORED_MS + hours * HOUR_MS + step for hours in (-24, 0, 1, 24) for step in (-1, 0, 1)]
STAMPS = [*TIMES, 0, -1, DATES_BEGIN_MS, DATES_BEGIN_MS - 1, DATES_END_MS, DATES_END_MS + 1, -(2**60), 2**60]
"""No checksum covers them: of those without a date the first or the last date is shown."""


def archive(path: Path, rng: Random) -> None:
    """Some objects with few rows of topic t."""
    builder = ArchiveBuilder(PrefixedStore(FileStore(path), "cluster/broker"))
    for _ in range(rng.randrange(1, 6)):
        tags, times = rng.sample(TAGS, rng.randrange(1, 6)), rng.sample(TIMES * 2 + STAMPS, 4)
        builder.commit(
            [
                Sent(
                    QueueKey("t", rng.randrange(4), 0),
                    rng.choice([b"", b"body", b"\xff" * 40]),
                    tags=rng.choice(tags),
                    keys=rng.sample(KEYS, rng.randrange(3)),
                    stored_ms=rng.choice(times),
                )
                for _ in range(rng.randrange(1, 30))
            ]
        )


def quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def time(rng: Random) -> str:
    ms = rng.choice([*TIMES, 0, DATES_BEGIN_MS, DATES_END_MS])
    micros = rng.choice(["", "", " + INTERVAL 1 MICROSECOND", " - INTERVAL 1 MICROSECOND"])
    return f"(make_timestamptz({ms * 1000}){micros})"


def value(rng: Random, column: str) -> str:
    texts = [quoted(text) for text in (*TAGS, *KEYS, "k1 k2", "none")]
    numbers = STAMPS if column == "store_timestamp" else [-1, 0, 1, 2, 3, 5, 20, 2**40, -(2**63), 2**63 - 1]
    return (
        time(rng)
        if column == "store_time"
        else str(rng.choice(texts if column in ("tags", "keys") else numbers))
    )


COLUMNS = [
    "tags",
    "tags",
    "store_time",
    "store_time",
    "store_timestamp",
    "queue_id",
    "queue_offset",
    "store_size",
    "keys",
]


def simple(rng: Random) -> str:
    column = rng.choice(COLUMNS)

    def one() -> str:
        return value(rng, column)

    kind = rng.randrange(9)
    if kind < 3:
        pair = [column, one()]
        rng.shuffle(pair)
        return f"{pair[0]} {rng.choice(['=', '=', '<>', '<', '<=', '>', '>='])} {pair[1]}"
    if kind == 3:
        values = [one() for _ in range(rng.choice([1, 2, 3, 30]))] + ["NULL"] * (rng.random() < 0.1)
        return f"{column} {rng.choice(['IN', 'IN', 'NOT IN'])} ({', '.join(values)})"
    if kind == 4:
        return f"{column} {rng.choice(['', 'NOT '])}BETWEEN {one()} AND {one()}"
    if kind == 5:
        return f"{column} IS {rng.choice(['', 'NOT '])}NULL"
    if kind == 6:
        return f"{column} IS {rng.choice(['', 'NOT '])}DISTINCT FROM {rng.choice([one(), 'NULL'])}"
    if kind == 7:
        not_ = rng.choice(["", "NOT "])
        return rng.choice(
            [
                f"store_time::DATE {rng.choice(['=', '<', '<=', '>', '>=', '<>'])} ({time(rng)})::DATE",
                f"CAST(t.store_time AS DATE) = CAST({time(rng)} AS DATE) + {rng.randrange(-1, 2)}",
                f"date_trunc('{rng.choice(['day', 'hour', 'minute'])}', store_time) = {time(rng)}",
                f"date_trunc('day', store_time) = ({time(rng)})::DATE",
                f"({time(rng)})::DATE {rng.choice(['=', '<', '>=', '<>'])} store_time::DATE",
                f"store_time::DATE {not_}BETWEEN ({time(rng)})::DATE AND {time(rng)}::DATE",
                f"store_time::DATE {not_}IN ({time(rng)}::DATE, {time(rng)}::DATE + 1)",
                f"extract(hour FROM store_time) = {rng.randrange(24)}",
            ]
        )
    return rng.choice(
        [
            f"starts_with(tags, {quoted(rng.choice(TAGS)[:3])})",
            f"length(tags) > {rng.randrange(3)}",
            f"tags LIKE {quoted(rng.choice(['x%', '%A', '%']))}",
            f"queue_offset % 2 = {rng.randrange(2)}",
            f"queue_id + 1 = {rng.randrange(5)}",
            f"lower(tags) = {quoted('taga')}",
            f"octet_length(body) {rng.choice(['=', '<'])} 4",
            f"coalesce(tags, 'none') = {quoted(rng.choice([*TAGS, 'none']))}",
            f"properties['KEYS'] = {quoted(rng.choice(KEYS))}",
            f"text = 'body' AND json IS {rng.choice(['', 'NOT '])}NULL",
            f"queue_offset IN (SELECT queue_offset FROM whole WHERE tags = {quoted(rng.choice(TAGS))})",
        ]
    )


def condition(rng: Random, depth: int = 3) -> str:
    kind = rng.random()
    if depth == 0 or kind < 0.4:
        return simple(rng)
    if kind < 0.55:
        return f"NOT ({condition(rng, depth - 1)})"
    parts = [f"({condition(rng, depth - 1)})" for _ in range(rng.randrange(2, 4))]
    return rng.choice([" AND ", " OR "]).join(parts)


@pytest.fixture(scope="module", params=sweep(range(100), fast=range(6)))
def table(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[int, SqlSession]]:
    """A seed, and a session whose table `whole` has all rows of t."""
    seed = int(request.param)
    path = tmp_path_factory.mktemp("table")
    archive(path, Random(seed))
    with rocketmq_tiered.open(path) as opened:
        opened.sql("CREATE TABLE whole AS SELECT * FROM t")
        yield seed, opened.session()


def test_a_condition_gives_the_rows_that_it_gives_on_a_copy(
    table: tuple[int, SqlSession], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them, and the last ones, which are looked for from the end."""
    monkeypatch.setattr("rocketmq_tiered.sql.session.END_ROWS", 1)
    seed, session = table
    rng = Random(1000 + seed)
    for number in range(PART):
        asked, by = condition(rng), rng.choice(["queue_offset", "store_time", "store_timestamp"])
        zone = rng.choice(["UTC", "Asia/Shanghai", "America/New_York"])
        session.execute(f"SET TimeZone = '{zone}'")
        for last in ("ALL", f"{by} DESC, queue_id, queue_offset LIMIT {rng.randrange(1, 6)}"):
            question = f" AS t WHERE {asked} ORDER BY {last}"
            found, wanted = (
                session.execute(f"SELECT queue_id, queue_offset FROM {source}{question}").fetchall()
                for source in (rng.choice(["t", "messages"]), "whole")
            )
            assert found == wanted, f"{number}: {zone}{question}"


def combined(rng: Random, simple: Callable[[Random], Any], depth: int = 3) -> Any:
    """A condition made of others, of Arrow or Spark."""
    kind = rng.random()
    if not depth or kind <= 0.4:
        return simple(rng)
    parts = [combined(rng, simple, depth - 1) for _ in range(2)]
    return ~parts[0] if kind < 0.55 else parts[0] & parts[1] if kind < 0.8 else parts[0] | parts[1]


def operands(rng: Random, column: str) -> list[Any]:
    choices = {"tags": TAGS, "keys": [*KEYS, "k1 k2"], "topic": ["t", "T"], "store_timestamp": TIMES}
    return rng.sample(choices.get(column, TIMES if column == "store_time" else [-1, 0, 1, 2, 5, 2**40]), 2)


def compared(field: Any, one: Any, values: Any) -> list[Any]:
    """Comparisons that Arrow and Spark write alike."""
    return [field == one, one != field, field < one, one >= field, field.isin(values)]


def of_arrow(rng: Random) -> pc.Expression:
    """A filter of one column."""
    column = rng.choice(
        ["tags", "keys", "store_time", "store_timestamp", "queue_id", "queue_offset", "topic"]
    )
    values = pa.array(operands(rng, column))
    values = values.cast(pa.timestamp("ms", "UTC")) if column == "store_time" else values
    field, one = pc.field(column), pc.scalar(values[0])
    made = [
        *compared(field, one, values),
        field.is_null(),
        field.is_valid(),
    ]
    return rng.choice(made)


def test_a_filter_of_arrow_gives_the_rows_that_it_gives_on_a_copy(
    table: tuple[int, SqlSession], tmp_path: Path
) -> None:
    rng = Random(2000 + table[0])
    archive(tmp_path, Random(table[0]))
    with rocketmq_tiered.open(tmp_path) as opened:
        topic = opened.topic("t")
        order = [("queue_id", "ascending"), ("queue_offset", "ascending")]
        whole = topic.to_arrow().read_all().drop_columns(["json"])
        for number in range(PART):
            asked = combined(rng, of_arrow)
            found = topic.to_arrow(filter=asked, columns=["queue_id", "queue_offset"]).read_all()
            wanted = whole.filter(asked).select(["queue_id", "queue_offset"])
            assert found.sort_by(order).equals(wanted.sort_by(order)), f"{number}: {asked}"


def of_spark(rng: Random) -> Any:
    """A condition on one column."""
    from pyspark.sql import functions as f

    column = rng.choice(
        [
            "tags",
            "tags",
            "keys",
            "storeTime",
            "storeTimestamp",
            "queueId",
            "queueOffset",
            "storeSize",
            "topic",
        ]
    )
    values = [f.lit(one) for one in operands(rng, snake_case(column))]
    values = list(map(f.timestamp_millis, values)) if column == "storeTime" else values
    field, one = f.col(column), values[0]
    made = [
        *compared(field, one, values),
        field.between(*values),
        field.eqNullSafe(one),
        field.isNull(),
        field.isNotNull(),
    ]
    if column == "storeTime":
        day = field.cast("date")
        made += [day == one.cast("date"), day > one.cast("date"), f.date_trunc("hour", field) == one]
    return rng.choice(made)


@pytest.mark.parametrize("seed", sweep(range(100), fast=[0]))
def test_a_condition_of_spark_gives_the_rows_that_it_gives_on_a_copy(
    seed: int, spark: SparkSession, tmp_path: Path
) -> None:
    """Conditions of one table are one job, as a union; those on the copy are columns of it."""
    from pyspark.sql import DataFrame
    from pyspark.sql import functions as f

    archive(tmp_path, Random(seed))
    rng, url = Random(3000 + seed), f"file://{tmp_path}"
    asked = [combined(rng, of_spark) for _ in range(PART)]
    place = ["queueId", "queueOffset"]
    columns = [*place, "tags", "keys", "storeTime", "storeTimestamp", "storeSize", "topic"]
    copy = read(spark, url, columns=columns).select(
        *place, *(f.coalesce(one, f.lit(False)).alias(f"c{number}") for number, one in enumerate(asked))
    )
    rows = copy.collect()
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    pushed = [
        read(spark, url, columns=columns, pushFilters=True).where(one).select(f.lit(number), *place)
        for number, one in enumerate(asked)
    ]
    found = sorted(map(tuple, reduce(DataFrame.union, pushed).collect()))
    spark.conf.unset("spark.sql.python.filterPushdown.enabled")
    wanted = sorted((number, *row[:2]) for number in range(PART) for row in rows if row[f"c{number}"])
    assert found == wanted, [str(asked[one[0]]) for one in set(found) ^ set(wanted)][:3]
