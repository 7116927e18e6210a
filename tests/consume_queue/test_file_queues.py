"""Consume queues in files, made by hand: blank tails, fillers, growth, truncation, holes, ext addresses,
batches.

One stat tells whether a directory must be listed again.
"""

import errno
import os
import shutil
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.broker_store.bad_sectors import BadSectors
from tests.broker_store.record_bytes import log_file, queue_file, unit
from tests.sweeps import examples
from tiered.clock import Clock
from tiered.consume_queue.file_queues import (
    OPEN_FILES_MAX,
    QUIET_NS,
    SEARCH_QUEUES_MAX,
    UNREADABLE_AGAIN_S,
    DirectoryChanges,
    FileConsumeQueues,
)
from tiered.consume_queue.index import QueueKind
from tiered.consume_queue.unit_tails import THREADS_FROM_QUEUES
from tiered.errors import AccessDeniedError, UnreadableError

CAPACITY = 1000


def index_of(store: Path, min_phys: int = 0) -> FileConsumeQueues:
    return FileConsumeQueues(store, lambda: min_phys)


def units_for(first: int, count: int) -> bytes:
    return b"".join(unit(100 * number, 100, number) for number in range(first, first + count))


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 129, 204, 205, 206, 500, 999, 1000, 1001, 1999, 2500])
def test_end_of_data_in_preallocated_files(tmp_path: Path, count: int) -> None:
    for first in range(0, count + 1, CAPACITY):
        data = units_for(first, min(CAPACITY, count - first))
        queue_file(tmp_path, "t", 0, data, first=first, capacity=CAPACITY)
    index = index_of(tmp_path)
    assert index.max_offset("t", 0) == count
    assert index.frontier_phys() == 100 * count
    assert index.units("t", 0, 0, 10_000)["phys"].tolist() == [100 * i for i in range(count)]
    assert index.last_unit("t", 0)["tags_code"].tolist() == ([count - 1] if count else [])


@settings(deadline=None, max_examples=examples(30))
@given(counts=st.lists(st.integers(0, 700), min_size=1, max_size=5), hole=st.booleans())
def test_growth_is_seen_without_listing_again(
    tmp_path_factory: pytest.TempPathFactory, counts: list[int], hole: bool
) -> None:
    store = tmp_path_factory.mktemp("store")
    capacity = sum(counts) + 1
    path = queue_file(store, "t", 0, b"" if hole else bytes(capacity * 20), capacity=capacity)
    index = index_of(store)
    written = 0
    for count in counts:
        with path.open("r+b") as file:
            file.seek(written * 20)
            file.write(units_for(written, count))
        written += count
        assert index.max_offset("t", 0) == written
        assert index.frontier_phys(100 * written) == 100 * written


def test_next_file_is_found_when_the_last_is_full(tmp_path: Path) -> None:
    queue_file(tmp_path, "t", 0, units_for(0, CAPACITY), capacity=CAPACITY)
    index = index_of(tmp_path)
    assert index.max_offset("t", 0) == CAPACITY
    queue_file(tmp_path, "t", 0, b"", first=CAPACITY, capacity=CAPACITY)
    assert index.max_offset("t", 0) == CAPACITY
    queue_file(tmp_path, "t", 0, units_for(CAPACITY, CAPACITY), first=CAPACITY, capacity=CAPACITY)
    queue_file(tmp_path, "t", 0, units_for(2 * CAPACITY, 5), first=2 * CAPACITY, capacity=CAPACITY)
    assert index.max_offset("t", 0) == 2 * CAPACITY + 5
    assert index.frontier_phys() == 100 * (2 * CAPACITY + 5)


def test_deleted_and_recreated_topic_is_read_from_its_new_files(tmp_path: Path) -> None:
    queue_file(tmp_path, "t", 0, units_for(0, 500), capacity=CAPACITY)
    index = index_of(tmp_path)
    assert index.max_offset("t", 0) == 500
    shutil.rmtree(tmp_path / "consumequeue" / "t")
    index.refresh()
    assert not index.contains("t", 0)
    queue_file(tmp_path, "t", 0, units_for(700, 3), capacity=CAPACITY)
    index.refresh()
    assert index.units("t", 0, 0, 10)["phys"].tolist() == [70_000, 70_100, 70_200]
    shutil.rmtree(tmp_path / "consumequeue" / "t")
    queue_file(tmp_path, "t", 0, units_for(900, 2), capacity=CAPACITY)
    index.refresh()
    assert index.units("t", 0, 0, 10)["phys"].tolist() == [90_000, 90_100]


