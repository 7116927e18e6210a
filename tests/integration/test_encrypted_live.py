"""An encrypted archive beside a broker that is written to, in MinIO, and its messages served to Java clients."""

from pathlib import Path

import pytest

from tests.integration.client_scene import need_clients
from tests.integration.live_scene import Load, Producer, Scene, beside_broker, finish
from tests.integration.served_scene import Job, Served
from tests.object_store.sealed_scene import key_file
from tests.servers.running_store import RunningStore
from tests.servers.tiered_serve import tiered_serve
from tiered.object_store.interface import GET_BYTES_MAX
from tiered.object_store.open_store import open_store

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]


def test_what_a_broker_gets_is_archived_encrypted_and_served(
    tmp_path: Path, minio_url: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_clients("5.3.3")
    ring = key_file(tmp_path / "ring", "k1")
    monkeypatch.setenv("TIERED_OBJECT_STORE__KEY_RING", str(ring))
    scene = Scene("5.3.3", topics=1)
    with beside_broker(scene, tmp_path, minio_url) as sidecar:
        sidecar.start()
        with Producer(sidecar.broker, scene, Load(4_000, 500), tmp_path / "producer.out") as producer:
            sent = producer.finish(120)
        sidecar.wait_until_archived(60)
        compared = finish(sidecar)
        assert sent.acked <= compared.shown
        root = open_store(sidecar.url, minio_url.options())  # without the ring
        for info in root._store.list(""):
            is_sealed = info.key.split("/")[2] not in ("catalog", "pages", "keys")
            stored = root._store.get(info.key, GET_BYTES_MAX)
            assert (stored[-80:-72] == b"RMQTSEAL") == is_sealed, info.key
        for name, value in sidecar.environment().items():
            monkeypatch.setenv(name, value)
        server, address = tiered_serve(sidecar.url, tmp_path)
        with server:
            served = Served(tmp_path, sidecar.url, address, server)
            (got,) = served.consume("5.3.3", Job("pull", "live0", compared.shown, "G_sealed"))
            assert len(set(got)) == len(got) == compared.shown
