"""`tiered offset`: find the queue offset of a point in time."""

import argparse
import sys

from fetcher.archive import Queue, open_archive
from fetcher.queries.time_search import Boundary
from rocketmq_tiered.cli.arguments import add_archive, add_generation, add_json, instant, settings_of
from tiered.console import print_json, print_lines, print_table, time_text
from tiered.errors import NotFoundError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, the queues, the time, and which message near it is meant."""
    add_archive(parser)
    parser.add_argument("topic", metavar="TOPIC", help="the topic")
    parser.add_argument(
        "--queue", type=int, metavar="N", help="print only the offset of queue N of the topic"
    )
    parser.add_argument(
        "--time",
        type=instant,
        metavar="TIME",
        required=True,
        help="ISO 8601 such as 2026-11-21T07:00:00Z, milliseconds since 1970, or an age such as -1h",
    )
    parser.add_argument(
        "--boundary",
        choices=[str(boundary) for boundary in Boundary],
        default=str(Boundary.LOWER),
        help="lower: the first message at or after the time (default); upper: the last one at or before it",
    )
    add_generation(parser)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print the queue offset that belongs to a time: for the queue of ``--queue``, or for each queue of the topic."""
    settings = settings_of(options).settings
    with open_archive(options.url, settings=settings) as archive:
        if options.queue is not None:
            queues = [archive.queue(options.topic, options.queue, generation=options.generation)]
        else:
            queues = [
                archive.queue(*listing.key[:2], generation=listing.generation)
                for listing in archive.queues(options.topic, hidden=options.generation is not None)
                if options.generation in (None, listing.generation)
            ]
        if not queues:
            generation = "" if options.generation is None else f" in generation {options.generation}"
            raise NotFoundError(
                f"{archive.title} has no topic {options.topic}{generation}",
                hint="tiered ls --hidden lists the queues",
            )
        boundary = Boundary(options.boundary)
        offsets = [queue.offset_by_time(options.time, boundary) for queue in queues]
        if options.json:
            documents = [
                _document(queue, offset, options.time) for queue, offset in zip(queues, offsets, strict=True)
            ]
            print_json(
                {
                    "topic": options.topic,
                    "timestamp": options.time,
                    "boundary": str(boundary),
                    "version": archive.version,
                    "queues": documents,
                }
            )
        elif options.queue is not None:
            print_lines(str(offsets[0]))
        else:
            rows = [
                [
                    queue.queue_id,
                    offset,
                    queue.min_offset,
                    queue.max_offset,
                    time_text(queue.timestamp_of(offset) or 0),
                ]
                for queue, offset in zip(queues, offsets, strict=True)
            ]
            print_table(["queue", "offset", "min", "max", "stored"], rows)
        if not options.json:
            for queue, offset in zip(queues, offsets, strict=True):
                if _has_expired(queue, offset, options.time):
                    print_lines(
                        f"{queue.topic} queue {queue.queue_id}: messages before offset {offset:,} have expired",
                        file=sys.stderr,
                    )
    return 0


def _has_expired(queue: Queue, offset: int, time_ms: int) -> bool:
    """Whether messages stored at ``time_ms`` may have expired. That is so if ``offset``, which was found for this time,
    is the first one that did not expire, and its message was stored later, or none is left."""
    if not queue.has_expired or offset != queue.min_offset:
        return False
    stored_ms = queue.timestamp_of(offset)  # None at the end of the queue
    return stored_ms is None or stored_ms > time_ms


def _document(queue: Queue, offset: int, time_ms: int) -> dict[str, int | bool | None]:
    """One queue in the JSON, with the ``offset`` found for ``time_ms``. ``storeTimestamp`` is that of the message at
    this offset, null at the queue's end; ``expired`` says that messages of the time may have expired."""
    return {
        "queueId": queue.queue_id,
        "generation": queue.generation,
        "offset": offset,
        "storeTimestamp": queue.timestamp_of(offset),
        "minOffset": queue.min_offset,
        "maxOffset": queue.max_offset,
        "expired": _has_expired(queue, offset, time_ms),
    }
