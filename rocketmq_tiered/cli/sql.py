"""`tiered sql`: SQL on the topics of an archive, by DuckDB in this process."""

from __future__ import annotations

import argparse
import base64
import csv
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from datetime import date, datetime
from io import StringIO
from typing import TYPE_CHECKING, Any

import orjson

from rocketmq_tiered.cli.arguments import add_archive, add_version, settings_of
from rocketmq_tiered.sql.archive import open_archive
from tiered.console import print_json_line, print_lines
from tiered.errors import TieredError

if TYPE_CHECKING:
    from rocketmq_tiered.sql import SqlSession

ROWS_AT_A_TIME = 1000
TABLE_ROWS = 1000
"""Rows of a printed table; more of them are counted."""
PROMPT, CONTINUED = "tiered sql> ", "        ... "


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """ARCHIVE_URL, STATEMENT, form."""
    add_archive(parser)
    parser.add_argument(
        "statement",
        metavar="STATEMENT",
        nargs="?",
        help="one or more SQL statements; each topic is a table (default: read them from stdin, or prompt for them)",
    )
    add_version(parser)
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print one JSON document a row, bytes as base64")
    form.add_argument("--csv", action="store_true", help="print CSV with a header line")


def execute(options: argparse.Namespace) -> int:
    """Print the rows of each statement. Exit code 2 for a wrong statement, 3 for an unknown topic."""
    settings = settings_of(options).settings
    printed = _print_json if options.json else _print_csv if options.csv else _print_table
    with open_archive(options.url, settings=settings, version=options.at_version) as archive:
        session = archive.session()
        if options.statement is None and sys.stdin.isatty():
            _prompt(session, printed)
        else:
            _run(session, sys.stdin.read() if options.statement is None else options.statement, printed)
    return 0


def _run(session: SqlSession, text: str, printed: Callable[[SqlSession, Any], None]) -> None:
    for statement in session.statements(text):
        with session.errors():
            printed(session, statement)


def _prompt(session: SqlSession, printed: Callable[[SqlSession, Any], None]) -> None:
    """Statements of a person, each up to its semicolon, until the end of input."""
    with suppress(ImportError):
        import readline  # noqa: F401 - input() edits lines with it
    print_lines("SHOW TABLES lists the topics, DESCRIBE the columns of one. Ctrl-D ends.")
    text = ""
    while True:
        try:
            text += input(CONTINUED if text else PROMPT) + "\n"
            if text.strip() and not text.rstrip().endswith(";"):
                continue
            _run(session, text, printed)
        except EOFError:
            print_lines("")
            return
        except TieredError as error:
            print_lines(f"tiered: {error}", file=sys.stderr)
        except KeyboardInterrupt:
            print_lines("interrupted", file=sys.stderr)
        text = ""


def _print_table(session: SqlSession, statement: Any) -> None:
    found = session.query(statement)
    if found is None:
        return
    rows = found.limit(TABLE_ROWS + 1).materialize()
    with redirect_stdout(StringIO()) as text:
        rows.limit(TABLE_ROWS).show(max_rows=TABLE_ROWS)
    print_lines(*text.getvalue().rstrip("\n").split("\n"))
    if rows.shape[0] > TABLE_ROWS:
        print_lines(f"first {TABLE_ROWS:,} rows; --csv and --json print all")


def _rows(session: SqlSession, statement: Any) -> tuple[list[str], Iterator[list[Any]]]:
    """Names of the columns, and rows as plain values, read a few at a time; JSON columns as their values."""
    done = session.execute(statement)
    columns = [(name, str(kind)) for name, kind, *_ in done.description or ()]

    def rows() -> Iterator[list[Any]]:
        while found := done.fetchmany(ROWS_AT_A_TIME):
            for row in found:
                yield [
                    orjson.Fragment(value) if kind == "JSON" and value is not None else _plain(value)
                    for (_, kind), value in zip(columns, row, strict=True)
                ]

    return [name for name, _ in columns], rows()


def _plain(value: Any) -> Any:
    """``value`` as JSON has it: bytes as base64, times in ISO 8601, unknown types as text."""
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
    names, rows = _rows(session, statement)
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(names)
    for row in rows:
        is_text = [isinstance(value, str | int | float | None) for value in row]
        out.writerow(
            [
                value if plain else orjson.dumps(value).decode()
                for value, plain in zip(row, is_text, strict=True)
            ]
        )
