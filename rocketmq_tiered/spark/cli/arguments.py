"""Arguments shared by verbs of ``tiered-spark``, and the sources, settings and session made from them.

Flags have the names of those of ``tiered``.
"""

from __future__ import annotations

import argparse
import logging
from typing import TYPE_CHECKING

from rocketmq_tiered.cli.arguments import (
    NAME_FLAGS,
    STORE_FLAGS,
    add_flags,
    add_json,
    add_setting_flags,
    add_topic,
    add_version,
)
from rocketmq_tiered.message_table.options.source_options import Mode, SourceOptions, parse_options
from rocketmq_tiered.message_table.plan.archive_plan import check_archives
from rocketmq_tiered.spark.source.session import session
from tiered.errors import UsageError
from tiered.object_store.open_store import check_addresses
from tiered.settings.sections import ObjectStoreSettings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OPTIONS = ("addressingStyle", "batchBytes", "brokerConf", "generation", "mode", "partitionBytes", "version")
"""Options of the data source accepted by ``--option``."""
_KEY_OPTIONS = ("accesskey", "secretkey", "sessiontoken")
_QUIET = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}


def add_spark(parser: argparse.ArgumentParser) -> None:
    """Add the flags of Spark, ``--debug``, ``--json``, and those that set settings."""
    add_json(parser)
    parser.add_argument("--debug", action="store_true", help="print the Python traceback of an error")
    parser.add_argument(
        "--master",
        metavar="URL",
        help="URL of the Spark master (default: that of spark-submit, else local[*])",
    )
    parser.add_argument(
        "--conf",
        dest="spark_conf",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="set a setting of Spark; may be repeated",
    )
    add_setting_flags(parser, STORE_FLAGS)


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add flags that select archives below the URL."""
    parser.add_argument("--cluster", metavar="NAME", help="only archives of this cluster (default: all)")
    parser.add_argument("--broker", metavar="NAME", help="only archives of this broker (default: all)")


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select what is exported: archives, topics, columns, and options of the data source."""
    add_names(parser)
    add_topic(parser)
    parser.add_argument(
        "--generation",
        metavar="N|all",
        help="generation N of topics that were deleted and created again, or all (default: the newest)",
    )
    add_version(parser)
    parser.add_argument(
        "--partition-bytes",
        metavar="BYTES",
        type=int,
        help="message bytes that a Spark task reads, approximately",
    )
    parser.add_argument(
        "--permissive",
        action="store_true",
        help="skip unreadable messages and report them, instead of failing",
    )
    parser.add_argument(
        "--option",
        dest="source_options",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help=f"set an option of the data source: {', '.join(_OPTIONS)}; may be repeated",
    )
    parser.add_argument(
        "--columns",
        metavar="NAMES",
        default="",
        help="columns to export, comma-separated (default: docs/SPARK.md)",
    )


def add_compaction(parser: argparse.ArgumentParser, age_setting: str) -> None:
    """Add the arguments of both compactions. ``--older-than`` sets the setting ``age_setting``: the least age of
    messages that take part."""
    parser.add_argument("url", metavar="ARCHIVE_URL", help="file:///directory or s3://bucket/prefix")
    parser.add_argument(
        "--apply", action="store_true", help="compact the archive (default: only print what would be done)"
    )
    parser.add_argument(
        "--older-than",
        dest=age_setting,
        metavar="DURATION",
        help="compact only what was archived at least this long ago, such as 24h",
    )
    parser.add_argument(
        "--spool",
        metavar="DIRECTORY",
        default="",
        help="directory of each worker for objects while they are made (default: its temporary directory)",
    )
    add_flags(parser, NAME_FLAGS)
    add_spark(parser)


def session_of(options: argparse.Namespace, verb: str, *sources: SourceOptions, **conf: str) -> SparkSession:
    """Start the Spark session of a command line, with the Spark settings ``conf``, over which ``--conf`` takes
    precedence. Before that, checks that the archives and topics of ``sources`` exist: raises NotFoundError. Raises
    UsageError for a ``--conf`` without a value."""
    given = {}
    for assignment in options.spark_conf:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--conf {assignment} has no value", hint="write --conf spark.driver.memory=4g")
        given[name] = value
    if options.master:
        given["spark.master"] = options.master
    if not options.debug:  # PySpark logs errors as pages of JSON; the error is reported anyway
        logging.getLogger("SQLQueryContextLogger").setLevel(logging.CRITICAL)
    for source in sources:
        check_archives(source)
    return session(f"rocketmq-tiered {verb}", **(_QUIET | conf | given))


def source_of(options: argparse.Namespace, url: str, store: ObjectStoreSettings) -> SourceOptions:
    """What a command line selects of the archives at ``url``, as options of the data source. Credentials are no part of
    it: driver and executors find their own, as the SDK does. Raises UsageError for a wrong option or address."""
    given = {
        "path": url,
        "topic": getattr(options, "topic", ""),
        "cluster": options.cluster,
        "broker": options.broker,
        "generation": getattr(options, "generation", None),
        "version": getattr(options, "at_version", None),
        "columns": getattr(options, "columns", ""),
        "mode": Mode.PERMISSIVE.value if getattr(options, "permissive", False) else None,
        "partitionBytes": getattr(options, "partition_bytes", None),
    }
    texts = {name: str(value) for name, value in given.items() if value is not None}
    parsed = parse_options(texts | _named_options(getattr(options, "source_options", [])), store)
    check_addresses(parsed.path, store.endpoint_url)
    return parsed


def _named_options(assignments: list[str]) -> dict[str, str]:
    """The values of ``--option NAME=VALUE`` by the name of the option. Raises UsageError for an unknown option, one
    without a value, and for credentials."""
    known = {name.lower(): name for name in _OPTIONS}
    values = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if name.lower() in _KEY_OPTIONS:
            raise UsageError(
                f"--option {name} is refused, because other users of this machine can read command lines",
                hint="provide credentials by AWS_PROFILE, AWS_ACCESS_KEY_ID … or the machine's role",
            )
        if name.lower() not in known:
            raise UsageError(
                f"--option {name} is not an option of the data source", hint=f"options: {', '.join(_OPTIONS)}"
            )
        if not equals:
            raise UsageError(f"--option {name} has no value", hint=f"write --option {name}=VALUE")
        values[known[name.lower()]] = value
    return values
