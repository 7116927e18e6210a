"""Topics as Arrow tables: every message of a real store, and what a selection reads."""

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest

import rocketmq_tiered
from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import FILTER
from tests.sql.conftest import STORED_MS
from tiered.errors import NotFoundError, UsageError
from tiered.object_store.file import FileStore


def test_every_message_of_a_real_store(archive_k: str, real_store: Callable[[str], Path]) -> None:
    truth = load_truth(real_store("K"), "K", FILTER)
    compared = 0
    with rocketmq_tiered.open(archive_k) as archive:
        for topic in sorted({topic for topic, _ in truth.queues}):
            rows: dict[tuple[int, int], dict[str, Any]] = {}
            for batch in archive.topic(topic).to_arrow():
                batch.validate(full=True)
                rows |= {(row["queue_id"], row["queue_offset"]): row for row in batch.to_pylist()}
            for (name, queue_id), lines in truth.queues.items():
                for line in lines if name == topic else ():
                    row = rows.pop((queue_id, line["queueOffset"]))
                    compared += 1
                    assert hashlib.sha256(row["body"]).hexdigest() == line["bodySha256"]
                    assert row["text"] == row["body"].decode("utf-8", "replace")
                    assert dict(row["properties"]) == line["properties"]
                    assert row["store_time"].timestamp() * 1000 == pytest.approx(line["storeTimestamp"])
                    for column, field in (
                        ("tags", "tags"),
                        ("keys", "keys"),
                        ("offset_msg_id", "offsetMsgId"),
                        ("born_host", "bornHost"),
                        ("born_timestamp", "bornTimestamp"),
                    ):
                        assert row[column] == line[field], line
            assert not rows
    assert compared == truth.messages > 200


def test_a_selection(orders: str) -> None:
    with rocketmq_tiered.open(orders) as archive:
        topic = archive.topic("orders")
        since, until = STORED_MS + 30 * 60_000, STORED_MS + 60 * 60_000
        found = topic.to_arrow(since=since, until=until, columns=["keys", "queue_id"], queues=[1]).read_all()
        assert found.column_names == ["keys", "queue_id"]
        wanted = {f"k{number}" for number in range(31, 60, 2)}
        assert set(found["keys"].to_pylist()) == wanted
        assert len(found) == len(wanted)
        assert set(found["queue_id"].to_pylist()) == {1}
        condition = (pc.field("keys") == "k31") | (pc.field("text") == '{"id": 33, "amount": 3}')
        found = topic.to_arrow(columns=["keys"], filter=condition).read_all()
        assert found.to_pydict() == {"keys": ["k31", "k33"]}
        with pytest.raises(UsageError, match="no column nothing"):
            topic.to_arrow(filter=pc.field("nothing") == 1).read_all()
        assert pa.table(topic).num_rows == 200
        assert topic.schema.field("store_time").type == pa.timestamp("us", "UTC")
        for wrong in (["queueId"], ["keys", "keys"]):
            with pytest.raises(UsageError, match="column"):
                topic.to_arrow(columns=wrong)
        with pytest.raises(UsageError, match="until is exclusive"):
            topic.to_arrow(since=until, until=since)
        with pytest.raises(UsageError, match=f"in seconds it is 2026-11-21T00:30:00Z, so use {since}"):
            topic.to_arrow(until=since // 1000)
        with pytest.raises(NotFoundError, match="no topic nothing"):
            archive.topic("nothing")
    with pytest.raises(UsageError, match="archive is closed"):
        topic.to_arrow().read_all()


def test_columns_of_footers_read_no_messages(orders: str, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    whole = FileStore.get_range

    def counted(self: FileStore, key: str, start: int, length: int) -> bytes:
        read.append(length)
        return whole(self, key, start, length)

    def bytes_of(*columns: str, **choice: Any) -> int:
        read.clear()
        with rocketmq_tiered.open(orders) as archive:
            archive.topic("orders").to_arrow(columns=columns, **choice).read_all()
        return sum(read)

    monkeypatch.setattr(FileStore, "get_range", counted)
    footers = bytes_of("queue_offset", "store_time")
    assert footers < bytes_of("text")
    assert bytes_of("queue_offset", since=STORED_MS + 160 * 60_000) < footers / 2
