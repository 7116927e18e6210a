"""`tiered ls`: list the queues of an archive."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from fetcher.queries.queue_listing import QueueListing, list_queues
from rocketmq_tiered.cli.arguments import add_archive, add_json, add_rules, settings_of
from rocketmq_tiered.maintenance.expire import plan_pass
from rocketmq_tiered.maintenance.expire_plan import NEVER_MS
from rocketmq_tiered.process.loaded_archive import (
    LoadedArchive,
    open_all_for_reading,
    open_for_reading,
    rules_of,
)
from tiered.catalog.deletions import Reason, read_list
from tiered.catalog.hidden_history import list_histories
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState
from tiered.clock import MACHINE_CLOCK
from tiered.console import counted, print_json, print_lines, print_table, size_text, time_text
from tiered.errors import NotFoundError
from tiered.model.tables import QUEUE_BATCH
from tiered.settings.load import LoadedSettings
from tiered.settings.rules_in_force import with_rules_in_force
from tiered.settings.topic_rules import POLICY_KEY, TTL_KEY, TopicRule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, a topic pattern, hidden queues."""
    add_archive(parser)
    parser.add_argument(
        "--topic",
        metavar="PATTERN",
        default="*",
        help="only matching topics, with the time of the oldest message, which the list of all queues excludes",
    )
    parser.add_argument(
        "--hidden", action="store_true", help="also list queues of deleted topics and earlier generations"
    )
    parser.add_argument(
        "--histories",
        action="store_true",
        help="list log histories: one for each time the broker's log was truncated or replaced, and what it hid",
    )
    parser.add_argument(
        "--quarantine", action="store_true", help="list the objects that a repair keeps unused"
    )
    parser.add_argument("--by-topic", action="store_true", help="one line for each topic")
    parser.add_argument(
        "--due",
        action="store_true",
        help="also the time of the oldest message, what expires now, and when the next message does",
    )
    add_rules(parser)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print the queues in order of name."""
    loaded = settings_of(options)
    settings = loaded.settings
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
    """Print queues, or topics with ``--by-topic``. A topic that is named and not there is an error, ``*`` is none."""
    index = RunIndex(archive.store)
    found = [
        queue
        for queue in list_queues(archive.state, hidden=options.hidden, index=index)
        if fnmatch.fnmatchcase(queue.topic, options.topic)
    ]
    if not found and options.topic != "*":
        raise NotFoundError(f"no topic matches {options.topic}", hint="tiered ls without --topic lists all")
    with_oldest = options.due or options.topic != "*"
    rules = rules_of(archive, with_rules_in_force(loaded, archive.state.settings, options.rules))
    columns = Columns(
        rules,
        _due(archive, rules) if options.due else None,
        _oldest(archive.state, index) if with_oldest else None,
    )
    rows = _by_topic(found) if options.by_topic else found
    if options.json:
        print_json(
            {
                "cluster": archive.cluster,
                "broker": archive.broker,
                "version": archive.state.version,
                "epoch": archive.state.epoch,
                "committedPhys": archive.state.cursor.phys,
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


Dues = Callable[[Listing], ExpiryDue]


@dataclass(frozen=True)
class Columns:
    """What is listed besides the catalog's own figures; None: not requested."""

    rules: Callable[[str], TopicRule]
    due: Dues | None
    oldest: Callable[[Listing], int | None] | None
    """When the oldest message was stored, None without messages."""


def _due(archive: LoadedArchive, rules: Callable[[str], TopicRule]) -> Dues:
    """Reads every page of the catalog once, as `tiered expire` does."""
    state = archive.state
    plan = plan_pass(archive.store, state, rules, clock=MACHINE_CLOCK).plan
    times = plan.next_due_ms.tolist()
    found = {
        state.key_of(row): ExpiryDue(next_ms=None if time >= NEVER_MS else time)
        for row, time in enumerate(times)
    }
    for (row, offset, rows), size in zip(plan.floors.tolist(), plan.floor_bytes.tolist(), strict=True):
        queue = state.table[row]
        # A row of a batch queue is a batch; each message has an offset.
        messages = offset - int(queue["min_queue_offset"]) if queue["flags"] & QUEUE_BATCH else rows
        found[state.key_of(row)] += ExpiryDue(messages, size)

    return lambda row: sum((found[queue.key] for queue in _queues_of(row)), ExpiryDue())


def _oldest(state: CatalogState, index: RunIndex) -> Callable[[Listing], int | None]:
    """Reads the catalog's pages with the oldest messages."""
    return lambda row: _earliest(_oldest_ms(state, index, queue) for queue in _queues_of(row))


