"""Where reading continues after damage, and how far a dead broker's log is proven.

The last record below the limit, right behind damage: found by its unit, or cut by the limit at a file's end.
"""

import random
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.broker_store.opened_store import consume_queues_of
from tests.broker_store.record_bytes import log_file, queue_file, record, rocksdb_queues, unit
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.damage import (
    SEARCH_BYTES,
    accepted_size,
    find_cut_record,
    find_next_record,
    is_record,
    proven_phys,
    record_size,
)
from tiered.broker_store.store import open_broker_store
from tiered.consume_queue.file_queues import FileConsumeQueues
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.consume_queue.rocksdb_queues import RocksdbConsumeQueues

SIZE = 64 * 1024
FAR = 1 << 62


def chain(begin: int, count: int, body: bytes = b"x" * 100) -> tuple[bytearray, list[int]]:
    """``count`` records from ``begin`` on, and where each begins."""
    data, positions = bytearray(), []
    for number in range(count):
        positions.append(begin + len(data))
        data += record(begin + len(data), body, queue_offset=number)
    return data, positions


@pytest.fixture
def damaged(tmp_path: Path) -> tuple[CommitLog, list[int]]:
    """Ten records, the fourth with a flipped byte in its body."""
    data, positions = chain(0, 10)
    data[positions[3] + 120] ^= 1
    log_file(tmp_path / "commitlog", 0, bytes(data), SIZE)
    return CommitLog([tmp_path / "commitlog"]), positions


def test_next_header_whose_position_matches(damaged: tuple[CommitLog, list[int]]) -> None:
    log, positions = damaged
    assert record_size(log, positions[3]) is None
    assert find_next_record(log, positions[3], FAR) == positions[4]


def test_nothing_provable_below_the_limit(damaged: tuple[CommitLog, list[int]]) -> None:
    log, positions = damaged
    assert find_next_record(log, positions[3], positions[5]) == positions[4]
    assert find_next_record(log, positions[3], positions[5] - 1) is None
    assert find_next_record(log, positions[9], FAR) is None


def test_a_record_that_ends_above_the_limit_is_found_by_its_header(
    damaged: tuple[CommitLog, list[int]],
) -> None:
    log, positions = damaged
    assert find_cut_record(log, positions[3], positions[5] - 1) == positions[4]
    assert find_cut_record(log, positions[3], positions[4] + 1) == positions[4]
    assert find_cut_record(log, positions[3], positions[6] - 1) == positions[5]
    assert find_cut_record(log, positions[3], positions[4]) is None
    assert find_cut_record(log, positions[3], positions[5]) is None


def test_a_copied_record_elsewhere_is_no_record(tmp_path: Path) -> None:
    data, positions = chain(0, 3)
    data[positions[1] : positions[2]] = data[positions[0] : positions[1]]
    log_file(tmp_path, 0, bytes(data), SIZE)
    assert find_next_record(CommitLog([tmp_path]), positions[1], FAR) == positions[2]


def test_damage_to_the_end_of_a_file_continues_in_the_next(tmp_path: Path) -> None:
    data, positions = chain(0, 3)
    data[positions[2] :] = random.Random(1).randbytes(len(data) - positions[2])
    log_file(tmp_path, 0, bytes(data), SIZE)
    log_file(tmp_path, 2 * SIZE, record(2 * SIZE), SIZE)  # the one between is missing
    assert find_next_record(CommitLog([tmp_path]), positions[2], FAR) == 2 * SIZE


@pytest.mark.parametrize("shift", [-90, -41, -40, -36, -4, -1, 0, 1])
def test_header_across_two_reads_is_found(tmp_path: Path, shift: int) -> None:
    begin = SEARCH_BYTES + 1 + shift
    whole = bytes(begin) + record(begin)
    log_file(tmp_path, 0, whole, 2 * SEARCH_BYTES)
    assert find_next_record(CommitLog([tmp_path]), 0, FAR) == begin


def test_record_at_the_very_end_of_a_file_is_found(tmp_path: Path) -> None:
    last = record(1000)
    log_file(tmp_path, 0, bytes(1000) + last, 1000 + len(last))
    assert find_next_record(CommitLog([tmp_path]), 0, FAR) == 1000


def test_bytes_unknown_to_the_consume_queues_are_left_over(tmp_path: Path) -> None:
    data, positions = chain(0, 10)
    size = positions[1]
    left_over = positions[4] + 7  # a valid record that no unit and no chain leads to
    data[positions[3] : positions[6]] = bytes(3 * size)
    data[left_over : left_over + size] = record(left_over, b"x" * 100)
    log_file(tmp_path / "commitlog", 0, bytes(data), SIZE)
    queue_file(tmp_path, "t", 0, b"".join(unit(phys, size) for phys in positions))
    log = CommitLog([tmp_path / "commitlog"])
    index = FileConsumeQueues(tmp_path, lambda: 0)
    assert find_next_record(log, positions[3], FAR) == left_over
    assert find_next_record(log, positions[3], FAR, index=index) == positions[6]


