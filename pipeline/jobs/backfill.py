"""Bulk back-fill: the commitlogs of store directories into archives, several stores at a time.

Owns which stores, and whose they are. How one becomes an archive is in backfill_driver.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.jobs.backfill_driver import StoreBackfill
from pipeline.jobs.backfill_options import BackfillOptions, BackfillReport, Report, StoreToBackfill
from pipeline.jobs.backfill_tasks import StoreSource
from pipeline.jobs.tasks import SparkTasks, TaskRunner
from tiered.broker_store.conf import read_broker_conf
from tiered.broker_store.names import BrokerNames, require_names
from tiered.broker_store.store import open_broker_store
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
    """Archive ``stores`` below ``url``, several at a time. Every executor must see the directories at their paths.

    Raises UsageError for stores of one broker name, FencedError when another writer owns an archive, UnavailableError
    when a broker runs or the object store stayed away. Other stores are finished before the first error is raised;
    what is committed stays.
    """
    options = options or BackfillOptions()
    sources = [_source(StoreToBackfill(one) if isinstance(one, str) else one, options) for one in stores]
    names = [(source.cluster, source.broker) for source in sources]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two stores of broker {name[0]}/{name[1]}", hint="an archive has one writer: one at a time"
            )
    with ThreadPoolExecutor(STORES_AT_ONCE, thread_name_prefix="backfill") as pool:
        jobs = [
            # Each with tasks of its own: who fails cancels his, not those of the others.
            pool.submit(StoreBackfill(source, url, options, tasks or SparkTasks(spark), report).run)
            for source in sources
        ]
        errors = [job.exception() for job in jobs]
    for error in errors:
        if error is not None:
            raise error
    return [job.result() for job in jobs]


def _source(store: StoreToBackfill, options: BackfillOptions) -> StoreSource:
    path = str(Path(store.path).absolute())
    conf = read_broker_conf(Path(store.conf_path)) if store.conf_path else None
    with open_broker_store(Path(path), conf=conf) as opened:
        found = opened.names()
        names = require_names(BrokerNames(store.cluster or found.cluster, store.broker or found.broker), path)
        if not opened.liveness().is_dead:
            raise UnavailableError(
                f"a broker runs on {path}, or may run: only it can say how far its log may be read",
                hint="tiered run archives a live broker; offload takes a stopped broker's directory or a copy",
            )
    topics = replace(options.topics, cluster=names.cluster, broker=names.broker)
    conf_path = str(Path(store.conf_path).absolute()) if store.conf_path else ""
    return StoreSource(path, names.cluster, names.broker, conf_path, topics)
