"""`tiered cat`: print archived messages, as JSON lines or as the broker's own bytes."""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Iterator
from dataclasses import replace

from fetcher.archive import Archive, latest_offsets, open_archive
from fetcher.io.waiting import run_sync
from fetcher.queries.queue_listing import QueueListing
from fetcher.rows.message import MessageBatch
from fetcher.rows.tag_filter import MessageFilter, tag_filter
from fetcher.sql92.message_filter import Sql92Filter
from fetcher.walk import Span, Walk
from rocketmq_tiered.cli.arguments import add_archive, add_generation, add_times, add_version, settings_of
from rocketmq_tiered.cli.rendering import BODY_FORMS, BodyForm, is_charset, jsonl_line
from tiered.archive.kept_offsets import KeptOffsets
from tiered.archive.unreadable import UnreadableMessagesError, UnreadableRange
from tiered.errors import CorruptionError, NotFoundError, UnavailableError, UsageError
from tiered.model.queue import QueueKey

logger = logging.getLogger(__name__)

READ_ROWS = 4096
READ_BYTES = 8 * 1024 * 1024
POLL_S = 1.0
CHARSET = "UTF-8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, the queues and messages to print, and their form."""
    add_archive(parser)
    parser.add_argument("topic", metavar="TOPIC", nargs="?", help="the topic to print")
    parser.add_argument("--all", action="store_true", help="print every topic of the archive")
    parser.add_argument("--queue", type=int, metavar="N", help="only the queue with this id")
    parser.add_argument(
        "--from", dest="start", type=int, metavar="OFFSET", help="begin each queue at this queue offset"
    )
    add_times(parser)
    parser.add_argument("--limit", type=int, metavar="N", help="print at most N records of each queue")
    parser.add_argument(
        "--tag", metavar="EXPRESSION", help="only messages with these tags: TagA, or 'TagA || TagB'"
    )
    parser.add_argument(
        "--where", metavar="SQL92", help="only messages whose properties match, such as \"a > 5 AND b = 'x'\""
    )
    parser.add_argument(
        "--format",
        choices=("jsonl", "raw"),
        default="jsonl",
        help="one JSON document a line (default), or the records as the broker stored them",
    )
    parser.add_argument(
        "--body",
        choices=BODY_FORMS,
        help="print bodies in this form, with --format jsonl (default: only their length and checksum)",
    )
    parser.add_argument(
        "--charset", metavar="NAME", help=f"character set of the bodies, for --body text (default: {CHARSET})"
    )
    add_generation(parser)
    add_version(parser)
    parser.add_argument(
        "--history",
        type=int,
        metavar="N",
        help="print the messages of log history N, hidden since the broker's log was truncated or replaced "
        "(tiered ls --histories lists the numbers)",
    )
    parser.add_argument(
        "--latest",
        action="store_true",
        help="print only the latest message of each key, of those stored before --until, and no deleted key",
    )
    parser.add_argument(
        "--follow", action="store_true", help="continue with new messages as they are archived, until Ctrl-C"
    )


def execute(options: argparse.Namespace) -> int:
    """Print the chosen queues one after another, each in offset order; with --follow, new messages of each in turn."""
    message_filter = _checked(options)
    settings = settings_of(options).settings
    with open_archive(
        options.url, settings=settings, version=options.at_version, history=options.history
    ) as archive:
        printer = _Printer(archive, options, message_filter)
        chosen = _chosen(archive, options)
        if options.follow:
            _follow(archive, options, printer, chosen)
        else:
            printer.print_queues(chosen)
        _warn_of_replaced(printer.body_form)
    return printer.report_unreadable()


def _warn_of_replaced(form: BodyForm | None) -> None:
    """Log a warning if bodies were printed with replacement characters, as they are not of the charset of ``form``."""
    if form is not None and form.replaced:
        logger.warning(
            "%s not in the character set %s: invalid bytes are printed as U+FFFD; name another --charset, or use "
            "--body hex",
            "1 body is" if form.replaced == 1 else f"{form.replaced:,} bodies are",
            form.charset,
        )


