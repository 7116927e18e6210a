"""What real brokers wrote, consumed through the proxy from a broker that has half of it: everything, in order."""

import asyncio
import zlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fetcher.access import open_access
from fetcher.policy.broker_files import BrokerFiles
from fetcher.policy.read_policy import ReadPolicies
from fetcher.policy.read_router import ReadRouter
from rocketmq_tiered.server.backend.pull_handlers import PullLimits
from rocketmq_tiered.server.backend.served_archive import ServedArchive
from rocketmq_tiered.server.proxy.broker_view import BrokerViews
from rocketmq_tiered.server.proxy.proxy_pull import ProxyPulls, PullContext
from rocketmq_tiered.server.proxy.upstream import InflightLimit, RemotingUpstream
from tests.end_to_end.ground_truth import load_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, backfill
from tests.server.proxy.proxy_pulls import Subscriptions
from tests.server.proxy.scripted_broker import ScriptedBroker
from tests.server.serving_peer import request
from tests.sweeps import sweep
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.store import open_broker_store
from tiered.object_store.file import FileStore
from tiered.remoting.command import RequestCode
from tiered.settings.sections import Settings

Queue = tuple[str, int]


def queues_of(
    directory: Path, name: str
) -> tuple[dict[Queue, list[dict[str, Any]]], dict[Queue, dict[int, bytes]]]:
    """Truth and records of the queues whose offsets follow each other without a hole."""
    truth = load_truth(directory, name, FILTER)
    log = CommitLog([directory / "store" / "commitlog"])
    lines, records = {}, {}
    for queue, found in truth.queues.items():
        offsets = [line["queueOffset"] for line in found]
        if offsets == list(range(len(found))) and not any(line.get("inner") for line in found):
            lines[queue] = found
            records[queue] = {
                line["queueOffset"]: log.read(line["commitLogOffset"], line["storeSize"]) for line in found
            }
    return lines, records


@pytest.mark.parametrize("with_files", [True, False], ids=["files", "word"])
@pytest.mark.parametrize("name", sweep(["C", "D", "H", "K"], fast=["H", "K"], rest="integration"))
def test_every_message_once_and_in_order(
    name: str, with_files: bool, real_store: Callable[[str], Path], tmp_path: Path
) -> None:
    """With its files beside us the broker seems to have everything, and has lost half of it at every request."""
    directory = real_store(name)
    lines, records = queues_of(directory, name)
    backfill(directory / "store", FileStore(tmp_path))
    consumed = asyncio.run(consume(directory / "store", tmp_path, records, with_files=with_files))
    assert len(lines) >= 2
    for queue, found in lines.items():
        assert len(consumed[queue]) == len(found), queue
        for record, line in zip(consumed[queue], found, strict=True):
            assert "recCrc32" not in line or zlib.crc32(record) == line["recCrc32"], (
                queue,
                line["queueOffset"],
            )
            assert record == records[queue][line["queueOffset"]]


async def consume(
    store: Path, archive: Path, records: dict[Queue, dict[int, bytes]], *, with_files: bool
) -> dict[Queue, list[bytes]]:
    stored: Any = SimpleNamespace(records=records)
    broker = ScriptedBroker(stored)
    broker.minimum = {queue: len(found) // 2 for queue, found in records.items()}
    await broker.start()
    access = open_access(f"file://{archive}", cluster=CLUSTER, broker=BROKER, settings=Settings())
    served = ServedArchive(access)
    hot = BrokerFiles(open_broker_store(store)) if with_files else None
    context = PullContext(served, BrokerViews(hot), Subscriptions())
    router = ReadRouter(access.catalog, ReadPolicies(), FILTER)
    pulls = ProxyPulls(router, context, PullLimits(hold_s_max=0.2))
    upstream = RemotingUpstream(broker.address, InflightLimit())
    consumed: dict[Queue, list[bytes]] = {}
    try:
        for (topic, queue_id), found in records.items():
            offset, seen = 0, consumed.setdefault((topic, queue_id), [])
            while offset < len(found):
                response = await pulls.pull(
                    request(
                        RequestCode.PULL_MESSAGE,
                        topic=topic,
                        queueId=queue_id,
                        queueOffset=offset,
                        sysFlag=2,
                        consumerGroup="g",
                        maxMsgNums=32,
                        suspendTimeoutMillis=100,
                        commitOffset=0,
                        subVersion=0,
                    ),
                    upstream,
                )
                assert response.code == 0, (topic, queue_id, offset, response)
                data = b"".join(map(bytes, response.body))
                while data:
                    size = int.from_bytes(data[:4], "big")
                    seen.append(data[:size])
                    data = data[size:]
                offset = int(response.ext["nextBeginOffset"])
    finally:
        upstream.close()
        await broker.kill()
        if hot is not None:
            hot.close()
        access.close()
    return consumed
