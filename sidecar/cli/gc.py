"""`tiered gc`: list the garbage of an archive, or delete it with --apply."""

from __future__ import annotations

import argparse
import time
from typing import Any

from sidecar.archive import open_for_reading
from sidecar.cli.arguments import add_archive, add_json, settings_of
from tiered.catalog.garbage import run_gc
from tiered.console import print_json, print_lines, size_text


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
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print what is or would be deleted."""
    settings = settings_of(options).settings
    with open_for_reading(options.url, settings) as archive:
        plan = run_gc(
            archive.store,
            archive.state,
            apply=options.apply,
            grace_ms=settings.gc.grace_ms,
            diverged_grace_ms=settings.gc.diverged_grace_ms,
            clock=_now_ms,
        )
    document: dict[str, Any] = {
        "applied": options.apply,
        "delete": sorted(plan.delete),
        "deleteBytes": plan.delete_bytes,
        "kept": plan.kept,
    }
    if options.json:
        print_json(document)
        return 0
    print_lines(*document["delete"])
    verb = "deleted" if options.apply else "dry run, add --apply to delete:"
    kept = ", ".join(f"{count:,} {reason}" for reason, count in sorted(plan.kept.items())) or "none"
    size = size_text(plan.delete_bytes)
    print_lines(f"{archive.title}: {verb} {len(plan.delete)} objects, {size}; kept: {kept}")
    return 0


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
