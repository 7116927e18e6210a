"""The `tiered` command: runs the verb's module and turns errors into one line and an exit code.

Only the chosen verb is imported, so that a one-shot command starts fast.
"""

import argparse
import atexit
import errno
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from gc import freeze, set_threshold  # by name: a verb's module here is called gc
from typing import NoReturn

from rocketmq_tiered.process.event_queue import catch_sighup
from tiered.console import print_lines
from tiered.errors import FULL_ERRNOS, StoreFullError, TieredError, UsageError
from tiered.timestamps import RELATIVE
from tiered.version import VERSION

EXIT_INTERRUPTED = 130
EXIT_INTERNAL = 70
INTERRUPTED = "interrupted"

GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "archive a broker": {
        "run": ("rocketmq_tiered.cli.run", "follow a broker and archive its messages until stopped"),
        "backfill": ("rocketmq_tiered.cli.backfill", "archive a store directory once"),
        "status": ("rocketmq_tiered.cli.status", "show how far the archive is behind the broker"),
        "doctor": (
            "rocketmq_tiered.cli.doctor",
            "check host, broker and object store, and say how to correct each problem",
        ),
    },
    "read": {
        "ls": ("rocketmq_tiered.cli.ls", "list the queues of an archive"),
        "cat": ("rocketmq_tiered.cli.cat", "print archived messages"),
        "offset": ("rocketmq_tiered.cli.offset", "find the queue offset of a point in time"),
        "query": ("rocketmq_tiered.cli.query", "find messages by key, unique key or offsetMsgId"),
        "sql": ("rocketmq_tiered.cli.sql", "query topics with SQL (DuckDB)"),
        "export": ("rocketmq_tiered.cli.export", "export an archive as Parquet files or an Iceberg table"),
    },
    "serve and send": {
        "serve": ("rocketmq_tiered.cli.serve", "serve an archive to RocketMQ clients and mqadmin"),
        "mount": (
            "rocketmq_tiered.cli.mount",
            "serve retired brokers under their names, shared with other nodes (mount ls: list them)",
        ),
        "detach": (
            "rocketmq_tiered.cli.detach",
            "retire a broker, so that tiered mount serves it from its archive, or take it back",
        ),
        "reset-offset": ("rocketmq_tiered.cli.reset_offset", "reset a consumer group's offsets"),
        "republish": ("rocketmq_tiered.cli.republish", "send archived messages to another broker or topic"),
        "timers": ("rocketmq_tiered.cli.timers", "list, show, cancel or move timers of an archive"),
    },
    "keep": {
        "expire": (
            "rocketmq_tiered.cli.expire",
            "expire messages by their time to live, or erase a topic (dry run by default)",
        ),
        "gc": ("rocketmq_tiered.cli.gc", "delete garbage from an archive (dry run by default)"),
        "compact": (
            "rocketmq_tiered.cli.compact",
            "join small objects of an archive to large ones (dry run by default)",
        ),
        "compact-keys": (
            "rocketmq_tiered.cli.compact_keys",
            "keep the latest message of each key of compaction topics (dry run by default)",
        ),
        "keys": (
            "rocketmq_tiered.cli.keys",
            "check, rotate or rewrap the keys of an encrypted archive",
        ),
        "cost": (
            "rocketmq_tiered.cli.cost",
            "estimate what an archive costs a month, and what settings would change",
        ),
    },
    "repair and restore": {
        "verify": ("rocketmq_tiered.cli.verify", "check an archive for damage"),
        "repair": (
            "rocketmq_tiered.cli.repair",
            "repair a damaged archive from what is left (dry run by default)",
        ),
        "restore": ("rocketmq_tiered.cli.restore", "make a broker's store directory from an archive"),
        "consumequeue": (
            "rocketmq_tiered.cli.consumequeue",
            "write a stopped broker's consume queues again, in files or RocksDB, or check them",
        ),
    },
    "settings and installation": {
        "config": ("rocketmq_tiered.cli.config_check", "check settings and print the effective values"),
        "compile": (
            "rocketmq_tiered.cli.compile",
            "compile the kernels into the installation, so that starts are quick",
        ),
    },
}
"""Group, as `tiered --help` lists them -> verb -> (module with `add_arguments` and `execute`, one-line help)."""

VERBS = {verb: place for group in GROUPS.values() for verb, place in group.items()}
"""Verb -> (module, help)."""

SERVICES = ("run", "serve", "mount")
"""Verbs that run until SIGTERM or SIGINT."""

PRIVATE_UMASK = 0o077
"""Files are for the user of the process."""

COLLECT_EVERY = 50_000
"""New objects between two runs of Python's garbage collector; at the default of 700 it scans imported modules
repeatedly during a short command."""

_REFUSED_OUTPUT = FULL_ERRNOS | {errno.EIO}

