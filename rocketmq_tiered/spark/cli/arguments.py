"""Arguments shared by verbs of ``tiered-spark``, and the sources, settings and session made from them.

Flags have the names of those of ``tiered``.
"""

from __future__ import annotations

import argparse
import logging
import os
from typing import TYPE_CHECKING

from rocketmq_tiered.message_table.options.source_options import Mode, Source, SourceOptions, parse_options
from rocketmq_tiered.spark.source.session import session
from tiered.errors import UsageError
from tiered.object_store.open_store import check_addresses
from tiered.settings.load import flag_assignments, load_settings
from tiered.settings.sections import ObjectStoreSettings, Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS = {
    "object_store.endpoint_url": ("--endpoint-url", "S3 endpoint if not AWS"),
    "object_store.region": ("--region", "S3 region"),
}
_TOPIC_SETTINGS = {
    "topics.include": ("--include", "topics to archive, comma-separated patterns"),
    "topics.exclude": ("--exclude", "topics not to archive, comma-separated patterns"),
}
_OPTIONS = ("addressingStyle", "batchBytes", "brokerConf", "generation", "mode", "partitionBytes", "version")
"""Options of the data source accepted by ``--option``."""
_KEY_OPTIONS = ("accesskey", "secretkey", "sessiontoken")
_QUIET = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}


def add_spark(parser: argparse.ArgumentParser) -> None:
    """Add flags of Spark, ``--json`` and settings."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="print the Python trace of an error")
    parser.add_argument(
        "--master", metavar="URL", help="Spark master (default: spark-submit's, else local[*])"
    )
    parser.add_argument(
        "--conf", dest="spark_conf", metavar="KEY=VALUE", action="append", default=[],
        help="Spark setting; may be repeated",
    )  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="TOML settings file (default: $TIERED_CONFIG)")
    parser.add_argument(
        "--set", dest="assignments", metavar="SECTION.KEY=VALUE", action="append", default=[],
        help="any setting of docs/SETTINGS.md; may be repeated",
    )  # fmt: skip
    _add_settings(parser, _SETTINGS)


def add_names(parser: argparse.ArgumentParser) -> None:
    """Add flags that select archives below the URL."""
    parser.add_argument("--cluster", metavar="NAME", help="cluster name (default: all)")
    parser.add_argument("--broker", metavar="NAME", help="broker name (default: all)")


def add_source(parser: argparse.ArgumentParser, *, columns: bool = False) -> None:
    """Add flags that select what is read."""
    add_names(parser)
    add_topic(parser)
    parser.add_argument(
        "--generation", metavar="N|all", help="generation of recreated topics (default: current)"
    )
    parser.add_argument(
        "--at-version", metavar="N", type=whole_number,
        help="read the archive as it was at catalog version N, until gc deletes it",
    )  # fmt: skip
    parser.add_argument(
        "--partition-bytes", metavar="BYTES", type=int, help="approximate message bytes of a task"
    )
    parser.add_argument("--permissive", action="store_true", help="skip and report damage instead of failing")
    parser.add_argument(
        "--option", dest="source_options", metavar="NAME=VALUE", action="append", default=[],
        help=f"option of the data source: {', '.join(_OPTIONS)}; may be repeated",
    )  # fmt: skip
    if columns:
        parser.add_argument("--columns", metavar="NAMES", default="", help="columns, comma-separated")


def add_topic(parser: argparse.ArgumentParser) -> None:
    """Add ``--topic``."""
    parser.add_argument(
        "--topic", metavar="PATTERNS", default="", help="topics, comma-separated (default: all)"
    )


def add_times(parser: argparse.ArgumentParser) -> None:
    """Add ``--since`` and ``--until``."""
    parser.add_argument("--since", metavar="TIME", help="stored at or after: ISO 8601 (UTC) or ms")
    parser.add_argument("--until", metavar="TIME", help="stored before")


def add_topics(parser: argparse.ArgumentParser) -> None:
    """Add flags that select the topics to archive."""
    _add_settings(parser, _TOPIC_SETTINGS)
    parser.add_argument(
        "--include-system", dest="topics.include_system", action="store_const", const="true",
        help="also archive RocketMQ's own topics",
    )  # fmt: skip


def _add_settings(parser: argparse.ArgumentParser, settings: dict[str, tuple[str, str]]) -> None:
    for key, (flag, meaning) in settings.items():
        parser.add_argument(flag, dest=key, metavar="VALUE", help=meaning)


def settings_of(options: argparse.Namespace) -> Settings:
    """Settings from the command line, environment and file."""
    flags = flag_assignments(options.assignments)
    known = _SETTINGS | _TOPIC_SETTINGS
    for key, value in vars(options).items():
        if "." in key and value is not None:
            flags[key] = (known.get(key, (f"--{key}", ""))[0], value)
    return load_settings(options.config, environment=os.environ, flags=flags).settings


def session_of(options: argparse.Namespace, verb: str, **conf: str) -> SparkSession:
    """The Spark session. ``--conf`` takes precedence over ``conf``."""
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
    return session(f"rocketmq-tiered {verb}", **(_QUIET | conf | given))


def source_of(
    options: argparse.Namespace, url: str, store: ObjectStoreSettings, *, source: Source = Source.ARCHIVE
) -> SourceOptions:
    """What the command line selects at ``url``. Keys come from the SDK's own chain, here and on executors. Raises
    UsageError for an impossible address, before Spark starts."""
    if source is Source.ARCHIVE:
        check_addresses(url, store.endpoint_url)
    given = {
        "path": url,
        "source": source.value,
        "topic": getattr(options, "topic", ""),
        "cluster": options.cluster,
        "broker": options.broker,
        "generation": getattr(options, "generation", None),
        "version": getattr(options, "at_version", None),
        "since": getattr(options, "since", None),
        "until": getattr(options, "until", None),
        "columns": getattr(options, "columns", ""),
        "mode": Mode.PERMISSIVE.value if getattr(options, "permissive", False) else None,
        "partitionBytes": getattr(options, "partition_bytes", None),
        "endpoint": store.endpoint_url,
        "region": store.region,
        "addressingStyle": store.addressing_style,
    }
    texts = {name: str(value) for name, value in given.items() if value is not None}
    return parse_options(texts | _named_options(getattr(options, "source_options", [])))


def _named_options(assignments: list[str]) -> dict[str, str]:
    """The values of ``--option NAME=VALUE`` by name."""
    known = {name.lower(): name for name in _OPTIONS}
    found = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if name.lower() in _KEY_OPTIONS:
            raise UsageError(
                f"--option {name} is refused: other users of this machine could read it",
                hint="provide keys by AWS_PROFILE, AWS_ACCESS_KEY_ID … or the machine's role",
            )
        if name.lower() not in known:
            raise UsageError(f"unknown --option {name}", hint=f"options: {', '.join(_OPTIONS)}")
        if not equals:
            raise UsageError(f"--option {name} has no value", hint=f"write --option {name}=VALUE")
        found[known[name.lower()]] = value
    return found


def whole_number(text: str) -> int:
    """A whole number of at least 0."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least 0")
    return int(text)
