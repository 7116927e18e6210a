"""`tiered compact`: what compaction would join, save and cost, or join it with --apply."""

import argparse
import logging
from dataclasses import replace
from pathlib import Path

from rocketmq_tiered.cli.arguments import (
    add_archive,
    add_json,
    add_prices,
    add_rewriting,
    print_result,
    settings_of,
)
from rocketmq_tiered.cli.repeated import add_every, once_or_every
from rocketmq_tiered.maintenance.compaction_job import (
    compact_archive,
    dry_run,
    rewrite_options,
)
from rocketmq_tiered.maintenance.cost import Prices, read_prices
from rocketmq_tiered.process.allocator import TABLE_BYTES_MIN, return_freed_memory, trim
from rocketmq_tiered.process.loaded_archive import open_for_reading
from rocketmq_tiered.process.progress import Progress
from tiered.errors import CorruptionError
from tiered.formats.page_decoder import decode_column_page
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, ``--apply`` and ``--every``, the least age of joined objects, and where they are made."""
    add_archive(parser)
    add_every(parser, "join objects")
    add_rewriting(parser, "compaction", "join")
    add_prices(parser)
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print what is or would be joined."""
    return_freed_memory(TABLE_BYTES_MIN)
    decode_column_page.may_load = False
    settings = settings_of(options).settings
    prices = read_prices(Path(options.prices)) if options.prices else Prices()
    return once_or_every(options, "compaction", lambda _: _pass(options, settings, prices))


def _pass(options: argparse.Namespace, settings: Settings, prices: Prices) -> int:
    """Run one compaction with ``--apply``, else print its plan. Returns the exit code: 1 if an object that should be
    joined is unreadable."""
    with open_for_reading(options.url, settings, is_rewritten=options.apply) as archive:
        if options.apply:
            writing = replace(rewrite_options(settings, Path(options.spool)), release=trim)
            with Progress("joined", 0, quiet=options.json) as progress:
                report = compact_archive(
                    archive.store, archive.state, settings, writing, prices, report=progress.update
                )
        else:
            report = dry_run(archive.store, archive.state, settings, prices)
    print_result(options, report.document(), report.lines(archive.title))
    for unreadable in report.unreadable:
        logger.error("%s", unreadable.text)
    return CorruptionError.exit_code if report.unreadable else 0