def _checked(options: argparse.Namespace) -> MessageFilter | None:
    """The filter that ``--tag`` or ``--where`` requests, None without them. Raises UsageError for options that
    exclude each other."""
    if options.all == (options.topic is not None):
        raise UsageError("give one TOPIC or --all", hint="tiered ls lists the topics")
    for name in ("start", "limit", "queue"):
        value = getattr(options, name)
        if value is not None and value < 0:
            raise UsageError(
                f"--{'from' if name == 'start' else name} {value} is negative", hint="count from 0"
            )
    if options.start is not None and options.since is not None:
        raise UsageError("--from and --since exclude each other", hint="give --from OFFSET or --since TIME")
    if options.follow and options.at_version is not None:
        raise UsageError(
            "--follow and --at-version exclude each other",
            hint="give one: an earlier version gets no new messages",
        )
    if options.history is not None and (options.follow or options.at_version is not None):
        raise UsageError(
            "--history cannot be combined with --follow or --at-version",
            hint="remove --follow and --at-version: a log history does not change",
        )
    if options.latest and (options.follow or options.limit is not None):
        raise UsageError(
            "--latest excludes --follow and --limit",
            hint="remove them: which message of a key is the latest is known at the end of the queue",
        )
    if options.follow and options.until is not None:
        raise UsageError("--follow and --until exclude each other", hint="remove --follow or --until")
    if options.tag is not None and options.where is not None:
        raise UsageError("--tag and --where exclude each other", hint="write TAGS = 'a' AND … in --where")
    if options.format == "raw" and options.body is not None:
        raise UsageError(
            "--body excludes --format raw",
            hint="remove --body: raw records contain their bodies as the broker stored them",
        )
    if options.charset is not None and (options.body != "text" or not is_charset(options.charset)):
        if options.body != "text":
            raise UsageError("--charset applies to bodies as text alone", hint="give --body text as well")
        raise UsageError(
            f"--charset {options.charset} is not a text encoding that is known here",
            hint="use a name such as UTF-8, GBK or ISO-8859-1",
        )
    if options.where is not None:
        return Sql92Filter(options.where)
    return None if options.tag is None else tag_filter(options.tag)


def _chosen(archive: Archive, options: argparse.Namespace) -> list[QueueListing]:
    """The queues that the options choose. It is an error if there are none, but not that ``--all`` finds an empty
    archive."""
    chosen = [
        queue
        for queue in archive.queues(options.topic, hidden=options.generation is not None)
        if options.queue in (None, queue.queue_id) and options.generation in (None, queue.generation)
    ]
    if not chosen and (options.topic, options.queue, options.generation) != (None, None, None):
        hidden = "" if options.generation is None else " --hidden"
        raise NotFoundError(
            f"{archive.title} has no {_wanted(options)}", hint=f"tiered ls{hidden} lists the queues"
        )
    return chosen


def _wanted(options: argparse.Namespace) -> str:
    """The requested queues, such as ``topic orders queue 3 in generation 1``."""
    topic = f"topic {options.topic}" if options.topic else ""
    queue = "" if options.queue is None else f"queue {options.queue}"
    generation = "" if options.generation is None else f"in generation {options.generation}"
    return " ".join(filter(None, (topic, queue, generation if topic or queue else f"queue {generation}")))


def _follow(
    archive: Archive, options: argparse.Namespace, printer: _Printer, chosen: list[QueueListing]
) -> None:
    """Print the chosen queues, then each second what was archived since, until interrupted. An unavailable store or a
    deleted topic is logged once, then tried again."""
    logged = ""  # the last logged error, so that it is not logged each second
    try:
        printer.print_queues(chosen)
        while True:
            sys.stdout.flush()
            time.sleep(POLL_S)
            try:
                archive.refresh()
                printer.print_queues(printer.printed_but_hidden(options.topic))
                printer.print_queues(_chosen(archive, options))
                logged = ""
            except (UnavailableError, NotFoundError) as error:
                if str(error) != logged:
                    logger.warning("%s", error)
                logged = str(error)
    except KeyboardInterrupt:
        return


