"""`tiered ls`: list the queues of an archive."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fetcher.queries.queue_listing import QueueListing, list_queues, oldest_ms
from rocketmq_tiered.cli.arguments import add_archive, add_json, add_rules, settings_of
from rocketmq_tiered.maintenance.expire import plan_pass
from rocketmq_tiered.maintenance.expire_plan import NEVER_MS
from rocketmq_tiered.process.loaded_archive import (
    LoadedArchive,
    open_all_for_reading,
    open_for_reading,
    rules_in,
)
from tiered.catalog.deletions import Reason, read_list
from tiered.catalog.hidden_history import list_histories
from tiered.catalog.pages import RunIndex
from tiered.clock import MACHINE_CLOCK
from tiered.console import counted, print_json, print_lines, print_table, size_text, time_text
from tiered.errors import NotFoundError
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_BATCH
from tiered.settings.load import LoadedSettings
from tiered.settings.rules_in_force import with_rules_in_force
from tiered.settings.topic_rules import POLICY_KEY, TTL_KEY, TopicRule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, which of its queues are listed, and what is listed of them."""
    add_archive(parser)
    parser.add_argument(
        "--topic",
        metavar="PATTERN",
        default="*",
        help="list only matching topics, also with the time of their oldest message (default: all topics)",
    )
    parser.add_argument(
        "--hidden",
        action="store_true",
        help="also list queues of deleted topics, and those from before a topic was created again",
    )
    parser.add_argument(
        "--histories",
        action="store_true",
        help="list the archive's log histories (one more each time the broker's log was truncated or replaced), and "
        "how many messages each change hid",
    )
    parser.add_argument(
        "--quarantine",
        action="store_true",
        help="list the objects that tiered repair kept without using them",
    )
    parser.add_argument(
        "--by-topic", action="store_true", help="print one line for each topic, not for each queue"
    )
    parser.add_argument(
        "--due",
        action="store_true",
        help="also print the time of the oldest message, what expires now, and when the next message expires",
    )
    add_rules(parser)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print the queues of an archive in order of name, or its log histories or quarantine. A URL with several archives
    has its archives listed."""
    loaded = settings_of(options)
    settings = loaded.settings
    # What these options list is a matter of one archive.
    if options.topic != "*" or options.histories or options.quarantine or options.by_topic or options.due:
        with open_for_reading(options.url, settings) as archive:
            if options.histories:
                _print_histories(archive, options, settings.gc.diverged_grace_ms)
            elif options.quarantine:
                _print_quarantine(archive, options)
            else:
                _print_queues(archive, options, loaded)
        return 0
    with open_all_for_reading(options.url, settings) as archives:
        if len(archives) > 1:
            _print_archives(archives, options)
        else:
            _print_queues(archives[0], options, loaded)
    return 0


def _print_queues(archive: LoadedArchive, options: argparse.Namespace, loaded: LoadedSettings) -> None:
    """Print the queues that ``--topic`` matches, or their topics with ``--by-topic``. Raises NotFoundError if
    ``--topic`` is given and matches none."""
    state, index = archive.state, RunIndex(archive.store)
    queues = [
        queue
        for queue in list_queues(state, hidden=options.hidden, index=index)
        if fnmatch.fnmatchcase(queue.topic, options.topic)
    ]
    if not queues and options.topic != "*":
        raise NotFoundError(
            f"{archive.title} has no topic that matches {options.topic}",
            hint="tiered ls without --topic lists all",
        )
    rules = rules_in(archive.store, state, with_rules_in_force(loaded, state.settings, options.rules))
    with_oldest = options.due or options.topic != "*"  # of all queues it would take many requests
    columns = Columns(
        rules,
        _due(archive, rules) if options.due else None,
        {queue.key: oldest_ms(state, queue.key, queue.min_offset, index) for queue in queues}
        if with_oldest
        else None,
    )
    rows = _by_topic(queues) if options.by_topic else queues
    if options.json:
        print_json(
            {
                "cluster": archive.cluster,
                "broker": archive.broker,
                "version": state.version,
                "epoch": state.epoch,
                "committedPhys": state.cursor.phys,
                "topics" if options.by_topic else "queues": [_document(row, columns) for row in rows],
            }
        )
    else:
        _print(archive.title, rows, columns)


@dataclass(frozen=True)
class TopicListing:
    """The sums over the queues of a topic."""

    topic: str
    queues: list[QueueListing]

    @property
    def messages(self) -> int:
        return sum(queue.messages for queue in self.queues)

    @property
    def bytes(self) -> int:
        """Message bytes before compression."""
        return sum(queue.bytes for queue in self.queues)

    @property
    def newest_ms(self) -> int:
        return max(queue.newest_ms for queue in self.queues)

    def to_json(self) -> dict[str, Any]:
        """The sums in the JSON of ``--by-topic``."""
        return {
            "topic": self.topic,
            "queueCount": len(self.queues),
            "messages": self.messages,
            "bytes": self.bytes,
            "newestStoreTimestamp": self.newest_ms,
        }


Listing = QueueListing | TopicListing


@dataclass(frozen=True)
class ExpiryDue:
    """What the next pass of expiry takes, and when the next message after it expires (None: unknown or never)."""

    messages: int = 0
    bytes: int = 0
    next_ms: int | None = None

    def __add__(self, other: ExpiryDue) -> ExpiryDue:
        return ExpiryDue(
            self.messages + other.messages,
            self.bytes + other.bytes,
            _earliest((self.next_ms, other.next_ms)),
        )


def _earliest(times_ms: Iterable[int | None]) -> int | None:
    return min((time_ms for time_ms in times_ms if time_ms is not None), default=None)


@dataclass(frozen=True)
class Columns:
    """What is listed of each queue besides the catalog's own figures; None: not requested."""

    rules: Callable[[str], TopicRule]
    due: Mapping[QueueKey, ExpiryDue] | None
    oldest_ms: Mapping[QueueKey, int | None] | None
    """When the oldest message of each queue was stored, None for a queue without messages."""


