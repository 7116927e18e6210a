"""`tiered reset-offset`: reset a consumer group's offsets."""

import argparse

from fetcher.archive import open_archive
from rocketmq_tiered.cli.arguments import (
    NAME_FLAGS,
    STORE_FLAGS,
    add_json,
    add_setting_flags,
    instant,
    settings_of,
)
from rocketmq_tiered.process.broker_side import credentials_of, tls_of
from rocketmq_tiered.process.group_reset import (
    ArchiveGroups,
    QueueMove,
    ServerGroups,
    Start,
    StartKind,
    is_gone,
    own_name,
)
from rocketmq_tiered.server.groups.group_state import GroupLog
from tiered.clock import MACHINE_CLOCK
from tiered.console import print_json, print_table
from tiered.errors import NotFoundError, UsageError
from tiered.model.address import host_and_port


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive or the running server, the consumer group, the topic, and the new offsets."""
    parser.add_argument(
        "url",
        metavar="ARCHIVE_URL",
        nargs="?",
        help="an archive that no server serves now: file:///directory or s3://bucket/prefix",
    )
    add_setting_flags(parser, NAME_FLAGS, STORE_FLAGS)
    parser.add_argument(
        "--serve",
        metavar="HOST:PORT",
        help="address of a running tiered serve or tiered run, or of a name server; consumers may keep running",
    )
    parser.add_argument(
        "--group", required=True, metavar="NAME", help="the consumer group whose offsets are reset"
    )
    parser.add_argument("--topic", required=True, metavar="NAME", help="the topic whose offsets are reset")
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--earliest", action="store_true", help="reset to the first message of each queue")
    start.add_argument(
        "--time",
        type=instant,
        metavar="TIME",
        help="reset to the first message stored at or after this time",
    )
    start.add_argument(
        "--offset",
        type=int,
        metavar="N",
        help="reset each queue to offset N, or to its first or last offset if it does not reach N",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the new offsets, and change nothing")
    parser.add_argument(
        "--new-group",
        action="store_true",
        help="allow a group that is not known yet: it will start at these offsets",
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Reset the offsets of the group, at a running server or in an archive, and print them. ``--dry-run`` only prints
    them."""
    if (options.url is None) == (options.serve is None):
        raise UsageError(
            "give either ARCHIVE_URL or --serve",
            hint="give --serve HOST:PORT if tiered serve is running for the archive; otherwise give ARCHIVE_URL",
        )
    start = _start(options)
    moves = _at_server(options, start) if options.serve is not None else _in_archive(options, start)
    if options.json:
        print_json(
            {
                "group": options.group,
                "topic": options.topic,
                "dryRun": options.dry_run,
                "queues": [
                    {
                        "brokerName": move.broker,
                        "queueId": move.queue_id,
                        "before": move.before,
                        "offset": move.after,
                        "minOffset": move.minimum,
                        "maxOffset": move.maximum,
                    }
                    for move in moves
                ],
            }
        )
    else:
        print_table(
            ["broker", "queue", "before", "offset", "min", "max"],
            [
                [m.broker, m.queue_id, "-" if m.before is None else m.before, m.after, m.minimum, m.maximum]
                for m in moves
            ],
        )
    return 0


def _start(options: argparse.Namespace) -> Start:
    if options.earliest:
        return Start(StartKind.EARLIEST)
    if options.time is not None:
        return Start(StartKind.TIME, options.time)
    return Start(StartKind.OFFSET, options.offset)


def _at_server(options: argparse.Namespace, start: Start) -> list[QueueMove]:
    """Reset the group at the running server of ``--serve``; with ``--dry-run`` only compute the offsets. Returns the
    old and new offset of each queue."""
    if host_and_port(options.serve) is None:
        raise UsageError(
            f"--serve {options.serve} is not host:port", hint="for example --serve 10.0.0.5:9876"
        )
    settings = settings_of(options).settings
    server = ServerGroups(options.serve, credentials=credentials_of(settings), tls=tls_of(settings))
    try:
        moves = server.plan(options.group, options.topic, start)
        _check_known(options, any(move.before is not None for move in moves) or server.knows(options.group))
        return moves if options.dry_run else server.move(options.group, options.topic, start, moves)
    finally:
        server.close()


def _check_known(options: argparse.Namespace, is_known: bool) -> None:
    if not is_known and not options.new_group:
        raise NotFoundError(
            f"consumer group {options.group} is unknown: it has no offsets and no members",
            hint="check its name; --new-group sets where a new group starts",
        )


def _in_archive(options: argparse.Namespace, start: Start) -> list[QueueMove]:
    """Reset the group in the archive, which no running server may own; with ``--dry-run`` only compute the offsets.
    Returns the old and new offset of each queue."""
    settings = settings_of(options).settings
    with open_archive(
        options.url, cluster=settings.archive.cluster, broker=settings.archive.broker, settings=settings
    ) as archive:
        log = GroupLog(
            archive.access.store,
            own_name(),
            MACHINE_CLOCK,
            is_gone=is_gone,
            generation_of=archive.access.generation,
        )
        groups = ArchiveGroups(archive, log, settings.serve.lease_ms)
        moves = groups.plan(options.group, options.topic, start)
        _check_known(options, groups.knows(options.group))
        return moves if options.dry_run else groups.move(options.group, options.topic, moves)
