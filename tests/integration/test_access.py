"""A second account without rights tries every request code: none reveals or changes anything. Against a served archive
with both kinds of rules, and in proxy mode beside brokers with ACL 1.0 and 5.x.
"""

import json
import random
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

from rocketmq_tiered.cli import main
from rocketmq_tiered.server.security.rules import read_rules
from tests.end_to_end.offloading import backfill
from tests.integration.access_attempts import Account, Target, cell_of, codes, is_refusal, record
from tests.integration.client_scene import QUEUES, beside_clients, broker_config, everything, until
from tests.integration.live import Sidecar
from tests.integration.live_scene import Scene
from tests.integration.proxy_scene import ProxyScene
from tests.server.request_fuzz import changed_requests
from tests.servers.child import ChildServer, free_port, listens
from tests.servers.rocketmq import BROKER, CLUSTER, checking_signatures, judging_permissions
from tests.servers.running_store import RunningStore
from tiered.formats import fastjson
from tiered.formats.record import decode_record
from tiered.object_store.file import FileStore
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand, RequestCode
from tiered.remoting.credentials import Credentials
from tiered.timestamps import wall_ms

pytestmark = [pytest.mark.integration, pytest.mark.timeout(400)]

OWNER = Credentials("the-owner", "a secret of the owner")
SECOND = Credentials("the-second", "a secret of the second")
PRODUCER = Credentials("the-producer", "secret-of-the-producer")
READER = Credentials("the-reader", "secret-of-the-reader")
GROUP, ORDERED = "G-owned", "G-ordered"
PLAIN: dict[str, Any] = {
    "accounts": [
        {"accessKey": OWNER.access_key, "secretKey": OWNER.secret_key, "admin": True},
        {
            "accessKey": SECOND.access_key,
            "secretKey": SECOND.secret_key,
            "defaultTopicPerm": "DENY",
            "defaultGroupPerm": "DENY",
        },
        {
            "accessKey": PRODUCER.access_key,
            "secretKey": PRODUCER.secret_key,
            "defaultTopicPerm": "DENY",
            "defaultGroupPerm": "DENY",
            "topicPerms": ["own=PUB"],
        },
        {
            "accessKey": READER.access_key,
            "secretKey": READER.secret_key,
            "defaultTopicPerm": "DENY",
            "defaultGroupPerm": "DENY",
            "topicPerms": ["live0=SUB"],
            "groupPerms": [f"{ORDERED}=SUB"],
        },
    ],
}
USERS: dict[str, Any] = {
    "users": [
        {"username": OWNER.access_key, "password": OWNER.secret_key, "userType": "Super"},
        {"username": SECOND.access_key, "password": SECOND.secret_key, "userType": "Normal"},
        {"username": PRODUCER.access_key, "password": PRODUCER.secret_key, "userType": "Normal"},
    ],
    "acls": [
        {
            "subject": f"User:{PRODUCER.access_key}",
            "policies": [{"entries": [{"resource": "Topic:own", "actions": ["Pub"], "decision": "Allow"}]}],
        }
    ],
}
STATE = {
    RequestCode.GET_ALL_TOPIC_CONFIG,
    RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG,
    RequestCode.GET_BROKER_CONFIG,
    RequestCode.GET_ALL_CONSUMER_OFFSET,
    RequestCode.GET_TOPIC_STATS_INFO,
    RequestCode.GET_CONSUMER_CONNECTION_LIST,
    RequestCode.QUERY_CONSUMER_OFFSET,
    RequestCode.GET_ALL_TOPIC_LIST_FROM_NAMESERVER,
}
"""Requests whose replies change with what the attempts try to change."""
VOLATILE = {"dataVersion", "lastUpdateTimestamp", "topicPutTps", "timestamp"}

owner, second = Account(OWNER), Account(SECOND)


def without_volatile(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): without_volatile(part) for name, part in value.items() if name not in VOLATILE}
    return [without_volatile(part) for part in value] if isinstance(value, list) else value


