"""``tiered-spark VERB …``: the verbs, the shape of an error, and the exit codes, which are those of ``tiered``."""

import argparse
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import NoReturn

from rocketmq_tiered.cli import EXIT_CODES, run_verb
from tiered.console import print_lines, printable
from tiered.errors import UsageError

try:
    from rocketmq_tiered.spark.cli import backfill, compact, compact_keys, export, verify
    from rocketmq_tiered.spark.jobs.tasks import typed
except ModuleNotFoundError as missing:
    print_lines(
        f"tiered-spark: {missing.name} is not installed: pip install 'rocketmq-tiered[spark]'",
        file=sys.stderr,
    )
    raise SystemExit(UsageError.exit_code) from missing

VERBS: dict[str, tuple[ModuleType, str]] = {
    "backfill": (backfill, "archive store directories in parallel"),
    "compact": (compact, "join small objects to large ones"),
    "compact-keys": (compact_keys, "keep the last message of each key"),
    "export": (export, "write new messages as Parquet or Delta"),
    "verify": (verify, "check every byte of an archive"),
}
"""Verb -> (module with `add_arguments` and `execute`, one-line help)."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        super().error(printable(message))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line of `tiered-spark`, by default that of the process; returns the exit code."""
    parser = _Parser(
        prog="tiered-spark",
        description="Spark jobs over archives of RocketMQ messages.",
        epilog=EXIT_CODES,
        allow_abbrev=False,
    )
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (module, help_text) in VERBS.items():
        module.add_arguments(
            verbs.add_parser(name, help=help_text, description=help_text, allow_abbrev=False)
        )
    options = parser.parse_args(arguments)
    return run_verb(VERBS[options.verb][0].execute, options, program="tiered-spark", known=typed)