def test_queue_deleted_while_it_is_read_is_empty(tmp_path: Path) -> None:
    queue_file(tmp_path, "t", 0, units_for(0, 5))
    index = index_of(tmp_path)
    shutil.rmtree(tmp_path / "consumequeue")
    assert index.max_offset("t", 0) == 0
    assert len(index.units("t", 0, 0, 10)) == 0


def test_threads_may_read_while_another_refreshes(tmp_path: Path) -> None:
    for queue_id in range(OPEN_FILES_MAX + 50):
        queue_file(tmp_path, "t", queue_id, units_for(queue_id, 3), capacity=8)
    index = index_of(tmp_path)

    def read(turn: int) -> None:
        for queue_id in range(turn, OPEN_FILES_MAX + 50, 3):
            assert index.units("t", queue_id, 0, 10)["phys"].tolist() == [
                100 * (queue_id + n) for n in range(3)
            ]
            if queue_id % 40 == turn:
                index.refresh()

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(read, range(3)))


def test_queue_cut_back_and_written_again(tmp_path: Path) -> None:
    path = queue_file(tmp_path, "t", 0, units_for(0, 500), capacity=CAPACITY)
    index = index_of(tmp_path)
    assert index.frontier_phys(100) == 50_000
    path.write_bytes(units_for(0, 20) + bytes(20 * (CAPACITY - 20)))
    assert index.max_offset("t", 0) == 20
    assert index.frontier_phys() == 2000
    index = index_of(tmp_path)
    path.write_bytes(units_for(0, 10) + bytes(20 * (CAPACITY - 10)))
    assert index.frontier_phys(50) == 1000  # a lower position than before: reads again


def test_filler_of_a_first_file_made_in_its_middle_stands_for_nothing(tmp_path: Path) -> None:
    filler = unit(0, 0x7FFFFFFF)
    queue_file(tmp_path, "t", 0, filler * 300 + units_for(1300, 10), first=1000, capacity=CAPACITY)
    index = index_of(tmp_path)
    assert index.min_offset("t", 0) == 1300
    assert index.max_offset("t", 0) == 1310
    assert index.units("t", 0, 0, 2000)["queue_offset"].tolist() == list(range(1300, 1310))


@pytest.mark.parametrize(
    ("min_phys", "min_offset"),
    [(0, 0), (1, 1), (50_000, 500), (99_901, 1000), (150_050, 1501), (10**9, 1700)],
)
def test_minimum_is_the_first_unit_whose_record_is_left(
    tmp_path: Path, min_phys: int, min_offset: int
) -> None:
    queue_file(tmp_path, "t", 0, units_for(0, CAPACITY), capacity=CAPACITY)
    queue_file(tmp_path, "t", 0, units_for(CAPACITY, 700), first=CAPACITY, capacity=CAPACITY)
    assert index_of(tmp_path, min_phys).min_offset("t", 0) == min_offset


def test_missing_file_in_the_middle_is_stepped_over(tmp_path: Path) -> None:
    queue_file(tmp_path, "t", 0, units_for(0, CAPACITY), capacity=CAPACITY)
    queue_file(tmp_path, "t", 0, units_for(2 * CAPACITY, 10), first=2 * CAPACITY, capacity=CAPACITY)
    index = index_of(tmp_path)
    assert index.max_offset("t", 0) == 2 * CAPACITY + 10
    offsets = index.units("t", 0, CAPACITY - 2, 2 * CAPACITY)["queue_offset"].tolist()
    assert offsets == [998, 999, *range(2000, 2010)]


def test_ext_address_is_resolved_and_a_dead_one_left(tmp_path: Path) -> None:
    ext_units = b"".join(struct.pack(">hqqh", 20, tags, 0, 0) for tags in (11, -22))
    log_file(tmp_path / "consumequeue_ext" / "t" / "0", 4096, ext_units, 4096)
    addresses = [-(2**63) + offset for offset in (4096, 4116, 0, 4136, 99_999)]
    units = b"".join(unit(100 * n, 100, tags) for n, tags in enumerate([*addresses, -(2**31), 2112]))
    queue_file(tmp_path, "t", 0, units)
    found = index_of(tmp_path).units("t", 0, 0, 100)["tags_code"].tolist()
    assert found == [11, -22, *addresses[2:], -(2**31), 2112]


def batch_unit(phys: int, base: int, count: int) -> bytes:
    return struct.pack(">qiqqqhii", phys, 100, 0, 1_700_000_000_000, base, count, -1, 0)


