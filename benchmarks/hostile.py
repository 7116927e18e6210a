"""A server under attack: ``python -m benchmarks.hostile --out hostile.jsonl``.

20 clients send the worst filters, 24 threads hostile frames, and 200 consumers join and leave (hostile_load.py).
Measured are another client's pulls, the publish latency of the uploader in the same process, and the server's memory;
each with and without the load, and of a server that answers every frame with the same few bytes (hostile_server.py).
Every figure is a JSON line, the last one the summary. Owns the order and the limits.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from benchmarks.hostile_load import TOPIC
from benchmarks.hostile_server import BODY_BYTES, RATE
from benchmarks.publish_latency import read_ready
from benchmarks.recording import loaded
from benchmarks.report import MIB, Row
from tiered.remoting.command import RemotingCommand, encode
from tiered.settings.sections import OffloadSettings, Settings

PULL_EVERY_S = 0.01
PULLED_OFFSETS = 256
"""All archived in the first second: beyond the end a pull waits."""
P99_ABOVE_MS_MAX, PUBLISH_RATIO_MAX = 100.0, 1.1
LEAD_IN_MS = 4_000
SETTLE_S, START_S = 2.0, 180.0


def main() -> int:
    """Measure; returns 1 when a limit is exceeded."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile", description=main.__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="with and without load, for each server")
    parser.add_argument("--batch-age-ms", type=int, default=OffloadSettings().batch_age_ms)
    parser.add_argument("--out", type=Path, default=Path("hostile.jsonl"))
    options = parser.parse_args()
    rows: list[Row] = []
    for kind in ("constant", "tiered"):
        rows += measure(kind, options.seconds, options.batch_age_ms)
    summary = summarize(rows)
    with options.out.open("a", encoding="utf-8") as out:
        out.writelines(json.dumps(loaded(row)) + "\n" for row in [*rows, summary])
    for row in (*rows, summary):
        print(json.dumps(row, indent=2))
    return int(not summary["ok"])


def measure(kind: str, seconds: float, batch_age_ms: int) -> Iterator[Row]:
    """A row without load and one under it."""
    with (
        tempfile.TemporaryDirectory() as name,
        _Server(Path(name), kind, 2 * seconds + START_S, batch_age_ms) as server,
    ):
        time.sleep(SETTLE_S)
        quiet_rss = server.memory_bytes("VmRSS")
        for is_loaded in (False, True):
            with _load(server.address, seconds) if is_loaded else _nothing() as load:
                time.sleep(SETTLE_S if is_loaded else 0)
                begun_ms, waited_s = time.time() * 1000, server.uploader_wait_s()
                pulls_ms = _pulls(server.address, seconds - (SETTLE_S if is_loaded else 0))
                ended_ms, waited_s = time.time() * 1000, server.uploader_wait_s() - waited_s
            published = server.published_ms(begun_ms, ended_ms)
            yield {
                "what": "hostile",
                "server": kind,
                "loaded": is_loaded,
                "pulls": len(pulls_ms),
                "pull_p50_ms": _percentile(pulls_ms, 50),
                "pull_p99_ms": _percentile(pulls_ms, 99),
                "pull_worst_ms": round(max(pulls_ms), 1),
                "commits": len(published),
                "publish_median_ms": round(statistics.median(published), 1),
                "publish_worst_ms": round(max(published), 1),
                "batch_age_ms": batch_age_ms,
                "uploader_wait_ratio": round(waited_s * 1000 / (ended_ms - begun_ms), 3),
                "rss_growth_mib": round((server.memory_bytes("VmHWM") - quiet_rss) / MIB, 1),
                "load_average": round(os.getloadavg()[0], 1),
                "rates_per_s": load,
            }


def summarize(rows: list[Row]) -> Row:
    """Differences, and whether they are within the limits."""
    by_kind = {(row["server"], row["loaded"]): row for row in rows}
    ours, least = by_kind["tiered", True], by_kind["constant", True]
    quiet = by_kind["tiered", False]
    above_ms = ours["pull_p99_ms"] - least["pull_p99_ms"]
    ratio = ours["publish_median_ms"] / quiet["publish_median_ms"]
    limit_mib = Settings().serve.memory_bytes / MIB
    return {
        "what": "hostile_summary",
        "pull_p99_above_ms": round(above_ms, 1),
        "pull_p99_above_ms_limit": P99_ABOVE_MS_MAX,
        "publish_ratio": round(ratio, 3),
        "publish_ratio_limit": PUBLISH_RATIO_MAX,
        "publish_ratio_of_constant": round(
            least["publish_median_ms"] / by_kind["constant", False]["publish_median_ms"], 3
        ),
        "rss_growth_mib": ours["rss_growth_mib"],
        "rss_growth_mib_limit": limit_mib,
        "ok": above_ms <= P99_ABOVE_MS_MAX
        and ratio <= PUBLISH_RATIO_MAX
        and ours["rss_growth_mib"] <= limit_mib,
    }


