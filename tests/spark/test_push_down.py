"""Filters handed to the source give the rows they give without it, and save the reading of what they exclude.

Spark reads what key compaction left: each row at its own offset, with records and by columns alone.
"""

import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringContains,
)
from pyspark.sql.pandas.types import to_arrow_schema

import rocketmq_tiered
from rocketmq_tiered.maintenance.key_job import compact_keys
from rocketmq_tiered.message_table.batches.message_batches import read_partition
from rocketmq_tiered.message_table.options.columns import chosen
from rocketmq_tiered.message_table.options.predicate import Allowed, Predicate, push_down
from rocketmq_tiered.message_table.options.source_options import parse_options
from rocketmq_tiered.message_table.plan.archive_plan import pinned_versions, plan
from rocketmq_tiered.message_table.plan.partitions import Slices
from rocketmq_tiered.message_table.scan.archive_scan import ArchiveScan, archive_chunks
from rocketmq_tiered.message_table.scan.object_rows import RowChunk
from rocketmq_tiered.message_table.scan.store_scan import plan_ranges
from rocketmq_tiered.spark import read
from rocketmq_tiered.spark.source.data_source import schema_of
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.fetcher.broker_store_writer import WrittenStore
from tests.kernels.record_builder import Message, encode, properties
from tests.spark.plain_read import read_without_spark
from tests.sweeps import examples
from tiered.archive.rewrite.result import RewriteOptions
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.model.queue import SCHEDULE_TOPIC, TopicFilter
from tiered.object_store.file import FileStore
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import Settings

COLUMNS = [
    "topic",
    "generation",
    "queueId",
    "queueOffset",
    "commitLogOffset",
    "storeTimestamp",
    "storeSize",
    "tags",
]
NUMBERS = ("queueId", "queueOffset", "storeTimestamp", "commitLogOffset", "storeSize", "generation")
FIRST_MS, LAST_MS = 1_795_229_580_000, 1_795_229_640_000


def numbers(name: str) -> st.SearchStrategy[int]:
    """Values of a column, and some that it never has."""
    if name == "storeTimestamp":
        return st.integers(FIRST_MS, LAST_MS)
    return st.integers(-1, 6_000_000) if name in ("commitLogOffset",) else st.integers(-1, 40)


@st.composite
def filters(draw: st.DrawFn) -> Filter:
    kind = draw(st.sampled_from(["number", "number", "number", "tags", "topic", "other"]))
    if kind == "number":
        name = draw(st.sampled_from(NUMBERS))
        compare = draw(
            st.sampled_from(
                [EqualTo, EqualNullSafe, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual, In]
            )
        )
        value = draw(numbers(name))
        if compare is In:
            return In((name,), tuple(draw(st.lists(numbers(name), max_size=20))))
        return compare((name,), value)
    if kind == "other":
        inner = EqualTo(("queueId",), draw(st.integers(0, 3)))
        others = [
            Not(inner),
            IsNotNull(("tags",)),
            IsNotNull(("queueOffset",)),
            StringContains(("topic",), "size"),
        ]
        return draw(st.sampled_from(others))
    names = {
        "tags": ["text", "rand", "R0", "nothing", ""],
        "topic": ["t_sizes", "t_bcq", "%LMQ%t_all", "t_none"],
    }[kind]
    value = draw(st.sampled_from(names))
    return draw(st.sampled_from([EqualTo((kind,), value), In((kind,), (value, names[0]))]))


def passes(row: dict[str, Any], one: Filter) -> bool:
    """Whether SQL's WHERE keeps ``row``."""
    if isinstance(one, Not):
        return not passes(row, one.child)
    value = row[one.attribute[0]]  # type: ignore[attr-defined]
    if isinstance(one, IsNotNull):
        return value is not None
    wanted = one.value  # type: ignore[attr-defined]
    if value is None:
        return False
    return {
        EqualTo: lambda: value == wanted,
        EqualNullSafe: lambda: value == wanted,
        GreaterThan: lambda: value > wanted,
        GreaterThanOrEqual: lambda: value >= wanted,
        LessThan: lambda: value < wanted,
        LessThanOrEqual: lambda: value <= wanted,
        In: lambda: value in wanted,
        StringContains: lambda: wanted in value,
    }[type(one)]()


def read_rows(archive: Path, predicate: Predicate, names: list[str]) -> list[dict[str, Any]]:
    options = replace(
        parse_options({"path": f"file://{archive}"}), partition_bytes=300_000, batch_bytes=100_000
    )
    columns = chosen(names)
    schema = to_arrow_schema(schema_of(columns), timezone="UTC")
    parts = plan(options, pinned_versions(options), predicate, is_header_only="tags" not in names)
    return [
        row
        for part in parts
        for batch in read_partition(part, options, predicate, columns, schema)
        for row in batch.to_pylist()
    ]


