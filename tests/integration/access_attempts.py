"""Every request an account without rights can try, and what became of it.

Owns the requests and the table. Does not own the servers (test_access.py).
"""

import base64
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rocketmq_tiered.server.proxy import relay
from rocketmq_tiered.server.slave.slave_service import ACKNOWLEDGED, BETWEEN_REPLICAS, RELAYED
from rocketmq_tiered.server.wire.request_fields import FIELDS
from tiered.errors import UnavailableError
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand, RequestCode
from tiered.remoting.credentials import Credentials

OTHERS: Final = (
    *range(10, 64),
    *range(100, 107),
    *range(200, 231),
    *range(300, 330),
    *range(340, 372),
    *range(400, 404),
    *range(500, 516),
    *range(900, 913),
    *range(1001, 1013),
    *range(3001, 3011),
    *range(200_050, 200_057),
    200_151,
)
"""Ranges of RocketMQ's RequestCode: the codes of 4.9 and 5.3, and some that neither knows."""
PUSHED: Final = {RequestCode.NOTIFY_CONSUMER_IDS_CHANGED, RequestCode.RESET_CONSUMER_CLIENT_OFFSET}


def codes() -> list[int]:
    """All that a client can send: those with handlers, those that are relayed, and others of RocketMQ."""
    relayed = {
        *relay.READS_OF_NAME_SERVERS,
        *relay.WRITES_OF_NAME_SERVERS,
        *relay.AMONG_SERVERS,
        *RELAYED,
        *ACKNOWLEDGED,
        *BETWEEN_REPLICAS,
    }
    return sorted({*map(int, RequestCode), *relayed, *OTHERS} - PUSHED)


@dataclass(frozen=True)
class Target:
    """A topic and group that the account has no rights on; a message of the topic at ``phys``, with ``body`` in it."""

    broker: str
    topic: str
    group: str
    phys: int
    body: bytes

    def fields_of(self, code: int) -> dict[str, str]:
        """Those of the code; of codes without a table all at once, as headers ignore those that are not theirs."""
        found = self._fields()
        known = FIELDS.get(code, found.keys())
        return {name: value for name, value in found.items() if name in known}

    def _fields(self) -> dict[str, str]:
        plain = {
            "topic": self.topic,
            "consumerGroup": self.group,
            "group": self.group,
            "groupName": self.group,
            "producerGroup": self.group,
            "originTopic": self.topic,
            "queueId": 0,
            "queueOffset": 0,
            "sysFlag": 4,
            "subscription": "*",
            "expressionType": "TAG",
            "subVersion": 1,
            "maxMsgNums": 32,
            "commitOffset": 7,
            "suspendTimeoutMillis": 0,
            "offset": self.phys,
            "timestamp": 0,
            "isForce": "true",
            "key": "k",
            "maxNum": 32,
            "beginTimestamp": 0,
            "endTimestamp": 1 << 62,
            "index": 0,
            "count": 1,
            "clientID": "second",
            "clientId": "second",
            "delayLevel": 1,
            "invisibleTime": 1000,
            "pollTime": 0,
            "initMode": 0,
            "bornTime": 1,
            "extraInfo": "0 1 1000 0 0 b 0 0",
            "defaultTopic": "TBW102",
            "defaultTopicQueueNums": 1,
            "flag": 0,
            "bornTimestamp": 1,
            "properties": "",
            "batch": "false",
            "readQueueNums": 1,
            "writeQueueNums": 1,
            "perm": 6,
            "topicFilterType": "SINGLE_TAG",
            "topicSysFlag": 0,
            "order": "false",
            "transactionId": "t",
            "msgId": "m",
            "tranStateTableOffset": 0,
            "commitLogOffset": self.phys,
            "commitOrRollback": 8,
            "fromTransactionCheck": "false",
            "brokerName": self.broker,
            "brokerAddr": "127.0.0.1:1",
            "clusterName": "c",
            "brokerId": 9,
            "haServerAddr": "127.0.0.1:2",
            "namespace": "ORDER_TOPIC_CONFIG",
            "value": "changed",
            "cluster": "DefaultCluster",
            "accessKey": "made-by-second",
            "secretKey": "made-by-second",
            "admin": "true",
            "username": "second-made",
            "subject": "User:second-made",
            "policyType": "Custom",
            "srcGroup": self.group,
            "destGroup": "second",
            "statsName": "TOPIC_PUT_NUMS",
            "statsKey": self.topic,
            "b": self.topic,
            "a": self.group,
            "c": "TBW102",
            "d": 1,
            "e": 0,
            "f": 0,
            "g": 1,
            "h": 0,
            "i": "",
            "j": 0,
            "k": "false",
            "m": "false",
            "jstackEnable": "false",
            "lastDeliverTime": 0,
            "committed": "true",
        }
        return {name: str(value) for name, value in plain.items()}

    def body_of(self, code: int) -> bytes:
        """The request's body."""
        queue = {"topic": self.topic, "brokerName": self.broker, "queueId": 0}
        subscription = {
            "topic": self.topic,
            "subString": "none",
            "expressionType": "TAG",
            "subVersion": 1 << 50,
        }
        consumer = {
            "groupName": self.group,
            "consumeType": "CONSUME_PASSIVELY",
            "messageModel": "CLUSTERING",
            "consumeFromWhere": "CONSUME_FROM_FIRST_OFFSET",
            "subscriptionDataSet": [subscription],
        }
        lock = {"consumerGroup": self.group, "clientId": "second", "mqSet": [queue]}
        ack = {
            "c": self.group,
            "t": self.topic,
            "r": "0",
            "q": 0,
            "rq": 0,
            "so": 0,
            "st": 0,
            "pt": 1,
            "it": 1000,
            "b": base64.b64encode(b"\1").decode(),
        }
        named = {"topic": self.topic, "consumerGroup": self.group}
        assignment = {**named, "clientId": "second", "strategyName": "AVG", "messageModel": "CLUSTERING"}
        mode = {**named, "mode": "POP", "popShareQueueNum": 0}
        documents: Mapping[int, object] = {
            RequestCode.HEART_BEAT: {"clientID": "second", "consumerDataSet": [consumer]},
            RequestCode.LOCK_BATCH_MQ: lock,
            RequestCode.UNLOCK_BATCH_MQ: lock,
            RequestCode.CHECK_CLIENT_CONFIG: {
                "clientId": "s",
                "group": self.group,
                "subscriptionData": subscription,
            },
            RequestCode.QUERY_ASSIGNMENT: assignment,
            RequestCode.SET_MESSAGE_REQUEST_MODE: mode,
            RequestCode.BATCH_ACK_MESSAGE: {"brokerName": self.broker, "acks": [ack]},
            RequestCode.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: {
                "groupName": self.group,
                "consumeEnable": False,
            },
        }
        if code in documents:
            return json.dumps(documents[code]).encode()
        return b"traceTopicName=changed\n" if code in (RequestCode.UPDATE_BROKER_CONFIG, 318) else b"{}"


