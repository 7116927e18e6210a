"""Timers: ``python -m benchmarks.timers [--count N] [--pending N] [--broker HOST:PORT]``.

Enqueue: a store of timers is archived, and the same bytes under a topic that is none, in turn. Pending: timers of two
years in commits of 10^5, merged; memory, objects and bytes; then a process of its own hands over a month of them to a
broker that takes everything: its peak memory. Dequeue: timers of one hour are handed over to a broker, which needs the
topic ``orders``, and requests that are ready beforehand. Prints a line of JSON for each figure.
"""

import argparse
import gc
import json
import multiprocessing
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from benchmarks.recording import loaded
from benchmarks.timer_store import STORED_MS, write_store
from fetcher.access import open_access
from rocketmq_tiered.sending.outgoing import OutgoingMessage
from rocketmq_tiered.sending.timer_broker import RemoteTimerBroker
from rocketmq_tiered.sending.timer_delivery import TimerDelivery, put_timers
from rocketmq_tiered.sending.timer_messages import TimerMessages
from rocketmq_tiered.sending.timer_send import TimerSend
from tiered.archive.task import run_pass
from tiered.archive.timers import TimerFiles, hash_of
from tiered.broker_store.store import open_broker_store
from tiered.catalog.catalog_reader import load
from tiered.catalog.commit import CommitDraft, CommitKind, encode_root
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.clock import Clock
from tiered.errors import UnavailableError
from tiered.formats.keys import archive_prefix
from tiered.formats.timer_object import ENTRY_DTYPE
from tiered.kernels.scan import warm_up
from tiered.model.queue import QueueKey, TopicFilter
from tiered.model.timer import HOUR_MS
from tiered.object_store.file import FileStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.remoting.client import BrokerClient
from tiered.settings.sections import OffloadSettings, Settings, TimerSettings
from uploader.bound_source import no_offsets
from uploader.log_rule import LogLimits
from uploader.offload import Offloader, OffloadIdentity

CLUSTER, BROKER = "Bench", "bench-a"
YEARS_MS = 2 * 365 * 24 * HOUR_MS
COMMIT_ENTRIES = 100_000
MESSAGES = 100_000
"""Of the pending timers, which share them: their messages were archived before, and only the hours that are handed over
are read."""


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


def archive(store: Path, root: FileStore) -> tuple[float, float]:
    """Seconds of a backfill, and of CPU."""
    with open_broker_store(store) as opened:
        offloader = Offloader(
            opened,
            root,
            OffloadIdentity(CLUSTER, BROKER, "bench", "backfill"),
            OffloadSettings(),
            topic_filter=TopicFilter(cluster=CLUSTER, broker=BROKER),
            offsets_source=no_offsets,
            log_limits=LogLimits(False, same_broker=False),
        )
        begun_s, cpu_s = time.perf_counter(), time.process_time()
        offloader.run(threading.Event(), follow=False)
        return time.perf_counter() - begun_s, time.process_time() - cpu_s


def enqueue(work: Path, count: int, runs: int) -> None:
    """Timers of two years in random order, and the same messages in a plain topic."""
    rng = np.random.default_rng(1)
    times = (STORED_MS + rng.integers(0, YEARS_MS, count)).tolist()
    topics = {"timers": "TIERED_TIMERS", "plain": "PLAIN_MESSAGE"}
    for kind, topic in topics.items():
        write_store(work / kind, count, times.__getitem__, topic=topic)
    warm_up()
    archive(work / "timers", FileStore(work / "warm"))
    found: dict[str, list[tuple[float, float]]] = {kind: [] for kind in topics}
    for run in range(runs):
        for kind in sorted(topics, reverse=bool(run % 2)):
            root = work / f"{kind}-{run}"
            found[kind].append(archive(work / kind, FileStore(root)))
            shutil.rmtree(root)
    wall, cpu = (
        np.array([[seconds[at] for seconds in found[kind]] for kind in ("plain", "timers")]) for at in (0, 1)
    )
    report(
        "enqueue",
        messages=count,
        runs=runs,
        **{
            f"{kind}_per_s": round(count / float(np.median(wall[row])))
            for row, kind in enumerate(("plain", "timers"))
        },
        **{
            f"{kind}_cpu_us": round(1e6 * float(np.median(cpu[row])) / count, 3)
            for row, kind in enumerate(("plain", "timers"))
        },
        share_of_wall=round(float(np.median(wall[0] / wall[1])), 3),
        share_of_cpu=round(float(np.median(cpu[0] / cpu[1])), 3),
    )


