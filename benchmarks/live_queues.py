"""Many queues beside a live broker: ``python -m benchmarks.live_queues --out live_queues.jsonl``.

A broker gets messages at a steady rate in many queues, `tiered run` archives them into a directory, compacts and
indexes as it does by default, and then `tiered serve` gives them to Java consumers, which read some of the queues from
the begin of the run. Printed are the cores and the memory of `tiered run`, the publish latency (from stored to visible,
of the oldest message of each commit), and how long pulls took. With ``--topics 4 --queues 4`` it measures what few
queues cost. Needs Java and Maven. Owns the order and the limits.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.machine import note, peak_rss_bytes, process_core_s
from benchmarks.recording import record
from benchmarks.report import MIB, Row
from tests.servers.rocketmq import BROKER, CLUSTER, RocketMq
from tests.servers.tiered_serve import ROOT, tiered_serve

VERSION = "5.3.3"
BODY_BYTES, POOL_BYTES = 100, 8 << 20
CORES_MAX, RSS_BYTES_MAX, PULL_P99_MS_MAX = 0.5, 512 * MIB, 50.0
SETTLE_S = 20.0
"""Excluded from the measured time: the broker's first files, and the start of `tiered run`."""
START_S, FOLLOWING_MS = 180.0, 15_000
PULL_BATCH = 32
STATUS_EVERY_S = 10.0


def main() -> int:
    """Measure; returns 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.live_queues", description=main.__doc__)
    parser.add_argument("--topics", type=int, default=20)
    parser.add_argument("--queues", type=int, default=500, help="of each topic")
    parser.add_argument("--rate", type=int, default=20_000, help="messages per second, of all queues")
    parser.add_argument("--batch", type=int, default=10, help="messages of one send")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--read-queues", type=int, default=500)
    parser.add_argument("--threads", default="16,500", help="of consumers, comma-separated: a run for each")
    parser.add_argument("--work", type=Path, default=Path("build/live_queues"), help="emptied first")
    parser.add_argument("--out", type=Path, default=Path("live_queues.jsonl"))
    options = parser.parse_args()
    shutil.rmtree(options.work, ignore_errors=True)
    options.work.mkdir(parents=True)
    options.work = options.work.resolve()
    return record(options.out, measure(options), lambda rows: [_judged(row) for row in rows], _table)


def measure(options: argparse.Namespace) -> Iterator[Row]:
    """A row for archiving, and one for each number of consumers' threads."""
    broker = RocketMq(VERSION, options.work / "broker", {"mappedFileSizeCommitLog": 1 << 30})
    broker.start()
    try:
        for number in range(options.topics):
            broker.create_topic(f"live{number}", options.queues)
        with _producer(broker, options), _tiered(broker, options) as tiered:
            _await_following(tiered, options)
            time.sleep(SETTLE_S)
            begun_ms = time.time_ns() // 1_000_000
            archived = _watched(tiered, options.seconds)
            events = _events(options, begun_ms)
        broker.broker.stop(timeout_s=40)
        sent = _sent(options)
        times_ms = sorted(row["publish_ms"] for row in events if row["what"] == "commit")
        yield {
            "what": "archive",
            "queues": options.topics * options.queues,
            "messages_per_s": options.rate,
            "sent": sent[0],
            "refused": sent[1],
            **archived,
            "commits": len(times_ms),
            "publish_p50_ms": statistics.median(times_ms),
            "publish_p99_ms": times_ms[int(len(times_ms) * 0.99)],
        }
        for threads in map(int, options.threads.split(",")):
            yield {"what": "read", "threads": threads, **_read(options, broker, threads, begun_ms)}
    finally:
        broker.stop()


def _await_following(tiered: subprocess.Popen[bytes], options: argparse.Namespace) -> None:
    """Until `tiered run` has caught up with the broker; kernels that are not compiled yet take a minute."""
    deadline_s = time.monotonic() + START_S
    while not any(
        row["what"] == "commit" and row["publish_ms"] < FOLLOWING_MS for row in _events(options, 0)
    ):
        if tiered.poll() is not None or time.monotonic() > deadline_s:
            raise RuntimeError(
                f"tiered run does not follow: {(options.work / 'tiered.log').read_text()[-2000:]}"
            )
        time.sleep(0.2)


