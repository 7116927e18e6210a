"""Bodies that do not decode, as a producer may send them, are null; later messages are read.

explodeBatches: one row for each message of an inner batch, as its consumers get them.
"""

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.message_table.options.source_options import Mode
from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import CLUSTER, FILTER, backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.kernels.record_builder import Message, encode, properties
from tests.spark.jobs.export_runs import run, source
from tests.spark.plain_read import read_without_spark
from tiered.formats.record import SYS_INNER_BATCH, SYS_NEED_UNWRAP
from tiered.object_store.file import FileStore

COLUMNS = ["queueOffset", "body", "bodyLen", "bodySha256", "bodyCrcOk", "inner", "_corrupt_record"]
COMPRESSED = 1


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """Of four messages the second says that it is compressed, and the third that it is a batch; neither is."""
    store = WrittenStore(tmp_path / "store")
    batch = properties((b"INNER_NUM", b"1"), (b"INNER_BASE", b"2"))
    for offset, (flag, text) in enumerate(
        [(0, b""), (COMPRESSED, b""), (SYS_INNER_BATCH | SYS_NEED_UNWRAP, batch), (0, b"")]
    ):
        message = Message(b"t", 0, offset, b"no such thing", text).with_(sys_flag=flag)
        store.put_record(encode(message, store.phys))
    backfill(store.path, FileStore(tmp_path / "archive"))
    return tmp_path / "archive"


@pytest.mark.parametrize("mode", list(Mode))
def test_they_are_null_in_every_mode_and_named_in_the_log(
    mode: Mode, archive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        batches = read_without_spark({"path": f"file://{archive}", "mode": mode.value}, COLUMNS)
        rows: list[dict[str, Any]] = [row for batch in batches for row in batch.to_pylist()]
    assert [row["queueOffset"] for row in rows] == [0, 1, 2, 3]
    assert [row["body"] for row in rows] == [b"no such thing", None, b"no such thing", b"no such thing"]
    assert [row["bodyLen"] for row in rows] == [13, None, 13, 13]
    assert [row["bodySha256"] is None for row in rows] == [False, True, False, False]
    assert all(row["bodyCrcOk"] and row["inner"] is None and row["_corrupt_record"] is None for row in rows)
    assert "t queue 0 offset 1" in caplog.text


def test_export_continues_after_them(archive: Path, tmp_path: Path) -> None:
    assert run(source(archive), tmp_path / "table").rows == 4


EXPLODED_COLUMNS = [
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
    batches = read_without_spark({"topic": "t_*", "explodeBatches": "true", **options}, EXPLODED_COLUMNS)
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