@dataclass(frozen=True)
class Account:
    """Sends requests in its name, each over a connection of its own. ``credentials`` None: not signed."""

    credentials: Credentials | None

    def ask(
        self, address: str, code: int, fields: Mapping[str, str], body: bytes = b""
    ) -> RemotingCommand | None:
        """The reply; None if there is none."""
        client = BrokerClient(address, 4, self.credentials)
        try:
            return client.call(code, dict(fields), body)
        except UnavailableError:
            return None
        finally:
            client.close()


def name_of(code: int) -> str:
    """The code's name, if it has one here."""
    return RequestCode(code).name if code in set(map(int, RequestCode)) else ""


REFUSALS: Final = ("AclException", "not supported", "AuthenticationException", "AuthorizationException")


def is_refusal(reply: RemotingCommand | None) -> bool:
    """Whether it says that the request is not allowed or not known, and nothing else."""
    if reply is None or reply.code in (3, 16):
        return True
    return reply.code == 1 and any(word in (reply.remark or "") for word in REFUSALS)


def cell_of(reply: RemotingCommand | None) -> str:
    """A reply in the table."""
    if reply is None:
        return "no reply"
    if reply.code == 3:
        return "3 unknown"
    return f"{reply.code} refused" if is_refusal(reply) else str(reply.code)


TABLE: Final = Path(os.environ.get("TIERED_TEST_OUTPUT", "build")) / "access.json"
COLUMNS: Final = ("archive 1.0", "archive 5.x", "proxy 4.9.7", "proxy 5.3.3")


def record(column: str, cells: Mapping[int, str]) -> None:
    """Add a column, and write the table so far as Markdown."""
    TABLE.parent.mkdir(parents=True, exist_ok=True)
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    table[column] = {str(code): cell for code, cell in cells.items()}
    TABLE.write_text(json.dumps(table))
    TABLE.with_suffix(".md").write_text("\n".join(lines_of(table)) + "\n")


def lines_of(table: Mapping[str, Mapping[str, str]]) -> Iterable[str]:
    """The table in Markdown."""
    columns = [column for column in COLUMNS if column in table]
    yield f"| code | name | {' | '.join(columns)} |"
    yield "|---|---|" + "---|" * len(columns)
    for code in codes():
        cells = [table[column].get(str(code), "") for column in columns]
        if name_of(code) or any(cell not in ("3 unknown", "16 refused", "no reply") for cell in cells):
            yield f"| {code} | {name_of(code)} | {' | '.join(cells)} |"
    rest = sum(not name_of(code) for code in codes())
    yield ""
    yield f"{len(codes())} codes were tried, {rest} of them without a name here. Those that all refuse are omitted."