def state_of(address: str, target: Target) -> dict[int, Any]:
    """What the owner sees."""
    found = {}
    for code in sorted(STATE):
        reply = owner.ask(address, code, {"topic": target.topic, "consumerGroup": GROUP, "queueId": "0"})
        assert reply is not None, code
        text = reply.body.decode()
        body = (
            without_volatile(fastjson.loads(reply.body))
            if text.startswith("{")
            else sorted(text.splitlines())
        )
        found[int(code)] = reply.code, dict(reply.ext_fields), body
    return found


def pull_of(offset: int, topic: str, **others: object) -> dict[str, str]:
    fields = {
        "consumerGroup": GROUP,
        "topic": topic,
        "queueId": 0,
        "queueOffset": offset,
        "maxMsgNums": 32,
        "sysFlag": 4,
        "subscription": "*",
        "expressionType": "TAG",
        "commitOffset": 0,
        "subVersion": 1,
        "suspendTimeoutMillis": 0,
    } | others
    return {name: str(value) for name, value in fields.items()}


def target_of(address: str, topic: str) -> Target:
    """Its first message, and an offset of the owner's group."""
    reply = owner.ask(address, RequestCode.PULL_MESSAGE, pull_of(5, topic, maxMsgNums=1))
    assert reply is not None and reply.code == 0, reply
    message = decode_record(reply.body)
    commit = {"consumerGroup": GROUP, "topic": topic, "queueId": "0", "commitOffset": "3"}
    reply = owner.ask(address, RequestCode.UPDATE_CONSUMER_OFFSET, commit)
    assert reply is not None and reply.code == 0, reply
    return Target(BROKER, topic, GROUP, message.physical_offset, message.stored_body)


def attempts(address: str, target: Target) -> dict[int, RemotingCommand | None]:
    """The replies to the second account."""
    return {code: second.ask(address, code, target.fields_of(code), target.body_of(code)) for code in codes()}


