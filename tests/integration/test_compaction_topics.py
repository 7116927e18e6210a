"""Beside a live broker, pulls of compaction topics get the broker's own replies, whatever the archive has of them."""

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.integration.client_scene import ask, need_clients, until, wait_for
from tests.integration.live import Sidecar
from tests.servers.child import free_port
from tests.servers.rocketmq import RocketMq, recorded_settings
from tests.servers.store_directory import StoreDirectory
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSION = "5.3.3"
QUEUES = (("t_compact_hot", 0), ("t_compact_hot", 1), ("t_compact_cold", 0))
OFFSETS = {RequestCode.GET_MIN_OFFSET: "offset", RequestCode.GET_MAX_OFFSET: "offset"}


@pytest.fixture(params=["H", "H2"])
def proxy(
    request: pytest.FixtureRequest, real_store: Callable[[str], Path], tmp_path: Path
) -> Iterator[tuple[str, Sidecar]]:
    """`tiered run` beside a broker on a copy of a store with compacted topics, and where its clients connect. The
    archive answers whatever it has (FORCE)."""
    need_clients(VERSION)
    original = real_store(request.param)
    shutil.copytree(original / "store", tmp_path / "mq" / "store")
    broker = RocketMq(VERSION, tmp_path / "mq", recorded_settings(original / "broker.conf"))
    address = f"127.0.0.1:{free_port()}"
    settings = {
        "TIERED_SERVE__BIND": address,
        "TIERED_SERVE__ADVERTISE": address,
        "TIERED_READ__POLICY": "FORCE",
        "TIERED_OFFLOAD__BATCH_AGE_MS": 500,
    }
    objects = StoreDirectory(tmp_path / "objects")
    sidecar = Sidecar(broker, objects, f"{objects.fresh_bucket()}/live", tmp_path, settings=settings)
    with broker:
        try:
            sidecar.start()
            sidecar.wait_until_following(60)
            until(
                lambda: sidecar.status().get("messages", 0) > 0 == sidecar.status().get("lagMessages"),
                "not archived",
            )
            wait_for(sidecar.log, '"the archive is open for clients"')
            yield address, sidecar
        finally:
            if sidecar.process is not None and sidecar.process.poll() is None:
                assert sidecar.stop() == 0


def pulled(address: str, topic: str, queue_id: int) -> list[tuple[int, dict[str, str], bytes]]:
    """The replies to a consumer that reads the queue from 0 to its end, and past it."""
    offset, replies = 0, []
    while True:
        answer = ask(
            address,
            RequestCode.PULL_MESSAGE,
            consumerGroup="G_compact",
            topic=topic,
            queueId=queue_id,
            queueOffset=offset,
            maxMsgNums=32,
            sysFlag=4,
            commitOffset=0,
            suspendTimeoutMillis=0,
            subVersion=0,
            subscription="*",
            expressionType="TAG",
        )
        replies.append(visible(answer))
        following = int(answer.ext_fields.get("nextBeginOffset", offset))
        if answer.code != ResponseCode.SUCCESS or following <= offset:
            return replies
        offset = following


def visible(answer: RemotingCommand) -> tuple[int, dict[str, str], bytes]:
    """What a consumer sees, except for the broker to pull from next."""
    fields = {name: text for name, text in answer.ext_fields.items() if name.endswith("Offset")}
    return answer.code, fields, answer.body


def test_the_proxy_relays_what_the_broker_answers(proxy: tuple[str, Sidecar]) -> None:
    address, sidecar = proxy
    broker = sidecar.broker.broker_address
    for topic, queue_id in QUEUES:
        by_broker = pulled(broker, topic, queue_id)
        assert len(by_broker) > 3
        assert pulled(address, topic, queue_id) == by_broker, (topic, queue_id)
        for code, name in OFFSETS.items():
            theirs = ask(broker, code, topic=topic, queueId=queue_id).ext_fields[name]
            assert ask(address, code, topic=topic, queueId=queue_id).ext_fields[name] == theirs
    sidecar.broker.broker.kill()
    ((code, fields, _),) = pulled(address, "t_compact_hot", 0)
    assert code == ResponseCode.PULL_RETRY_IMMEDIATELY, "superseded values do not stand in for the broker"
    assert int(fields["nextBeginOffset"]) == 0
    assert pulled(address, "t_plain", 0)[0][0] == ResponseCode.SUCCESS, "other topics are in the archive"
