"""`tiered status`: show how far the archive is behind the broker, and its problems."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
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
from rocketmq_tiered.maintenance.compaction_status import CompactionStatus
from rocketmq_tiered.maintenance.scrub_status import ScrubStatus
from rocketmq_tiered.process.admin_client import fetch_status
from rocketmq_tiered.process.archive_growth import archive_growth, with_growth
from rocketmq_tiered.process.broker_side import open_store_of, read_conf, topic_filter_of
from rocketmq_tiered.process.findings import of_report
from rocketmq_tiered.process.instance import (
    InstanceDescription,
    running_instance,
    running_instances,
    state_root,
)
from rocketmq_tiered.process.lag import Lag, measure_lag
from rocketmq_tiered.process.loaded_archive import LoadedArchive, open_for_reading
from rocketmq_tiered.process.report import StatusReport, decode_report, seconds_since
from rocketmq_tiered.process.retention_margin import retention_margin_s
from rocketmq_tiered.process.run_state import TROUBLE, RunState, word_of
from rocketmq_tiered.server.proxy.relay_status import GroupReading, ProxyStatus, RelayStatus, SlaveStatus
from tiered.catalog.hidden_history import hidden_since
from tiered.console import (
    clear_screen,
    counted,
    duration_text,
    names_text,
    print_json,
    print_lines,
    print_table,
    size_text,
)
from tiered.errors import NotFoundError, UnavailableError, UsageError
from tiered.settings.retention_sections import GcSettings
from tiered.settings.sections import Settings

WATCH_S = 2.0
QUEUES_SHOWN = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The running instance, or the archive (and the store)."""
    parser.add_argument(
        "archive.url",
        metavar="ARCHIVE_URL",
        nargs="?",
        help="read the archive instead of the running instance",
    )
    add_store(parser)
    add_state_dir(parser)
    add_setting_flags(parser, NAME_FLAGS, STORE_FLAGS, BROKER_FLAGS)
    parser.add_argument(
        "--watch", action="store_true", help=f"repeat every {WATCH_S:.0f} s until interrupted"
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print the status once, or repeatedly. 1: it is in trouble, or a finding is bad."""
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
    """Repeat until interrupted, also during a restart or an outage."""
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
    if settings.process.state_dir:
        return running_instance(Path(settings.process.state_dir))
    found = [
        instance
        for instance in running_instances(state_root(os.environ))
        if settings.archive.cluster in ("", instance.cluster)
        and settings.archive.broker in ("", instance.broker)
    ]
    if not found:
        raise NotFoundError(
            "no instance of this user runs on this host",
            hint="give ARCHIVE_URL to read the archive, or --state-dir",
        )
    if len(found) > 1:
        names = ", ".join(f"{one.cluster}/{one.broker} in {one.state_dir}" for one in found)
        have_names = len({(one.cluster, one.broker) for one in found}) == len(found)
        by_name = "--cluster and --broker, or " if have_names else ""
        raise UsageError(f"several instances run here: {names}", hint=f"choose one with {by_name}--state-dir")
    return found[0]


def _from_archive(settings: Settings) -> StatusReport:
    with open_for_reading(settings.archive.url, settings) as archive:
        conf = read_conf(settings)
        if not settings.broker.store_path and (conf is None or conf.store_path is None):
            return _report(archive, settings.gc)
        with open_store_of(settings, conf) as store:
            committed = archive.state.cursor.phys
            topics = topic_filter_of(settings, conf, archive.cluster, archive.broker)
            end = store.commit_log.max_file_end
            lag = measure_lag(store.commit_log, store.consume_queues, topics, committed, end)
            margin_s = retention_margin_s(store, committed, lag.end_phys, 0.0)
            return replace(
                _report(archive, settings.gc, lag, lag.end_phys, margin_s), deletion_zone=str(store.zone())
            )


def _report(
    archive: LoadedArchive,
    gc: GcSettings,
    lag: Lag | None = None,
    end_phys: int | None = None,
    margin_s: float | None = None,
) -> StatusReport:
    state, owner = archive.state, archive.state.owner
    now_ms = time.time_ns() // 1_000_000
    queues = list_queues(state, hidden=True)
    report = StatusReport(
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
        lag_seconds=None if lag is None else lag.age_s(now_ms),
        retention_margin_seconds=margin_s,
        gaps=len(state.gaps),
        messages=sum(queue.messages for queue in queues),
        bytes=sum(queue.bytes for queue in queues),
        queues=() if lag is None else lag.reports(now_ms),
        unindexed_objects=len(state.unindexed),
        pending_deletions=state.pending_deletion_count,
        oldest_pending_deletion_seconds=seconds_since(state.oldest_pending_deletion_ms, now_ms),
        diverged_objects=state.diverged_count,
        hidden_messages=hidden_since(state, now_ms - gc.diverged_grace_ms),
    )
    return with_growth(report, archive_growth(archive.store, state))


def headline(report: StatusReport) -> list[str]:
    """The first lines: the state, its cause, and the findings."""
    title = f"{report.cluster}/{report.broker} in {report.archive_url}"
    lines = [f"{title}: {report.state}, epoch {report.epoch}"]
    if report.why and report.state != RunState.FOLLOWING.value:
        lines.append(f"why         {report.why}")
    if report.step:
        lines.append(f"next        {report.step}")
    return lines + [f"attention   {finding.text}" for finding in of_report(report)]


def _print(report: StatusReport) -> None:
    def number(value: int | None) -> str:
        return "unknown" if value is None else f"{value:,}"

    bound = number(report.bound_phys)
    lag_messages = "unknown" if report.lag_messages is None else counted(report.lag_messages, "message")
    lag_bytes = "unknown" if report.lag_bytes is None else size_text(report.lag_bytes)
    print_lines(*headline(report))
    print_lines(f"writer      {report.writer or 'none'}")
    print_lines(
        f"archived    to {report.committed_phys:,} of {bound} ({report.bound_reason or 'bound unknown'})"
    )
    measured = f" (measured {duration_text(report.measured_seconds)} ago)" if report.is_old else ""
    about = "about " if report.is_lag_estimated and report.lag_messages is not None else ""
    print_lines(
        f"behind      {about}{lag_messages}, {lag_bytes}, {duration_text(report.lag_seconds)}{measured}"
    )
    print_lines(f"retention   {_margin(report)}")
    print_lines(f"gaps        {report.gaps:,}")
    if report.excluded:
        print_lines(f"excluded    {names_text(report.excluded)} (topics.include, topics.exclude)")
    if report.pending_deletions:
        age = duration_text(report.oldest_pending_deletion_seconds)
        garbage = counted(report.pending_deletions, "object")
        print_lines(f"garbage     {garbage}, the oldest {age} old (tiered gc deletes them)")
    if report.compaction is not None:
        print_lines(f"compaction  {_compaction(report.compaction)}")
    if report.key_compaction is not None and (keys := report.key_compaction.text):
        print_lines(f"keys        {keys}")
    if (timers := report.timers) is not None and timers.pending + timers.delivered:
        overdue = (
            f", the first due for {duration_text(timers.overdue_seconds)}" if timers.overdue_seconds else ""
        )
        print_lines(
            f"timers      {timers.pending:,} pending, {timers.next_hour:,} within the hour{overdue}; "
            f"{timers.delivered:,} handed over, 99% less than {timers.late_p99_seconds:.1f} s late"
        )
    if report.scrub is not None:
        print_lines(f"scrub       {_scrub(report.scrub)}")
    if report.commits_a_day is not None:
        after = f"about {report.compacted_objects_a_day or 0:,} after tiered compact"
        objects = (
            "" if report.objects_a_day is None else f", {counted(report.objects_a_day, 'object')} ({after})"
        )
        catalog = size_text(report.catalog_bytes_a_day or 0)
        print_lines(f"a day       {counted(report.commits_a_day, 'commit')}, {catalog} of catalog{objects}")
    if report.source == "instance":
        limit = size_text(report.budget_limit_bytes)
        print_lines(f"memory      {size_text(report.budget_used_bytes)} of {limit}")
        print_lines(f"pins        {report.pins}")
        print_lines(
            f"failures    {report.errors:,}{f', last: {report.last_error}' if report.last_error else ''}"
        )
    behind = sorted(report.queues, key=lambda queue: queue.lag_messages, reverse=True)
    if behind:
        print_lines("")
        print_table(
            ["topic", "queue", "messages behind", "bytes", "seconds"],
            [
                [q.topic, q.queue_id, q.lag_messages, size_text(q.lag_bytes), f"{q.lag_seconds:.1f}"]
                for q in behind[:QUEUES_SHOWN]
            ],
        )
        if len(behind) > QUEUES_SHOWN:
            print_lines(f"… and {len(behind) - QUEUES_SHOWN} more queues (all with --json)")
    if report.proxy is not None:
        _print_proxy(report.proxy)
    if report.slave is not None:
        _print_slave(report.slave)


def _compaction(report: CompactionStatus) -> str:
    parts = [f"{counted(report.joined_objects, 'object')} joined to {report.made_objects:,}"]
    if report.backlog_objects:
        objects = counted(report.backlog_objects, "object")
        due = f"{objects}, {size_text(report.backlog_bytes)} of messages, due"
        due = f"about {due}" if report.is_backlog_estimated else due
        parts.append(f"{due} ({report.level})" if report.level else due)
    return ", ".join(parts)


def _scrub(report: ScrubStatus) -> str:
    healed = f", {report.healed:,} healed" if report.healed else ""
    damaged = f", {report.damaged:,} DAMAGED" if report.damaged else ""
    return (
        f"{counted(report.objects, 'object')} read back{healed}{damaged}, new ones to version "
        f"{report.checked_version:,}; {report.cycle_share:.0%} of the cycle"
    )


def _print_proxy(proxy: ProxyStatus) -> None:
    archive = "" if proxy.is_archive_open else "; the archive is not open yet"
    print_lines("", f"clients     {proxy.connections:,} connected to {proxy.address}{archive}")
    _print_mode(proxy)


def _print_slave(slave: SlaveStatus) -> None:
    states = {
        True: "redirects slow consumers here",
        False: "redirects no consumers (slaveReadEnable)",
        None: "answers",
    }
    silent = f"does not answer: {slave.master_failure}" if slave.master_failure else "does not answer"
    master = states[slave.redirects] if slave.is_master_available else silent
    print_lines(
        "",
        f"slave       id {slave.broker_id} at {slave.address}, {slave.connections:,} connected; the master {master}",
    )
    for address, stand in slave.name_servers:
        print_lines(f"            name server {address}: {stand}")
    _print_mode(slave)


def _print_mode(status: RelayStatus) -> None:
    if status.has_plain_accounts:
        print_lines("            accounts are checked without TLS: set serve.tls_certificate")
    _print_groups(status.groups)


def _print_groups(groups: Sequence[GroupReading]) -> None:
    if groups:
        print_table(
            ["group", "members", "pulls from the archive", "from the broker", "messages behind"],
            [
                [group.name, group.members, group.archive_pulls, group.broker_pulls, group.behind_messages]
                for group in groups
            ],
        )


def _margin(report: StatusReport) -> str:
    if report.retention_margin_seconds is None and report.lag_bytes is None:
        return "unknown"
    if report.retention_margin_seconds is None:
        return "no unarchived message is about to be deleted"
    zone = f" (deleteWhen in {report.deletion_zone})" if report.deletion_zone else ""
    return (
        f"{duration_text(report.retention_margin_seconds)} until the broker deletes unarchived messages{zone}"
    )