@contextmanager
def served(archive: Path, rules: dict[str, Any], directory: Path) -> Iterator[str]:
    (directory / "rules.yml").write_text(yaml.safe_dump(rules))
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "rocketmq_tiered.cli",
        "serve",
        f"file://{archive}",
        "--bind",
        f"127.0.0.1:{port}",
        "--set",
        "admin.port=0",
        "--set",
        f"serve.acl_file={directory}/rules.yml",
    ]
    root = {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    server = ChildServer("tiered serve", command, root, directory / "serve.log", lambda: listens(port))
    with server:
        yield f"127.0.0.1:{port}"


@pytest.mark.parametrize(("column", "rules"), [("archive 1.0", PLAIN), ("archive 5.x", USERS)])
def test_a_served_archive(
    real_store: Callable[[str], Path], tmp_path: Path, column: str, rules: dict[str, Any]
) -> None:
    backfill(real_store("A") / "store", FileStore(tmp_path / "archive"))
    with served(tmp_path / "archive", rules, tmp_path) as address:
        target = target_of(address, "t_keys")
        before = state_of(address, target)
        replies = attempts(address, target)
        assert state_of(address, target) == before
        record(column, {code: cell_of(reply) for code, reply in replies.items()})
        answered = {code: reply for code, reply in replies.items() if not is_refusal(reply)}
        assert answered == {}
        unsigned = Account(None)
        for code in codes():
            assert is_refusal(unsigned.ask(address, code, target.fields_of(code), target.body_of(code))), code


@dataclass
class Guarded(ProxyScene):
    """A broker with access control, and a tiered proxy beside it."""


@pytest.fixture(scope="module", params=["4.9.7", "5.3.3"])
def guarded(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, minio_url: RunningStore
) -> Iterator[Guarded]:
    version, directory = request.param, tmp_path_factory.mktemp("guarded")
    address = f"127.0.0.1:{free_port()}"
    account = directory / "owner.yml"
    account.write_text(f'accessKey: {OWNER.access_key}\nsecretKey: "{OWNER.secret_key}"\n')
    rules = directory / "rules.yml"
    rules.write_text(yaml.safe_dump(PLAIN if version.startswith("4") else USERS))
    rules.chmod(0o600)
    settings = {
        "TIERED_SERVE__BIND": address,
        "TIERED_SERVE__ADVERTISE": address,
        "TIERED_OFFLOAD__BATCH_AGE_MS": 500,
        "TIERED_READ__POLICY": "FORCE",
        "TIERED_BROKER__CREDENTIALS_FILE": account,
        "TIERED_SERVE__ACL_FILE": rules,
    }
    scene = Scene(version=version, topics=2, queues=QUEUES, config=broker_config(), settings=settings)

    def made(sidecar: Sidecar) -> Guarded:
        return Guarded(sidecar, address, scene, directory)

    with beside_clients(scene, directory, minio_url, made) as found:
        found.fill(1200)
        (directory / "mq" / "conf" / "plain_acl.yml").write_text(yaml.safe_dump(PLAIN))
        checks = checking_signatures(version, OWNER.access_key, OWNER.secret_key)
        found.broker.restart_with(checks | judging_permissions(version))
        if version.startswith("5"):
            (directory / "conf").mkdir(exist_ok=True)
            (directory / "conf" / "tools.yml").write_text(account.read_text())
            for one in (SECOND, PRODUCER):
                words = (
                    "createUser",
                    "-c",
                    CLUSTER,
                    "-u",
                    one.access_key,
                    "-p",
                    one.secret_key,
                    "-t",
                    "Normal",
                )
                until(lambda words=words: "success" in found.mqadmin(*words, real=True), "no other account")
            grant = ("createAcl", "-c", CLUSTER, "-s", f"User:{PRODUCER.access_key}", "-r", "Topic:own")
            found.mqadmin(*grant, "-a", "Pub", "-d", "Allow", real=True)
        found.settings_file.write_text("")
        found.sidecar.arguments = ("--config", str(found.settings_file))
        found.sidecar.start()
        found.wait_until_serving()
        until(lambda: archived(found) > 100, "nothing is archived", 60)
        yield found


def archived(scene: Guarded) -> int:
    reply = owner.ask(scene.address, RequestCode.PULL_MESSAGE, pull_of(100, "live0"))
    is_ours = reply is not None and reply.code == 0 and reply.ext_fields.get("suggestWhichBrokerId") == "0"
    return int(reply.ext_fields["maxOffset"]) if reply is not None and is_ours else 0


def heartbeat(client: str, expression: str, version: int) -> bytes:
    data = {"topic": "live0", "subString": expression, "expressionType": "TAG", "subVersion": version}
    consumer = {
        "groupName": GROUP,
        "consumeType": "CONSUME_PASSIVELY",
        "messageModel": "CLUSTERING",
        "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
        "subscriptionDataSet": [data],
    }
    return json.dumps({"clientID": client, "consumerDataSet": [consumer]}).encode()


def test_an_unsigned_heartbeat_does_not_move_a_signed_pull(guarded: Guarded) -> None:
    """A pull without an expression, of a group that another client claims to be in with another tag."""
    code = RequestCode.HEART_BEAT
    direct, victim = (
        partial(BrokerClient, timeout_s=5, credentials=OWNER)(a)
        for a in (
            guarded.broker.broker_address,
            guarded.address,
        )
    )
    attackers = [BrokerClient(guarded.address, 5, credentials) for credentials in (None, SECOND)]
    try:
        for client in (direct, victim):  # as a real client does, to every broker of a route
            assert client.call(code, {}, heartbeat("victim", "*", 1)).code == 0
        for number, attacker in enumerate(attackers):
            for name in ("victim", f"other{number}"):
                attacker.call(code, {}, heartbeat(name, "none", 1 << 50))
        fields = pull_of(0, "live0", sysFlag=2, suspendTimeoutMillis=1000)
        del fields["subscription"]
        for _ in range(3):
            found = victim.call(RequestCode.PULL_MESSAGE, fields)
            assert found.code == 0 and found.body, found
            assert found.ext_fields["nextBeginOffset"] == "32"
            victim.call(code, {}, heartbeat("victim", "*", 1))
            for attacker in attackers:
                attacker.call(code, {}, heartbeat("victim", "none", 1 << 50))
        (group,) = guarded.sidecar.status()["proxy"]["groups"]
        assert (group["name"], group["members"]) == (GROUP, 1), "the victim alone"
    finally:
        for client in (direct, victim, *attackers):
            client.close()


def test_proxy_mode_beside_access_control(guarded: Guarded) -> None:
    broker = guarded.broker
    target = target_of(broker.broker_address, "live0")
    before = state_of(guarded.address, target)
    replies = attempts(guarded.address, target)
    assert state_of(guarded.address, target) == before
    assert {code for code, reply in replies.items() if not is_refusal(reply)} == set()
    record(f"proxy {broker.version}", {code: cell_of(reply) for code, reply in replies.items()})
    unsigned = Account(None)
    for code in codes():
        reply = unsigned.ask(guarded.address, code, target.fields_of(code), target.body_of(code))
        assert is_refusal(reply), f"{code}: {reply}"


def test_a_message_is_named_by_its_offset_only_by_who_may_read_it(guarded: Guarded) -> None:
    reply = owner.ask(guarded.broker.broker_address, RequestCode.PULL_MESSAGE, pull_of(5, "live0"))
    assert reply is not None and reply.code == 0
    phys = decode_record(reply.body[: int.from_bytes(reply.body[:4], "big")]).physical_offset
    direct = second.ask(guarded.broker.broker_address, RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(phys)})
    assert direct is not None and direct.code == 0, "brokers judge no message without a topic"
    assert is_refusal(second.ask(guarded.address, RequestCode.VIEW_MESSAGE_BY_ID, {"offset": str(phys)}))
    back = {
        "group": GROUP,
        "offset": str(phys),
        "delayLevel": "0",
        "originTopic": "live0",
        "originMsgId": "X",
        "maxReconsumeTimes": "16",
        "unitMode": "false",
        "bname": BROKER,
    }
    for account, is_allowed in ((second, False), (owner, True)):
        found = account.ask(guarded.address, RequestCode.CONSUMER_SEND_MSG_BACK, back)
        assert found is not None and (found.code == 0) is is_allowed, found


