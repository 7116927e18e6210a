"""Rows of the data source beside what a broker delivered."""

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from rocketmq_tiered.message_table.options.columns import COLUMNS, CORRUPT_RECORD

EVERY_COLUMN = [name for name in COLUMNS if name != CORRUPT_RECORD]


PLACE = ("brokerName", "topic", "queueId", "queueOffset")


def rows_by_place(
    batches: Iterable[pa.RecordBatch], place_columns: tuple[str, ...] = PLACE
) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows by these columns; two of one place are an error."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for batch in batches:
        for row in batch.to_pylist():
            place = tuple(row[name] for name in place_columns)
            assert place not in found, place
            found[place] = row
    return found


def differences(row: dict[str, Any], line: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields of ``line`` that ``row`` does not have so: {name: (row's, line's)}."""
    found = {}
    for name, wanted in line.items():
        mine = row[name]
        if name == "properties":
            mine = dict(mine)
        elif name == "inner" and mine is not None:
            mine = [item | {"properties": dict(item["properties"])} for item in mine]
        if mine != wanted:
            found[name] = (mine, wanted)
    return found
