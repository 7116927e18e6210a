"""Prefetch windows over time: ``python -m benchmarks.aimd --plot windows.png``. Prints one JSON document.

A fast, a slow and a stalling consumer read one topic each from ``file://`` with a fixed time added to every GET; once
with prefetch and once without. Blocks expire unread after seconds instead of minutes, so that a run of half a
minute shows growing, halving and recovery. Owns the consumers, the slow store, the samples of the windows, and the plot
of these.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import note
from benchmarks.synthetic_store import StoreSpec, topic_name, write_store
from fetcher.access import ArchiveAccess
from fetcher.io.request_scheduler import ThreadRangeReader
from fetcher.io.waiting import run_sync
from fetcher.prefetch.prefetch_window import PrefetchWindow
from fetcher.prefetch.readers import ReaderKey
from fetcher.pulls.message_fetcher import counting_waits
from fetcher.rows.pull import PullRequest, PullStatus
from tiered.catalog.archives import open_archive
from tiered.catalog.catalog_reader import load
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.object_store.open_store import open_store
from tiered.settings.sections import FetchSettings, PrefetchSettings, Settings

COUNT = 32
MAX_BYTES = 16 * 1024 * 1024
SLOW_THINK_S = 0.1
STALLING_THINK_S = 0.004
STALLS_S = 4.0
QUEUE_OFFSET_AT = 20
"""Where a record holds its queue offset, 8 bytes, big-endian."""
NAMES = ("fast", "slow", "stalling")
SAMPLE_S = 0.01
"""How often the size of a window is looked at."""


@dataclass(frozen=True)
class Plan:
    """One invocation. Times in seconds."""

    seconds: float
    added_s: float
    think_s: float
    unread_s: float
    body_bytes: int


@dataclass
class Consumer:
    """One consumer and its counts. ``think_s(seconds since the start)``: its time for a batch."""

    name: str
    topic: str
    think_s: Callable[[float], float]
    offset: int = 0
    pulls: int = 0
    latencies_s: list[float] = field(default_factory=list)
    held_bytes_max: int = 0
    window: PrefetchWindow | None = None
    sizes: list[tuple[float, int]] = field(default_factory=list)
    """(seconds since the start, size of the window), where it changed."""
    waits: list[tuple[float, float]] = field(default_factory=list)
    """(seconds since the start, seconds) of pulls that waited for the store."""

    def sample(self, elapsed_s: float) -> None:
        """Look at the window."""
        if self.window is not None and (not self.sizes or self.sizes[-1][1] != self.window.size):
            self.sizes.append((elapsed_s, self.window.size))

    @property
    def halvings(self) -> list[tuple[float, int]]:
        """Where the window became smaller."""
        return [after for before, after in pairwise(self.sizes) if after[1] < before[1]]


class DelayedReader(ThreadRangeReader):
    """Adds ``added_s`` to every GET: latency, not bandwidth."""

    def __init__(self, store: ObjectStore, threads: int, added_s: float) -> None:
        super().__init__(_DelayedStore(store, added_s), threads)  # type: ignore[arg-type]


class _DelayedStore:
    def __init__(self, store: ObjectStore, added_s: float) -> None:
        self._store, self._added_s = store, added_s

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        time.sleep(self._added_s)
        return self._store.get_range(key, offset, length)

    def get(self, key: str, max_bytes: int) -> bytes:
        time.sleep(self._added_s)
        return self._store.get(key, max_bytes)


# -- the archive ----------------------------------------------------------------------------------------------


def make_archive(directory: Path, plan: Plan) -> str:
    """A topic of one queue for each consumer, long enough for the fast one; returns the archive's URL."""
    spec = StoreSpec(topics=len(NAMES), queues_per_topic=1, body_bytes=plan.body_bytes, file_bytes=1 << 28)
    fast = int(plan.seconds * COUNT / max(plan.think_s, 0.0005))
    write_store(directory / "store", spec, messages=fast * len(NAMES))
    url = f"file://{directory}/archive"
    note(f"{fast} messages a topic, {plan.body_bytes} bytes each")
    command = [sys.executable, "-m", "rocketmq_tiered.cli", "backfill", str(directory / "store"), url]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return url


