"""Output of all commands: tables, JSON, and sizes, durations and times for people.

Data goes to stdout, everything else to stderr.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from tiered.model.dates import DATES_END_MS


def print_json(document: Any) -> None:
    """One indented JSON document."""
    _print_json(document, orjson.OPT_INDENT_2)


def print_json_line(document: Any) -> None:
    """One JSON document on one line."""
    _print_json(document, 0)


def _print_json(document: Any, option: int) -> None:
    # As bytes: JSON is UTF-8 even if the terminal is not.
    try:
        text = orjson.dumps(document, option=option | orjson.OPT_APPEND_NEWLINE)
    except TypeError:  # a path or name that is not valid UTF-8
        indent = 2 if option & orjson.OPT_INDENT_2 else None
        text = json.dumps(document, indent=indent, default=str).encode("ascii") + b"\n"
    sys.stdout.buffer.write(text)


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
    """A table with aligned columns, numbers to the right."""
    texts = [[_cell(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    numeric = [bool(rows) and all(_is_number(row[i]) for row in rows) for i in range(len(header))]
    for line in (list(header), *texts):
        cells = (
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        )
        print("  ".join(cells).rstrip())


def size_text(size_bytes: float) -> str:
    """``1.5 MiB``."""
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")


def duration_text(duration_s: float | None) -> str:
    """``3m 20s``; ``-`` when unknown."""
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
    """UTC to the second; ``-`` for none. After the year 9999, as in damaged records, the number."""
    if timestamp_ms <= 0:
        return "-"
    if timestamp_ms > DATES_END_MS:
        return f"{timestamp_ms} ms"
    return datetime.fromtimestamp(timestamp_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _cell(value: Any) -> str:
    return f"{value:,}" if _is_number(value) else str(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
