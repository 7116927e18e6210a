"""``since`` and ``until``: by every way of reading, exactly the messages stored then."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from rocketmq_tiered.message_table.options.predicate import Allowed, Predicate
from rocketmq_tiered.message_table.options.source_options import parse_options
from rocketmq_tiered.message_table.plan.archive_plan import pinned_versions, plan
from rocketmq_tiered.spark import read
from rocketmq_tiered.spark.jobs.export import export
from tests.spark.jobs.export_runs import NO_SPARK
from tests.spark.jobs.inline_tasks import InlineTasks
from tiered.errors import UsageError

COLUMNS = ["topic", "queueId", "queueOffset", "storeTimestamp"]
Row = tuple[str, int, int, int]


def _rows(frame: DataFrame) -> list[Row]:
    return sorted(tuple(row) for row in frame.select(*COLUMNS).collect())


def _middle(rows: list[Row]) -> tuple[int, int]:
    times = sorted(row[3] for row in rows)
    return times[len(times) // 3], times[len(times) // 2]


def test_all_ways_of_reading_select_the_same_messages(spark: SparkSession, small_archive: Path) -> None:
    url = f"file://{small_archive}"
    every = _rows(read(spark, url, columns=COLUMNS))
    since, until = _middle(every)
    wanted = [row for row in every if since <= row[3] < until]
    assert 0 < len(wanted) < len(every) / 2
    source = spark.read.format("rocketmq-tiered").options(columns=",".join(COLUMNS), since=since, until=until)
    begin = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=since)
    for frame in (
        read(spark, url, columns=COLUMNS, since=since, until=until),
        read(spark, url, columns=[*COLUMNS, "bodyCRC"], since=begin, until=until),
        read(spark, url, columns=COLUMNS, since=begin.isoformat(), until=until, pushFilters=True),
        source.load(url),
    ):
        assert _rows(frame) == wanted
    pushed = read(spark, url, columns=COLUMNS, since=since, until=until, pushFilters=True)
    assert _rows(pushed.where(f"storeTimestamp >= {since + 1} and queueId = 0")) == [
        row for row in wanted if row[3] > since and row[1] == 0
    ]


def test_messages_outside_the_range_are_not_planned(small_archive: Path) -> None:
    before = parse_options({"path": f"file://{small_archive}", "until": "2001-01-01"})
    assert plan(before, pinned_versions(before), before.times, is_header_only=False) == []


def test_exports_and_streams_refuse_time_ranges(small_archive: Path, tmp_path: Path) -> None:
    dated = parse_options({"path": f"file://{small_archive}", "since": "2026-01-01"})
    with pytest.raises(UsageError, match="export does not take since"):
        export(NO_SPARK, dated, f"file://{tmp_path}", tasks=InlineTasks())


NUMBERS = st.dictionaries(
    st.sampled_from(["queueId", "storeTimestamp"]),
    st.builds(Allowed.between, st.integers(0, 5), st.integers(0, 5)) | st.just(Allowed.of((1, 3))),
)
NAMES = st.none() | st.frozensets(st.sampled_from(["a", "b"]))


@given(
    st.builds(Predicate, NUMBERS, NAMES, NAMES),
    st.builds(Predicate, NUMBERS, NAMES, NAMES),
    st.integers(0, 6),
)
def test_a_conjunction_admits_what_both_predicates_admit(
    one: Predicate, other: Predicate, value: int
) -> None:
    both = one.also(other)
    for name in ("queueId", "storeTimestamp"):
        assert both.allowed(name).admits(value) == (
            one.allowed(name).admits(value) and other.allowed(name).admits(value)
        )
    for name in "ab":
        assert both.admits_topic(name) == (one.admits_topic(name) and other.admits_topic(name))
    assert both.tags == (
        one.tags if other.tags is None else other.tags if one.tags is None else one.tags & other.tags
    )