@pytest.mark.parametrize("capacity", [10, 25, 300_000, 450_000])
@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("count", [1, 9, 10, 11, 24, 25])
def test_which_queues_end_elsewhere(tmp_path: Path, capacity: int, first: int, count: int) -> None:
    """In files of any size, also where the first is gone."""
    begin = first * capacity
    units = b"".join(unit(1000 + 100 * number, 100) for number in range(count))
    for at in range(0, count, capacity):
        piece = units[20 * at : 20 * (at + capacity)]
        queue_file(tmp_path, "t", 0, piece, first=begin + at, capacity=capacity)
    index = FileConsumeQueues(tmp_path, lambda: 0)
    for end in (0, 1, *range(max(begin - 1, 0), begin + count + 3)):
        expected = [("t", 0)] if end != begin + count else []
        assert index.that_end_elsewhere({("t", 0): end, ("gone", 0): 0}) == expected, end


def test_which_of_very_many_queues_end_elsewhere(tmp_path: Path) -> None:
    for number in range(THREADS_FROM_QUEUES + 100):
        queue_file(tmp_path, "t", number, unit(100, 100) * (2 if number % 7 == 0 else 1), capacity=100)
    ends = {("t", number): 1 for number in range(THREADS_FROM_QUEUES + 100)}
    found = FileConsumeQueues(tmp_path, lambda: 0).that_end_elsewhere(ends)
    assert found == [key for key in ends if key[1] % 7 == 0]


def test_batch_queue(tmp_path: Path) -> None:
    units = b"".join(batch_unit(100 * n, base, 3) for n, base in enumerate(range(0, 90, 3)))
    log_file(tmp_path / "batchconsumequeue" / "t" / "1", 0, units, 46 * CAPACITY)
    (tmp_path / "consumequeue" / "t" / "0").mkdir(parents=True)
    index = index_of(tmp_path, 250)
    assert [queue.kind for queue in index.queues()] == [QueueKind.PLAIN, QueueKind.BATCH]
    assert (index.min_offset("t", 1), index.max_offset("t", 1)) == (9, 90)
    for asked, first in ((0, 0), (1, 0), (2, 0), (3, 3), (44, 42), (89, 87)):
        (found,) = index.units("t", 1, asked, 1)
        assert (found["queue_offset"], found["inner_num"]) == (first, 3)
    assert len(index.units("t", 1, 90, 5)) == 0


def test_units_of_records_of_a_queue_that_came_since_the_last_look(tmp_path: Path) -> None:
    """A record names it before anyone listed its directory; a record may name anything."""
    queue_file(tmp_path, "a", 0, units_for(0, 10))
    (tmp_path / "consumequeue" / "elsewhere").write_text("x")
    queue_file(tmp_path / "consumequeue" / "a", "outside", 0, units_for(0, 10))
    index = index_of(tmp_path)
    queue_file(tmp_path, "new", 3, units_for(5, 10))
    queue_file(tmp_path, "a", 1, units_for(0, 2))
    assert index.units_of_records("a", 0, 350, 601)["queue_offset"].tolist() == [4, 5, 6]
    assert index.units("new", 3, 1, 2)["phys"].tolist() == [600, 700]
    assert index.units_of_records("new", 3, 600, 701)["queue_offset"].tolist() == [1, 2]
    assert index.units_of_records("a", 1, 0, 1000)["phys"].tolist() == [0, 100]
    for name in (
        "none",
        "..",
        ".",
        "a/consumequeue/outside",
        "../consumequeue/a",
        "elsewhere",
        "n" * 5000,
        "\0",
    ):
        assert len(index.units_of_records(name, 0, 0, 1 << 40)) == 0
    assert {queue.topic for queue in index.queues()} == {"a", "new"}


def test_frontier_looks_at_a_bounded_number_of_queues_and_finds_them_all_in_turn(tmp_path: Path) -> None:
    queues = 2 * SEARCH_QUEUES_MAX + 100
    for queue_id in range(queues):
        queue_file(tmp_path, "t", queue_id, unit(0, 10), capacity=4)
    moved = sorted(map(str, range(queues)))[-1]  # listed last
    queue_file(tmp_path, "t", int(moved), unit(0, 10) + unit(10, 90), capacity=4)
    index = index_of(tmp_path)
    answers = [index.frontier_phys(100) for _ in range(3)]
    assert answers == [10, 10, 100]
    assert index.frontier_phys(100) == 100
    assert index.frontier_phys() == 100


def test_queues_that_show_a_unit_with_and_without_holes_in_their_files(tmp_path: Path) -> None:
    queue_file(tmp_path, "sparse", 0, units_for(0, 10), capacity=CAPACITY)
    queue_file(tmp_path, "full", 0, units_for(0, CAPACITY), capacity=CAPACITY)
    queue_file(tmp_path, "copied", 0, units_for(0, 10) + bytes(19_800), capacity=CAPACITY)
    queue_file(tmp_path, "next", 0, units_for(0, CAPACITY), capacity=CAPACITY)
    queue_file(tmp_path, "next", 0, b"", first=CAPACITY, capacity=CAPACITY)
    queue_file(tmp_path, "never written", 0, b"", capacity=CAPACITY)
    queue_file(tmp_path, "zeros", 0, bytes(20_000), capacity=CAPACITY)
    (tmp_path / "consumequeue" / "no file" / "0").mkdir(parents=True)
    index = index_of(tmp_path)
    shown = {("sparse", 0), ("full", 0), ("copied", 0), ("next", 0)}
    assert index.shown() == shown == set(index.last_records())


