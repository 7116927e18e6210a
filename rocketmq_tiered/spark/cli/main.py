"""``tiered-spark VERB …``: the verbs, the shape of an error, and the exit codes, which are those of ``tiered``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from rocketmq_tiered.spark.cli import commands_reading as reading
from rocketmq_tiered.spark.cli import commands_writing as writing
from rocketmq_tiered.spark.jobs.tasks import typed
from tiered.console import PlainFormatter, print_lines, printable
from tiered.errors import TieredError

EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 70
EXIT_CODES = (
    "exit codes: 0 ok, 1 anomalies or differences found, 2 wrong usage or configuration, 3 not found, "
    "4 temporarily unavailable, 5 fenced by another writer"
)


class Verb(NamedTuple):
    """One verb."""

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


VERBS = {
    "backfill": Verb("archive store directories in parallel", writing.add_backfill, writing.run_backfill),
    "compact": Verb("join small objects to large ones", writing.add_compact, writing.run_compact),
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
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in VERBS.items():
        verb.add_arguments(verbs.add_parser(name, help=verb.help, description=verb.help, allow_abbrev=False))
    options = parser.parse_args(arguments)
    assert logging.lastResort is not None
    logging.lastResort.setFormatter(PlainFormatter())  # warnings name topics
    return _execute(VERBS[options.verb], options)


def _execute(verb: Verb, options: argparse.Namespace) -> int:
    try:
        code = verb.run(options)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader of stdout ended (`… search … | head`): no error now, and none at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return _report(options, "interrupted; run the same command to continue", EXIT_INTERRUPTED)
    except Exception as error:
        expected = error if isinstance(error, TieredError) else typed(error)
        if expected is not None:
            return _report(options, " ".join(str(expected).split()), expected.exit_code)
        message = f"internal error, {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        return _report(options, f"{message}; report it with the output of --debug", EXIT_INTERNAL)
    return code


def _report(options: argparse.Namespace, message: str, code: int) -> int:
    if options.debug:
        print_lines(*traceback.format_exc().splitlines(), file=sys.stderr)
    print_lines(f"tiered-spark: {message}", file=sys.stderr)
    return code
