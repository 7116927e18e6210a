"""The last record below the limit, right behind damage: found by its unit, or cut by the limit at a file's end."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.broker_store.record_bytes import log_file, queue_file, record, unit
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.damage import accepted_size, find_cut_record, find_next_record, record_size
from tiered.consume_queue.file_queues import FileConsumeQueues

SIZE = 64 * 1024


def records(count: int) -> tuple[bytes, list[int]]:
    """Records from physical offset 0 on and where each begins; the last entry is the end."""
    data, positions = b"", []
    for number in range(count):
        positions.append(len(data))
        data += record(len(data), b"x" * 100, queue_offset=number)
    return data, [*positions, len(data)]


def damaged_log(directory: Path, at: int, *, file_bytes: int | None = None) -> tuple[CommitLog, list[int]]:
    """Six records, that of number ``at`` damaged."""
    data, positions = records(6)
    broken = bytearray(data)
    broken[positions[at] + 120] ^= 1
    log_file(directory / "commitlog", 0, bytes(broken), file_bytes or SIZE)
    return CommitLog([directory / "commitlog"]), positions


@pytest.mark.parametrize("damaged", [1, 4])
def test_the_last_record_below_the_limit_is_proven_by_its_own_unit(tmp_path: Path, damaged: int) -> None:
    log, positions = damaged_log(tmp_path, damaged)
    last, limit = positions[damaged + 1], positions[damaged + 2]
    queue_file(tmp_path, "t", 0, unit(0, positions[1]) + unit(last, limit - last))
    index = FileConsumeQueues(tmp_path, lambda: 0)
    assert find_next_record(log, positions[damaged], limit, index=index) == last
    assert find_next_record(log, positions[damaged], limit - 1, index=index) is None


def test_the_last_record_below_the_limit_without_a_unit_is_not_proven(tmp_path: Path) -> None:
    """Nothing follows it and no queue names it: it could be left over."""
    log, positions = damaged_log(tmp_path, 4)
    queue_file(tmp_path, "t", 0, unit(0, positions[1]))
    index = FileConsumeQueues(tmp_path, lambda: 0)
    assert find_next_record(log, positions[4], positions[6], index=index) is None
    assert find_next_record(log, positions[3], positions[6], index=index) is None


def test_a_record_that_fills_its_file_is_found_where_the_limit_cuts_it(tmp_path: Path) -> None:
    log, positions = damaged_log(tmp_path, 4, file_bytes=records(6)[1][-1])
    last, end = positions[5], positions[6]
    assert log.files[0].end_phys == end
    for limit in (last + 1, end - 1):
        assert find_cut_record(log, positions[4], limit) == last
    assert find_cut_record(log, positions[4], end) is None
    assert find_cut_record(log, positions[4], last) is None


def test_a_record_longer_than_its_file_is_no_cut_record(tmp_path: Path) -> None:
    data, positions = records(6)
    log_file(tmp_path / "commitlog", 0, data[:-1], len(data) - 1)
    log = CommitLog([tmp_path / "commitlog"])
    assert find_cut_record(log, positions[4], positions[5] + 1) is None


def test_a_record_right_behind_the_damaged_byte_is_found(tmp_path: Path) -> None:
    log, positions = damaged_log(tmp_path, 4)
    assert find_next_record(log, positions[5] - 1, SIZE) == positions[5]
    assert find_cut_record(log, positions[5] - 1, positions[5] + 60) == positions[5]
    assert find_next_record(log, positions[5], SIZE) is None
    assert find_cut_record(log, positions[5], positions[5] + 60) is None


def with_stale_checksum(phys: int) -> bytes:
    """A record that brought the ``__CRC32#`` of another one."""
    properties = b"__CRC32#\x010000000001\x02"
    data = record(phys, b"x" * 100)[:-2] + struct.pack(">h", len(properties)) + properties
    return struct.pack(">i", len(data)) + data[4:]


def test_a_stale_checksum_is_accepted_if_a_unit_names_just_this_record(tmp_path: Path) -> None:
    data = with_stale_checksum(0)
    log_file(tmp_path / "commitlog", 0, data, SIZE)
    log = CommitLog([tmp_path / "commitlog"])
    assert record_size(log, 0) is None
    for named, accepted in ((len(data), len(data)), (len(data) - 1, None)):
        store = tmp_path / str(named)
        queue_file(store, "t", 0, unit(0, named))
        assert accepted_size(log, 0, index=FileConsumeQueues(store, lambda: 0)) == accepted
    assert accepted_size(log, 0, index=None) is None
