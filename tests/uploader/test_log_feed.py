"""The feed at awkward places: little room before a file's end, damaged sizes, files that are shorter than listed."""

import struct
from pathlib import Path

import pytest

from tests.kernels.record_builder import Message, blank, encode
from tests.uploader.dispatch_bench import FILE_BYTES, Bench
from tiered.broker_store.commit_log import CommitLog
from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import TopicFilter
from uploader.dispatcher import StepResult
from uploader.log_batch import LogBatch
from uploader.log_feed import FeedBound, FeedOutcome, LogFeed

MARKER_BYTES = 8
RECORD_BYTES = len(encode(Message(topic=b"t", body=bytes(100)), 0))


def two_files(directory: Path) -> tuple[int, int]:
    """A log whose first file is full; where its marker stands, and where the log ends."""
    bench = Bench(directory)
    bench.write(400)
    assert FILE_BYTES < bench.end < 2 * FILE_BYTES
    marker = (directory / f"{0:020d}").read_bytes().rindex(blank(MARKER_BYTES)[4:8]) - 4
    return marker, bench.end


def feed_of(directory: Path) -> LogFeed:
    return LogFeed(CommitLog([directory]), QueueTable(), TopicFilter(), delay_levels_ms=None)


def read_all(feed: LogFeed, bound: FeedBound, *, capacity: int = 1 << 20) -> LogBatch:
    """Everything below the bound."""
    batch = LogBatch(capacity)
    for _ in range(1000):
        if feed.advance(batch, bound, capacity) is not FeedOutcome.MORE:
            return batch
    raise AssertionError("no end")


@pytest.mark.parametrize("left", range(1, MARKER_BYTES + 1))
@pytest.mark.parametrize("topic", [b"t", b"rmq_sys_x"])
def test_a_batch_that_is_almost_full_at_a_files_end_continues(
    left: int, topic: bytes, tmp_path: Path
) -> None:
    """It is neither old (filtered traffic never is) nor full, and what it needs is the marker behind it."""
    (tmp_path / "probe").mkdir()
    (tmp_path / "log").mkdir()
    Bench(tmp_path / "probe").write(400, topic=topic)
    marker = (tmp_path / "probe" / f"{0:020d}").read_bytes().rindex(blank(MARKER_BYTES)[4:8]) - 4
    bench = Bench(tmp_path / "log", batch_bytes=marker + left)
    bench.write(400, topic=topic)
    for _ in range(10):
        if bench.dispatcher.compensate(bench.bound()) is StepResult.CAUGHT_UP:
            break
    assert bench.dispatcher.cursor == bench.end


@pytest.mark.parametrize("left", range(MARKER_BYTES))
def test_a_batch_without_room_for_the_marker_is_full(left: int, tmp_path: Path) -> None:
    marker, end = two_files(tmp_path)
    batch = LogBatch(marker + left)
    feed = feed_of(tmp_path)
    outcome = FeedOutcome.MORE
    while outcome is FeedOutcome.MORE:
        outcome = feed.advance(batch, FeedBound(end, end), 1 << 20)
    assert (outcome, batch.to_phys) == (FeedOutcome.FULL, marker)


@pytest.mark.parametrize("claimed", [1 << 14, 1 << 16, 3 << 18])
def test_a_damaged_size_costs_its_record_even_if_it_reaches_above_the_bound(
    claimed: int, tmp_path: Path
) -> None:
    """The file has room for it, so nothing but the records inside what it claims tells that it is wrong."""
    bodies = [bytes([n]) * 100 for n in range(20)]
    log, positions = b"", []
    for number, body in enumerate(bodies):
        positions.append(len(log))
        log += encode(Message(queue_offset=number, body=body), len(log))
    victim = 7
    data = bytearray(log + bytes((1 << 20) - len(log)))
    struct.pack_into(">i", data, positions[victim], claimed)
    (tmp_path / f"{0:020d}").write_bytes(data)
    batch = read_all(feed_of(tmp_path), FeedBound(len(log), len(log)), capacity=1 << 13)
    assert batch.to_phys == len(log)
    assert [(d.begin_phys, d.end_phys, d.detail) for d in batch.damaged] == [
        (positions[victim], positions[victim + 1], "size")
    ]
    assert batch.columns.rows == len(bodies) - 1