def _due(archive: LoadedArchive, rules: Callable[[str], TopicRule]) -> dict[QueueKey, ExpiryDue]:
    """What expires of each queue now, and when its next message does. Reads all pages of the catalog, as
    `tiered expire` does."""
    state = archive.state
    plan = plan_pass(archive.store, state, rules, clock=MACHINE_CLOCK).plan
    due = {
        state.key_of(row): ExpiryDue(next_ms=None if next_ms >= NEVER_MS else next_ms)
        for row, next_ms in enumerate(plan.next_due_ms.tolist())
    }
    for (row, offset, rows), size in zip(plan.floors.tolist(), plan.floor_bytes.tolist(), strict=True):
        queue = state.table[row]
        # A row of a batch queue is a batch; each message has an offset.
        messages = offset - int(queue["min_queue_offset"]) if queue["flags"] & QUEUE_BATCH else rows
        due[state.key_of(row)] += ExpiryDue(messages, size)
    return due


def _queues_of(row: Listing) -> list[QueueListing]:
    return row.queues if isinstance(row, TopicListing) else [row]


def _by_topic(queues: list[QueueListing]) -> list[Listing]:
    return [
        TopicListing(topic, list(found)) for topic, found in groupby(queues, key=lambda queue: queue.topic)
    ]


def _document(row: Listing, columns: Columns) -> dict[str, Any]:
    """One queue or topic in the JSON; columns that were not requested are absent."""
    document = row.to_json() | columns.rules(row.topic).to_json()
    if columns.oldest_ms is not None:
        document["oldestStoreTimestamp"] = _earliest(columns.oldest_ms[q.key] for q in _queues_of(row))
    if columns.due is not None:
        due = sum((columns.due[queue.key] for queue in _queues_of(row)), ExpiryDue())
        document |= {"dueMessages": due.messages, "dueBytes": due.bytes, "nextDueMs": due.next_ms}
    return document


def _print_archives(archives: Sequence[LoadedArchive], options: argparse.Namespace) -> None:
    """Print the archives below a URL that holds several: for everything else the user has to choose one."""
    rows = []
    for archive in archives:
        queues = list_queues(archive.state, hidden=options.hidden)
        messages, committed_ms = sum(queue.messages for queue in queues), archive.state.created_ms
        rows.append((archive.cluster, archive.broker, len(queues), messages, committed_ms))
    if options.json:
        names = ("cluster", "broker", "queueCount", "messages", "committedMs")
        print_json({"archives": [dict(zip(names, row, strict=True)) for row in rows]})
        return
    print_table(
        ["cluster", "broker", "queues", "messages", "last commit"],
        [[*row[:4], time_text(row[4])] for row in rows],
    )
    print_lines(
        f"{options.url}: {counted(len(rows), 'archive')}; --cluster and --broker list the queues of one"
    )


def _print_quarantine(archive: LoadedArchive, options: argparse.Namespace) -> None:
    """Print the keys of the objects that a repair keeps without using them. Some are in the catalog's state, others in
    list objects that it names."""
    state = archive.state
    lists = [one for one in state.deletion_lists if one.reason == Reason.QUARANTINE]
    kept = (Reason.QUARANTINE, Reason.UNEXPLAINED)
    keys = {key for key, pending in state.pending_deletions.items() if pending.reason in kept}
    keys |= {key for listed in lists for key in read_list(archive.store, listed)}
    if options.json:
        print_json({"cluster": archive.cluster, "broker": archive.broker, "quarantine": sorted(keys)})
    else:
        print_lines(*sorted(keys), f"{archive.title}: {counted(len(keys), 'object')} in quarantine")