@pytest.mark.parametrize("code", [errno.EIO, errno.EACCES])
def test_a_queue_that_cannot_be_read_is_skipped_and_counts_as_shown(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One warning, and the disk is read seldom: the other queues' ends are read ten times a second."""
    queue_file(tmp_path, "sound", 0, units_for(0, 10), capacity=CAPACITY)
    queue_file(tmp_path, "empty", 0, b"", capacity=CAPACITY)
    bad = queue_file(tmp_path, "bad", 0, units_for(0, CAPACITY), capacity=CAPACITY)
    disk, now_s = BadSectors(monkeypatch), 1000.0
    disk.code = code
    disk.break_all(bad)
    index = FileConsumeQueues(tmp_path, lambda: 0, clock=Clock(monotonic_s=lambda: now_s))
    assert index.frontier_phys() == 1000
    reads = disk.reads
    for _ in range(100):
        assert index.frontier_phys(at_least=5000) == 1000
        index.refresh()
    assert disk.reads == reads
    assert index.last_records() == {("sound", 0): (900, 100)}
    assert index.shown() == {("sound", 0), ("bad", 0)}
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1
    assert str(bad) in said[0]
    with pytest.raises((UnreadableError, AccessDeniedError)):
        index.max_offset("bad", 0)
    disk.mend()
    now_s += UNREADABLE_AGAIN_S
    assert index.frontier_phys(at_least=10_000) == 100 * CAPACITY
    assert set(index.last_records()) == {("sound", 0), ("bad", 0)}


def test_of_two_kinds_of_a_queue_the_one_that_cannot_be_read_may_be_the_one_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is said of it then, rather than what was true before its kind was changed."""
    queue_file(tmp_path, "t", 0, units_for(0, 10), capacity=CAPACITY)
    path = tmp_path / "batchconsumequeue" / "t" / "0" / f"{0:020d}"
    path.parent.mkdir(parents=True)
    path.write_bytes(batch_unit(5000, 0, 10))
    BadSectors(monkeypatch).break_all(path)
    index = index_of(tmp_path)
    assert index.frontier_phys() == 0
    assert index.last_records() == {}
    assert index.shown() == {("t", 0)}


class Time:
    """A wall clock moved by hand."""

    def __init__(self, now_ns: int) -> None:
        self.now_ns = now_ns

    def __call__(self) -> int:
        return self.now_ns


def test_a_quiet_directory_is_listed_once(tmp_path: Path) -> None:
    changes = DirectoryChanges(Time(os.stat(tmp_path).st_mtime_ns + QUIET_NS))
    assert [changes.has_changed(tmp_path) for _ in range(3)] == [True, False, False]


def test_an_added_entry_is_seen(tmp_path: Path) -> None:
    clock = Time(os.stat(tmp_path).st_mtime_ns + QUIET_NS)
    changes = DirectoryChanges(clock)
    changes.has_changed(tmp_path)
    (tmp_path / "new").mkdir()
    os.utime(tmp_path, ns=(clock.now_ns, clock.now_ns))
    clock.now_ns += QUIET_NS
    assert [changes.has_changed(tmp_path) for _ in range(2)] == [True, False]


def test_one_that_changed_just_now_may_change_again_within_the_same_tick(tmp_path: Path) -> None:
    clock = Time(os.stat(tmp_path).st_mtime_ns + 1)
    changes = DirectoryChanges(clock)
    assert [changes.has_changed(tmp_path) for _ in range(3)] == [True, True, True]
    clock.now_ns += QUIET_NS
    assert [changes.has_changed(tmp_path) for _ in range(2)] == [True, False]


def test_one_that_comes_goes_or_is_replaced(tmp_path: Path) -> None:
    directory = tmp_path / "queue"
    clock = Time(0)
    changes = DirectoryChanges(clock)
    assert [changes.has_changed(directory) for _ in range(2)] == [True, False]
    directory.mkdir()
    stamp = os.stat(directory).st_mtime_ns
    clock.now_ns = stamp + QUIET_NS
    assert [changes.has_changed(directory) for _ in range(2)] == [True, False]
    directory.rename(tmp_path / "old")
    assert changes.has_changed(directory)
    directory.mkdir()
    os.utime(directory, ns=(stamp, stamp))
    assert changes.has_changed(directory)
