"""`tiered compact-keys`: what stays of topics whose keys are compacted, or drop the rest with --apply."""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from rocketmq_tiered.cli.arguments import add_archive, add_json, add_rules, settings_of
from rocketmq_tiered.cli.repeated import repeat
from rocketmq_tiered.maintenance.compaction_job import rewrite_options
from rocketmq_tiered.maintenance.key_job import compact_keys
from rocketmq_tiered.process.allocator import TABLE_BYTES_MIN, return_freed_memory, trim
from rocketmq_tiered.process.archive_rules import rules_of
from rocketmq_tiered.process.loaded_archive import open_for_reading
from tiered.console import print_json, print_lines
from tiered.errors import UsageError
from tiered.settings.load import LoadedSettings
from tiered.settings.rules_in_force import with_rules_in_force


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, --apply, the age of what is compacted, and the directory for objects in progress and keys."""
    add_archive(parser)
    parser.add_argument("--apply", action="store_true", help="compact (default: list only)")
    parser.add_argument("--topic", metavar="TOPIC", help="only this topic, if its keys are compacted")
    parser.add_argument(
        "--older-than",
        dest="key_compaction.min_age_ms",
        metavar="DURATION",
        help="compact only what was committed before this time, such as 72h",
    )
    parser.add_argument(
        "--spool",
        metavar="DIRECTORY",
        default=os.environ.get("TMPDIR") or tempfile.gettempdir(),
        help="directory for objects in progress, up to compaction.spool_bytes, and for keys that exceed memory "
        "(default: the temporary directory)",
    )
    parser.add_argument(
        "--every", metavar="DURATION", help="compact again after each DURATION, such as 24h, until stopped"
    )
    add_rules(parser)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print what is or would be dropped."""
    return_freed_memory(TABLE_BYTES_MIN)
    loaded = settings_of(options)
    if options.every is None:
        return _pass(options, loaded)
    if not options.apply:
        raise UsageError("--every compacts: it requires --apply", hint="add --apply, or remove --every")
    return repeat(options.every, "key compaction", lambda _: _pass(options, loaded))


def _pass(options: argparse.Namespace, loaded: LoadedSettings) -> int:
    with open_for_reading(options.url, loaded.settings) as archive:
        settings = with_rules_in_force(loaded, archive.state.settings, options.rules)
        rule_of = rules_of(archive, settings)
        if options.topic is not None and not rule_of(options.topic).key_compaction:
            raise UsageError(
                f"keys of topic {options.topic} are not compacted",
                hint='set key_compaction = "on" in a [[topics.rules]] entry of the archive\'s owner',
            )
        writing = replace(rewrite_options(settings, Path(options.spool)), release=trim)
        report = compact_keys(
            archive.store, archive.state, settings, writing,
            lambda topic: options.topic in (None, topic) and rule_of(topic).key_compaction,
            apply=options.apply,
        )  # fmt: skip
    if options.json:
        print_json(report.document())
    else:
        print_lines(*report.lines(archive.title))
    return 0
