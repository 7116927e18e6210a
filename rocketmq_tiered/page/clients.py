"""Renders what clients read: consumer groups, prefetch windows, caches. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fetcher.blocks.segment_source import SourceStatistics
from fetcher.prefetch.prefetcher import PrefetchCounters, WindowStatus
from rocketmq_tiered.page.html import (
    Child,
    Html,
    bytes_text,
    count_text,
    facts,
    section,
    share_text,
    table,
    tag,
)
from rocketmq_tiered.page.overview import card
from rocketmq_tiered.process.status_rows import GROUP_HEADER, group_rows, relay_lines
from rocketmq_tiered.server.archive_mode.archive_service import ArchiveStatus
from rocketmq_tiered.server.proxy.relay_status import RelayStatus, SlaveStatus
from tiered.console import counted

GROUPS_SHOWN, WINDOWS_SHOWN = 200, 100


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
) -> Html:
    """The page. ``served``: archive mode; ``figures`` None: the archive is not open yet."""
    parts = [_relay(relay) for relay in relays]
    if served is not None:
        rows = [(name, count_text(members)) for name, members in served.groups]
        parts.append(
            _groups(
                "served",
                "Consumer groups",
                ["Group", "Members"],
                rows,
                facts(
                    [
                        ("Connections", count_text(served.connections)),
                        (
                            "Offsets",
                            "committed here" if served.owns_groups else "another server owns the groups",
                        ),
                    ]
                ),
            )
        )
    if figures is not None:
        parts += [_windows(figures), _cache(figures)]
    else:
        parts.append(tag("p", "The archive is not open for clients yet.", class_="notice"))
    return tag("div", parts, class_="grid")


def _relay(relay: RelayStatus) -> Html:
    name = "slave" if isinstance(relay, SlaveStatus) else "proxy"
    head = facts((about.capitalize(), text) for about, text in relay_lines(relay))
    rows = [[cells[0], *map(count_text, cells[1:])] for cells in group_rows(relay)]
    return _groups(name, f"Consumer groups in {name} mode", GROUP_HEADER, rows, head)


def _groups(
    name: str, title: str, header: Sequence[str], rows: Sequence[Sequence[Child]], head: Child
) -> Html:
    shown = table(title, header, rows[:GROUPS_SHOWN], range(1, len(header))) if rows else None
    empty = None if rows else tag("p", "No group has members here.", class_="note")
    more = len(rows) - GROUPS_SHOWN
    return section(name, title, head, shown, empty, note=f"{more:,} more" if more > 0 else None)


def _windows(figures: ReadFigures) -> Html:
    rows = [
        (
            window.group,
            window.topic,
            window.queue_id,
            count_text(window.position),
            count_text(window.size),
            count_text(window.fetched),
            bytes_text(window.unread_bytes),
        )
        for window in figures.windows[:WINDOWS_SHOWN]
    ]
    header = ["Group", "Topic", "Queue", "Position", "Window, messages", "Ahead, messages", "Ahead, bytes"]
    shown = table("Prefetch windows", header, rows, range(2, 7)) if rows else None
    empty = None if rows else tag("p", "No reader has prefetched messages at the moment.", class_="note")
    counters = figures.prefetch
    totals = facts(
        [
            ("Readers", count_text(figures.readers)),
            ("Prefetches", f"{count_text(counters.fetches)}, {bytes_text(counters.fetched_bytes)}"),
            ("Expired unread", bytes_text(counters.expired_bytes)),
            ("Evicted unread", f"{count_text(counters.evicted)} times"),
            ("Failed", count_text(counters.failures)),
        ]
    )
    more = len(figures.windows) - WINDOWS_SHOWN
    return section(
        "windows", "Prefetch windows", shown, empty, totals, note=f"{more:,} more" if more > 0 else None
    )


def _cache(figures: ReadFigures) -> Html:
    found = figures.statistics
    corrupt = found.corrupt_fetched + found.corrupt_memory + found.corrupt_disk
    disk = found.disk_hits + found.disk_misses
    return section(
        "cache",
        "Cache",
        tag(
            "div",
            [
                card(
                    "Hits",
                    share_text(found.hits, found.hits + found.misses),
                    f"{count_text(found.hits)} of {count_text(found.hits + found.misses)}",
                ),
                card(
                    "Cached blocks",
                    bytes_text(found.cached_bytes),
                    f"{bytes_text(found.index_bytes)} of object tails",
                ),
                card(
                    "Memory of reads",
                    bytes_text(found.charged_bytes),
                    f"of {bytes_text(figures.budget_bytes)}, highest {bytes_text(found.peak_bytes)}",
                ),
                card(
                    "Read from the store", bytes_text(found.bytes_fetched), counted(found.requests, "request")
                ),
            ],
            class_="cards",
        ),
        facts(
            [
                ("Fetched twice", bytes_text(found.bytes_fetched_twice)),
                ("Pulls that waited", count_text(found.waits)),
                ("Refused for lack of memory", count_text(found.memory_refused)),
                ("Disk cache hits", share_text(found.disk_hits, disk) if disk else "no disk cache used"),
                ("Failed checksums", tag("span", count_text(corrupt), class_="bad") if corrupt else "0"),
            ]
        ),
    )
