"""JSON-lines results as Markdown: ``python -m benchmarks.results_table build/soak/soak.jsonl >> docs/results/DATE.md``.

The last result of each name counts; figures stand in the order they were written. Owns the table. Does not own what
is measured nor the limits (tests/soak).
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]
_FRAME = ("what", "at", "ok", "missed")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print one table for each result; returns 1 when a limit was missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.results_table", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    options = parser.parse_args(arguments)
    rows = newest(json.loads(line) for path in options.files for line in path.read_text("utf-8").splitlines())
    print("\n\n".join([overview(rows), *map(details, rows)]))
    return int(not all(row["ok"] for row in rows))


def newest(rows: Iterable[Row]) -> list[Row]:
    """The last row of each name, names in order of first appearance."""
    found: dict[str, Row] = {}
    for row in rows:
        found[row["what"]] = row
    return list(found.values())


def overview(rows: Sequence[Row]) -> str:
    """One line a result."""
    lines = ["| result | at | limits |", "|---|---|---|"]
    for row in rows:
        verdict = "held" if row["ok"] else f"**missed: {', '.join(row['missed'])}**"
        lines.append(f"| {row['what']} | {row['at']} | {verdict} |")
    return "\n".join(lines)


def details(row: Row) -> str:
    """All figures of one result."""
    lines = [f"### {row['what']}", "", "| figure | value |", "|---|---|"]
    lines += [
        f"| {name.replace('_', ' ')} | {shown(value)} |" for name, value in row.items() if name not in _FRAME
    ]
    return "\n".join(lines)


def shown(value: Any) -> str:
    """A figure for people: thousands separated, tables and lists in one line."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "-"}[value]
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {shown(item)}" for name, item in value.items())
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(map(shown, value)) or "none"
    return str(value).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
