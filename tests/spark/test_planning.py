"""Plans: the same version gives the same partitions, large runs are split, no offset is read twice or missed.

``read``: planned in the call, one task for each part, one copy in Spark, errors at once.

Runs of offset ranges from a catalog of many pages: all of them, and few pages of an old history.

Options of the data source: paths, names of other sources, offsets, versions, topics.
"""

import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession

from benchmarks.synthetic_store import StoreSpec, write_store
from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import (
    MIB,
    Mode,
    Source,
    SourceOptions,
    Starting,
    parse_options,
)
from rocketmq_tiered.message_table.plan.archive_plan import (
    check_archives,
    pages_of,
    pinned_versions,
    plan,
    runs_of,
)
from rocketmq_tiered.message_table.plan.partitions import (
    SLICE_DTYPE,
    ArchiveRef,
    ObjectRef,
    OffsetRange,
    Slices,
    cut,
)
from rocketmq_tiered.spark import read
from rocketmq_tiered.spark.source.reading import frame_of_parts
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.end_to_end.offloading import CLUSTER
from tests.fetcher.broker_store_writer import WrittenStore
from tests.spark.conftest import archive_store
from tests.spark.plain_read import read_without_spark
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex
from tiered.catalog.writer_limits import CatalogLimits
from tiered.errors import NotFoundError, TieredError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore

RUNS = st.lists(
    st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(1, 1000), st.integers(1, 10_000_000)),
    min_size=1,
    max_size=30,
)


@given(RUNS, st.integers(1000, 5_000_000))
def test_partitions_are_bounded_and_contain_every_offset_once(
    runs: list[tuple[int, int, int, int]], partition_bytes: int
) -> None:
    table = np.zeros(len(runs), SLICE_DTYPE)
    for number, (queue, key, offsets, weight) in enumerate(runs):
        table[number] = (queue, key, number, 0, 10, 10 + offsets, weight)
    objects = tuple(ObjectRef(f"key-{number}", 100, 50) for number in range(6))
    queues = tuple(QueueKey("t", number, 0) for number in range(4))
    parts = cut([Slices(ArchiveRef("c", "b", 1), table, queues, objects)], partition_bytes)
    found: dict[int, list[tuple[int, int]]] = {}
    for part in parts:
        heaviest = int(part.table["weight"].max())
        assert int(part.table["weight"].sum()) <= 2 * partition_bytes or heaviest > partition_bytes
        for row in part.table:
            queue, key, offsets, weight = runs[int(row["ordinal"])]
            assert part.queues[int(row["queue"])].queue_id == queue
            assert part.objects[int(row["object"])].key == f"key-{key}"
            is_one_offset = row["end"] - row["begin"] == 1
            assert row["weight"] <= partition_bytes or is_one_offset
            found.setdefault(int(row["ordinal"]), []).append((int(row["begin"]), int(row["end"])))
    for number, (_, _, offsets, _) in enumerate(runs):
        pieces = sorted(found[number])
        assert pieces[0][0] == 10 and pieces[-1][1] == 10 + offsets
        assert all(one[1] == following[0] for one, following in pairwise(pieces))


