"""`tiered verify`: check that everything the catalog names exists, is intact and in order."""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import asdict

from sidecar.archive import open_for_reading
from sidecar.cli.arguments import add_archive, add_json, settings_of
from sidecar.logs import log_plain
from sidecar.progress import LINE_INTERVAL_S, Progress
from tiered.console import camel_names, print_json, print_lines
from tiered.errors import UsageError
from tiered.flat_file.verify import verify_archive
from tiered.flat_file.verify_names import verify_names

logger = logging.getLogger(__name__)

EXIT_ANOMALIES = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, depth, strictness."""
    add_archive(parser)
    parser.add_argument(
        "--full", action="store_true", help="read all commits and data, and check every checksum and record"
    )
    parser.add_argument(
        "--since-version", type=int, metavar="N",
        help="without --full: follow the chain of commits from version N (default: from the newest root)",
    )  # fmt: skip
    parser.add_argument("--strict", action="store_true", help="report unreferenced objects as anomalies")
    add_json(parser)


class _Listed:
    """A line in the log every ten seconds, with rate and time left."""

    def __init__(self, is_quiet: bool) -> None:
        self._is_quiet = is_quiet
        self._begun_s = self._line_s = time.monotonic()

    def update(self, done: int, total: int) -> None:
        """``done`` of ``total`` objects are listed."""
        now_s = time.monotonic()
        if self._is_quiet or not done or now_s - self._line_s < LINE_INTERVAL_S:
            return
        self._line_s = now_s
        rate = done / (now_s - self._begun_s)
        logger.info(
            "verify: %d of %d objects, %.0f a second, %.0f s left", done, total, rate, (total - done) / rate
        )


def execute(options: argparse.Namespace) -> int:
    """Print anomalies and leftovers. Exit code 1 for anomalies."""
    if options.full and options.since_version is not None:
        raise UsageError("--full and --since-version exclude each other", hint="--full reads every commit")
    settings = settings_of(options).settings
    log_plain(settings.process.log_level)
    with (
        open_for_reading(options.url, settings) as archive,
        Progress("verify", 0, quiet=options.json) as progress,
    ):
        if options.full:
            report = verify_archive(archive.store, full=True, progress=progress.update)
        else:
            report = verify_names(
                archive.store, since_version=options.since_version, progress=_Listed(options.json).update
            )
    failed = bool(report.anomalies) or (options.strict and bool(report.leftovers))
    if options.json:
        print_json(camel_names(asdict(report)) | {"ok": not failed})
    else:
        print_lines(*report.lines(archive.title))
    return EXIT_ANOMALIES if failed else 0
