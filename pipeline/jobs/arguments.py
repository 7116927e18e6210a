"""Arguments that several verbs of ``python -m pipeline`` share, and what they become: sources, settings, a session.

Flags are spelled as those of ``tiered``. Owns no verb.
"""

from __future__ import annotations

import argparse
import os
from datetime import datetime
from typing import TYPE_CHECKING

from fetcher.span import milliseconds
from pipeline.session import session
from pipeline.source_options import Mode, Source, SourceOptions
from tiered.errors import UsageError
from tiered.settings.load import flag_assignments, load_settings
from tiered.settings.sections import ObjectStoreSettings, Settings

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_SETTINGS = {
    "object_store.endpoint_url": ("--endpoint-url", "S3 endpoint when it is not AWS"),
    "object_store.region": ("--region", "S3 region"),
}
_TOPIC_SETTINGS = {
    "topics.include": ("--include", "patterns of topics to archive, comma-separated"),
    "topics.exclude": ("--exclude", "patterns of topics not to archive, comma-separated"),
}
_QUIET = {"spark.ui.showConsoleProgress": "false", "spark.log.level": "ERROR"}


def add_spark(parser: argparse.ArgumentParser) -> None:
    """Where Spark runs, ``--json`` and settings."""
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--debug", action="store_true", help="print the Python trace of an error")
    parser.add_argument(
        "--master", metavar="URL", help="Spark master (default: spark-submit's, else local[*])"
    )
    parser.add_argument(
        "--conf", dest="spark_conf", metavar="KEY=VALUE", action="append", default=[],
        help="a Spark setting; may be repeated",
    )  # fmt: skip
    parser.add_argument("--config", metavar="FILE", help="TOML settings file (default: $TIERED_CONFIG)")
    parser.add_argument(
        "--set", dest="assignments", metavar="SECTION.KEY=VALUE", action="append", default=[],
        help="set any setting (docs/SETTINGS.md); may be repeated",
    )  # fmt: skip
    _add_settings(parser, _SETTINGS)


def add_names(parser: argparse.ArgumentParser) -> None:
    """Which archive below the URL."""
    parser.add_argument("--cluster", metavar="NAME", help="cluster name (default: every one)")
    parser.add_argument("--broker", metavar="NAME", help="broker name (default: every one)")


def add_source(parser: argparse.ArgumentParser, *, columns: bool = False) -> None:
    """What is read of it."""
    add_names(parser)
    parser.add_argument(
        "--topic", metavar="PATTERNS", default="", help="topics, comma-separated (default: all)"
    )
    parser.add_argument(
        "--generation", metavar="N|all", help="lives of recreated topics (default: those shown by default)"
    )
    parser.add_argument(
        "--partition-bytes", metavar="BYTES", type=int, help="message bytes a task reads, about"
    )
    parser.add_argument("--permissive", action="store_true", help="skip and report damage instead of failing")
    if columns:
        parser.add_argument("--columns", metavar="NAMES", default="", help="columns, comma-separated")


def add_topics(parser: argparse.ArgumentParser) -> None:
    """Which topics a writer archives."""
    _add_settings(parser, _TOPIC_SETTINGS)
    parser.add_argument(
        "--include-system", dest="topics.include_system", action="store_const", const="true",
        help="archive RocketMQ's own topics too",
    )  # fmt: skip


def _add_settings(parser: argparse.ArgumentParser, settings: dict[str, tuple[str, str]]) -> None:
    for key, (flag, meaning) in settings.items():
        parser.add_argument(flag, dest=key, metavar="VALUE", help=meaning)


def settings_of(options: argparse.Namespace) -> Settings:
    """The settings this command line means, environment and file included."""
    flags = flag_assignments(options.assignments)
    known = _SETTINGS | _TOPIC_SETTINGS
    for key, value in vars(options).items():
        if "." in key and value is not None:
            flags[key] = (known.get(key, (f"--{key}", ""))[0], value)
    return load_settings(options.config, environment=os.environ, flags=flags).settings


def session_of(options: argparse.Namespace, verb: str, **conf: str) -> SparkSession:
    """The Spark session; ``conf`` gives way to ``--conf``."""
    given = {}
    for assignment in options.spark_conf:
        name, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--conf {assignment}: no value", hint="--conf spark.driver.memory=4g")
        given[name] = value
    if options.master:
        given["spark.master"] = options.master
    return session(f"rocketmq-tiered {verb}", **(_QUIET | conf | given))


def source_of(
    options: argparse.Namespace, url: str, store: ObjectStoreSettings, *, source: Source = Source.ARCHIVE
) -> SourceOptions:
    """What the command line chooses at ``url``. Keys come from the SDK's own chain, here and on executors."""
    generation = getattr(options, "generation", None)
    try:
        number = None if generation in (None, "all") else int(generation)
    except ValueError as error:
        raise UsageError(
            f"--generation {generation}: no number", hint="a number from 0 on, or all"
        ) from error
    return SourceOptions(
        path=url,
        source=source,
        topics=_list(getattr(options, "topic", "")),
        cluster=options.cluster,
        broker=options.broker,
        generation=number,
        all_generations=generation == "all",
        columns=_list(getattr(options, "columns", "")),
        mode=Mode.PERMISSIVE if getattr(options, "permissive", False) else Mode.FAILFAST,
        partition_bytes=getattr(options, "partition_bytes", None) or SourceOptions.partition_bytes,
        endpoint=store.endpoint_url,
        region=store.region,
        addressing_style=store.addressing_style,
    )


def parse_instant(text: str) -> int:
    """Milliseconds since the epoch of ``1795227708020`` or ``2026-11-21T07:00:00Z``; without a zone it is UTC."""
    if text.strip().isdigit():
        return int(text)
    try:
        return milliseconds(datetime.fromisoformat(text.strip()))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no time: use milliseconds since 1970, or 2026-11-21T07:00:00Z"
        ) from error


def _list(text: str) -> tuple[str, ...]:
    return tuple(item.strip() for item in text.split(",") if item.strip())
