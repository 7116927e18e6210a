"""The 20-byte logical form, against arithmetic and against the consume queues real brokers wrote."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.formats.segment_builder import RowSpec, RunSpec, build, opened
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex
from tiered.consume_queue.unit_view import broker_units, byte_offsets, row_at, rows_that_fit, units
from tiered.flat_file.segment_reader import SegmentCache
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore

QUEUE = QueueKey("topic", 0, 0)


def test_units_are_twenty_bytes_and_offsets_a_prefix_sum() -> None:
    rows = [RowSpec(b"abc", tags_code=2112), RowSpec(b"defgh", tags_code=-7)]
    columns = opened(build([QUEUE], [RunSpec(0, 5, rows, base_byte=1 << 40)]).encode()).row_columns(0)
    assert byte_offsets(columns, 1 << 40).tolist() == [1 << 40, (1 << 40) + 3]
    expected = struct.pack(">qiq", 1 << 40, 3, 2112) + struct.pack(">qiq", (1 << 40) + 3, 5, -7)
    assert units(columns, 1 << 40).tobytes() == expected


def test_a_row_is_found_by_any_offset_it_spans() -> None:
    rows = [RowSpec(b"a", inner_num=10), RowSpec(b"b", inner_num=1), RowSpec(b"c", inner_num=5)]
    columns = opened(build([QUEUE], [RunSpec(0, 5, rows, RunKind.BATCH)]).encode()).row_columns(0)
    assert [row_at(columns, offset) for offset in (5, 14, 15, 16, 20)] == [0, 0, 1, 2, 2]


@pytest.mark.parametrize(
    ("rows_max", "bytes_max", "count"),
    [(9, 100, 3), (2, 100, 2), (9, 11, 2), (9, 4, 0), (0, 100, 0), (9, -1, 0)],
)
def test_rows_that_fit(rows_max: int, bytes_max: int, count: int) -> None:
    assert rows_that_fit(np.array([5, 6, 7], np.int32), rows_max, bytes_max) == count


@pytest.mark.parametrize("name", ["A", "B", "C", "E"])
def test_archived_units_are_those_of_the_broker(name: str, real_store: Callable[[str], Path]) -> None:
    """Physical offset, size and tags code of every row of every queue, light queues included."""
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
                found = broker_units(segment.row_columns(int(run["ordinal"])))
                wanted = queues.units(key.topic, key.queue_id, int(run["base_queue_offset"]), len(found))
                assert found["offset"].tolist() == wanted["phys"].tolist(), key
                assert found["size"].tolist() == wanted["size"].tolist(), key
                assert found["tags_code"].tolist() == wanted["tags_code"].tolist(), key
                compared += len(found)
    assert compared > 1000
