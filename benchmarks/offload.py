"""Rate and cost of archiving: ``python -m benchmarks.offload --out results.jsonl``.

In one run, on the same stores: ``cp`` + fsync, the parts of the write path alone on two threads, ``tiered
backfill`` as a whole process into each target, and (``--peer DIR``) RocketMQ's own tiered store, tuned.
Medians over ``--runs``, ratios against the targets, every figure as a JSON line. An unmeasured run fills the
kernel cache; figures include the cores that others used (``others_cores``). Owns the order of measurements.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.archive_targets import open_target
from benchmarks.backfill import BackfillResult, run_backfill, verify
from benchmarks.machine import (
    await_quiet,
    copy_and_fsync,
    drop_from_page_cache,
    log_files,
    note,
    run_child,
    warm,
)
from benchmarks.peer import Peer, PeerResult, peer_at
from benchmarks.recording import record
from benchmarks.report import CycleSizes, Row, summarize, table
from benchmarks.stores import PEER_QUEUES_MAX, PROFILES, BenchStore, StoreProfile, ensure_store
from tiered.object_store.create_race import RACERS, ROUNDS
from tiered.settings.sections import OffloadSettings

SOAK_STORES = ("L",)
START_STORE_SCALE = 0.0001
TRIAL_PUTS = ROUNDS * (RACERS + 1)
"""Of the trial whether concurrent creates exclude each other: once an archive, so none of a cycle's."""
HOT_TAIL_BYTES = 1 << 30
"""Of a soak store, the newest bytes are in the page cache beforehand, as beside a running broker."""


@dataclass(frozen=True)
class Plan:
    """What to measure and where to work."""

    profiles: list[StoreProfile]
    targets: list[str]
    runs: int
    work: Path
    peer: Peer | None
    verify: bool
    quiet_wait_s: float = 0.0
    """Before each figure, wait this long for others to leave the machine alone."""


def main() -> int:
    """Measure, print the table, return 1 when a target is missed."""
    options = _parser().parse_args()
    plan = _plan(options)
    plan.work.mkdir(parents=True, exist_ok=True)
    settings = OffloadSettings()
    sizes = CycleSizes(settings.batch_bytes, settings.split_bytes)
    return record(options.out, measure(plan), partial(summarize, sizes=sizes), table, quiet=("requests",))


def measure(plan: Plan) -> Iterator[Row]:
    """Rows as they are measured; the ways of moving the same bytes take turns in every run."""
    yield from _starts(plan)
    for profile in plan.profiles:
        is_soak = profile.name in SOAK_STORES
        make = plan.peer.make_store if plan.peer and not is_soak else None
        note(
            f"store {profile.name}: {profile.messages:,} × {profile.body_bytes} B, {profile.queues:,} queues"
        )
        store = ensure_store(plan.work, profile, make)
        for number in range(1 if is_soak else plan.runs):
            common: Row = {"store": profile.name, "run": number, "made_by": store.made_by}
            warm(store.path)
            yield common | _copy(store, plan)
            for target in plan.targets:
                yield common | _parts(store, target, plan)
                yield common | _backfill(store, target, plan, check=number == 0, is_soak=is_soak)
            if plan.peer and profile.queues <= PEER_QUEUES_MAX and not is_soak:
                warm(store.path)
                _settle(plan)
                yield common | _peer_row(plan.peer.dispatch(store))


def _settle(plan: Plan) -> None:
    """Wait until earlier writes are done and, if requested, the machine is idle."""
    os.sync()
    await_quiet(plan.quiet_wait_s)


def _copy(store: BenchStore, plan: Plan) -> Row:
    _settle(plan)
    wall_s, cpu_s = copy_and_fsync(store.path, plan.work / "copy", store.log_bytes)
    return {
        "what": "copy",
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "mb_per_s": round(store.log_bytes / 1e6 / wall_s, 1),
    }


def _parts(store: BenchStore, target_name: str, plan: Plan) -> Row:
    """In a process of its own, with its own memory and threads."""
    with open_target(target_name, plan.work) as target:
        warm(store.path)
        _settle(plan)
        command = [sys.executable, "-m", "benchmarks.parts", str(store.path), target.url, *target.arguments]
        child = run_child(command, environment=target.environment, friends=target.server_pids)
    if child.exit_code != 0:
        raise RuntimeError(child.output)
    found: Row = json.loads(child.output.splitlines()[-1])
    return {"what": "parts", "target": target_name, "others_cores": child.others_cores, **found}


def _backfill(store: BenchStore, target_name: str, plan: Plan, *, check: bool, is_soak: bool) -> Row:
    with open_target(target_name, plan.work) as target:
        if is_soak:
            _leave_hot_tail(store)
        else:
            warm(store.path)
        _settle(plan)
        result = run_backfill(store, target, plan.work)
        again = run_backfill(store, target, plan.work)
        row = _backfill_row(store, target_name, result, again) | {"is_soak": is_soak}
        if check and plan.verify:
            row["verify_wall_s"] = round(verify(target, plan.work).wall_s, 3)
    return row


