"""The archive as a stream: every row once, in bounded batches, over restarts, from the chosen start."""

import json
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import SparkSession
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxBytes, ReadMaxRows

from rocketmq_tiered.spark.source import archive_follower
from rocketmq_tiered.spark.source.archive_follower import (
    ArchiveOffset,
    bytes_between,
    from_json,
    offset_after,
    share,
    to_json,
)
from tests.end_to_end.offloading import backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.spark.growing_archive import GrowingArchive
from tests.spark.stream_reading import COLUMNS, drained, rows_of, stream_reader
from tiered.errors import CorruptionError, NotFoundError, UsageError
from tiered.model.queue import QueueKey
from tiered.model.tables import RUN_DTYPE
from tiered.object_store.file import FileStore

pytestmark = pytest.mark.integration

ARCHIVE = "FxCluster/K"
QUEUES = st.builds(QueueKey, st.sampled_from(["t", "t|x", "%LMQ%a/b"]), st.integers(0, 9), st.integers(0, 2))
OFFSETS = st.dictionaries(
    st.tuples(st.text(min_size=1, max_size=5), st.sampled_from(["b", "b/c", "ü"])),
    st.builds(ArchiveOffset, st.integers(1, 99), st.dictionaries(QUEUES, st.integers(0, 2**62), max_size=4)),
    max_size=3,
)


@given(OFFSETS)
def test_offsets_survive_the_checkpoint(offset: dict[tuple[str, str], ArchiveOffset]) -> None:
    assert from_json(json.loads(json.dumps(to_json(offset)))) == offset


def test_a_foreign_checkpoint_is_refused() -> None:
    for wrong in ({"a/b": {"version": 1}}, {"a": {"version": 1, "queues": {}}}, {"a/b": 5}):
        with pytest.raises(CorruptionError, match="checkpoint cannot be read"):
            from_json(wrong)


@pytest.mark.parametrize(
    ("queues", "reason"),
    [
        ({"t": dict.fromkeys(map(str, range(11)), 1)}, "more than 10 queues"),
        ({f"t{number}": {} for number in range(11)}, "more than 10 queues"),
        ({"t" * 1025: {}}, "a name of more than 1024 characters"),
        ({"t": {"0.0": 1 << 63}}, "is not a whole number from 0"),
        ({"t": {"0.0": "9" * 4000}}, "is not a whole number from 0"),
        ({"t": {"0.0": -1}}, "is not a whole number from 0"),
        ({"t": {"9" * 4000 + ".0": 1}}, "is not a whole number from 0"),
    ],
)
def test_an_offset_of_any_size_is_refused(
    queues: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive_follower, "QUEUES_MAX", 10)
    with pytest.raises(CorruptionError, match=reason):
        from_json({"c/b": {"version": 1, "queues": queues}})


@given(st.lists(st.integers(0, 10_000), max_size=20), st.integers(0, 50_000))
def test_shares_use_the_whole_limit_and_at_most_the_backlog(available: list[int], limit: int) -> None:
    shares = share(available, limit)
    assert all(0 <= mine <= there for mine, there in zip(shares, available, strict=True))
    assert sum(shares) == min(max(limit, 1), sum(available))
    for mine, there in zip(shares, available, strict=True):
        assert abs(mine - there * sum(shares) / max(sum(available), 1)) <= 1


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 5000)), min_size=1, max_size=8), st.data())
def test_bytes_and_offsets_agree(sizes: list[tuple[int, int]], draw: st.DataObject) -> None:
    runs = np.zeros(len(sizes), RUN_DTYPE)
    ends = np.cumsum([rows for rows, _ in sizes]) + 100
    runs["end_queue_offset"], runs["rows"] = ends, [rows for rows, _ in sizes]
    runs["base_queue_offset"], runs["byte_count"] = ends - runs["rows"], [size for _, size in sizes]
    begin = draw.draw(st.integers(100, int(ends[-1])))
    limit = draw.draw(st.integers(0, 60_000))
    reached = offset_after(runs, begin, int(ends[-1]), limit)
    assert begin <= reached <= ends[-1]
    assert reached > begin or begin == ends[-1]
    assert reached <= begin + 1 or bytes_between(runs, begin, reached) <= limit
    assert reached == ends[-1] or bytes_between(runs, begin, reached + 1) > limit


