"""Runs the backfill job without Spark, and what it must archive."""

from pathlib import Path
from typing import Any, cast

from pyspark.sql import SparkSession

from rocketmq_tiered.spark.jobs.backfill import BackfillOptions, BackfillReport, StoreToBackfill, backfill
from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL
from tests.spark.jobs.inline_tasks import InlineTasks
from tiered.catalog.catalog_reader import load
from tiered.formats.keys import archive_prefix
from tiered.object_store.file import FileStore
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore

NO_SPARK = cast("SparkSession", None)


OPTIONS = BackfillOptions(settings=SMALL)


def run(
    store: Path, archive: Path, tasks: InlineTasks | None = None, options: BackfillOptions = OPTIONS
) -> BackfillReport:
    """Backfill one store without Spark."""
    stores = [StoreToBackfill(str(store), CLUSTER, BROKER)]
    (report,) = backfill(NO_SPARK, stores, f"file://{archive}", options=options, tasks=tasks or InlineTasks())
    return report


def own_archive(root: Path) -> ObjectStore:
    return PrefixedStore(FileStore(root), archive_prefix(CLUSTER, BROKER))


def truth_of(root: Path) -> dict[Any, Any]:
    """All a reader sees but where runs are cut: every queue's row, gaps, and the cursor."""
    state = load(own_archive(root))
    queues = {key: tuple(row)[3:] for key, row in state.queues()}
    gaps = {key: [tuple(gap)[1:] for gap in state.gaps_of(key)] for key in queues}
    return {
        "queues": queues,
        "gaps": gaps,
        "cursor": (state.cursor.history, state.cursor.phys),
        "tables": set(state.state_objects),
    }
