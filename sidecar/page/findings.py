"""What an operator should look at, each with the next step. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from server.proxy.relay_status import RelayStatus, SlaveStatus
from sidecar.page.figures import count_text, seconds_text
from sidecar.report import StatusReport
from tiered.catalog.state import CatalogState

MARGIN_BAD_S, MARGIN_WARN_S = 3600.0, 6 * 3600.0
GARBAGE_LATE_MS = 86_400_000
"""How long after its grace period a pending deletion counts as late."""


@dataclass(frozen=True)
class Finding:
    """``what`` is wrong, and the next ``step``."""

    what: str
    step: str
    is_bad: bool = False


def of_report(report: StatusReport) -> list[Finding]:
    """In the report of `tiered run`, besides its state."""
    found = []
    margin_s = report.retention_margin_seconds
    if margin_s is not None and margin_s < MARGIN_WARN_S:
        found.append(Finding(
            f"the broker deletes messages that are not archived in {seconds_text(margin_s)}",
            "raise offload.upload_threads, or the broker's fileReservedTime or diskMaxUsedSpaceRatio",
            is_bad=margin_s < MARGIN_BAD_S,
        ))  # fmt: skip
    if report.pin_note:
        found.append(Finding(f"files are not pinned: {report.pin_note}", "set pins.directory, or free space"))
    if report.unindexed_objects:
        objects = count_text(report.unindexed_objects)
        found.append(
            Finding(
                f"{objects} damaged objects are not in the message index",
                "tiered verify ARCHIVE_URL names them",
            )
        )
    return found


def of_catalog(state: CatalogState, now_ms: int, gc_grace_ms: int) -> list[Finding]:
    """In the catalog."""
    found = []
    if len(state.gaps):
        found.append(Finding(
            f"{count_text(len(state.gaps))} gaps: messages that the broker deleted or lost before they were archived",
            "tiered ls ARCHIVE_URL lists them with their reasons",
        ))  # fmt: skip
    oldest_ms = state.oldest_pending_deletion_ms
    if oldest_ms is not None and now_ms - oldest_ms > gc_grace_ms + GARBAGE_LATE_MS:
        age = seconds_text((now_ms - oldest_ms) / 1000)
        found.append(
            Finding(
                f"garbage is not deleted: the oldest has been pending for {age}",
                "tiered gc ARCHIVE_URL --apply, with an account that may delete",
            )
        )
    return found


def of_relay(relay: RelayStatus) -> list[Finding]:
    """In proxy or slave mode."""
    found = []
    if relay.has_plain_accounts:
        found.append(Finding("clients sign requests on connections without TLS", "set serve.tls_certificate"))
    if isinstance(relay, SlaveStatus) and not relay.is_master_available:
        why = f": {relay.master_failure}" if relay.master_failure else ""
        found.append(
            Finding(f"the master is not available{why}", "check that the broker runs, and broker.address")
        )
    return found
