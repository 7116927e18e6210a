"""What jobs print: tables and JSON to stdout, progress to stderr; sizes, times and durations for people.

Owns the text. What is printed is decided by commands_*.py.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

PROGRESS_S = 2.0


def print_line(text: str) -> None:
    """One line to stdout."""
    sys.stdout.write(f"{text}\n")


def print_json(document: Any) -> None:
    """One indented JSON document."""
    option = orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE
    sys.stdout.write(orjson.dumps(document, option=option).decode())


def print_json_line(document: Any) -> None:
    """One JSON document on one line."""
    sys.stdout.write(orjson.dumps(document, option=orjson.OPT_APPEND_NEWLINE).decode())


def print_table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
    """Columns aligned, numbers to the right."""
    texts = [[f"{cell:,}" if isinstance(cell, int) else str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *texts, strict=True)]
    right = [bool(rows) and all(isinstance(row[i], int) for row in rows) for i in range(len(header))]
    for line in (list(header), *texts):
        cells = (
            text.rjust(width) if is_number else text.ljust(width)
            for text, width, is_number in zip(line, widths, right, strict=True)
        )
        print_line("  ".join(cells).rstrip())


class Progress:
    """Says on stderr, every few seconds, how much is done, how fast, and how long it will take.

    Several parts of the work may report, each under its own name.
    """

    def __init__(
        self,
        label: str,
        *,
        as_text: Callable[[float], str],
        quiet: bool = False,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._label, self._text, self._quiet = label, as_text, quiet
        self._clock_s = clock_s
        self._started_s = self._said_s = clock_s()
        self._parts: dict[str, tuple[int, int]] = {}

    def update(self, done: int, total: int, part: str = "") -> None:
        """``done`` of ``total`` of one part. From any thread."""
        self._parts[part] = (done, total)
        now_s = self._clock_s()
        if self._quiet or now_s - self._said_s < PROGRESS_S:
            return
        self._said_s = now_s
        sys.stderr.write(f"{self.line()}\n")
        sys.stderr.flush()

    def line(self) -> str:
        """``offload 40% 12.0 MiB of 30.0 MiB, 6.0 MiB/s, 3.0s left``."""
        parts = list(self._parts.values())
        done, total = sum(one[0] for one in parts), sum(one[1] for one in parts)
        elapsed_s = self._clock_s() - self._started_s
        rate = done / elapsed_s if elapsed_s > 0 else 0.0
        left = f", {duration_text((total - done) / rate)} left" if rate > 0 else ""
        share = done / total if total else 1.0
        return (
            f"{self._label} {share:.0%} {self._text(done)} of {self._text(total)}, {self._text(rate)}/s{left}"
        )


def size_text(size_bytes: float) -> str:
    """``1.5 MiB``."""
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(amount) < 1024 or unit == "TiB":
            return f"{amount:.0f} {unit}" if unit == "B" or amount == int(amount) else f"{amount:.1f} {unit}"
        amount /= 1024
    raise AssertionError("unreachable")


def duration_text(duration_s: float) -> str:
    """``3m 20s``."""
    if duration_s < 60:
        return f"{duration_s:.3g}s" if duration_s < 10 else f"{duration_s:.0f}s"
    minutes, seconds = divmod(int(duration_s), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d {hours % 24:02}h"
    return f"{hours}h {minutes:02}m" if hours else f"{minutes}m {seconds:02}s"


def time_text(timestamp_ms: int) -> str:
    """UTC to the second; ``–`` for none."""
    if timestamp_ms <= 0:
        return "–"
    return datetime.fromtimestamp(timestamp_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
