"""A stream reads messages that fill a passed gap once; a repeated batch is the same after its pages were deleted."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import parse_options
from rocketmq_tiered.message_table.plan.archive_plan import pinned_versions, plan
from tests.spark.gapped_archive import ARCHIVE, LMQ, ONE, OTHER, GappedArchive, with_a_gap
from tests.spark.stream_reading import drained, rows_of, stream_reader
from tiered.errors import NotFoundError, SnapshotExpiredError

LIMITS = [ReadAllAvailable(), ReadMaxRows(4), ReadMaxBytes(500)]


@pytest.fixture
def archive(tmp_path: Path) -> GappedArchive:
    """See ``with_a_gap``."""
    return with_a_gap(tmp_path / "archive")


def offsets(batches: list[list[dict[str, Any]]], topic: str = "one") -> list[int]:
    return sorted(row["queueOffset"] for batch in batches for row in batch if row["topic"] == topic)


def by_place(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (row["topic"], row["queueId"], row["queueOffset"]))


@pytest.mark.parametrize("limit", LIMITS, ids=["all", "rows", "bytes"])
def test_messages_that_fill_a_passed_gap_are_read_once(archive: GappedArchive, limit: ReadLimit) -> None:
    reader = stream_reader(archive.url)
    batches, at = drained(reader, reader.initialOffset(), limit)
    assert offsets(batches) == [*range(10), *range(15, 25)]
    archive.fill(ONE, range(11, 13))
    batches, at = drained(reader, at, limit)
    assert offsets(batches) == [11, 12]
    reader.stop()
    archive.put(ONE, [25])
    archive.fill(ONE, range(10, 11))
    archive.fill(ONE, range(13, 15))
    reader = stream_reader(archive.url)  # restarted: the gaps of the version before are loaded again
    batches, at = drained(reader, at, limit)
    assert offsets(batches) == [10, 13, 14, 25]
    archive.put(OTHER, [5])
    batches, at = drained(reader, at, limit)
    assert (offsets(batches), offsets(batches, "other")) == ([], [5])
    assert reader.latestOffset(at, limit) == at


def test_a_gap_filled_before_the_stream_passes_it_is_read_in_order(archive: GappedArchive) -> None:
    reader = stream_reader(archive.url, topic="one")
    start = reader.initialOffset()
    middle = json.loads(json.dumps(reader.latestOffset(start, ReadMaxRows(12))))
    assert middle[ARCHIVE]["queues"]["one"]["0.0"] == 12
    first = rows_of(reader, start, middle)
    archive.fill(ONE, range(10, 15))
    batches, _ = drained(reader, middle, ReadMaxRows(3))
    assert offsets([first, *batches]) == list(range(25))


@pytest.mark.parametrize("starting", ["latest", "timestamp"])
def test_a_stream_does_not_read_gaps_below_its_start(archive: GappedArchive, starting: str) -> None:
    given = {"startingoffsets": starting}
    if starting == "timestamp":
        given["startingtimestamp"] = "1800000000000"  # later than everything
    reader = stream_reader(archive.url, **given)
    start = json.loads(json.dumps(reader.initialOffset()))
    archive.fill(ONE, range(10, 15))
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    archive.put(ONE, [*range(25, 27), *range(30, 32)])
    batches, at = drained(reader, start, ReadAllAvailable())
    assert offsets(batches) == [25, 26, 30, 31]
    archive.fill(ONE, range(27, 30))
    batches, _ = drained(stream_reader(archive.url, **given), at, ReadAllAvailable())
    assert offsets(batches) == [27, 28, 29]


def test_a_batch_repeated_after_days_is_the_same(archive: GappedArchive) -> None:
    """What its version names is merged and collected; what was filled in since belongs to the next batch."""
    archive.age()
    reader = stream_reader(archive.url)
    start = reader.initialOffset()
    end = json.loads(json.dumps(reader.latestOffset(start, ReadAllAvailable())))
    before = rows_of(reader, start, end)
    archive.fill(ONE, range(11, 13))
    then = archive.state_at(end[ARCHIVE]["version"])
    archive.age()
    assert any(archive.is_gone(page.key) for page in then.pages), "or this shows nothing"
    reader = stream_reader(archive.url)
    assert by_place(rows_of(reader, start, end)) == by_place(before)
    batches, _ = drained(reader, end, ReadAllAvailable())
    assert offsets(batches) == [11, 12]
    assert len(offsets(batches, "other")) == 13


@pytest.mark.parametrize("of_pages", [False, True])
def test_messages_expired_during_an_outage_are_an_error_unless_data_loss_is_allowed(
    archive: GappedArchive, of_pages: bool
) -> None:
    if of_pages:
        archive.age()
    reader = stream_reader(archive.url)
    start = reader.initialOffset()
    end = json.loads(json.dumps(reader.latestOffset(start, ReadAllAvailable())))
    archive.expire(ONE)
    if of_pages:
        archive.age()
    else:
        archive.collect()
    with pytest.raises(NotFoundError, match=r"one.*offsets \[0, 1[05]\)"):
        rows_of(stream_reader(archive.url), start, end)
    tolerant = stream_reader(archive.url, failondataloss="false")
    assert offsets([rows_of(tolerant, start, end)]) == list(range(15, 25))


@pytest.mark.parametrize("rows", [11, 12, 14])
def test_a_gap_that_expires_with_earlier_messages_is_no_data_loss(archive: GappedArchive, rows: int) -> None:
    """A limited batch may end inside a gap, whose end is the queue's minimum once all before it has expired."""
    reader = stream_reader(archive.url, topic="one")
    start = reader.initialOffset()
    middle = json.loads(json.dumps(reader.latestOffset(start, ReadMaxRows(rows))))
    assert offsets([rows_of(reader, start, middle)]) == list(range(10))
    archive.expire(ONE)
    batches, _ = drained(stream_reader(archive.url, topic="one"), middle, ReadAllAvailable())
    assert offsets(batches) == list(range(15, 25))


