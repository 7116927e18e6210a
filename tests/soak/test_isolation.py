"""Cold reads at full speed beside a broker in use: sends stay as quick, upload as prompt, and a cap on bytes is kept.

Of a directory, and of a MinIO on the same processors, which does its share of the work as urgently as the broker.
Windows with and without the reader take turns under one producer, so that a busy minute of the machine spoils both; so
do windows beside two controls, as idle as the reader. One reads nothing and only counts: what it costs the broker is
the machine's price for running anything at all. The other fetches, checks, decompresses and discards the
same blocks: the price of reading at all. How sends fare beside a reader that is held below a cap is published too.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.servers.running_store import RunningStore
from tests.servers.store_directory import StoreDirectory
from tests.soak.commit_times import commit_times, quantile
from tests.soak.process_figures import core_seconds
from tests.soak.results import knob, limits, publish

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(1800)]

HISTORY_S = knob("ISOLATION_HISTORY_S", 60)
WINDOW_S = knob("ISOLATION_WINDOW_S", 30)
ROUNDS = knob("ISOLATION_ROUNDS", 4)
PER_SECOND = knob("ISOLATION_PER_SECOND", 8_000)
THREADS = 2
BODY_BYTES = 1 << 10
SETTLE_S = 3
"""Excluded from every window: the reader starts or ends."""
CAP_BYTES_PER_S = 8 << 20
RATIO_MAX = 1.1
CAP_ERROR_MAX = 0.05
LOAD = Load(1 << 40, BODY_BYTES, threads=4, per_second=PER_SECOND, warm_up_s=10)


@dataclass
class Reads:
    """What a reader did."""

    record_bytes: int = 0
    stored_bytes: int = 0
    seconds: float = 0.0
    core_seconds: float = 0.0


@contextmanager
def reader(sidecar: Sidecar, reads: Reads, *, bytes_per_s: int = 0) -> Iterator[None]:
    """A reader of the archive in a process of its own, at full speed or below a cap, while the context lasts."""
    with companion(sidecar, reads, "cold_reader", sidecar.url, str(THREADS), str(bytes_per_s)):
        yield


@contextmanager
def companion(sidecar: Sidecar, reads: Reads, module: str, *words: str) -> Iterator[None]:
    """A process with idle priority, while the context lasts."""
    child = subprocess.Popen(
        [sys.executable, "-m", f"tests.soak.{module}", *words],
        env=sidecar.environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdin is not None and child.stdout is not None
    try:
        assert child.stdout.readline() == "READING\n"
        began = core_seconds(child.pid)
        yield
        reads.core_seconds += core_seconds(child.pid) - began
        child.stdin.close()
        said = child.stdout.readline().split()
        assert said[:1] == ["READ"] and child.wait(60) == 0
        reads.record_bytes += int(said[1])
        reads.stored_bytes += int(said[2])
        reads.seconds += float(said[3])
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()


@dataclass
class Windows:
    """Seconds in which the reader was there, or was not: as indexes of the producer's seconds and wall-clock ms."""

    producer_seconds: list[int] = field(default_factory=list)
    spans_ms: list[tuple[int, int]] = field(default_factory=list)

    def watch(self, producer: Producer) -> None:
        """Let one window pass."""
        time.sleep(SETTLE_S)
        first, first_ms = len(producer.p99_us_by_second()), time.time_ns() // 1_000_000
        time.sleep(WINDOW_S)
        self.producer_seconds += range(first, len(producer.p99_us_by_second()))
        self.spans_ms.append((first_ms, time.time_ns() // 1_000_000))

    def latencies_ms(self, sidecar: Sidecar) -> list[int]:
        """Publish latencies of the commits in these windows."""
        return [
            commit.latency_ms
            for commit in commit_times(sidecar)
            if any(first <= commit.created_ms < end for first, end in self.spans_ms)
        ]

    def p99s_us(self, producer: Producer) -> list[int]:
        """The sends' p99 of every second."""
        every = producer.p99_us_by_second()
        return [every[second] for second in self.producer_seconds]


@pytest.mark.parametrize("target", ["file", "minio"])
def test_cold_reads_disturb_neither_broker_nor_upload(
    target: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    objects: RunningStore | StoreDirectory = (
        request.getfixturevalue("minio_url") if target == "minio" else StoreDirectory(tmp_path / "objects")
    )
    alone, beside, reads, capped = Windows(), Windows(), Reads(), Reads()
    control, counted, bare, parts, held = Windows(), Reads(), Windows(), Reads(), Windows()
    scene = Scene(config={"mappedFileSizeCommitLog": 1 << 30})
    with beside_broker(scene, tmp_path, objects) as sidecar:
        sidecar.start()
        sidecar.wait_until_following(60)
        with Producer(sidecar.broker, scene, LOAD, tmp_path / "producer.out") as producer:
            time.sleep(HISTORY_S)
            for _ in range(ROUNDS):
                alone.watch(producer)
                with reader(sidecar, reads):
                    beside.watch(producer)
                with companion(sidecar, counted, "idle_counter"):
                    control.watch(producer)
                with companion(sidecar, parts, "parts_reader", sidecar.url, str(THREADS)):
                    bare.watch(producer)
            with reader(sidecar, capped, bytes_per_s=CAP_BYTES_PER_S):
                held.watch(producer)
            p99s = [windows.p99s_us(producer) for windows in (alone, beside, control, bare, held)]
            sent = producer.finish(60, now=True)
        sidecar.wait_until_archived(300)
        latencies = alone.latencies_ms(sidecar), beside.latencies_ms(sidecar)
        compared = finish(sidecar)
    send_p99_us = [quantile(p99, 0.5) for p99 in p99s]
    send_ratio, control_ratio, parts_ratio, held_ratio = (
        p99_us / max(1, send_p99_us[0]) for p99_us in send_p99_us[1:]
    )
    lag_ratio = quantile(latencies[1], 0.5) / max(1, quantile(latencies[0], 0.5))
    cap_ratio = capped.stored_bytes / capped.seconds / CAP_BYTES_PER_S
    publish(
        f"isolation, {target}",
        missed=limits(
            send_p99=send_ratio <= RATIO_MAX,
            upload_lag=lag_ratio <= RATIO_MAX,
            cap=abs(cap_ratio - 1) <= CAP_ERROR_MAX,
            nothing_is_missing=compared.shown >= sent.acked,
            no_send_failed=sent.failed == 0,
        ),
        messages_per_s=round(sent.acked / sent.seconds),
        read_mb_per_s=round(reads.record_bytes / reads.seconds / 1e6, 1),
        reader_cores=round(reads.core_seconds / reads.seconds, 2),
        median_send_p99_us=send_p99_us,
        send_p99_ratio=round(send_ratio, 3),
        control_cores=round(counted.core_seconds / counted.seconds, 2),
        send_p99_ratio_of_control=round(control_ratio, 3),
        parts_mb_per_s=round(parts.record_bytes / parts.seconds / 1e6, 1),
        parts_cores=round(parts.core_seconds / parts.seconds, 2),
        send_p99_ratio_of_parts=round(parts_ratio, 3),
        median_publish_ms=[quantile(latency, 0.5) for latency in latencies],
        worst_publish_ms=[quantile(latency, 1.0) for latency in latencies],
        upload_lag_ratio=round(lag_ratio, 3),
        capped_to_bytes_per_s=CAP_BYTES_PER_S,
        cap_ratio=round(cap_ratio, 4),
        send_p99_ratio_below_cap=round(held_ratio, 3),
    )
