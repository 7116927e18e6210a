"""An idle broker costs nothing: at most a hundredth of a core and no request at all."""

import time
from pathlib import Path

import pytest

from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.servers.proxy import FaultProxy
from tests.servers.running_store import RunningStore
from tests.soak.process_figures import core_seconds
from tests.soak.results import knob, limits, publish

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(1200)]

IDLE_S = knob("IDLE_S", 60)
SETTLE_S = knob("IDLE_SETTLE_S", 75)
"""Longer than the sidecar's minute: what it archives of the broker's tables comes first."""
CORES_MAX = 0.01


def test_an_idle_broker_costs_nothing(tmp_path: Path, minio_url: RunningStore) -> None:
    with FaultProxy(minio_url.endpoint) as proxy:
        scene = Scene(endpoint=proxy.endpoint)
        with beside_broker(scene, tmp_path, minio_url) as sidecar:
            sidecar.start()
            with Producer(sidecar.broker, scene, Load(20_000), tmp_path / "producer.out") as producer:
                producer.finish(120)
            sidecar.wait_until_archived(60)
            time.sleep(SETTLE_S)
            requests_before, cpu_before_s = len(proxy.requests), core_seconds(sidecar.pid)
            time.sleep(IDLE_S)
            cores = (core_seconds(sidecar.pid) - cpu_before_s) / IDLE_S
            asked = [f"{one.method} {one.path}" for one in proxy.requests[requests_before:]]
            assert sidecar.stop() == 0
    publish(
        "idle",
        missed=limits(requests=not asked, cores=cores <= CORES_MAX),
        idle_s=IDLE_S,
        cores=round(cores, 4),
        requests=asked,
    )
