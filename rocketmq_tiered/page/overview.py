"""Renders the first page: state, findings, lag and its history, the archive's size and cost. Pure."""

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
    """Return the content of the first page. Without a broker (``shown.report`` None) it has no lag, and without a
    catalog that was read no figures of the archive."""
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
    """Return the colour of a process's state on the page: good, warn, bad, or wait while it is not ready yet. It is
    never good with ``findings``."""
    state_name = state.partition(":")[0]
    if is_ready and any(finding.is_bad for finding in findings):
        return "bad"
    if is_ready:
        return "warn" if findings or state_name == "behind" else "good"
    return "wait" if state_name in QUIET_STATES else "bad"


def rates_of(points: Sequence[Point]) -> list[Point]:
    """Return the rate, per second, at which a counter grew between each two measurements. Where the counter fell, as a
    new uploader starts again at 0, there is no rate."""
    rates = []
    for (age_s, before), (newer_age_s, after) in itertools.pairwise(points):
        if age_s > newer_age_s and after >= before:
            rates.append((newer_age_s, (after - before) / (age_s - newer_age_s)))
    return rates


class Hidden(NamedTuple):
    """Messages that are not shown, and what they are of."""

    messages: int
    note: str


def _hidden(deleted: int, histories: Sequence[ShownHistory]) -> Hidden | None:
    """Return how many messages the archive keeps without showing them, and a note that says of what they are; None if
    there are none."""
    replaced = sum(history.listing.messages for history in histories)
    counts = [(deleted, "of deleted topics and earlier generations"), (replaced, "of earlier log histories")]
    present = [(count, text) for count, text in counts if count]
    if not present:
        return None
    note = present[0][1] if len(present) == 1 else ", ".join(f"{count:,} {text}" for count, text in present)
    return Hidden(deleted + replaced, note)


def _archive_facts(contents: Contents, report: StatusReport | None) -> list[tuple[str, str]]:
    """Return names and values of the facts that the first page shows of the archive."""
    state = contents.state
    return [
        *_upkeep(state, report),
        ("Catalog version", count_text(state.version)),
        ("Last commit", date_text(state.created_ms)),
        ("Newest message", date_text(int(contents.topics.table["newest"].max(initial=0)))),
        ("Times", "UTC"),
    ]


def _upkeep(state: CatalogState, report: StatusReport | None) -> list[tuple[str, str]]:
    """Return when each maintenance task ran last and with what result, and how many objects are still to be deleted, by
    the reason for it."""
    facts: list[tuple[str, str]] = []
    for task in () if report is None else report.tasks:
        if task.last_ms is not None:
            facts.append((f"Last {task.name}", f"{date_text(task.last_ms)}, {task.problem or 'done'}"))
    # A commit names a few objects to delete itself, and many by lists in objects of their own.
    counts = Counter(pending.reason for pending in state.pending_deletions.values())
    for deletion_list in state.deletion_lists:
        counts[deletion_list.reason] += deletion_list.entries
    reasons = ", ".join(
        f"{count:,} {REASONS.get(reason, 'others')}" for reason, count in sorted(counts.items())
    )
    return facts + ([("To be deleted", reasons)] if reasons else [])
