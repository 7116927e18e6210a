"""Access rules beside a real broker without access control: what it reads otherwise, or copies by offset."""

import json
import time
from collections.abc import Iterator, Mapping

import pytest
import yaml

from tests.integration.client_scene import QUEUES, beside_clients, broker_config, until
from tests.integration.live import Sidecar
from tests.integration.live_scene import Scene
from tests.integration.proxy_scene import ProxyScene
from tests.servers.child import free_port
from tests.servers.running_store import RunningStore
from tiered.formats import fastjson
from tiered.formats.record import decode_record
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand
from tiered.remoting.command import RequestCode as Code
from tiered.remoting.credentials import Credentials

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

OWNER = Credentials("the-owner", "a-secret-of-the-owner")
READER = Credentials("the-reader", "secret-of-the-reader")
GROUP, VICTIM = "G-own", "G-victim"
RULES = {
    "accounts": [
        {"accessKey": OWNER.access_key, "secretKey": OWNER.secret_key, "admin": True},
        {
            "accessKey": READER.access_key,
            "secretKey": READER.secret_key,
            "defaultTopicPerm": "DENY",
            "defaultGroupPerm": "DENY",
            "topicPerms": ["live0=PUB|SUB"],
            "groupPerms": [f"{GROUP}=SUB"],
        },
    ]
}
PREPARED, COMMIT = 4, 8


@pytest.fixture(scope="module", params=["4.9.7", "5.5.0"])
def ruled(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore
) -> Iterator[ProxyScene]:
    directory = tmp_path_factory.mktemp("ruled")
    address, rules = f"127.0.0.1:{free_port()}", directory / "rules.yml"
    rules.write_text(yaml.safe_dump(RULES))
    rules.chmod(0o600)
    settings = {
        "TIERED_SERVE__BIND": address,
        "TIERED_SERVE__ADVERTISE": address,
        "TIERED_OFFLOAD__BATCH_AGE_MS": 500,
        "TIERED_SERVE__ACL_FILE": rules,
    }
    scene = Scene(version=request.param, topics=2, queues=QUEUES, config=broker_config(), settings=settings)

    def made(sidecar: Sidecar) -> ProxyScene:
        return ProxyScene(sidecar, address, scene, directory)

    with beside_clients(scene, directory, minio_url, made) as found:
        found.fill(40)
        found.settings_file.write_text("")
        found.sidecar.arguments = ("--config", str(found.settings_file))
        found.sidecar.start()
        found.wait_until_serving()
        yield found


def ask(
    address: str, account: Credentials | None, code: int, fields: Mapping[str, object], body: bytes = b""
) -> RemotingCommand:
    client = BrokerClient(address, 8, account)
    try:
        return client.call(code, {name: str(value) for name, value in fields.items()}, body)
    finally:
        client.close()


def message_of(scene: ProxyScene, topic: str) -> int:
    """The physical offset of its second message at the broker. The proxy retries none at 0, where a log begins."""
    fields = {
        "consumerGroup": "G-any",
        "topic": topic,
        "queueId": 0,
        "queueOffset": 1,
        "maxMsgNums": 1,
        "sysFlag": 4,
        "subscription": "*",
        "commitOffset": 0,
        "subVersion": 1,
        "suspendTimeoutMillis": 0,
        "expressionType": "TAG",
    }
    reply = ask(scene.broker.broker_address, None, Code.PULL_MESSAGE, fields)
    assert reply.code == 0, reply
    return decode_record(reply.body).physical_offset


