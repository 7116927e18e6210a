"""Renders the first page: state, findings, lag and its history, the archive's size and cost. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from rocketmq_tiered.page.archive_view import Contents, Cost
from rocketmq_tiered.page.figures import (
    bytes_text,
    count_text,
    date_text,
    money_text,
    rate_text,
    seconds_text,
)
from rocketmq_tiered.page.html import CELL_CHARS, Child, Html, facts, section, table, tag
from rocketmq_tiered.page.sparkline import Point, sparkline
from rocketmq_tiered.page.worker_value import Reading
from rocketmq_tiered.process.findings import Finding
from rocketmq_tiered.process.report import StatusReport
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveStatus
from tiered.catalog.deletions import Reason
from tiered.catalog.hidden_history import HistoryListing
from tiered.catalog.state import CatalogState
from tiered.console import counted, names_text

QUEUES_SHOWN = 10
QUIET_STATES = ("starting", "connecting", "standby", "stopping", "draining")
"""Not ready, but not in trouble either."""
REASONS: dict[str, str] = {
    Reason.ABANDONED: "of abandoned uploads", Reason.REPLACED: "replaced", Reason.COMPACTED: "joined to larger ones",
    Reason.EXPIRED: "expired", Reason.DIVERGED: "of earlier log histories",
    Reason.QUARANTINE: "kept after a repair",
    Reason.INTENT: "of a compaction that is not finished",
}  # fmt: skip


@dataclass(frozen=True)
class ShownHistory:
    """A log history, and when gc deletes what it hid; None: never, or nothing is hidden."""

    listing: HistoryListing
    kept_until_ms: int | None


@dataclass(frozen=True)
class Overview:
    """What the page shows. ``step``: the next step of a state that is a trouble. ``points``: the history of a figure.
    ``report`` None: this process has no broker."""

    state: str
    why: str
    step: str
    is_ready: bool
    report: StatusReport | None
    served: ArchiveStatus | None
    contents: Reading[Contents]
    cost: Reading[Cost]
    findings: Sequence[Finding]
    points: Callable[[str], Sequence[Point]]
    histories: Sequence[ShownHistory] = ()
    facts: Sequence[tuple[str, Child]] = field(default=())


def render_overview(shown: Overview) -> Html:
    """The content of the page."""
    parts: list[Child] = [_state(shown), _findings(shown.findings)]
    if shown.report is not None:
        parts += [_lag(shown.report, shown), _behind(shown.report)]
    if shown.served is not None:
        parts.append(_served(shown.served, shown))
    parts += [_archive(shown), _histories(shown.histories)]
    return tag("div", parts, class_="grid")


def level_of(state: str, *, is_ready: bool, findings: Sequence[Finding] = ()) -> str:
    """good, warn or bad: the colour of a state. Never good with ``findings``."""
    word = state.partition(":")[0]
    if is_ready and any(finding.is_bad for finding in findings):
        return "bad"
    if is_ready:
        return "warn" if findings or word == "behind" else "good"
    return "wait" if word in QUIET_STATES else "bad"


def _state(shown: Overview) -> Html:
    level = level_of(shown.state, is_ready=shown.is_ready, findings=shown.findings)
    badge = tag("p", tag("span", class_="dot", aria_hidden="true"), shown.state, class_=f"badge {level}")
    ready = "ready" if shown.is_ready else "not ready"
    return tag(
        "section",
        tag("h2", "State", class_="hidden"),
        tag("div", badge, tag("p", shown.why, class_="why"), role="status", class_="headline"),
        tag("p", "Next: ", shown.step, class_="next") if shown.step else None,
        facts([("Readiness", ready), *shown.facts]),
        id="state", class_=f"hero {level}", data_live=True,
    )  # fmt: skip


def _findings(found: Sequence[Finding]) -> Html:
    items = [
        tag(
            "li",
            tag("strong", finding.what),
            tag("span", "Next: ", finding.step),
            class_="bad" if finding.is_bad else "warn",
        )
        for finding in found
    ]
    return tag(
        "section", tag("h2", "Needs attention"), tag("ul", items), id="findings", class_="findings",
        data_live=True, hidden=not items,
    )  # fmt: skip


def card(name: str, value: Child, note: Child = None, picture: Child = None, level: str = "") -> Html:
    """One figure."""
    return tag(
        "div", tag("h3", name), tag("p", value, class_="value"), tag("p", note, class_="note") if note else None,
        picture, class_=f"card {level}".strip(),
    )  # fmt: skip


def _cards(*cards: Child) -> Html:
    return tag("div", cards, class_="cards")


def _lag(report: StatusReport, shown: Overview) -> Html:
    points = shown.points
    margin_s = report.retention_margin_seconds
    bound = "unknown" if report.bound_phys is None else count_text(report.bound_phys)
    rates = rates_of(points("messages"))
    measured = f"measured {seconds_text(report.measured_seconds)} ago" if report.is_old else None
    return section(
        "lag", "Lag behind the broker",
        _cards(
            card("Messages", count_text(report.lag_messages),
                 "not archived yet, an estimate" if report.is_lag_estimated else "not archived yet",
                 sparkline("Lag in messages", points("lag_messages"), count_text, report.lag_messages)),
            card("Bytes", bytes_text(report.lag_bytes), f"archived to {count_text(report.committed_phys)} of {bound}",
                 sparkline("Lag in bytes", points("lag_bytes"), bytes_text, report.lag_bytes)),
            card("Age", seconds_text(report.lag_seconds), "of the oldest message not archived",
                 sparkline("Lag in seconds", points("lag_seconds"), seconds_text, report.lag_seconds)),
            card("Rate", rate_text(rates[-1][1] if rates else None), f"{count_text(report.messages)} since the start",
                 sparkline("Archived messages a second", rates, rate_text)),
        ),
        facts([
            ("Retention margin", "no risk" if margin_s is None else seconds_text(margin_s)),
            ("Upload bound", report.bound_reason or "unknown"),
            ("Pinned files", count_text(report.pins)),
            ("Upload attempts abandoned", count_text(report.errors)),
            ("Upload buffers", f"{bytes_text(report.budget_used_bytes)} of {bytes_text(report.budget_limit_bytes)}"),
        ]),
        tag("p", "Last failure: ", tag("code", report.last_error), class_="note") if report.last_error else None,
        note=measured,
    )  # fmt: skip


def rates_of(points: Sequence[Point]) -> list[Point]:
    """The rate of a counter between its measurements; it starts again at 0 with a new uploader."""
    found = []
    for (age_s, before), (newer_age_s, after) in itertools.pairwise(points):
        if age_s > newer_age_s and after >= before:
            found.append((newer_age_s, (after - before) / (age_s - newer_age_s)))
    return found


def _behind(report: StatusReport) -> Html | None:
    if not report.queues:
        return None
    worst = sorted(report.queues, key=lambda queue: -queue.lag_messages)[:QUEUES_SHOWN]
    rows = [
        (topic_link(queue.topic), queue.queue_id, count_text(queue.lag_messages), bytes_text(queue.lag_bytes),
         seconds_text(queue.lag_seconds))
        for queue in worst
    ]  # fmt: skip
    more = len(report.queues) - len(worst)
    return section(
        "behind", "Queues with the largest lag",
        table("Queues with the largest lag", ["Topic", "Queue", "Messages", "Bytes", "Age"], rows, (1, 2, 3, 4)),
        note=f"{more:,} more have a lag" if more else None,
    )  # fmt: skip


def _served(served: ArchiveStatus, shown: Overview) -> Html:
    members = sum(count for _, count in served.groups)
    owner = "this server commits offsets" if served.owns_groups else "another server owns the consumer groups"
    return section(
        "clients", "Clients",
        _cards(
            card("Connections", count_text(served.connections), None,
                 sparkline("Connections", shown.points("connections"), count_text, served.connections)),
            card("Consumer groups", count_text(len(served.groups)), owner),
            card("Members", count_text(members)),
        ),
    )  # fmt: skip


def _archive(shown: Overview) -> Html:
    return section("archive", "Archive", *_archive_parts(shown))


def _archive_parts(shown: Overview) -> list[Child]:
    found, cost = shown.contents, shown.cost
    problem = unread(found)
    if found.value is None:
        return [problem]
    state, topics = found.value.state, found.value.topics
    garbage = state.pending_deletion_count
    oldest = (
        f"the oldest since {date_text(state.oldest_pending_deletion_ms)}" if garbage else "nothing to delete"
    )
    return [
        problem,
        _cards(
            card("Messages", count_text(int(topics.messages.sum())),
                 f"{bytes_text(int(topics.bytes.sum()))} before compression"),
            card("Topics", count_text(len(topics.names)), counted(int(topics.queues.sum()), "queue")),
            *_cost_cards(cost),
            *_hidden_cards(topics.hidden, shown.histories),
            card("Gaps", count_text(len(state.gaps)), "ranges lost for good", level="bad" if len(state.gaps) else ""),
            card("Pending deletions", count_text(garbage), oldest),
            *_compaction_cards(shown.report),
        ),
        facts([
            *_excluded(shown.report),
            *_upkeep(state, shown.report),
            ("Catalog version", count_text(state.version)),
            ("Last commit", date_text(state.created_ms)),
            ("Newest message", date_text(int(topics.newest_ms.max(initial=0)))),
            ("Times", "UTC"),
        ]),
    ]  # fmt: skip


def _hidden_cards(deleted: int, histories: Sequence[ShownHistory]) -> list[Html]:
    replaced = sum(one.listing.messages for one in histories)
    if not deleted + replaced:
        return []
    parts = ["of deleted topics and earlier generations"] if deleted else []
    parts += ["of earlier log histories"] if replaced else []
    note = parts[0] if len(parts) == 1 else f"{deleted:,} {parts[0]}, {replaced:,} {parts[1]}"
    return [card("Hidden messages", count_text(deleted + replaced), note)]


def _histories(histories: Sequence[ShownHistory]) -> Html | None:
    if not histories:
        return None
    header = ["History", "Begin", "End", "Hidden messages", "Bytes", "Hidden since", "Kept until"]
    rows = [
        (f"{one.listing.number} (current)" if one.listing.is_current else one.listing.number,
         count_text(one.listing.begin_phys), count_text(one.listing.end_phys), count_text(one.listing.messages),
         bytes_text(one.listing.bytes), date_text(one.listing.since_ms),
         "retention" if one.listing.is_kept else date_text(one.kept_until_ms))
        for one in histories
    ]  # fmt: skip
    how = "tiered cat --history N prints hidden messages; the broker's earlier log makes them visible again"
    return section("histories", "Log histories", table("Log histories", header, rows, (1, 2, 3, 4)), note=how)


def _excluded(report: StatusReport | None) -> list[tuple[str, Child]]:
    if report is None or not report.excluded:
        return []
    return [("Excluded", f"{names_text(report.excluded)} (topics.include, topics.exclude)")]


def _upkeep(state: CatalogState, report: StatusReport | None) -> list[tuple[str, Child]]:
    """When each task ran last, and what is left to delete."""
    found: list[tuple[str, Child]] = []
    for task in () if report is None else report.tasks:
        if task.last_ms is not None:
            found.append((f"Last {task.name}", f"{date_text(task.last_ms)}, {task.problem or 'done'}"))
    counts = Counter(pending.reason for pending in state.pending_deletions.values())
    for listed in state.deletion_lists:
        counts[listed.reason] += listed.entries
    reasons = ", ".join(
        f"{count:,} {REASONS.get(reason, 'others')}" for reason, count in sorted(counts.items())
    )
    keys = None if report is None else report.key_compaction
    if keys is not None and keys.text:
        found.append(("Key compaction", keys.text))
    return found + ([("To be deleted", reasons)] if reasons else [])


def _compaction_cards(report: StatusReport | None) -> list[Html]:
    found = None if report is None else report.compaction
    if found is None:
        return []
    about = "about " if found.is_backlog_estimated else ""
    due = (
        f"{about}{counted(found.backlog_objects, 'object')} due"
        if found.backlog_objects
        else "nothing is due"
    )
    note = f"to {count_text(found.made_objects)} since the start; {due}"
    return [card("Objects joined", count_text(found.joined_objects), note)]


def _cost_cards(cost: Reading[Cost]) -> list[Html]:
    found = cost.value
    if found is None:
        why = "being measured" if cost.is_pending else cost.problem or "being measured"
        return [card("Stored", "…", tag("span", why, data_pending=cost.is_pending))]
    measured = f"{counted(found.use.stored_objects, 'object')} at {date_text(int(found.measured_s * 1000))}"
    stored = card("Stored", bytes_text(found.use.stored_bytes), measured)
    if not found.is_priced:
        return [stored]
    if found.use.is_young:
        return [stored, card("Cost a month", "too young", "known an hour after the first commit")]
    prices = f"at list prices of {found.prices.name.partition(',')[0]}; tiered cost explains it"
    return [stored, card("Cost a month", money_text(found.month.total, found.prices.currency), prices)]


def unread(found: Reading[Contents]) -> Html | None:
    """A message if the catalog cannot be read, or is still being read."""
    if found.problem:
        seen = "what is shown was read before" if found.value is not None else "nothing was read yet"
        return tag("p", f"The archive cannot be read ({seen}): {found.problem}", class_="notice bad")
    if found.value is not None:
        return None
    return tag("p", "The archive is being read …", class_="notice", data_pending=True)


def topic_link(topic: str) -> Html:
    """A topic's name, which leads to its queues."""
    return tag("a", topic, href=queues_path(topic), class_="name" if len(topic) > CELL_CHARS else None)


def queues_path(topic: str) -> str:
    """The page of one topic's queues."""
    return f"/queues?topic={quote(topic, safe='')}"