def places(rows: Sequence[dict[str, Any]]) -> Counter[tuple[Any, ...]]:
    return Counter((row["topic"], row["generation"], row["queueId"], row["queueOffset"]) for row in rows)


@pytest.mark.parametrize("limit", [ReadAllAvailable(), ReadMaxRows(700), ReadMaxBytes(400_000)])
def test_every_row_once_while_the_archive_grows(
    small_archive: Path, tmp_path: Path, limit: ReadLimit
) -> None:
    growing = GrowingArchive(small_archive, tmp_path / "archive", ARCHIVE, shown=2)
    rows: list[dict[str, Any]] = []
    start: dict[str, Any] = {}
    count = 0
    while True:
        reader = stream_reader(growing.url)  # as after a restart: only the offset is left
        start = start or reader.initialOffset()
        batches, start = drained(reader, start, limit)
        reader.stop()
        rows += [row for batch in batches for row in batch]
        if isinstance(limit, ReadMaxRows):
            assert all(len(batch) <= limit.max_rows for batch in batches)
        count += len(batches)
        if not growing.hidden_commits:
            break
        growing.show(1)
    # Topics that are deleted by the end were there when the stream passed.
    whole = stream_reader(f"file://{small_archive}", generation="all")
    expected = rows_of(whole, {}, whole.latestOffset({}, ReadAllAvailable()))
    assert places(rows) == places(expected)
    assert max(places(rows).values()) == 1
    assert len(rows) > 7000
    if isinstance(limit, ReadMaxBytes):  # about: messages of a run count as equally large
        assert count >= sum(row["storeSize"] for row in rows) / limit.max_bytes * 0.7


def test_a_repeated_batch_is_the_same(small_archive: Path, tmp_path: Path) -> None:
    growing = GrowingArchive(small_archive, tmp_path / "archive", ARCHIVE, shown=5)
    reader = stream_reader(growing.url)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadMaxRows(900))
    before = rows_of(reader, start, end)
    growing.show(99)
    assert places(rows_of(stream_reader(growing.url), start, end)) == places(before)
    assert len(before) <= 900


