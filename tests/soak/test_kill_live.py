"""kill -9 of `tiered run` while a broker takes 20,000 messages a second, at five kinds of moment, again and again.

The process is the real one; a proxy between it and MinIO says when, and its log is the proof.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.servers.proxy import FaultProxy
from tests.servers.running_store import RunningStore
from tests.soak.killer import MOMENTS, Killer, is_proven
from tests.soak.results import knob, limits, publish

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(3600)]

KILLS = knob("KILL_TIMES", 10)
RATE = knob("KILL_PER_SECOND", 20_000)
TRIES_MAX = 3
HEADROOM = 1.05
"""The producer aims a little higher than what must be reached."""
LOAD = Load(1 << 40, body_bytes=256, threads=4, per_second=int(RATE * HEADROOM), batch=32)
SETTINGS = {"TIERED_OFFLOAD__BATCH_AGE_MS": 500}


def kill_at(moment: str, sidecar: Sidecar, proxy: FaultProxy, generator: random.Random) -> bool:
    """Start, kill, and judge by the log whether the moment was hit."""
    sidecar.start()
    killer = Killer(proxy, sidecar.pid, moment, variant=generator.randrange(2), cycles=generator.randrange(3))
    proxy.on_stage = killer.on_stage
    kill = killer.strike(60)
    assert sidecar.process is not None
    sidecar.process.wait()
    time.sleep(0.05)
    return is_proven(kill, list(proxy.requests))


def test_killed_at_every_moment_while_messages_pour_in(tmp_path: Path, minio_url: RunningStore) -> None:
    generator = random.Random(9)
    tried: Counter[str] = Counter()
    hit: Counter[str] = Counter()
    with FaultProxy(minio_url.endpoint) as proxy:
        scene = Scene(settings=SETTINGS, endpoint=proxy.endpoint)
        with beside_broker(scene, tmp_path, minio_url) as sidecar:
            with Producer(sidecar.broker, scene, LOAD, tmp_path / "producer.out") as producer:
                for moment in MOMENTS * (KILLS * TRIES_MAX):
                    if hit[moment] < KILLS:
                        tried[moment] += 1
                        hit[moment] += kill_at(moment, sidecar, proxy, generator)
                proxy.on_stage = lambda _request: None
                sidecar.start()
                sent = producer.finish(30, now=True)
            sidecar.wait_until_archived(300)
            compared = finish(sidecar)
    publish(
        "kill -9 live",
        missed=limits(
            every_moment_was_hit=all(hit[moment] >= KILLS for moment in MOMENTS),
            nothing_is_missing=compared.shown >= sent.acked,
            nothing_is_there_twice=compared.shown <= sent.acked + sent.failed,
            rate=sent.acked / sent.seconds >= RATE,
        ),
        kills={moment: f"{hit[moment]} of {tried[moment]}" for moment in MOMENTS},
        messages=compared.shown,
        acked=sent.acked,
        failed=sent.failed,
        messages_per_s=round(sent.acked / sent.seconds),
        seconds=round(sent.seconds),
        send_p99_ms=round(sent.p99_us / 1000, 1),
    )