class _Printer:
    """Prints queues of one archive, each from its last printed message."""

    def __init__(
        self, archive: Archive, options: argparse.Namespace, message_filter: MessageFilter | None
    ) -> None:
        """``message_filter``: which messages of the chosen range are printed; None: all."""
        self._archive = archive
        self._options = options
        self._filter = message_filter
        self.body_form = None if options.body is None else BodyForm(options.body, options.charset or CHARSET)
        self._walks: dict[QueueKey, Walk] = {}
        """Where printing of each queue continues, with --follow."""
        self._begun: set[tuple[str, int]] = set()
        """Topic and queue id of each walk, whatever its generation."""
        self._unreadable: list[UnreadableRange] = []
        """Skipped ranges, which are reported at the end."""

    def printed_but_hidden(self, topic: str | None) -> list[QueueListing]:
        """Queues of which messages were printed, and which were hidden then, as their topic was deleted or created
        again: their last messages may not be printed yet."""
        listed = self._archive.queues(topic, hidden=True)
        return [queue for queue in listed if queue.hidden and queue.key in self._walks]

    def print_queues(self, listings: list[QueueListing]) -> None:
        """Print the messages of each queue that were not printed before. Unreadable ones are skipped and noted for
        ``report_unreadable``."""
        for listing in listings:
            latest = self._latest(listing) if self._options.latest else None
            walk = self._walks.get(listing.key) or self._begin(listing.key)
            while (batch := self._next_batch(walk)) is not None:
                if latest is not None:
                    # Messages that came after the offsets were selected are not printed.
                    is_compared = batch.queue_offsets < latest.end
                    batch = batch.select(latest.mask(batch.queue_offsets) & is_compared)
                for text in self._texts(batch, listing):
                    sys.stdout.buffer.write(text)

    def _latest(self, listing: QueueListing) -> KeptOffsets:
        """The offsets of those messages of a queue that are the latest of their keys. Reads the whole queue, up to
        ``--until``."""
        queue = self._archive.queue(listing.topic, listing.queue_id, generation=listing.generation)
        span = Span(None, None, None, READ_ROWS, READ_BYTES, self._options.until)
        walk = queue.walk(span)
        batches = iter(lambda: self._next_batch(walk), None)
        return latest_offsets(batches, queue.min_offset, queue.max_offset)

    def report_unreadable(self) -> int:
        """Log one line for each range of offsets that could not be read; the exit code."""
        sys.stdout.flush()
        for unreadable in self._unreadable:
            logger.error("%s", unreadable.text)
        return CorruptionError.exit_code if self._unreadable else 0

    def _next_batch(self, walk: Walk) -> MessageBatch | None:
        """The next messages of a queue, None at its end. Unreadable ones are skipped and noted."""
        while True:
            try:
                return run_sync(walk.next_batch())
            except UnreadableMessagesError as error:
                walk.offset = error.range.end
                self._note(error.range)

    def _note(self, unreadable: UnreadableRange) -> None:
        """Note unreadable messages for the exit code and the last lines. A range that continues the one noted before,
        for the same reason, extends it."""
        last = self._unreadable[-1] if self._unreadable else None
        if (
            last is not None
            and last == replace(unreadable, begin=last.begin, end=last.end)
            and last.end == unreadable.begin
        ):
            self._unreadable[-1] = replace(last, end=unreadable.end)
        else:
            self._unreadable.append(unreadable)

    def _begin(self, queue: QueueKey) -> Walk:
        """Begin to print a queue: returns a walk over its messages, from where ``--from`` or ``--since`` says."""
        options = self._options
        # With --follow the topic may have been created again: of its new generation, all is printed.
        start = None if queue[:2] in self._begun else options.start
        self._begun.add(queue[:2])
        span = Span(start, options.since, options.limit, READ_ROWS, READ_BYTES, options.until)
        handle = self._archive.queue(queue.topic, queue.queue_id, generation=queue.generation)
        walk = handle.walk(span, self._filter)
        if options.follow:
            self._walks[queue] = walk
        if options.since is not None and handle.has_expired and walk.offset == handle.min_offset:
            logger.warning(
                "%s queue %d: messages before offset %d have expired", *queue[:2], handle.min_offset
            )
        return walk

    def _texts(self, batch: MessageBatch, listing: QueueListing) -> Iterator[bytes | memoryview]:
        """What is written to stdout for each message of ``batch``: with ``--format raw`` its record, else a JSON
        line."""
        if self._options.format == "raw":
            return batch.records()
        return (
            jsonl_line(
                data,
                listing.key,
                offset,
                is_own_offset=listing.kind == "batch",
                body_form=self.body_form,
            )
            for data, offset in zip(batch.records(), batch.queue_offsets.tolist(), strict=True)
        )