# -- one run --------------------------------------------------------------------------------------------------


def run(url: str, plan: Plan, *, ahead: bool) -> tuple[dict[str, Any], list[Consumer]]:
    """Run all consumers; returns numbers, and the consumers."""
    settings = Settings(
        fetch=FetchSettings(unread_expiry_ms=int(plan.unread_s * 1000)),
        prefetch=replace(PrefetchSettings(), enabled=ahead),
    )
    root = open_store(url)
    place = open_archive(root, None, None)
    reader = DelayedReader(place.store, 32, plan.added_s)
    access = ArchiveAccess(url, root, place, load(place.store), reader, settings)
    stall_s = plan.seconds * 0.35, plan.seconds * 0.35 + STALLS_S

    def stalling(elapsed_s: float) -> float:
        return stall_s[1] - elapsed_s if stall_s[0] <= elapsed_s < stall_s[1] else STALLING_THINK_S

    consumers = [
        Consumer("fast", topic_name(0), lambda elapsed_s: plan.think_s),
        Consumer("slow", topic_name(1), lambda elapsed_s: SLOW_THINK_S),
        Consumer("stalling", topic_name(2), stalling),
    ]
    began_s = time.monotonic()
    threads = [
        threading.Thread(target=_consume, args=(access, consumer, began_s, plan.seconds))
        for consumer in consumers
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for consumer in consumers:
            consumer.sample(time.monotonic() - began_s)
        time.sleep(SAMPLE_S)
    row = _row(access, consumers, plan.seconds)
    access.close()
    return row | {"stall_s": list(stall_s)}, consumers


def _consume(access: ArchiveAccess, consumer: Consumer, began_s: float, seconds: float) -> None:
    while (elapsed_s := time.monotonic() - began_s) < seconds:
        before = time.perf_counter()
        request = PullRequest(
            consumer.topic, 0, consumer.offset, count=COUNT, max_bytes=MAX_BYTES, group=consumer.name
        )
        result, waits = run_sync(counting_waits(access.fetcher.pull(request)))
        consumer.latencies_s.append(time.perf_counter() - before)
        if waits:
            consumer.waits.append((elapsed_s, consumer.latencies_s[-1]))
        if result.status is not PullStatus.FOUND:
            break
        said = [
            int.from_bytes(record[QUEUE_OFFSET_AT : QUEUE_OFFSET_AT + 8], "big")
            for record in result.batch.records()
        ]
        if said != list(range(consumer.offset, result.next_offset)):
            raise RuntimeError(f"{consumer.name}: offsets {said[:3]}… at {consumer.offset}")
        consumer.offset = result.next_offset
        consumer.pulls += 1
        if consumer.window is None:
            reader = access.fetcher.readers.find(ReaderKey(consumer.name, QueueKey(consumer.topic, 0, 0)))
            assert reader is not None
            consumer.window = reader.window
        consumer.held_bytes_max = max(consumer.held_bytes_max, consumer.window.unread_bytes)
        time.sleep(max(0.0, consumer.think_s(elapsed_s)))


def _row(access: ArchiveAccess, consumers: list[Consumer], seconds: float) -> dict[str, Any]:
    statistics = access.source.statistics()
    row: dict[str, Any] = {}
    for consumer in consumers:
        latencies_ms = np.array(consumer.latencies_s) * 1000
        row[consumer.name] = {
            "pulls": consumer.pulls,
            "messages": consumer.offset,
            "waited_share": round(len(consumer.waits) / max(1, consumer.pulls), 4),
            "waited_time_share": round(sum(wait_s for _, wait_s in consumer.waits) / seconds, 4),
            "pull_ms": {
                name: round(float(np.percentile(latencies_ms, percent)), 3)
                for name, percent in (("p50", 50), ("p99", 99), ("max", 100))
            },
            "unread_bytes_max": consumer.held_bytes_max,
            "halvings": len(consumer.halvings),
        }
    row["bytes_fetched"] = statistics.bytes_fetched
    row["bytes_fetched_twice_share"] = round(
        statistics.bytes_fetched_twice / max(1, statistics.bytes_fetched), 4
    )
    row["requests"] = statistics.requests
    row["memory_peak_bytes"] = statistics.peak_bytes
    return row


# -- the plot -------------------------------------------------------------------------------------------------


def plot(path: Path, consumers: list[Consumer], plan: Plan, row: dict[str, Any]) -> None:
    """Window over time for the three consumers."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {"fast": "#0072b2", "slow": "#009e73", "stalling": "#d55e00"}
    figure, panels = pyplot.subplots(len(NAMES), 1, sharex=True, figsize=(10, 8), layout="constrained")
    for consumer, axes in zip(consumers, panels, strict=True):
        name, halved = consumer.name, consumer.halvings
        times, sizes = zip(*consumer.sizes, (plan.seconds, consumer.sizes[-1][1]), strict=True)
        axes.step(times, sizes, where="post", color=colours[name], linewidth=1.6, label="window")
        if halved:
            axes.plot(
                *zip(*halved, strict=True), "v", color="black", markersize=7, label="halved: expired unread"
            )
        waits = [time_s for time_s, _ in consumer.waits]
        axes.plot(
            waits,
            [0] * len(waits),
            "|",
            color="#cc79a7",
            markersize=12,
            label="pull waited for the store",
            zorder=3,
        )
        if name == "stalling":
            axes.axvspan(*row["stall_s"], color="0.9", label="consumer stalls")
        share = row[name]["waited_share"]
        axes.set_title(
            f"{name}: {row[name]['messages'] / plan.seconds:,.0f} messages/s, "
            f"{share:.1%} of {row[name]['pulls']:,} pulls waited",
            loc="left",
            fontsize=11,
        )
        axes.set_ylabel("window (messages)")
        axes.set_ylim(-0.03 * max(sizes), 1.1 * max(sizes))
        axes.set_xlim(0, plan.seconds)
        axes.grid(alpha=0.3)
        axes.legend(loc="lower right", fontsize=9, framealpha=0.9)
    panels[-1].set_xlabel(
        f"seconds; {plan.added_s * 1000:.0f} ms added to every GET, blocks expire unread after {plan.unread_s:g} s"
    )
    figure.savefig(path, dpi=130)


def main(arguments: list[str] | None = None) -> int:
    """See the module."""
    options = _parser().parse_args(arguments)
    plan = Plan(
        options.seconds,
        options.added_ms / 1000,
        options.think_ms / 1000,
        options.unread_s,
        options.body_bytes,
    )
    with tempfile.TemporaryDirectory(dir=options.work, prefix="aimd-") as work:
        url = make_archive(Path(work), plan)
        with_ahead, consumers = run(url, plan, ahead=True)
        without, _ = run(url, plan, ahead=False)
    document = {
        "added_ms": options.added_ms,
        "fast_think_ms": options.think_ms,
        "unread_s": plan.unread_s,
        "seconds": plan.seconds,
        "prefetch_on": with_ahead,
        "prefetch_off": without,
    }
    if options.plot:
        plot(options.plot, consumers, plan, with_ahead)
    json.dump(document, sys.stdout, indent=1)
    print()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="prefetch: share of pulls that wait, and windows over time")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of each of the two runs")
    parser.add_argument("--added-ms", type=float, default=50.0, help="added to every GET")
    parser.add_argument("--think-ms", type=float, default=4.0, help="time of the fast consumer for a batch")
    parser.add_argument("--unread-s", type=float, default=1.0, help="when blocks expire unread")
    parser.add_argument("--body-bytes", type=int, default=1024)
    parser.add_argument("--work", type=Path, help="directory for store and archive; removed afterwards")
    parser.add_argument("--plot", type=Path, metavar="PNG")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
