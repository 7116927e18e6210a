"""`tiered verify`: check that everything the catalog names exists, is intact and in order."""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import asdict
from pathlib import Path

from rocketmq_tiered.cli.arguments import add_archive, add_json, settings_of
from rocketmq_tiered.process.loaded_archive import open_for_reading
from rocketmq_tiered.process.logs import log_plain
from rocketmq_tiered.process.progress import LINE_INTERVAL_S, Progress
from tiered.archive.verify import verify_archive
from tiered.archive.verify_names import verify_names
from tiered.archive.verify_progress import VerifyProgress
from tiered.console import camel_names, print_json, print_lines
from tiered.errors import UnavailableError, UsageError
from tiered.whole_file import replace_whole

logger = logging.getLogger(__name__)

EXIT_ANOMALIES = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, depth, strictness."""
    add_archive(parser)
    parser.add_argument(
        "--full", action="store_true", help="read all commits and data, and check every checksum and record"
    )
    parser.add_argument(
        "--progress", type=Path, metavar="FILE",
        help="without --full: keep the progress there; an interrupted verification continues, and the next one follows "
        "the chain from where the last clean one ended",
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


def _progress_in(path: Path | None, url: str) -> VerifyProgress:
    if path is None:
        return VerifyProgress(url)

    def write(document: bytes) -> None:
        try:
            replace_whole(path, document)
        except OSError as error:
            raise UnavailableError(f"cannot write {path}: {error.strerror}") from error

    try:
        document = path.read_bytes() if path.exists() else None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    try:
        return VerifyProgress(url, document, write)
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from error


def execute(options: argparse.Namespace) -> int:
    """Print anomalies and leftovers. Exit code 1 for anomalies."""
    if options.progress is not None and options.full:
        raise UsageError(
            "--full and --progress exclude each other",
            hint="--full always reads the whole archive: give one of them",
        )
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
                archive.store,
                progress=_Listed(options.json).update,
                saved=_progress_in(options.progress, archive.store.url),
            )
    failed = bool(report.anomalies) or (options.strict and bool(report.leftovers))
    if options.json:
        print_json(camel_names(asdict(report)) | {"ok": not failed})
    else:
        print_lines(*report.lines(archive.title))
    return EXIT_ANOMALIES if failed else 0
