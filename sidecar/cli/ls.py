"""`tiered ls`: list the queues of an archive."""

from __future__ import annotations

import argparse
import fnmatch

from fetcher.queries.queue_listing import QueueListing, list_queues
from sidecar.archive import open_for_reading
from sidecar.cli.arguments import add_archive, add_json, settings_of
from tiered.console import print_json, print_lines, print_table, size_text, time_text
from tiered.errors import NotFoundError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, a topic pattern, hidden queues."""
    add_archive(parser)
    parser.add_argument("--topic", metavar="PATTERN", default="*", help="only matching topics")
    parser.add_argument(
        "--hidden", action="store_true", help="also list queues of deleted topics and earlier generations"
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print the queues in order of name."""
    with open_for_reading(options.url, settings_of(options).settings) as archive:
        found = [
            queue
            for queue in list_queues(archive.state, hidden=options.hidden)
            if fnmatch.fnmatchcase(queue.topic, options.topic)
        ]
        if not found and options.topic != "*":
            raise NotFoundError(
                f"no topic matches {options.topic}", hint="tiered ls without --topic lists all"
            )
        if options.json:
            print_json({
                "cluster": archive.cluster, "broker": archive.broker, "version": archive.state.version,
                "epoch": archive.state.epoch, "committedPhys": archive.state.cursor.phys,
                "queues": [queue.to_json() for queue in found],
            })  # fmt: skip
        else:
            _print(archive.title, found)
    return 0


def _print(title: str, queues: list[QueueListing]) -> None:
    print_table(
        ["topic", "queue", "generation", "min", "max", "messages", "bytes", "newest", "kind"],
        [
            [q.topic, q.queue_id, q.generation, q.min_offset, q.max_offset, q.messages, size_text(q.bytes),
             time_text(q.newest_ms), q.kind]
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
