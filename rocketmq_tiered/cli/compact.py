"""`tiered compact`: what compaction would join, save and cost, or join it with --apply."""

from __future__ import annotations

import argparse
import logging
import os
import tempfile
from dataclasses import replace
from pathlib import Path

from rocketmq_tiered.cli.arguments import add_archive, add_json, settings_of
from rocketmq_tiered.cli.repeated import repeat
from rocketmq_tiered.maintenance.compaction_job import (
    CompactionReport,
    compact_archive,
    dry_run,
    rewrite_options,
)
from rocketmq_tiered.maintenance.prices import Prices, read_prices
from rocketmq_tiered.process.allocator import TABLE_BYTES_MIN, return_freed_memory, trim
from rocketmq_tiered.process.loaded_archive import LoadedArchive, open_for_reading
from rocketmq_tiered.process.progress import Progress
from tiered.console import print_json, print_lines
from tiered.errors import CorruptionError, UsageError
from tiered.formats.page_decoder import decode_column_page
from tiered.settings.sections import Settings

logger = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, --apply, the age of what is joined, and the directory for objects in progress."""
    add_archive(parser)
    parser.add_argument("--apply", action="store_true", help="join objects (default: list only)")
    parser.add_argument(
        "--older-than",
        dest="compaction.min_age_ms",
        metavar="DURATION",
        help="join only what was committed before this time, such as 24h",
    )
    parser.add_argument(
        "--spool",
        metavar="DIRECTORY",
        default=os.environ.get("TMPDIR") or tempfile.gettempdir(),
        help="directory for objects in progress, up to compaction.spool_bytes (default: the temporary directory)",
    )
    parser.add_argument(
        "--prices", metavar="FILE", help="TOML file of prices (default: S3 Standard, us-east-1)"
    )
    parser.add_argument(
        "--every", metavar="DURATION", help="join again after each DURATION, such as 24h, until stopped"
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print what is or would be joined."""
    return_freed_memory(TABLE_BYTES_MIN)
    decode_column_page.may_load = False
    settings = settings_of(options).settings
    prices = read_prices(Path(options.prices)) if options.prices else Prices()
    if options.every is None:
        return _pass(options, settings, prices)
    if not options.apply:
        raise UsageError(
            "--every requires --apply, because it joins objects", hint="add --apply, or remove --every"
        )
    return repeat(options.every, "compaction", lambda _: _pass(options, settings, prices))


def _pass(options: argparse.Namespace, settings: Settings, prices: Prices) -> int:
    with open_for_reading(options.url, settings) as archive:
        if options.apply:
            report = _apply(archive, settings, Path(options.spool), prices, quiet=options.json)
        else:
            report = dry_run(archive.store, archive.state, settings, prices)
    if options.json:
        print_json(report.document())
    else:
        print_lines(*report.lines(archive.title))
    for found in report.unreadable:
        logger.error("%s", found.text)
    return CorruptionError.exit_code if report.unreadable else 0


def _apply(
    archive: LoadedArchive, settings: Settings, spool: Path, prices: Prices, *, quiet: bool
) -> CompactionReport:
    options = replace(rewrite_options(settings, spool), release=trim)
    with Progress("joined", 0, quiet=quiet) as progress:
        return compact_archive(
            archive.store, archive.state, settings, options, prices, report=progress.update
        )
