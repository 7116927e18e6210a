"""explodeBatches: one row for each message of an inner batch, as its consumers get them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import CLUSTER, FILTER
from tests.spark.plain_read import read_without_spark

COLUMNS = [
    "topic",
    "queueId",
    "queueOffset",
    "innerNum",
    "tags",
    "keys",
    "properties",
    "body",
    "bodyCrcOk",
    "flag",
]


def rows_of(**options: str) -> list[dict[str, Any]]:
    batches = read_without_spark({"topic": "t_*", "explodeBatches": "true", **options}, COLUMNS)
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("source", ["archive", "store"])
def test_rows_are_what_the_consumers_got(
    source: str, small_archive: Path, real_store: Callable[[str], Path]
) -> None:
    if source == "archive":
        found = rows_of(path=f"file://{small_archive}")
    else:
        found = rows_of(path=str(real_store("K") / "store"), source="store", cluster=CLUSTER, broker="K")
    rows = {
        (row["topic"], row["queueId"], row["queueOffset"]): row
        for row in found
        if row["topic"] != "t_compact"
    }
    expected = {
        (topic, queue_id, item["queueOffset"]): item
        for (topic, queue_id), lines in load_truth(real_store("K"), "K", FILTER).queues.items()
        if topic.startswith("t_") and topic != "t_compact"
        for line in lines
        for item in (line.get("inner") or [line])
    }
    assert rows.keys() == expected.keys()
    inner = 0
    for place, item in expected.items():
        row = rows[place]
        body = None if row["body"] is None else hashlib.sha256(row["body"]).hexdigest()
        assert (row["tags"], row["keys"], dict(row["properties"]), body) == (
            item["tags"],
            item["keys"],
            item["properties"],
            item["bodySha256"],
        )
        assert row["innerNum"] == 1 and row["flag"] == item["flag"]
        inner += "storeSize" not in item
    assert inner > 10
