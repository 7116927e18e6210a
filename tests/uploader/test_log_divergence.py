"""Which commit a replaced log still shares with the archive."""

import struct
from pathlib import Path

import fastcrc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.broker_store.bad_sectors import BadSectors
from tests.broker_store.record_bytes import BLANK_MAGIC, records
from tiered.broker_store.commit_log import CommitLog
from tiered.catalog.state import NO_CHECK, LogCheck
from tiered.errors import UnreadableError
from uploader import log_divergence
from uploader.log_divergence import (
    WRITTEN_BYTES,
    Check,
    CheckResult,
    CommonEnd,
    compare_log,
    ends_before,
    find_divergence,
)

FILE_BYTES = 4096


def log_of(directory: Path, data: bytes, first_phys: int = 0) -> CommitLog:
    for begin in range(0, len(data), FILE_BYTES):
        (directory / f"{first_phys + begin:020d}").write_bytes(data[begin : begin + FILE_BYTES])
    return CommitLog([directory])


def check_of(data: bytes, begin: int, end: int) -> LogCheck:
    return LogCheck(begin, end, fastcrc.crc32.iscsi(data[begin:end]))


def line_among(log: CommitLog, checks: list[Check]) -> CommonEnd:
    """``checks``: newest first."""

    def newest(first: int, last: int) -> Check | None:
        asked.append((first, last))
        return next((entry for entry in checks if first <= entry[0] <= last), None)

    asked: list[tuple[int, int]] = []
    found = find_divergence(log, [(1, checks[0][0])], newest)
    assert len(asked) <= 2 * len(checks).bit_length() + 2
    return found


DATA = bytes(range(256)) * 48  # three files


def test_equal_bytes_are_the_same_log_also_across_files(tmp_path: Path) -> None:
    assert compare_log(log_of(tmp_path, DATA), check_of(DATA, 4000, 4200)) is CheckResult.SAME


def test_other_bytes_or_a_log_that_ends_below_differ(tmp_path: Path) -> None:
    log = log_of(tmp_path, DATA[:FILE_BYTES])
    assert compare_log(log, check_of(bytes(8000), 100, 200)) is CheckResult.DIFFERENT
    assert compare_log(log, check_of(DATA, 4000, 4200)) is CheckResult.DIFFERENT


def test_bytes_the_broker_deleted_cannot_be_compared(tmp_path: Path) -> None:
    log = log_of(tmp_path, DATA[FILE_BYTES:], FILE_BYTES)
    assert compare_log(log, check_of(DATA, 100, 200)) is CheckResult.DELETED


def test_bytes_that_the_disk_does_not_give_are_no_other_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = log_of(tmp_path, DATA)
    disk = BadSectors(monkeypatch)
    for page in range(2):
        disk.break_page(log.files[page].path, 0)
        with pytest.raises(UnreadableError):
            compare_log(log, check_of(DATA, 4000, 4200))
        disk.mend()
    assert compare_log(log, check_of(DATA, 4000, 4200)) is CheckResult.SAME


def test_the_walk_ends_at_the_newest_common_commit(tmp_path: Path) -> None:
    log = log_of(tmp_path, DATA)
    lost = LogCheck(5000, 5100, 1)
    checks = [(4, lost, 5100), (3, lost, 5050), (2, check_of(DATA, 900, 1000), 1000), (1, lost, 500)]
    assert line_among(log, checks) == CommonEnd(2, 1000, above=(3, 5050))


def test_history_that_was_deleted_stays_when_everything_newer_was_cut_off(tmp_path: Path) -> None:
    log = log_of(tmp_path, DATA[FILE_BYTES:], FILE_BYTES)
    checks = [(3, LogCheck(15000, 15100, 1), 15100), (2, check_of(DATA, 900, 1000), 1000)]
    assert line_among(log, checks) == CommonEnd(2, 1000, is_compared=False, above=(3, 15100))