class _Server:
    """A live store and the server over it, both processes of their own."""

    def __init__(self, directory: Path, kind: str, seconds: float, batch_age_ms: int) -> None:
        start_ms = time.time_ns() // 1_000_000 + LEAD_IN_MS
        flags = {"--rate": RATE, "--seconds": seconds, "--start-ms": start_ms, "--body-bytes": BODY_BYTES}
        words = [str(word) for pair in flags.items() for word in pair]
        self._writer = _python("benchmarks.live_store", str(directory / "store"), *words)
        while not read_ready(directory / "store"):
            time.sleep(0.05)
        times = ["--start-ms", str(start_ms), "--batch-age-ms", str(batch_age_ms)]
        self._server = _python("benchmarks.hostile_server", str(directory), "--kind", kind, *times)
        self._lines: list[Row] = []
        self._has_address = threading.Event()
        self.address = ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self._server.stdout is not None
        for line in self._server.stdout:
            row: Row = json.loads(line)
            if "address" in row:
                self.address = str(row["address"])
                self._has_address.set()
            else:
                self._lines.append(row)

    def __enter__(self) -> _Server:
        if not self._has_address.wait(START_S):
            self.__exit__()
            raise RuntimeError("the server did not start")
        return self

    def __exit__(self, *_: object) -> None:
        for child in (self._server, self._writer):
            assert child.stdin is not None
            child.stdin.close()
            try:
                child.wait(60)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        self._reading.join()
        for child in (self._server, self._writer):
            assert child.stdout is not None
            child.stdout.close()

    def published_ms(self, begun_ms: float, ended_ms: float) -> list[float]:
        """Publish latencies of the commits in this time."""
        return [row["publish_ms"] for row in self._lines if begun_ms <= row["at_ms"] <= ended_ms]

    def uploader_wait_s(self) -> float:
        """How long all threads but the event loop's, which is the first, have waited for a processor."""
        found = 0.0
        for thread in Path(f"/proc/{self._server.pid}/task").iterdir():
            with suppress(OSError):  # it has ended
                waited_ns = int((thread / "schedstat").read_text("ascii").split()[1])
                found += waited_ns / 1e9 if thread.name != str(self._server.pid) else 0
        return found

    def memory_bytes(self, field: str) -> int:
        """A figure of /proc/PID/status."""
        status = Path(f"/proc/{self._server.pid}/status").read_text("ascii", "replace")
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith(field)) * 1024


def _python(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )


@contextmanager
def _nothing() -> Iterator[Row]:
    yield {}


@contextmanager
def _load(address: str, seconds: float) -> Iterator[Row]:
    """The load for ``seconds``; its rates when it has ended."""
    child = _python("benchmarks.hostile_load", address, "--seconds", str(seconds))
    rates: Row = {}
    try:
        yield rates
        rates |= json.loads(child.communicate(timeout=60)[0])
    finally:
        with suppress(ProcessLookupError):
            child.kill()
        child.wait()


def _pulls(address: str, seconds: float) -> list[float]:
    """Latencies of one client that pulls 32 messages every PULL_EVERY_S, in ms. One that is late does not catch up."""
    host, _, port = address.rpartition(":")
    found: list[float] = []
    ends_s = time.monotonic() + seconds
    with socket.create_connection((host, int(port)), 60) as client:
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = 0
        while time.monotonic() < ends_s:
            offset = number * 32 % PULLED_OFFSETS
            fields = {
                "consumerGroup": "victim",
                "topic": TOPIC,
                "queueId": "0",
                "queueOffset": str(offset),
                "maxMsgNums": "32",
                "sysFlag": "4",
                "commitOffset": "0",
                "suspendTimeoutMillis": "0",
                "subscription": "*",
                "subVersion": "0",
                "expressionType": "TAG",
            }
            frame = encode(RemotingCommand(11, number, ext_fields=fields))
            begun_s = time.perf_counter()
            client.sendall(frame)
            left = int.from_bytes(_exactly(client, 4), "big")
            _exactly(client, left)
            found.append(1000 * (time.perf_counter() - begun_s))
            number += 1
            time.sleep(PULL_EVERY_S)
    return found


def _exactly(client: socket.socket, count: int) -> bytes:
    data = client.recv(count, socket.MSG_WAITALL)
    if len(data) < count:
        raise ConnectionError("the server closed the connection")
    return data


def _percentile(values: list[float], percent: int) -> float:
    return round(sorted(values)[min(len(values) - 1, len(values) * percent // 100)], 2)


if __name__ == "__main__":
    sys.exit(main())
