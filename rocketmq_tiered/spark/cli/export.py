"""`tiered-spark export`: write the messages archived since the last export as Parquet files or a Delta table."""

import argparse

from rocketmq_tiered.cli.arguments import settings_of
from rocketmq_tiered.cli.export import print_report
from rocketmq_tiered.export.export_job import DELTA, PARQUET
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.spark.cli.arguments import add_source, add_spark, session_of, source_of
from rocketmq_tiered.spark.jobs.export import FORMATS, delta_conf, export


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``export``."""
    parser.add_argument("url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix")
    parser.add_argument("target", metavar="TARGET_URL", help="location of the table: file:///… or s3://…")
    parser.add_argument("--format", choices=FORMATS, default=PARQUET, help="Parquet files or a Delta table")
    add_source(parser)
    add_spark(parser)


def execute(options: argparse.Namespace) -> int:
    """Export the messages archived since the last export to this target, by Spark tasks. Exit code 1 if unreadable
    messages were skipped."""
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
            report=progress.update,
        )
    return print_report(options, report)