def records_at(phys: int, count: int) -> bytes:
    """A chain of whole records that name their places from ``phys`` on."""
    chain = b""
    for number in range(count):
        chain += encode(Message(topic=b"forged", queue_offset=number, body=b"forged"), phys + len(chain))
    return chain


def test_records_inside_a_body_are_a_body_however_it_is_cut(tmp_path: Path) -> None:
    """Who knows where the log ends can send some; they must not pass for what follows a damaged size."""
    first = encode(Message(body=b"x"), 0)
    body_at = len(first) + len(encode(Message(body=b""), 0)) - len(b"topic") - 3
    second = encode(Message(queue_offset=1, body=records_at(body_at, 3)), len(first))
    assert struct.pack(">q", body_at) in second
    log = first + second + encode(Message(queue_offset=2, body=b"z"), len(first + second))
    (tmp_path / f"{0:020d}").write_bytes(log + bytes(1 << 16))
    for bound in range(len(first) + 1, len(first + second)):
        batch, feed = LogBatch(1 << 16), feed_of(tmp_path)
        while feed.advance(batch, FeedBound(bound, bound), 1 << 16) is FeedOutcome.MORE:
            pass
        assert (batch.to_phys, batch.damaged, batch.columns.rows) == (len(first), [], 1)
    for capacity in range(len(first), len(first + second)):
        batch, feed = LogBatch(capacity), feed_of(tmp_path)
        while (outcome := feed.advance(batch, FeedBound(len(log), len(log)), 1 << 16)) is FeedOutcome.MORE:
            pass
        assert (outcome, batch.to_phys, batch.damaged) == (FeedOutcome.FULL, len(first), [])
    for capacity in (MARKER_BYTES, len(second) - 1):
        batch, feed = LogBatch(capacity), feed_of(tmp_path)
        batch.from_phys = batch.to_phys = len(first)
        outcome = feed.advance(batch, FeedBound(len(log), len(log)), 1 << 16)
        assert (outcome, batch.damaged, feed.oversize_bytes) == (FeedOutcome.OVERSIZE, [], len(second))


def test_a_record_that_the_bound_cuts_is_waited_for(tmp_path: Path) -> None:
    """A confirm offset is where a slave's transfer happens to be, not where a record ends."""
    record = encode(Message(body=bytes(1000)), 0)
    following = encode(Message(queue_offset=1, body=b"y"), len(record))
    (tmp_path / f"{0:020d}").write_bytes(record + following + bytes(1 << 16))
    feed = feed_of(tmp_path)
    batch = LogBatch(1 << 16)
    for bound in (3, 20, 500, len(record) - 1):
        assert feed.advance(batch, FeedBound(bound, bound), 1 << 16) is FeedOutcome.CAUGHT_UP
        assert (batch.to_phys, batch.damaged) == (0, [])
    bound = len(record) + 50
    while feed.advance(batch, FeedBound(bound, bound), 1 << 16) is FeedOutcome.MORE:
        pass
    assert (batch.to_phys, batch.damaged) == (len(record), [])


@pytest.mark.parametrize("left", range(1, MARKER_BYTES))
def test_a_file_cut_to_a_few_bytes_does_not_end_the_log(left: int, tmp_path: Path) -> None:
    _, end = two_files(tmp_path)
    with (tmp_path / f"{0:020d}").open("r+b") as file:
        file.truncate(left)
    batch = read_all(feed_of(tmp_path), FeedBound(end, end))
    assert batch.to_phys == end
    assert [(d.begin_phys, d.end_phys, d.detail) for d in batch.damaged] == [(0, FILE_BYTES, "cut short")]
    assert batch.columns.rows == (end - FILE_BYTES) // RECORD_BYTES
