"""The verbs that write, ``backfill``, ``compact`` and ``export``: arguments and output."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from rocketmq_tiered.cli.arguments import add_prices, add_rules, add_topics, print_result, settings_of
from rocketmq_tiered.cli.export import print_report
from rocketmq_tiered.export.export_job import DELTA, PARQUET
from rocketmq_tiered.maintenance.cost import read_prices
from rocketmq_tiered.process.loaded_archive import keyed_topics, open_for_reading, rules_of
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.spark.cli.arguments import (
    add_compaction,
    add_source,
    add_spark,
    session_of,
    source_of,
)
from rocketmq_tiered.spark.jobs.backfill import BackfillOptions, StoreToBackfill, backfill
from rocketmq_tiered.spark.jobs.compact import compact, compact_keys
from rocketmq_tiered.spark.jobs.export import FORMATS, delta_conf, export
from tiered.console import camel_names, print_lines
from tiered.errors import CorruptionError, UsageError
from tiered.object_store.open_store import check_addresses
from tiered.object_store.store_options import StoreOptions
from tiered.settings.rules_in_force import with_rules_in_force
from tiered.settings.topic_rules import TopicRules
from uploader.outcome_text import outcome_text

EXIT_ANOMALIES = 1


def add_backfill(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``backfill``."""
    parser.add_argument(
        "stores", metavar="STORE", nargs="*", help="store directories of stopped brokers, or copies"
    )
    parser.add_argument("url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix")
    parser.add_argument(
        "--list",
        metavar="FILE",
        help='more stores: a JSON list of {"store", "cluster", "broker", "brokerConf"}; only "store" is required',
    )
    parser.add_argument(
        "--cluster", metavar="NAME", default="", help="cluster name, if the store does not contain it"
    )
    parser.add_argument(
        "--broker", metavar="NAME", default="", help="broker name, if the store does not contain it"
    )
    parser.add_argument("--broker-conf", metavar="FILE", default="", help="the broker's broker.conf")
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="become the writer even if another one has not released the archive",
    )
    parser.add_argument(
        "--replace-log",
        action="store_true",
        help="continue even if the store's log lacks archived messages, all or the last ones; they are hidden",
    )
    add_topics(parser)
    add_spark(parser)


def run_backfill(options: argparse.Namespace) -> int:
    """Archive all stores. Exit code 1 if there was damage."""
    stores = _stores(options)
    settings = settings_of(options).settings
    given = BackfillOptions(
        topics=settings.topics.topic_filter("", ""),
        settings=settings.offload,
        index=settings.index,
        rules=TopicRules.of(settings),
        store=StoreOptions(settings.object_store),
        outage_limit_s=settings.process.patience_ms / 1000,
        take_over=options.take_over or settings.archive.take_over,
        replace_log=options.replace_log or settings.archive.replace_log,
        same_broker=settings.archive.same_broker,
    )
    with Progress("backfill", 0, quiet=options.json) as progress:
        reports = backfill(
            lambda: session_of(options, "backfill"),
            stores,
            options.url,
            options=given,
            report=lambda path, done, total: progress.update(done, total, path),
        )
    lines = (f"{one.cluster}/{one.broker} in {options.url}: {outcome_text(one)}" for one in reports)
    print_result(options, [camel_names(asdict(report)) for report in reports], lines)
    return EXIT_ANOMALIES if any(report.damaged or report.lost for report in reports) else 0


def _stores(options: argparse.Namespace) -> list[StoreToBackfill]:
    named = bool(options.cluster or options.broker or options.broker_conf)
    listed = _listed(Path(options.list)) if options.list else []
    if named and len(options.stores) + len(listed) > 1:
        raise UsageError(
            "--cluster, --broker and --broker-conf apply to a single store", hint="use --list for several"
        )
    stores = [
        StoreToBackfill(path, options.cluster, options.broker, options.broker_conf) for path in options.stores
    ]
    if not stores and not listed:
        raise UsageError("STORE is missing", hint="use STORE … ARCHIVE_URL or --list FILE")
    return stores + listed


def _listed(path: Path) -> list[StoreToBackfill]:
    names = {"store": "path", "cluster": "cluster", "broker": "broker", "brokerConf": "conf_path"}
    try:
        entries: Any = orjson.loads(path.read_bytes())
        return [
            StoreToBackfill(**{names[name]: str(value) for name, value in entry.items()}) for entry in entries
        ]
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from error
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a list of stores: {error}", hint='write [{"store": "/data/broker-a/store"}]'
        ) from error


def add_compact(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``compact``."""
    add_compaction(parser, "compaction.min_age_ms")
    add_prices(parser)


def run_compact(options: argparse.Namespace) -> int:
    """Join objects, or list what would be joined."""
    settings = settings_of(options).settings
    check_addresses(options.url, settings.object_store.endpoint_url)
    with Progress("compact", 0, quiet=options.json) as progress:
        found = compact(
            lambda: session_of(options, "compact"),
            options.url,
            settings,
            apply=options.apply,
            spool=options.spool,
            prices=read_prices(Path(options.prices)) if options.prices else None,
            report=progress.update,
        )
    title = f"{found.cluster}/{found.broker} in {options.url}"
    print_result(options, found.report.document(), found.report.lines(title))
    print_lines(*(one.text for one in found.report.unreadable), file=sys.stderr)
    return CorruptionError.exit_code if found.report.unreadable else 0


def add_compact_keys(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``compact-keys``."""
    add_compaction(parser, "key_compaction.min_age_ms")
    parser.add_argument("--topic", metavar="TOPIC", help="only this topic, if its keys are compacted")
    add_rules(parser)


def run_compact_keys(options: argparse.Namespace) -> int:
    """Keep the last message of each key, or count what that would drop."""
    loaded = settings_of(options)
    check_addresses(options.url, loaded.settings.object_store.endpoint_url)
    with open_for_reading(options.url, loaded.settings) as archive:
        settings = with_rules_in_force(loaded, archive.state.settings, options.rules)
        with Progress("compact-keys", 0, quiet=options.json) as progress:
            report = compact_keys(
                lambda: session_of(options, "compact-keys"),
                archive,
                settings,
                keyed_topics(rules_of(archive, settings), settings, options.topic),
                apply=options.apply,
                spool=options.spool,
                report=lambda what, done, total: progress.update(done, total, what),
            )
        print_result(options, report.document(), report.lines(archive.title))
    return 0


def add_export(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``export``."""
    parser.add_argument("url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix")
    parser.add_argument("target", metavar="TARGET_URL", help="location of the table: file:///… or s3://…")
    parser.add_argument("--format", choices=FORMATS, default=PARQUET, help="Parquet files or a Delta table")
    add_source(parser, columns=True)
    add_spark(parser)


def run_export(options: argparse.Namespace) -> int:
    """Export the messages archived since the last export."""
    settings = settings_of(options).settings
    conf = delta_conf(options.target) if options.format == DELTA else {}
    source = source_of(options, options.url, settings.object_store)
    spark = session_of(options, "export", source, **conf)
    with Progress("export", 0, quiet=options.json, unit="parts") as progress:
        report = export(
            spark,
            source,
            options.target,
            format=options.format,
            store=StoreOptions(settings.object_store),
            report=progress.update,
        )
    return print_report(options, report)
