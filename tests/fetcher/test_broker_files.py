"""What a broker's own files say of its queues and messages, and that asking leaves no trace."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fetcher.policy.broker_files import BrokerFiles
from fetcher.policy.read_policy import BrokerSide, HeldOffsets, LocalView
from tests.broker_store.lock_holder import HOLDER
from tests.broker_store.page_cache import evict, resident_bytes
from tests.fetcher.broker_store_writer import WrittenStore
from tiered.broker_store.store import open_broker_store
from tiered.clock import Clock


@contextmanager
def reading(path: Path) -> Iterator[BrokerFiles]:
    reader = BrokerFiles(open_broker_store(path), refresh_s=1e9)
    try:
        yield reader
    finally:
        reader.close()


def test_the_dead_units_of_an_expired_store_are_no_records(real_store: Callable[[str], Path]) -> None:
    with reading(real_store("G") / "store") as reader:
        view = reader.local_view("t_one", 0, 0)
        assert view.queue is not None and view.queue.min_offset == 600 and not view.is_record
        assert reader.local_view("t_one", 0, 600).is_record


@pytest.fixture
def written(tmp_path: Path) -> WrittenStore:
    """300 messages of 300 bytes in one queue, other queues' between them, over several files."""
    store = WrittenStore(tmp_path / "store")
    for number in range(300):
        store.put("t", 0, b"%d " % number * 60, tags="ab"[number % 2] if number % 3 else "")
        store.put("other", number % 4, b"x" * (number % 700))
    return store


def test_new_messages_and_queues_are_seen(written: WrittenStore) -> None:
    clock = [0.0]
    reader = BrokerFiles(
        open_broker_store(written.path), refresh_s=1.0, clock=Clock(monotonic_s=lambda: clock[0])
    )
    assert reader.local_view("t", 0, 300).queue == HeldOffsets(0, 300)
    for _ in range(200):
        written.put("t", 0, b"y" * 1000)
    view = reader.local_view("t", 0, 499)
    assert view.queue == HeldOffsets(0, 500) and view.is_record, "in a file that was not listed before"
    written.put("new", 3, b"z")
    assert reader.local_view("new", 3, 0).queue is None
    clock[0] = 1.5
    assert reader.local_view("new", 3, 0).is_record
    reader.close()


def test_a_unit_half_written_is_no_message_yet(written: WrittenStore) -> None:
    with reading(written.path) as reader:
        offset = written.put("t", 0, b"new", with_unit=False)
        size = len(written.records["t", 0][offset])
        unit = (written.phys - size).to_bytes(8, "big")
        written.put_unit("t", 0, offset, unit)
        assert reader.local_view("t", 0, offset).queue == HeldOffsets(0, offset)
        written.put_unit("t", 0, offset, unit + size.to_bytes(4, "big"))
        assert reader.local_view("t", 0, offset).is_record


def test_a_message_whose_file_is_deleted_is_none(written: WrittenStore) -> None:
    with reading(written.path) as reader:
        first = sorted((written.path / "commitlog").iterdir())[0]
        assert reader.local_view("t", 0, 0).is_record
        first.unlink()
        reader._fresh_until_s = 0  # a second has gone by
        view = reader.local_view("t", 0, 0)
        assert view.queue is not None and not view.is_record
        assert view.queue.min_offset == reader.offset_from("t", 0, view.oldest_phys) > 0


def test_a_live_broker_with_rocksdb_shows_nothing(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    store = tmp_path / "store"
    shutil.copytree(real_store("C") / "store", store)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(store / "lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert holder.stdout is not None and holder.stdout.readline().strip() == "locked"
        with reading(store) as reader:
            assert reader.local_view("t_one", 0, 0).side is BrokerSide.UNREADABLE
    finally:
        holder.communicate()
    with reading(store) as reader:
        assert reader.local_view("t_one", 0, 0).queue == HeldOffsets(0, 1350)


def test_an_unknown_queue(written: WrittenStore) -> None:
    with reading(written.path) as reader:
        assert reader.local_view("unknown", 0, 0) == LocalView(BrokerSide.READABLE)


def test_asking_leaves_the_page_cache_as_it_was(written: WrittenStore) -> None:
    files = [path for path in written.path.rglob("0*") if path.is_file()]
    for path in files:
        evict(path)
    if any(resident_bytes(path) for path in files):
        pytest.skip("this file system does not let go of pages (tmpfs?)")
    with reading(written.path) as reader:
        for offset in range(300):
            assert reader.local_view("t", 0, offset).is_record
            reader.residency("t", 0, offset, count=32, max_bytes=1 << 20)
    assert {path.name: resident_bytes(path) for path in files if resident_bytes(path)} == {}