def test_a_log_that_contradicts_all_it_can_be_asked_about_shares_nothing(tmp_path: Path) -> None:
    """Another broker's, or a new disk's, whose first files are gone already: what is archived is the only copy."""
    log = log_of(tmp_path, DATA[FILE_BYTES:], FILE_BYTES)
    checks = [(3, LogCheck(5000, 5100, 1), 5100), (2, check_of(DATA, 900, 1000), 1000)]
    assert line_among(log, checks) == CommonEnd(0, FILE_BYTES, above=(3, 5100))


@pytest.mark.parametrize(("written", "is_before"), [(5000, True), (5036, True), (5037, False), (6000, False)])
def test_a_log_that_continues_differently_is_no_older_copy(
    tmp_path: Path, written: int, is_before: bool
) -> None:
    log = log_of(tmp_path, b"\1" * written + bytes(2 * FILE_BYTES - written))
    assert ends_before(log, LogCheck(5000, 5100, 1), 0) is is_before


def test_a_log_without_the_file_of_the_archives_end_is_an_older_copy(tmp_path: Path) -> None:
    assert ends_before(log_of(tmp_path, DATA), LogCheck(15000, 15100, 1), 0)


def padded(bodies: int) -> bytes:
    """A file of records whose rest is padding."""
    data = records(0, [b"x" * 100] * bodies)
    return data + struct.pack(">iI", FILE_BYTES - len(data), BLANK_MAGIC) + bytes(FILE_BYTES - len(data) - 8)


AT_FILE_END = LogCheck(FILE_BYTES - 256, FILE_BYTES - 50, 1)
SHARED = 2 * len(records(0, [b"x" * 100]))


@pytest.mark.parametrize("following", [b"", bytes(FILE_BYTES), records(FILE_BYTES, [b"y"])])
def test_padding_at_the_end_of_a_file_is_written_too(tmp_path: Path, following: bytes) -> None:
    log = log_of(tmp_path, padded(15) + following)
    assert not any(log.read(AT_FILE_END.end_phys - WRITTEN_BYTES, WRITTEN_BYTES))
    assert not ends_before(log, AT_FILE_END, SHARED)
    assert not ends_before(log, AT_FILE_END, 0)


@pytest.mark.parametrize("following", [b"", records(FILE_BYTES, [b"y" * 100] * 3)])
def test_zeros_that_no_records_lead_to_are_no_padding(tmp_path: Path, following: bytes) -> None:
    """An older copy, also one that was made while its broker wrote: its files are of different times."""
    log = log_of(tmp_path, records(0, [b"x" * 100] * 15).ljust(FILE_BYTES, b"\0") + following)
    assert ends_before(log, AT_FILE_END, SHARED)


def test_a_broken_record_or_marker_proves_nothing(tmp_path: Path) -> None:
    whole = padded(15)
    marker = whole.index(struct.pack(">I", BLANK_MAGIC)) - 4
    for at in (SHARED + 150, marker, marker + 7):
        changed = bytearray(whole)
        changed[at] ^= 1
        assert ends_before(log_of(tmp_path, bytes(changed)), AT_FILE_END, SHARED)


def test_padding_is_not_looked_for_far_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_divergence, "WALKED_BYTES_MAX", AT_FILE_END.end_phys - SHARED - 1)
    assert ends_before(log_of(tmp_path, padded(15)), AT_FILE_END, SHARED)


@pytest.mark.parametrize(("bodies", "is_same"), [(15, True), (16, False)])
def test_a_record_where_the_file_had_ended_is_another_log(tmp_path: Path, bodies: int, is_same: bool) -> None:
    """A broker that lost the last record and the padding after it has put another one there."""
    end_phys = len(records(0, [b"x" * 100] * 15))
    log, check = log_of(tmp_path, padded(bodies)), check_of(padded(15), 100, end_phys)
    assert compare_log(log, check) is CheckResult.SAME, "the rest of the file was not read yet"
    result = compare_log(log, check, to_phys=FILE_BYTES)
    assert result is (CheckResult.SAME if is_same else CheckResult.DIFFERENT)
    found = line_among(log, [(2, check, FILE_BYTES), (1, check_of(padded(15), 100, 1000), 1000)])
    assert found.version == (2 if is_same else 1)


