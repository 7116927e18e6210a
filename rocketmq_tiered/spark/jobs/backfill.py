"""Bulk backfill: archives store directories, several at a time, each by one uploader in a Spark task of its own.

A task is an ordinary backfill (`tiered backfill`). The driver starts the tasks, reads their progress from the catalogs
and collects their reports.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rocketmq_tiered.message_table.plan.archive_plan import archive_store
from rocketmq_tiered.process.instance import backfill_instance
from rocketmq_tiered.spark.jobs.tasks import ArchiveTarget, SparkTasks
from tiered.broker_store.conf import BrokerNames, read_broker_conf, require_names
from tiered.broker_store.store import BrokerStore, open_broker_store
from tiered.catalog.catalog_reader import head_version, read_commit
from tiered.catalog.claims import BACKFILL
from tiered.errors import TieredError, UnavailableError, UsageError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import TopicFilter
from tiered.object_store.create_race import require_exclusive_creates
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_store
from tiered.settings.sections import OffloadSettings
from tiered.settings.topic_rules import TopicRules
from uploader.bound_source import no_offsets
from uploader.bounded_run import OUTAGE_S_MAX, OutageLimit, run_bounded
from uploader.log_rule import LogLimits
from uploader.offload import Environment, ObjectOptions, Offloader, OffloadIdentity
from uploader.offload_status import OffloadResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

Report = Callable[[str, int, int], None]
"""(store directory, bytes of commitlog done, total bytes)."""


@dataclass(frozen=True)
class StoreToBackfill:
    """A store directory. Names and configuration are optional if the store contains them."""

    path: str
    cluster: str = ""
    broker: str = ""
    conf_path: str = ""


@dataclass(frozen=True)
class BackfillOptions:
    """Options for all stores. ``topics``: include, exclude and system topics; broker names are filled in.

    ``outage_limit_s``: how long the object store may refuse every request.
    """

    topics: TopicFilter = field(default_factory=TopicFilter)
    settings: OffloadSettings = field(default_factory=OffloadSettings)
    rules: TopicRules = field(default_factory=TopicRules)
    store: StoreOptions = field(default_factory=StoreOptions)
    outage_limit_s: float = OUTAGE_S_MAX
    take_over: bool = False
    replace_log: bool = False
    same_broker: bool = False


@dataclass(kw_only=True)
class BackfillReport(OffloadResult):
    """The result for one store directory."""

    path: str
    cluster: str
    broker: str


PROGRESS_S = 2.0


@dataclass(frozen=True)
class BackfillTask:
    """Archive ``store``, whose names are known. ``begin_phys`` and ``end_phys``: its log, for progress."""

    store: StoreToBackfill
    target: ArchiveTarget
    options: BackfillOptions
    instance: str
    begin_phys: int
    end_phys: int


def backfill(
    spark: Callable[[], SparkSession] | SparkSession,
    stores: Sequence[StoreToBackfill | str],
    url: str,
    *,
    options: BackfillOptions | None = None,
    report: Report = lambda path, done, total: None,
    tasks: SparkTasks | None = None,
) -> list[BackfillReport]:
    """Archive ``stores`` below ``url``. Every executor must see the directories at the same paths. ``spark`` may be a
    function that starts it, after the stores were checked.

    Raises UsageError for two stores of one broker, FencedError if another writer owns an archive, UnavailableError if a
    broker runs or the object store fails for too long. The other stores are finished before the first error is raised,
    and commits stay.
    """
    options = options or BackfillOptions()
    target = ArchiveTarget(url, options.store)
    todo = [_task(StoreToBackfill(one) if isinstance(one, str) else one, target, options) for one in stores]
    names = [(task.store.cluster, task.store.broker) for task in todo]
    for name in names:
        if names.count(name) > 1:
            raise UsageError(
                f"two of the store directories belong to broker {name[0]}/{name[1]}",
                hint="backfill them one after the other",
            )
    if not todo:
        return []
    runner = tasks or SparkTasks(spark() if callable(spark) else spark)
    with ThreadPoolExecutor(min(len(todo), runner.parallelism), thread_name_prefix="backfill") as pool:
        # One Spark job for each store: a failure ends only its own.
        jobs = {pool.submit(_run, runner, task): task for task in todo}
        _follow(jobs, report)
    for job in jobs:
        if (error := job.exception()) is not None:
            raise error
    return [job.result() for job in jobs]


def _task(store: StoreToBackfill, target: ArchiveTarget, options: BackfillOptions) -> BackfillTask:
    """Prepares the backfill of one store directory: absolute paths, the broker's names, the range of its log. Raises
    UnavailableError if a broker may still run on it."""
    path = str(Path(store.path).absolute())
    conf_path = str(Path(store.conf_path).absolute()) if store.conf_path else ""
    store = replace(store, path=path, conf_path=conf_path)
    with _open(store) as opened:
        names_in_store = opened.names()
        names = BrokerNames(store.cluster or names_in_store.cluster, store.broker or names_in_store.broker)
        names = require_names(names, path)
        if not opened.liveness().is_dead:
            raise UnavailableError(
                f"{path}: a broker runs or may run on this store, so its confirm offset is unknown",
                hint="use tiered run for a live broker, or backfill a stopped broker's directory or a copy",
            )
        begin_phys, end_phys = opened.commit_log.min_phys, opened.commit_log.data_end_phys()
    store = replace(store, cluster=names.cluster, broker=names.broker)
    topics = replace(options.topics, cluster=names.cluster, broker=names.broker)
    # Made by the driver: a task repeated on another host is the same writer, and need not wait for the first.
    instance = backfill_instance(path)
    return BackfillTask(store, target, replace(options, topics=topics), instance, begin_phys, end_phys)


def _open(store: StoreToBackfill) -> BrokerStore:
    conf = read_broker_conf(Path(store.conf_path)) if store.conf_path else None
    return open_broker_store(Path(store.path), conf=conf)


def _run(runner: SparkTasks, task: BackfillTask) -> BackfillReport:
    (result,) = runner.run(backfill_store, [task], f"backfill {task.store.cluster}/{task.store.broker}")
    if isinstance(result, UnavailableError):
        raise result
    return result


def _follow(jobs: dict[Future[BackfillReport], BackfillTask], report: Report) -> None:
    """Report the progress of the running ``jobs``, each of which archives the store of its task, until all have ended.
    The last commit of each archive says how far it is."""
    running, reached = set(jobs), {job: task.begin_phys for job, task in jobs.items()}
    while running:
        for job in running:
            task = jobs[job]
            reached[job] = max(reached[job], min(_archived_phys(task), task.end_phys))
            report(task.store.path, reached[job] - task.begin_phys, task.end_phys - task.begin_phys)
        ended, running = wait(running, PROGRESS_S)
        for job in ended:
            total = jobs[job].end_phys - jobs[job].begin_phys
            report(jobs[job].store.path, total, total)


def _archived_phys(task: BackfillTask) -> int:
    """The end of the archived log by the last commit; 0 if that does not tell."""
    try:
        with task.target.open(task.store.cluster, task.store.broker) as archive:
            version = head_version(archive)
            return read_commit(archive, version).draft.to_phys if version else 0
    except TieredError:  # the task reports what is wrong
        return 0


def backfill_store(task: BackfillTask) -> BackfillReport | UnavailableError:
    """Archive one store directory to the end of its log, in a Spark worker.

    An outage of the object store is returned, not raised: Spark would repeat the task, which has waited long enough.
    """
    store, options, target = task.store, task.options, task.target
    with _open(store) as opened, closing(open_store(target.url, target.options)) as root:
        archive = archive_store(root, store.cluster, store.broker)
        keys, own_keys = root.keys(archive_prefix(store.cluster, store.broker)), options.rules.own_keys
        keys.begin(own_keys, is_owner=False)
        offloader = Offloader(
            opened,
            root,
            OffloadIdentity(store.cluster, store.broker, task.instance, BACKFILL),
            options.settings,
            topic_filter=options.topics,
            offsets_source=no_offsets,
            take_over=options.take_over,
            log_limits=LogLimits(options.replace_log, same_broker=options.same_broker),
            environment=Environment(
                refuse_empty=partial(require_exclusive_creates, archive),
                claimed=partial(keys.own, own_keys),
            ),
            options=ObjectOptions(
                rules=options.rules,
                rules_document={"topics.rules": [one.to_json() for one in options.rules.entries]}
                if own_keys
                else {},
                is_encrypted=target.options.settings.encrypts,
            ),
        )
        stop, limit = threading.Event(), OutageLimit(0.0, options.outage_limit_s)
        try:
            result = run_bounded(lambda: offloader.run(stop, follow=False), offloader, limit, stop)
        except UnavailableError as error:
            return error
    return BackfillReport(path=store.path, cluster=store.cluster, broker=store.broker, **asdict(result))
