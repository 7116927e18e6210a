"""`tiered verify`: check that everything the catalog names exists, is intact and in order."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from rocketmq_tiered.cli.arguments import add_archive, add_json, settings_of
from rocketmq_tiered.maintenance.throttle import YieldingStore
from rocketmq_tiered.process.loaded_archive import open_archive_store
from rocketmq_tiered.process.progress import Progress
from tiered.archive.verify import verify_archive
from tiered.archive.verify_progress import VerifyProgress
from tiered.console import camel_names, print_json, print_lines
from tiered.errors import UnavailableError, UsageError
from tiered.object_store.interface import ObjectStore
from tiered.settings.quantities import byte_count
from tiered.whole_file import writer_of

EXIT_ANOMALIES = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, depth, pace, strictness."""
    add_archive(parser)
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument(
        "--quick",
        action="store_true",
        help="prove by listing the archive that no commit and no object that it names is missing (default)",
    )
    depth.add_argument(
        "--sample",
        type=_share,
        metavar="SHARE",
        help="read all commits, and check every checksum and record of this share of the data objects, such as 5%%",
    )
    depth.add_argument(
        "--full", action="store_true", help="read all commits and data, and check every checksum and record"
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="file that keeps the progress: an interrupted verification continues, and the next quick one follows the "
        "chain from where the last clean one ended",
    )
    parser.add_argument(
        "--bytes-per-s", type=_size, metavar="N", help="read at most so many bytes a second, such as 20MiB"
    )
    parser.add_argument("--strict", action="store_true", help="report unreferenced objects as anomalies")
    add_json(parser)


def _share(text: str) -> float:
    """The value of an option as a share of 1, written as 0.05 or as 5%."""
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = 0.0
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, such as 5%")
    return share


def _size(text: str) -> int:
    found = byte_count(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 20MiB")
    return found


def _progress_in(path: Path | None, url: str) -> VerifyProgress:
    """The progress to continue from the file of ``--resume``; progress that is not saved without that option."""
    if path is None:
        return VerifyProgress(url)

    try:
        document = path.read_bytes() if path.exists() else None
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from error
    try:
        return VerifyProgress(url, document, writer_of(path))
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from error


def _limited(store: ObjectStore, bytes_per_s: int | None) -> ObjectStore:
    if not bytes_per_s:
        return store
    return YieldingStore(store, bytes_per_s=bytes_per_s, requests_per_s=1e6)


def execute(options: argparse.Namespace) -> int:
    """Print anomalies and leftovers. Exit code 1 for anomalies, 4 if something could not be checked."""
    settings, is_read = settings_of(options).settings, bool(options.full or options.sample)
    with (
        open_archive_store(options.url, settings) as archive,
        Progress("verify", 0, quiet=options.json, unit="" if is_read else "objects") as progress,
    ):
        store = _limited(archive.store, options.bytes_per_s)
        saved = _progress_in(options.resume, archive.store.url)
        report = verify_archive(
            store,
            depth="full" if is_read else "names",
            sample=options.sample or 1.0,
            progress=progress.update,
            saved=saved,
        )
    failed = bool(report.anomalies) or (options.strict and bool(report.leftovers))
    if options.json:
        print_json(camel_names(asdict(report)) | {"ok": not failed and not report.unchecked})
    else:
        print_lines(*report.lines(f"{archive.cluster}/{archive.broker} in {options.url}"))
    return EXIT_ANOMALIES if failed else UnavailableError.exit_code if report.unchecked else 0
