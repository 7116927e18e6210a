"""Files and RocksDB written together: interrupted anywhere they end equal."""

from __future__ import annotations

import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.consume_queue.stores import FakeLog, assert_units, opened, units_of
from tests.sweeps import examples
from tiered.consume_queue.double_write import DoubleWriteStore
from tiered.consume_queue.store import ConsumeQueueStore, StoreKind

CALLS = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "put_ended", "delete_queue", "truncate", "flush"]),
        st.sampled_from(["a", "b"]),
        st.integers(1, 20),
    ),
    min_size=1,
    max_size=25,
)


class InterruptedStoreError(Exception):
    """The process ended."""


class Ending:
    """A store before which the process ends at call ``at``."""

    def __init__(self, store: ConsumeQueueStore, at: int) -> None:
        self._store, self._left = store, at

    def __getattr__(self, name: str) -> Any:
        if name in ("put", "put_ended", "delete_queue", "truncate", "flush"):
            self._left -= 1
            if self._left < 0:
                raise InterruptedStoreError
        return getattr(self._store, name)


def run(store: DoubleWriteStore, calls: list[tuple[str, str, int]], phys: int = 1000) -> None:
    """``phys``: end of the log, at which the next record begins."""
    begin_phys = phys
    for name, topic, count in calls:
        if name == "put":
            store.put(topic, 0, units_of(store.max_offset(topic, 0), count, phys))
            phys += 100 * count
        elif name == "put_ended":
            store.put_ended(topic, 0, count)
        elif name == "delete_queue":
            store.delete_queue(topic, 0)
        elif name == "truncate":
            phys = max(begin_phys, phys - 100 * count)
            store.truncate(phys)
        else:
            store.flush(phys)


def copy_as_crashed(source: Path, target: Path) -> None:
    """Copy a database that is open, without what is only in memory. It may be compacting: then again."""
    try:
        shutil.copytree(source, target)
    except shutil.Error:
        shutil.rmtree(target)
        time.sleep(0.2)
        shutil.copytree(source, target)


def assert_same(first: ConsumeQueueStore, second: ConsumeQueueStore) -> None:
    keys = {store: [queue[:2] for queue in store.queues()] for store in (first, second)}
    assert keys[first] == keys[second]
    for key in keys[first]:
        assert first.max_offset(*key) == second.max_offset(*key)
        assert first.min_offset(*key) == second.min_offset(*key)
        begin = first.min_offset(*key)
        assert_units(first.units(*key, begin, 1000), second.units(*key, begin, 1000))


@settings(max_examples=examples(60), deadline=None)
@given(calls=CALLS, at=st.integers(0, 25), files_first=st.booleans())
def test_interrupted_anywhere_both_end_equal(
    tmp_path_factory: pytest.TempPathFactory, calls: list[tuple[str, str, int]], at: int, files_first: bool
) -> None:
    path, log = tmp_path_factory.mktemp("double"), FakeLog()
    log.min_phys = 2
    files, rocksdb = opened(path / "f", StoreKind.FILE, log), opened(path / "r", StoreKind.ROCKSDB, log)
    pair = (files, rocksdb) if files_first else (rocksdb, files)
    with suppress(InterruptedStoreError):
        run(DoubleWriteStore(pair[0], Ending(pair[1], at)), calls)  # type: ignore[arg-type]
    copy_as_crashed(path / "r", path / "crashed")
    for store in pair:
        store.close()
    files, rocksdb = opened(path / "f", StoreKind.FILE, log), opened(path / "crashed", StoreKind.ROCKSDB, log)
    pair = (files, rocksdb) if files_first else (rocksdb, files)
    double = DoubleWriteStore(*pair)
    double.recover()
    assert_same(files, rocksdb)
    assert double.recover() == []
    run(double, [("put", "a", 3), ("truncate", "a", 1), ("put", "a", 2), ("flush", "a", 1)], 100_000)
    assert_same(files, rocksdb)
    double.close()
    shutil.rmtree(path)


def test_later_records_win_where_the_two_contradict(tmp_path: Path) -> None:
    log = FakeLog()
    files, rocksdb = opened(tmp_path, StoreKind.FILE, log), opened(tmp_path / "r", StoreKind.ROCKSDB, log)
    files.put("t", 0, units_of(0, 30, 1000))
    new = units_of(0, 4, 50_000)
    rocksdb.put("t", 0, new)
    double = DoubleWriteStore(files, rocksdb)
    assert double.recover() == [("t", 0)]
    for store in (files, rocksdb, double):
        assert_units(store.units("t", 0, 0, 99), new)
        assert store.max_offset("t", 0) == 4
    assert np.diff(double.units("t", 0, 0, 99)["phys"]).min() > 0
    assert (double.min_offset("t", 0), double.offset_by_time("t", 0, 50_100)) == (0, 1)
    assert [queue.topic for queue in double.queues()] == ["t"]
    double.expire()
    double.delete_topic("t")
    assert (files.queues(), rocksdb.queues()) == ([], [])
    double.close()