def test_a_wiped_disk_shares_nothing(tmp_path: Path) -> None:
    log = log_of(tmp_path, bytes(FILE_BYTES))
    assert line_among(log, [(1, LogCheck(5000, 5100, 1), 5100)]) == CommonEnd(0, 0, above=(1, 5100))


@pytest.mark.parametrize("held", [0, 1, 2, 3, 500, 998, 999, 1000])
def test_long_history_is_not_walked_through(tmp_path: Path, held: int) -> None:
    log = log_of(tmp_path, DATA)
    good = check_of(DATA, 900, 1000)
    checks = [
        (v, good if v <= held else LogCheck(5000, 5100, 1), 1000 + v) for v in range(1000, 0, -1) if v % 7
    ]
    expected = next((v for v in range(held, 0, -1) if v % 7), 0)
    above = next(((v, 1000 + v) for v in range(held + 1, 1001) if v % 7), None)
    end_phys = 1000 + expected if expected else 0
    assert line_among(log, checks) == CommonEnd(expected, end_phys, above=above)


def test_a_commit_without_bytes_proves_nothing(tmp_path: Path) -> None:
    """The first of a line may have lost all it covers."""
    log = log_of(tmp_path, DATA)
    checks = [(3, LogCheck(5000, 5100, 1), 5100), (2, LogCheck(900, 1000, 1), 1000), (1, NO_CHECK, 500)]
    assert line_among(log, checks) == CommonEnd(0, 0, above=(1, 500))


def test_a_commit_that_ends_above_the_log_is_not_in_it(tmp_path: Path) -> None:
    """Its last bytes were lost: it is checked by those of the commit before it, which the broker has deleted since."""
    log = log_of(tmp_path, DATA[FILE_BYTES:], FILE_BYTES)
    gone = check_of(DATA, 900, 1000)
    checks = [(3, LogCheck(20_000, 20_100, 1), 20_100), (2, gone, 15_000), (1, gone, 1000)]
    assert line_among(log, checks) == CommonEnd(1, 1000, is_compared=False, above=(2, 15_000))


@given(
    lines=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    held=st.integers(0, 40),
    deleted=st.integers(0, 40),
    blank=st.sets(st.integers(0, 40)),
)
def test_of_several_lines_the_newest_commit_that_is_held_is_found(
    tmp_path_factory: pytest.TempPathFactory, lines: list[int], held: int, deleted: int, blank: set[int]
) -> None:
    """``lines``: commits of each line that count, oldest line first; between them others were left. ``blank``: versions
    that did not move the cursor. The log holds the first ``held`` commits, and the bytes of ``deleted`` are gone."""
    ends: dict[int, int] = {}
    spans: list[tuple[int, int]] = []
    version = 0
    for count in lines:
        spans.insert(0, (version + 1, version + count))
        ends |= {v: 100 * (len(ends) + i) for i, v in enumerate(range(version + 1, version + count + 1), 1)}
        version += count + 7
    moved = [v for v in ends if v not in blank]
    begin = 100 * deleted // FILE_BYTES * FILE_BYTES
    log = log_of(tmp_path_factory.mktemp("log"), DATA[begin:], begin)
    in_log = {
        v: check_of(DATA, end - 50, end) if end <= 100 * held else LogCheck(end - 50, end, 1)
        for v, end in ends.items()
    }

    def newest(first: int, last: int) -> Check | None:
        found = max((v for v in moved if first <= v <= last), default=0)
        return (found, in_log[found], ends[found]) if found else None

    common = max((v for v in moved if ends[v] <= 100 * held), default=0)
    found = find_divergence(log, spans, newest)
    assert (found.version, found.phys) == ((common, ends[common]) if common else (0, begin))
