"""Ten questions on two topics, `one` and `two`, in SQL of DuckDB and Spark alike, and who answers them."""

from __future__ import annotations

from typing import Any

import duckdb

import rocketmq_tiered
from rocketmq_tiered.sql.topic import TABLE_NAMES

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
                return session.connection.execute(sql).fetchall()

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
