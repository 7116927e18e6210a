"""`tiered compact-keys`: what stays of topics whose keys are compacted, or drop the rest with --apply."""

import argparse
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from rocketmq_tiered.cli.arguments import (
    add_archive,
    add_json,
    add_rewriting,
    add_rules,
    print_result,
    settings_of,
)
from rocketmq_tiered.cli.repeated import add_every, once_or_every
from rocketmq_tiered.maintenance.compaction_job import rewrite_options
from rocketmq_tiered.maintenance.key_begins import Copying, CopyReport
from rocketmq_tiered.maintenance.key_job import MAP_SHARE, READ, WRITTEN, IsKeyed, compact_keys
from rocketmq_tiered.maintenance.key_rounds import Waiting
from rocketmq_tiered.process.allocator import TABLE_BYTES_MIN, return_freed_memory, trim
from rocketmq_tiered.process.broker_side import credentials_of, tls_of
from rocketmq_tiered.process.loaded_archive import (
    LoadedArchive,
    archived_topic_table,
    keyed_topics,
    open_for_reading,
    rules_in,
)
from rocketmq_tiered.process.progress import Progress
from tiered.archive.rewrite.result import RewriteOptions
from tiered.catalog.catalog_reader import load
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.clock import Clock
from tiered.remoting.client import BrokerClient
from tiered.settings.load import LoadedSettings
from tiered.settings.rules_in_force import with_rules_in_force
from tiered.settings.sections import Settings
from tiered.settings.topic_rules import is_compacted

TIMEOUT_S = 30.0
OFF = "the broker compacts their topics, but here a rule or key_compaction.from_broker says not to"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, ``--apply`` and ``--every``, which topics are compacted and from which age on, and where
    objects and keys are kept while they are made."""
    add_archive(parser)
    add_every(parser, "compact")
    parser.add_argument(
        "--topic", metavar="TOPIC", help="only this topic, if a rule says that its keys are compacted"
    )
    add_rewriting(parser, "key_compaction", "compact", also=", and for keys that do not fit into memory")
    parser.add_argument(
        "--from-broker",
        metavar="HOST:PORT",
        help="first copy older messages that only the broker at this address has, in its compaction log",
    )
    add_rules(parser)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print what is or would be dropped."""
    return_freed_memory(TABLE_BYTES_MIN)
    loaded = settings_of(options)
    return once_or_every(options, "key compaction", lambda _: _pass(options, loaded))


def _pass(options: argparse.Namespace, loaded: LoadedSettings) -> int:
    """Run one key compaction with ``--apply``, else print its plan. With ``--from-broker`` older messages, which only
    the compaction log of that broker has, are first copied into the archive."""
    with open_for_reading(options.url, loaded.settings, is_rewritten=options.apply) as archive:
        settings = with_rules_in_force(loaded, archive.state.settings, options.rules)
        rule_of = rules_in(archive.store, archive.state, settings)
        is_keyed = keyed_topics(rule_of, settings, options.topic)
        writing = replace(rewrite_options(settings, Path(options.spool)), release=trim)
        copied = _copied(options, archive, settings, writing, is_keyed) if options.from_broker else None
        state = load(archive.store) if copied and copied.is_applied else archive.state
        with (
            Progress(READ, 0, quiet=options.json) as read,
            Progress(WRITTEN, 0, quiet=options.json) as written,
        ):
            bars = {READ: read, WRITTEN: written}
            report = compact_keys(
                archive.store,
                state,
                settings,
                writing,
                is_keyed,
                apply=options.apply,
                report=lambda what, done, total: bars[what].update(done, total),
            )
        table = archived_topic_table(archive.store, state)
        switched_off = [
            (Waiting(queue, OFF), None)
            for queue, _ in state.queues()
            if is_compacted(table.get(queue.topic)) and not rule_of(queue.topic).key_compaction
        ]
        report = replace(report, waiting=(*report.waiting, *switched_off))
    document = report.document() | ({"copied": copied.document()} if copied else {})
    lines = [*(copied.lines(archive.title) if copied else ()), *report.lines(archive.title)]
    print_result(options, document, lines)
    return 0


def _copied(
    options: argparse.Namespace,
    archive: LoadedArchive,
    settings: Settings,
    writing: RewriteOptions,
    is_keyed: IsKeyed,
) -> CopyReport:
    """Copy from the compaction log of the broker at ``--from-broker`` the messages that are older than the archive's
    first ones, to the begin of their queues; without ``--apply`` only count them."""
    client = BrokerClient(options.from_broker, TIMEOUT_S, credentials_of(settings), tls_of(settings))
    with closing(client), Progress("copied", 0, quiet=options.json, unit="offsets") as progress:
        maintenance = MaintenanceCommit.opened(
            archive.store, archive.state, "compact-keys", Clock(wall_ms=archive.store.clock_ms)
        )
        memory = settings.key_compaction.memory_bytes // MAP_SHARE
        min_age_ms = settings.key_compaction.min_age_ms
        copying = Copying(maintenance, client, writing.spool_directory, memory, writing.codec, min_age_ms)
        return copying.all(options.from_broker, is_keyed, progress.update, apply=options.apply)
