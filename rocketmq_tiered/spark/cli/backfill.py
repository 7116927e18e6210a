"""`tiered-spark backfill`: archive many store directories, each by one Spark task."""

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson

from rocketmq_tiered.cli.arguments import add_topics, print_result, settings_of
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.spark.cli.arguments import add_spark, session_of
from rocketmq_tiered.spark.jobs.backfill import BackfillOptions, StoreToBackfill, backfill
from tiered.console import camel_names
from tiered.errors import UsageError
from tiered.object_store.interface import StoreOptions
from tiered.settings.topic_rules import TopicRules
from uploader.offload_status import outcome_text

EXIT_ANOMALIES = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the store directories, the archive's URL, and how each store is archived."""
    parser.add_argument(
        "stores", metavar="STORE", nargs="*", help="store directories of stopped brokers, or copies"
    )
    parser.add_argument("url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix")
    parser.add_argument(
        "--list",
        metavar="FILE",
        help='file with more stores: a JSON list of {"store", "cluster", "broker", "brokerConf"}, of which only '
        '"store" is required',
    )
    parser.add_argument(
        "--cluster", metavar="NAME", default="", help="name of the cluster, if the store does not contain it"
    )
    parser.add_argument(
        "--broker", metavar="NAME", default="", help="name of the broker, if the store does not contain it"
    )
    parser.add_argument(
        "--broker-conf",
        metavar="FILE",
        default="",
        help="path of the broker's configuration file, broker.conf",
    )
    parser.add_argument(
        "--take-over",
        action="store_true",
        help="become the archive's writer even if another instance is: that one may no longer write",
    )
    parser.add_argument(
        "--replace-log",
        action="store_true",
        help="archive the log even if it lacks archived messages or differs from them: those are hidden from readers",
    )
    add_topics(parser)
    add_spark(parser)


def execute(options: argparse.Namespace) -> int:
    """Archive all stores, each by a Spark task of its own. Exit code 1 if the log of one was damaged, or messages are
    lost."""
    stores = _stores(options)
    settings = settings_of(options).settings
    given = BackfillOptions(
        topics=settings.topics.topic_filter("", ""),
        settings=settings.offload,
        rules=TopicRules.of(settings),
        store=StoreOptions(settings.object_store),
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
    """The store directories of the command line and of ``--list``. Raises UsageError if there are none, or if
    ``--cluster``, ``--broker`` or ``--broker-conf`` is given for several."""
    named = bool(options.cluster or options.broker or options.broker_conf)
    listed = _listed(Path(options.list)) if options.list else []
    if named and len(options.stores) + len(listed) > 1:
        raise UsageError(
            "--cluster, --broker and --broker-conf apply to a single store",
            hint="write several stores into a file for --list, each with its cluster and broker name",
        )
    stores = [
        StoreToBackfill(path, options.cluster, options.broker, options.broker_conf) for path in options.stores
    ]
    if not stores and not listed:
        raise UsageError(
            "no store directory is given", hint="give STORE … ARCHIVE_URL, or ARCHIVE_URL --list FILE"
        )
    return stores + listed


def _listed(path: Path) -> list[StoreToBackfill]:
    """The stores in the file of ``--list``, a JSON list of objects. Raises UsageError if the file cannot be read or is
    not such a list."""
    names = {"store": "path", "cluster": "cluster", "broker": "broker", "brokerConf": "conf_path"}
    try:
        entries: Any = orjson.loads(path.read_bytes())
        return [
            StoreToBackfill(**{names[name]: str(value) for name, value in entry.items()}) for entry in entries
        ]
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", hint="check --list") from error
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise UsageError(
            f"{path} is not a list of stores: {error}", hint='write [{"store": "/data/broker-a/store"}]'
        ) from error