def _print_histories(archive: LoadedArchive, options: argparse.Namespace, grace_ms: int) -> None:
    """Print the archive's log histories (the log before and after each time it was truncated or replaced), how many
    messages the current one hides of each, and until when these are kept: ``grace_ms`` after they were hidden."""
    histories = list_histories(archive.store, archive.state)
    kept_until = {
        item.number: None if item.since_ms is None or item.is_kept else item.since_ms + grace_ms
        for item in histories
    }
    if options.json:
        print_json(
            {
                "cluster": archive.cluster,
                "broker": archive.broker,
                "version": archive.state.version,
                "histories": [
                    {
                        "number": item.number,
                        "beginPhys": item.begin_phys,
                        "endPhys": item.end_phys,
                        "current": item.is_current,
                        "hiddenMessages": item.messages,
                        "hiddenBytes": item.bytes,
                        "hiddenSinceMs": item.since_ms,
                        "keptUntilMs": kept_until[item.number],
                    }
                    for item in histories
                ],
            }
        )
        return
    print_table(
        ["history", "begin", "end", "hidden messages", "bytes", "hidden since", "kept until"],
        [
            [
                f"{item.number} (current)" if item.is_current else item.number,
                item.begin_phys,
                item.end_phys,
                item.messages,
                size_text(item.bytes),
                _time_cell(item.since_ms),
                "retention" if item.is_kept else _time_cell(kept_until[item.number]),
            ]
            for item in histories
        ],
    )
    total = sum(item.messages for item in histories)
    count = f"{len(histories)} log {'history' if len(histories) == 1 else 'histories'}"
    print_lines(
        f"{archive.title}: {count}; {counted(total, 'message')} only in histories that are not current: "
        "tiered cat --history N prints them"
    )


def _print(title: str, rows: Sequence[Listing], columns: Columns) -> None:
    """Print the table of queues or topics, then gaps, then messages set aside (messages whose queue offset was taken,
    which readers do not get), then the sum."""
    cells = [_cells(row, columns) for row in rows]
    if cells:
        print_table(list(cells[0]), [list(line.values()) for line in cells])
    queues = [queue for row in rows for queue in _queues_of(row)]
    total = sum(queue.messages for queue in queues)
    size = size_text(sum(queue.bytes for queue in queues))
    gaps = [(queue, gap) for queue in queues for gap in queue.gaps]
    if gaps:
        print_lines("")
        print_table(
            ["gap in topic", "queue", "generation", "first missing", "last missing", "reason"],
            [
                [q.topic, q.queue_id, q.generation, gap.begin_offset, gap.end_offset - 1, gap.reason]
                for q, gap in gaps
            ],
        )
        print_lines("")
    set_aside = [queue for queue in queues if queue.set_aside]
    if set_aside:
        print_table(
            ["set aside in topic", "queue", "generation", "messages"],
            [[q.topic, q.queue_id, q.generation, q.set_aside] for q in set_aside],
        )
        print_lines("")
    and_gaps = f", {counted(len(gaps), 'gap')}" if gaps else ""
    print_lines(
        f"{title}: {counted(len(queues), 'queue')}, {counted(total, 'message')}, {size} of messages{and_gaps}"
    )


def _cells(row: Listing, columns: Columns) -> dict[str, object]:
    """The line of a queue or topic in the table: name of each column -> cell. Columns that were not requested are
    absent."""
    document = _document(row, columns)
    cells: dict[str, object] = {"topic": row.topic}
    if isinstance(row, TopicListing):
        cells["queues"] = len(row.queues)
    else:
        cells |= {"queue": row.queue_id, "generation": row.generation}
        cells |= {"min": row.min_offset, "max": row.max_offset}
    cells |= {"messages": row.messages, "bytes": size_text(row.bytes)}
    if columns.oldest_ms is not None:
        cells["oldest"] = _time_cell(document["oldestStoreTimestamp"])
    cells["newest"] = time_text(row.newest_ms)
    if isinstance(row, QueueListing):
        cells["kind"] = row.kind
    if columns.due is not None:
        cells |= {"due": document["dueMessages"], "due bytes": size_text(document["dueBytes"])}
        cells["next due"] = _time_cell(document["nextDueMs"])
    return cells | dict(zip(("ttl", "policy"), _rule_cells(columns.rules(row.topic)), strict=True))


def _time_cell(time_ms: int | None) -> str:
    return "" if time_ms is None else time_text(time_ms)


def _rule_cells(rule: TopicRule) -> list[str]:
    """Time to live and read policy; in brackets what set them, unless it is the setting for all topics."""
    cells = ((rule.ttl, rule.ttl_from), (rule.read_policy, rule.read_policy_from))
    return [value if source in (TTL_KEY, POLICY_KEY) else f"{value} ({source})" for value, source in cells]
