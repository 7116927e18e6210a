"""`tiered repair`: give a damaged archive a whole state again, from what is left of it. A dry run unless --apply."""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rocketmq_tiered.cli.arguments import (
    add_archive,
    add_json,
    add_state_dir,
    add_store,
    print_result,
    settings_of,
)
from rocketmq_tiered.maintenance.repair.repair import Repair, apply_repair, plan_repair
from rocketmq_tiered.process.broker_side import open_store_of, pin_directories, read_conf
from rocketmq_tiered.process.instance import default_state_dir
from rocketmq_tiered.process.progress import Progress
from tiered.broker_store.commit_log import LogFile
from tiered.broker_store.pins import PinKeeper
from tiered.catalog.archives import Archive, find_archive
from tiered.console import camel_names, counted
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_store
from tiered.settings.sections import Settings
from tiered.timestamps import wall_ms

EXIT_LOST = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, the broker's store and the state directory of `tiered run`, from which lost messages are
    archived again, and ``--apply``."""
    add_archive(parser)
    add_store(parser)
    add_state_dir(parser)
    parser.add_argument(
        "--apply", action="store_true", help="repair the archive (default: only print what a repair would do)"
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Repair the archive with ``--apply``, else plan the repair; print what is damaged and which messages are lost.
    Exit code 1 if messages are lost."""
    settings = settings_of(options).settings
    with ExitStack() as opened:
        root = open_store(options.url, StoreOptions(settings.object_store))
        opened.callback(root.close)
        archive = find_archive(root, settings.archive.cluster or None, settings.archive.broker or None)
        log = None
        if settings.broker.store_path:
            conf, pinned = read_conf(settings), _pinned(settings, archive)
            log = opened.enter_context(open_store_of(settings, conf, pinned)).commit_log
        progress = opened.enter_context(Progress("repair", 0, quiet=options.json))
        repair = plan_repair(
            archive.store,
            (archive.cluster, archive.broker),
            wall_ms(),
            log=log,
            applies=options.apply,
            progress=progress.update,
        )
        if options.apply and repair.is_needed:
            apply_repair(repair)
    title = f"{archive.cluster}/{archive.broker} in {options.url}"
    print_result(options, _document(repair, options), _lines(repair, title))
    return EXIT_LOST if repair.lost else 0


def _pinned(settings: Settings, archive: Archive) -> Callable[[], list[LogFile]]:
    """A function that lists the commitlog files that the broker has deleted, but that a stopped `tiered run` has kept
    (pinned)."""
    state_dir = settings.process.state_dir or default_state_dir(os.environ, archive.cluster, archive.broker)
    places, former = pin_directories(settings, read_conf(settings), Path(state_dir))
    return PinKeeper((*places, *former)).files


def _lines(repair: Repair, title: str) -> Iterator[str]:
    """The lines that are printed without ``--json``: what is damaged, lost or unknown, then what the repair has done,
    or would do with ``--apply``."""
    yield from (f"damaged: {note}" for note in repair.notes)
    yield from (f"LOST: {queue}: offsets {begin} to {end - 1}" for queue, begin, end in repair.lost)
    yield from (f"unknown: {what}" for what in repair.unknown)
    if not repair.is_needed:
        yield f"{title}: nothing to repair"
        return
    lost = f"{counted(repair.lost_messages, 'message')} lost" if repair.lost else "no message lost"
    kept = f", {counted(len(repair.quarantined), 'object')} kept unused" if repair.quarantined else ""
    done = (
        f"repaired as version {repair.version}, epoch {repair.epoch}"
        if repair.applies
        else "would be repaired"
    )
    more = "" if repair.applies else "; to repair, stop its tiered run, then add --apply"
    yield f"{title}: {done}: {lost}{kept}{more}"


def _document(repair: Repair, options: argparse.Namespace) -> dict[str, object]:
    """What is damaged, lost, unknown or quarantined, and what was done, as the JSON that ``--json`` prints."""
    names = ("topic", "queue_id", "generation", "begin_offset", "end_offset")
    lost = [
        camel_names(dict(zip(names, (*queue, begin, end), strict=True))) for queue, begin, end in repair.lost
    ]
    return {
        "applied": bool(options.apply and repair.is_needed),
        "version": repair.version,
        "epoch": repair.epoch,
        "damaged": repair.notes,
        "lost": lost,
        "unknown": repair.unknown,
        "quarantined": sorted(repair.quarantined),
    }
