"""Requests that proxy mode sends to a real broker for a client: codes and fields are accepted, signatures hold."""

import asyncio
import base64
import hashlib
import hmac
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from fetcher.policy.read_policy import BrokerSide, HeldOffsets
from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.proxy.broker_view import BrokerViews
from rocketmq_tiered.server.proxy.offset_merge import BrokerReply, interpret
from rocketmq_tiered.server.proxy.proxy_pull import PullContext, PullSources
from rocketmq_tiered.server.proxy.upstream import InflightLimit, RemotingUpstream
from rocketmq_tiered.server.wire.request import Request
from tests.server.serving_peer import RecordingPeer
from tests.servers.install import NotInstallableError
from tests.servers.rocketmq import RocketMq, checking_signatures
from tiered.clock import Clock
from tiered.remoting.command import RemotingCommand, RequestCode

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

TOPIC, GROUP, MESSAGES = "wire", "readers", 40
ACCOUNT = ("reader-of-wire", "not-a-secret")
ACL = f"""globalWhiteRemoteAddresses:
accounts:
- accessKey: {ACCOUNT[0]}
  secretKey: {ACCOUNT[1]}
  whiteRemoteAddress:
  admin: false
  defaultTopicPerm: PUB|SUB
  defaultGroupPerm: PUB|SUB
"""


@pytest.fixture(scope="module", params=["4.9.7", "5.3.3"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RocketMq]:
    directory = tmp_path_factory.mktemp("wire")
    try:
        found = RocketMq(
            request.param,
            directory,
            checking_signatures(request.param, *ACCOUNT) | {"autoCreateTopicEnable": "true"},
        )
        (directory / "conf" / "plain_acl.yml").write_text(ACL)
        found.start()
    except NotInstallableError as error:
        pytest.skip(f"RocketMQ {request.param} is not available: {error}")
    yield found
    found.stop()


def signed(code: int, fields: Mapping[str, object], body: bytes = b"") -> RemotingCommand:
    """As AclClientRPCHook signs: over the values in the order of their names, and the body."""
    ext = {name: str(value) for name, value in fields.items()} | {"AccessKey": ACCOUNT[0]}
    content = "".join(ext[name] for name in sorted(ext)).encode() + body
    digest = hmac.new(ACCOUNT[1].encode(), content, hashlib.sha1).digest()
    return RemotingCommand(
        code, 1, ext_fields=ext | {"Signature": base64.b64encode(digest).decode()}, body=body
    )


def pull(offset: int, commit: int) -> RemotingCommand:
    """A push consumer's pull with a commit."""
    return signed(
        RequestCode.PULL_MESSAGE,
        {
            "consumerGroup": GROUP,
            "topic": TOPIC,
            "queueId": 0,
            "queueOffset": offset,
            "maxMsgNums": 32,
            "sysFlag": 7,
            "commitOffset": commit,
            "suspendTimeoutMillis": 1000,
            "subVersion": 0,
            "subscription": "*",
            "expressionType": "TAG",
        },
    )


async def send(upstream: RemotingUpstream) -> None:
    for number in range(MESSAGES):
        answer = await upstream.call(
            signed(
                RequestCode.SEND_MESSAGE,
                {
                    "producerGroup": "p",
                    "topic": TOPIC,
                    "defaultTopic": "TBW102",
                    "defaultTopicQueueNums": 1,
                    "queueId": 0,
                    "sysFlag": 0,
                    "bornTimestamp": 1,
                    "flag": 0,
                    "properties": "TAGS\1a\2",
                    "reconsumeTimes": 0,
                    "unitMode": "false",
                    "batch": "false",
                },
                b"message %d" % number,
            ),
            10,
        )
        assert answer.code == 0, answer


async def test_questions_and_commits_in_a_clients_name(broker: RocketMq, tmp_path: Path) -> None:
    upstream = RemotingUpstream(broker.broker_address, InflightLimit())
    await send(upstream)
    await asyncio.sleep(1)
    command = pull(3, 17)
    unsigned = replace(command, ext_fields={k: v for k, v in command.ext_fields.items() if k != "Signature"})
    refused = await upstream.call(unsigned, 10)
    assert refused.code in (1, 16), "this broker checks signatures"
    assert BrokerReply.of(refused) is None
    views = BrokerViews(None)
    view = await views.local_view(command, upstream, 3)
    assert (view.side, view.queue, view.is_record) == (
        BrokerSide.READABLE,
        HeldOffsets(0, MESSAGES),
        True,
    )
    assert view.oldest_phys == 0
    assert await views.still_has(command, upstream, 3)
    plain = {name: value for name, value in command.ext_fields.items() if name != "Signature"} | {
        "sysFlag": "6"
    }
    answer = await upstream.call(signed(RequestCode.PULL_MESSAGE, plain), 10)
    assert answer.code == 0, "a 5.x broker takes commits of groups only that were there once"
    context = PullContext(None, views, ClientTable(Clock(monotonic_s=lambda: 0.0)))  # type: ignore[arg-type]
    await PullSources(context, Request(command, RecordingPeer()), upstream, None).commit()
    asked = signed(RequestCode.QUERY_CONSUMER_OFFSET, {"consumerGroup": GROUP, "topic": TOPIC, "queueId": 0})
    for _ in range(50):
        answer = await upstream.call(asked, 10)
        if answer.ext_fields.get("offset") == "17":
            break  # it was one-way: a broker without it yet answers 22, or 0 where nothing was deleted
        await asyncio.sleep(0.1)
    assert answer.ext_fields.get("offset") == "17", "the commit came through, signed by the pull's signature"
    answer = await upstream.call(command, 10)
    said = BrokerReply.of(answer)
    assert said is not None and (said.min_offset, said.max_offset) == (0, MESSAGES), answer
    meant = interpret(said, 3, has_all=True)
    assert (meant.status.name, meant.next_offset) == ("FOUND", 35)
    for offset, name in ((MESSAGES, "OFFSET_OVERFLOW_ONE"), (MESSAGES + 9, "OFFSET_OVERFLOW_BADLY")):
        said = BrokerReply.of(await upstream.call(pull(offset, 17), 10))
        assert said is not None and said.remark == name
        assert interpret(said, offset, has_all=True).status.name == name
    upstream.close()
