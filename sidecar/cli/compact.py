"""`tiered compact`: what compaction would join, save and cost, or join it with --apply."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from maintenance.compaction_forecast import CompactionForecast, forecast
from maintenance.compaction_plan import CompactionLimits
from maintenance.compaction_round import PlannedRound, plan_rounds, run_round
from maintenance.compaction_run import CompactionCost, CompactionOptions
from maintenance.prices import Prices, read_prices
from sidecar.archive import Archive, open_for_reading
from sidecar.cli.arguments import add_archive, add_json, settings_of
from sidecar.progress import Progress
from tiered.catalog.catalog_reader import load
from tiered.catalog.garbage import settled_version
from tiered.catalog.state import CatalogState
from tiered.console import camel_names, print_json, print_lines, size_text
from tiered.errors import UnavailableError
from tiered.formats.segment import BlockCodec
from tiered.settings.sections import Settings

DAY_MS = 24 * 3_600_000
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
    parser.add_argument(
        "--prices", metavar="FILE", help="TOML file of prices (default: S3 Standard, us-east-1)"
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print what is or would be joined."""
    settings = settings_of(options).settings
    prices = read_prices(Path(options.prices)) if options.prices else Prices()
    with open_for_reading(options.url, settings) as archive:
        if options.apply:
            rounds, cost = _apply(archive, settings, Path(options.spool), quiet=options.json)
        else:
            rounds, cost = forecast(_rounds(archive, archive.state, settings)), CompactionCost()
    grace_days = settings.gc.grace_ms / DAY_MS
    if options.json:
        print_json(_document(rounds, cost, prices, grace_days) | {"applied": options.apply})
    else:
        print_lines(
            *_lines(archive.title, rounds, cost, prices, grace_days=grace_days, applied=options.apply)
        )
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


def _apply(
    archive: Archive, settings: Settings, spool: Path, *, quiet: bool
) -> tuple[CompactionForecast, CompactionCost]:
    codec = BlockCodec(settings.offload.compression_level, settings.offload.block_bytes)
    options = CompactionOptions(spool, settings.compaction.spool_bytes, codec)
    done, cost, changed, state = CompactionForecast(), CompactionCost(), 0, archive.state
    with Progress("joined", 0, quiet=quiet) as progress:
        while rounds := _rounds(archive, state, settings):
            report = _report(progress, done.message_bytes, forecast(rounds).message_bytes)
            report(0)
            result = run_round(
                archive.store, state, rounds[0], replace(options, report=report), clock=_now_ms
            )
            state = load(archive.store)
            if result is None:
                changed += 1
                if changed == CHANGED_MAX:
                    raise UnavailableError(
                        "the archive's pages change faster than objects are joined", hint="try later"
                    )
                continue
            changed = 0
            done += forecast(rounds[:1])
            for name in vars(cost):
                setattr(cost, name, getattr(cost, name) + getattr(result.cost, name))
    return done, cost


def _report(progress: Progress, before_bytes: int, left_bytes: int) -> Callable[[int], None]:
    return lambda done_bytes: progress.update(before_bytes + done_bytes, before_bytes + left_bytes)


def _document(
    rounds: CompactionForecast, cost: CompactionCost, prices: Prices, grace_days: float
) -> dict[str, Any]:
    """The forecast, and what was done of it."""
    saved = {"readerGetsSaved": rounds.gets_saved, "savingEachRead": rounds.saving(prices)}
    price = {"price": rounds.price(prices, grace_days), "currency": prices.currency}
    done = {name: getattr(cost, name) for name in ("gets", "bytes_read", "bytes_sent", "bytes_copied")}
    documents: dict[str, Any] = camel_names(asdict(rounds) | {"done": camel_names(done)})
    return documents | saved | price


def _lines(
    title: str,
    rounds: CompactionForecast,
    cost: CompactionCost,
    prices: Prices,
    *,
    grace_days: float,
    applied: bool,
) -> list[str]:
    verb = "joined" if applied else "dry run, add --apply to join:"
    moved = size_text(rounds.message_bytes)
    lines = [f"{title}: {verb} {rounds.objects:,} objects, {moved} of messages, to {rounds.new_objects:,}"]
    if not rounds.rounds:
        return lines
    if applied:
        through = (
            f"{cost.gets:,} GETs, {size_text(cost.bytes_read)} read, {size_text(cost.bytes_sent)} written"
        )
        lines.append(f"moved: {through}, {size_text(cost.bytes_copied)} copied inside the store")
    else:
        size = f"{size_text(rounds.read_bytes)} to read and write again"
        lines.append(f"to move: {size}, {size_text(rounds.copied_bytes)} to copy inside the store")
    lines.append(
        f"reading every queue once: {rounds.reader_gets:,} GETs before, {rounds.new_reader_gets:,} after, "
        f"{prices.currency} {rounds.saving(prices):.4f} saved each time"
    )
    lines.append(
        f"cost: {prices.currency} {rounds.price(prices, grace_days):.4f}, for about {rounds.gets:,} GETs, "
        f"{rounds.puts:,} PUTs, and {grace_days:g} days of {size_text(rounds.source_bytes)} that gc deletes then"
    )
    return lines


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
