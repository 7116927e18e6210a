"""`tiered gc`: list the garbage of an archive, or delete it with --apply."""

from __future__ import annotations

import argparse
import logging
import threading
import time
from typing import Any

from rocketmq_tiered.cli.arguments import add_archive, add_json, settings_of
from rocketmq_tiered.cli.repeated import repeat
from rocketmq_tiered.doctor.bucket_rules import what_stays
from rocketmq_tiered.maintenance.gc import Deletions, GcTask
from rocketmq_tiered.maintenance.prices import Prices
from rocketmq_tiered.process.loaded_archive import LoadedArchive, open_for_reading
from tiered.console import counted, print_json, print_lines, size_text
from tiered.errors import UsageError
from tiered.object_store.store_options import StoreOptions
from tiered.settings.load import LoadedSettings
from tiered.settings.rules_in_force import grace_in_force

logger = logging.getLogger(__name__)

LINE_INTERVAL_S = 10.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, --apply and the grace period."""
    add_archive(parser)
    parser.add_argument("--apply", action="store_true", help="delete (default: list only)")
    parser.add_argument(
        "--grace",
        dest="gc.grace_ms",
        metavar="DURATION",
        help="keep pending deletions this long, such as 72h",
    )
    parser.add_argument(
        "--every", metavar="DURATION", help="collect again after each DURATION, such as 24h, until stopped"
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print what is or would be deleted; 1 if some of it could not be."""
    loaded = settings_of(options)
    settings = loaded.settings
    if options.every is None:
        with open_for_reading(options.url, settings) as archive:
            return _collect(archive, loaded, options)
    if not options.apply:
        raise UsageError(
            "--every requires --apply, because it deletes objects", hint="add --apply, or remove --every"
        )

    def collect(stopped: threading.Event) -> None:
        with open_for_reading(options.url, settings) as archive:
            _collect(archive, loaded, options, stopped)

    return repeat(options.every, "garbage collection", collect)


def _collect(
    archive: LoadedArchive,
    loaded: LoadedSettings,
    options: argparse.Namespace,
    stopped: threading.Event | None = None,
) -> int:
    settings = loaded.settings
    deletions = Deletions(
        settings.gc.deletes_per_s,
        _Progress().update,
        (lambda: False) if stopped is None else stopped.is_set,
        time.sleep if stopped is None else stopped.wait,
    )
    task = GcTask(archive.store, grace_in_force(loaded, archive.state.settings), deletions=deletions)
    plan = task.plan(archive.state)
    if options.apply:
        task.step(archive.state, plan)
    month = Prices().storage(plan.delete_bytes)
    stays = what_stays(archive.url, StoreOptions(settings.object_store)) if plan.delete else []
    document: dict[str, Any] = {
        "applied": options.apply,
        "delete": sorted(plan.delete),
        "deleteBytes": plan.delete_bytes,
        "failed": plan.failed,
        "uploads": sorted({upload.key for upload in plan.uploads}),
        "kept": plan.kept,
        "stays": stays,
    }
    if options.json:
        print_json(document)
        return 1 if plan.failed else 0
    print_lines(*document["delete"], *(f"unfinished upload of {key}" for key in document["uploads"]))
    verb = "deleted" if options.apply else "dry run, add --apply to delete:"
    kept = ", ".join(f"{count:,} {reason}" for reason, count in sorted(plan.kept.items())) or "none"
    size = size_text(plan.delete_bytes)
    count = len(plan.delete) - len(plan.failed)
    print_lines(
        f"{archive.title}: {verb} {counted(count, 'object')}, {size} ({month:.2f} $ a month); kept: {kept}"
    )
    print_lines(*(f"the bucket's {line}" for line in stays))
    print_lines(*(f"not deleted: {key}: {reason}" for key, reason in sorted(plan.failed.items())))
    return 1 if plan.failed else 0


class _Progress:
    """A line in the log every ten seconds, with rate and time left."""

    def __init__(self) -> None:
        self._begun_s = self._line_s = time.monotonic()

    def update(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if now_s - self._line_s < LINE_INTERVAL_S or not done:
            return
        self._line_s = now_s
        rate = done / (now_s - self._begun_s)
        logger.info(
            "deleted %d of %d objects, %.0f a second, %.0f s left", done, total, rate, (total - done) / rate
        )


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