def pending(work: Path, count: int) -> None:
    """``count`` timers over two years, as commits of 10^5 bring them, merged by the task."""
    write_store(work / "small", MESSAGES, lambda number: STORED_MS + YEARS_MS + number)
    root = FileStore(work / "pending")
    archive(work / "small", root)
    store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    commits = MaintenanceCommit.opened(store, load(store), "bench", Clock(wall_ms=lambda: STORED_MS))
    task = TimerDelivery(
        commits, TimerSettings(), Nowhere(), lambda places: {}, clock=Clock(wall_ms=lambda: STORED_MS)
    )
    rng, queues = np.random.default_rng(2), [QueueKey("TIERED_TIMERS", 0, 0)]
    hashes = np.array([hash_of(f"T{number:011d}") for number in range(MESSAGES)], np.uint64)
    begun_s = time.perf_counter()
    for first in range(0, count, COMMIT_ENTRIES):
        entries = np.zeros(min(COMMIT_ENTRIES, count - first), ENTRY_DTYPE)
        entries["deliver_ms"] = STORED_MS + 2 * HOUR_MS + rng.integers(0, YEARS_MS, len(entries))
        entries["queue_offset"] = np.arange(first, first + len(entries)) % MESSAGES
        entries["key_hash"] = hashes[entries["queue_offset"]]
        entries["physical_offset"] = (1 << 40) + np.arange(first, first + len(entries))
        ref = put_timers(commits, [(entries, queues, ["orders"])], commits.state.epoch)
        commits.commit(lambda _state, ref=ref: CommitDraft(CommitKind.MAINTENANCE, timers=[ref]))  # type: ignore[misc]
        run_pass(task, commits.refresh)
    built_s = time.perf_counter() - begun_s
    del task
    gc.collect()
    state = load(store)
    before = resident_bytes()
    files = TimerFiles(store)
    hours = files.counts(state).hours
    memory = resident_bytes() - before
    report(
        "pending",
        timers=sum(hours.values()),
        hours=len(hours),
        objects=len(state.timers),
        timer_bytes=sum(one.size_bytes for one in state.timers),
        root_bytes=len(encode_root(state)),
        footers_memory_bytes=memory,
        built_s=round(built_s, 1),
        first_hour_read_ms=round(1000 * read_hour_s(files, state, next(iter(hours))), 1),
        merging_peak_bytes=peak_bytes(),
    )
    child = multiprocessing.get_context("spawn").Process(target=hand_over_month, args=(work / "pending",))
    child.start()
    child.join()


def hand_over_month(place: Path) -> None:
    """What is due after a month, in a process that has done nothing else."""
    store, now_ms = (
        PrefixedStore(FileStore(place), archive_prefix(CLUSTER, BROKER)),
        STORED_MS + 30 * 24 * HOUR_MS,
    )
    commits = MaintenanceCommit.opened(store, load(store), "bench", Clock(wall_ms=lambda: now_ms))
    messages, begun = messages_of(place), peak_bytes()
    task = TimerDelivery(
        commits, TimerSettings(), Anywhere(), messages.read, clock=Clock(wall_ms=lambda: now_ms)
    )
    task.plan(commits.refresh())
    opened = peak_bytes()
    run_pass(task, commits.refresh)
    report(
        "memory",
        handed_over=task.counts.delivered,
        cancelled=task.counts.cancelled,
        dropped=task.counts.dropped,
        pending=task.files.counts(load(store)).pending,
        imported_peak_bytes=begun,
        planned_peak_bytes=opened,
        peak_bytes=peak_bytes(),
    )
    messages.close()


