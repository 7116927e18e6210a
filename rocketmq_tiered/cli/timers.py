"""`tiered timers`: what is delivered when, and changing it until it is handed over to the broker."""

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
    """Add the action, the archive, the timers it concerns, and the range of times."""
    parser.add_argument(
        "action",
        choices=ACTIONS,
        help="ls: list pending timers in order of delivery; show: print timers with their properties; cancel: cancel "
        "timers, or move them with --at; stats: count pending timers by hour",
    )
    add_archive(parser)
    parser.add_argument(
        "timer",
        nargs="*",
        metavar="TIMER",
        help="for show and cancel: TOPIC and UNIQ_KEY of timers, or the place of one (QUEUE:OFFSET), as ls prints it",
    )
    add_times(parser)
    parser.add_argument(
        "--limit",
        type=int,
        default=64,
        metavar="N",
        help="for ls: print at most N timers (default: %(default)s)",
    )
    parser.add_argument(
        "--refused",
        action="store_true",
        help="for ls: list the messages that are not delivered, and why, instead of pending timers",
    )
    parser.add_argument(
        "--at", type=instant, metavar="TIME", help="for cancel: deliver the timers at this time instead"
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """List, show, count, cancel or move timers (messages to be delivered at a later time). Exit code 3 if the named
    timer does not exist."""
    settings = settings_of(options).settings
    name = _name(options.timer)
    if (name is None) == (options.action in ("show", "cancel")) or (name is None and options.timer):
        needs = "requires TOPIC UNIQ_KEY, or a place such as 3:1042" if name is None else "takes no timer"
        raise UsageError(f"timers {options.action} {needs}", hint="tiered timers ls prints them")
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
    """Print how many timers are pending in each hour of delivery, how many of these the broker has refused for now, and
    how many messages are not delivered at all."""
    counts, objects = TimerFiles(archive.store).counts(archive.state), len(archive.state.timers)
    hours = counts.hours
    if options.json:
        documents = [{"hourMs": hour * HOUR_MS, "pending": count} for hour, count in hours.items()]
        numbers = {"pending": counts.pending, "postponed": counts.postponed, "refused": counts.refused}
        print_json({**numbers, "objects": objects, "hours": documents})
        return
    rows = [[time_text(hour * HOUR_MS), count] for hour, count in islice(hours.items(), HOURS_SHOWN)]
    print_table(["hour of delivery", "pending"], rows)
    more = f" in {counted(len(hours), 'hour')}" if len(hours) > HOURS_SHOWN else ""
    print_lines(f"{counted(counts.pending, 'timer')} pending{more}, {counted(objects, 'object')}")
    if counts.postponed:
        print_lines(
            f"{counts.postponed} of these timers refused by the broker for now, and sent again every ten minutes"
        )
    if counts.refused:
        print_lines(
            f"{counted(counts.refused, 'message')} not delivered: tiered timers ls --refused prints them"
        )


def _list(archive: LoadedArchive, settings: Settings, options: argparse.Namespace) -> None:
    """Print the pending timers in order of delivery, or with ``--refused`` the messages that are not delivered; at most
    ``--limit`` of them."""
    files, left = TimerFiles(archive.store), max(options.limit, 0)
    listed = []
    since_ms, until_ms = options.since or 0, options.until or NEVER_MS
    for entries in files.pending(archive.state, since_ms, until_ms):
        table = sort_out(entries).refused if options.refused else sort_out(entries).timers
        listed.append(entries._replace(table=table[:left]))
        left -= len(listed[-1].table)
        if left <= 0:
            break
    rows = _rows(archive, settings, listed)
    if options.json:
        print_json(rows)
        return
    names = ["deliver", "topic", "uniqKey", "keys", "place", "state"]
    if options.refused:
        names = ["listedUntil", "topic", "uniqKey", "keys", "place", "why"]
    print_table(names, [[str(row.get(name, "")) for name in names] for row in rows])


def _rows(archive: LoadedArchive, settings: Settings, found: list[Entries]) -> list[dict[str, object]]:
    """One JSON document for each timer in ``found``, with what its archived message says. The archive is opened for
    messages only if there are timers."""

    def access() -> ArchiveAccess:
        return open_access(archive.url, cluster=archive.cluster, broker=archive.broker, settings=settings)

    entries = [(some.queues[int(row["queue"])], row) for some in found for row in some.table]
    with closing(TimerMessages(access)) as messages:
        read = messages.read([(queue, int(row["queue_offset"])) for queue, row in entries])
        return [_row(queue, row, read.get((queue, int(row["queue_offset"])))) for queue, row in entries]


def _row(queue: QueueKey, row: np.void, message: Message | None) -> dict[str, object]:
    """The JSON document of one timer. ``row``: its entry in the archive's timer files; ``queue``: the queue of the
    gateway topic, which takes timers, that has its ``message``; None if that is unreadable or has expired."""
    deliver_ms, offset, is_refused = (
        int(row["deliver_ms"]),
        int(row["queue_offset"]),
        row["kind"] == EntryKind.REFUSED,
    )
    document: dict[str, object] = {"queue": str(queue), "queueOffset": offset}
    document["place"] = TimerPlace(queue.queue_id, offset).text
    if is_refused:
        document |= {"listedUntil": time_text(deliver_ms), "why": Refusal(int(row["key_hash"])).text}
    else:
        state = "refused by the broker, sent again" if row["kind"] == EntryKind.POSTPONED else "pending"
        document |= {"deliver": time_text(deliver_ms), "deliverMs": deliver_ms, "state": state}
    if message is not None:
        own = message.properties
        document |= {
            "topic": own.get(TOPIC, ""),
            "uniqKey": own.get(UNIQUE_KEY, ""),
            "keys": own.get("KEYS", ""),
        }
        document |= {"storedMs": message.store_timestamp, "bytes": len(message.data)}
        document["properties"] = {
            name: value for name, value in sorted(own.items()) if is_refused or name not in PROPERTIES
        }
    return document


def _cancel(
    archive: LoadedArchive, settings: Settings, options: argparse.Namespace, name: TimerName | TimerPlace
) -> None:
    """Cancel the timers that ``name`` means, or deliver them at ``--at`` instead, and print when they would have been
    delivered. Raises UsageError for a wrong ``--at``."""
    now_ms, limit_ms = wall_ms(), settings.timers.max_delay_ms
    if options.at is not None:
        if problem := time_problem(options.at):
            raise UsageError(f"--at {problem}")
        if not 0 < options.at - now_ms <= limit_ms:
            raise UsageError(
                f"--at {time_text(options.at)} is past, or later than timers.max_delay_ms allows",
                hint=f"give a time up to {time_text(now_ms + limit_ms)}",
            )
    commits = MaintenanceCommit.opened(archive.store, archive.state, "timers", MACHINE_CLOCK)
    times = change_timers(commits, name, at_ms=options.at)
    if options.json:
        print_json({"count": len(times), "wereMs": times, "deliverMs": options.at})
        return
    what = "cancelled" if options.at is None else f"moved to {time_text(options.at)}"
    were = time_text(min(times)) + (f" to {time_text(max(times))}" if min(times) < max(times) else "")
    print_lines(f"{name.text}: {counted(len(times), 'timer')} {what}; delivery was at {were}")
