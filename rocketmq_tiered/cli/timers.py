"""`tiered timers`: what is delivered when, and changing it until it is handed over to the broker."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing
from itertools import islice

import numpy as np

from fetcher.access import ArchiveAccess, open_access
from fetcher.rows.message import Message
from rocketmq_tiered.cli.arguments import add_archive, add_json, add_times, instant, settings_of
from rocketmq_tiered.process.loaded_archive import LoadedArchive, open_for_reading
from rocketmq_tiered.sending.timer_change import change_timers
from rocketmq_tiered.sending.timer_messages import TimerMessages
from tiered.archive.timers import NEVER_MS, Entries, TimerFiles, TimerName, sort_out
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.clock import MACHINE_CLOCK
from tiered.console import counted, print_json, print_lines, print_table, time_text
from tiered.errors import UsageError
from tiered.model.queue import QueueKey
from tiered.model.timer import (
    HOUR_MS,
    PROPERTIES,
    TOPIC,
    UNIQUE_KEY,
    EntryKind,
    Refusal,
    TimerPlace,
    place_of,
    time_problem,
)
from tiered.settings.sections import Settings
from tiered.timestamps import wall_ms

ACTIONS = ("ls", "show", "cancel", "stats")
HOURS_SHOWN = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Action, ARCHIVE_URL, timer, times."""
    parser.add_argument(
        "action",
        choices=ACTIONS,
        help="ls: pending timers in order; show: some with their properties; cancel: some, or move them with --at; "
        "stats: how many by hour",
    )
    add_archive(parser)
    parser.add_argument(
        "timer",
        nargs="*",
        metavar="TIMER",
        help="show, cancel: TOPIC UNIQ_KEY for all timers that have both, or the place of one, as ls prints it",
    )
    add_times(parser)
    parser.add_argument(
        "--limit", type=int, default=64, metavar="N", help="ls: at most N (default: %(default)s)"
    )
    parser.add_argument("--refused", action="store_true", help="ls: messages that are not delivered, and why")
    parser.add_argument("--at", type=instant, metavar="TIME", help="cancel: deliver at this time instead")
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Exit code 3 if there is no such timer."""
    settings = settings_of(options).settings
    name = _name(options.timer)
    if (name is None) == (options.action in ("show", "cancel")) or (name is None and options.timer):
        needs = "requires TOPIC UNIQ_KEY, or a place such as 3:1042" if name is None else "takes no timer"
        raise UsageError(f"tiered timers {options.action} {needs}", hint="tiered timers ls prints them")
    with open_for_reading(options.url, settings) as archive:
        if options.action == "stats":
            _stats(archive, options)
        elif name is None:
            _list(archive, settings, options)
        elif options.action == "cancel":
            _cancel(archive, settings, options, name)
        else:
            rows = _rows(archive, settings, [TimerFiles(archive.store).find(archive.state, name)])
            if options.json:
                print_json(rows)
            for row in [] if options.json else rows:
                print_lines(*(f"{field:15} {value}" for field, value in row.items()), "")
    return 0


def _name(words: Sequence[str]) -> TimerName | TimerPlace | None:
    return TimerName(*words) if len(words) == 2 else place_of(words[0]) if len(words) == 1 else None


def _stats(archive: LoadedArchive, options: argparse.Namespace) -> None:
    """Print how many timers are pending in each hour."""
    counts, objects = TimerFiles(archive.store).counts(archive.state), len(archive.state.timers)
    hours = counts.hours
    if options.json:
        found = [{"hourMs": hour * HOUR_MS, "pending": count} for hour, count in hours.items()]
        numbers = {"pending": counts.pending, "postponed": counts.postponed, "refused": counts.refused}
        print_json({**numbers, "objects": objects, "hours": found})
        return
    rows = [[time_text(hour * HOUR_MS), count] for hour, count in islice(hours.items(), HOURS_SHOWN)]
    print_table(["hour of delivery", "pending"], rows)
    more = f" in {counted(len(hours), 'hour')}" if len(hours) > HOURS_SHOWN else ""
    print_lines(f"{counted(counts.pending, 'timer')} pending{more}, {counted(objects, 'object')}")
    if counts.postponed:
        print_lines(f"{counts.postponed} of them refused by the broker, and sent again every ten minutes")
    if counts.refused:
        print_lines(
            f"{counted(counts.refused, 'message')} not delivered: tiered timers ls --refused prints them"
        )


def _list(archive: LoadedArchive, settings: Settings, options: argparse.Namespace) -> None:
    """Print the pending or refused timers in order of delivery, up to ``--limit``."""
    files, left = TimerFiles(archive.store), max(options.limit, 0)
    found = []
    since_ms, until_ms = options.since or 0, options.until or NEVER_MS
    for some in files.pending(archive.state, since_ms, until_ms):
        table = sort_out(some).refused if options.refused else sort_out(some).timers
        found.append(some._replace(table=table[:left]))
        left -= len(found[-1].table)
        if left <= 0:
            break
    rows = _rows(archive, settings, found)
    if options.json:
        print_json(rows)
        return
    names = ["deliver", "topic", "uniqKey", "keys", "place", "state"]
    if options.refused:
        names = ["listedUntil", "topic", "uniqKey", "keys", "place", "why"]
    print_table(names, [[str(row.get(name, "")) for name in names] for row in rows])


def _rows(archive: LoadedArchive, settings: Settings, found: list[Entries]) -> list[dict[str, object]]:
    """The timers with their messages."""

    def access() -> ArchiveAccess:
        return open_access(archive.url, cluster=archive.cluster, broker=archive.broker, settings=settings)

    entries = [(some.queues[int(row["queue"])], row) for some in found for row in some.table]
    with closing(TimerMessages(access)) as messages:
        read = messages.read([(queue, int(row["queue_offset"])) for queue, row in entries])
        return [_row(queue, row, read.get((queue, int(row["queue_offset"])))) for queue, row in entries]


def _row(queue: QueueKey, row: np.void, message: Message | None) -> dict[str, object]:
    """One timer in the JSON; ``message`` is None where its record is unreadable or expired."""
    deliver_ms, offset, is_refused = (
        int(row["deliver_ms"]),
        int(row["queue_offset"]),
        row["kind"] == EntryKind.REFUSED,
    )
    found: dict[str, object] = {"queue": str(queue), "queueOffset": offset}
    found["place"] = TimerPlace(queue.queue_id, offset).text
    if is_refused:
        found |= {"listedUntil": time_text(deliver_ms), "why": Refusal(int(row["key_hash"])).text}
    else:
        state = "refused by the broker, sent again" if row["kind"] == EntryKind.POSTPONED else "pending"
        found |= {"deliver": time_text(deliver_ms), "deliverMs": deliver_ms, "state": state}
    if message is not None:
        own = message.properties
        found |= {
            "topic": own.get(TOPIC, ""),
            "uniqKey": own.get(UNIQUE_KEY, ""),
            "keys": own.get("KEYS", ""),
        }
        found |= {"storedMs": message.store_timestamp, "bytes": len(message.data)}
        found["properties"] = {
            name: value for name, value in sorted(own.items()) if is_refused or name not in PROPERTIES
        }
    return found


def _cancel(
    archive: LoadedArchive, settings: Settings, options: argparse.Namespace, name: TimerName | TimerPlace
) -> None:
    """Cancel the timers of a name, or move them to ``--at``, and print when they would have been delivered."""
    now_ms = wall_ms()
    if options.at is not None:
        if problem := time_problem(options.at):
            raise UsageError(f"--at {problem}")
        if not 0 < options.at - now_ms <= settings.timers.max_delay_ms:
            raise UsageError(
                "--at is past, or more than two years ahead", hint="give a time in the next two years"
            )
    commits = MaintenanceCommit.opened(archive.store, archive.state, "timers", MACHINE_CLOCK)
    times = change_timers(commits, name, at_ms=options.at)
    if options.json:
        print_json({"count": len(times), "wereMs": times, "deliverMs": options.at})
        return
    what = "cancelled" if options.at is None else f"moved to {time_text(options.at)}"
    were = time_text(min(times)) + (f" to {time_text(max(times))}" if min(times) < max(times) else "")
    print_lines(f"{name.text}: {counted(len(times), 'timer')} {what}; delivery was at {were}")