def peak_bytes() -> int:
    """Of this process so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def messages_of(place: Path) -> TimerMessages:
    """Those of the archive."""
    return TimerMessages(
        lambda: open_access(f"file://{place}", cluster=CLUSTER, broker=BROKER, settings=Settings())
    )


def read_hour_s(files: TimerFiles, state: object, hour: int) -> float:
    """Seconds to read one hour's entries."""
    begun_s = time.perf_counter()
    for _ in files.pending(state, hour * HOUR_MS, (hour + 1) * HOUR_MS):  # type: ignore[arg-type]
        pass
    return time.perf_counter() - begun_s


def dequeue(work: Path, count: int, address: str) -> None:
    """``count`` timers of the next hour, which were sent in another order, to a broker."""
    now_ms = time.time_ns() // 1_000_000
    times = (now_ms + np.random.default_rng(3).integers(HOUR_MS // 6, HOUR_MS - 120_000, count)).tolist()
    write_store(work / "due", count, times.__getitem__, first_ms=now_ms - count)
    root = FileStore(work / "due-archive")
    archive(work / "due", root)
    store = PrefixedStore(root, archive_prefix(CLUSTER, BROKER))
    commits = MaintenanceCommit.opened(store, load(store), "bench", Clock())
    messages = messages_of(work / "due-archive")
    broker = RemoteTimerBroker(
        lambda: address,
        lambda where: BrokerClient(where, 10.0),
        lambda: False,
        TimerSettings(rate_per_s=0),
    )
    task = TimerDelivery(commits, TimerSettings(rate_per_s=0), broker, messages.read)
    raw_per_s = ready_per_s(address, min(count, 50_000))
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    failures = 0
    while True:
        try:
            run_pass(task, commits.refresh)
        except UnavailableError:
            # As in the process: a broker that does not answer is queried and tried again.
            failures += 1
        if not commits.refresh().timers:
            break
        time.sleep(1.0)
    seconds, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
    report(
        "dequeue",
        timers=task.counts.delivered,
        found=task.counts.found,
        seconds=round(seconds, 2),
        per_s=round(task.counts.delivered / seconds),
        cpu_us=round(1e6 * cpu_s / count, 1),
        ready_per_s=round(raw_per_s),
        ready_per_s_afterwards=round(ready_per_s(address, min(count, 50_000))),
        failures=failures,
        peak_bytes=peak_bytes(),
    )
    messages.close()
    broker.close()


def ready_per_s(address: str, count: int) -> float:
    """What the broker takes of requests that are ready: the limit of any client in one process."""
    body, now_ms = bytes(range(32, 96)) * 4, time.time_ns() // 1_000_000
    requests = [
        OutgoingMessage(
            "orders", body, {"UNIQ_KEY": f"R{now_ms}{number}", "TIMER_DELIVER_MS": str(now_ms + HOUR_MS // 2)}
        ).request("bench", number % 4)
        for number in range(count)
    ]
    client, begun_s = BrokerClient(address, 600.0), time.perf_counter()
    client.call_many(requests, lambda _place, _answer: None, time.monotonic() + 600)
    client.close()
    return count / (time.perf_counter() - begun_s)


class Nowhere(RemoteTimerBroker):
    """A broker that is never needed."""

    def __init__(self) -> None:
        pass

    def longest_ms(self) -> int:
        return 0


class Anywhere(Nowhere):
    """A broker that takes everything."""

    def longest_ms(self) -> int:
        return 72 * HOUR_MS

    def send(
        self, sends: Sequence[TimerSend], sent: Callable[[TimerSend], None], until_s: float
    ) -> Mapping[int, str]:
        for send in sends:
            sent(send)
        return {}


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def report(what: str, **figures: object) -> None:
    """One line."""
    print(json.dumps(loaded({"what": what, **figures})), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
