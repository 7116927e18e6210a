"""Conditions on the day of a time and the ranges written beside them, by DuckDB alone."""

from typing import Any

import duckdb
import orjson
import pytest

from rocketmq_tiered.sql.statement_tree import add_ranges
from tests.sweeps import sweep

ZONES = {
    "Pacific/Apia": ("2011-12-30", "2011-12-31"),  # a day that is skipped
    "Pacific/Kwajalein": ("1993-08-21", "1993-08-22"),
    "America/Sao_Paulo": ("2018-02-17", "2018-11-04"),  # midnight is repeated, or skipped
    "Australia/Lord_Howe": ("2026-04-05", "2026-10-04"),
    "America/New_York": ("2026-03-08", "2026-11-01"),
    "Asia/Shanghai": ("2026-11-21", "2026-11-22"),
}


@pytest.mark.parametrize("zone", sweep(sorted(ZONES), fast=["Pacific/Apia", "America/Sao_Paulo"]))
def test_ranges_of_days_lose_no_time_in_any_zone(zone: str) -> None:
    with duckdb.connect() as connection:

        def asked(statement: str, *given: str) -> Any:
            return connection.execute(statement, given).fetchall()[0][0]

        def parse(text: str) -> Any:
            tree = orjson.loads(asked("SELECT json_serialize_sql(?::VARCHAR)", f"SELECT {text}"))
            return tree["statements"][0]["node"]["select_list"][0]

        connection.execute(f"SET TimeZone = '{zone}'")
        for day in ZONES[zone]:
            connection.execute(
                "CREATE OR REPLACE TABLE t AS SELECT unnest(generate_series("
                f"TIMESTAMPTZ '{day} 00:00:00Z' - INTERVAL 4 DAY, TIMESTAMPTZ '{day} 00:00:00Z' + INTERVAL 4 DAY, "
                "INTERVAL 30 MINUTE)) AS store_time"
            )
            for number in range(-2, 3):
                d = f"(DATE '{day}' + {number})"
                for condition in (
                    *(f"store_time::DATE {sign} {d}" for sign in ("=", "<>", "<", "<=", ">", ">=")),
                    *(f"NOT {d} {sign} store_time::DATE" for sign in ("=", "<>", "<", "<=", ">", ">=")),
                    *(f"store_time::DATE {sign}IN ({d}, {d} + 2)" for sign in ("", "NOT ")),
                    *(f"store_time::DATE {sign}BETWEEN {d} AND {d} + 1" for sign in ("", "NOT ")),
                ):
                    question = f"SELECT count(*) FROM t WHERE {condition}"
                    tree = orjson.loads(asked("SELECT json_serialize_sql(?::VARCHAR)", question))
                    assert add_ranges(tree, parse)
                    ranged = asked("SELECT json_deserialize_sql(?::JSON)", orjson.dumps(tree).decode())
                    assert asked(ranged) == asked(question), ranged
