"""``tiered-spark VERB …``: the verbs, the shape of an error, and the exit codes, which are those of ``tiered``."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from rocketmq_tiered.cli import EXIT_CODES, run_verb
from rocketmq_tiered.spark.cli import commands_reading as reading
from rocketmq_tiered.spark.cli import commands_writing as writing
from rocketmq_tiered.spark.jobs.tasks import typed
from tiered.console import printable

SPARK_EXIT_CODES = EXIT_CODES.replace("anomalies", "anomalies or differences")


class Verb(NamedTuple):
    """One verb."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


VERBS = {
    "backfill": Verb("archive store directories in parallel", writing.add_backfill, writing.run_backfill),
    "compact": Verb("join small objects to large ones", writing.add_compact, writing.run_compact),
    "compact-keys": Verb(
        "keep the last message of each key", writing.add_compact_keys, writing.run_compact_keys
    ),
    "export": Verb("write new messages as Parquet or Delta", writing.add_export, writing.run_export),
    "verify": Verb("check every byte of an archive", reading.add_verify, reading.run_verify),
    "stats": Verb("show counts, sizes and rates of an archive", reading.add_stats, reading.run_stats),
    "diff": Verb("compare an archive with a store directory", reading.add_diff, reading.run_diff),
    "search": Verb("find messages with SQL or a regular expression", reading.add_search, reading.run_search),
}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    parser = _Parser(
        prog="tiered-spark",
        description="Spark jobs over archives of RocketMQ messages.",
        epilog=SPARK_EXIT_CODES,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        verb.add_arguments(verbs.add_parser(name, help=verb.help, description=verb.help, allow_abbrev=False))
    options = parser.parse_args(arguments)
    return run_verb(VERBS[options.verb].run, options, program="tiered-spark", known=typed)
