"""Renders the first page: state, findings, lag and its history, the archive's size and cost. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from urllib.parse import quote

from rocketmq_tiered.page.archive_view import ArchiveCost, Contents
from rocketmq_tiered.page.html import (
    CELL_CHARS,
    Child,
    Html,
    Point,
    bytes_text,
    count_text,
    date_text,
    facts,
    money_text,
    rate_text,
    seconds_text,
    section,
    sparkline,
    table,
    tag,
)
from rocketmq_tiered.page.kept_values import Reading
from rocketmq_tiered.process.findings import Finding
from rocketmq_tiered.process.report import StatusReport
from rocketmq_tiered.process.status_rows import BEHIND_HEADER, behind_rows, status_lines
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveStatus
from tiered.catalog.deletions import Reason
from tiered.catalog.hidden_history import HistoryListing
from tiered.catalog.state import CatalogState
from tiered.console import counted

QUEUES_SHOWN = 10
QUIET_STATES = ("starting", "connecting", "standby", "stopping", "draining")
"""Not ready, but not in trouble either."""
REASONS: dict[str, str] = {
    Reason.ABANDONED: "of abandoned uploads",
    Reason.REPLACED: "replaced",
    Reason.COMPACTED: "joined to larger ones",
    Reason.EXPIRED: "expired",
    Reason.DIVERGED: "of earlier log histories",
    Reason.QUARANTINE: "kept after a repair",
    Reason.UNEXPLAINED: "that nothing explains, and that are kept",
    Reason.INTENT: "of a compaction that is not finished",
}


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
    cost: Reading[ArchiveCost]
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


def severity_of(state: str, *, is_ready: bool, findings: Sequence[Finding] = ()) -> str:
    """good, warn or bad: the colour of a state. Never good with ``findings``."""
    word = state.partition(":")[0]
    if is_ready and any(finding.is_bad for finding in findings):
        return "bad"
    if is_ready:
        return "warn" if findings or word == "behind" else "good"
    return "wait" if word in QUIET_STATES else "bad"


def _state(shown: Overview) -> Html:
    level = severity_of(shown.state, is_ready=shown.is_ready, findings=shown.findings)
    badge = tag("p", tag("span", class_="dot", aria_hidden="true"), shown.state, class_=f"badge {level}")
    ready = "ready" if shown.is_ready else "not ready"
    return tag(
        "section",
        tag("h2", "State", class_="hidden"),
        tag("div", badge, tag("p", shown.why, class_="why"), role="status", class_="headline"),
        tag("p", "Next: ", shown.step, class_="next") if shown.step else None,
        facts([("Readiness", ready), *shown.facts]),
        id="state",
        class_=f"hero {level}",
        data_live=True,
    )


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
        "section",
        tag("h2", "Needs attention"),
        tag("ul", items),
        id="findings",
        class_="findings",
        data_live=True,
        hidden=not items,
    )


def card(name: str, value: Child, note: Child = None, picture: Child = None, level: str = "") -> Html:
    """One figure."""
    return tag(
        "div",
        tag("h3", name),
        tag("p", value, class_="value"),
        tag("p", note, class_="note") if note else None,
        picture,
        class_=f"card {level}".strip(),
    )


def _cards(*cards: Child) -> Html:
    return tag("div", cards, class_="cards")


def _lag(report: StatusReport, shown: Overview) -> Html:
    rates = rates_of(shown.points("messages"))
    estimate = "not archived yet, an estimate" if report.is_lag_estimated else "not archived yet"
    lags: list[tuple[str, str, Callable[[float | None], str], str]] = [
        ("Messages", "lag_messages", count_text, estimate),
        ("Bytes", "lag_bytes", bytes_text, "not archived yet"),
        ("Age", "lag_seconds", seconds_text, "of the oldest message not archived"),
    ]
    cards = [
        card(
            name,
            text(getattr(report, key)),
            note,
            sparkline(f"Lag, {name.lower()}", shown.points(key), text, getattr(report, key)),
        )
        for name, key, text, note in lags
    ]
    rate = card(
        "Rate",
        rate_text(rates[-1][1] if rates else None),
        f"{count_text(report.messages)} since the start",
        sparkline("Archived messages a second", rates, rate_text),
    )
    lines = facts((about.capitalize(), text) for about, text in status_lines(report))
    return section("lag", "Lag behind the broker", _cards(*cards, rate), lines)


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
    rows = [(topic_link(topic), *others) for topic, *others in behind_rows(report, QUEUES_SHOWN)]
    more, title = len(report.queues) - len(rows), "Queues with the largest lag"
    shown = table(title, BEHIND_HEADER, rows, (1, 2, 3, 4))
    return section("behind", title, shown, note=f"{more:,} more have a lag" if more else None)


def _served(served: ArchiveStatus, shown: Overview) -> Html:
    members = sum(count for _, count in served.groups)
    owner = "this server commits offsets" if served.owns_groups else "another server owns the consumer groups"
    return section(
        "clients",
        "Clients",
        _cards(
            card(
                "Connections",
                count_text(served.connections),
                None,
                sparkline("Connections", shown.points("connections"), count_text, served.connections),
            ),
            card("Consumer groups", count_text(len(served.groups)), owner),
            card("Members", count_text(members)),
        ),
    )


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
            card(
                "Messages",
                count_text(int(topics.messages.sum())),
                f"{bytes_text(int(topics.bytes.sum()))} before compression",
            ),
            card("Topics", count_text(len(topics.names)), counted(int(topics.queues.sum()), "queue")),
            *_cost_cards(cost),
            *_hidden_cards(topics.hidden, shown.histories),
            card(
                "Gaps",
                count_text(len(state.gaps)),
                "ranges lost for good",
                level="bad" if len(state.gaps) else "",
            ),
            card("Pending deletions", count_text(garbage), oldest),
        ),
        facts(
            [
                *_upkeep(state, shown.report),
                ("Catalog version", count_text(state.version)),
                ("Last commit", date_text(state.created_ms)),
                ("Newest message", date_text(int(topics.newest_ms.max(initial=0)))),
                ("Times", "UTC"),
            ]
        ),
    ]


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
        (
            f"{one.listing.number} (current)" if one.listing.is_current else one.listing.number,
            count_text(one.listing.begin_phys),
            count_text(one.listing.end_phys),
            count_text(one.listing.messages),
            bytes_text(one.listing.bytes),
            date_text(one.listing.since_ms),
            "retention" if one.listing.is_kept else date_text(one.kept_until_ms),
        )
        for one in histories
    ]
    how = "tiered cat --history N prints hidden messages; the broker's earlier log makes them visible again"
    return section("histories", "Log histories", table("Log histories", header, rows, (1, 2, 3, 4)), note=how)


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
    return found + ([("To be deleted", reasons)] if reasons else [])


def _cost_cards(cost: Reading[ArchiveCost]) -> list[Html]:
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