def _watched(tiered: subprocess.Popen[bytes], seconds: float) -> Row:
    before_s, begun_s = process_core_s(tiered.pid), time.monotonic()
    while (took_s := time.monotonic() - begun_s) < seconds:
        if tiered.poll() is not None:
            raise RuntimeError(f"tiered run ended with {tiered.returncode}")
        time.sleep(min(STATUS_EVERY_S, seconds - took_s))
        cores = (process_core_s(tiered.pid) - before_s) / (time.monotonic() - begun_s)
        note(f"{took_s:.0f} s: {cores:.3f} cores, {peak_rss_bytes(tiered.pid) // MIB} MiB")
    return {"cores": round(cores, 3), "peak_bytes": peak_rss_bytes(tiered.pid)}


def _read(options: argparse.Namespace, broker: RocketMq, threads: int, since_ms: int) -> Row:
    """The consumers' figures, and the server's peak memory."""
    names = ("--cluster", CLUSTER, "--broker", BROKER)
    server, address = tiered_serve(f"file://{options.work}/archive", options.work, *names)
    server.start()
    try:
        words = (options.topics, options.queues, options.read_queues, threads, PULL_BATCH, since_ms)
        printed = broker.run_java("PullMany", address, *map(str, words), timeout_s=1200)
        row: Row = json.loads(next(line for line in printed.splitlines() if line.startswith("{")))
        return {
            **row,
            "cpu_s": round(process_core_s(server.pid), 2),
            "peak_bytes": peak_rss_bytes(server.pid),
        }
    finally:
        server.stop()


def _judged(row: Row) -> Row:
    limits = {"cores": CORES_MAX, "peak_bytes": RSS_BYTES_MAX, "p99_ms": PULL_P99_MS_MAX, "wrong": 0}
    return {**row, "missed": [name for name, most in limits.items() if row.get(name, 0) > most]}


def _table(rows: Sequence[Row]) -> str:
    return "\n".join(json.dumps(row) for row in rows)


# -- the processes --------------------------------------------------------------------------------------------


@contextmanager
def _tiered(broker: RocketMq, options: argparse.Namespace) -> Iterator[subprocess.Popen[bytes]]:
    gate = options.work / "gate"
    gate.touch()
    command = [
        sys.executable,
        "-m",
        "benchmarks.gated_run",
        str(gate),
        str(options.work / "events.jsonl"),
        "run",
    ]
    command += ["--store", str(broker.store), "--url", f"file://{options.work}/archive"]
    command += ["--state-dir", str(options.work / "state"), "--broker-conf", str(broker.broker_conf)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TIERED_ADMIN__PORT": "0"}
    with (options.work / "tiered.log").open("ab") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(120)


def _events(options: argparse.Namespace, begun_ms: int) -> list[Row]:
    path: Path = options.work / "events.jsonl"
    found = map(json.loads, path.read_text("utf-8").splitlines() if path.exists() else ())
    return [row for row in found if row["at_ms"] >= begun_ms]


@contextmanager
def _producer(broker: RocketMq, options: argparse.Namespace) -> Iterator[None]:
    """Load.java, until the end of the block; what it said is in a file."""
    sizes = (
        options.topics,
        options.queues,
        1 << 40,
        BODY_BYTES,
        4,
        options.rate,
        options.batch,
        POOL_BYTES,
        0,
    )
    command = broker.java_command("Load", broker.name_server_address, BROKER, *map(str, sizes))
    with (options.work / "load.out").open("wb") as out:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out)
    try:
        yield
    finally:
        assert process.stdin is not None
        process.stdin.close()
        process.wait(60)


def _sent(options: argparse.Namespace) -> tuple[int, int]:
    """Messages that the broker took, and refused."""
    lines = (options.work / "load.out").read_text().splitlines()
    acked, refused = next(line.split()[1:3] for line in lines if line.startswith("DONE"))
    return int(acked), int(refused)


if __name__ == "__main__":
    sys.exit(main())
