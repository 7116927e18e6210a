"""The page of timers: pending ones by hour of delivery, and those with a unique key. Values first, then HTML."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from fetcher.access import ArchiveAccess
from fetcher.rows.message import Message
from rocketmq_tiered.page.html import count_text, date_text, render
from rocketmq_tiered.page.messages import Search, find_messages
from tiered.archive.timers import TimerCounts, TimerFiles, joined, sort_out
from tiered.catalog.state import CatalogState
from tiered.model.tables import Table
from tiered.model.timer import CANCEL, HOUR_MS, timer_of

HOURS_SHOWN, DAYS_SHOWN = 48, 30


@dataclass(frozen=True)
class ShownTimer:
    """A message of the gateway topic, and what became of its timer."""

    message: Message
    topic: str
    deliver_ms: int
    outcome: str


def find_timers(access: ArchiveAccess, gateway_topic: str, unique_key: str) -> list[ShownTimer]:
    """Return the messages of the gateway topic with a unique key, newest first, each with what became of its timer.
    Raises NotFoundError if there are none, and UnavailableError or CorruptionError if the archive cannot be read."""
    files, state = TimerFiles(access.store), access.state
    shown = []
    for message in find_messages(access, Search("id", gateway_topic, unique_key, is_whole=True)):
        properties = message.properties
        timer = timer_of(
            properties,
            stored_ms=message.store_timestamp,
            sys_flag=message.record.sys_flag,
            max_delay_ms=1 << 62,  # the limit that was valid when the message arrived is not known
        )
        if timer.refusal:
            outcome = f"refused: {timer.refusal.text}"
        elif not timer.deliver_ms:
            outcome = f"cancels {properties.get(CANCEL, '')}"
        else:
            outcome = _outcome(files, state, message, timer.deliver_ms)
        shown.append(ShownTimer(message, timer.topic, timer.deliver_ms, outcome))
    return shown


def _outcome(files: TimerFiles, state: CatalogState, message: Message, deliver_ms: int) -> str:
    """Return what became of the timer that ``message`` set, in words. The archive lists timers by time of delivery: the
    entry made of this message has its queue and queue offset."""
    entries = joined(list(files.pending(state, deliver_ms, deliver_ms + 1)))
    sorted_out = sort_out(entries)

    def is_among(table: Table) -> bool:
        same_offset = table[table["queue_offset"] == message.queue_offset]
        return any(entries.queues[queue] == message.queue for queue in same_offset["queue"].tolist())

    if is_among(sorted_out.timers):
        return "pending"
    return "cancelled or moved" if is_among(sorted_out.cancelled) else "handed over to the broker"


@dataclass(frozen=True)
class PendingTimers:
    """Timers by hour and by day of delivery: (its begin, number, is late)."""

    total: int
    facts: Sequence[tuple[str, str]]
    near: Sequence[tuple[str, int, bool]] = ()
    days: Sequence[tuple[str, int, bool]] = ()
    days_note: str | None = None
    hours_shown: int = HOURS_SHOWN


def render_timers(
    counts: TimerCounts | None, now_ms: int, unique_key: str, found: Sequence[ShownTimer], problem: Markup
) -> Markup:
    """The page: the form, what was found or why nothing was, and the hours; ``counts`` None: not read yet."""
    pending = None if counts is None else _pending(counts, now_ms // HOUR_MS)
    return render("timers", unique_key=unique_key, found=found, problem=problem, pending=pending)


def _pending(counts: TimerCounts, now_hour: int) -> PendingTimers:
    """Return the numbers of pending timers by hour of delivery for the next HOURS_SHOWN, and by day after that.
    ``now_hour``: the present hour, counted since the epoch."""
    hours = counts.hours
    refused = ("Refused by the broker", counts.postponed), ("Not delivered", counts.refused)
    refused_facts = [(name, count_text(count)) for name, count in refused if count]
    if not hours:
        return PendingTimers(0, refused_facts)
    total = sum(hours.values())
    facts = [
        ("Pending", count_text(total)),
        ("Hours", count_text(len(hours))),
        ("First", date_text(min(hours) * HOUR_MS)),
        ("Last", date_text(max(hours) * HOUR_MS)),
        *refused_facts,
    ]
    near = [
        (date_text(hour * HOUR_MS)[:16], count, hour < now_hour)
        for hour, count in hours.items()
        if hour < now_hour + HOURS_SHOWN
    ]
    days: Counter[str] = Counter()
    for hour, count in hours.items():
        if hour >= now_hour + HOURS_SHOWN:
            days[date_text(hour * HOUR_MS)[:10]] += count  # the first ten characters are the date
    shown = [(day, count, False) for day, count in days.items()][:DAYS_SHOWN]
    note = f"the first {DAYS_SHOWN} of {len(days)} days with any" if len(days) > DAYS_SHOWN else None
    return PendingTimers(total, facts, near, shown, note)
