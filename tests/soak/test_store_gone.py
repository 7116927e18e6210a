"""The object store is gone for ten minutes while a producer writes 50 MB/s: first it hangs, then it refuses.

Memory stays inside the budget, the broker's sends are as quick as without the sidecar, and uploading catches up
afterwards.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, Sent, beside_broker, finish
from tests.servers.running_store import RunningStore
from tests.soak.commit_times import quantile
from tests.soak.process_figures import core_seconds, memory_bytes, peak_rss_bytes
from tests.soak.results import knob, limits, publish

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(5400)]

GONE_S = knob("GONE_S", 600)
BASELINE_S = knob("GONE_BASELINE_S", 120)
MB_PER_S = knob("GONE_MB_PER_S", 50)
WARM_UP_S = 15
BODY_BYTES = 16 << 10
RECORD_OVERHEAD_BYTES = 200
PER_SECOND = MB_PER_S * 1_000_000 // (BODY_BYTES + RECORD_OVERHEAD_BYTES)
P99_RATIO_MAX = 1.1
RESIDENT_MIB_MAX = 512
SAMPLE_S = 1.0
SCENE = Scene(config={"mappedFileSizeCommitLog": 1 << 30})
# Bodies from a small pool shrink well: ten minutes of them are 30 GB of log, and must not be as much again in MinIO.
LOAD = Load(1 << 40, BODY_BYTES, threads=8, per_second=PER_SECOND, pool_bytes=64 << 10, warm_up_s=WARM_UP_S)


def baseline(directory: Path, minio: RunningStore) -> tuple[Sent, list[int]]:
    """The same broker and producer with the sidecar stopped; its store is removed again."""
    with (
        beside_broker(SCENE, directory, minio) as sidecar,
        Producer(sidecar.broker, SCENE, LOAD, directory / "producer.out") as producer,
    ):
        time.sleep(BASELINE_S)
        sent = producer.finish(60, now=True)
        seconds = producer.p99_us_by_second()
    shutil.rmtree(directory)
    return sent, seconds


@dataclass
class Watch:
    """Samples a sidecar's memory until closed."""

    sidecar: Sidecar
    budget_used_max: int = 0
    budget_bytes: int = 0
    anonymous_max: int = 0
    samples: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Watch:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            status = self.sidecar.status()
            if status:
                self.samples += 1
                self.budget_bytes = status["budgetLimitBytes"]
                self.budget_used_max = max(self.budget_used_max, status["budgetUsedBytes"])
            self.anonymous_max = max(self.anonymous_max, memory_bytes(self.sidecar.pid, "RssAnon"))


def go_away_and_come_back(minio: RunningStore) -> None:
    """MinIO hangs for half of the time and is stopped for the other half."""
    os.kill(minio.server.pid, signal.SIGSTOP)
    time.sleep(GONE_S / 2)
    minio.server.kill()
    time.sleep(GONE_S / 2)


def test_the_broker_does_not_notice_and_nothing_is_lost(tmp_path: Path, minio_url: RunningStore) -> None:
    without, without_by_second = baseline(tmp_path / "baseline", minio_url)
    directory = tmp_path / "gone"
    directory.mkdir()
    with beside_broker(SCENE, directory, minio_url) as sidecar:
        sidecar.start()
        sidecar.wait_until_following(60)
        with (
            Watch(sidecar) as watch,
            Producer(sidecar.broker, SCENE, LOAD, directory / "producer.out") as producer,
        ):
            go_away_and_come_back(minio_url)
            beside = producer.finish(60, now=True)
            beside_by_second = producer.p99_us_by_second()
            cores = core_seconds(sidecar.pid) / GONE_S
            minio_url.server.start()
            began_s = time.monotonic()
            sidecar.wait_until_archived(1800)
            caught_up_s = time.monotonic() - began_s
        peak_mib = peak_rss_bytes(sidecar.pid) >> 20
        compared = finish(sidecar)
    megabytes = beside.acked * (BODY_BYTES + RECORD_OVERHEAD_BYTES) / 1e6
    ratio = beside.p99_us / max(1, without.p99_us)
    publish(
        "store gone",
        missed=limits(
            rate=megabytes / beside.seconds >= 0.97 * MB_PER_S,
            memory_within_budget=0 < watch.budget_used_max <= watch.budget_bytes,
            resident_memory=peak_mib <= RESIDENT_MIB_MAX,
            send_p99=ratio <= P99_RATIO_MAX,
            nothing_is_missing=compared.shown >= beside.acked,
            nothing_is_there_twice=compared.shown <= beside.acked + beside.failed,
            no_send_failed=beside.failed == 0,
        ),
        gone_s=GONE_S,
        mb_per_s=round(megabytes / beside.seconds, 1),
        log_mb=round(megabytes),
        messages=compared.shown,
        send_p99_us_without=without.p99_us,
        send_p99_us_beside=beside.p99_us,
        send_p99_ratio=round(ratio, 3),
        send_p50_us=[without.p50_us, beside.p50_us],
        send_p999_us=[without.p999_us, beside.p999_us],
        median_p99_us_of_a_second=[
            quantile(without_by_second[WARM_UP_S:], 0.5),
            quantile(beside_by_second[WARM_UP_S:], 0.5),
        ],
        budget_used_max_mib=watch.budget_used_max >> 20,
        budget_mib=watch.budget_bytes >> 20,
        anonymous_max_mib=watch.anonymous_max >> 20,
        peak_rss_mib=peak_mib,
        cores_meanwhile=round(cores, 3),
        caught_up_s=round(caught_up_s),
        caught_up_mb_per_s=round(megabytes / caught_up_s),
    )
