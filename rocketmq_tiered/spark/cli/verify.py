"""`tiered-spark verify`: check every byte of archives on many machines."""

import argparse
from dataclasses import asdict
from itertools import chain

from rocketmq_tiered.cli.arguments import print_result, settings_of
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.spark.cli.arguments import add_names, add_spark, session_of, source_of
from rocketmq_tiered.spark.jobs.verify import verify
from tiered.console import camel_names


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
    """Check archives by Spark tasks and print their anomalies. The exit code is the lowest of those that are not 0."""
    objects = settings_of(options).settings.object_store
    source = source_of(options, options.url, objects)
    spark = session_of(options, "verify", source)
    with Progress("verify", 0, quiet=options.json) as progress:
        reports = verify(spark, source, full=not options.quick, report=progress.update)
    codes = [one.report.exit_code(strict=options.strict, has_ring=objects.encrypts) for one in reports]
    document = [
        {"cluster": one.cluster, "broker": one.broker, **camel_names(asdict(one.report)), "ok": not code}
        for one, code in zip(reports, codes, strict=True)
    ]
    print_result(
        options,
        document,
        chain.from_iterable(
            one.report.lines(f"{one.cluster}/{one.broker} in {options.url}") for one in reports
        ),
    )
    return next(filter(None, sorted(codes)), 0)
