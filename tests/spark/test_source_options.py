"""Options of the data source: paths, names of other sources, offsets, versions, topics."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.message_table.options.source_options import SourceOptions, parse_options
from rocketmq_tiered.message_table.plan.archive_plan import check_archives, pinned_versions
from tests.end_to_end.offloading import CLUSTER
from tests.fetcher.broker_store_writer import WrittenStore
from tests.spark.conftest import archive_store
from tests.spark.plain_read import read_without_spark
from tiered.errors import NotFoundError, TieredError, UsageError


def rows_of(**options: str) -> list[dict[str, Any]]:
    batches = read_without_spark(options, ["topic", "queueId", "queueOffset"])
    return [row for batch in batches for row in batch.to_pylist()]


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ("s3a://bucket/prefix", "s3://bucket/prefix"),
        ("s3://bucket/prefix", "s3://bucket/prefix"),
        ("/data/archive dir", "file:///data/archive%20dir"),
        ("archive", (Path.cwd() / "archive").as_uri()),
        ("file:///data", "file:///data"),
    ],
)
def test_paths(given: str, path: str) -> None:
    assert parse_options({"path": given}).path == path


def test_a_list_of_paths() -> None:
    options = parse_options({"paths": '["s3://a/b", "/c", "s3a://a/b"]'})
    assert [one.path for one in options.each_path()] == ["s3://a/b", "file:///c"]


def test_names_of_the_kafka_source_and_of_delta() -> None:
    options = parse_options(
        {
            "path": "s3://b",
            "subscribe": "orders,paid_*",
            "maxOffsetsPerTrigger": "10",
            "versionAsOf": "7",
            "endingOffsets": "latest",
        }
    )
    assert (options.topics, options.max_rows_per_trigger, options.version) == (("orders", "paid_*"), 10, 7)
    assert options.ends == {}
    assert parse_options({"path": "s3://b", "subscribePattern": "o.+s"}).wants("orders")
    assert not parse_options({"path": "s3://b", "subscribePattern": "o.+s"}).wants("orders2")
    starts = parse_options({"path": "s3://b", "startingOffsets": '{"orders": {"0": 4, "1": -2}}'}).starts
    assert starts == {("orders", 0): 4, ("orders", 1): -2}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"subscribe": "a", "topic": "b"}, "same option"),
        ({"topic": "a", "subscribePattern": "b"}, "mutually exclusive"),
        ({"version": "1", "timestampAsOf": "2026-11-01"}, "mutually exclusive"),
        ({"subscribePattern": "("}, "not a regular expression"),
        ({"startingOffsets": "{"}, "not JSON"),
        ({"endingOffsets": '{"t": 3}'}, "endingOffsets is wrong for topic t"),
        ({"startingOffsets": '{"t": {"0": -3}}'}, "startingOffsets is wrong for topic t"),
        ({"view": "first"}, "use one of messages, latest, changes"),
    ],
)
def test_impossible_options_are_refused(options: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_options({"path": "s3://b"} | options)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_offsets_limit_what_is_read(tmp_path: Path) -> None:
    store = WrittenStore(tmp_path / "store")
    for number in range(10):
        for queue_id in (0, 1):
            store.put("t", queue_id, b"%d" % number)
    archive_store(store.path, tmp_path / "archive", "a")
    url = str(tmp_path / "archive")
    starts, ends = '{"t": {"0": 3, "1": -1}}', '{"t": {"0": 5}}'
    assert [row["queueOffset"] for row in rows_of(path=url, startingOffsets=starts, endingOffsets=ends)] == [
        3,
        4,
    ]
    assert len(rows_of(path=url, endingOffsets='{"t": {"0": 99, "1": -2}}')) == 10
    with pytest.raises(NotFoundError, match="no queue 7 of topic t"):
        rows_of(path=url, startingOffsets='{"t": {"7": 3}}')


def test_a_version_by_time(tmp_path: Path) -> None:
    store = WrittenStore(tmp_path / "store")
    for number in range(3):
        store.put("t", 0, b"%d" % number)
    archive_store(store.path, tmp_path / "archive", "a")
    url = f"file://{tmp_path / 'archive'}"
    (first,) = pinned_versions(parse_options({"path": url})).values()
    time.sleep(0.01)
    between_ms = time.time_ns() // 1_000_000
    time.sleep(0.01)
    store.put("t", 0, b"3")
    archive_store(store.path, tmp_path / "archive", "a")
    assert set(pinned_versions(parse_options({"path": url, "timestampAsOf": str(between_ms)})).values()) == {
        first
    }
    assert len(rows_of(path=url, timestampAsOf=str(between_ms))) == 3
    assert len(rows_of(path=url)) == 4
    with pytest.raises(NotFoundError, match="no catalog version"):
        rows_of(path=url, timestampAsOf="2020-01-01")


@pytest.mark.parametrize(
    "options", [{"topics": ("nowhere",)}, {"topics": ("t_one", "no*")}, {"topic_regex": "no.*"}]
)
@pytest.mark.parametrize("source", ["archive", "store"])
def test_an_unknown_topic_or_pattern_is_an_error(
    options: dict[str, Any], source: str, small_archive: Path, real_store: Callable[[str], Path]
) -> None:
    names = {"topic": ",".join(options.get("topics", ())), "subscribePattern": options.get("topic_regex", "")}
    given = {name: value for name, value in names.items() if value}
    place = (
        {"path": f"file://{small_archive}"}
        if source == "archive"
        else {"path": str(real_store("K") / "store"), "source": "store", "cluster": CLUSTER, "broker": "K"}
    )
    with pytest.raises(NotFoundError, match=r"no topic.* no"):
        rows_of(**place, **given)


def test_archives_and_topics_are_checked_in_the_catalogs(small_archive: Path, tmp_path: Path) -> None:
    options = SourceOptions(f"file://{small_archive}")
    check_archives(options)
    for wrong in (replace(options, topics=("nowhere",)), SourceOptions(f"file://{tmp_path}")):
        with pytest.raises(TieredError):
            check_archives(wrong)