def test_available_now_ends_at_once_without_an_archive(tmp_path: Path) -> None:
    reader = stream_reader(f"file://{tmp_path / 'archive'}")
    start = reader.initialOffset()
    reader.prepareForTriggerAvailableNow()
    archive = GappedArchive(tmp_path / "archive")
    archive.put(ONE, range(10))
    assert reader.latestOffset(start, ReadAllAvailable()) == start == {}
    reader.stop()
    batches, _ = drained(stream_reader(archive.url), start, ReadAllAvailable())
    assert offsets(batches) == list(range(10))


def test_topics_excluded_later_keep_their_offsets(archive: GappedArchive) -> None:
    reader = stream_reader(archive.url)
    _, at = drained(reader, reader.initialOffset(), ReadAllAvailable())
    archive.put(ONE, [25])
    archive.put(OTHER, [5])
    batches, at = drained(stream_reader(archive.url, topic="other"), at, ReadAllAvailable())
    assert (offsets(batches), offsets(batches, "other")) == ([], [5])
    batches, at = drained(stream_reader(archive.url), at, ReadAllAvailable())
    assert (offsets(batches), offsets(batches, "other")) == ([25], [])


def test_a_missing_or_replaced_archive_is_an_error(archive: GappedArchive, tmp_path: Path) -> None:
    reader = stream_reader(archive.url)
    _, at = drained(reader, reader.initialOffset(), ReadAllAvailable())
    shutil.rmtree(tmp_path / "archive")
    with pytest.raises(
        NotFoundError, match="cluster/broker, of which the checkpoint has offsets, no longer exists"
    ):
        stream_reader(archive.url).latestOffset(at, ReadAllAvailable())
    GappedArchive(tmp_path / "archive").put(ONE, range(3))
    with pytest.raises(NotFoundError, match="was replaced by another one"):
        stream_reader(archive.url).latestOffset(at, ReadAllAvailable())
    other = stream_reader(archive.url, broker="other")  # this archive is no longer selected
    assert other.latestOffset(at, ReadAllAvailable()) == at


def test_a_dataframe_of_an_old_version_is_complete_or_an_error(archive: GappedArchive) -> None:
    archive.age()
    options = parse_options({"path": archive.url, "topic": "one"})
    versions = pinned_versions(options)
    archive.age()
    parts = plan(options, versions, Predicate(), is_header_only=True)
    assert sum(int((part.table["end"] - part.table["begin"]).sum()) for part in parts) == 20
    archive.expire(ONE)
    archive.age()
    with pytest.raises(SnapshotExpiredError, match="have expired since catalog version"):
        plan(options, versions, Predicate(), is_header_only=True)


def test_lmqs_are_read_as_planned_or_an_error(archive: GappedArchive) -> None:
    """Their messages are read through another queue, which may have expired between plan and read."""
    archive.put(ONE, range(25, 30), lmq=[LMQ])
    archive.put(ONE, range(30, 35), lmq=[LMQ])
    archive.age()
    reader = stream_reader(archive.url, topic=LMQ.topic)
    start = reader.initialOffset()
    parts = reader.partitions(start, json.loads(json.dumps(reader.latestOffset(start, ReadAllAvailable()))))
    archive.expire(LMQ)
    archive.expire(ONE, 3)
    archive.age()
    with pytest.raises(NotFoundError, match=r"offsets \[0, 5\) have expired"):
        [list(reader.read(part)) for part in parts]
