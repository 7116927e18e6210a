"""Output of all commands: lines, tables, JSON, log entries for people, and sizes, durations and times for people.

Data goes to stdout, everything else to stderr. Names and bodies are chosen by others: characters that act on a
terminal or hide text are escaped, in JSON too, whose values stay the same.
"""

import json
import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TextIO

import orjson

from tiered.model.dates import DATES_END_MS

_HIDDEN = (
    r"\x7f-\x9f\xad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f"
    r"\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    r"\U0001d173-\U0001d17a\U000e0000-\U000e007f"
)
"""Unicode's control, format (bidirectional too), surrogate and separator characters, without those below 0x20."""
NAMES_SHOWN = 5
_UNPRINTABLE = re.compile(rf"[\x00-\x1f{_HIDDEN}]")
_UNPRINTABLE_IN_JSON = re.compile(f"[{_HIDDEN}]")


def printable(text: str) -> str:
    """``text`` for people at a terminal: characters that act on a terminal, break the line or hide text are escaped as
    in Python, such as ``\\x1b``. A backslash in ``text`` stays as it is."""
    return _UNPRINTABLE.sub(lambda found: repr(found[0])[1:-1], text)


def escaped_json(data: bytes) -> bytes:
    """JSON ``data`` with the same characters inside strings escaped."""
    if data.isascii() and b"\x7f" not in data:
        return data
    return _UNPRINTABLE_IN_JSON.sub(_json_escape, data.decode()).encode()


def _json_escape(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be")
    return "".join(f"\\u{units[i : i + 2].hex()}" for i in range(0, len(units), 2))


def print_lines(*lines: str, file: TextIO | None = None) -> None:
    """Each of ``lines`` as one line, to stdout unless ``file`` is given."""
    for line in lines:
        print(printable(line), file=file, flush=file is not None)


_MARKS = {True: ("\u2714", "32", "ok  "), False: ("\u2718", "31", "FAIL"), None: ("-", "2", "-   ")}
"""Result -> mark and color on a terminal, and word elsewhere."""


def print_marked(is_good: bool | None, line: str) -> None:
    """Print ``line`` behind a mark for its result: green or red on a terminal, a word elsewhere. ``is_good`` None: the
    result is neither good nor bad."""
    mark, color, word = _MARKS[is_good]
    if sys.stdout.isatty() and not os.environ.get("NO_COLOR"):
        print(f"\033[{color}m{mark}\033[0m {printable(line)}", flush=True)
    else:
        print(f"{word} {printable(line)}", flush=True)


RECORD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
"""Attributes of every log record; all others come from ``extra``."""


class PlainFormatter(logging.Formatter):
    """``12:00:00 WARNING message (name=value, …)``: one line for a person at a terminal."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s", "%H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        """The line, and the lines of a trace."""
        return "\n".join(map(printable, super().format(record).split("\n")))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """The line, followed by the ``extra`` attributes."""
        line = super().formatMessage(record)
        extra = ", ".join(
            f"{name}={value}" for name, value in vars(record).items() if name not in RECORD_ATTRIBUTES
        )
        return " ".join((f"{line} ({extra})" if extra else line).split("\n"))


def clear_screen() -> None:
    """Clear the terminal."""
    print("\033[H\033[2J", end="")


def print_json(document: Any) -> None:
    """One indented JSON document."""
    _print_json(document, orjson.OPT_INDENT_2)


def print_json_line(document: Any) -> None:
    """One JSON document on one line."""
    _print_json(document, 0)


def _print_json(document: Any, option: int) -> None:
    """Print ``document`` as JSON to stdout, with an option of orjson; characters that act on a terminal are escaped."""
    # As bytes: JSON is UTF-8 even if the terminal is not.
    try:
        text = orjson.dumps(document, option=option | orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a path or name that is not valid UTF-8
        indent = 2 if option & orjson.OPT_INDENT_2 else None
        text = json.dumps(document, indent=indent, default=str).encode("ascii") + b"\n"
    sys.stdout.buffer.write(escaped_json(text))


def camel_names(document: Any) -> Any:
    """``document`` with its field names as JSON has them: ``lag_messages`` becomes ``lagMessages``."""
    if isinstance(document, Mapping):
        return {camel_name(name): camel_names(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [camel_names(item) for item in document]
    return document


def camel_name(name: str) -> str:
    """``lag_messages`` as ``lagMessages``."""
    first, *others = name.split("_")
    return first + "".join(map(str.capitalize, others))


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Print a table with aligned columns; columns of integers are aligned to the right."""
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    for line in (list(header), *texts):
        cells = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        )
        print("  ".join(cells).rstrip())


def counted(count: int | float, noun: str) -> str:
    """``1 object``, ``1,234 objects``."""
    number = f"{count:,.0f}"
    return f"{number} {noun}" if number == "1" else f"{number} {noun}s"


def names_text(names: Sequence[str]) -> str:
    """The first NAMES_SHOWN names, and how many more there are."""
    more = len(names) - NAMES_SHOWN
    return ", ".join(names[:NAMES_SHOWN]) + (f" and {more:,} more" if more > 0 else "")


def size_text(size_bytes: float) -> str:
    """``1.5 MiB``."""
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")


def duration_text(duration_s: float | None) -> str:
    """A duration in its two largest units, such as ``3m 20s``; ``-`` for None, which is unknown."""
    if duration_s is None:
        return "-"
    if duration_s < 60:
        return f"{duration_s:.3g}s"
    minutes, seconds = divmod(int(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {seconds:02}s"


def time_text(timestamp_ms: int) -> str:
    """A time in ms since the epoch as text in UTC, to the second; ``-`` for 0. A time after the year 9999, as damaged
    records have, is shown as the number."""
    if timestamp_ms <= 0:
        return "-"
    if timestamp_ms > DATES_END_MS:
        return f"{timestamp_ms} ms"
    return datetime.fromtimestamp(timestamp_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cell(value: Any) -> str:
    return f"{value:,}" if _is_number(value) else printable(str(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
