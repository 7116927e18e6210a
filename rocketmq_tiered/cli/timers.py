"""`tiered timers`: what is delivered when, and changing it until it is handed over to the broker."""

from __future__ import annotations

import argparse
from contextlib import closing
from itertools import islice

from fetcher.access import ArchiveAccess, open_access
from fetcher.rows.message import Message
from rocketmq_tiered.cli.arguments import add_archive, add_json, add_times, instant, settings_of
from rocketmq_tiered.process.loaded_archive import LoadedArchive, open_for_reading
from rocketmq_tiered.sending.timer_change import change_timer
from rocketmq_tiered.sending.timer_messages import TimerMessages
from tiered.archive.timers import NEVER_MS, Entries, TimerFiles, sort_out
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.console import counted, print_json, print_lines, print_table, time_text
from tiered.errors import NotFoundError, UsageError
from tiered.model.timer import HOUR_MS, PROPERTIES, TOPIC, UNIQUE_KEY
from tiered.settings.sections import Settings
from tiered.timestamps import wall_ms

ACTIONS = ("ls", "show", "cancel", "stats")
HOURS_SHOWN = 24


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Action, ARCHIVE_URL, key, times."""
    parser.add_argument(
        "action",
        choices=ACTIONS,
        help="ls: pending timers in order; show: one with its properties; cancel: one, or move it with --at; "
        "stats: how many by hour",
    )
    add_archive(parser)
    parser.add_argument("key", nargs="?", metavar="UNIQ_KEY", help="the timer of show and cancel")
    add_times(parser)
    parser.add_argument(
        "--limit", type=int, default=64, metavar="N", help="ls: at most N (default: %(default)s)"
    )
    parser.add_argument("--at", type=instant, metavar="TIME", help="cancel: deliver it at this time instead")
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Exit code 3 if there is no such timer."""
    settings = settings_of(options).settings
    if (options.key is None) == (options.action in ("show", "cancel")):
        needs = "requires a UNIQ_KEY" if options.key is None else "takes no UNIQ_KEY"
        raise UsageError(f"tiered timers {options.action} {needs}", hint="tiered timers ls prints them")
    with open_for_reading(options.url, settings) as archive:
        if options.action == "stats":
            _stats(archive, options)
        elif options.action == "cancel":
            _cancel(archive, settings, options)
        else:
            _list(archive, settings, options)
    return 0


def _stats(archive: LoadedArchive, options: argparse.Namespace) -> None:
    hours = TimerFiles(archive.store).hours(archive.state)
    if options.json:
        found = [{"hourMs": hour * HOUR_MS, "pending": count} for hour, count in hours.items()]
        print_json({"pending": sum(hours.values()), "objects": len(archive.state.timers), "hours": found})
        return
    rows = [[time_text(hour * HOUR_MS), count] for hour, count in islice(hours.items(), HOURS_SHOWN)]
    print_table(["hour of delivery", "pending"], rows)
    more = f" in {counted(len(hours), 'hour')}" if len(hours) > HOURS_SHOWN else ""
    objects = counted(len(archive.state.timers), "object")
    print_lines(f"{counted(sum(hours.values()), 'timer')} pending{more}, {objects}")


def _list(archive: LoadedArchive, settings: Settings, options: argparse.Namespace) -> None:
    files, left = TimerFiles(archive.store), 1 if options.action == "show" else max(options.limit, 0)
    if options.action == "show":
        found = [files.find(archive.state, options.key)]
        if not len(found[0].table):
            raise NotFoundError(f"no timer with unique key {options.key} is pending", hint=_GONE)
    else:
        found = []
        since_ms, until_ms = options.since or 0, options.until or NEVER_MS
        for some in files.pending(archive.state, since_ms, until_ms):
            found.append(some._replace(table=sort_out(some.table).timers[:left]))
            left -= len(found[-1].table)
            if left <= 0:
                break
    rows = _rows(archive, settings, found)
    if options.json:
        print_json(rows[0] if options.action == "show" else rows)
    elif options.action == "show":
        print_lines(*(f"{name:15} {value}" for name, value in rows[0].items()))
    else:
        names = ("deliver", "topic", "uniqKey", "keys", "queue", "queueOffset")
        print_table(list(names), [[str(row.get(name) or "") for name in names] for row in rows])


_GONE = "it may be handed over to the broker already, or was cancelled, or is not archived yet"


def _rows(archive: LoadedArchive, settings: Settings, found: list[Entries]) -> list[dict[str, object]]:
    """The timers with their messages."""

    def access() -> ArchiveAccess:
        return open_access(archive.url, cluster=archive.cluster, broker=archive.broker, settings=settings)

    entries = [(some.queues[int(row["queue"])], row) for some in found for row in some.table]
    with closing(TimerMessages(access)) as messages:
        read = messages.read([(queue, int(row["queue_offset"])) for queue, row in entries])
        return [_row(queue, row, read.get((queue, int(row["queue_offset"])))) for queue, row in entries]


def _row(queue: object, row: object, message: Message | None) -> dict[str, object]:
    deliver_ms = int(row["deliver_ms"])  # type: ignore[index]
    found: dict[str, object] = {
        "deliver": time_text(deliver_ms),
        "deliverMs": deliver_ms,
        "queue": str(queue),
    }
    found["queueOffset"] = int(row["queue_offset"])  # type: ignore[index]
    if message is not None:
        own = message.properties
        found |= {"topic": own.get(TOPIC), "uniqKey": own.get(UNIQUE_KEY), "keys": own.get("KEYS")}
        found |= {"storedMs": message.store_timestamp, "bytes": len(message.data)}
        found["properties"] = {name: value for name, value in sorted(own.items()) if name not in PROPERTIES}
    return found


def _cancel(archive: LoadedArchive, settings: Settings, options: argparse.Namespace) -> None:
    now_ms = wall_ms()
    if options.at is not None and not 0 < options.at - now_ms <= settings.timers.max_delay_ms:
        raise UsageError(
            "--at is past, or more than two years ahead", hint="give a time in the next two years"
        )
    commits = MaintenanceCommit.opened(archive.store, archive.state, "timers", wall_ms)
    was_ms = change_timer(commits, options.key, at_ms=options.at)
    if options.json:
        print_json({"uniqKey": options.key, "wasMs": was_ms, "deliverMs": options.at})
        return
    what = "cancelled" if options.at is None else f"moved to {time_text(options.at)}"
    print_lines(f"{options.key}: {what}; it was to be delivered at {time_text(was_ms)}")
