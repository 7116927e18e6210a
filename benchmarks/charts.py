"""Draws the main figures: ``python -m benchmarks.charts docs/results/figures/*.jsonl --out docs/results/charts.svg``.

Reads the lines of JSON that the benchmarks of archiving, reading, serving and ageing wrote; the last summary of each
store, client or number of commits counts. Owns the drawing. Does not own what is measured.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import Row

COLOURS = {"tiered": "#0072b2", "Java peer": "#d55e00", "parts alone": "#999999"} | {
    "broker": "#d55e00",
    "tiered, warm": "#0072b2",
    "tiered, cold": "#56b4e9",
}
READS = {
    "walk-1": "iterator,\n1 queue",
    "walk-16": "iterator,\n16 queues",
    "seq-1": "pulls,\n1 queue",
    "seq-16": "pulls,\n16 queues",
}
STORES = {
    "A": "A: 256 B,\n16 queues",
    "B": "B: 1 KiB,\n16 queues",
    "D": "D: 256 B,\n10,000 queues",
    "E": "E: 1 KiB,\n10,000 queues",
}
Groups = Mapping[str, Mapping[str, float | None]]
"""Bars by group and name; None: not measured."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw all panels for which there are figures; returns 1 when there are none."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.charts", description=main.__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("charts.svg"))
    options = parser.parse_args(arguments)
    rows = [json.loads(line) for path in options.files for line in path.read_text("utf-8").splitlines()]
    bars = {
        title: groups
        for title, groups in (
            ("Archiving: messages a second", archiving(rows)),
            ("Reading store B from a cold start: messages a second", reading(rows)),
            ("Serving Java consumers: messages a second", serving(rows)),
        )
        if groups
    }
    ages = ageing(rows)
    if not bars and not ages:
        print("these files hold no summary of archiving, reading, serving or ageing", file=sys.stderr)
        return 1
    draw(options.out, bars, ages)
    return 0


def archiving(rows: Sequence[Row]) -> Groups:
    """Of ``benchmarks.offload`` to files, by store."""
    found = {
        row["store"]: row for row in rows if _is_summary(row, "data_objects") and row["target"] == "file"
    }
    return {
        STORES.get(store, f"store {store}"): {
            "tiered": row["work_messages_per_s"],
            "Java peer": row["peer_messages_per_s"],
            "parts alone": row["parts_messages_per_s"],
        }
        for store, row in sorted(found.items())
    }


def reading(rows: Sequence[Row]) -> Groups:
    """Of ``benchmarks.cold_read`` of store B from files, by way of reading."""
    found = [
        row for row in rows if _is_summary(row, "seq-1") and (row["store"], row["target"]) == ("B", "file")
    ]
    return {
        label: {
            "tiered": row[read]["messages_per_s"],
            "Java peer": row[read]["peer_best_messages_per_s"],
            "parts alone": row["parts_messages_per_s"],
        }
        for row in found[-1:]
        for read, label in READS.items()
    }


def serving(rows: Sequence[Row]) -> Groups:
    """Of ``benchmarks.serving``, by client and number of queues."""
    found = {(row["client"], row["queues"]): row for row in rows if _is_summary(row, "warm")}
    return {
        f"{client},\n{queues} queues": {
            name: (row[server] or {}).get("messages_per_s")
            for name, server in (("broker", "broker"), ("tiered, warm", "warm"), ("tiered, cold", "cold"))
        }
        for (client, queues), row in found.items()
    }


def ageing(rows: Sequence[Row]) -> dict[int, dict[int, float]]:
    """Of ``benchmarks.aging``: ms of CPU a cycle by number of commits, by number of queues."""
    found: dict[int, dict[int, float]] = {}
    for row in rows:
        if "commits" in row and "cycle_cpu_ms" in row:
            found.setdefault(row["queues"], {})[row["commits"]] = row["cycle_cpu_ms"]
    return found


def _is_summary(row: Row, field: str) -> bool:
    return row.get("what") == "summary" and field in row


def draw(path: Path, bars: Mapping[str, Groups], ages: Mapping[int, Mapping[int, float]]) -> None:
    """One panel below the other."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "rocketmq-tiered"  # equal figures, equal file
    from matplotlib import pyplot

    count = len(bars) + bool(ages)
    figure, panels = pyplot.subplots(count, 1, figsize=(9, 3.2 * count), layout="constrained", squeeze=False)
    for (title, groups), axes in zip(bars.items(), panels[:, 0], strict=False):
        _bars(axes, title, groups)
    if ages:
        axes = panels[-1, 0]
        for queues, points in sorted(ages.items()):
            commits = sorted(points)
            axes.plot(commits, [points[one] for one in commits], "o-", label=f"{queues:,} queues")
        highest_ms = max(max(points.values()) for points in ages.values())
        axes.set(xscale="log", xlabel="commits of the archive", ylabel="ms CPU", ylim=(0, 1.2 * highest_ms))
        axes.set_title("Ageing: CPU of a commit", loc="left", fontsize=11)
        axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _bars(axes: Any, title: str, groups: Groups) -> None:
    names = [name for name in next(iter(groups.values())) if any(bars[name] for bars in groups.values())]
    width = 0.8 / len(names)
    for place, name in enumerate(names):
        values = [bars[name] or 0.0 for bars in groups.values()]
        at = [group + (place - (len(names) - 1) / 2) * width for group in range(len(groups))]
        drawn = axes.bar(at, values, width, label=name, color=COLOURS[name])
        axes.bar_label(drawn, [f"{value / 1000:,.0f} k" if value else "" for value in values], fontsize=7)
    axes.set_xticks(range(len(groups)), list(groups), fontsize=8)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.0f} k")
    axes.set_title(title, loc="left", fontsize=11)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    axes.spines[["top", "right"]].set_visible(False)


if __name__ == "__main__":
    sys.exit(main())
