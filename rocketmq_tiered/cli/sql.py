"""`tiered sql`: SQL on the topics of an archive, by DuckDB in this process."""

from __future__ import annotations

import argparse
import base64
import csv
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from datetime import date, datetime
from io import StringIO
from typing import TYPE_CHECKING, Any

import orjson

from rocketmq_tiered.cli.arguments import add_archive, add_version, settings_of
from rocketmq_tiered.process.progress import Progress
from rocketmq_tiered.sql.archive import open_archive
from tiered.console import print_json_line, print_lines
from tiered.errors import TieredError

if TYPE_CHECKING:
    from rocketmq_tiered.sql import SqlSession

ROWS_AT_A_TIME = 1000
TABLE_ROWS = 1000
"""Rows of a printed table; more of them are counted."""
EXIT_INTERRUPTED = 130
PROGRESS_AFTER_S, INTERRUPT_S = 2.0, 0.7
PROMPT, CONTINUED = "tiered sql> ", "        ... "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the archive, the statements, what they may do, and the form of their rows."""
    add_archive(parser)
    parser.add_argument(
        "statement",
        metavar="STATEMENT",
        nargs="?",
        help="one or more SQL statements, in which each topic is a table (default: read them from stdin, or prompt for "
        "them)",
    )
    add_version(parser)
    parser.add_argument(
        "--allow-files",
        action="store_true",
        help="let statements read and write files and networks as this user (default: only COPY … TO a new file)",
    )
    parser.add_argument(
        "--explode-batches",
        action="store_true",
        help="read a batch as one row for each of its messages, as in Spark (default: one row for the batch)",
    )
    parser.add_argument(
        "--permissive",
        action="store_true",
        help="skip unreadable messages and report them, instead of failing",
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print each row as a JSON document, bytes as base64"
    )
    form.add_argument(
        "--csv", action="store_true", help="print rows as CSV, after a line with the names of the columns"
    )


def execute(options: argparse.Namespace) -> int:
    """Run the statements of the command line, of stdin or of a prompt, and print their rows. Exit code 2 for a wrong
    statement, 3 for an unknown topic."""
    settings = settings_of(options).settings
    printed = _print_json if options.json else _print_csv if options.csv else _print_table
    with (
        open_archive(options.url, settings=settings, version=options.at_version) as archive,
        ThreadPoolExecutor(1, "sql") as pool,
        _Interrupts() as interrupts,
    ):
        session = archive.session(
            allow_files=options.allow_files,
            explode_batches=options.explode_batches,
            permissive=options.permissive,
        )
        interrupts.watch(session)
        is_mixed = (options.json or options.csv) and sys.stdout.isatty()
        shows_progress = sys.stderr.isatty() and not is_mixed
        statements = _Statements(session, pool, printed, shows_progress)
        if options.statement is None and sys.stdin.isatty():
            interrupts.prompted = statements
            _prompt(statements)
        else:
            statements.run(sys.stdin.read() if options.statement is None else options.statement)
    return 0


class _Interrupts:
    """Handles Ctrl-C itself, because DuckDB loses exceptions that are raised while it calls Python."""

    def __init__(self) -> None:
        self._session: SqlSession | None = None
        self._was_early = False
        """Whether Ctrl-C was pressed before there was a session."""
        self.prompted: _Statements | None = None
        """The statements of the prompt, if there is one: Ctrl-C ends the running one, and the prompt stays."""

    def __enter__(self) -> _Interrupts:
        self._before = signal.getsignal(signal.SIGINT)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *raised: object) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._before)

    def watch(self, session: SqlSession) -> None:
        """From now on Ctrl-C ends the process at once, and deletes the temporary files of ``session``."""
        self._session = session
        if self._was_early:
            self._interrupted()

    def _interrupted(self, *signalled: object) -> None:
        """Handle SIGINT: end the running statement and return to the prompt; without a prompt, or if the statement does
        not end, delete the session's temporary files and end the process. Before there is a session, only note it."""
        if self._session is None:
            self._was_early = True
            return
        if self.prompted is not None and self.prompted.stop():
            raise KeyboardInterrupt
        self._session.abandon()
        os.write(2, b"tiered: interrupted\n")
        os._exit(EXIT_INTERRUPTED)


