"""Renders what clients read: consumer groups, prefetch windows, caches. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fetcher.blocks.segment_source import SourceStatistics
from fetcher.prefetch.prefetcher import PrefetchCounters, WindowStatus
from rocketmq_tiered.page.html import count_text, render
from rocketmq_tiered.process.status_rows import GROUP_HEADER, group_rows, relay_lines
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveStatus
from rocketmq_tiered.server.proxy.relay_status import RelayStatus, SlaveStatus

GroupTable = tuple[str, str, Sequence[str], Sequence[Sequence[str]], Sequence[tuple[str, str]]]
"""Name and title of a section, the header and rows of its table, and facts."""


@dataclass(frozen=True)
class ReadFigures:
    """Reads of the archive that clients are served from. ``budget_bytes``: for all of them."""

    windows: Sequence[WindowStatus]
    prefetch: PrefetchCounters
    statistics: SourceStatistics
    budget_bytes: int
    readers: int


def render_clients(
    relays: Sequence[RelayStatus], served: ArchiveStatus | None, figures: ReadFigures | None
) -> Markup:
    """Return the page of clients: a table of consumer groups for each of ``relays``, the proxy or slave modes that this
    process serves, and one for archive mode if ``served`` is given. ``figures`` None: the archive is not open yet."""
    groups = [_relayed(relay) for relay in relays]
    if served is not None:
        owner = "committed here" if served.owns_groups else "another server owns the groups"
        facts = [("Connections", count_text(served.connections)), ("Offsets", owner)]
        rows = [(name, count_text(members)) for name, members in served.groups]
        groups.append(("served", "Consumer groups", ("Group", "Members"), rows, facts))
    return render("clients", groups_of=groups, figures=figures)


def _relayed(relay: RelayStatus) -> GroupTable:
    name = "slave" if isinstance(relay, SlaveStatus) else "proxy"
    facts = [(about.capitalize(), text) for about, text in relay_lines(relay)]
    rows = [(cells[0], *map(count_text, cells[1:])) for cells in group_rows(relay)]
    return name, f"Consumer groups in {name} mode", GROUP_HEADER, rows, facts
