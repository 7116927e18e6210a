"""Members, subscriptions and queue locks, as consumers and their rebalance see them."""

import asyncio
import json
from typing import Any

import pytest

from rocketmq_tiered.server.groups.client_table import EXPIRY_S, ClientTable, register_client_handlers
from rocketmq_tiered.server.groups.queue_locks import LOCK_S, LockTable, MessageQueue, register_lock_handlers
from rocketmq_tiered.server.wire.request import BadRequestError, HandlerTable, Response
from tests.server.serving_peer import RecordingPeer, request
from tiered.clock import Clock
from tiered.remoting.command import RequestCode, ResponseCode


class Time:
    """A monotonic clock set by hand."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def heartbeat(client: str, *groups: str, peer: RecordingPeer, expression: str = "*", version: int = 1) -> Any:
    subscription = {"topic": "t", "subString": expression, "expressionType": "TAG", "subVersion": version}
    data = [
        {"groupName": group, "messageModel": "CLUSTERING", "subscriptionDataSet": [subscription]}
        for group in groups
    ]
    return request(RequestCode.HEART_BEAT, peer, {"clientID": client, "consumerDataSet": data})


def answer(table: HandlerTable, sent: Any) -> Response:
    handler = table.find(sent.code)
    assert handler is not None
    response = asyncio.run(handler(sent))  # type: ignore[arg-type]
    assert isinstance(response, Response)
    return response


@pytest.fixture
def clients() -> tuple[ClientTable, HandlerTable, Time]:
    clock, table = Time(), HandlerTable()
    found = ClientTable(Clock(monotonic_s=clock))
    register_client_handlers(table, found)
    return found, table, clock


def test_members_are_listed_and_notified_of_each_other(clients: Any) -> None:
    _, table, _ = clients
    first, second = RecordingPeer(1), RecordingPeer(2)
    assert answer(table, heartbeat("a", "g", peer=first)).ext["IS_SUB_CHANGE"] == "true"
    assert answer(table, heartbeat("a", "g", peer=first)).ext["IS_SUB_CHANGE"] == "false"
    answer(table, heartbeat("b", "g", peer=second))
    assert first.pushed[-1][:2] == (RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, {"consumerGroup": "g"})
    listed = answer(table, request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="g"))
    assert json.loads(listed.body[0]) == {"consumerIdList": ["a", "b"]}
    none = answer(table, request(RequestCode.GET_CONSUMER_LIST_BY_GROUP, consumerGroup="other"))
    assert none.code == ResponseCode.SYSTEM_ERROR


def test_a_member_goes_with_its_connection_its_word_or_its_silence(clients: Any) -> None:
    found, table, clock = clients
    peers = [RecordingPeer(number) for number in range(3)]
    for name, peer in zip("abc", peers, strict=True):
        answer(table, heartbeat(name, "g", peer=peer))
    found.closed(peers[0])
    assert set(found.group("g").members) == {"b", "c"}
    namesake = RecordingPeer(9)  # a client that has the same id, and ends
    answer(table, request(RequestCode.UNREGISTER_CLIENT, namesake, clientID="b", consumerGroup="g"))
    assert set(found.group("g").members) == {"b", "c"}
    answer(table, request(RequestCode.UNREGISTER_CLIENT, peers[1], clientID="b", consumerGroup="g"))
    assert set(found.group("g").members) == {"c"}
    assert peers[2].pushed[-1][0] == RequestCode.NOTIFY_CONSUMER_IDS_CHANGED
    clock.now_s += EXPIRY_S - 1
    found.expire()
    assert found.group("g") is not None
    clock.now_s += 2
    found.expire()
    assert found.group("g") is None


def test_an_older_subscription_does_not_replace_a_newer_one(clients: Any) -> None:
    found, table, _ = clients
    peer = RecordingPeer()
    answer(table, heartbeat("a", "g", peer=peer, expression="TagB", version=5))
    answer(table, heartbeat("b", "g", peer=RecordingPeer(2), expression="TagA", version=3))
    assert found.subscription("g", "t", peer.id).expression == "TagB"
    answer(table, heartbeat("a", "g", peer=peer, expression="TagC", version=4))
    assert found.subscription("g", "t", peer.id).expression == "TagB"
    connections = answer(table, request(RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g"))
    document = json.loads(connections.body[0])
    assert document["subscriptionTable"]["t"]["tagsSet"] == ["TagB"]
    assert {item["clientId"] for item in document["connectionSet"]} == {"a", "b"}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        # As clients of C++ say it.
        ((1, 1, 0), ("CONSUME_PASSIVELY", "CLUSTERING", "CONSUME_FROM_LAST_OFFSET")),
        ((0, 0, 5), ("CONSUME_ACTIVELY", "BROADCASTING", "CONSUME_FROM_TIMESTAMP")),
        (("CONSUME_POP", "CLUSTERING", "any"), ("CONSUME_POP", "CLUSTERING", "any")),
        ((9, -1, True), ("9", "-1", "True")),  # no known meaning: tools get it unchanged
    ],
)
def test_tools_see_how_a_group_consumes_by_name(
    clients: Any, said: tuple[object, ...], expected: tuple[str, ...]
) -> None:
    _, table, _ = clients
    names = "consumeType", "messageModel", "consumeFromWhere"
    data = {"groupName": "g", **dict(zip(names, said, strict=True))}
    answer(table, request(RequestCode.HEART_BEAT, body={"clientID": "a", "consumerDataSet": [data]}))
    connections = answer(table, request(RequestCode.GET_CONSUMER_CONNECTION_LIST, consumerGroup="g"))
    document = json.loads(connections.body[0])
    assert tuple(document[name] for name in names) == expected


def test_a_body_that_is_no_heartbeat_is_refused(clients: Any) -> None:
    _, table, _ = clients
    with pytest.raises(BadRequestError, match="not JSON"):
        answer(table, request(RequestCode.HEART_BEAT))


def test_one_client_of_a_group_holds_a_queue() -> None:
    clock = Time()
    locks = LockTable(Clock(monotonic_s=clock))
    one, two = MessageQueue("b", "t", 0), MessageQueue("b", "t", 1)
    assert locks.lock("g", "a", [one, two]) == [one, two]
    assert locks.lock("g", "b", [one]) == []
    assert locks.lock("other", "b", [one]) == [one]
    clock.now_s += LOCK_S - 1
    assert locks.lock("g", "a", [one]) == [one]  # renewed
    clock.now_s += 2
    assert locks.lock("g", "b", [one, two]) == [two]  # only the one that was not renewed is over
    locks.unlock("g", "b", [one])  # not the holder's
    assert locks.lock("g", "b", [one]) == []
    locks.unlock("g", "a", [one])
    assert locks.lock("g", "b", [one]) == [one]
    clock.now_s += LOCK_S + 1
    locks.expire()
    assert locks.lock("g", "c", [one, two]) == [one, two]


def test_locks_as_requested_on_the_wire() -> None:
    table = HandlerTable()
    register_lock_handlers(table, LockTable(Clock(monotonic_s=Time())), lambda: True)
    queue = {"brokerName": "b", "queueId": 0, "topic": "t"}
    body = {"consumerGroup": "g", "clientId": "a", "mqSet": [queue], "onlyThisBroker": False}
    held = answer(table, request(RequestCode.LOCK_BATCH_MQ, body=body))
    assert json.loads(held.body[0]) == {"lockOKMQSet": [queue]}
    other = answer(table, request(RequestCode.LOCK_BATCH_MQ, body={**body, "clientId": "x"}))
    assert json.loads(other.body[0]) == {"lockOKMQSet": []}
    assert answer(table, request(RequestCode.UNLOCK_BATCH_MQ, body=body)).code == 0
    with pytest.raises(BadRequestError):
        answer(table, request(RequestCode.LOCK_BATCH_MQ, body={"mqSet": [{}]}))
