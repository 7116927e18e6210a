"""A million messages and more, and everything that happens to a broker: all compared byte for byte."""

import time
from pathlib import Path

import pytest

from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.integration.live_stories import BODY_BYTES, LiveSize, everything_happens, lose_the_tail
from tests.servers.running_store import RunningStore
from tests.soak.process_figures import peak_rss_bytes
from tests.soak.results import knob, limits, publish

pytestmark = [pytest.mark.integration, pytest.mark.soak, pytest.mark.timeout(3600)]

SIZE = LiveSize(
    messages=knob("LIVE_MESSAGES", 1_000_000),
    per_second=knob("LIVE_PER_SECOND", 10_000),
    outage_s=knob("LIVE_OUTAGE_S", 60),
    after_recreation=knob("LIVE_MESSAGES", 1_000_000) // 10,
    batch=4,
)
TAIL_BYTES = 300_000


def test_a_million_messages_through_everything(tmp_path: Path, minio_url: RunningStore) -> None:
    scene = Scene()
    began_s = time.monotonic()
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        results = everything_happens(sidecar, scene, SIZE)
        lose_the_tail(sidecar, TAIL_BYTES)
        load = Load(SIZE.after_recreation, BODY_BYTES, batch=SIZE.batch)
        with Producer(sidecar.broker, scene, load, tmp_path / "producer.out") as producer:
            last = producer.finish(SIZE.send_timeout_s)
        sidecar.wait_until_archived(300)
        log_files = len(list((sidecar.broker.store / "commitlog").iterdir()))
        peak_mib = peak_rss_bytes(sidecar.pid) >> 20
        sent_s = time.monotonic() - began_s
        compared = finish(sidecar)
    found = compared.shown + compared.older
    # A record is larger than its body, so this many at most were in the tail that was cut.
    lost_max = TAIL_BYTES // BODY_BYTES
    publish(
        "live",
        missed=limits(
            nothing_is_missing=found >= results.stored_at_least + last.acked - lost_max,
            nothing_is_there_twice=found <= results.stored_at_most + last.acked + last.failed,
            size=found >= SIZE.messages,
        ),
        messages=found,
        acked=results.stored_at_least + last.acked,
        shown=compared.shown,
        older_generations=compared.older,
        outage_s=SIZE.outage_s,
        log_files=log_files,
        peak_rss_mib=peak_mib,
        live_s=round(sent_s),
        whole_s=round(time.monotonic() - began_s),
    )