def test_an_orderly_consumer_reads_everything_in_order_and_others_lock_no_queue(guarded: Guarded) -> None:
    """ACL 1.0 judges no queue locks; the rules of the sidecar do."""
    if not guarded.broker.version.startswith("4"):
        pytest.skip("the account has rules of ACL 1.0")
    ends = [archived_end(guarded, queue) for queue in range(QUEUES)]
    keys = (
        f"-Dconsume.access.key={READER.access_key}",
        f"-Dconsume.secret.key={READER.secret_key}",
        "-Dconsume.pause.ms=5",
    )
    wanted = everything(ends)
    consumer = guarded.consume("orderly", ORDERED, len(wanted), idle_s=60, version="4.9.7", flags=keys)
    consumer.wait_for(1)
    lock = json.dumps(
        {
            "consumerGroup": ORDERED,
            "clientId": "thief",
            "mqSet": [{"brokerName": BROKER, "queueId": queue, "topic": "live0"} for queue in range(QUEUES)],
        }
    ).encode()
    reply = second.ask(guarded.address, RequestCode.LOCK_BATCH_MQ, {}, lock)
    assert is_refusal(reply), reply
    lines = consumer.finish()
    assert set(lines) == wanted
    for queue in range(QUEUES):
        offsets = [offset for number, offset in lines if number == queue]
        assert offsets == sorted(set(offsets)), f"queue {queue} is out of order"


def archived_end(scene: Guarded, queue: int) -> int:
    """The maximum of a queue of live0, as the owner sees it."""
    reply = owner.ask(scene.address, RequestCode.GET_MAX_OFFSET, {"topic": "live0", "queueId": str(queue)})
    assert reply is not None and reply.code == 0, reply
    return int(reply.ext_fields["offset"])