def order(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple((row[name] is None, row[name]) for name in COLUMNS)


@pytest.fixture(scope="session")
def every_row(small_archive: Path) -> list[dict[str, Any]]:
    return read_rows(small_archive, Predicate(), COLUMNS)


@settings(max_examples=examples(40))
@given(wanted=st.lists(filters(), min_size=1, max_size=4))
def test_push_down_does_not_change_the_rows(
    small_archive: Path, every_row: list[dict[str, Any]], wanted: list[Filter]
) -> None:
    predicate, left = push_down(wanted)
    found = [
        row for row in read_rows(small_archive, predicate, COLUMNS) if all(passes(row, one) for one in left)
    ]
    expected = [row for row in every_row if all(passes(row, one) for one in wanted)]
    assert sorted(found, key=order) == sorted(expected, key=order)


def test_exact_filters_are_not_returned_to_spark() -> None:
    exact = [
        IsNotNull(("queueId",)),
        EqualTo(("queueId",), 1),
        In(("queueOffset",), (3, None, 1)),
        LessThan(("storeTimestamp",), 9),
    ]
    asked_again = [
        EqualTo(("tags",), "a"),
        Not(exact[1]),
        EqualTo(("queueId",), 1.5),
        IsNotNull(("tags",)),
    ]
    predicate, left = push_down([*exact, *asked_again])
    assert left == asked_again
    assert predicate.numbers["queueOffset"] == Allowed.of([3, 1])
    assert predicate.tags == {"a"}
    assert push_down([EqualTo(("tags",), "\ufffd")])[0].tags is None


class RecordingStore:
    """Notes every ranged read."""

    def __init__(self, store: PrefixedStore) -> None:
        self._store = store
        self.reads: list[tuple[str, int, int]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        self.reads.append((key, offset, length))
        return self._store.get_range(key, offset, length)


@pytest.fixture
def scanned(
    archive_of: Callable[[str], Path],
) -> Callable[..., tuple[list[tuple[str, int, int]], list[Slices], int]]:
    """Reads store A's archive with a predicate: (ranged reads, partitions, rows)."""

    archive = archive_of("A")

    def scan_with(
        predicate: Predicate, *, with_records: bool
    ) -> tuple[list[tuple[str, int, int]], list[Slices], int]:
        options = parse_options({"path": f"file://{archive}", "broker": "A", "topic": "t_*"})
        parts = plan(options, pinned_versions(options), predicate, is_header_only=not with_records)
        store = RecordingStore(PrefixedStore(FileStore(archive), "FxCluster/A"))
        scan = ArchiveScan(
            store,
            predicate,
            with_records=with_records,
            window_bytes=200_000,
            on_corrupt=pytest.fail,  # type: ignore[arg-type]
        )
        chunks: Iterator[RowChunk] = (chunk for part in parts for chunk in archive_chunks(scan, part))
        return store.reads, parts, sum(len(chunk) for chunk in chunks)

    return scan_with


def test_header_only_scans_touch_no_block(scanned: Callable[..., Any]) -> None:
    reads, parts, rows = scanned(Predicate(), with_records=False)
    tails = {
        (ref.key, ref.size_bytes - ref.tail_bytes, ref.tail_bytes) for part in parts for ref in part.objects
    }
    assert rows > 100_000
    assert set(reads) == tails


def store_of_scheduled_messages(path: Path) -> Path:
    """Messages that wait for their time, in an LMQ too, as 4.9 and 5.0 dispatch them: units of both queues have
    the time as code."""
    store = WrittenStore(path)
    for offset in range(5):
        names = (b"TAGS", b"x"), (b"DELAY", b"3"), (b"INNER_MULTI_DISPATCH", b"%LMQ%light")
        text = properties(*names, (b"INNER_MULTI_QUEUE_OFFSET", b"%d" % offset))
        message = Message(SCHEDULE_TOPIC.encode(), 2, offset, b"body", text)
        unit = struct.pack(">qiq", store.phys, len(encode(message, 0)), message.store_timestamp + 10_000)
        for topic, queue_id in ((SCHEDULE_TOPIC, 2), ("%LMQ%light", 0)):
            store.put_unit(topic, queue_id, offset, unit)
        store.put_record(encode(message, store.phys))
    return path


@pytest.mark.parametrize("source", ["archive", "store"])
def test_tags_filter_an_lmq_with_scheduled_messages(source: str, tmp_path: Path) -> None:
    store = store_of_scheduled_messages(tmp_path / "store")
    everything = TopicFilter(include_system=True, cluster=CLUSTER, broker=BROKER)
    backfill(store, FileStore(tmp_path / "archive"), topic_filter=everything)
    predicate, _ = push_down([EqualTo(("tags",), "x")])
    if source == "archive":
        rows = read_rows(tmp_path / "archive", predicate, COLUMNS)
    else:
        names = {"cluster": CLUSTER, "broker": BROKER, "topic": f"{SCHEDULE_TOPIC},%LMQ%*"}
        options = parse_options({"path": str(store), "source": source, **names})
        columns = chosen(COLUMNS)
        schema = to_arrow_schema(schema_of(columns), timezone="UTC")
        batches = [
            batch
            for part in plan_ranges(options)
            for batch in read_partition(part, options, predicate, columns, schema)
        ]
        rows = [row for batch in batches for row in batch.to_pylist()]
    found = sorted((row["topic"], row["queueOffset"], row["tags"]) for row in rows)
    assert found == [(topic, n, "x") for topic in ("%LMQ%light", SCHEDULE_TOPIC) for n in range(5)]


def test_spark_pushes_filters_and_gets_the_same_rows(spark: SparkSession, small_archive: Path) -> None:
    setting = "spark.sql.python.filterPushdown.enabled"
    frame = read(spark, f"file://{small_archive}", columns=COLUMNS, pushFilters="true")
    where = "queueId in (1, 2) and queueOffset > 3 and tags = 'text' and topic like 't_s%'"
    pushed = frame.where(where)
    plan_text = pushed._jdf.queryExecution().executedPlan().toString()  # type: ignore[operator]
    still_asked = "".join(line for line in plan_text.splitlines() if "Filter" in line and "Scan" not in line)
    assert "tags" in still_asked
    assert "queueOffset" not in still_asked and "queueId" not in still_asked, plan_text
    found = sorted(map(tuple, pushed.collect()))
    another = read(spark, f"file://{small_archive}", columns=COLUMNS, pushFilters="true")
    spark.conf.set(setting, "false")
    try:
        assert sorted(map(tuple, another.where(where).collect())) == found != []
    finally:
        spark.conf.set(setting, "true")


def test_a_second_scan_with_pushed_filters_is_refused(spark: SparkSession, small_archive: Path) -> None:
    """Spark 4.2 would apply the filters of one scan to the other."""

    def loaded() -> DataFrame:
        return read(spark, f"file://{small_archive}", columns=["topic", "queueId"], pushFilters="true")

    one = loaded()
    with pytest.raises(Exception, match="with pushFilters a DataFrame can be scanned once"):
        one.where("queueId = 1").union(one).count()
    two = loaded()
    with pytest.raises(Exception, match="with pushFilters a DataFrame can be scanned once"):
        two.where("queueId = 1").union(two.where("queueId = 2")).count()
    apart = loaded().where("queueId = 1").union(loaded()).count()
    every = read(spark, f"file://{small_archive}", columns=["topic", "queueId"])
    assert apart == every.where("queueId = 1").count() + every.count()


HOT = "t_compact_hot"


def test_rows_are_at_their_own_offsets(real_store: Callable[[str], Path], tmp_path: Path) -> None:
    url = f"file://{tmp_path}/archive"
    with closing(open_store(url)) as root:
        backfill(real_store("H2") / "store", root)
        store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
        settings = Settings()
        own = replace(settings.key_compaction, min_age_ms=-(10**12))
        options = RewriteOptions(tmp_path / "spool", 1 << 30)
        report = compact_keys(
            store,
            load(store),
            replace(settings, key_compaction=own),
            options,
            lambda topic: topic == HOT,
            apply=True,
        )
        assert report.rounds
    with rocketmq_tiered.open(url) as archive:
        expected = [
            (number, one.queue_offset, one.store_timestamp, bytes(one.body))
            for number in (0, 1)
            for one in archive.queue(HOT, number).messages()
        ]
    assert 0 < len(expected) < 12_000
    columns = ["queueId", "queueOffset", "storeTimestamp", "body"]
    for wanted in (columns, columns[:3]):
        found = [
            tuple(row[name] for name in wanted)
            for batch in read_without_spark({"path": url, "topic": HOT}, wanted)
            for row in batch.to_pylist()
        ]
        by_columns = [tuple(row[: len(wanted)]) for row in expected]
        assert [row[:2] for row in sorted(found)] == [row[:2] for row in by_columns]
        if len(wanted) == len(columns):
            assert [row[3] for row in sorted(found)] == [row[3] for row in by_columns]
