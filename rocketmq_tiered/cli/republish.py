"""`tiered republish`: send archived messages to another broker or topic."""

import argparse
import asyncio
import hashlib
import math
import os
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from fetcher.access import ArchiveAccess, open_async_access
from rocketmq_tiered.cli.arguments import add_archive, add_json, add_times, settings_of
from rocketmq_tiered.process.broker_side import credentials_of, tls_of
from rocketmq_tiered.process.instance import state_root
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.sending.position import Position, locked
from rocketmq_tiered.sending.republish import (
    Report,
    Republish,
    Selection,
    SendingJob,
    chosen_queues,
    jobs_for,
    repeats_text,
)
from rocketmq_tiered.sending.sender import Sender
from rocketmq_tiered.sending.target import Target, find_target
from rocketmq_tiered.server.proxy.upstream import InflightLimit, RemotingUpstream
from tiered.archive.timers import PENDING_DTYPE, TimerFiles
from tiered.console import camel_names, counted, print_json, print_lines, print_table
from tiered.errors import CorruptionError
from tiered.remoting.client import BrokerClient
from tiered.settings.sections import Settings

TIMEOUT_S = 10.0
GROUP = "tiered_republish"
EXIT_STOPPED = 130


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, the target, which messages are sent, and how fast."""
    add_archive(parser)
    parser.add_argument(
        "--to",
        required=True,
        metavar="HOST:PORT",
        help="address of the broker that the messages are sent to, or of a name server of several such brokers",
    )
    parser.add_argument(
        "--topics",
        metavar="PATTERN",
        help="send only these topics, comma-separated names or patterns (default: those of --topic-map, or all)",
    )
    parser.add_argument(
        "--topic-map",
        metavar="TOPIC=NEW",
        type=_mapping,
        action="append",
        default=[],
        help="send the messages of TOPIC to topic NEW; may be repeated",
    )
    add_times(parser)
    parser.add_argument(
        "--rate",
        type=_rate,
        default=0.0,
        metavar="N",
        help="send at most N messages a second (default: no limit)",
    )
    parser.add_argument(
        "--position",
        type=Path,
        metavar="FILE",
        help="file that says how far each queue was sent; the same command continues there (default: a file for each "
        "archive and target in the state directory)",
    )
    parser.add_argument(
        "--skip-refused",
        action="store_true",
        help="skip messages that the broker refuses, instead of failing",
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be sent, and send nothing")
    add_json(parser)


def _mapping(text: str) -> tuple[str, str]:
    topic, separator, name = text.partition("=")
    if not (topic and separator and name):
        raise argparse.ArgumentTypeError(f"{text} is not of the form TOPIC=NEW")
    return topic, name


def _rate(text: str) -> float:
    """The value of ``--rate``, in messages a second. Raises ArgumentTypeError, which argparse prints with the name of
    the option."""
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0  # refused like a number that is not positive
    if not 0 < rate < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive number of messages a second")
    return rate


def execute(options: argparse.Namespace) -> int:
    """Send the chosen messages to the target, or with ``--dry-run`` count them. Exit code 1 if messages were unreadable
    or refused, 130 if a signal stopped it."""
    settings = settings_of(options).settings
    names = dict(options.topic_map)
    patterns = tuple(filter(None, (options.topics or "").split(","))) or tuple(names) or ("*",)
    selection = Selection(patterns, names, options.since, options.until, options.skip_refused)
    credentials, tls = credentials_of(settings), tls_of(settings)
    with closing(
        open_async_access(
            options.url, cluster=settings.archive.cluster, broker=settings.archive.broker, settings=settings
        )
    ) as access:
        queues = chosen_queues(access, selection)
        # Of the topic that takes timers, only those are sent that were neither delivered nor cancelled.
        timer_queues = [queue.key for queue in queues if queue.topic == settings.timers.topic]
        if timer_queues:
            pending = TimerFiles(access.store).pending_times(access.state)
            none = np.zeros(0, PENDING_DTYPE)
            selection = replace(selection, pending={key: pending.get(key, none) for key in timer_queues})
        target = find_target(options.to, lambda address: BrokerClient(address, TIMEOUT_S, credentials, tls))
        jobs = jobs_for(access, queues, names, target)
        path = options.position or _default_path(access, target)
        with locked(path):
            command = _Command(options, settings, Position(path, access.title, target.name))
            return asyncio.run(command.run(access, selection, jobs))


def _default_path(access: ArchiveAccess, target: Target) -> Path:
    name = hashlib.sha256(f"{access.title}\0{target.name}".encode()).hexdigest()[:16]
    return state_root(os.environ) / "republish" / f"{name}.json"


class _Command:
    """Sends the messages and prints the result, once archive, target and position file are open."""

    def __init__(self, options: argparse.Namespace, settings: Settings, position: Position) -> None:
        self._options, self._settings, self._position = options, settings, position

    async def run(self, access: ArchiveAccess, selection: Selection, jobs: Sequence[SendingJob]) -> int:
        """Send the messages of ``jobs`` (one for each queue), or print with ``--dry-run`` how many there are. SIGTERM
        and SIGINT stop it after the messages in flight. Returns the exit code."""
        options, position = self._options, self._position
        credentials, tls = credentials_of(self._settings), tls_of(self._settings)
        listed = {queue.key: queue for queue in access.queues(None, hidden=False)}
        with Progress("republish", 0, quiet=options.json, unit="messages") as progress:
            run = Republish(access, position, selection, progress.update)
            if not (options.json or position.is_new):
                print_lines(repeats_text(position))
            await run.prepare(jobs, listed)
            if options.dry_run:
                self._print_plan(jobs)
                return 0
            for number in (signal.SIGTERM, signal.SIGINT):
                asyncio.get_running_loop().add_signal_handler(number, run.stop)
            limit = InflightLimit()
            sender = Sender(
                lambda address: RemotingUpstream(address, limit, tls=tls),
                credentials,
                group=GROUP,
                rate=options.rate,
            )
            try:
                report = await run.run(sender)
            finally:
                sender.close()
        self._print_report(report)
        if not report.is_complete:
            return EXIT_STOPPED
        return CorruptionError.exit_code if report.unreadable or report.refused else 0

    def _print_plan(self, jobs: Sequence[SendingJob]) -> None:
        """Print how many messages of each topic a run would send, and where to."""
        messages: Counter[tuple[str, str]] = Counter()
        queues: Counter[tuple[str, str]] = Counter()
        for job in jobs:
            place = job.sending.queue.topic, job.sending.to
            messages[place] += job.messages
            queues[place] += 1
        rows = [(topic, to, queues[topic, to], messages[topic, to]) for topic, to in sorted(messages)]
        if self._options.json:
            fields = "topic", "to", "queues", "messages"
            print_json({"dryRun": True, "topics": [dict(zip(fields, row, strict=True)) for row in rows]})
            return
        print_table(["topic", "to", "queues", "messages"], [list(row) for row in rows])
        print_lines(f"dry run: {counted(sum(messages.values()), 'message')} would be sent")

    def _print_report(self, report: Report) -> None:
        """Print how many messages were sent, refused, unreadable or perhaps sent twice, and which file says how far
        each queue was sent."""
        path = str(self._position.path)
        if self._options.json:
            print_json(
                camel_names(
                    {
                        "sent": dict(sorted(report.sent.items())),
                        "refused": report.refused,
                        "unreadable": report.unreadable,
                        "unanswered": report.unanswered,
                        "complete": report.is_complete,
                        "position": path,
                        "elapsed_s": round(report.elapsed_s, 3),
                    }
                )
            )
            return
        rate = report.count / report.elapsed_s if report.elapsed_s else 0.0
        how = "sent" if report.is_complete else "sent before the stop; the same command continues"
        print_lines(f"{counted(report.count, 'message')} {how}, {rate:,.0f}/s; position in {path}")
        if report.unanswered:
            print_lines(
                f"{counted(report.unanswered, 'send')} had no answer and {'was' if report.unanswered == 1 else 'were'} "
                "repeated: the target may have these messages twice"
            )
        if report.refused:
            print_lines(f"{counted(report.refused, 'message')} refused by the broker, and skipped")
        if report.unreadable:
            print_lines(f"{counted(report.unreadable, 'message')} unreadable in the archive, and skipped")
