"""`tiered doctor` beside real brokers: what it reaches, and what it says of a wrong port and of a stopped broker."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.live import Sidecar
from tests.integration.live_scene import Load, Producer, Scene, beside_broker
from tests.servers.child import free_port
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def examine(sidecar: Sidecar, *more: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit code and checks by id, with the options of `tiered run`."""
    done = sidecar.tiered(
        "doctor",
        sidecar.url,
        "--store",
        str(sidecar.broker.store),
        "--broker-conf",
        str(sidecar.broker.broker_conf),
        "--state-dir",
        str(sidecar.directory / "state"),
        "--json",
        *more,
    )
    assert done.stdout, done.stderr
    document = json.loads(done.stdout)
    return done.returncode, {check["id"]: check for check in document["checks"]}


def failures(checks: dict[str, dict[str, str]]) -> list[str]:
    return [name for name, check in checks.items() if check["outcome"] == "failed"]


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3", "5.5.0"])
def test_a_broker_its_wrong_port_and_its_end(version: str, tmp_path: Path, minio_url: RunningStore) -> None:
    scene = Scene(version)
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        with Producer(sidecar.broker, scene, Load(500), tmp_path / "producer.out") as producer:
            producer.finish(60)
        code, checks = examine(sidecar)
        assert failures(checks) == [] and code == 0, checks
        for name in (
            "broker",
            "broker-version",
            "broker-clock",
            "name-servers",
            "pins",
            "broker-store",
            "names",
        ):
            assert checks[name]["outcome"] == "ok", checks[name]
        assert checks["broker-version"]["detail"] == f"V{version.replace('.', '_')}"
        assert sidecar.broker.broker_address in checks["broker"]["detail"]
        assert checks["retention-margin"]["outcome"] == "not checked"

        sidecar.start()
        sidecar.wait_until_following(60)
        code, checks = examine(sidecar)
        assert failures(checks) == [] and code == 0, checks
        assert f"used by the running process {sidecar.pid}" in checks["state-directory"]["detail"]
        assert checks["retention-margin"]["outcome"] == "ok"
        assert sidecar.stop() == 0

        port = free_port()
        code, checks = examine(sidecar, "--broker-address", f"127.0.0.1:{port}")
        assert failures(checks) == ["broker"] and code == 4
        assert f"127.0.0.1:{port} (--broker-address) does not answer" in checks["broker"]["detail"]

        sidecar.broker.stop()
        code, checks = examine(sidecar)
        assert failures(checks) == [] and code == 0, checks
        assert "the broker does not run" in checks["broker"]["detail"]
