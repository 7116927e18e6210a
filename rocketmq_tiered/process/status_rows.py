"""A status report as named lines and tables: `tiered status` prints them, the admin page shows them. Pure."""

from collections.abc import Iterator
from typing import Any

from rocketmq_tiered.maintenance.task_figures import CompactionStatus, ScrubStatus
from rocketmq_tiered.process.findings import RunState, of_report
from rocketmq_tiered.process.report import StatusReport
from rocketmq_tiered.sending.timer_status import TimerStatus
from rocketmq_tiered.server.proxy.relay_status import ProxyStatus, RelayStatus, SlaveStatus
from tiered.console import counted, duration_text, names_text, size_text

BEHIND_HEADER = ("topic", "queue", "messages behind", "bytes", "seconds")
GROUP_HEADER = ("group", "members", "pulls from the archive", "from the broker", "messages behind")

Line = tuple[str, str]
"""What it is about, and the text."""


def headline(report: StatusReport) -> list[str]:
    """The first lines of `tiered status`: the state of the process, its cause and next step, and what an operator
    should look at."""
    title = f"{report.cluster}/{report.broker} in {report.archive_url}"
    lines = [f"{title}: {report.state}, epoch {report.epoch}"]
    if report.why and report.state != RunState.FOLLOWING.value:
        lines.append(f"why         {report.why}")
    if report.step:
        lines.append(f"next        {report.step}")
    return lines + [f"attention   {finding.text}" for finding in of_report(report)]


def status_lines(report: StatusReport) -> Iterator[Line]:
    """The lines of `tiered status` below the state: how far the archive is, the lag, and what else the process does. A
    line is a title and a text. Figures that are not known are called unknown; older ones have their age."""
    bound = "unknown" if report.bound_phys is None else f"{report.bound_phys:,}"
    lag_bytes = "unknown" if report.lag_bytes is None else size_text(report.lag_bytes)
    about = "about " if report.is_lag_estimated and report.lag_messages is not None else ""
    messages = (
        "unknown" if report.lag_messages is None else f"{about}{counted(report.lag_messages, 'message')}"
    )
    measured = f" (measured {duration_text(report.measured_seconds)} ago)" if report.is_old else ""
    yield "writer", report.writer or "none"
    is_known = report.committed_phys or report.lag_bytes is not None
    archived = f"to {report.committed_phys:,}" if is_known else "unknown"
    yield "archived", f"{archived} of {bound} ({report.bound_reason or 'bound unknown'}){measured}"
    age = "unknown" if report.lag_seconds is None else duration_text(report.lag_seconds)
    yield "behind", f"{messages}, {lag_bytes}, {age}{measured}"
    yield "retention", _margin(report)
    yield "gaps", f"{report.gaps:,}"
    if report.excluded:
        yield "excluded", f"{names_text(report.excluded)} (topics.include, topics.exclude)"
    if report.pending_deletions:
        age = duration_text(report.oldest_pending_deletion_seconds)
        garbage = counted(report.pending_deletions, "object")
        yield "garbage", f"{garbage}, the oldest {age} old (tiered gc deletes them)"
    if report.compaction is not None:
        yield "compaction", compaction_text(report.compaction)
    if report.key_compaction is not None and report.key_compaction.text:
        yield "keys", report.key_compaction.text
    if report.timers is not None and any(
        (report.timers.pending, report.timers.delivered, report.timers.refused)
    ):
        yield "timers", _timers(report.timers)
    if report.scrub is not None:
        yield "scrub", _scrub(report.scrub)
    if report.source == "instance":
        yield "memory", f"{size_text(report.budget_used_bytes)} of {size_text(report.budget_limit_bytes)}"
        yield "pins", f"{report.pins}"
        yield "failures", f"{report.errors:,}{f', last: {report.last_error}' if report.last_error else ''}"