def _backfill_row(store: BenchStore, target: str, result: BackfillResult, again: BackfillResult) -> Row:
    """``again`` found everything archived already."""
    run, stored, messages = result.run, result.stored, store.profile.messages
    puts = sum(
        count for name, count in (result.requests or {}).items() if name in ("PutObject", "PutObjectPart")
    )
    return {
        "what": "backfill",
        "target": target,
        "twin": store.profile.twin,
        "messages": messages,
        "log_bytes": store.log_bytes,
        "wall_s": round(run.wall_s, 3),
        "cpu_s": round(run.cpu_s, 3),
        "user_s": round(run.user_s, 3),
        "system_s": round(run.system_s, 3),
        "messages_per_s": round(messages / run.wall_s),
        "again_wall_s": round(again.run.wall_s, 3),
        "again_cpu_s": round(again.run.cpu_s, 3),
        "again_new_data_objects": again.stored.data_objects - stored.data_objects,
        "again_requests": again.requests,
        "mb_per_s": round(store.log_bytes / 1e6 / run.wall_s, 1),
        "cpu_us_per_message": round(run.cpu_s * 1e6 / messages, 3),
        "peak_rss_bytes": run.peak_rss_bytes,
        "peak_anonymous_bytes": run.peak_anonymous_bytes,
        "memory_growth": round(result.memory_growth, 3),
        "data_objects": stored.data_objects,
        "data_bytes": stored.data_bytes,
        "catalog_objects": stored.catalog_objects,
        "objects": stored.counts,
        "stored_ratio": round(store.log_bytes / max(1, stored.data_bytes), 3),
        "requests": result.requests,
        "puts_beyond_objects": max(0, puts - TRIAL_PUTS - sum(stored.counts.values()))
        if result.requests
        else 0,
        "resident_before_bytes": result.resident_before_bytes,
        "resident_after_bytes": result.resident_after_bytes,
        "resident_control_kept": round(result.control_kept, 4),
        "resident_change": round(
            abs(result.resident_after_bytes / max(1, result.resident_before_bytes) - result.control_kept), 4
        ),
        "others_cores": run.others_cores,
    }


def _peer_row(result: PeerResult) -> Row:
    return {
        "what": "peer",
        "messages": result.messages,
        "messages_per_s": round(result.messages_per_s),
        "messages_per_s_with_index": round(result.messages_per_s_with_index),
        "cpu_us_per_message": round(result.cpu_us_per_message, 3),
        "peak_rss_bytes": result.peak_rss_bytes,
        "metadata_mb": result.metadata_mb,
        "others_cores": result.others_cores,
    }


def _leave_hot_tail(store: BenchStore) -> None:
    files = log_files(store.path)
    drop_from_page_cache(files)
    left = min(HOT_TAIL_BYTES, store.log_bytes)
    for path in reversed(files):
        used = min(path.stat().st_size, max(0, store.log_bytes - int(path.name)))
        with path.open("rb") as file:
            file.seek(max(0, used - left))
            left -= len(file.read(min(left, used)))


def _starts(plan: Plan) -> Iterator[Row]:
    """Cost of a run with almost nothing to archive: the process itself.

    A first run per target is not counted: it compiles what is not compiled yet, and so do the parts.
    """
    store = ensure_store(plan.work, PROFILES["A"].scaled(START_STORE_SCALE))
    for name in plan.targets:
        _parts(store, name, plan)
        for number in range(plan.runs + 1):
            with open_target(name, plan.work) as target:
                _settle(plan)
                run = run_backfill(store, target, plan.work).run
            figures = {"wall_s": round(run.wall_s, 3), "cpu_s": round(run.cpu_s, 3)}
            if number > 0:
                yield {"store": "start", "what": "start", "target": name, **figures}
            else:
                note(f"kernels ready, {name}: {figures}")


def _plan(options: argparse.Namespace) -> Plan:
    profiles = [PROFILES[name].scaled(options.messages_scale) for name in options.stores.split(",")]
    peer = peer_at(options.peer, options.jars, options.work)
    targets = options.targets.split(",")
    work = options.work.resolve()
    return Plan(profiles, targets, options.runs, work, peer, not options.no_verify, options.quiet_wait)


def _parser() -> argparse.ArgumentParser:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rocketmq-tiered"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.offload", description=main.__doc__)
    parser.add_argument(
        "--stores", default="A,B,C,D,E,F", help=f"of {','.join(PROFILES)} (default: all but L)"
    )
    parser.add_argument(
        "--messages-scale", type=float, default=1.0, help="share of the messages of each store"
    )
    parser.add_argument("--targets", default="file,minio", help="where to archive to")
    parser.add_argument(
        "--runs", type=int, default=3, help="measure everything this often; medians are shown"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("offload.jsonl"), help="results, one JSON object a line"
    )
    parser.add_argument("--work", type=Path, default=cache / "bench", help="stores are kept here")
    default_peer = os.environ.get("PEER_DIR")
    parser.add_argument(
        "--peer",
        type=Path,
        default=Path(default_peer) if default_peer else None,
        help="directory of the Java peer's harness (default: $PEER_DIR)",
    )
    parser.add_argument(
        "--jars", type=Path, default=cache / "jars", help="jars of RocketMQ, a directory a version"
    )
    parser.add_argument(
        "--quiet-wait",
        type=float,
        default=0.0,
        metavar="S",
        help="before each figure, wait up to S seconds for an idle machine",
    )
    parser.add_argument("--no-verify", action="store_true", help="do not check what was written")
    return parser


if __name__ == "__main__":
    sys.exit(main())