@dataclass
class _Statements:
    """Runs statements in a thread of its own, so that the main thread can end them. DuckDB does not notice an interrupt
    inside of a long operator, but it holds no lock of Python's there."""

    session: SqlSession
    pool: Executor
    printed: Callable[[SqlSession, Any], None]
    shows_progress: bool
    done: Future[None] | None = None
    """The last statements that were run."""

    def run(self, text: str) -> None:
        """Run the statements in ``text`` and print their rows; after PROGRESS_AFTER_S show the progress. Raises what
        they raise."""
        self.done = done = self.pool.submit(self._print, text)
        if self.shows_progress and not wait([done], PROGRESS_AFTER_S).done:
            with Progress("read", 0, unit="messages") as progress:
                self.session.report = progress.update
                wait([done])
        done.result()

    def stop(self) -> bool:
        """Interrupt the running statement, and return whether it has ended within INTERRUPT_S. It is called by a signal
        handler: it takes no lock that the interrupted ``run`` may hold."""
        self.session.interrupt()
        until_s = time.monotonic() + INTERRUPT_S
        while self.done is not None and not self.done.done() and time.monotonic() < until_s:
            time.sleep(0.02)
        return self.done is None or self.done.done()

    def _print(self, text: str) -> None:
        for statement in self.session.statements(text):
            with self.session.errors(statement.query):
                self.printed(self.session, statement)


def _prompt(statements: _Statements) -> None:
    """Read statements from the terminal, each up to its semicolon, and run them, until the end of input. Errors are
    printed, and the prompt stays."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines with it
    print_lines("SHOW TABLES lists the topics, DESCRIBE the columns of one. Ctrl-D ends.")
    text = ""
    while True:
        try:
            text += input(CONTINUED if text else PROMPT) + "\n"
            if text.strip() and not text.rstrip().endswith(";"):
                continue
            statements.run(text)
        except EOFError:
            print_lines("")
            return
        except TieredError as error:
            print_lines(f"tiered: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print_lines("interrupted", file=sys.stderr)
        text = ""


def _print_table(session: SqlSession, statement: Any) -> None:
    """Print the first TABLE_ROWS rows of a statement's result as a table, drawn by DuckDB, and whether there are more.
    A statement that only does something, such as COPY, prints nothing."""
    result = session.query(statement)
    if result.columns == ["Success"]:
        return
    rows = result.limit(TABLE_ROWS + 1).materialize()
    with redirect_stdout(StringIO()) as text:
        rows.limit(TABLE_ROWS).show(max_rows=TABLE_ROWS)
    print_lines(*text.getvalue().rstrip("\n").split("\n"))
    if rows.shape[0] > TABLE_ROWS:
        print_lines(f"first {TABLE_ROWS:,} rows; --csv and --json print all")


def _rows(session: SqlSession, statement: Any) -> tuple[list[str], Iterator[list[Any]]]:
    """Run a statement: returns the names of its columns, and its rows as lists of values that JSON has, read a thousand
    at a time. A statement that only does something, such as COPY, has neither."""
    done = session.execute(statement)
    columns = [(name, str(kind)) for name, kind, *_ in done.description or ()]
    if statement.type.name != "SELECT" and columns in ([("Success", "BOOLEAN")], [("Count", "BIGINT")]):
        return [], iter(())

    def rows() -> Iterator[list[Any]]:
        while fetched := done.fetchmany(ROWS_AT_A_TIME):
            for row in fetched:
                yield [
                    orjson.Fragment(value) if kind == "JSON" and value is not None else _plain(value)
                    for (_, kind), value in zip(columns, row, strict=True)
                ]

    return [name for name, _ in columns], rows()


def _plain(value: Any) -> Any:
    """``value`` of a row as a value that JSON has: bytes as base64, times in ISO 8601, unknown types as text."""
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime | date):
        return value.isoformat()
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return list(map(_plain, value))
    return value if isinstance(value, str | int | float | bool | type(None)) else str(value)


def _print_json(session: SqlSession, statement: Any) -> None:
    names, rows = _rows(session, statement)
    for row in rows:
        print_json_line(dict(zip(names, row, strict=True)))


def _print_csv(session: SqlSession, statement: Any) -> None:
    """Print all rows of a statement as CSV, after a line with the names of the columns. A value that is neither text
    nor a number is printed as JSON."""
    names, rows = _rows(session, statement)
    out = csv.writer(sys.stdout, lineterminator="\n")
    if names:
        out.writerow(names)
    for row in rows:
        is_text = [isinstance(value, str | int | float | None) for value in row]
        out.writerow(
            [
                value if plain else orjson.dumps(value).decode()
                for value, plain in zip(row, is_text, strict=True)
            ]
        )