def _margin(report: StatusReport) -> str:
    """How long the broker keeps messages that are not archived yet."""
    if report.retention_margin_seconds is None:
        return "unknown" if report.lag_bytes is None else "no unarchived message is about to be deleted"
    zone = f" (deleteWhen in {report.deletion_zone})" if report.deletion_zone else ""
    left = duration_text(report.retention_margin_seconds)
    return f"{left} until the broker deletes unarchived messages{zone}"


def compaction_text(report: CompactionStatus) -> str:
    """How many objects compaction has joined to how many, and how many are still to be joined."""
    joined = f"{counted(report.joined_objects, 'object')} joined to {report.made_objects:,}"
    if not report.backlog_objects:
        return joined
    about = "about " if report.is_backlog_estimated else ""
    due = f"{counted(report.backlog_objects, 'object')}, {size_text(report.backlog_bytes)} of messages, due"
    return f"{joined}, {about}{due}{f' ({report.level})' if report.level else ''}"


def _timers(report: TimerStatus) -> str:
    """How many delayed messages wait, and how the others were delivered."""
    due = f", the first due for {duration_text(report.overdue_seconds)}" if report.overdue_seconds else ""
    others = f"{report.postponed:,} refused by the broker, {report.refused:,} not delivered"
    return (
        f"{report.pending:,} pending, {report.next_hour:,} within the hour{due}; {report.delivered:,} handed over, 99% "
        f"less than {report.late_p99_seconds:.1f} s late{f'; {others}' if report.postponed + report.refused else ''}"
    )


def _scrub(report: ScrubStatus) -> str:
    """How many stored objects were read back and found damaged, up to which catalog version, and how far the present
    cycle over all objects is."""
    healed = f", {report.healed:,} healed" if report.healed else ""
    damaged = f", {report.damaged:,} DAMAGED" if report.damaged else ""
    return (
        f"{counted(report.objects, 'object')} read back{healed}{damaged}, new ones to version "
        f"{report.checked_version:,}; {report.cycle_share:.0%} of the cycle"
    )


def behind_rows(report: StatusReport, rows_max: int) -> list[list[Any]]:
    """The ``rows_max`` queues with the most messages that are not archived, as rows of a table with BEHIND_HEADER."""
    behind = sorted(report.queues, key=lambda queue: queue.lag_messages, reverse=True)[:rows_max]
    return [
        [
            queue.topic,
            queue.queue_id,
            queue.lag_messages,
            size_text(queue.lag_bytes),
            f"{queue.lag_seconds:.1f}",
        ]
        for queue in behind
    ]


def relay_lines(relay: RelayStatus) -> Iterator[Line]:
    """The lines of `tiered status` on proxy or slave mode, each a title and a text."""
    connected = f"{relay.connections:,} connected"
    if isinstance(relay, SlaveStatus):
        states = {
            True: "redirects slow consumers here",
            False: "redirects no consumers (slaveReadEnable)",
            None: "answers",  # its configuration is not known
        }
        silent = f"does not answer: {relay.master_failure}" if relay.master_failure else "does not answer"
        master = states[relay.redirects] if relay.is_master_available else silent
        yield "slave", f"id {relay.broker_id} at {relay.address}, {connected}; the master {master}"
        for address, stand in relay.name_servers:
            yield "", f"name server {address}: {stand}"
    else:
        archive = "" if relay.is_archive_open else "; the archive is not open yet"
        yield "clients", f"{connected} to {relay.address}{archive}"
        if isinstance(relay, ProxyStatus):
            yield "", f"{counted(relay.broker_connections, 'connection')} to the broker"
    if relay.has_plain_accounts:
        yield "", "accounts are checked without TLS: set serve.tls_certificate"


def group_rows(relay: RelayStatus) -> list[list[Any]]:
    """Its consumer groups, under GROUP_HEADER."""
    return [
        [one.name, one.members, one.archive_pulls, one.broker_pulls, one.behind_messages]
        for one in relay.groups
    ]