def test_starting_offsets(small_archive: Path) -> None:
    url = f"file://{small_archive}"
    everything = rows_of(
        reader := stream_reader(url),
        reader.initialOffset(),
        end := reader.latestOffset({}, ReadAllAvailable()),
    )
    latest = stream_reader(url, startingoffsets="latest")
    assert latest.initialOffset() == end
    assert rows_of(latest, latest.initialOffset(), end) == []
    times = sorted(row["storeTimestamp"] for row in everything)
    middle = times[len(times) // 2]
    later = stream_reader(url, startingoffsets="timestamp", startingtimestamp=str(middle))
    found = rows_of(later, later.initialOffset(), end)
    assert places(found) == places([row for row in everything if row["storeTimestamp"] >= middle])
    assert 0 < len(found) < len(everything)


def test_available_now_ends_at_the_newest_offset_of_its_start(small_archive: Path, tmp_path: Path) -> None:
    growing = GrowingArchive(small_archive, tmp_path / "archive", ARCHIVE, shown=5)
    reader = stream_reader(growing.url, maxrowspertrigger="1000")
    reader.prepareForTriggerAvailableNow()
    growing.show(99)
    batches, end = drained(reader, reader.initialOffset(), reader.getDefaultReadLimit())
    assert len(batches) > 1
    reader.stop()
    assert stream_reader(growing.url).latestOffset(end, ReadAllAvailable()) != end


class ReplacedLog:
    """An archive of a broker that came back from a copy of its disk: queue 0 of ``t`` had 150 messages, 100 of them are
    also in the log that takes its place. Queue 1 began behind those."""

    def __init__(self, path: Path) -> None:
        self.url = f"file://{path / 'archive'}"
        self._root = FileStore(path / "archive")
        self._first = WrittenStore(path / "first")
        for _ in range(2):
            self._put(self._first, 0, 50)
            backfill(self._first.path, self._root)
        shutil.copytree(self._first.path, path / "second")
        self._second = WrittenStore(path / "second", self._first.phys)
        self._second.records = {place: dict(found) for place, found in self._first.records.items()}
        self._put(self._first, 0, 50)
        self._put(self._first, 1, 20)
        backfill(self._first.path, self._root)

    def replace(self, counts: dict[int, int]) -> None:
        """The second log continues, by queue."""
        for queue_id, count in counts.items():
            self._put(self._second, queue_id, count)
        backfill(self._second.path, self._root, instance="second", replace_log=True)

    @staticmethod
    def _put(store: WrittenStore, queue_id: int, count: int) -> None:
        for number in range(count):
            store.put("t", queue_id, f"{store.path.name} {number} ".encode() + b"x" * 800)


@pytest.mark.parametrize("limit", [ReadAllAvailable(), ReadMaxRows(7), ReadMaxBytes(9_000)])
@pytest.mark.parametrize("steps", [[{0: 30, 1: 5}], [{0: 90, 1: 40}], [{0: 1}, {0: 10}, {0: 80, 1: 30}]])
def test_a_replaced_log_is_an_error_or_read_in_full_if_data_loss_is_allowed(
    tmp_path: Path, limit: ReadLimit, steps: list[dict[int, int]]
) -> None:
    archive = ReplacedLog(tmp_path)
    strict, tolerant = stream_reader(archive.url), stream_reader(archive.url, failondataloss="false")
    batches, reached = drained(tolerant, tolerant.initialOffset(), limit)
    assert sum(map(len, batches)) == 170
    rows, at = [], reached
    for counts in steps:
        archive.replace(counts)
        with pytest.raises(NotFoundError, match="log was truncated or replaced"):
            strict.latestOffset(reached, limit)
        batches, at = drained(tolerant, at, limit)
        rows += [row for batch in batches for row in batch]
    expected = {(0, 100 + number) for number in range(sum(counts.get(0, 0) for counts in steps))}
    expected |= {(1, number) for number in range(sum(counts.get(1, 0) for counts in steps))}
    assert Counter((row["queueId"], row["queueOffset"]) for row in rows) == dict.fromkeys(expected, 1)
    with pytest.raises(NotFoundError, match="log was truncated or replaced"):
        strict.partitions(reached, at)


def test_a_batch_of_a_replaced_log_is_not_read_from_the_new_log(
    tmp_path: Path,
) -> None:
    archive = ReplacedLog(tmp_path)
    reader = stream_reader(archive.url)
    start = reader.initialOffset()
    end = reader.latestOffset(start, ReadAllAvailable())
    taken_back = sorted((tmp_path / "archive").rglob("*.s*o"))[-1]
    archive.replace({0: 90, 1: 40})
    assert len(rows_of(reader, start, end)) == 170
    taken_back.unlink()
    with pytest.raises(NotFoundError, match="superseded by a replaced log"):
        rows_of(reader, start, end)


def test_streams_of_store_directories_are_refused() -> None:
    with pytest.raises(UsageError, match="a stream cannot read a store directory"):
        stream_reader("/somewhere", source="store")
    with pytest.raises(UsageError, match="streams do not take the options version"):
        stream_reader("file:///somewhere", version="3")


def test_a_query_and_its_restart_write_every_row_once(
    spark: SparkSession, small_archive: Path, tmp_path: Path
) -> None:
    growing = GrowingArchive(small_archive, tmp_path / "archive", ARCHIVE, shown=5)
    stream = (
        spark.readStream.format("rocketmq-tiered")
        .option("columns", ",".join(COLUMNS))
        .option("maxRowsPerTrigger", 4000)
        .load(growing.url)
    )
    for _ in range(2):
        query = (
            stream.writeStream.format("parquet")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start(str(tmp_path / "out"))
        )
        assert query.awaitTermination(120)
        growing.show(99)
    rows = [row.asDict() for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    # Topics that are deleted by the end were there when the stream passed.
    whole = stream_reader(f"file://{small_archive}", generation="all")
    expected = rows_of(whole, {}, whole.latestOffset({}, ReadAllAvailable()))
    assert places(rows) == places(expected)
