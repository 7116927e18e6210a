"""The map of keys, in memory and spooled, says what a dict says."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.record_builder import Message, encode, properties
from tests.sweeps import examples
from tiered.archive.offset_map import ENTRY_DTYPE, OffsetMap, entries_of
from tiered.errors import CorruptionError
from tiered.model.tables import Table


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
    offsets = np.concatenate([part["offset"] for part in parts])
    assert sorted(offsets.tolist()) == sorted(expected.values())
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
    with pytest.raises(CorruptionError, match="the record at offset 10 is malformed"):
        entries_of(data[1:], np.zeros(1, np.int64), sizes[:1], np.arange(10, 11))
