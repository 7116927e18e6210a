"""Bulk backfill: archives the commitlogs of store directories, several at a time."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rocketmq_tiered.spark.jobs.backfill_driver import StoreBackfill
from rocketmq_tiered.spark.jobs.backfill_options import (
    BackfillOptions,
    BackfillReport,
    Report,
    StoreToBackfill,
)
from rocketmq_tiered.spark.jobs.backfill_tasks import StoreSource
from rocketmq_tiered.spark.jobs.tasks import SparkTasks, TaskRunner
from tiered.broker_store.names import BrokerNames, require_names
from tiered.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


STORES_AT_ONCE = 4


def backfill(
    spark: SparkSession,
    stores: Sequence[StoreToBackfill | str],
    url: str,
    *,
    options: BackfillOptions | None = None,
    report: Report = lambda path, done, total: None,
    tasks: TaskRunner | None = None,
) -> list[BackfillReport]:
    """Archive ``stores`` below ``url``. Every executor must see the directories at the same paths.

    Raises UsageError for two stores of one broker, FencedError if another writer owns an archive, UnavailableError if a
    broker runs or the object store fails for too long. The other stores are finished before the first error is raised,
    and commits stay.
    """
    options = options or BackfillOptions()
    sources = [_source(StoreToBackfill(one) if isinstance(one, str) else one, options) for one in stores]
    names = [(source.cluster, source.broker) for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two stores of broker {name[0]}/{name[1]}", hint="backfill them one after the other"
            )
    with ThreadPoolExecutor(STORES_AT_ONCE, thread_name_prefix="backfill") as pool:
        jobs = [
            # Each job has its own SparkTasks: a failure cancels only its own tasks.
            pool.submit(StoreBackfill(source, url, options, tasks or SparkTasks(spark), report).run)
            for source in sources
        ]
        errors = [job.exception() for job in jobs]
    for error in errors:
        if error is not None:
            raise error
    return [job.result() for job in jobs]


def _source(store: StoreToBackfill, options: BackfillOptions) -> StoreSource:
    conf_path = str(Path(store.conf_path).absolute()) if store.conf_path else ""
    source = StoreSource(str(Path(store.path).absolute()), store.cluster, store.broker, conf_path)
    with source.open() as opened:
        found = opened.names()
        names = BrokerNames(store.cluster or found.cluster, store.broker or found.broker)
        names = require_names(names, source.path)
        if not opened.liveness().is_dead:
            raise UnavailableError(
                f"{source.path}: a broker runs or may run on this store, so its confirm offset is unknown",
                hint="use tiered run for a live broker, or backfill a stopped broker's directory or a copy",
            )
    topics = replace(options.topics, cluster=names.cluster, broker=names.broker)
    return replace(source, cluster=names.cluster, broker=names.broker, topics=topics)
