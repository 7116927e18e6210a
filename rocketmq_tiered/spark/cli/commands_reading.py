"""The verbs that read, ``verify``, ``stats``, ``diff`` and ``search``: arguments and output."""

from __future__ import annotations

import argparse
import base64
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rocketmq_tiered.cli.arguments import add_topic, print_result, settings_of, whole_number
from rocketmq_tiered.message_table.options.source_options import Source, SourceOptions
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.spark.cli.arguments import (
    add_names,
    add_source,
    add_spark,
    add_times,
    session_of,
    source_of,
)
from rocketmq_tiered.spark.jobs.diff import DiffReport, archive_of_store, diff
from rocketmq_tiered.spark.jobs.search import SHOWN, Question, fault_of_the_question, search
from rocketmq_tiered.spark.jobs.stats import Stats, stats
from rocketmq_tiered.spark.jobs.verify import verify
from tiered.console import (
    camel_names,
    print_fields,
    print_json,
    print_json_line,
    print_table,
    size_text,
    time_text,
)

if TYPE_CHECKING:
    from pyspark import StatusTracker
    from pyspark.sql import SparkSession

PROGRESS_S = 2.0
EXIT_ANOMALIES = 1
_ARCHIVE = "file:///directory or s3://bucket/prefix"


def add_verify(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``verify``."""
    parser.add_argument("url", metavar="ARCHIVE_URL", help=_ARCHIVE)
    parser.add_argument(
        "--quick", action="store_true", help="check catalog, footers and index, but no messages"
    )
    parser.add_argument("--strict", action="store_true", help="treat unreferenced objects as anomalies")
    add_names(parser)
    add_spark(parser)


def run_verify(options: argparse.Namespace) -> int:
    """Print anomalies. Exit code 1 if there are any."""
    source = source_of(options, options.url, settings_of(options).settings.object_store)
    spark = session_of(options, "verify", source)
    with Progress("verify", 0, quiet=options.json) as progress:
        found = verify(spark, source, full=not options.quick, report=progress.update)
    failed = [bool(one.report.anomalies) or (options.strict and bool(one.report.leftovers)) for one in found]
    document = [
        {"cluster": one.cluster, "broker": one.broker, **camel_names(asdict(one.report)), "ok": not is_failed}
        for one, is_failed in zip(found, failed, strict=True)
    ]
    lines = (one.report.lines(f"{one.cluster}/{one.broker} in {options.url}") for one in found)
    print_result(options, document, chain.from_iterable(lines))
    return EXIT_ANOMALIES if any(failed) else 0


def add_stats(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``stats``."""
    _add_url(parser)
    add_times(parser)
    parser.add_argument("--headers-only", action="store_true", help="read no messages: no tags, no keys")
    add_source(parser)
    add_spark(parser)


def _add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("url", metavar="URL", help=f"{_ARCHIVE}; with --source store a store directory")
    parser.add_argument("--source", choices=[one.value for one in Source], default=Source.ARCHIVE.value)


def _add_limit(parser: argparse.ArgumentParser, default: int, what: str) -> None:
    help_text = f"maximum {what} (default: {default})"
    parser.add_argument("--limit", metavar="N", type=whole_number, default=default, help=help_text)


@contextmanager
def stage_progress(spark: SparkSession, label: str, *, quiet: bool = False) -> Iterator[None]:
    """Print finished tasks, of those that Spark has scheduled so far, while the block runs."""
    if quiet or not hasattr(spark, "_jsc"):  # Spark Connect has no tracker
        yield
        return
    finished, tracker = threading.Event(), spark.sparkContext.statusTracker()
    with Progress(label, 0, unit="tasks") as progress:
        watch = threading.Thread(target=_watch, args=(tracker, progress, finished), daemon=True)
        watch.start()
        try:
            yield
        finally:
            finished.set()
            watch.join()


def _watch(tracker: StatusTracker, progress: Progress, finished: threading.Event) -> None:
    while not finished.wait(PROGRESS_S):
        for stage in tracker.getActiveStageIds():
            info = tracker.getStageInfo(stage)
            if info is not None:
                progress.update(info.numCompletedTasks, info.numTasks, f"stage {stage}")


def run_stats(options: argparse.Namespace) -> int:
    """Print a table or JSON."""
    source = source_of(
        options, options.url, settings_of(options).settings.object_store, source=Source(options.source)
    )
    spark = session_of(options, "stats", source)
    with stage_progress(spark, "stats", quiet=options.json):
        found = stats(spark, source, headers_only=options.headers_only)
    if options.json:
        topics = [asdict(one) | {"ratio": one.ratio} for one in found.topics]
        print_json(camel_names(asdict(found) | {"topics": topics}))
    else:
        _print_stats(found)
    return 0


def _print_stats(found: Stats) -> None:
    print_table(
        ["topic", "queues", "messages", "bytes", "stored", "ratio", "p50", "p99", "largest", "first", "last"],
        [
            [
                one.topic,
                one.queues,
                one.messages,
                size_text(one.message_bytes),
                size_text(one.stored_bytes) if one.stored_bytes else "–",
                f"{one.ratio:.1f}" if one.ratio else "–",
                one.p50_bytes,
                one.p99_bytes,
                one.max_bytes,
                time_text(one.first_ms),
                time_text(one.last_ms),
            ]
            for one in found.topics
        ],
    )


def add_diff(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``diff``."""
    parser.add_argument("url", metavar="ARCHIVE_URL", help=_ARCHIVE)
    parser.add_argument("store", metavar="STORE", help="the broker's store directory")
    parser.add_argument("--broker-conf", metavar="FILE", help="the broker's broker.conf")
    add_topic(parser)
    _add_limit(parser, 100, "differences to print")
    add_names(parser)
    add_spark(parser)


def run_diff(options: argparse.Namespace) -> int:
    """Print differences. Exit code 1 if there are any."""
    store = SourceOptions(
        path=str(Path(options.store).absolute()),
        source=Source.STORE,
        cluster=options.cluster,
        broker=options.broker,
        broker_conf=options.broker_conf,
    )
    archive = archive_of_store(
        source_of(options, options.url, settings_of(options).settings.object_store), store
    )
    spark = session_of(options, "diff", archive, store)
    with stage_progress(spark, "diff", quiet=options.json):
        report = diff(spark, archive, store, limit=options.limit)
    document = camel_names(asdict(report)) | {"ok": not report.counts}
    print_result(options, document, _diff_lines(options, report))
    return EXIT_ANOMALIES if report.counts else 0


def _diff_lines(options: argparse.Namespace, report: DiffReport) -> Iterator[str]:
    yield from map(str, report.examples)
    older = f"; {report.older:,} older messages are only in the archive" if report.older else ""
    if report.compacted:
        older += f"; {report.compacted:,} were dropped by key compaction"
    counts = ", ".join(f"{count:,} {kind}" for kind, count in report.counts.items())
    verdict = counts.upper() if counts else "no differences"
    yield f"{options.url} and {options.store}: {verdict}; {report.same:,} messages are the same{older}"


def add_search(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``search``."""
    _add_url(parser)
    parser.add_argument("--sql", metavar="QUERY", default="", help="SQL query of the view `messages`")
    parser.add_argument("--where", metavar="CONDITION", default="", help="SQL condition on columns")
    parser.add_argument(
        "--body", metavar="REGEX", default="", help="regular expression found in the body's text"
    )
    parser.add_argument(
        "--select", metavar="NAMES", default=",".join(SHOWN), help="columns to show, comma-separated"
    )
    add_times(parser)
    _add_limit(parser, 1000, "rows; 0 for all")
    add_source(parser)
    add_spark(parser)


def run_search(options: argparse.Namespace) -> int:
    """Print matches, one line each, with ``--json`` one JSON document each."""
    source = source_of(
        options, options.url, settings_of(options).settings.object_store, source=Source(options.source)
    )
    question = Question(
        sql=options.sql,
        where=options.where,
        body=options.body,
        select=tuple(name.strip() for name in options.select.split(",") if name.strip()),
        limit=options.limit,
    )
    spark = session_of(options, "search", source)
    answer = search(spark, replace(source, columns=()), question)
    try:
        with stage_progress(spark, "search", quiet=options.json):
            for row in answer.toLocalIterator(prefetchPartitions=True):
                _print_match(row.asDict(recursive=True), as_json=options.json)
    except Exception as error:
        fault = fault_of_the_question(error)
        if fault is None:
            raise
        raise fault from error
    return 0


def _print_match(row: dict[str, Any], *, as_json: bool) -> None:
    document = {name: _plain(value) for name, value in row.items()}
    if as_json:
        print_json_line(document)
    else:
        print_fields("" if value is None else str(value) for value in document.values())


def _plain(value: Any) -> Any:
    """``value`` as JSON: bytes as base64, unknown types as text."""
    if isinstance(value, bytes | bytearray):
        return base64.b64encode(value).decode()
    return value if isinstance(value, str | int | float | bool | dict | list | type(None)) else str(value)
