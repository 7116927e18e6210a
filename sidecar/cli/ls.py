"""`tiered ls`: list the queues of an archive."""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable

from fetcher.queries.queue_listing import QueueListing, list_queues
from maintenance.diverged import diverged_queues
from sidecar.archive import Archive, open_for_reading
from sidecar.cli.arguments import add_archive, add_json, settings_of
from sidecar.topic_rules import rules_of
from tiered.catalog.deletions import KEPT_MS
from tiered.console import print_json, print_lines, print_table, size_text, time_text
from tiered.errors import NotFoundError
from tiered.settings.topic_rules import POLICY_KEY, TTL_KEY, TopicRule


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, a topic pattern, hidden queues."""
    add_archive(parser)
    parser.add_argument("--topic", metavar="PATTERN", default="*", help="only matching topics")
    parser.add_argument(
        "--hidden", action="store_true", help="also list queues of deleted topics and earlier generations"
    )
    parser.add_argument(
        "--diverged",
        action="store_true",
        help="list messages of truncated or replaced logs that gc has not deleted",
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print the queues in order of name."""
    settings = settings_of(options).settings
    with open_for_reading(options.url, settings) as archive:
        if options.diverged:
            _print_diverged(archive, options, settings.gc.diverged_grace_ms)
            return 0
        found = [
            queue
            for queue in list_queues(archive.state, hidden=options.hidden)
            if fnmatch.fnmatchcase(queue.topic, options.topic)
        ]
        if not found and options.topic != "*":
            raise NotFoundError(
                f"no topic matches {options.topic}", hint="tiered ls without --topic lists all"
            )
        rules = rules_of(archive, settings)
        if options.json:
            print_json({
                "cluster": archive.cluster, "broker": archive.broker, "version": archive.state.version,
                "epoch": archive.state.epoch, "committedPhys": archive.state.cursor.phys,
                "queues": [queue.to_json() | rules(queue.topic).to_json() for queue in found],
            })  # fmt: skip
        else:
            _print(archive.title, found, rules)
    return 0


def _print_diverged(archive: Archive, options: argparse.Namespace, grace_ms: int) -> None:
    found = [
        item
        for item in diverged_queues(archive.store, archive.state)
        if fnmatch.fnmatchcase(item.queue.topic, options.topic)
    ]
    if options.json:
        print_json({
            "cluster": archive.cluster, "broker": archive.broker, "version": archive.state.version,
            "diverged": [
                {
                    "logHistory": item.log_history, "topic": item.queue.topic, "queueId": item.queue.queue_id,
                    "generation": item.queue.generation, "minOffset": item.min_offset, "maxOffset": item.max_offset,
                    "messages": item.messages, "bytes": item.bytes, "objects": item.objects,
                    "deletedAfterMs": None if item.since_ms >= KEPT_MS else item.since_ms + grace_ms,
                }
                for item in found
            ],
        })  # fmt: skip
        return
    print_table(
        ["log history", "topic", "queue", "generation", "min", "max", "messages", "bytes", "objects", "gc after"],
        [
            [i.log_history, i.queue.topic, i.queue.queue_id, i.queue.generation, i.min_offset, i.max_offset,
             i.messages, size_text(i.bytes), i.objects,
             "kept" if i.since_ms >= KEPT_MS else time_text(i.since_ms + grace_ms)]
            for i in found
        ],
    )  # fmt: skip
    total, size = sum(item.messages for item in found), size_text(sum(item.bytes for item in found))
    print_lines(f"{archive.title}: {total:,} messages, {size}, are in no later log history")


def _print(title: str, queues: list[QueueListing], rules: Callable[[str], TopicRule]) -> None:
    print_table(
        ["topic", "queue", "generation", "min", "max", "messages", "bytes", "newest", "kind", "ttl", "policy"],
        [
            [q.topic, q.queue_id, q.generation, q.min_offset, q.max_offset, q.messages, size_text(q.bytes),
             time_text(q.newest_ms), q.kind, *_rule_cells(rules(q.topic))]
            for q in queues
        ],
    )  # fmt: skip
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
    and_gaps = f", {len(gaps):,} gaps" if gaps else ""
    print_lines(f"{title}: {len(queues)} queues, {total:,} messages, {size} of messages{and_gaps}")


def _rule_cells(rule: TopicRule) -> list[str]:
    """Time to live and read policy; in brackets what set them, unless it is the setting for all topics."""
    cells = ((rule.ttl, rule.ttl_from), (rule.read_policy, rule.read_policy_from))
    return [value if source in (TTL_KEY, POLICY_KEY) else f"{value} ({source})" for value, source in cells]
