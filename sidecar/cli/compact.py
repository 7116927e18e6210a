"""`tiered compact`: list what compaction would join, or join it with --apply."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

from maintenance.compaction_plan import CompactionLimits
from maintenance.compaction_round import PlannedRound, plan_rounds, run_round
from maintenance.compaction_run import CompactionCost, CompactionOptions
from sidecar.archive import Archive, open_for_reading
from sidecar.cli.arguments import add_archive, add_json, settings_of
from sidecar.progress import Progress
from tiered.catalog.catalog_reader import load
from tiered.catalog.garbage import settled_version
from tiered.catalog.state import CatalogState
from tiered.console import print_json, print_lines, size_text
from tiered.errors import UnavailableError
from tiered.formats.segment import BlockCodec
from tiered.settings.sections import Settings

CHANGED_MAX = 5
"""Rounds in a row without effect, because a merge of pages or another compaction has changed the archive."""


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
        help="directory for objects in progress, up to compaction.spool_bytes (default: %(default)s)",
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print what is or would be joined."""
    settings = settings_of(options).settings
    with open_for_reading(options.url, settings) as archive:
        if options.apply:
            document = _apply(archive, settings, Path(options.spool), quiet=options.json)
        else:
            rounds = _rounds(archive, archive.state, settings)
            document = _totals(rounds, CompactionCost()) | {"applied": False}
    if options.json:
        print_json(document)
        return 0
    sources, outputs, moved = document["objects"], document["newObjects"], size_text(document["messageBytes"])
    verb = "joined" if options.apply else "dry run, add --apply to join:"
    print_lines(f"{archive.title}: {verb} {sources:,} objects, {moved} of messages, to {outputs:,}")
    return 0


def _rounds(archive: Archive, state: CatalogState, settings: Settings) -> list[PlannedRound]:
    """The rounds of ``state``. Later ones may join their results again."""
    before_ms = archive.store.clock_ms() - settings.compaction.min_age_ms
    bound = settled_version(archive.store, state.version, before_ms) + 1
    return list(plan_rounds(archive.store, state, _limits(settings), before_version=bound))


def _limits(settings: Settings) -> CompactionLimits:
    own = settings.compaction
    return CompactionLimits(
        memory_bytes=own.memory_bytes, split_bytes=own.split_bytes, block_bytes=settings.offload.block_bytes,
        object_bytes_max=own.object_bytes, set_bytes_max=own.object_bytes, joined_bytes_min=own.object_bytes // 2,
    )  # fmt: skip


def _apply(archive: Archive, settings: Settings, spool: Path, *, quiet: bool) -> dict[str, Any]:
    codec = BlockCodec(settings.offload.compression_level, settings.offload.block_bytes)
    options = CompactionOptions(spool, settings.compaction.spool_bytes, codec)
    done: list[PlannedRound] = []
    cost, changed, state = CompactionCost(), 0, archive.state
    with Progress("joined", 0, quiet=quiet) as progress:
        while rounds := _rounds(archive, state, settings):
            planned = rounds[0]
            finished = _moved_bytes(done)
            progress.update(finished, finished + _moved_bytes(rounds))
            result = run_round(archive.store, state, planned, options, clock=_now_ms)
            state = load(archive.store)
            if result is None:
                changed += 1
                if changed == CHANGED_MAX:
                    raise UnavailableError(
                        "the archive's pages change faster than objects are joined", hint="try later"
                    )
                continue
            changed = 0
            done.append(planned)
            for name in vars(cost):
                setattr(cost, name, getattr(cost, name) + getattr(result.cost, name))
    return _totals(done, cost) | {"applied": True}


def _moved_bytes(rounds: list[PlannedRound]) -> int:
    return sum(int(planned.candidates.objects["raw_bytes"][planned.plan.sources].sum()) for planned in rounds)


def _totals(rounds: list[PlannedRound], cost: CompactionCost) -> dict[str, Any]:
    return {
        "rounds": len(rounds),
        "objects": sum(len(planned.plan.sources) for planned in rounds),
        "newObjects": sum(len(planned.plan.outputs) for planned in rounds),
        "messageBytes": _moved_bytes(rounds),
        "gets": cost.gets,
        "bytesRead": cost.bytes_read,
        "bytesSent": cost.bytes_sent,
        "bytesCopied": cost.bytes_copied,
    }


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
