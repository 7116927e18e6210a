"""`tiered run` beside real brokers, into MinIO, through everything that happens to a broker in its life."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.live import Sidecar, compare_with_broker, wait_for_line
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import RocketMq
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.fixture
def sidecar(request: pytest.FixtureRequest, tmp_path: Path, minio_url: RunningStore) -> Iterator[Sidecar]:
    """A running broker of the version asked for and a sidecar that follows it."""
    try:
        broker = RocketMq(request.param, tmp_path / "mq")
        broker.start()
    except NotInstallableError as error:
        pytest.skip(f"RocketMQ {request.param} is not available: {error}")
    running = Sidecar(broker, minio_url, f"{minio_url.fresh_bucket()}/live", tmp_path)
    try:
        broker.create_topic("live0", 4)
        broker.create_topic("live1", 4)
        running.start()
        yield running
    finally:
        if running.process is not None and running.process.poll() is None:
            running.kill()
        broker.stop()
        minio_url.server.start_if_stopped()


def produce(sidecar: Sidecar, messages: int, per_second: int) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a Java producer; its process and output."""
    output = sidecar.directory / "producer.out"
    with output.open("wb") as out:
        process = subprocess.Popen(
            sidecar.broker.java_command(
                "Produce", sidecar.broker.name_server_address, "live-a", "2", "4", str(messages), "500", "4",
                str(per_second),
            ),
            stdout=out, stderr=out,
        )  # fmt: skip
    return process, output


def finish(sidecar: Sidecar) -> int:
    """Stop everything and compare; the number of messages."""
    assert sidecar.stop() == 0, sidecar.log.read_text()[-2000:]
    verified = sidecar.tiered("verify", sidecar.url, "--full")
    assert verified.returncode == 0, verified.stdout + verified.stderr
    collected = sidecar.tiered("gc", sidecar.url, "--apply", "--grace", "0s")
    assert collected.returncode == 0, collected.stdout + collected.stderr
    strict = sidecar.tiered("verify", sidecar.url, "--full", "--strict")
    assert strict.returncode == 0, strict.stdout + strict.stderr
    sidecar.broker.broker.stop(patience_s=40)
    return compare_with_broker(sidecar)


@pytest.mark.parametrize("sidecar", ["4.9.7", "5.3.3", "5.5.0"], indirect=True)
def test_everything_a_producer_sends_is_archived_while_it_sends(sidecar: Sidecar) -> None:
    process, output = produce(sidecar, 30_000, 0)
    assert process.wait(120) == 0, output.read_text()[-1000:]
    sidecar.wait_until_archived(60)
    assert finish(sidecar) == 30_000


@pytest.mark.parametrize("sidecar", ["5.3.3"], indirect=True)
def test_restarts_outages_and_a_recreated_topic_lose_and_repeat_nothing(sidecar: Sidecar) -> None:
    process, output = produce(sidecar, 60_000, 1500)
    wait_for_line(output, "ACKED", 30)
    time.sleep(4)
    sidecar.objects.server.stop()
    time.sleep(6)
    sidecar.objects.server.start()
    sidecar.broker.broker.stop(patience_s=40)
    sidecar.broker.broker.start()
    time.sleep(2)
    sidecar.kill()
    sidecar.start()
    assert process.wait(200) == 0, output.read_text()[-1000:]
    assert wait_for_line(output, "DONE", 5).split()[1] == "60000"
    sidecar.wait_until_archived(60)
    sidecar.broker.delete_topic("live1")
    sidecar.broker.create_topic("live1", 4)
    process, output = produce(sidecar, 8_000, 0)
    assert process.wait(120) == 0
    sidecar.wait_until_archived(60)
    assert finish(sidecar) >= 30_000 + 8_000


@pytest.mark.parametrize("sidecar", ["5.3.3"], indirect=True)
def test_a_killed_broker_whose_log_lost_its_tail_starts_a_new_log_line(sidecar: Sidecar) -> None:
    process, _ = produce(sidecar, 20_000, 0)
    assert process.wait(120) == 0
    sidecar.wait_until_archived(60)
    sidecar.broker.broker.kill()
    cut_tail(sidecar.broker.store, 300_000)
    sidecar.broker.broker.start()
    process, _ = produce(sidecar, 10_000, 0)
    assert process.wait(120) == 0
    sidecar.wait_until_archived(60)
    assert 28_000 < finish(sidecar) < 30_000


def cut_tail(store: Path, byte_count: int) -> None:
    """Zero the last ``byte_count`` written bytes of the last commitlog file, as a power loss may, and the units of
    the consume queues that point there stay."""
    log = max(path for path in (store / "commitlog").iterdir() if any(path.read_bytes()[:8]))
    data = log.read_bytes()
    end = len(data.rstrip(b"\0"))
    with log.open("r+b") as file:
        file.seek(end - byte_count)
        file.write(bytes(byte_count))
