"""Rate and cost of cold reads: ``python -m benchmarks.cold_read --out cold_read.jsonl``.

In one run, on the same stores: the parts of a read alone; the fetcher, queue after queue and 16 queues at once, in
batches of the Python API and in pulls of 32; single random offsets, offsets by time, keys; and (``--peer DIR``)
RocketMQ's own tiered store reading what it archived of the same store, in pulls of 32, as it is by default and with its
cache off. The page cache is dropped before every figure. Every figure is a JSON line, and so is the summary of each
store with its targets met and missed; a table follows. Owns the order of measurements.
"""

import argparse
import json
import os
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.archive_targets import ArchiveTarget, open_target
from benchmarks.backfill import NAMES, run_backfill
from benchmarks.cold_read_ours import READS as OUR_READS
from benchmarks.cold_read_peer import reads as peer_reads
from benchmarks.cold_read_peer import ship
from benchmarks.cold_read_report import summarize, table
from benchmarks.machine import await_quiet, run_child
from benchmarks.peer import Peer, peer_at
from benchmarks.recording import record
from benchmarks.report import Row
from benchmarks.stores import PEER_QUEUES_MAX, PROFILES, BenchStore, StoreProfile, ensure_store

INDEXED = ("index.after_backfill=true",)
"""Keys are looked up in index files, as in a followed archive, and not in unindexed objects."""


@dataclass(frozen=True)
class Plan:
    """What to measure and where to work."""

    profiles: list[StoreProfile]
    targets: list[str]
    runs: int
    work: Path
    peer: Peer | None
    quiet_wait_s: float


def main() -> int:
    """Measure, print the table, return 1 when a target is missed."""
    options = _parser().parse_args()
    plan = _plan(options)
    plan.work.mkdir(parents=True, exist_ok=True)
    return record(options.out, measure(plan), summarize, table)


def measure(plan: Plan) -> Iterator[Row]:
    """Rows as they are measured."""
    for profile in plan.profiles:
        peer = plan.peer if profile.queues <= PEER_QUEUES_MAX else None
        store = ensure_store(plan.work, profile, peer.make_store if peer else None)
        common: Row = {"store": profile.name, "made_by": store.made_by}
        for name in plan.targets:
            with open_target(name, plan.work) as target:
                run_backfill(store, target, plan.work, INDEXED)
                for number in range(plan.runs):
                    for row in _target_rows(target, plan):
                        yield common | {"target": name, "run": number} | row
        if peer is not None:
            for row in _peer_rows(peer, store, plan):
                yield common | row


def _target_rows(target: ArchiveTarget, plan: Plan) -> Iterator[Row]:
    for read in ("parts", *OUR_READS):
        module = "benchmarks.cold_read_parts" if read == "parts" else "benchmarks.cold_read_ours"
        await_quiet(plan.quiet_wait_s)
        child = run_child(
            [
                sys.executable,
                "-m",
                module,
                *([] if read == "parts" else [read]),
                target.url,
                *NAMES,
                *target.arguments,
                "--drop",
                str(plan.work / f"target-{target.name}"),
            ],
            environment=target.environment,
            friends=target.server_pids,
            bytecode_cache=plan.work / "pycache",
        )
        if child.exit_code != 0:
            raise RuntimeError(f"{read} of {target.url}: {child.output[-4000:]}")
        row = json.loads(child.output.splitlines()[-1])
        what = "parts" if read == "parts" else "ours"
        memory = {"peak_rss_mib": child.peak_rss_bytes >> 20, "others_cores": child.others_cores}
        yield {"what": what, "read": read, **memory, **row}


def _peer_rows(peer: Peer, store: BenchStore, plan: Plan) -> Iterator[Row]:
    tier = plan.work / "peer-work" / "tier-read"
    try:
        ship(peer, store, tier)
        for number in range(plan.runs):
            await_quiet(plan.quiet_wait_s)
            for row in peer_reads(peer, store, tier):
                yield {"run": number, **row}
    finally:
        shutil.rmtree(tier, ignore_errors=True)


def _plan(options: argparse.Namespace) -> Plan:
    profiles = [PROFILES[name].scaled(options.messages_scale) for name in options.stores.split(",")]
    peer = peer_at(options.peer, options.jars, options.work)
    return Plan(
        profiles, options.targets.split(","), options.runs, options.work.resolve(), peer, options.quiet_wait
    )


def _parser() -> argparse.ArgumentParser:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rocketmq-tiered"
    default_peer = os.environ.get("PEER_DIR")
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cold_read", description=main.__doc__)
    parser.add_argument("--stores", default="A,B,C,D,E,F", help=f"of {','.join(PROFILES)}")
    parser.add_argument(
        "--messages-scale", type=float, default=1.0, help="share of the messages of each store"
    )
    parser.add_argument("--targets", default="file,minio", help="where to archive to")
    parser.add_argument(
        "--runs", type=int, default=3, help="measure everything this often; medians are shown"
    )
    parser.add_argument("--out", type=Path, default=Path("cold_read.jsonl"), help="one JSON object a line")
    parser.add_argument("--work", type=Path, default=cache / "bench", help="stores are kept here")
    parser.add_argument(
        "--peer",
        type=Path,
        default=Path(default_peer) if default_peer else None,
        help="directory of the Java peer's harness (default: $PEER_DIR)",
    )
    parser.add_argument("--jars", type=Path, default=cache / "jars", help="jars, a directory a version")
    parser.add_argument(
        "--quiet-wait",
        type=float,
        default=0.0,
        metavar="S",
        help="before each figure, wait up to S seconds for an idle machine",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