def test_a_version_has_the_same_plan_after_later_commits(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    archive_store(real_store("K") / "store", tmp_path / "one", "K")
    options = replace(parse_options({"path": f"file://{tmp_path / 'one'}"}), partition_bytes=200_000)
    newest = pinned_versions(options)
    pinned = {names: version - 4 for names, version in newest.items()}
    before = plan(options, pinned, Predicate(), is_header_only=False)
    archive_store(real_store("B") / "store", tmp_path / "one", "K2")
    again = plan(options, pinned, Predicate(), is_header_only=False)
    assert len(before) > 5
    for one, other in zip(before, again, strict=True):
        assert (one.archive, one.queues, one.objects) == (other.archive, other.queues, other.objects)
        assert one.archive.version == pinned[("FxCluster", "K")]
        assert (one.table == other.table).all()
    rows = sum(int((part.table["end"] - part.table["begin"]).sum()) for part in before)
    every = plan(options, newest, Predicate(), is_header_only=False)
    assert 0 < rows < sum(int((part.table["end"] - part.table["begin"]).sum()) for part in every)


def test_a_large_queue_is_read_by_many_tasks(spark: SparkSession, tmp_path: Path) -> None:
    """One queue of 30,000 messages beside others of a few: no task gets much more than any other."""
    store, archive = tmp_path / "store", tmp_path / "archive"
    write_store(store, StoreSpec(1, 1, 512), messages=30_000)
    archive_store(store, archive, "skewed")
    write_store(tmp_path / "small", StoreSpec(2, 8, 512), messages=160)
    archive_store(tmp_path / "small", archive, "small")
    frame = read(
        spark,
        f"file://{archive}",
        columns=["brokerName", "queueId", "queueOffset", "recCrc32"],
        partitionBytes=2 << 20,
    )
    counted = frame.selectExpr("*", "spark_partition_id() AS task").cache()
    try:
        tasks = {row["task"]: row["count"] for row in counted.groupBy("task").count().collect()}
        (large,) = (
            counted.where("brokerName = 'skewed'")
            .selectExpr(
                "count(*) AS rows", "count(DISTINCT queueOffset) AS offsets", "count(DISTINCT task) AS tasks"
            )
            .collect()
        )
        assert (large["rows"], large["offsets"]) == (30_000, 30_000)
        assert large["tasks"] >= 8
        assert sum(tasks.values()) == 30_160
        assert max(tasks.values()) <= 2 * 30_000 / large["tasks"]
    finally:
        counted.unpersist()


def test_actions_on_one_dataframe_see_one_version(
    spark: SparkSession, small_archive: Path, tmp_path: Path
) -> None:
    """An archive that grows between two actions: commits appear one by one, as a copy shows them."""
    archive = tmp_path / "growing"
    shutil.copytree(small_archive, archive)
    commits = sorted((archive / "FxCluster/K/catalog").iterdir())  # newest first
    kept = [(path, path.read_bytes()) for path in commits[:4]]
    for path, _ in kept:
        path.unlink()
    frame = read(spark, f"file://{archive}", columns=["topic", "queueOffset"])
    before = frame.count()
    for path, data in reversed(kept):
        path.write_bytes(data)
    assert frame.count() == before
    assert read(spark, f"file://{archive}", columns=["queueOffset"]).count() > before


def test_options_are_checked() -> None:
    good = parse_options(
        {
            "path": "s3://b/p",
            "Topic": "a, b*",
            "MODE": "permissive",
            "partitionbytes": str(MIB),
            "accessKey": "A",
            "secretKey": "S",
            "startingOffsets": "timestamp",
            "startingTimestamp": "20261121",
        }
    )
    assert (good.topics, good.mode, good.source) == (("a", "b*"), Mode.PERMISSIVE, Source.ARCHIVE)
    assert parse_options({"path": "/x", "source": "STORE"}).source is Source.STORE
    dated = parse_options({"path": "p", "since": "2026-11-21T02:21:48.020Z", "until": "1795227708021"})
    assert (dated.since_ms, dated.until_ms) == (1795227708020, 1795227708021)
    assert good.wants("bcd") and not good.wants("c")
    assert (good.starting, good.starting_timestamp) == (Starting.TIMESTAMP, 1795219200000)
    assert "S'" not in repr(good) and good.store.credentials is not None
    for wrong, complaint in (
        ({}, "path is missing"),
        ({"path": "x", "topics": "a"}, "unknown option topics"),
        ({"path": "x", "mode": "DROP"}, "use one of FAILFAST, PERMISSIVE"),
        ({"path": "x", "partitionBytes": "1k"}, "a whole number"),
        ({"path": "x", "batchBytes": str((1 << 30) + 1)}, "a whole number from 65536 to 1073741824"),
        ({"path": "x", "accessKey": "a"}, "require each other"),
        ({"path": "x", "since": "soon"}, "since: soon is not a time"),
        ({"path": "x", "until": "1795227708"}, "until: 1795227708 milliseconds since 1970 is 1970-01-21"),
        ({"path": "x", "since": "20261121", "until": "2026-11-21"}, "since is not before until"),
        ({"path": "x", "startingOffsets": "timestamp"}, "require each other"),
        ({"path": "x", "maxRowsPerTrigger": "1", "maxBytesPerTrigger": "1"}, "mutually exclusive"),
        ({"path": "/x", "source": "store", "generation": "all"}, "generation requires source=archive"),
        ({"path": "/x", "source": "store", "version": "3"}, "version requires source=archive"),
        ({"path": "x", "brokerConf": "/broker.conf"}, "brokerConf requires source=store"),
    ):
        with pytest.raises(UsageError, match=complaint):
            parse_options(wrong)


def test_lmqs_weigh_as_much_as_the_records_they_refer_to(tmp_path: Path) -> None:
    """A task holds what it reads of them; an export all of a part."""
    parent, lmq = QueueKey("parent", 0, 0), QueueKey("%LMQ%light", 0, 0)
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path), archive_prefix("cluster", "broker")))
    body = b"x" * 300_000
    builder.commit([Sent(parent, body, offset, lmq=[lmq]) for offset in range(20)])
    for topic in (parent.topic, lmq.topic):
        options = parse_options(
            {"path": f"file://{tmp_path}", "topic": topic, "partitionBytes": str(1 << 20)}
        )
        parts = plan(options, pinned_versions(options), Predicate(), is_header_only=False)
        assert 5 <= len(parts) <= 6
        assert sum(int(part.table["weight"].sum()) for part in parts) >= 20 * len(body)
        assert len(plan(options, pinned_versions(options), Predicate(), is_header_only=True)) == 1


