"""Rows by queue offset, and archived rows against the consume queues of real brokers.

The map of keys, in memory and spooled, says what a dict says.
"""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.broker_store.opened_store import consume_queues_of
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.formats.segment_builder import RowSpec, RunSpec, build, opened
from tests.kernels.record_builder import Message, encode, properties
from tests.sweeps import examples, sweep
from tiered.archive.offset_map import ENTRY_DTYPE, OffsetMap, entries_of
from tiered.archive.segment_reader import SegmentCache
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex
from tiered.errors import CorruptionError
from tiered.formats.keys import archive_prefix
from tiered.formats.segment import row_at
from tiered.model.queue import QueueKey
from tiered.model.tables import RunKind, Table
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
        queues = consume_queues_of(broker_store)
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


def entries(keys: list[int], first: int) -> Table:
    """Messages with ``keys`` from offset ``first`` on; every fifth is a tombstone."""
    found = np.zeros(len(keys), ENTRY_DTYPE)
    digests = [hashlib.md5(str(key).encode()).digest() for key in keys]
    halves = np.frombuffer(b"".join(digests), "<u8").reshape(-1, 2)
    found["high"], found["low"] = halves[:, 0], halves[:, 1]
    found["offset"] = np.arange(first, first + len(keys))
    found["is_tombstone"], found["has_key"] = found["offset"] % 5 == 0, 1
    return found


@settings(max_examples=examples(30), deadline=None)
@given(
    st.lists(st.integers(0, 3000), min_size=1, max_size=30), st.integers(1, 40_000), st.integers(0, 1 << 18)
)
def test_the_last_entry_of_each_key(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], keys: int, memory_bytes: int
) -> None:
    spool = tmp_path_factory.mktemp("spool")
    found = OffsetMap(spool, memory_bytes)
    rng, first, expected = np.random.default_rng(keys), 0, {}
    for size in sizes:
        mine = rng.integers(0, keys, size).tolist()
        expected |= {key: first + at for at, key in enumerate(mine)}
        found.add(entries(mine, first))
        first += size
    parts = list(found.latest())
    assert sorted(np.concatenate([part["offset"] for part in parts]).tolist()) == sorted(expected.values())
    assert all((part["is_tombstone"] == (part["offset"] % 5 == 0)).all() for part in parts)
    assert not any(spool.iterdir()), "the spool has no name"
    found.close()


def test_keys_of_records(tmp_path: Path) -> None:
    records = [
        encode(Message(body=body, properties=properties(*([(b"KEYS", keys)] if keys else []))), 0)
        for body, keys in ((b"x", b"a"), (b"", b"a"), (b"x", b"a b"), (b"x", b"  "), (b"x", b""))
    ]
    data = np.frombuffer(b"".join(records), np.uint8)
    sizes = np.array(list(map(len, records)))
    found = entries_of(data, np.cumsum(sizes) - sizes, sizes, np.arange(10, 15))
    assert found["has_key"].tolist() == [1, 1, 1, 0, 0]
    assert found["is_tombstone"].tolist() == [0, 1, 0, 0, 0]
    assert found["high"][0] == found["high"][1] != found["high"][2]
    digest = found["high"][2].tobytes() + found["low"][2].tobytes()
    assert digest == hashlib.md5(b"a b").digest()
    with pytest.raises(CorruptionError, match="the record at queue offset 10 is damaged"):
        entries_of(data[1:], np.zeros(1, np.int64), sizes[:1], np.arange(10, 11))
