"""`tiered-spark verify`: check every byte of archives on many machines."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from itertools import chain

from rocketmq_tiered.cli.arguments import print_result, settings_of
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.spark.cli.arguments import add_names, add_spark, session_of, source_of
from rocketmq_tiered.spark.jobs.verify import verify
from tiered.console import camel_names

EXIT_ANOMALIES = 1


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archives to check, how thoroughly, and what counts as an anomaly."""
    parser.add_argument("url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix")
    parser.add_argument(
        "--quick", action="store_true", help="check the catalog and the index of each object, but no messages"
    )
    parser.add_argument(
        "--strict", action="store_true", help="report objects that no commit names as anomalies"
    )
    add_names(parser)
    add_spark(parser)


def execute(options: argparse.Namespace) -> int:
    """Check archives by Spark tasks and print their anomalies. Exit code 1 if there are any."""
    source = source_of(options, options.url, settings_of(options).settings.object_store)
    spark = session_of(options, "verify", source)
    with Progress("verify", 0, quiet=options.json) as progress:
        reports = verify(spark, source, full=not options.quick, report=progress.update)
    failed = [
        bool(one.report.anomalies) or (options.strict and bool(one.report.leftovers)) for one in reports
    ]
    document = [
        {"cluster": one.cluster, "broker": one.broker, **camel_names(asdict(one.report)), "ok": not is_failed}
        for one, is_failed in zip(reports, failed, strict=True)
    ]
    lines = (one.report.lines(f"{one.cluster}/{one.broker} in {options.url}") for one in reports)
    print_result(options, document, chain.from_iterable(lines))
    return EXIT_ANOMALIES if any(failed) else 0