def ends(scene: Guarded, *topics: str) -> dict[str, int]:
    """How many messages the topics have."""
    found = dict.fromkeys(topics, 0)
    for topic in topics:
        for queue in range(8):
            fields = {"topic": topic, "queueId": str(queue)}
            reply = owner.ask(scene.broker.broker_address, RequestCode.GET_MAX_OFFSET, fields)
            found[topic] += int(reply.ext_fields.get("offset", "0")) if reply is not None else 0
    return found


def test_changed_requests_and_timers_reach_no_topic_that_the_account_lacks(guarded: Guarded) -> None:
    """Far timers too, which 4.9 would deliver at once."""
    for topic in ("own", "secret"):
        guarded.mqadmin("updateTopic", "-c", CLUSTER, "-t", topic, "-r", "8", "-w", "8", real=True)
    deliver_ms = wall_ms() + 60 * 86_400_000
    send = {"a": "P", "c": "TBW102", "d": "4", "e": "0", "f": "0", "g": "1", "h": "0", "j": "0", "k": "false"}
    send["i"] = f"UNIQ_KEY\x01U\x02TIMER_DELIVER_MS\x01{deliver_ms}\x02"
    producer, before = Account(PRODUCER), ends(guarded, "own", "secret")
    codes_of = {}
    for topic in ("own", "secret", "rmq_sys_wheel_timer"):
        reply = producer.ask(
            guarded.address, RequestCode.SEND_MESSAGE_V2, {**send, "b": topic, "m": "false"}, b"x"
        )
        codes_of[topic] = None if reply is None else reply.code
        if topic == "own":
            assert reply is not None and reply.ext_fields.get("recallHandle"), reply
    assert codes_of == {"own": 0, "secret": 16, "rmq_sys_wheel_timer": 16}
    assert ends(guarded, "own", "secret") == before, "it is kept for its time"
    kept = ends(guarded, "TIERED_TIMERS")["TIERED_TIMERS"]
    assert kept == 1
    host, _, port = guarded.address.rpartition(":")
    answered = 0
    for frame in changed_requests(random.Random(7), 1_000, wall_ms(), PRODUCER):
        with socket.create_connection((host, int(port)), 5) as connection:
            connection.sendall(len(frame).to_bytes(4, "big") + frame)
            connection.settimeout(5)
            with suppress(OSError):
                answered += bool(connection.recv(1 << 16))
    assert answered > 500
    assert ends(guarded, "secret")["secret"] == before["secret"]
    assert (
        ends(guarded, "own")["own"] > before["own"] or ends(guarded, "TIERED_TIMERS")["TIERED_TIMERS"] > kept
    )
    for queue in range(8):
        fields = pull_of(0, "TIERED_TIMERS", queueId=queue)
        reply = owner.ask(guarded.broker.broker_address, RequestCode.PULL_MESSAGE, fields)
        at = 0
        while reply is not None and at < len(reply.body):
            size = int.from_bytes(reply.body[at : at + 4], "big")
            properties = decode_record(reply.body[at : at + size]).properties
            assert properties["TIERED_TOPIC"] == "own", properties
            at += size


def test_the_brokers_rules_are_printed_as_a_file(
    guarded: Guarded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = f"broker.credentials_file={guarded.directory}/owner.yml"
    words = [
        "config",
        "acl-from-broker",
        "--broker-address",
        guarded.broker.broker_address,
        "--set",
        settings,
    ]
    code = main(words)
    printed = capsys.readouterr()
    if guarded.broker.version.startswith("4"):
        assert code != 0 and "conf/plain_acl.yml" in printed.err
        return
    path = tmp_path / "rules.yml"
    path.write_text(printed.out)
    path.chmod(0o600)
    rules = read_rules(path)
    assert rules.accounts[SECOND.access_key].secret == SECOND.secret_key
    assert rules.send_refusal(PRODUCER.access_key, "own", "10.0.0.1") is None
    assert rules.send_refusal(PRODUCER.access_key, "secret", "10.0.0.1") is not None
