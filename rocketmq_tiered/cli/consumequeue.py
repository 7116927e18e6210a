"""`tiered consumequeue`: write the consume queues of a stopped broker again, or compare them with its commitlog."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path

from rocketmq_tiered.cli.arguments import BROKER_FLAGS, add_json, add_setting_flags, settings_of
from rocketmq_tiered.process.broker_side import open_store_of, read_conf
from rocketmq_tiered.process.logs import log_plain
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.process.queue_check import QueueCheck, QueueProblems, check_queues
from rocketmq_tiered.process.queue_rewrite import (
    Written,
    build,
    convert,
    has_compaction_logs,
    has_tables_in_rocksdb,
    plan_of,
)
from tiered.console import camel_names, counted, names_text, print_json, print_lines
from tiered.consume_queue.store import StoreKind
from tiered.errors import UsageError

EXIT_ANOMALIES = 1
_WRITERS = {"build": build, "convert": convert}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Action, STORE, --to and where the broker's configuration is."""
    parser.add_argument(
        "action", choices=(*_WRITERS, "verify"),
        help="build from the commitlog, convert from the queues of the other kind, or verify against the commitlog",
    )  # fmt: skip
    parser.add_argument("broker.store_path", metavar="STORE", help="store directory of a stopped broker")
    parser.add_argument(
        "--to", choices=[kind.value for kind in StoreKind], help="what to write (build and convert)"
    )
    add_setting_flags(parser, BROKER_FLAGS[:1])
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Run the action. Differences, and damage of the commitlog, are exit code 1."""
    settings = settings_of(options).settings
    log_plain(settings.process.log_level)
    if (options.to is None) is (options.action in _WRITERS):
        raise UsageError(
            f"consumequeue {options.action} {'requires' if options.to is None else 'has no'} --to",
            hint="--to file or --to rocksdb chooses what build and convert write",
        )
    conf = read_conf(settings)
    with (
        open_store_of(settings, conf) as store,
        Progress(options.action, 0, quiet=options.json) as progress,
    ):
        if options.action == "verify":
            return _report_check(options, check_queues(store, progress.update))
        written = _WRITERS[options.action](plan_of(store, StoreKind(options.to)), progress.update)
    return _report_written(options, written)


def _report_written(options: argparse.Namespace, written: Written) -> int:
    if options.json:
        document = asdict(written)
        shown = ("queues", "units", "skipped", "damaged", "unknown_ends")
        print_json(camel_names({name: document[name] for name in shown}))
    else:
        store = vars(options)["broker.store_path"]
        print_lines(
            f"{store}: {counted(written.units, 'unit')} of {counted(written.queues, 'consume queue')} written, "
            f"{'storeType=defaultRocksDB' if options.to == 'rocksdb' else 'storeType=default'}"
        )
        if written.skipped:
            print_lines(f"skipped {names_text(written.skipped)}: RocksDB has no BatchCQ")
        if options.to == StoreKind.FILE.value and has_tables_in_rocksdb(Path(store)):
            print_lines("export topics, groups and offsets before the start: mqadmin rocksDBConfigToJson")
        if options.to == StoreKind.ROCKSDB.value and has_compaction_logs(Path(store)):
            print_lines(
                "5.5 brokers start with RocksDB and compaction topics only with enableCompaction=false"
            )
        if written.unknown_ends:
            print_lines(f"queues without a message in the log start at offset 0: {written.unknown_ends}")
        print_lines(*(_damage(*damaged) for damaged in written.damaged))
    return EXIT_ANOMALIES if written.damaged or written.unknown_ends else 0


def _report_check(options: argparse.Namespace, check: QueueCheck) -> int:
    if options.json:
        print_json(camel_names(asdict(check)))
    else:
        store = vars(options)["broker.store_path"]
        print_lines(*(_problems(found) for found in check.problems))
        print_lines(*(_damage(*damaged) for damaged in check.damaged))
        later = f", {check.undispatched} to be added when the broker starts" if check.undispatched else ""
        result = (
            f"{counted(len(check.problems), 'consume queue')} of {check.queues} differ from the commitlog"
            if check.problems
            else f"{counted(check.queues, 'consume queue')} as in the commitlog"
        )
        print_lines(f"{store}: {result}, {counted(check.units, 'unit')}{later}")
        if check.problems:
            print_lines("write them again: tiered consumequeue build")
    return 0 if check.is_good else EXIT_ANOMALIES


def _problems(found: QueueProblems) -> str:
    return (
        f"{found.topic}/{found.queue_id}: {found.missing} missing, {found.wrong} wrong, {found.extra} extra"
    )


def _damage(begin_phys: int, end_phys: int) -> str:
    return f"damaged: physical offsets [{begin_phys}, {end_phys}) of the commitlog"
