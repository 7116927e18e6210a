"""Views of the last message of each key, beside a dict filled from the messages of the queue."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.spark.plain_read import read_without_spark
from tests.sweeps import sweep
from tiered.archive import offset_map
from tiered.errors import UsageError

COLUMNS = ["topic", "queueId", "queueOffset", "keys", "bodyLen"]
TOPICS = {"H": "t_*", "H2": "t_*", "K": "t_*"}


def rows_of(path: Path, columns: list[str] = COLUMNS, **options: str) -> list[dict[str, Any]]:
    batches = read_without_spark({"path": f"file://{path}", **options}, columns)
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize("name", sweep(TOPICS, fast=["H2"], rest="integration"))
def test_views_equal_a_dict(
    name: str, archive_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_map, "MEMORY_BYTES", 1 << 16)  # keys go to the spool
    archive, topic = archive_of(name), TOPICS[name]
    expected: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in sorted(rows_of(archive, topic=topic), key=lambda one: one["queueOffset"]):
        if (row["keys"] or "").strip():
            expected[row["topic"], row["queueId"], row["keys"]] = row
    found = rows_of(archive, [*COLUMNS, "_change_type"], topic=topic, view="changes")
    by_key = {(row["topic"], row["queueId"], row["keys"]): row for row in found}
    assert len(by_key) == len(found) > 0
    assert {key: row | {"_change_type": None} for key, row in by_key.items()} == {
        key: row | {"_change_type": None} for key, row in expected.items()
    }
    assert all((row["_change_type"] == "delete") == (row["bodyLen"] == 0) for row in found)
    latest = rows_of(archive, topic=topic, view="latest")
    assert {(row["topic"], row["queueId"], row["keys"]): row for row in latest} == {
        key: row for key, row in expected.items() if row["bodyLen"] != 0
    }


def test_a_view_of_a_range_of_offsets(archive_of: Callable[[str], Path]) -> None:
    """The table as it was at an offset."""
    archive = archive_of("H2")
    ends = '{"t_compact_hot": {"0": 500}}'
    rows = rows_of(archive, topic="t_compact_hot", view="latest", endingOffsets=ends)
    mine = [row for row in rows if row["queueId"] == 0]
    before = [
        row for row in rows_of(archive, topic="t_compact_hot", endingOffsets=ends) if row["queueId"] == 0
    ]
    assert max(row["queueOffset"] for row in before) == 499
    assert {row["keys"] for row in mine} <= {row["keys"] for row in before}
    assert len(mine) < len(before)


def test_a_store_directory_has_no_views(real_store: Callable[[str], Path]) -> None:
    with pytest.raises(UsageError, match="view requires source=archive"):
        rows_of(real_store("K"), source="store", view="latest")
