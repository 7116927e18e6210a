"""`tiered-spark compact-keys`: keep the last message of each key, on many machines."""

import argparse

from rocketmq_tiered.cli.arguments import add_rules, print_result, settings_of
from rocketmq_tiered.process.loaded_archive import keyed_topics, open_for_reading, rules_in
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.spark.cli.arguments import add_compaction, session_of
from rocketmq_tiered.spark.jobs.compact import compact_keys
from tiered.object_store.open_store import check_addresses
from tiered.settings.rules_in_force import with_rules_in_force


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``compact-keys``."""
    add_compaction(parser, "key_compaction.min_age_ms")
    parser.add_argument(
        "--topic", metavar="TOPIC", help="only this topic, if a rule says that its keys are compacted"
    )
    add_rules(parser)


def execute(options: argparse.Namespace) -> int:
    """Keep only the latest message of each key, by Spark tasks, or without ``--apply`` count what that would drop."""
    loaded = settings_of(options)
    check_addresses(options.url, loaded.settings.object_store.endpoint_url)
    with open_for_reading(options.url, loaded.settings, is_rewritten=options.apply) as archive:
        settings = with_rules_in_force(loaded, archive.state.settings, options.rules)
        with Progress("compact-keys", 0, quiet=options.json) as progress:
            report = compact_keys(
                lambda: session_of(options, "compact-keys"),
                archive,
                settings,
                keyed_topics(rules_in(archive.store, archive.state, settings), settings, options.topic),
                apply=options.apply,
                spool=options.spool,
                report=lambda what, done, total: progress.update(done, total, what),
            )
        print_result(options, report.document(), report.lines(archive.title))
    return 0
