"""`tiered status`: show how far the archive is behind the broker, and its problems."""

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from fetcher.queries.queue_listing import list_queues
from rocketmq_tiered.cli.arguments import (
    BROKER_FLAGS,
    NAME_FLAGS,
    STORE_FLAGS,
    add_json,
    add_setting_flags,
    add_state_dir,
    add_store,
    settings_of,
)
from rocketmq_tiered.process.admin_client import fetch_status
from rocketmq_tiered.process.broker_side import open_store_of, read_conf, topic_filter_of
from rocketmq_tiered.process.findings import TROUBLE, RunState, of_report, word_of
from rocketmq_tiered.process.instance import (
    InstanceDescription,
    running_instance,
    running_instances,
    state_root,
)
from rocketmq_tiered.process.lag import Lag, measure_lag, retention_margin_s
from rocketmq_tiered.process.loaded_archive import LoadedArchive, open_for_reading
from rocketmq_tiered.process.report import StatusReport, catalog_figures, decode_report
from rocketmq_tiered.process.status_rows import (
    BEHIND_HEADER,
    GROUP_HEADER,
    Line,
    behind_rows,
    group_rows,
    headline,
    relay_lines,
    status_lines,
)
from tiered.broker_store.conf import BrokerConf
from tiered.console import (
    clear_screen,
    print_json,
    print_lines,
    print_table,
)
from tiered.errors import NotFoundError, UnavailableError, UsageError
from tiered.settings.sections import GcSettings, Settings
from tiered.timestamps import wall_ms
from uploader.log_divergence import CheckResult, matches_archive

