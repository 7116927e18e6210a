"""The page of timers: pending ones by hour of delivery, and those with a unique key. Values first, then HTML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fetcher.access import ArchiveAccess
from fetcher.rows.message import Message
from rocketmq_tiered.page.html import Child, Html, count_text, date_text, facts, section, table, tag
from rocketmq_tiered.page.messages import Search, find_messages, message_path
from tiered.archive.timers import TimerCounts, TimerFiles, joined, sort_out
from tiered.catalog.state import CatalogState
from tiered.model.tables import Table
from tiered.model.timer import CANCEL, HOUR_MS, timer_of

HOURS_SHOWN, DAYS_SHOWN = 48, 30
_DAY_HOURS = 24


@dataclass(frozen=True)
class ShownTimer:
    """A message of the gateway topic, and what became of its timer."""

    message: Message
    topic: str
    deliver_ms: int
    outcome: str


def find_timers(access: ArchiveAccess, gateway_topic: str, unique_key: str) -> list[ShownTimer]:
    """The newest first. Raises what find_messages raises."""
    files, state = TimerFiles(access.store), access.state
    found = []
    for message in find_messages(access, Search("id", gateway_topic, unique_key, is_whole=True)):
        properties = message.properties
        asked = timer_of(
            properties,
            stored_ms=message.store_timestamp,
            sys_flag=message.record.sys_flag,
            max_delay_ms=1 << 62,
        )
        if asked.refusal:
            outcome = f"refused: {asked.refusal.text}"
        elif not asked.deliver_ms:
            outcome = f"cancels {properties.get(CANCEL, '')}"
        else:
            outcome = _outcome(files, state, message, asked.deliver_ms)
        found.append(ShownTimer(message, asked.topic, asked.deliver_ms, outcome))
    return found


def _outcome(files: TimerFiles, state: CatalogState, message: Message, deliver_ms: int) -> str:
    entries = joined(list(files.pending(state, deliver_ms, deliver_ms + 1)))
    found = sort_out(entries)

    def is_among(table: Table) -> bool:
        own = table[table["queue_offset"] == message.queue_offset]
        return any(entries.queues[queue] == message.queue for queue in own["queue"].tolist())

    if is_among(found.timers):
        return "pending"
    return "cancelled or moved" if is_among(found.cancelled) else "handed over to the broker"


def render_timers(
    counts: TimerCounts | None, now_ms: int, unique_key: str, found: Sequence[ShownTimer], problem: Child
) -> Html:
    """The page: the form, what was found or why nothing was, and the hours; ``counts`` None: not read yet."""
    form = tag(
        "form",
        tag(
            "label",
            "Unique key",
            tag(
                "input",
                name="key",
                value=unique_key,
                required=True,
                autocomplete="off",
                spellcheck="false",
                placeholder="the message id that the producer got",
            ),
            class_="wide",
        ),
        tag("button", "Search"),
        method="get",
        action="/timers",
        role="search",
        class_="bar",
    )
    parts: list[Child] = [form, problem]
    if found:
        rows = [
            (
                tag("a", date_text(one.deliver_ms), href=message_path(one.message)),
                one.topic,
                one.outcome,
                date_text(one.message.store_timestamp),
                " ".join(one.message.keys),
            )
            for one in found
        ]
        shown = table("Timers", ["Delivered at", "Topic", "State", "Sent", "Keys"], rows)
        parts.append(section("found", "Timers", shown, is_live=False, note=unique_key))
    return tag("div", parts, _hours(counts, now_ms // HOUR_MS) if counts is not None else None, class_="grid")


def _hours(counts: TimerCounts, now: int) -> list[Html]:
    hours, others = (
        counts.hours,
        [("Refused by the broker", counts.postponed), ("Not delivered", counts.refused)],
    )
    more = [(name, count_text(count)) for name, count in others if count]
    if not hours:
        return [section("hours", "Pending", facts(more) if more else None, tag("p", "No timer is pending."))]
    first, last = min(hours), max(hours)
    totals = facts(
        [
            ("Pending", count_text(sum(hours.values()))),
            ("Hours", count_text(len(hours))),
            ("First", date_text(first * HOUR_MS)),
            ("Last", date_text(last * HOUR_MS)),
            *more,
        ]
    )
    near = {hour: count for hour, count in hours.items() if hour < now + HOURS_SHOWN}
    days: dict[int, int] = {}
    for hour, count in hours.items():
        if hour not in near:
            days[hour // _DAY_HOURS] = days.get(hour // _DAY_HOURS, 0) + count
    shown, left = list(days.items())[:DAYS_SHOWN], len(days) - DAYS_SHOWN
    parts = [
        section(
            "hours",
            "Next hours",
            totals,
            _counts(
                "Hour, UTC",
                [(date_text(hour * HOUR_MS)[:16], count, hour < now) for hour, count in near.items()],
            )
            if near
            else tag("p", f"None in the next {HOURS_SHOWN} hours."),
        )
    ]
    if shown:
        rows = [(date_text(day * _DAY_HOURS * HOUR_MS)[:10], count, False) for day, count in shown]
        note = f"the first {DAYS_SHOWN} of {len(days)} days with any" if left > 0 else None
        parts.append(section("days", "Later days", _counts("Day, UTC", rows), note=note))
    return parts


def _counts(name: str, rows: Sequence[tuple[str, int, bool]]) -> Html:
    most = max(count for _, count, _ in rows)
    cells = [
        (
            text,
            [count_text(count), tag("small", "late", class_="bad") if is_late else None],
            tag("meter", value=count, max=most, min=0, aria_label=f"{count} of {most}"),
        )
        for text, count, is_late in rows
    ]
    return table(name, [name, "Timers", ""], cells, (1,))
