"""`tiered expire`: lists messages past their time to live, or a topic to erase, and expires them with --apply."""

import argparse
from typing import Any

from rocketmq_tiered.cli.arguments import add_archive, add_json, add_rules, settings_of
from rocketmq_tiered.cli.repeated import add_every, once_or_every
from rocketmq_tiered.maintenance.cost import Prices
from rocketmq_tiered.maintenance.expire import Erasure, ExpiryPass, ExpiryTask
from rocketmq_tiered.process.loaded_archive import LoadedArchive, open_for_reading, rules_in
from tiered.console import counted, print_json, print_lines, size_text
from tiered.errors import UsageError
from tiered.settings.load import LoadedSettings
from tiered.settings.rules_in_force import with_rules_in_force


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, ``--apply`` and ``--every``, ``--yes``, and the topic to erase."""
    add_archive(parser)
    add_every(parser, "expire")
    parser.add_argument(
        "--yes",
        action="store_true",
        help="expire messages even if they are more than retention.max_share of the archive",
    )
    parser.add_argument(
        "--topic", metavar="TOPIC", help="with --all: erase this topic, whatever the age of its messages"
    )
    parser.add_argument(
        "--generation",
        type=int,
        metavar="G",
        help="with --topic: erase only generation G of a topic that was deleted and created again",
    )
    add_rules(parser)
    parser.add_argument("--all", action="store_true", help="with --topic: erase all messages of the topic")
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Print which messages expire, by rule or because their topic is erased; with ``--apply``, expire them."""
    if options.topic is not None and not options.all:
        raise UsageError("--topic erases a whole topic: it requires --all", hint="add --all")
    if options.topic is None and (options.all or options.generation is not None):
        raise UsageError("--all and --generation erase a topic, but none is named", hint="add --topic TOPIC")
    loaded = settings_of(options)
    if options.every is not None and (not options.apply or options.yes or options.all):
        raise UsageError(
            "--every requires --apply, and excludes --yes and --all",
            hint="give --apply without --yes and --all: retention.max_share limits each pass",
        )
    return once_or_every(options, "expiry", lambda _: _pass(options, loaded))


def _pass(options: argparse.Namespace, loaded: LoadedSettings) -> int:
    """Run one expiry with ``--apply``, else print its plan. Returns 1 if nothing was changed, because another pass
    committed first. Raises UsageError if more than the allowed share of the archive would expire."""
    erase = Erasure(options.topic, options.generation) if options.all else None
    with open_for_reading(options.url, loaded.settings) as archive:
        settings = with_rules_in_force(loaded, archive.state.settings, options.rules)
        task = ExpiryTask(
            archive.store,
            settings,
            lambda _state: rules_in(archive.store, archive.state, settings),
            erase=erase,
            is_unlimited=options.yes,
        )
        expiry = task.plan(archive.state)
        share = expiry.plan.share
        is_braked = task.is_too_much(expiry)
        if options.apply and not is_braked:
            task.step(archive.state, expiry)
        if options.json:
            print_json(_document(archive, expiry, options.apply))
        else:
            print_lines(*_lines(archive, expiry, options.apply and not is_braked))
        if is_braked:
            raise UsageError(
                f"{share:.0%} of the archive expires, more than retention.max_share "
                f"({settings.retention.max_share:.0%}); nothing was changed",
                hint="check the rules with `tiered config check --topic TOPIC`, then add --yes",
            )
        if options.apply and len(expiry.plan.floors) and not expiry.is_committed:
            print_lines(
                f"{archive.title}: nothing expired, because another command changed the archive at the same time; "
                "run it again"
            )
            return 1
    return 0


def _document(archive: LoadedArchive, expiry: ExpiryPass, is_applied: bool) -> dict[str, Any]:
    """The JSON of ``--json``: the new minimum offset of each queue, and what its expiry frees."""
    plan = expiry.plan
    return {
        "applied": is_applied and expiry.is_committed,
        "version": archive.state.version,
        "queues": [
            {**_named(archive, int(row)), "minOffset": int(offset), "rows": int(rows)}
            for row, offset, rows in plan.floors.tolist()
        ],
        "runs": plan.runs,
        "rows": plan.rows,
        "bytes": plan.byte_count,
        "share": plan.share,
        "objects": len(expiry.objects),
        "objectBytes": expiry.object_bytes,
        "sharedBytes": expiry.shared_bytes,
        "savedAMonth": Prices().storage(expiry.object_bytes),
    }


def _named(archive: LoadedArchive, row: int) -> dict[str, Any]:
    key = archive.state.key_of(row)
    return {"topic": key.topic, "queueId": key.queue_id, "generation": key.generation}


def _lines(archive: LoadedArchive, expiry: ExpiryPass, is_applied: bool) -> list[str]:
    """The lines that are printed without ``--json``: which offsets of each queue expire, and what that saves."""
    plan = expiry.plan
    lines = []
    for floor in plan.floors:
        key = archive.state.key_of(int(floor["queue"]))
        before = int(archive.state.table["min_queue_offset"][floor["queue"]])
        name = f"{key.topic} {key.queue_id}" + (f" generation {key.generation}" if key.generation else "")
        lines.append(f"{name}: offsets {before:,} to {int(floor['min_queue_offset']) - 1:,}")
    if not lines:
        return [f"{archive.title}: nothing expires"]
    verb = "expired" if is_applied and expiry.is_committed else "dry run, add --apply to expire:"
    money = Prices().storage(expiry.object_bytes)
    lines.append(
        f"{archive.title}: {verb} {counted(plan.rows, 'message')}, {size_text(plan.byte_count)} before compression; "
        f"`tiered gc` deletes {counted(len(expiry.objects), 'object')}, {size_text(expiry.object_bytes)} ({money:.2f} "
        f"$ a month), after gc.grace_ms; {size_text(expiry.shared_bytes)} stay in objects with living messages"
    )
    if is_applied and expiry.is_committed:
        lines.append(
            f"until they are deleted, `tiered cat --at-version {archive.state.version}` prints these messages"
        )
    return lines