def test_no_other_spelling_makes_a_member(ruled: ProxyScene) -> None:
    def heartbeat(name: str, group: str) -> bytes:
        consumer = {
            "groupName": group,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "subscriptionDataSet": [{"topic": "live1", "subString": "*", "subVersion": 1}],
        }
        return json.dumps({"clientID": f"client-of-{name}", name: [consumer]}).encode()

    member = BrokerClient(ruled.broker.broker_address, 8)
    taken = 0
    try:
        for number, name in enumerate(
            ("consumer_data_set", "ConsumerDataSet", "consumer-data-set", "_consumerDataSet")
        ):
            assert member.call(Code.HEART_BEAT, {}, heartbeat(name, f"G-direct{number}")).code == 0
            listed = member.call(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": f"G-direct{number}"})
            taken += listed.code == 0 and name.encode() in listed.body
            for group in (VICTIM, GROUP):
                reply = ask(ruled.address, READER, Code.HEART_BEAT, {}, heartbeat(name, group))
                assert reply.code == 1 and "unknown name" in (reply.remark or "")
        is_fastjson_1 = ruled.broker.version.startswith("4")
        assert bool(taken) is is_fastjson_1, (
            "the broker itself takes at least one of them, fastjson 2 of 5.5 none"
        )
        for group in (VICTIM, GROUP):
            assert member.call(Code.GET_CONSUMER_LIST_BY_GROUP, {"consumerGroup": group}).code == 1
    finally:
        member.close()


def test_a_message_goes_back_to_readers_of_its_own_topic_only(ruled: ProxyScene) -> None:
    def back(phys: int) -> RemotingCommand:
        fields = {
            "group": GROUP,
            "offset": phys,
            "delayLevel": 0,
            "originTopic": "live0",
            "originMsgId": "X",
            "maxReconsumeTimes": 16,
            "unitMode": "false",
        }
        return ask(ruled.address, READER, Code.CONSUMER_SEND_MSG_BACK, fields)

    assert back(message_of(ruled, "live1")).code == 16
    assert back(message_of(ruled, "live1") + 8).code != 0, "inside a message"
    assert back(message_of(ruled, "live0")).code == 0


def prepared(scene: ProxyScene, topic: str) -> dict[str, object]:
    """A half message at the broker, and the fields that commit it."""
    unique = f"7F00000100002A9F{time.monotonic_ns() & 0xFFFFFFFFFFFFFFFF:016X}"
    properties = "".join(
        f"{name}\x01{value}\x02"
        for name, value in {
            "TRAN_MSG": "true",
            "PGROUP": "PG",
            "UNIQ_KEY": unique,
            "WAIT": "true",
        }.items()
    )
    fields = {
        "a": "PG",
        "b": topic,
        "c": "TBW102",
        "d": 4,
        "e": 0,
        "f": PREPARED,
        "g": time.time_ns() // 1_000_000,
        "h": 0,
        "i": properties,
        "j": 0,
        "k": "false",
        "m": "false",
    }
    sent = ask(scene.broker.broker_address, None, Code.SEND_MESSAGE_V2, fields, b"half")
    assert sent.code == 0, sent
    return {
        "producerGroup": "PG",
        "tranStateTableOffset": sent.ext_fields["queueOffset"],
        "commitLogOffset": int(sent.ext_fields["msgId"][16:], 16),
        "commitOrRollback": COMMIT,
        "fromTransactionCheck": "false",
        "msgId": unique,
        "transactionId": sent.ext_fields.get("transactionId", unique),
    }


def test_a_transaction_is_committed_by_who_may_publish_to_its_topic(ruled: ProxyScene) -> None:
    broker = ruled.broker.broker_address

    def size(topic: str) -> int:
        document = fastjson.loads(ask(broker, None, Code.GET_TOPIC_STATS_INFO, {"topic": topic}).body)
        assert isinstance(document, dict)
        return sum(int(place["maxOffset"]) for place in document["offsetTable"].values())

    before = {topic: size(topic) for topic in ("live0", "live1")}
    of_others, own = prepared(ruled, "live1"), prepared(ruled, "live0")
    for topic in ({"topic": "live0"}, {}):
        assert ask(ruled.address, READER, Code.END_TRANSACTION, of_others | topic).code == 16
    assert size("live1") == before["live1"]
    for account, fields, topic in ((READER, own, "live0"), (OWNER, of_others, "live1")):
        assert ask(ruled.address, account, Code.END_TRANSACTION, {**fields, "topic": topic}).code == 0
        until(lambda topic=topic: size(topic) == before[topic] + 1, f"{topic} has no more messages")
