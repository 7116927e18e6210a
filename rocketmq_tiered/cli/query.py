"""`tiered query`: find messages of an archive by key, unique key or offsetMsgId."""

import argparse
import sys
from contextlib import closing

from fetcher.access import ArchiveAccess, open_access
from fetcher.io.waiting import run_sync
from fetcher.queries.by_key import KeyKind, KeyQuery, cost_of, find_by_keys
from fetcher.queries.source import ALWAYS_MS, newest_ms
from fetcher.rows.message import Message
from rocketmq_tiered.cli.arguments import add_archive, add_json, add_times, settings_of
from rocketmq_tiered.cli.rendering import warn_of_body
from tiered.catalog.state import CatalogState
from tiered.console import counted, print_json, print_json_line, print_lines, time_text
from tiered.errors import NotFoundError, UsageError
from tiered.model.tables import QUEUE_EXPIRED, QUEUE_HIDDEN
from tiered.timestamps import wall_ms

DEFAULT_RANGE_MS = 7 * 86_400_000
DEFAULT_LIMIT = 64
"""A broker's default (maxMsgsNumBatch)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, the key or id to find, and the searched range of times."""
    add_archive(parser)
    parser.add_argument(
        "--topic", metavar="TOPIC", help="search only this topic (default: all topics); required with --key"
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--key", metavar="KEY", help="find messages that have this key among their KEYS")
    what.add_argument(
        "--unique-key", metavar="ID", help="find messages by the id that the client assigned (UNIQ_KEY)"
    )
    what.add_argument(
        "--id",
        metavar="OFFSETMSGID",
        help="find the message by the id that the broker assigned (offsetMsgId)",
    )
    add_times(parser, since="7 days before the archive's newest message")
    parser.add_argument(
        "--all-time",
        action="store_true",
        help="search the whole archive; first print how many requests that takes",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=DEFAULT_LIMIT,
        metavar="N",
        help="print at most the newest N messages (default: %(default)s)",
    )
    parser.add_argument(
        "--hidden", action="store_true", help="also search deleted topics, and those created again since"
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print the messages found, newest first. Exit code 3 if none is found, 4 if the store is unavailable."""
    _check(options)
    settings = settings_of(options).settings
    with closing(open_access(options.url, cluster="", broker="", settings=settings)) as archive:
        expired = 0
        if options.id is not None:
            messages = _by_id(archive, options)
        else:
            messages, expired = _by_key(archive, options)
        if not messages and expired:
            raise NotFoundError(
                f"{archive.title} no longer has a message {_wanted(options)}: {expired:,} have expired",
                hint="tiered ls shows the time to live of each topic",
            )
        if not messages:
            hint = _hint(options, archive.state)
            if _has(QUEUE_EXPIRED, archive.state, options.topic):
                hint = f"it may have expired; {hint}"
            raise NotFoundError(f"{archive.title} has no message {_wanted(options)}", hint=hint)
        _print(messages, as_document=options.json)
    return 0


def _check(options: argparse.Namespace) -> None:
    """Refuse options that contradict each other, before the archive is opened."""
    if options.key is not None and options.topic is None:
        raise UsageError("--key requires --topic", hint="add --topic TOPIC: keys are indexed by topic")
    if options.limit < 1:
        raise UsageError(f"--limit {options.limit} is less than 1", hint="give --limit 1 or more")
    if options.all_time and (options.since is not None or options.until is not None):
        raise UsageError(
            "--all-time cannot be combined with --since or --until",
            hint="remove --all-time, or --since and --until",
        )
    if options.since is not None and options.until is not None and options.since >= options.until:
        raise UsageError(
            "--since is not before --until: the range is empty",
            hint="give a later --until, which is excluded",
        )


def _by_id(archive: ArchiveAccess, options: argparse.Namespace) -> list[Message]:
    found = run_sync(archive.find_by_id(options.id))
    if found is None or options.topic not in (None, found.queue.topic):
        return []
    return [found]


def _by_key(archive: ArchiveAccess, options: argparse.Namespace) -> tuple[list[Message], int]:
    """The newest messages with the key of ``--key`` or ``--unique-key``, and how many others of that key are known to
    have expired."""
    topics = [options.topic] if options.topic is not None else _topics(archive.state, options.hidden)
    begin_ms, end_ms = _range(archive.state, options)
    kind = KeyKind.KEY if options.key is not None else KeyKind.UNIQUE
    key = options.key if options.key is not None else options.unique_key
    topic_queries = [
        KeyQuery(topic, key, kind, begin_ms, end_ms, options.limit, with_hidden=options.hidden)
        for topic in topics
    ]
    if options.all_time:
        _announce(archive, topic_queries)
    pages = run_sync(
        archive.query(archive.state, lambda source, state: find_by_keys(source, state, topic_queries))
    )
    messages = [message for page in pages for message in page.messages]
    expired = sum(page.expired for page in pages)
    messages.sort(key=lambda message: -message.record.store_timestamp)
    return messages[: options.limit], expired


def _announce(archive: ArchiveAccess, topic_queries: list[KeyQuery]) -> None:
    """Print on stderr, before a search of all times begins, how many requests it takes."""
    cost = run_sync(archive.query(archive.state, lambda source, state: cost_of(source, state, topic_queries)))
    topics = "" if len(topic_queries) == 1 else f", the index files for each of {len(topic_queries):,} topics"
    files, segments = counted(cost.index_files, "index file"), counted(cost.segments, "unindexed segment")
    print_lines(
        f"--all-time searches {files} and {segments}{topics}: "
        f"about {counted(cost.requests, 'request')}, and two for each message found",
        file=sys.stderr,
    )


def _topics(state: CatalogState, with_hidden: bool) -> list[str]:
    shown = {key.topic for key, row in state.queues() if with_hidden or not row["flags"] & QUEUE_HIDDEN}
    return sorted(shown)


def _range(state: CatalogState, options: argparse.Namespace) -> tuple[int, int]:
    """The range of store times to search, both ends included: as the options say, by default the seven days before the
    newest message."""
    begin_ms, end_ms = options.since, options.until
    if options.all_time:
        begin_ms = ALWAYS_MS[0]
    elif begin_ms is None:
        # A message from the future (flipped bit, wrong clock) must not hide all others.
        newest = min(newest_ms(state), wall_ms())
        begin_ms = max(0, (newest if end_ms is None else min(newest, end_ms)) - DEFAULT_RANGE_MS)
    return begin_ms, ALWAYS_MS[1] if end_ms is None else end_ms - 1


def _wanted(options: argparse.Namespace) -> str:
    if options.id is not None:
        return f"with id {options.id}"
    name = "key" if options.key is not None else "unique key"
    where = f" in {options.topic}" if options.topic else ""
    return f"with {name} {options.key if options.key is not None else options.unique_key!r}{where}"


def _is_known(state: CatalogState, topic: str | None) -> bool:
    return topic is None or any(key.topic == topic for key, _ in state.queues())


def _has(flag: int, state: CatalogState, topic: str | None) -> bool:
    """Whether a queue of ``topic``, or with None any queue, has ``flag`` (QUEUE_HIDDEN, QUEUE_EXPIRED)."""
    return any(row["flags"] & flag for key, row in state.queues() if topic in (None, key.topic))


def _hint(options: argparse.Namespace, state: CatalogState) -> str:
    """The hint of the error that nothing was found: what the search did not cover, and which option covers it."""
    if not _is_known(state, options.topic):
        return "the archive does not have this topic: tiered ls lists the topics"
    if options.id is None and not options.hidden and _has(QUEUE_HIDDEN, state, options.topic):
        return "--hidden also searches deleted topics and earlier generations of recreated ones"
    if options.id is not None:
        return "an id is a physical offset of one broker: check that this is its archive"
    if options.all_time:
        return "the whole archive was searched"
    return f"{_searched(options.since, options.until)}: --all-time searches everything"


def _searched(begin_ms: int | None, end_ms: int | None) -> str:
    """The store times that a search covered, in words for the hint of ``_hint``."""
    if begin_ms is None:
        return (
            "only 7 days were searched"
            if end_ms is None
            else f"only 7 days up to {_shown(end_ms)} were searched"
        )
    return f"searched from {_shown(begin_ms)} " + ("on" if end_ms is None else f"to {_shown(end_ms)}")


def _shown(time_ms: int) -> str:
    return time_text(time_ms) if time_ms > 0 else f"{time_ms} ms"


def _print(messages: list[Message], *, as_document: bool) -> None:
    """Print each message as a JSON line, or with ``--json`` all in one document."""
    documents = [message.to_json() for message in messages]
    for document in documents:
        warn_of_body(document)
    if as_document:
        print_json({"messages": documents})
        return
    for document in documents:
        print_json_line(document)
