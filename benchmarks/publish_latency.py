"""From stored to visible: ``python -m benchmarks.publish_latency --out results.jsonl``.

A process of its own writes messages at a steady rate, the uploader follows it into a directory or any ``--url`` (S3
as the environment says: TIERED_OBJECT_STORE__ENDPOINT_URL and the SDK's credentials), and every commit is timed
against the store timestamp of its oldest message. Then the writer goes idle, and so must the uploader: no requests,
next to no CPU. Owns this one experiment.
"""

import argparse
import json
import os
import shutil
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.live_store import read_word
from benchmarks.recording import loaded
from benchmarks.report import Row
from benchmarks.synthetic_store import StoreSpec
from tiered.broker_store.bound import BrokerOffsets
from tiered.broker_store.store import open_broker_store
from tiered.kernels.scan import warm_up
from tiered.model.queue import TopicFilter
from tiered.object_store.interface import StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.request_metrics import StoreMetrics
from tiered.settings.load import load_settings
from tiered.settings.sections import OffloadSettings, Settings
from uploader.offload import Offloader, OffloadIdentity

RATE = 20_000
BODY_BYTES = 256
LEAD_IN_MS = 4_000
POLL_S = 0.005
BEYOND_AGE_MS_MAX = 1_000
IDLE_CORES_MAX = 0.01


@dataclass(frozen=True)
class Experiment:
    """How long to write, how long to watch the silence after it, at what batch age, into what; url "": a directory."""

    seconds: float
    idle_s: float
    batch_age_ms: int
    url: str = ""
    options: StoreOptions = field(default_factory=lambda: StoreOptions(Settings().object_store))


def main() -> int:
    """Measure publish latency and idle cost; returns 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.publish_latency", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--idle-seconds", type=float, default=60.0)
    parser.add_argument("--url", default="", help="archive to write to; default: a temporary directory")
    parser.add_argument("--batch-age-ms", type=int, default=OffloadSettings().batch_age_ms)
    parser.add_argument("--out", type=Path, default=Path("publish_latency.jsonl"))
    options = parser.parse_args()
    store_options = StoreOptions(load_settings(environment=os.environ).settings.object_store)
    row = measure(
        Experiment(options.seconds, options.idle_seconds, options.batch_age_ms, options.url, store_options)
    )
    with options.out.open("a", encoding="utf-8") as out:
        out.write(json.dumps(row := loaded(row)) + "\n")
    print(json.dumps(row, indent=2))
    return int(not row["ok"])


def measure(experiment: Experiment) -> Row:
    """Write, follow, then be idle."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        warm_up()
        start_ms = time.time_ns() // 1_000_000 + LEAD_IN_MS
        command = [sys.executable, "-m", "benchmarks.live_store", str(directory / "store")]
        flags = {
            "--rate": RATE,
            "--seconds": experiment.seconds,
            "--start-ms": start_ms,
            "--body-bytes": BODY_BYTES,
        }
        words = [str(word) for pair in flags.items() for word in pair]
        writer = subprocess.Popen([*command, *words], stdin=subprocess.PIPE)
        try:
            while not read_ready(directory / "store"):
                time.sleep(POLL_S)
            return _follow(experiment, directory, start_ms)
        finally:
            assert writer.stdin is not None
            writer.stdin.close()
            writer.wait(30)
            shutil.rmtree(directory / "archive", ignore_errors=True)


def read_ready(store: Path) -> bool:
    """Whether the writer has written its first messages."""
    try:
        return read_word(store) > 0
    except (FileNotFoundError, struct.error):  # struct.error: created, and still empty
        return False


def _follow(experiment: Experiment, directory: Path, start_ms: int) -> Row:
    metrics = StoreMetrics()
    store = open_broker_store(directory / "store")
    url = experiment.url or f"file://{directory / 'archive'}"
    archive = open_store(url, experiment.options, metrics=metrics)
    offloader = Offloader(
        store,
        archive,
        OffloadIdentity("BenchCluster", "bench-a", "publish-latency", "run"),
        OffloadSettings(batch_age_ms=experiment.batch_age_ms),
        topic_filter=TopicFilter(),
        offsets_source=lambda: BrokerOffsets(max_phys=read_word(directory / "store")),
    )
    stop = threading.Event()
    failure: list[BaseException] = []

    def work() -> None:
        try:
            offloader.run(stop, follow=True)
        except BaseException as error:  # raised again in the main thread
            failure.append(error)

    thread = threading.Thread(target=work, name="uploader")
    thread.start()
    try:
        row = _watch(experiment, offloader, metrics, directory, start_ms, thread)
    finally:
        stop.set()
        thread.join()
        store.close()
        archive.close()
    if failure:
        raise failure[0]
    return row


def _watch(
    experiment: Experiment,
    offloader: Offloader,
    metrics: StoreMetrics,
    directory: Path,
    start_ms: int,
    thread: threading.Thread,
) -> Row:
    record_bytes = StoreSpec(topics=4, queues_per_topic=4, body_bytes=BODY_BYTES).record_bytes
    total_bytes = int(experiment.seconds * RATE) * record_bytes
    deadline_ms = start_ms + 1000 * experiment.seconds + 10 * experiment.batch_age_ms
    latencies_ms: list[float] = []
    seen_phys = 0
    cpu_began, wall_began = time.process_time(), time.perf_counter()
    while seen_phys < total_bytes and thread.is_alive() and time.time() * 1000 < deadline_ms:
        time.sleep(POLL_S)
        status = offloader.status()
        committed_phys = status.committed_phys if status is not None else 0
        if committed_phys > seen_phys:
            oldest_ms = start_ms + seen_phys // record_bytes // (RATE // 1000)
            latencies_ms.append(time.time() * 1000 - oldest_ms)
            seen_phys = committed_phys
    cores = (time.process_time() - cpu_began) / (time.perf_counter() - wall_began)
    requests_before, cpu_before = metrics.requests, time.process_time()
    time.sleep(experiment.idle_s)
    idle_requests = metrics.requests - requests_before
    idle_cores = (time.process_time() - cpu_before) / experiment.idle_s
    limit_ms = experiment.batch_age_ms + BEYOND_AGE_MS_MAX
    complete = seen_phys >= total_bytes
    worst_ms = max(latencies_ms, default=0.0)
    return {
        "what": "publish_latency",
        "target": experiment.url.partition(":")[0] or "file",
        "messages_per_s": RATE,
        "messages": total_bytes // record_bytes,
        "complete": complete,
        "batch_age_ms": experiment.batch_age_ms,
        "commits": len(latencies_ms),
        "median_ms": round(statistics.median(latencies_ms), 1) if latencies_ms else None,
        "worst_ms": round(worst_ms, 1),
        "limit_ms": limit_ms,
        "cores": round(cores, 3),
        "idle_requests": idle_requests,
        "idle_s": experiment.idle_s,
        "idle_cores": round(idle_cores, 4),
        "idle_cores_limit": IDLE_CORES_MAX,
        "ok": complete and worst_ms <= limit_ms and idle_requests == 0 and idle_cores <= IDLE_CORES_MAX,
    }


if __name__ == "__main__":
    sys.exit(main())
