"""`tiered export`: an archive as Parquet files or an Iceberg table, on one machine."""

from __future__ import annotations

import argparse
import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING

from rocketmq_tiered import export as tables
from rocketmq_tiered.cli.arguments import add_archive, add_json, add_topic, print_result, settings_of
from rocketmq_tiered.message_table.options.columns import DEFAULT_NAMES
from rocketmq_tiered.message_table.options.source_options import Mode, SourceOptions
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.sql.archive import extra
from tiered.console import camel_names, print_lines
from tiered.errors import CorruptionError, UsageError
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_store
from tiered.settings.sections import Settings

if TYPE_CHECKING:
    from rocketmq_tiered.export.export_job import ExportReport

PARQUET, ICEBERG = "parquet", "iceberg"
DEFAULT_TABLE = "rocketmq.messages"
THREADS_MAX = 2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, the target, the form of the export, and which topics and columns are exported."""
    add_archive(parser)
    parser.add_argument(
        "target", metavar="TARGET_URL", help="where the files are written: file:///… or s3://…"
    )
    parser.add_argument(
        "--format", choices=(PARQUET, ICEBERG), default=PARQUET, help="form of the export (default: parquet)"
    )
    parser.add_argument(
        "--catalog",
        metavar="URI",
        default="",
        help="Iceberg catalog: http(s)://… of a REST catalog, or a database (default: an SQLite file at the target)",
    )
    parser.add_argument(
        "--table",
        metavar="NAME",
        default=DEFAULT_TABLE,
        help=f"name of the Iceberg table (default: {DEFAULT_TABLE})",
    )
    add_topic(parser)
    parser.add_argument(
        "--columns",
        metavar="NAMES",
        default="",
        help=f"columns to export, comma-separated (default: {','.join(DEFAULT_NAMES)})",
    )
    parser.add_argument(
        "--permissive",
        action="store_true",
        help="skip unreadable messages and report them, instead of failing",
    )
    add_json(parser)


def execute(options: argparse.Namespace) -> int:
    """Export the messages archived since the last export to this target. Exit code 1 if unreadable messages were
    skipped."""
    settings = settings_of(options).settings
    if options.catalog and options.format != ICEBERG:
        raise UsageError(
            "--catalog requires --format iceberg", hint="add --format iceberg, or remove --catalog"
        )
    if not re.fullmatch(r"[^.]+\.[^.]+", options.table):
        raise UsageError(
            f"--table {options.table} does not name a table in a namespace",
            hint=f"give the table as NAMESPACE.NAME, such as {DEFAULT_TABLE}",
        )
    source, store = _source(options, settings), tables.readable_as_umask(StoreOptions(settings.object_store))
    with (
        extra(),
        Progress("export", 0, quiet=options.json, unit="parts") as progress,
        closing(open_store(options.target, store)) as target_store,
        ThreadPoolExecutor(min(len(os.sched_getaffinity(0)), THREADS_MAX), "export") as pool,
    ):
        parts = tables.PartsWriter(
            options.target,
            store,
            lambda todo: list(pool.map(tables.write_part, todo)),
            THREADS_MAX,
            progress.update,
            is_table=options.format == ICEBERG,
        )
        write: tables.PartsWriter | tables.IcebergWriter = parts
        if options.format == ICEBERG:
            catalog = tables.open_catalog(options.catalog, options.target, target_store)
            write = tables.IcebergWriter(catalog, options.table, parts)
        progress_of_batches = tables.ExportProgress(target_store)
        report = tables.ExportJob(source, options.target, options.format, progress_of_batches, write).run()
    return print_report(options, report)


def print_report(options: argparse.Namespace, report: ExportReport) -> int:
    """Print what an export did; returns its exit code."""
    print_result(options, camel_names(asdict(report)), report.lines())
    print_lines(*(f"not exported: {line}" for line in report.unreadable), file=sys.stderr)
    return CorruptionError.exit_code if report.unreadable else 0


def _source(options: argparse.Namespace, settings: Settings) -> SourceOptions:
    """The command's options as those of the reader of the Spark data source, which reads the archive here too."""
    topics, columns = (
        tuple(filter(None, map(str.strip, text.split(",")))) for text in (options.topic, options.columns)
    )
    if options.format == ICEBERG:  # the Iceberg table is partitioned by these two columns
        columns = tuple(dict.fromkeys((*(columns or DEFAULT_NAMES), "topic", "storeTime")))
    return SourceOptions(
        path=options.url,
        topics=topics,
        cluster=settings.archive.cluster or None,
        broker=settings.archive.broker or None,
        columns=columns,
        mode=Mode.PERMISSIVE if options.permissive else Mode.FAILFAST,
        store=StoreOptions(settings.object_store),
    )
