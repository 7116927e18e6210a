"""Proxy mode with access rules: what the broker would read otherwise, or copies by offset, does not get past them."""

import json
from pathlib import Path

import pytest
import yaml

from rocketmq_tiered.server.wire.request import Request, Response
from tests.server.original_record import original
from tests.server.proxy.proxy_client import Client
from tests.server.proxy.service_scene import Scene, scene
from tests.server.spelled_bodies import ACL_1, ACL_5, SECRET, respelled
from tiered.remoting.command import RemotingCommand
from tiered.remoting.command import RequestCode as Code
from tiered.remoting.credentials import signature_of

BACK = {
    "group": "own",
    "delayLevel": "1",
    "bname": "b",
    "originTopic": "own",
    "unitMode": "false",
    "originMsgId": "X",
}
END = {
    "producerGroup": "own",
    "tranStateTableOffset": "3",
    "commitOrRollback": "8",
    "fromTransactionCheck": "false",
    "msgId": "X",
    "transactionId": "Y",
    "bname": "b",
}
HALF = b"RMQ_SYS_TRANS_HALF_TOPIC"


def real(topic: str) -> bytes:
    return original(topic=HALF, properties=f"KEYS\x01k\x02REAL_TOPIC\x01{topic}\x02".encode())


def broken(record: bytes) -> bytes:
    """With another body: bytes that look like a record, across messages."""
    return record.replace(b"hello", b"other")


@pytest.fixture(params=["ACL 1.0", "ACL 5.x"])
def acl_file(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(ACL_1 if request.param == "ACL 1.0" else ACL_5))
    path.chmod(0o600)
    return str(path)


async def signed(client: Client, code: int, body: bytes = b"", **fields: str) -> RemotingCommand:
    found = {"AccessKey": "reader1", **fields}
    return await client.ask(code, body, **found, Signature=signature_of(found, body, SECRET))


def with_stored(made: Scene, records: dict[int, bytes]) -> None:
    """The broker verifies signatures, and returns ``records`` by physical offset."""
    answer = made.broker.handle

    async def handle(request: Request) -> Response | None:
        response = await answer(request)
        fields, command = request.command.ext_fields, request.command
        if "Signature" in fields:
            assert fields["Signature"] == signature_of(fields, command.body, SECRET), fields
        if command.code != Code.VIEW_MESSAGE_BY_ID:
            return response
        data = records.get(int(fields["offset"]))
        return Response(1, remark="not found") if data is None else Response(body=(data,))

    made.broker.handle = handle  # type: ignore[method-assign]


STORED = {
    "own": (original(topic=b"own"), True),
    "another topic": (original(topic=b"secret"), False),
    "own retry topic": (original(topic=b"%RETRY%own"), True),
    "retry topic of others": (original(topic=b"%RETRY%others"), False),
    "half message": (real("secret"), False),
    "delayed message": (original(topic=b"own", properties=b"REAL_TOPIC\x01secret\x02"), False),
    "inside a message": (broken(original(topic=b"own")), False),
    "no record": (b"hello", False),
    "nothing": (None, False),
}


@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize("checks_clients", [False, True], ids=["plain broker", "broker with access control"])
async def test_a_message_goes_back_only_to_who_may_read_its_own_topic(
    acl_file: str, stored: str, checks_clients: bool
) -> None:
    async with scene(acl_file=acl_file, checks_clients=checks_clients) as made:
        record, is_allowed = STORED[stored]
        with_stored(made, {} if record is None else {777: record})
        reply = await signed(await made.client(), Code.CONSUMER_SEND_MSG_BACK, offset="777", **BACK)
        assert (reply.code == 0) is is_allowed
        assert (Code.CONSUMER_SEND_MSG_BACK in made.broker.codes()) is is_allowed


async def test_a_place_that_is_not_the_records_own_is_no_message(acl_file: str) -> None:
    async with scene(acl_file=acl_file) as made:
        with_stored(made, {700: original(topic=b"own")})
        reply = await signed(await made.client(), Code.CONSUMER_SEND_MSG_BACK, offset="700", **BACK)
        assert reply.code != 0 and Code.CONSUMER_SEND_MSG_BACK not in made.broker.codes()


TRANSACTIONS: dict[str, tuple[bytes, dict[str, str], bool]] = {
    "own, named": (real("own"), {"topic": "own"}, True),
    "own, of 4.9": (real("own"), {}, True),
    "of others, own named": (real("secret"), {"topic": "own"}, False),
    "of others, of 4.9": (real("secret"), {}, False),
    "own, others named": (real("own"), {"topic": "secret"}, False),
    "no half message": (original(topic=b"secret"), {"topic": "own"}, False),
    "broken": (broken(real("own")), {"topic": "own"}, False),
}


@pytest.mark.parametrize("case", TRANSACTIONS)
@pytest.mark.parametrize("checks_clients", [False, True], ids=["plain broker", "broker with access control"])
async def test_a_transaction_is_ended_by_the_topic_of_its_half_message(
    acl_file: str, case: str, checks_clients: bool
) -> None:
    async with scene(acl_file=acl_file, checks_clients=checks_clients) as made:
        record, named, is_allowed = TRANSACTIONS[case]
        with_stored(made, {777: record})
        client = await made.client()
        reply = await signed(client, Code.END_TRANSACTION, commitLogOffset="777", **END, **named)
        assert (reply.code == 0) is is_allowed
        assert (Code.END_TRANSACTION in made.broker.codes()) is is_allowed


@pytest.mark.parametrize(
    "code", [Code.HEART_BEAT, Code.LOCK_BATCH_MQ, Code.BATCH_ACK_MESSAGE, Code.CHECK_CLIENT_CONFIG]
)
@pytest.mark.parametrize("checks_clients", [False, True], ids=["plain broker", "broker with access control"])
async def test_the_broker_gets_no_body_that_it_reads_otherwise(
    acl_file: str, code: int, checks_clients: bool
) -> None:
    async with scene(acl_file=acl_file, checks_clients=checks_clients) as made:
        client = await made.client()
        for body in list(respelled(code))[::25]:
            reply = await signed(client, code, body)
            assert reply.code == 1 and "unknown name" in (reply.remark or ""), body
        assert code not in made.broker.codes()


@pytest.mark.parametrize("checks_clients", [False, True], ids=["plain broker", "broker with access control"])
async def test_the_broker_gets_a_body_encoded_again_unless_it_checks_the_signature(
    acl_file: str, checks_clients: bool
) -> None:
    document = {
        "consumerGroup": "own",
        "clientId": "c",
        "mqSet": [{"topic": "own", "brokerName": "b", "queueId": 0}],
    }
    sent = json.dumps(document, indent=1).encode()
    async with scene(acl_file=acl_file, checks_clients=checks_clients) as made:
        assert (await signed(await made.client(), Code.LOCK_BATCH_MQ, sent)).code == 0
        (body,) = [one.body for one in made.broker.seen if one.code == Code.LOCK_BATCH_MQ]
        assert body == (sent if checks_clients else json.dumps(document, separators=(",", ":")).encode())
