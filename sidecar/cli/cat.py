"""`tiered cat`: print archived messages, as JSON lines or as the broker's own bytes."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Iterator

import orjson

from sidecar.archive import Archive, QueueListing, list_queues, open_for_reading
from sidecar.cli.arguments import add_archive, settings_of
from sidecar.logs import log_plain
from tiered.catalog.pages import RunIndex
from tiered.errors import NotFoundError, UsageError
from tiered.flat_file.composite_flat_file import Batch, QueueReader
from tiered.flat_file.segment_reader import SegmentCache
from tiered.formats.record import decode_record, record_to_json
from tiered.model.queue import QueueKey

logger = logging.getLogger(__name__)

READ_ROWS = 4096
READ_BYTES = 8 * 1024 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, which queues, which offsets, which form."""
    add_archive(parser)
    parser.add_argument("topic", metavar="TOPIC", nargs="?", help="the topic to print")
    parser.add_argument("--all", action="store_true", help="every topic")
    parser.add_argument("--queue", type=int, metavar="N", help="only this queue id")
    parser.add_argument(
        "--from", dest="start", type=int, metavar="OFFSET", help="first queue offset of a queue"
    )
    parser.add_argument("--count", type=int, metavar="N", help="at most this many records of a queue")
    parser.add_argument("--format", choices=("jsonl", "raw"), default="jsonl", help="default: jsonl")
    parser.add_argument("--generation", type=int, metavar="N", help="an earlier life of a recreated topic")


def execute(options: argparse.Namespace) -> int:
    """Print the chosen queues one after another, each in offset order."""
    if options.all == (options.topic is not None):
        raise UsageError("name one TOPIC, or use --all", hint="tiered ls shows the topics")
    for name in ("start", "count", "queue"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise UsageError(
                f"--{'from' if name == 'start' else name} {value} is negative", hint="count from 0"
            )
    settings = settings_of(options).settings
    log_plain(settings.process.log_level)
    with open_for_reading(options.url, settings) as archive:
        printer = _Printer(archive, options)
        for queue in _chosen(archive, options):
            printer.print_queue(queue)
    return 0


def _chosen(archive: Archive, options: argparse.Namespace) -> list[QueueListing]:
    found = [
        queue
        for queue in list_queues(archive.state, hidden=options.generation is not None)
        if (options.all or queue.topic == options.topic)
        and options.queue in (None, queue.queue_id)
        and options.generation in (None, queue.generation)
    ]
    if not found and not options.all:
        which = options.topic if options.queue is None else f"{options.topic} queue {options.queue}"
        raise NotFoundError(f"{archive.title} has no {which}", hint="tiered ls shows what there is")
    return found


class _Printer:
    """Prints queues of one archive; segments and pages read for one serve the others too."""

    def __init__(self, archive: Archive, options: argparse.Namespace) -> None:
        self._archive = archive
        self._options = options
        self._segments = SegmentCache(archive.store)
        self._run_index = RunIndex(archive.store)

    def print_queue(self, listing: QueueListing) -> None:
        queue = QueueKey(listing.topic, listing.queue_id, listing.generation)
        form = _raw if self._options.format == "raw" else _jsonl
        for batch in self._batches(queue):
            for piece in form(batch, queue, is_own_offset=listing.kind == "batch"):
                sys.stdout.buffer.write(piece)

    def _batches(self, queue: QueueKey) -> Iterator[Batch]:
        reader = QueueReader(
            self._archive.store,
            self._archive.state,
            queue,
            segments=self._segments,
            run_index=self._run_index,
        )
        offset = reader.min_offset if self._options.start is None else self._options.start
        left = sys.maxsize if self._options.count is None else self._options.count
        while left > 0 and offset < reader.max_offset:
            batch = reader.read(offset, max_rows=min(left, READ_ROWS), max_bytes=READ_BYTES)
            if batch.gap is not None:
                logger.warning("%s queue %d: offsets %d to %d are not there", *queue[:2], *batch.gap)
            yield batch
            left -= len(batch)
            offset = batch.next_offset


def _raw(batch: Batch, queue: QueueKey, *, is_own_offset: bool) -> Iterator[bytes]:
    for start, size in zip(batch.starts.tolist(), batch.sizes.tolist(), strict=True):
        yield bytes(batch.data[start : start + size])


def _jsonl(batch: Batch, queue: QueueKey, *, is_own_offset: bool) -> Iterator[bytes]:
    records = _raw(batch, queue, is_own_offset=is_own_offset)
    for data, offset in zip(records, batch.queue_offsets.tolist(), strict=True):
        document = record_to_json(
            decode_record(data), queue=queue, queue_offset=offset, is_own_offset=is_own_offset
        )
        yield orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE)
