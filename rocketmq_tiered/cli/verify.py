"""`tiered verify`: check that everything the catalog names exists, is intact and in order."""

import argparse
from dataclasses import asdict
from pathlib import Path

from rocketmq_tiered.cli.arguments import add_archive, add_json, settings_of
from rocketmq_tiered.maintenance.throttle import YieldingStore
from rocketmq_tiered.process.allocator import return_freed_memory
from rocketmq_tiered.process.loaded_archive import open_archive_store
from rocketmq_tiered.process.progress import Progress
from tiered.archive.verify import verify_archive
from tiered.archive.verify_progress import VerifyProgress
from tiered.console import camel_names, print_json, print_lines
from tiered.errors import UsageError
from tiered.object_store.interface import ObjectStore
from tiered.settings.quantities import byte_count
from tiered.whole_file import writer_of

MAPPED_BYTES_MIN, KEPT_BYTES = 16 << 20, 32 << 20
"""Of the allocator: 140 MiB less with 100,000 queues, at the same processor time, which smaller ones would raise."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, how thoroughly it is checked, how fast it is read, and what counts as an anomaly."""
    add_archive(parser)
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument(
        "--quick",
        action="store_true",
        help="only list the archive, to see whether commits, or objects that the catalog names, are missing (default)",
    )
    depth.add_argument(
        "--sample",
        type=_share,
        metavar="SHARE",
        help="read all commits and a share of the data objects, such as 5%%, and check each checksum and record",
    )
    depth.add_argument(
        "--full",
        action="store_true",
        help="read all commits and data objects, and check each checksum and record",
    )
    parser.add_argument(
        "--resume",
        type=Path,
        metavar="FILE",
        help="keep the progress in this file: an interrupted verification continues there, and the next quick one "
        "checks only commits since the last one that found no anomaly",
    )
    parser.add_argument(
        "--bytes-per-s", type=_size, metavar="N", help="read at most N bytes a second, such as 20MiB"
    )
    parser.add_argument(
        "--strict", action="store_true", help="report objects that no commit names as anomalies"
    )
    add_json(parser)


def _share(text: str) -> float:
    """The value of ``--sample`` as a share of 1, written as 0.05 or as 5%. Raises ArgumentTypeError, which argparse
    prints with the name of the option."""
    try:
        share = float(text.removesuffix("%")) / 100 if text.endswith("%") else float(text)
    except ValueError:
        share = 0.0  # refused like a share that is not positive
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share, such as 5%")
    return share


def _size(text: str) -> int:
    size = byte_count(text)
    if size is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size, such as 20MiB")
    return size


def _progress_in(path: Path | None, url: str) -> VerifyProgress:
    """The progress of an earlier verification of the archive at ``url``, from the file of ``--resume``; a new one if
    there is no such file. Without ``--resume`` (``path`` None) progress is not saved. Raises UsageError for an
    unreadable file, or one of another archive."""
    if path is None:
        return VerifyProgress(url)

    try:
        document = path.read_bytes() if path.exists() else None
    except OSError as error:
        raise UsageError(
            f"cannot read the progress file {path}: {error.strerror}", hint="name another file with --resume"
        ) from error
    try:
        return VerifyProgress(url, document, writer_of(path))
    except UsageError as error:
        raise UsageError(f"{path}: {error.message}", hint=error.hint) from error


def execute(options: argparse.Namespace) -> int:
    """Check the archive, and print anomalies and objects that no commit names. Returns the exit code of the report."""
    settings, is_read = settings_of(options).settings, bool(options.full or options.sample)
    return_freed_memory(MAPPED_BYTES_MIN, KEPT_BYTES)
    with (
        open_archive_store(options.url, settings) as archive,
        Progress("verify", 0, quiet=options.json, unit="" if is_read else "objects") as progress,
    ):
        store: ObjectStore = (
            YieldingStore(archive.store, bytes_per_s=options.bytes_per_s, requests_per_s=1e6)
            if options.bytes_per_s
            else archive.store
        )
        report = verify_archive(
            store,
            depth="full" if is_read else "names",
            sample=options.sample or 1.0,
            progress=progress.update,
            saved=_progress_in(options.resume, archive.store.url),
        )
    code = report.exit_code(strict=options.strict, has_ring=settings.object_store.encrypts)
    if options.json:
        print_json(camel_names(asdict(report)) | {"ok": not code})
    else:
        print_lines(*report.lines(f"{archive.cluster}/{archive.broker} in {options.url}"))
    return code