WATCH_S = 2.0
QUEUES_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what the status is of: the running instance of `tiered run`, or an archive and the broker's store."""
    parser.add_argument(
        "archive.url",
        metavar="ARCHIVE_URL",
        nargs="?",
        help="archive to read, instead of requesting the status of the running instance",
    )
    add_store(parser)
    add_state_dir(parser)
    add_setting_flags(parser, NAME_FLAGS, STORE_FLAGS, BROKER_FLAGS)
    parser.add_argument(
        "--watch", action="store_true", help=f"print the status every {WATCH_S:.0f} s until interrupted"
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print the status once, or with ``--watch`` until interrupted. Exit code 1 if archiving is in trouble, or a
    finding of the report is bad."""
    settings = settings_of(options).settings
    is_of_archive = getattr(options, "archive.url") is not None
    read = partial(_from_archive if is_of_archive else _from_instance, settings)
    report = read()
    _show(report, options)
    if options.watch:
        with suppress(KeyboardInterrupt):
            _watch(read, options)
        return 0
    is_troubled = word_of(report.state) in {state.value for state in TROUBLE}
    return int(is_troubled or any(finding.is_bad for finding in of_report(report)))


def _watch(read: Callable[[], StatusReport], options: argparse.Namespace) -> None:
    """Print the status every WATCH_S until interrupted. An instance that restarts, or an object store that cannot be
    reached, is reported, and tried again."""
    while True:
        sys.stdout.flush()
        time.sleep(WATCH_S)
        try:
            _show(read(), options)
        except (UnavailableError, NotFoundError) as error:
            print_lines(f"tiered: {error}", file=sys.stderr)


def _show(report: StatusReport, options: argparse.Namespace) -> None:
    if options.json:
        print_json(report.to_json())
        return
    if options.watch and sys.stdout.isatty():
        clear_screen()
    _print(report)


def _from_instance(settings: Settings) -> StatusReport:
    return decode_report(fetch_status(_instance(settings).admin_url))


def _instance(settings: Settings) -> InstanceDescription:
    """The instance of `tiered run` whose status is printed: that of ``--state-dir``, else the only one of this user on
    this host that has the cluster and broker names of ``settings``. Raises NotFoundError if there is none, UsageError
    if there are several."""
    if settings.process.state_dir:
        return running_instance(Path(settings.process.state_dir))
    conf = read_conf(settings) or BrokerConf()
    cluster, broker = settings.archive.cluster or conf.cluster, settings.archive.broker or conf.broker
    instances = [
        instance
        for instance in running_instances(state_root(os.environ))
        if cluster in ("", instance.cluster) and broker in ("", instance.broker)
    ]
    if not instances:
        raise NotFoundError(
            "no tiered run of this user runs on this host",
            hint="give ARCHIVE_URL to read the archive, or --state-dir of the instance",
        )
    if len(instances) > 1:
        names = ", ".join(f"{one.cluster}/{one.broker} in {one.state_dir}" for one in instances)
        have_names = len({(one.cluster, one.broker) for one in instances}) == len(instances)
        by_name = "--cluster and --broker, or " if have_names else ""
        raise UsageError(
            f"several instances of tiered run are on this host: {names}",
            hint=f"choose one with {by_name}--state-dir",
        )
    return instances[0]


def _from_archive(settings: Settings) -> StatusReport:
    """The status without a running instance: from the archive's catalog and, if the settings say where it is, the
    broker's store. Where its log is not the archived one, the report says so and has no lag."""
    with open_for_reading(settings.archive.url, settings) as archive:
        conf = read_conf(settings)
        if not settings.broker.store_path and (conf is None or conf.store_path is None):
            return _report(archive, settings.gc)
        with open_store_of(settings, conf) as store:
            committed = archive.state.cursor.phys
            if matches_archive(store, archive.store, archive.state) is CheckResult.DIFFERENT:
                why = f"the broker's log differs from the archive below physical offset {committed:,}"
                step = "compare archive.url and the broker's name; tiered run says what log and archive share"
                return replace(
                    _report(archive, settings.gc), state=RunState.DIVERGED.value, why=why, step=step
                )
            topics = topic_filter_of(settings, conf, archive.cluster, archive.broker)
            end = store.commit_log.max_file_end
            lag = measure_lag(store.commit_log, topics, committed, end)
            margin_s = retention_margin_s(store, committed, lag.end_phys, ())
            report = _report(archive, settings.gc, lag, lag.end_phys, margin_s)
            return replace(report, deletion_zone=str(store.zone()))


def _report(
    archive: LoadedArchive,
    gc: GcSettings,
    lag: Lag | None = None,
    end_phys: int | None = None,
    margin_s: float | None = None,
) -> StatusReport:
    """The status report of an archive by its catalog. ``lag``, the log's ``end_phys`` and ``margin_s``, the retention
    margin, come from the broker's store: they are None, not zero, if it was not read."""
    state, owner = archive.state, archive.state.owner
    now_ms = wall_ms()
    queues = list_queues(state, hidden=True)
    return StatusReport(
        source="catalog",
        state="no writer" if owner is None or owner.released else "owned",
        archive_url=archive.url,
        cluster=archive.cluster,
        broker=archive.broker,
        writer=""
        if owner is None
        else " ".join(part for part in (owner.kind, owner.instance, owner.host) if part),
        epoch=state.epoch,
        committed_phys=state.cursor.phys,
        bound_phys=end_phys,
        bound_reason="end of the broker's log" if lag is not None else "store not read",
        lag_messages=None if lag is None else lag.messages,
        is_lag_estimated=lag is not None and lag.estimated_from < 1,
        lag_bytes=None if end_phys is None else max(0, end_phys - state.cursor.phys),
        **({} if lag is None else lag.ages(now_ms)),
        retention_margin_seconds=margin_s,
        messages=sum(queue.messages for queue in queues),
        bytes=sum(queue.bytes for queue in queues),
        queues=() if lag is None else lag.reports(now_ms),
        **catalog_figures(state, now_ms, gc),
    )


def _print(report: StatusReport) -> None:
    """Print a status report: the state and its findings, the queues that are furthest behind, proxy and slave mode."""
    print_lines(*headline(report), *_texts(status_lines(report)))
    if report.queues:
        print_lines("")
        print_table(BEHIND_HEADER, behind_rows(report, QUEUES_SHOWN))
        if len(report.queues) > QUEUES_SHOWN:
            print_lines(f"… and {len(report.queues) - QUEUES_SHOWN} more queues (all with --json)")
    for relay in (report.proxy, report.slave):
        if relay is not None:
            print_lines("", *_texts(relay_lines(relay)))
            if relay.groups:
                print_table(GROUP_HEADER, group_rows(relay))


def _texts(lines: Iterable[Line]) -> Iterator[str]:
    return (f"{about:<11} {text}" for about, text in lines)
