"""Timers: ``python -m benchmarks.timers [--count N] [--pending N] [--broker HOST:PORT]``.

Enqueue: a store of timers is archived, and the same bytes under a topic that is none. Pending: timers of two years in
commits of 10^5, merged; memory, objects and bytes. Dequeue: timers that are due are handed over to a broker, which
needs the topic ``orders``. Prints a line of JSON for each figure.
"""

from __future__ import annotations

import argparse
import gc
import json
import resource
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.timer_store import STORED_MS, write_store
from fetcher.access import open_access
from rocketmq_tiered.sending.sender import Sender
from rocketmq_tiered.sending.timer_broker import RemoteTimerBroker
from rocketmq_tiered.sending.timer_delivery import TimerDelivery, put_timers
from rocketmq_tiered.sending.timer_messages import TimerMessages
from rocketmq_tiered.sending.timer_plan import BrokerTimers
from rocketmq_tiered.server.proxy.upstream import InflightLimit, RemotingUpstream
from tiered.archive.task import run_pass
from tiered.archive.timers import TimerFiles
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.snapshot import encode_root
from tiered.formats.keys import archive_prefix
from tiered.formats.timer_object import ENTRY_DTYPE, sorted_entries
from tiered.kernels.scan import warm_up
from tiered.model.queue import QueueKey, TopicFilter
from tiered.model.timer import HOUR_MS
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.remoting.client import BrokerClient
from tiered.settings.sections import OffloadSettings, Settings
from tiered.settings.timer_section import TimerSettings
from uploader.bound_source import no_offsets
from uploader.log_rule import LogLimits
from uploader.offload import Offloader, OffloadIdentity

CLUSTER, BROKER = "Bench", "bench-a"
YEARS_MS = 2 * 365 * 24 * HOUR_MS
COMMIT_ENTRIES = 100_000


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timers", description=main.__doc__)
    parser.add_argument("--count", type=int, default=500_000, help="timers to archive (0: skip)")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pending", type=int, default=1_000_000, help="pending timers (0: skip)")
    parser.add_argument("--broker", default="", help="host:port of a broker to hand over to")
    parser.add_argument("--due", type=int, default=100_000, help="timers to hand over")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        if options.count:
            enqueue(Path(work), options.count, options.runs)
        if options.pending:
            pending(Path(work), options.pending)
        if options.broker:
            dequeue(Path(work), options.due, options.broker)
    return 0


def archive(store: Path, root: FileStore) -> float:
    """Seconds of a backfill."""
    with open_broker_store(store) as opened:
        offloader = Offloader(
            opened, root, OffloadIdentity(CLUSTER, BROKER, "bench", "backfill"), OffloadSettings(),
            topic_filter=TopicFilter(cluster=CLUSTER, broker=BROKER), offsets_source=no_offsets,
            log_limits=LogLimits(False, same_broker=False),
        )  # fmt: skip
        begun_s = time.perf_counter()
        offloader.run(threading.Event(), follow=False)
        return time.perf_counter() - begun_s


