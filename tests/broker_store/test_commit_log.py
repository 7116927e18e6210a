"""The commitlog's file list and its bytes: any size, several directories, whatever is missing."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.broker_store.bad_sectors import BadSectors
from tests.broker_store.record_bytes import log_file, record, records
from tiered.broker_store.commit_log import (
    BLANK_BYTES_MAX,
    OPEN_FILES_MAX,
    CommitLog,
    LogFile,
    LogGap,
    LogGapReason,
)
from tiered.errors import NotFoundError, UnreadableError

SIZE = 64 * 1024


def read_all(log: CommitLog, begin: int, end: int) -> bytes:
    data = bytearray(end - begin)
    filled = 0
    while filled < len(data):
        got = log.read_into(memoryview(data)[filled:], begin + filled)
        assert got > 0
        filled += got
    return bytes(data)


def test_files_of_any_size_in_several_directories(tmp_path: Path) -> None:
    contents = {0: os.urandom(5000), 5000: os.urandom(777), 5777: os.urandom(12_345)}
    for number, (begin, data) in enumerate(contents.items()):
        log_file(tmp_path / f"disk{number % 2}", begin, data, len(data))
    log = CommitLog([tmp_path / "disk0", tmp_path / "disk1"])
    assert [(file.begin_phys, file.end_phys) for file in log.files] == [
        (0, 5000),
        (5000, 5777),
        (5777, 18122),
    ]
    assert (log.min_phys, log.broker_min_phys, log.max_file_end) == (0, 0, 18122)
    assert log.gaps == []
    assert read_all(log, 0, 18122) == b"".join(contents.values())
    assert read_all(log, 4999, 5778) == b"".join(contents.values())[4999:5778]


def test_a_read_never_crosses_the_end_of_a_file(tmp_path: Path) -> None:
    log_file(tmp_path, 0, b"a" * 100, 100)
    log_file(tmp_path, 100, b"b" * 100, 100)
    log = CommitLog([tmp_path])
    dest = bytearray(100)
    assert log.read_into(memoryview(dest), 90) == 10
    assert log.read_into(memoryview(dest), 200) == 0
    assert log.read(0, 1000) == b"a" * 100


def test_preallocated_file_holds_nothing_but_is_listed(tmp_path: Path) -> None:
    log_file(tmp_path, 0, record(0), SIZE)
    log_file(tmp_path, SIZE, b"", SIZE)
    log_file(tmp_path, 2 * SIZE, b"", 0)  # being created right now
    log = CommitLog([tmp_path])
    assert log.max_file_end == 2 * SIZE
    assert log.record_size_at(0) == len(record(0))
    assert log.record_size_at(len(record(0))) is None
    assert log.record_size_at(SIZE) is None


def test_missing_middle_file_is_a_gap_with_a_name(tmp_path: Path) -> None:
    first = log_file(tmp_path, 0, record(0), SIZE)
    log_file(tmp_path, 2 * SIZE, record(2 * SIZE), SIZE)
    log = CommitLog([tmp_path])
    assert log.gaps == [LogGap(SIZE, 2 * SIZE, LogGapReason.MISSING_FILE, first)]
    assert log.file_at(SIZE) is None
    assert log.read(SIZE, 10) == b""


def test_file_cut_short_is_a_gap_of_its_own_kind(tmp_path: Path) -> None:
    first = log_file(tmp_path, 0, record(0), SIZE - 4096)
    log_file(tmp_path, SIZE, record(SIZE), SIZE)
    assert CommitLog([tmp_path]).gaps == [LogGap(SIZE - 4096, SIZE, LogGapReason.TRUNCATED_FILE, first)]


def test_deleted_file_is_read_from_its_pin(tmp_path: Path) -> None:
    data = records(0, [b"x" * 50] * 10)
    first = log_file(tmp_path / "log", 0, data, SIZE)
    log_file(tmp_path / "log", SIZE, record(SIZE), SIZE)
    pin = tmp_path / "pin"
    os.link(first, pin)
    log = CommitLog([tmp_path / "log"], pinned=lambda: [LogFile(0, SIZE, pin, True)])
    assert log.file_at(0) == LogFile(0, SIZE, first)
    first.unlink()
    assert log.read(0, len(data)) == data
    assert log.file_at(0) == LogFile(0, SIZE, pin, True)
    assert (log.min_phys, log.broker_min_phys) == (0, SIZE)


@pytest.mark.parametrize("gives_the_front", [True, False])
def test_what_stands_before_an_unreadable_place_is_read_to_the_byte(
    gives_the_front: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = bytes(range(256)) * (SIZE // 256)
    path = log_file(tmp_path, 0, data, SIZE)
    log_file(tmp_path, SIZE, data, SIZE)
    log, disk = CommitLog([tmp_path]), BadSectors(monkeypatch)
    disk.may_give_the_front = gives_the_front
    bad = disk.break_page(path, 40_000)
    dest = bytearray(2 * SIZE)
    got, failure = log.read_readable_part(memoryview(dest), 1001)
    assert (got, dest[:got]) == (bad - 1001, data[1001:bad])
    assert failure is not None
    assert failure.path == path
    assert log.read_readable_part(memoryview(dest), bad)[0] == 0
    with pytest.raises(UnreadableError):
        log.read(bad - 1, 2)
    got, failure = log.read_readable_part(memoryview(dest), bad + 4096)
    assert (got, failure) == (SIZE - bad - 4096, None)


def test_only_a_pin_of_which_something_is_given_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = log_file(tmp_path / "log", 0, record(0), SIZE)
    log_file(tmp_path / "log", SIZE, record(SIZE), SIZE)
    pinned = LogFile(0, SIZE, tmp_path / "pin", True)
    os.link(path, pinned.path)
    log, disk = CommitLog([tmp_path / "log"], pinned=lambda: [pinned]), BadSectors(monkeypatch)
    disk.break_page(path, 0)
    assert not log.is_broken_pin(log.files[0])
    assert not log.is_broken_pin(pinned), "the broker has it"
    path.unlink()
    assert log.is_broken_pin(pinned)
    disk.break_all(pinned.path)
    assert not log.is_broken_pin(pinned), "the disk may be away"
    pinned.path.unlink()
    assert not log.is_broken_pin(pinned), "it was let go"


def test_pin_above_the_last_file_belongs_to_a_log_that_is_gone(tmp_path: Path) -> None:
    log_file(tmp_path / "log", 0, record(0), SIZE)
    stale = log_file(tmp_path / "pins", SIZE, record(SIZE), SIZE)
    log = CommitLog([tmp_path / "log"], pinned=lambda: [LogFile(SIZE, SIZE, stale, True)])
    assert log.max_file_end == SIZE


def test_a_file_that_was_removed_and_created_again_is_read_again(tmp_path: Path) -> None:
    """A broker that stops removes the file it had pre-allocated, and makes it again when it starts."""
    path = log_file(tmp_path, 0, b"", SIZE)
    log = CommitLog([tmp_path])
    assert log.read(0, 8) == bytes(8)
    path.unlink()
    log_file(tmp_path, 0, record(0), SIZE)
    log.refresh()
    assert log.record_size_at(0) == len(record(0))


def test_open_files_are_bounded(tmp_path: Path) -> None:
    for number in range(OPEN_FILES_MAX + 5):
        log_file(tmp_path, number * 4096, b"x" * 4096, 4096)
    log = CommitLog([tmp_path])
    before = len(_descriptors())
    for file in log.files:
        log.read(file.begin_phys, 10)
    assert len(_descriptors()) - before <= OPEN_FILES_MAX
    log.close()
    assert len(_descriptors()) == before


def _descriptors() -> list[str]:
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.lexists(f"/proc/self/fd/{fd}")]


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match=f"{tmp_path}/nowhere does not exist"):
        CommitLog([tmp_path / "nowhere"])


def test_other_names_are_not_files_of_the_log(tmp_path: Path) -> None:
    log_file(tmp_path, 0, record(0), SIZE)
    (tmp_path / ".nfs0001").write_bytes(b"x")
    (tmp_path / "00000000000000065536.bak").write_bytes(b"x")
    (tmp_path / "00000000000000131072").mkdir()
    files: list[Any] = list(CommitLog([tmp_path]).files)
    assert len(files) == 1


def test_behind_the_last_record_nothing_was_ever_written(tmp_path: Path) -> None:
    data = records(0, [b"x" * 500] * 8)
    log_file(tmp_path, 0, data, 8 << 20)
    log_file(tmp_path, 8 << 20, b"", 8 << 20)
    log = CommitLog([tmp_path])
    assert log.is_blank_from(len(data))
    assert not log.is_blank_from(len(data) - 3)  # "t", then no properties
    assert not log.is_blank_from(0)
    assert log.is_blank_from(8 << 20)
    assert log.is_blank_from(16 << 20)
    assert len(data) <= log.data_end_phys() < len(data) + (1 << 20)
    with (tmp_path / f"{8 << 20:020d}").open("r+b") as file:
        file.seek(5 << 20)
        file.write(b"x")
    assert log.data_end_phys() == 16 << 20, "holes do not tell"


@pytest.mark.parametrize("at", [5001, 8191, 8192, (4 << 20) + 1, (8 << 20) - 1, 8 << 20, (12 << 20) - 1])
def test_a_byte_anywhere_behind_the_last_record_is_found(tmp_path: Path, at: int) -> None:
    for begin in (0, 8 << 20):
        path = log_file(tmp_path, begin, b"\1" * 5000 if begin == 0 else b"", 8 << 20)
        if begin <= at < begin + (8 << 20):
            with path.open("r+b") as file:
                file.seek(at - begin)
                file.write(b"\1")
    assert not CommitLog([tmp_path]).is_blank_from(5000)


def test_without_holes_a_few_zeros_are_read_and_many_are_not(tmp_path: Path) -> None:
    log_file(tmp_path, 0, b"\1" + bytes(2 * BLANK_BYTES_MAX), 2 * BLANK_BYTES_MAX + 1)
    log = CommitLog([tmp_path])
    assert log.is_blank_from(BLANK_BYTES_MAX + 1)
    assert not log.is_blank_from(1)
