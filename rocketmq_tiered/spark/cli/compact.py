"""`tiered-spark compact`: join small objects of an archive on many machines."""

import argparse
import sys
from pathlib import Path

from rocketmq_tiered.cli.arguments import add_prices, print_result, settings_of
from rocketmq_tiered.maintenance.cost import read_prices
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.spark.cli.arguments import add_compaction, session_of
from rocketmq_tiered.spark.jobs.compact import compact
from tiered.console import print_lines
from tiered.errors import CorruptionError
from tiered.object_store.open_store import check_addresses


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``compact``."""
    add_compaction(parser, "compaction.min_age_ms")
    add_prices(parser)


def execute(options: argparse.Namespace) -> int:
    """Join small objects of an archive by Spark tasks, or without ``--apply`` print what would be joined. Exit code 1
    if an object that should be joined is unreadable."""
    settings = settings_of(options).settings
    check_addresses(options.url, settings.object_store.endpoint_url)
    with Progress("compact", 0, quiet=options.json) as progress:
        compaction = compact(
            lambda: session_of(options, "compact"),
            options.url,
            settings,
            apply=options.apply,
            spool=options.spool,
            prices=read_prices(Path(options.prices)) if options.prices else None,
            report=progress.update,
        )
    title = f"{compaction.cluster}/{compaction.broker} in {options.url}"
    print_result(options, compaction.report.document(), compaction.report.lines(title))
    print_lines(*(one.text for one in compaction.report.unreadable), file=sys.stderr)
    return CorruptionError.exit_code if compaction.report.unreadable else 0