def enqueue(work: Path, count: int, runs: int) -> None:
    """Timers of two years in random order, and the same messages in a plain topic."""
    rng = np.random.default_rng(1)
    times = (STORED_MS + rng.integers(0, YEARS_MS, count)).tolist()
    topics = {"timers": "TIERED_TIMERS", "plain": "PLAIN_MESSAGE"}
    for kind, topic in topics.items():
        write_store(work / kind, count, times.__getitem__, topic=topic)
    warm_up()
    archive(work / "timers", FileStore(work / "warm"))
    best: dict[str, list[float]] = {kind: [] for kind in topics}
    for run in range(runs):
        for kind in topics:
            best[kind].append(archive(work / kind, FileStore(work / f"{kind}-{run}")))
    rates = {kind: count / sorted(seconds)[len(seconds) // 2] for kind, seconds in best.items()}
    report(
        "enqueue", messages=count, timers_per_s=round(rates["timers"]), plain_per_s=round(rates["plain"]),
        share=round(rates["timers"] / rates["plain"], 3),
    )  # fmt: skip


def pending(work: Path, count: int) -> None:
    """``count`` timers over two years, as commits of 10^5 bring them, merged by the task."""
    write_store(work / "small", 10, lambda number: STORED_MS + YEARS_MS + number)
    root = FileStore(work / "pending")
    archive(work / "small", root)
    store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    commits = MaintenanceCommit.opened(store, load(store), "bench", lambda: STORED_MS)
    task = TimerDelivery(commits, TimerSettings(), Nowhere(), lambda places: {}, clock_ms=lambda: STORED_MS)
    rng, queues = np.random.default_rng(2), [QueueKey("TIERED_TIMERS", 0, 0)]
    begun_s = time.perf_counter()
    for first in range(0, count, COMMIT_ENTRIES):
        entries = np.zeros(min(COMMIT_ENTRIES, count - first), ENTRY_DTYPE)
        entries["deliver_ms"] = STORED_MS + 2 * HOUR_MS + rng.integers(0, YEARS_MS, len(entries))
        entries["key_hash"] = rng.integers(0, 1 << 63, len(entries))
        entries["queue_offset"] = np.arange(first, first + len(entries)) % 10
        entries["order"] = np.arange(first, first + len(entries)) * 400
        ref = put_timers(commits, sorted_entries(entries), queues, commits.state.epoch)
        commits.commit(lambda _state, ref=ref: CommitDraft(CommitKind.MAINTENANCE, timers=[ref]))  # type: ignore[misc]
        run_pass(task, commits.refresh)
    built_s = time.perf_counter() - begun_s
    del task
    gc.collect()
    state = load(store)
    before = resident_bytes()
    files = TimerFiles(store)
    hours = files.hours(state)
    memory = resident_bytes() - before
    report(
        "pending", timers=sum(hours.values()), hours=len(hours), objects=len(state.timers),
        timer_bytes=sum(one.size_bytes for one in state.timers), root_bytes=len(encode_root(state)),
        footers_memory_bytes=memory, built_s=round(built_s, 1),
        first_hour_read_ms=round(1000 * read_hour_s(files, state, next(iter(hours))), 1),
    )  # fmt: skip


def read_hour_s(files: TimerFiles, state: object, hour: int) -> float:
    """Seconds to read one hour's entries."""
    begun_s = time.perf_counter()
    for _ in files.pending(state, hour * HOUR_MS, (hour + 1) * HOUR_MS):  # type: ignore[arg-type]
        pass
    return time.perf_counter() - begun_s


def dequeue(work: Path, count: int, address: str) -> None:
    """``count`` timers that are due, to a broker."""
    now_ms = time.time_ns() // 1_000_000
    write_store(work / "due", count, lambda number: now_ms + 600_000 + number // 100, first_ms=now_ms)
    root = FileStore(work / "due-archive")
    archive(work / "due", root)
    store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    commits = MaintenanceCommit.opened(store, load(store), "bench", lambda: time.time_ns() // 1_000_000)
    messages = TimerMessages(
        lambda: open_access(
            f"file://{work / 'due-archive'}", cluster=CLUSTER, broker=BROKER, settings=Settings()
        )
    )
    limit = InflightLimit()
    broker = RemoteTimerBroker(
        lambda: address,
        lambda where: BrokerClient(where, 10.0),
        lambda: Sender(lambda where: RemotingUpstream(where, limit), group="bench", is_exact=True),
        lambda: False,
    )
    task = TimerDelivery(commits, TimerSettings(rate_per_s=0), broker, messages.read)
    begun_s = time.perf_counter()
    run_pass(task, commits.refresh)
    seconds = time.perf_counter() - begun_s
    report(
        "dequeue", timers=task.counts.delivered, seconds=round(seconds, 2),
        per_s=round(task.counts.delivered / seconds), left=len(load(store).timers),
    )  # fmt: skip
    messages.close()
    broker.close()


class Nowhere(RemoteTimerBroker):
    """A broker that is never needed."""

    def __init__(self) -> None:
        pass

    def timers(self) -> BrokerTimers:
        return BrokerTimers(0)


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def report(what: str, **figures: object) -> None:
    """One line."""
    print(json.dumps({"what": what, **figures}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