def test_record_without_a_unit_counts_when_the_chain_leads_to_one(
    damaged: tuple[CommitLog, list[int]],
) -> None:
    log, positions = damaged
    store = log.dirs[0].parent
    queue_file(store, "t", 0, b"".join(unit(phys, positions[1]) for phys in (0, positions[6])))
    index = FileConsumeQueues(store, lambda: 0)
    assert find_next_record(log, positions[3], FAR, index=index) == positions[4]


def test_torn_tail_is_not_proven_and_units_above_it_prove_nothing(tmp_path: Path) -> None:
    data, positions = chain(0, 10)
    size = positions[1]
    torn = bytes(data[: positions[9] + 60])
    log_file(tmp_path / "commitlog", 0, torn, SIZE)
    left_over = [*positions, positions[9] + size, SIZE + 500]
    queue_file(tmp_path, "t", 0, b"".join(unit(phys, size) for phys in positions[:9]))
    queue_file(tmp_path, "u", 0, b"".join(unit(phys, size) for phys in left_over))
    log = CommitLog([tmp_path / "commitlog"])
    assert proven_phys(log, FileConsumeQueues(tmp_path, lambda: 0)) == positions[9]


@pytest.mark.parametrize("queues", [1, 3, 80])
@pytest.mark.parametrize("lost", [1, 7, 250])
@pytest.mark.parametrize("form", ["files", "rocksdb"])
def test_where_the_last_units_of_all_queues_are_lost_those_before_prove(
    tmp_path: Path, queues: int, lost: int, form: str
) -> None:
    """A power failure took the last pages of the log, and not of the queues."""
    data, positions = chain(0, 400, b"x")
    size, kept = positions[1], 400 - lost
    log_file(tmp_path / "commitlog", 0, bytes(data[: positions[kept] + 20]), SIZE)
    named = [positions[number::queues] for number in range(queues)]
    if form == "files":
        for number, its in enumerate(named):
            queue_file(tmp_path, "t", number, b"".join(unit(phys, size) for phys in its))
        index: ConsumeQueueIndex = FileConsumeQueues(tmp_path, lambda: 0)
    else:
        units = {("t", number): [(phys, size) for phys in its] for number, its in enumerate(named)}
        index = RocksdbConsumeQueues(rocksdb_queues(tmp_path / "consumequeue", units), lambda: 0)
    assert proven_phys(CommitLog([tmp_path / "commitlog"]), index) == positions[kept]
    index.close()


def test_the_scan_passes_damage_before_the_truncated_end(tmp_path: Path) -> None:
    data, positions = chain(0, 400, b"x")
    size, kept = positions[1], 300
    whole = data[: positions[kept]]
    for begin in range(0, kept - 1, 50):  # five records out of every fifty
        whole[positions[begin] : positions[begin + 5]] = bytes(5 * size)
    log_file(tmp_path / "commitlog", 0, bytes(whole), SIZE)
    queue_file(tmp_path, "t", 0, b"".join(unit(phys, size) for phys in positions))
    log = CommitLog([tmp_path / "commitlog"])
    assert proven_phys(log, FileConsumeQueues(tmp_path, lambda: 0)) == positions[kept]


def test_no_unit_proves_nothing(damaged: tuple[CommitLog, list[int]]) -> None:
    log, _ = damaged
    assert proven_phys(log, FileConsumeQueues(log.dirs[0].parent, lambda: 0)) == 0


@pytest.mark.parametrize("name", ["A", "E", "K"])
def test_real_records_are_records_and_any_flipped_byte_is_noticed_where_it_can_be(
    name: str, real_store: Callable[[str], Path]
) -> None:
    with open_broker_store(real_store(name) / "store") as store:
        log, phys, seen = store.commit_log, store.commit_log.min_phys, 0
        while seen < 2000 and (size := record_size(log, phys)) is not None:
            data = log.read(phys, size)
            assert is_record(data, phys)
            assert not is_record(data, phys + 8)
            assert not is_record(data[:-1], phys)
            broken = bytearray(data)
            # Size, magic, position; with a checksum of the whole record, all it covers.
            broken[seen % (size - 20) if name == "K" else [*range(8), *range(28, 36)][seen % 16]] ^= 0x40
            assert not is_record(bytes(broken), phys)
            phys, seen = phys + size, seen + 1
        assert seen > 1000


def test_damage_in_a_real_store_loses_one_record(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    shutil.copytree(real_store("K") / "store", tmp_path / "store")
    with open_broker_store(tmp_path / "store") as store:
        index = consume_queues_of(store)
        units = index.units("t_one", 0, 0, 50)
        hit, following = int(units["phys"][10]), int(units["phys"][10] + units["size"][10])
        file = store.commit_log.file_at(hit)
        assert file is not None
        with file.path.open("r+b") as log_bytes:
            log_bytes.seek(hit - file.begin_phys + 4)
            log_bytes.write(b"\xff\xff")
        assert find_next_record(store.commit_log, hit, FAR, index=index) == following
        lost = index.units_between(hit, following)
        assert {key: units["queue_offset"].tolist() for key, units in lost.items()} == {("t_one", 0): [10]}


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
    assert find_cut_record(CommitLog([tmp_path / "commitlog"]), positions[4], positions[5] + 1) is None


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
