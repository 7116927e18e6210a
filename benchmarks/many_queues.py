"""Processor time and memory by the number of queues: ``python -m benchmarks.many_queues --profiles A,D,F``.

Each store becomes an archive in files, and every command runs on it as a process of its own, in an order in which none
changes what a later one measures: all messages expire at the end. Keys are unique, so that key compaction reads all of
them and drops nothing. Prints a Markdown table: seconds (user and system, by ``wait4``; of reads without their start),
peak memory, and how many times the twin's seconds in 16 queues that is; what misses its bound is bold. Owns the
commands and the bounds.
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from benchmarks.backfill import NAMES, TIERED
from benchmarks.machine import ChildRun, run_child
from benchmarks.recording import record
from benchmarks.report import MIB, Row
from benchmarks.stores import PROFILES, BenchStore, StoreProfile, ensure_store, read_properties

BOUNDS = {10_000: (1.5, 3.0), 100_000: (2.5, 6.0)}
"""Times the processor time of 16 queues, by queues: usually, and of reading objects that were not compacted."""
RSS_BYTES_MAX = 512 * MIB
WARM_UP_SHARE = 0.001
WAYS = ("walk-1", "seq-16", "random")
FRESH_READS = (*WAYS, "cat --all")
QUIETLY = ("/bin/sh", "-c", 'exec "$@" >/dev/null', "sh")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure; returns 1 when a bound is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.many_queues", description=main.__doc__)
    parser.add_argument(
        "--profiles", default="A,D,F,B,E", help="a store of 16 queues comes before those compared with it"
    )
    parser.add_argument("--only", default="", help="comma-separated rows (default: all)")
    parser.add_argument("--scale", type=float, default=1.0)
    parser.add_argument("--work", type=Path, default=Path("build/bench"))
    parser.add_argument("--out", type=Path, default=Path("many_queues.jsonl"))
    options = parser.parse_args(arguments)
    return record(options.out, measured(options), summarized, table)


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """A row for each command on each store."""
    profiles = [PROFILES[name] for name in options.profiles.split(",")]
    only = set(filter(None, options.only.split(",")))
    # Compiles modules, so that the first row doesn't.
    for _ in _rows(profiles[0].scaled(WARM_UP_SHARE), options.work, only and only | {"backfill"}):
        pass
    for profile in profiles:
        yield from _rows(profile.scaled(options.scale), options.work, only)


def _rows(profile: StoreProfile, work: Path, only: Set[str]) -> Iterator[Row]:
    store = ensure_store(work / "stores", profile)
    directory = work / "archives" / store.path.name
    for what, command in commands(store, directory):
        if only and what not in only:
            continue
        if what == "backfill":
            shutil.rmtree(directory, ignore_errors=True)
        child = run_child(command, bytecode_cache=work / "pycache")
        shutil.rmtree(directory.parent / "restored", ignore_errors=True)
        if child.exit_code:
            raise RuntimeError(f"{what} of {profile.name}: exit code {child.exit_code}\n{child.output}")
        yield {
            "what": what,
            "profile": profile.name,
            "queues": profile.queues,
            "twin": profile.twin,
            **_figures(what, child),
        }


def commands(store: BenchStore, directory: Path) -> Iterator[tuple[str, Sequence[str]]]:
    """The rows of the table, each with its command."""
    url, properties = f"file://{directory.absolute()}", read_properties(store.path)
    files, restored = store.path / "commitlog", directory.parent / "restored"
    conf, rules = directory.parent / "broker.conf", directory.parent / "keys.toml"
    directory.parent.mkdir(parents=True, exist_ok=True)
    conf.write_text(
        f"mappedFileSizeCommitLog={max(path.stat().st_size for path in files.iterdir())}\n", "ascii"
    )
    middle_ms = (int(properties["first"]) + int(properties["last"])) // 2
    rules.write_text('[[topics.rules]]\npattern = "*"\nkey_compaction = "on"\n', "ascii")

    def tiered(*words: str) -> Sequence[str]:
        return [str(TIERED), *words]

    yield "backfill", tiered("backfill", str(store.path), url, *NAMES)
    yield "verify --full", tiered("verify", url, "--full")
    yield "ls", [*QUIETLY, *tiered("ls", url)]
    yield "sql count", tiered("sql", url, "SELECT count(*) FROM messages")
    yield "query --key", tiered("query", url, "--topic", "Bench0000", "--key", "K0000000000", "--all-time")
    yield "offset --time", tiered("offset", url, "Bench0000", "--queue", "0", "--time", str(middle_ms))
    for way in WAYS:
        yield way, [sys.executable, "-m", "benchmarks.cold_read_ours", way, url, *NAMES]
    yield "cat --all", [*QUIETLY, *tiered("cat", url, "--all")]
    for layout in ("same", "compact"):
        words = ("restore", url, str(restored), *NAMES, "--broker-conf", str(conf), "--layout", layout)
        yield f"restore --layout {layout}", tiered(*words)
    kept = ("--set=key_compaction.min_age_ms=0", "--rules", str(rules), "--apply")
    yield "compact-keys", tiered("compact-keys", url, *kept)
    joined = ("--set=compaction.min_age_ms=0", "--apply")
    yield "compact", tiered("compact", url, *joined)
    brief = ("--set=retention.ttl=1h", "--set=retention.min_archived=1s")
    yield "expire", tiered("expire", url, *brief, "--yes", "--apply")
    yield "gc", tiered("gc", url, "--grace", "0s", "--apply")


def _figures(what: str, child: ChildRun) -> Row:
    """Processor time and peak memory; of the reads alone where the process reports them."""
    if what not in WAYS:
        return {"cpu_s": round(child.cpu_s, 2), "peak_bytes": child.peak_rss_bytes}
    found = json.loads(child.output.splitlines()[-1])
    cpu_s = round(found["cpu_us_per_message"] * found["messages"] / 1e6, 4)
    return {"cpu_s": cpu_s, "peak_bytes": found.get("peak_bytes", child.peak_rss_bytes)}


def summarized(rows: Sequence[Row]) -> list[Row]:
    """The rows with their ratio to the twin, and what they miss."""
    alone = {(row["profile"], row["what"]): row["cpu_s"] for row in rows}
    found = []
    for row in rows:
        before = alone.get((row["twin"], row["what"]))
        ratio = round(row["cpu_s"] / before, 1) if before else None
        bound = BOUNDS.get(row["queues"], (1.0, 1.0))[row["what"] in FRESH_READS]
        missed = ["cpu_s"] if ratio is not None and ratio > bound else []
        missed += ["peak_bytes"] if row["peak_bytes"] > RSS_BYTES_MAX else []
        found.append({**row, "ratio": ratio, "ok": not missed, "missed": missed})
    return found


def table(rows: Sequence[Row]) -> str:
    """A line for each command, a column for each store."""
    profiles = list(dict.fromkeys(row["profile"] for row in rows))
    lines = [f"| processor time, peak memory | {' | '.join(profiles)} |", "|---" * (len(profiles) + 1) + "|"]
    cells = {(row["what"], row["profile"]): _cell(row) for row in rows}
    for what in dict.fromkeys(row["what"] for row in rows):
        lines.append(f"| `{what}` | {' | '.join(cells.get((what, one), '') for one in profiles)} |")
    return "\n".join(lines)


def _cell(row: Row) -> str:
    times = "" if row["ratio"] is None else f", {row['ratio']} ×"
    figures = {"cpu_s": f"{row['cpu_s']:.1f} s{times}", "peak_bytes": f"{row['peak_bytes'] // MIB} MiB"}
    return ", ".join(f"**{text}**" if name in row["missed"] else text for name, text in figures.items())


if __name__ == "__main__":
    sys.exit(main())
