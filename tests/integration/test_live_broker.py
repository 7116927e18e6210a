"""`tiered run` beside real brokers, into MinIO, through everything that happens to a broker in its life.

The soak tests run the same stories at full size (tests/soak/test_live.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.integration.live_stories import LiveSize, everything_happens, lose_the_tail
from tests.servers.running_store import RunningStore

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.mark.parametrize("version", ["4.9.7", "5.3.3", "5.5.0"])
def test_everything_a_producer_sends_is_archived_while_it_sends(
    version: str, tmp_path: Path, minio_url: RunningStore
) -> None:
    scene = Scene(version)
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        sidecar.start()
        with Producer(sidecar.broker, scene, Load(15_000, 500), tmp_path / "producer.out") as producer:
            sent = producer.finish(120)
        sidecar.wait_until_archived(60)
        # A broker that has just started may refuse sends, or store ones it does not acknowledge in time.
        assert sent.acked + sent.failed == 15_000
        assert sent.acked > 10_000
        assert sent.acked <= finish(sidecar).shown <= 15_000


def test_restarts_outages_and_a_recreated_topic_lose_and_repeat_nothing(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    size = LiveSize(messages=60_000, per_second=1500, outage_s=6, after_recreation=8_000)
    scene = Scene()
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        story = everything_happens(sidecar, scene, size)
        compared = finish(sidecar)
    # What was sent to the deleted topic is no longer shown, and still there.
    assert story.stored_at_least <= compared.shown + compared.older <= story.stored_at_most
    assert compared.shown >= story.stored_at_least - size.messages // 2


def test_a_killed_broker_whose_log_lost_its_tail_starts_a_new_log_history(
    tmp_path: Path, minio_url: RunningStore
) -> None:
    scene = Scene()
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        sidecar.start()
        # The log loses a part of the second commit: by the first one it continues the archive.
        for messages in (8_000, 2_000):
            with Producer(sidecar.broker, scene, Load(messages, 500), tmp_path / "producer.out") as producer:
                producer.finish(120)
            sidecar.wait_until_archived(60)
        lose_the_tail(sidecar, 300_000)
        with Producer(sidecar.broker, scene, Load(5_000, 500), tmp_path / "producer.out") as producer:
            producer.finish(120)
        sidecar.wait_until_archived(60)
        assert 14_000 < finish(sidecar).shown < 15_000
