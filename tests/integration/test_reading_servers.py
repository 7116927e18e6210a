"""The Python API against a real S3 server: both forms, the same bytes as from a directory."""

from collections.abc import Callable
from pathlib import Path

import pytest

import rocketmq_tiered
from tests.end_to_end.offloading import backfill
from tests.servers.running_store import RunningStore
from tiered.object_store.open_store import open_store
from tiered.settings.sections import ObjectStoreSettings, Settings

pytestmark = pytest.mark.integration


async def test_both_forms_read_what_the_store_holds(
    minio_url: RunningStore, real_store: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in minio_url.environment().items():
        monkeypatch.setenv(name, value)
    url = f"{minio_url.fresh_bucket()}/archive"
    root = open_store(url, minio_url.options())
    backfill(real_store("K") / "store", root)
    root.close()
    store = ObjectStoreSettings(endpoint_url=minio_url.endpoint, region="us-east-1")
    settings = Settings(object_store=store)
    with rocketmq_tiered.open(url, settings=settings) as archive:
        listings = archive.queues(hidden=True)
        read = {}
        for found in listings:
            queue = archive.queue(found.topic, found.queue_id, generation=found.generation)
            read[found.key] = [bytes(message.data) for message in queue.messages()]
            assert found.kind == "batch" or len(read[found.key]) == found.messages
    assert sum(map(len, read.values())) > 7000
    async with rocketmq_tiered.open_async(url, settings=settings) as archive:
        for key, records in read.items():
            messages = archive.queue(key.topic, key.queue_id, generation=key.generation).messages()
            assert [bytes(message.data) async for message in messages] == records
        one = archive.queue("t_one", 0)
        assert await one.offset_by_time(0) == one.min_offset
