"""Spark reads what key compaction left: each row at its own offset, with records and by columns alone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import rocketmq_tiered
from rocketmq_tiered.maintenance.key_job import compact_keys
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.spark.plain_read import read_without_spark
from tiered.archive.rewrite.result import RewriteOptions
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.object_store.open_store import open_store
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import Settings

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
