"""`tiered gc`: list the garbage of an archive, or delete it with --apply."""

import argparse
import threading
from typing import Any

from rocketmq_tiered.cli.arguments import add_archive, add_json, settings_of
from rocketmq_tiered.cli.repeated import add_every, once_or_every
from rocketmq_tiered.doctor.bucket_rules import what_stays
from rocketmq_tiered.maintenance.cost import Prices
from rocketmq_tiered.maintenance.gc import Deletions, GcTask
from rocketmq_tiered.process.loaded_archive import LoadedArchive, open_for_reading
from rocketmq_tiered.process.progress import Progress
from tiered.console import counted, print_json, print_lines, size_text
from tiered.object_store.interface import StoreOptions
from tiered.settings.load import LoadedSettings
from tiered.settings.rules_in_force import grace_in_force


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, ``--apply`` and ``--every``, and the grace period."""
    add_archive(parser)
    add_every(parser, "delete")
    parser.add_argument(
        "--grace",
        dest="gc.grace_ms",
        metavar="DURATION",
        help="keep garbage this long before it is deleted, such as 72h",
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print which objects are deleted, or would be without ``--apply``. Exit code 1 if some could not be deleted, or
    are kept because no commit explains them."""
    loaded = settings_of(options)

    def collect(stopped: threading.Event) -> int:
        with (
            open_for_reading(options.url, loaded.settings) as archive,
            Progress("gc", 0, quiet=options.json, unit="objects") as progress,
        ):
            return _collect(archive, loaded, options, progress, stopped)

    return once_or_every(options, "garbage collection", collect)


def _collect(
    archive: LoadedArchive,
    loaded: LoadedSettings,
    options: argparse.Namespace,
    progress: Progress,
    stopped: threading.Event,
) -> int:
    """Run one garbage collection with ``--apply``, else plan it, and print it. ``stopped`` ends it between two objects.
    Returns 1 if an object that is garbage was not deleted, or objects are kept that no commit explains."""
    settings = loaded.settings
    deletions = Deletions(settings.gc.deletes_per_s, progress.update, stopped.is_set, stopped.wait)
    task = GcTask(archive.store, grace_in_force(loaded, archive.state.settings), deletions=deletions)
    plan = task.plan(archive.state)
    if options.apply:
        task.step(archive.state, plan)
    month = Prices().storage(plan.delete_bytes)
    # A bucket with versioning or an object lock still stores what was deleted.
    stays = what_stays(archive.url, StoreOptions(settings.object_store)) if plan.delete else []
    document: dict[str, Any] = {
        "applied": options.apply,
        "delete": sorted(plan.delete),
        "deleteBytes": plan.delete_bytes,
        "failed": plan.failed,
        "uploads": sorted({upload.key for upload in plan.uploads}),
        "kept": plan.kept,
        "halted": plan.halted,
        "unexplained": {key: found._asdict() for key, found in sorted(plan.unexplained.items())},
        "stays": stays,
    }
    code = 1 if plan.failed or plan.unexplained or plan.halted else 0
    if options.json:
        print_json(document)
        return code
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
    for key, found in sorted(plan.unexplained.items()):
        print_lines(f"kept: {key}: {counted(found.messages, 'message')} that no commit names: {found.why}")
    if plan.unexplained:
        print_lines(
            "`tiered repair ARCHIVE_URL`, a dry run, says which of these objects it brings back; with --apply it keeps "
            "the others in quarantine (tiered ls --quarantine), where gc deletes only what a later commit explains"
        )
    if plan.halted:
        print_lines(f"{archive.title}: nothing is deleted: {plan.halted}")
    return code
