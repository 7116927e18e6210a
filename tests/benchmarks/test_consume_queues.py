"""The benchmark of consume queues runs, on few queues."""

from pathlib import Path

import pytest

from benchmarks import consume_queues
from tiered.consume_queue.store import StoreKind


def test_both_kinds_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consume_queues, "GETS", 10)
    rows = [
        consume_queues.measured(tmp_path / kind.value, kind, 5, 50)
        for kind in (StoreKind.FILE, StoreKind.ROCKSDB)
    ]
    assert [(row["what"], row["units"]) for row in rows] == [("file", 250), ("rocksdb", 250)]
    assert rows[0]["size_mib"] > 5 * 5.7 > rows[0]["disk_mib"]
    assert "| put units per s | " in consume_queues.table(rows)