def test_missing_topics_archives_and_versions_are_errors(small_archive: Path, tmp_path: Path) -> None:
    options = parse_options({"path": f"file://{small_archive}", "topic": "no_such_topic"})
    with pytest.raises(NotFoundError, match="no topic no_such_topic"):
        plan(options, pinned_versions(options), Predicate(), is_header_only=True)
    with pytest.raises(NotFoundError, match="archives: FxCluster/K"):
        pinned_versions(replace(options, broker="other"))
    with pytest.raises(NotFoundError, match="no catalog version 999; the newest version is"):
        pinned_versions(replace(options, version=999))
    with pytest.raises(NotFoundError):
        pinned_versions(parse_options({"path": f"file://{tmp_path}"}))


COLUMNS = ["topic", "queueId", "queueOffset"]


def _plan_text(frame: DataFrame) -> str:
    return str(frame._jdf.queryExecution().executedPlan().toString())


@pytest.mark.integration
def test_spark_does_not_copy_rows_again(spark: SparkSession, small_archive: Path) -> None:
    frame = read(spark, f"file://{small_archive}")
    assert "MapInArrow ReadParts" in _plan_text(frame)
    assert "Project" not in _plan_text(frame)
    source = spark.read.format("rocketmq-tiered").load(f"file://{small_archive}")
    assert source.schema == frame.schema
    assert "Project" in _plan_text(source), "Spark now copies only once: one way to read is enough"


def test_wrong_options_and_names_fail_in_the_call(
    spark: SparkSession, small_archive: Path, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="unknown option topics"):
        read(spark, f"file://{small_archive}", topics="t_sizes")
    for wrong in ({"startingOffsets": "latest"}, {"maxRowsPerTrigger": 5}, {"maxBytesPerTrigger": 5}):
        with pytest.raises(UsageError, match="to streams only"):
            read(spark, f"file://{small_archive}", **wrong)
        with pytest.raises(Exception, match="to streams only"):
            spark.read.format("rocketmq-tiered").options(**wrong).load(f"file://{small_archive}").count()
    with pytest.raises(NotFoundError, match="has no topic nothing"):
        read(spark, f"file://{small_archive}", topic="nothing")
    with pytest.raises(NotFoundError):
        read(spark, f"file://{tmp_path}")


