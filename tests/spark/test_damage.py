"""Bytes that fail a check: FAILFAST names object and range, PERMISSIVE skips what is damaged and says so."""

import logging
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from pyspark.sql.pandas.types import to_arrow_schema

from rocketmq_tiered.message_table.batches.message_batches import read_partition
from rocketmq_tiered.message_table.options.columns import CORRUPT_RECORD, chosen
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import Mode, SourceOptions, parse_options
from rocketmq_tiered.message_table.plan.archive_plan import pinned_versions, plan
from rocketmq_tiered.message_table.scan.store_scan import plan_ranges
from rocketmq_tiered.spark import read
from rocketmq_tiered.spark.source.data_source import schema_of
from tests.archive.uncataloged import open_uncataloged
from tests.bad_input.stale_checksum import copy_with_stale_checksum
from tests.end_to_end.offloading import BROKER, CLUSTER
from tiered.errors import CorruptionError
from tiered.formats.segment_layout import HEADER_BYTES
from tiered.object_store.file import FileStore

pytestmark = pytest.mark.integration

COLUMNS = ["topic", "queueId", "queueOffset", "bodyCRC", CORRUPT_RECORD]


@pytest.fixture
def damaged(small_archive: Path, tmp_path: Path) -> tuple[Path, str, int, int]:
    """(archive, key, begin and end of the block in it that is damaged): the second block of the largest object."""
    archive = tmp_path / "archive"
    shutil.copytree(small_archive, archive)
    largest = max(archive.rglob("*.s*o"), key=lambda path: path.stat().st_size)
    key = largest.relative_to(archive).as_posix()
    blocks = open_uncataloged(FileStore(archive), key).index.blocks["stored_bytes"]
    begin = HEADER_BYTES + int(blocks[0])
    end = begin + int(blocks[1])
    data = bytearray(largest.read_bytes())
    data[(begin + end) // 2] ^= 1
    largest.chmod(0o644)
    largest.write_bytes(data)
    return archive, key, begin, end


def rows_of(options: SourceOptions, columns: list[str] = COLUMNS) -> list[dict[str, Any]]:
    wanted = chosen(columns)
    schema: pa.Schema = to_arrow_schema(schema_of(wanted), timezone="UTC")
    parts = plan(options, pinned_versions(options), Predicate(), is_header_only=False)
    batches = (
        batch for part in parts for batch in read_partition(part, options, Predicate(), wanted, schema)
    )
    return [row for batch in batches for row in batch.to_pylist()]


def place(row: dict[str, Any]) -> tuple[str, int, int]:
    return row["topic"], row["queueId"], row["queueOffset"]


def options_of(archive: Path, mode: Mode) -> SourceOptions:
    return replace(parse_options({"path": f"file://{archive}"}), mode=mode)


def test_failfast_names_object_and_range(damaged: tuple[Path, str, int, int]) -> None:
    archive, key, begin, end = damaged
    with pytest.raises(CorruptionError, match=rf"{key}: block 1 \[{begin}, {end}\) fails its CRC32C"):
        rows_of(options_of(archive, Mode.FAILFAST))


def test_permissive_skips_and_reports_the_block(
    damaged: tuple[Path, str, int, int], small_archive: Path, caplog: pytest.LogCaptureFixture
) -> None:
    archive, key, begin, end = damaged
    with caplog.at_level(logging.WARNING):
        rows = rows_of(options_of(archive, Mode.PERMISSIVE))
    reports = [row for row in rows if row[CORRUPT_RECORD] is not None]
    assert {row[CORRUPT_RECORD].split(" fails")[0] for row in reports} == {
        f"file://{archive}/FxCluster/K/{key.split('/', 2)[2]}: block 1 [{begin}, {end})"
    }
    assert f"{key}: block 1 [{begin}, {end})" in caplog.text
    whole = rows_of(options_of(small_archive, Mode.FAILFAST))
    kept = [row for row in rows if row[CORRUPT_RECORD] is None]
    # The rows of one block are gone, and the LMQ rows that point into it.
    lost = open_uncataloged(FileStore(archive), key).index.blocks["rows"][1]
    places = set(map(place, kept))
    missing = [row for row in whole if place(row) not in places]
    stored = [place(row) for row in missing if not row["topic"].startswith("%LMQ%")]
    assert len(stored) == lost > 0
    assert sorted(map(place, reports)) == sorted(stored), "one row for each lost message"
    assert len(kept) + len(missing) == len(whole)


def test_header_only_reads_do_not_notice(damaged: tuple[Path, str, int, int], small_archive: Path) -> None:
    columns = ["topic", "queueOffset"]
    assert len(rows_of(options_of(damaged[0], Mode.FAILFAST), columns)) == len(
        rows_of(options_of(small_archive, Mode.FAILFAST), columns)
    )


def test_a_damaged_tail_loses_the_object_only(
    damaged: tuple[Path, str, int, int], small_archive: Path
) -> None:
    archive, key, _, _ = damaged
    path = archive / key
    path.write_bytes(path.read_bytes()[:-30] + bytes(30))
    with pytest.raises(CorruptionError, match=key):
        rows_of(options_of(archive, Mode.FAILFAST))
    columns = [*COLUMNS, "innerNum"]
    rows = rows_of(options_of(archive, Mode.PERMISSIVE), columns)
    reports = [row for row in rows if row[CORRUPT_RECORD] is not None]
    assert all(
        key in row[CORRUPT_RECORD] and row["topic"] and row["queueOffset"] is not None for row in reports
    )
    whole = rows_of(options_of(small_archive, Mode.FAILFAST), columns)
    stored = [row for row in whole if not row["topic"].startswith("%LMQ%")]
    kept = [row for row in rows if row[CORRUPT_RECORD] is None and not row["topic"].startswith("%LMQ%")]
    hidden = sum(row["innerNum"] for row in reports)
    assert hidden == sum(row["innerNum"] for row in stored) - sum(row["innerNum"] for row in kept) > 0
    assert len(kept) > 1000


def test_a_missing_object_is_an_error(damaged: tuple[Path, str, int, int]) -> None:
    archive, key, _, _ = damaged
    (archive / key).unlink()
    with pytest.raises(CorruptionError, match=r"catalog version \d+ names a missing object"):
        rows_of(options_of(archive, Mode.FAILFAST))


def test_a_broker_store_is_read_as_it_is_archived_stale_checksums_and_all(
    real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    victim, _ = copy_with_stale_checksum(real_store("B"), tmp_path / "store")
    options = parse_options(
        {
            "path": str(tmp_path / "store"),
            "source": "store",
            "cluster": CLUSTER,
            "broker": BROKER,
        }
    )
    wanted = chosen(["topic", "queueId", "queueOffset"])
    schema: pa.Schema = to_arrow_schema(schema_of(wanted), timezone="UTC")
    rows = [
        tuple(row.values())
        for part in plan_ranges(options)
        for batch in read_partition(part, options, Predicate(), wanted, schema)
        for row in batch.to_pylist()
    ]
    assert (victim["topic"], victim["queueId"], victim["queueOffset"]) in rows


@pytest.mark.parametrize("way", ["read", "spark.read"])
def test_a_job_fails_with_the_range_or_skips_it(
    spark: SparkSession, damaged: tuple[Path, str, int, int], small_archive: Path, way: str
) -> None:
    archive, key, begin, end = damaged
    columns = ["topic", "queueOffset", "bodyCRC"]

    def rows(root: Path, **options: str) -> int:
        if way == "read":
            return read(spark, f"file://{root}", columns=columns, **options).count()
        reader = spark.read.format("rocketmq-tiered").options(columns=",".join(columns), **options)
        return reader.load(f"file://{root}").count()

    with pytest.raises(Exception, match=rf"block 1 \[{begin}, {end}\) fails its CRC32C") as failure:
        rows(archive)
    assert key in str(failure.value)
    skipping, whole = rows(archive, mode="PERMISSIVE"), rows(small_archive)
    assert 0 < skipping < whole
