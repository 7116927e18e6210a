"""Publish latency at 20,000 messages a second: the benchmark, at the length the claim names."""

import pytest

from benchmarks.publish_latency import Experiment, measure
from tests.servers.running_store import RunningStore
from tests.soak.results import knob, limits, publish
from tiered.settings.sections import OffloadSettings

pytestmark = [pytest.mark.soak, pytest.mark.timeout(1200)]

SECONDS = knob("LATENCY_S", 60)
IDLE_S = knob("LATENCY_IDLE_S", 60)


@pytest.mark.parametrize("target", ["file", pytest.param("minio", marks=pytest.mark.integration)])
def test_publish_latency(target: str, request: pytest.FixtureRequest) -> None:
    experiment = Experiment(SECONDS, IDLE_S, OffloadSettings().batch_age_ms)
    if target == "minio":
        minio: RunningStore = request.getfixturevalue("minio_url")
        experiment = Experiment(
            SECONDS, IDLE_S / 6, experiment.batch_age_ms, minio.fresh_bucket(), minio.options()
        )
    row = measure(experiment)
    publish(
        f"publish latency, {target}",
        missed=limits(
            complete=row["complete"],
            latency=row["worst_ms"] <= row["limit_ms"],
            idle_requests=row["idle_requests"] == 0,
            idle_cores=row["idle_cores"] <= row["idle_cores_limit"],
        ),
        **{name: value for name, value in row.items() if name not in ("what", "ok")},
    )