def _oldest_ms(state: CatalogState, index: RunIndex, queue: QueueListing) -> int | None:
    """Store time of the oldest visible message; None without messages. Looks at runs, not at messages."""
    row = state.row_of(queue.key)
    if row is None or not queue.messages:
        return None
    window = index.window(state, queue.key, queue.min_offset)
    runs = (state.memory_chunk_of(row) if window is None else window[1]).runs
    first = runs[runs["end_queue_offset"] > queue.min_offset]
    return int(first["min_store_timestamp"][first["base_queue_offset"].argmin()]) if len(first) else None


def _queues_of(row: Listing) -> list[QueueListing]:
    return row.queues if isinstance(row, TopicListing) else [row]


def _by_topic(queues: list[QueueListing]) -> list[Listing]:
    return [
        TopicListing(topic, list(found)) for topic, found in groupby(queues, key=lambda queue: queue.topic)
    ]


def _document(row: Listing, columns: Columns) -> dict[str, Any]:
    """One queue or topic in the JSON; columns that were not requested are absent."""
    found = row.to_json() | columns.rules(row.topic).to_json()
    if columns.oldest is not None:
        found["oldestStoreTimestamp"] = columns.oldest(row)
    if columns.due is not None:
        what = columns.due(row)
        found |= {"dueMessages": what.messages, "dueBytes": what.bytes, "nextDueMs": what.next_ms}
    return found


def _print_archives(archives: Sequence[LoadedArchive], options: argparse.Namespace) -> None:
    """Print the archives below a URL that holds several, as one has to be chosen for everything else."""
    rows = []
    for archive in archives:
        queues = list_queues(archive.state, hidden=options.hidden)
        messages, newest_ms = sum(queue.messages for queue in queues), archive.state.created_ms
        rows.append((archive.cluster, archive.broker, len(queues), messages, newest_ms))
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
    """Print the keys that a repair set aside: those that commits list, and those in lists of their own."""
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
    """Print log histories, and until when the messages are kept that the current one hides."""
    found = list_histories(archive.store, archive.state)
    kept_until = {
        item.number: None if item.since_ms is None or item.is_kept else item.since_ms + grace_ms
        for item in found
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
                    for item in found
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
            for item in found
        ],
    )
    total = sum(item.messages for item in found)
    histories = f"{len(found)} log {'history' if len(found) == 1 else 'histories'}"
    print_lines(
        f"{archive.title}: {histories}, {counted(total, 'hidden message')}; tiered cat --history N prints them"
    )


def _print(title: str, rows: Sequence[Listing], columns: Columns) -> None:
    """Print the table of queues, then gaps and messages set aside, then the sum."""
    _print_rows(rows, columns)
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


def _print_rows(rows: Sequence[Listing], columns: Columns) -> None:
    """Print one line for each queue or topic; ``_cells`` has the same order of columns."""
    header = ["topic", "queues" if rows and isinstance(rows[0], TopicListing) else "queue"]
    if header[1] == "queue":
        header += ["generation", "min", "max"]
    header += ["messages", "bytes"] + ([] if columns.oldest is None else ["oldest"]) + ["newest"]
    header += [] if header[1] == "queues" else ["kind"]
    header += [] if columns.due is None else ["due", "due bytes", "next due"]
    print_table([*header, "ttl", "policy"], [_cells(row, columns) for row in rows])


def _cells(row: Listing, columns: Columns) -> list[object]:
    """One line of ``_print_rows``."""
    found: list[object] = [row.topic]
    if isinstance(row, TopicListing):
        found += [len(row.queues)]
    else:
        found += [row.queue_id, row.generation, row.min_offset, row.max_offset]
    found += [row.messages, size_text(row.bytes)]
    found += [] if columns.oldest is None else [_time_cell(columns.oldest(row))]
    found += [time_text(row.newest_ms)]
    found += [] if isinstance(row, TopicListing) else [row.kind]
    if columns.due is not None:
        what = columns.due(row)
        found += [what.messages, size_text(what.bytes), _time_cell(what.next_ms)]
    return [*found, *_rule_cells(columns.rules(row.topic))]


def _time_cell(time_ms: int | None) -> str:
    return "" if time_ms is None else time_text(time_ms)


def _rule_cells(rule: TopicRule) -> list[str]:
    """Time to live and read policy; in brackets what set them, unless it is the setting for all topics."""
    cells = ((rule.ttl, rule.ttl_from), (rule.read_policy, rule.read_policy_from))
    return [value if source in (TTL_KEY, POLICY_KEY) else f"{value} ({source})" for value, source in cells]