def test_a_range_without_messages_is_an_empty_frame(spark: SparkSession, small_archive: Path) -> None:
    nothing = read(spark, f"file://{small_archive}", until="2020-01-01", columns=COLUMNS)
    assert nothing.columns == COLUMNS
    assert nothing.count() == 0


def test_credentials_are_not_shown(spark: SparkSession, small_archive: Path) -> None:
    keys = {"accessKey": "AKIA-shown-nowhere", "secretKey": "secret-shown-nowhere"}
    read(spark, f"file://{small_archive}", columns=COLUMNS, **keys).createOrReplaceTempView("with_keys")
    shown = spark.sql("EXPLAIN EXTENDED SELECT * FROM with_keys").collect()[0][0]
    assert "ReadParts" in shown
    assert "shown-nowhere" not in shown


def test_a_plan_of_more_than_a_megabyte_has_each_part_once(spark: SparkSession, small_archive: Path) -> None:
    """Spark ships what is so large in another way, once to each executor."""
    options = parse_options(
        {"path": f"file://{small_archive}", "topic": "t_sizes", "columns": ",".join(COLUMNS)}
    )
    columns = chosen(options.columns)
    parts = plan(options, pinned_versions(options), Predicate(), is_header_only=True)
    rows = frame_of_parts(spark, columns, [(options, part) for part in parts]).count()
    filler = tuple(f"{CLUSTER}-{number}" * 8 for number in range(20_000))
    large = replace(options, topics=filler)  # not used: the parts are given
    nothing = replace(large, until_ms=1)
    assert frame_of_parts(spark, columns, [(options, part) for part in parts * 3]).count() == 3 * rows > 0
    assert frame_of_parts(spark, columns, [(large, part) for part in parts * 3]).count() == 3 * rows
    assert frame_of_parts(spark, columns, [(nothing, part) for part in parts * 3]).count() == 0


QUEUES = [QueueKey("t", number, 0) for number in range(3)]


def test_only_pages_from_the_begin_of_a_range_on_are_read() -> None:
    store = MemoryStore()
    limits = CatalogLimits(root_every=4, root_runs_max=4, page_runs_max=5, merge_sequences=4, merge_spills=4)
    archive = ArchiveBuilder(store, limits=limits)
    for number in range(120):
        archive.commit([Sent(queue, b"%d" % number) for queue in QUEUES[: 2 + number % 2]])
    state, index = load(store), RunIndex(store)
    assert len(state.pages) > 30 and state.memory_runs
    random = np.random.default_rng(1)
    whole = {queue: index.runs_of(state, queue).runs for queue in QUEUES}
    for _ in range(30):
        wanted = {queue: OffsetRange(*sorted(random.integers(0, 121, 2).tolist())) for queue in QUEUES}
        found = runs_of(index, state, wanted)
        for queue, one in wanted.items():
            runs = whole[queue]
            inside = (runs["end_queue_offset"] > one.begin) & (runs["base_queue_offset"] < one.end)
            expected = runs["base_queue_offset"][inside].tolist() if one.begin < one.end else []
            assert found[queue]["base_queue_offset"].tolist() == expected
    news = {QUEUES[0]: OffsetRange(110, 120), QUEUES[1]: OffsetRange(118, 120)}
    assert len(list(pages_of(index, state, news))) <= 8
    nothing = {queue: OffsetRange(5, 5) for queue in QUEUES}
    assert list(pages_of(index, state, nothing)) == []


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
        ({"endingOffsets": '{"t": 3}'}, "endingOffsets: topic t does not have an offset for each"),
        (
            {"startingOffsets": '{"t": {"0": -3}}'},
            "startingOffsets: topic t does not have an offset for each",
        ),
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
