"""Renders the first page: state, findings, lag and its history, the archive's size and cost. Pure."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from rocketmq_tiered.page.archive_view import ArchiveCost, Contents
from rocketmq_tiered.page.html import (
    Point,
    bytes_text,
    count_text,
    date_text,
    rate_text,
    render,
    seconds_text,
    sparkline,
)
from rocketmq_tiered.page.kept_values import Reading
from rocketmq_tiered.process.findings import Finding
from rocketmq_tiered.process.report import StatusReport
from rocketmq_tiered.process.status_rows import BEHIND_HEADER, behind_rows, status_lines
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveStatus
from tiered.catalog.deletions import Reason
from tiered.catalog.hidden_history import HistoryListing
from tiered.catalog.state import CatalogState

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
    facts: Sequence[tuple[str, str]] = ()


def render_overview(shown: Overview) -> Markup:
    """The content of the page."""
    report, contents = shown.report, shown.contents.value
    return render(
        "overview",
        shown=shown,
        level=severity_of(shown.state, is_ready=shown.is_ready, findings=shown.findings),
        facts=[("Readiness", "ready" if shown.is_ready else "not ready"), *shown.facts],
        lines=[] if report is None else [(about.capitalize(), text) for about, text in status_lines(report)],
        behind=[] if report is None else behind_rows(report, QUEUES_SHOWN),
        behind_header=BEHIND_HEADER,
        rates=rates_of(shown.points("messages")),
        archive_facts=[] if contents is None else _archive_facts(contents, report),
        hidden=None if contents is None else _hidden(contents.topics.hidden, shown.histories),
        spark=sparkline,
        count_text=count_text,
        bytes_text=bytes_text,
        seconds_text=seconds_text,
        rate_text=rate_text,
    )


def severity_of(state: str, *, is_ready: bool, findings: Sequence[Finding] = ()) -> str:
    """good, warn or bad: the colour of a state. Never good with ``findings``."""
    word = state.partition(":")[0]
    if is_ready and any(finding.is_bad for finding in findings):
        return "bad"
    if is_ready:
        return "warn" if findings or word == "behind" else "good"
    return "wait" if word in QUIET_STATES else "bad"


def rates_of(points: Sequence[Point]) -> list[Point]:
    """The rate of a counter between its measurements; it starts again at 0 with a new uploader."""
    found = []
    for (age_s, before), (newer_age_s, after) in itertools.pairwise(points):
        if age_s > newer_age_s and after >= before:
            found.append((newer_age_s, (after - before) / (age_s - newer_age_s)))
    return found


class Hidden(NamedTuple):
    """Messages that are not shown, and what they are of."""

    messages: int
    note: str


def _hidden(deleted: int, histories: Sequence[ShownHistory]) -> Hidden | None:
    """How many messages the archive keeps without showing them, and why; None if there are none."""
    replaced = sum(one.listing.messages for one in histories)
    found = [(deleted, "of deleted topics and earlier generations"), (replaced, "of earlier log histories")]
    parts = [(count, text) for count, text in found if count]
    if not parts:
        return None
    note = parts[0][1] if len(parts) == 1 else ", ".join(f"{count:,} {text}" for count, text in parts)
    return Hidden(deleted + replaced, note)


def _archive_facts(contents: Contents, report: StatusReport | None) -> list[tuple[str, str]]:
    state = contents.state
    return [
        *_upkeep(state, report),
        ("Catalog version", count_text(state.version)),
        ("Last commit", date_text(state.created_ms)),
        ("Newest message", date_text(int(contents.topics.newest_ms.max(initial=0)))),
        ("Times", "UTC"),
    ]


def _upkeep(state: CatalogState, report: StatusReport | None) -> list[tuple[str, str]]:
    """When each task ran last, and what is left to delete."""
    found: list[tuple[str, str]] = []
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
