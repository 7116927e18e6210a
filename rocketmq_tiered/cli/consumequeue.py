"""`tiered consumequeue`: write the consume queues of a stopped broker again, or compare them with its commitlog."""

import argparse
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from rocketmq_tiered.cli.arguments import BROKER_FLAGS, add_json, add_setting_flags, print_result, settings_of
from rocketmq_tiered.process.broker_side import open_store_of, read_conf
from rocketmq_tiered.process.consume_queues import (
    QueueCheck,
    Written,
    build,
    check_queues,
    convert,
    has_compaction_logs,
    has_tables_in_rocksdb,
    plan_of,
)
from rocketmq_tiered.process.progress import Progress
from tiered.console import camel_names, counted, names_text
from tiered.consume_queue.store import BOTH_ON_5_5, StoreKind
from tiered.errors import UsageError

EXIT_ANOMALIES = 1
_CONFIGURATION = {
    StoreKind.FILE: "storeType=default",
    StoreKind.ROCKSDB: "storeType=defaultRocksDB",
    StoreKind.BOTH: "storeType=default, rocksdbCQDoubleWriteEnable=true",
}
_WRITERS = {"build": build, "convert": convert}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the action, the store, the kind of consume queues to write, and where the broker's configuration is."""
    parser.add_argument(
        "action",
        choices=(*_WRITERS, "verify"),
        help="build: write consume queues from the commitlog; convert: copy those in files into RocksDB, or those in "
        "RocksDB into files; verify: compare them with the commitlog",
    )
    parser.add_argument("broker.store_path", metavar="STORE", help="store directory of a stopped broker")
    parser.add_argument(
        "--to",
        choices=[kind.value for kind in StoreKind],
        help="for build and convert: write consume queues in files, in RocksDB, or both",
    )
    add_setting_flags(parser, BROKER_FLAGS[:1])
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Build, convert or verify consume queues. Exit code 1 if queues differ from the commitlog, if the commitlog is
    damaged, or if the end of a queue is unknown, because the log has no message of it."""
    settings = settings_of(options).settings
    if (options.to is None) is (options.action in _WRITERS):
        raise UsageError(
            f"consumequeue {options.action} {'requires' if options.to is None else 'has no'} --to",
            hint="--to file, rocksdb or both chooses what build and convert write",
        )
    conf = read_conf(settings)
    with (
        open_store_of(settings, conf) as store,
        Progress(options.action, 0, quiet=options.json) as progress,
    ):
        if options.action == "verify":
            check = check_queues(store, progress.update)
            print_result(options, camel_names(asdict(check)), _checked(store.path, check))
            return 0 if check.is_good else EXIT_ANOMALIES
        written = _WRITERS[options.action](plan_of(store, StoreKind(options.to)), progress.update)
    names = ("queues", "units", "skipped", "damaged", "unknown_ends")
    document = camel_names({name: getattr(written, name) for name in names})
    print_result(options, document, _written(store.path, options.to, written))
    return EXIT_ANOMALIES if written.damaged or written.unknown_ends else 0


def _written(store: Path, kind: str, written: Written) -> Iterator[str]:
    """The lines printed after consume queues were written: how many, which topics were skipped, and what the operator
    has to do before the broker starts."""
    yield (
        f"{store}: {counted(written.units, 'unit')} of {counted(written.queues, 'consume queue')} written, "
        f"{_CONFIGURATION[StoreKind(kind)]}"
    )
    if written.skipped:
        yield f"skipped {names_text(written.skipped)}: RocksDB cannot have their consume queues of batches (BatchCQ)"
    if kind != StoreKind.ROCKSDB.value and has_tables_in_rocksdb(store):
        yield (
            "before the broker starts, export its topics, groups and offsets from RocksDB: mqadmin rocksDBConfigToJson"
        )
    if kind == StoreKind.BOTH.value:
        yield BOTH_ON_5_5
    if kind == StoreKind.ROCKSDB.value and has_compaction_logs(store):
        yield "5.5 brokers start with RocksDB and compaction topics only with enableCompaction=false"
    if written.unknown_ends:
        yield (
            "queues without a message in the log start at offset 0, as their old ends cannot be read: "
            f"{written.unknown_ends}"
        )
    yield from (_damage(*damaged) for damaged in written.damaged)


def _checked(store: Path, check: QueueCheck) -> Iterator[str]:
    """The lines printed after consume queues were compared with the commitlog: each queue that differs, damage of the
    commitlog, and the sum."""
    for queue in check.problems:
        how = f"{queue.missing} missing, {queue.wrong} wrong, {queue.extra} extra"
        yield f"{queue.topic}/{queue.queue_id}: {how}"
    yield from (_damage(*damaged) for damaged in check.damaged)
    # The broker adds units of the newest messages at its start: their absence is no damage.
    later = f", {check.undispatched} to be added when the broker starts" if check.undispatched else ""
    result = f"{counted(check.queues, 'consume queue')} as in the commitlog"
    if check.problems:
        result = (
            f"{counted(len(check.problems), 'consume queue')} of {check.queues} differ from the commitlog"
        )
    yield f"{store}: {result}, {counted(check.units, 'unit')}{later}"
    if check.problems:
        yield "write them again: tiered consumequeue build"


def _damage(begin_phys: int, end_phys: int) -> str:
    return f"damaged: physical offsets [{begin_phys}, {end_phys}) of the commitlog"