EXIT_CODES = (
    "exit codes: 0 ok, 1 anomalies found, 2 wrong usage or configuration, 3 does not exist, "
    "4 temporarily unavailable, 5 fenced by another writer"
)


class _Parser(argparse.ArgumentParser):
    """Reports errors in one line, like all other errors; --help prints the usage."""

    def error(self, message: str) -> NoReturn:
        print_lines(f"tiered: {' '.join(message.split())}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(UsageError.exit_code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit code."""
    _replace_closed_streams()
    verb, rest = _split_verb(list(sys.argv[1:] if arguments is None else arguments))
    if verb is None:
        return 2
    if verb in SERVICES:
        catch_sighup()  # a service manager may send SIGHUP while their modules load
    module_name, help_text = VERBS[verb]
    set_threshold(COLLECT_EVERY)
    atexit.register(freeze)  # saves the last garbage collection, 0.2 s
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # numpy would start unused threads
    try:
        module = importlib.import_module(module_name)
    except KeyboardInterrupt:  # most of a short command's time is spent here
        print_lines(f"tiered: {INTERRUPTED}", file=sys.stderr)
        return EXIT_INTERRUPTED
    parser = _Parser(prog=f"tiered {verb}", description=help_text, epilog=EXIT_CODES, allow_abbrev=False)
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="print the traceback of an error")
    before = os.umask(PRIVATE_UMASK)
    if verb in (
        "export",
        "sql",
    ):
        # Other users' programs read their files, as far as the caller's umask allows.
        os.umask(before)
    try:
        return run_verb(module.execute, parser.parse_intermixed_args(_with_relative_times(rest)))
    finally:
        os.umask(before)  # the caller's, if it is a program


def _with_relative_times(words: list[str]) -> list[str]:
    """The words of a command line with ``--since -1h`` joined to ``--since=-1h``: argparse takes a word that begins
    with a hyphen for an option."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and RELATIVE.fullmatch(word):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _split_verb(words: list[str]) -> tuple[str | None, list[str]]:
    """The verb, and the words after it. Without any word the help is printed and the verb is None; ``--help``,
    ``--version`` and an unknown verb end the process."""
    parser = _Parser(
        prog="tiered",
        description="Tiered storage for Apache RocketMQ: archive a broker's messages and read them back.",
        epilog=_verb_table(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"tiered {VERSION}")
    parser.add_argument("verb", choices=list(VERBS), metavar="VERB", help="one of the verbs below")
    if not words:
        parser.print_help(sys.stderr)
        return None, []
    if words[0] in VERBS:
        return words[0], words[1:]
    return str(parser.parse_args(words[:1]).verb), words[1:]


def _verb_table() -> str:
    width = max(map(len, VERBS))
    lines = ["each verb has --help"]
    for title, group in GROUPS.items():
        lines += ["", f"{title}:", *(f"  {verb:<{width}}  {text}" for verb, (_, text) in group.items())]
    return "\n".join([*lines, "", EXIT_CODES])


def run_verb(
    execute: Callable[[argparse.Namespace], int],
    options: argparse.Namespace,
    *,
    program: str = "tiered",
    known: Callable[[Exception], TieredError | None] = lambda error: None,
) -> int:
    """Run ``execute`` of a verb and return its exit code; an error is printed as one line on stderr. ``known`` returns
    the TieredError that an error of another library (Spark) was raised for, or None: then it is an internal error."""

    def report(message: str, code: int) -> int:
        if options.debug:
            print_lines(*traceback.format_exc().splitlines(), file=sys.stderr)
        print_lines(f"{program}: {message}", file=sys.stderr)
        return code

    try:
        code = int(execute(options))
        sys.stdout.flush()
    except BrokenPipeError:
        _discard_output()  # the reader closed the pipe (`tiered cat … | head`)
        return 0
    except KeyboardInterrupt:
        return report(INTERRUPTED, EXIT_INTERRUPTED)
    except Exception as error:
        expected = error if isinstance(error, TieredError) else known(error)
        if expected is not None:
            return report(" ".join(str(expected).split()), expected.exit_code)
        if isinstance(error, OSError) and error.errno in _REFUSED_OUTPUT and error.filename is None:
            # Without a file name it is standard output: errors of other files have one, or are TieredErrors.
            _discard_output()
            return report(f"cannot write the output: {error.strerror}", StoreFullError.exit_code)
        message = f"internal error, {type(error).__name__}: {' '.join(str(error).split())[:500]}"
        return report(f"{message}; report it with the output of --debug", EXIT_INTERNAL)
    return code


def _replace_closed_streams() -> None:
    """Streams that the parent closed (`>&-`) are None: nothing could be printed."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115


def _discard_output() -> None:
    """Discard unwritten output, also at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
