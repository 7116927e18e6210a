"""Rows by queue offset, and archived rows against the consume queues of real brokers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.formats.segment_builder import RowSpec, RunSpec, build, opened
from tests.sweeps import sweep
from tiered.archive.segment_reader import SegmentCache
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex
from tiered.formats.keys import archive_prefix
from tiered.formats.segment import row_at
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore

QUEUE = QueueKey("topic", 0, 0)


def test_a_row_is_found_by_any_offset_it_spans() -> None:
    rows = [RowSpec(b"a", inner_num=10), RowSpec(b"b", inner_num=1), RowSpec(b"c", inner_num=5)]
    columns = opened(build([QUEUE], [RunSpec(0, 5, rows, RunKind.BATCH)]).encode()).row_columns(0)
    assert [row_at(columns, offset) for offset in (5, 14, 15, 16, 20)] == [0, 0, 1, 2, 2]


@pytest.mark.parametrize("name", sweep(["A", "B", "C", "E"], fast=["B", "C", "E"]))
def test_archived_rows_equal_the_brokers_consume_queue_units(
    name: str, real_store: Callable[[str], Path]
) -> None:
    """Physical offset, size and tags code of every row of every queue, LMQs included."""
    store = real_store(name) / "store"
    root = MemoryStore()
    backfill(store, root)
    archive = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    state = load(archive)
    index, segments = RunIndex(archive), SegmentCache(archive)
    compared = 0
    with open_broker_store(store) as broker_store:
        queues = broker_store.consume_queues()
        assert queues is not None
        for key in state.visible_queues():
            chunk = index.runs_of(state, key)
            for run in chunk.runs:
                place = chunk.objects[int(run["object"])]
                segment = segments.open(
                    chunk.object_keys[int(place["key"])],
                    size_bytes=int(place["size_bytes"]),
                    tail_bytes=int(place["tail_bytes"]),
                )
                found = segment.row_columns(int(run["ordinal"]))
                wanted = queues.units(key.topic, key.queue_id, int(run["base_queue_offset"]), len(found))
                assert found.phys.tolist() == wanted["phys"].tolist(), key
                assert found.size.tolist() == wanted["size"].tolist(), key
                assert found.tags_code.tolist() == wanted["tags_code"].tolist(), key
                compared += len(found)
    assert compared > 1000
