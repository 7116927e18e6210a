"""Requests with doubled, unknown, recased fields and separators, signed by an account with one topic, and the topics
that they would reach at a broker: read as a broker reads a request, not as this project does."""

import asyncio
import base64
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from rocketmq_tiered.server.proxy.timer_gateway import CODES, GatewayConfig, TimerGateway, new_counts
from rocketmq_tiered.server.security.authorizer import RulesAuthorizer
from rocketmq_tiered.server.security.rules import rules_in_file
from rocketmq_tiered.server.wire.request import Dispatcher, HandlerTable, Request, Response
from rocketmq_tiered.server.wire.request_fields import FIELDS, LETTERS
from tests.server.serving_peer import RecordingPeer
from tiered.clock import Clock
from tiered.model.timer import Handle, TimerPlace
from tiered.remoting.command import ProtocolError, RemotingCommand, decode
from tiered.remoting.command import RequestCode as R
from tiered.remoting.credentials import Credentials, signature_of

KEY, SECRET, GATEWAY = b"k" * 32, "12345678-secret", "TIERED_TIMERS"
OWN, OTHERS = "own", "secret"
RULES: dict[str, dict[str, Any]] = {
    "ACL 1.0": {
        "accounts": [
            {
                "accessKey": "producer1",
                "secretKey": SECRET,
                "defaultTopicPerm": "DENY",
                "defaultGroupPerm": "DENY",
                "topicPerms": [f"{OWN}=PUB"],
            }
        ]
    },
    "ACL 2.0": {
        "users": [{"username": "producer1", "password": SECRET}],
        "acls": [
            {
                "subject": "User:producer1",
                "policies": [
                    {"entries": [{"resource": f"Topic:{OWN}*", "actions": ["Pub"], "decision": "Allow"}]}
                ],
            }
        ],
    },
}
TARGETED = [
    R.SEND_MESSAGE,
    R.SEND_MESSAGE_V2,
    R.SEND_BATCH_MESSAGE,
    R.SEND_REPLY_MESSAGE,
    R.SEND_REPLY_MESSAGE_V2,
]
CHOSEN = [*TARGETED, R.RECALL_MESSAGE, R.SEND_MESSAGE_V2, R.UPDATE_AND_CREATE_TOPIC, R.END_TRANSACTION]
_TOPIC_VALUES = [
    OWN,
    OTHERS,
    f"{OWN}\x02TIERED_TOPIC\x01{OTHERS}",
    f"{OWN}\x01x\x02TIERED_TOPIC\x01{OTHERS}\x02",
    f"{OWN}\0{OTHERS}",
    f"{OWN}\n{OTHERS}",
    f"%RETRY%{OTHERS}",
    GATEWAY,
    "rmq_sys_wheel_timer",
    "",
]


def allowed(topic: str, rules: str) -> bool:
    """Whether the account has PUB on it."""
    return topic == OWN or (rules == "ACL 2.0" and topic.startswith(OWN) and topic.isalnum())


def _properties(draw: random.Random, now_ms: int) -> str:
    far = str(now_ms + draw.randrange(10, 600) * 86_400_000)
    pairs = [
        ("UNIQ_KEY", draw.choice(["U", f"U\x02TIERED_TOPIC\x01{OTHERS}", "a b"])),
        (draw.choice(["TIMER_DELIVER_MS", "timer_deliver_ms"]), draw.choice([far, "1", far[:10]])),
        (draw.choice(["TIERED_TOPIC", "Tiered_Topic"]), OTHERS),
        ("INNER_MULTI_DISPATCH", draw.choice([OTHERS, f"{OWN},{OTHERS}", OWN])),
        ("TIMER_DEL_UNIQKEY", draw.choice([f"{OTHERS}+U", "U"])),
        ("REAL_TOPIC", OTHERS),
    ]
    return "".join(f"{name}\x01{value}\x02" for name, value in draw.sample(pairs, draw.randrange(len(pairs))))


def _handle(draw: random.Random, now_ms: int) -> str:
    topic = draw.choice([OWN, OTHERS, f"{OWN}\x02TIERED_TOPIC\x01{OTHERS}"])
    key = draw.choice([KEY, b"x" * 32]) if topic == OWN else b"x" * 32
    made = Handle(topic, "b", now_ms + 50 * 86_400_000, "U", TimerPlace(1, 2)).text(key)
    raw = base64.urlsafe_b64decode(made)
    return base64.urlsafe_b64encode(
        draw.choice([raw, raw.rpartition(b" ")[0], raw.replace(b" U ", b" U\x02TIERED_TOPIC\x01secret\x02 ")])
    ).decode()


def _pairs(draw: random.Random, code: int, now_ms: int) -> list[tuple[str, str]]:
    """Fields of the code, valid at first, then changed."""
    base = {
        "producerGroup": "P",
        "topic": OWN,
        "defaultTopic": "TBW102",
        "queueId": "0",
        "sysFlag": "0",
        "defaultTopicQueueNums": "4",
        "bornTimestamp": "1",
        "flag": "0",
        "batch": "false",
        "properties": "",
        "commitLogOffset": "7",
        "recallHandle": _handle(draw, now_ms),
    }
    base["properties"] = _properties(draw, now_ms)
    letters = {name: letter for letter, name in LETTERS.items()}
    known = FIELDS[code]
    names = {name: name if name in known else letters.get(name, "") for name in base}
    pairs = [(names[name], value) for name, value in base.items() if names[name] in known]
    for _ in range(draw.randrange(3)):
        name = draw.choice(
            ["topic", "b", "Topic", "TOPIC", "to_pic", "B", "c", "i", "properties", "zz", "recallHandle"]
        )
        value = _properties(draw, now_ms) if name in ("i", "properties") else draw.choice(_TOPIC_VALUES)
        pairs.insert(draw.randrange(len(pairs) + 1), (name, value))
    if draw.random() < 0.3:
        place = draw.randrange(len(pairs))
        pairs[place] = pairs[place][0], draw.choice(_TOPIC_VALUES)
    return pairs


def frame_of(code: int, pairs: list[tuple[str, str]], body: bytes) -> bytes:
    """A JSON frame without its length; names may be there twice."""
    fields = ",".join(f"{json.dumps(name)}:{json.dumps(value)}" for name, value in pairs)
    header = f'{{"code":{code},"flag":0,"language":"JAVA","opaque":1,"version":479,"extFields":{{{fields}}}}}'.encode()
    return len(header).to_bytes(4, "big") + header + body


def changed_requests(draw: random.Random, count: int, now_ms: int, account: Credentials) -> Iterator[bytes]:
    """Frames without their length, signed as far as they can be read."""
    for _ in range(count):
        code = int(draw.choice(CHOSEN))
        pairs, body = _pairs(draw, code, now_ms), draw.choice([b"x", b"INNER_MULTI_DISPATCH\x01secret\x02"])
        with suppress(ProtocolError):
            fields = {**decode(frame_of(code, pairs, body)).ext_fields, "AccessKey": account.access_key}
            signature = signature_of(fields, body, account.secret_key)
            yield frame_of(code, [*pairs, ("AccessKey", account.access_key), ("Signature", signature)], body)


def stored_topics(command: RemotingCommand) -> Iterator[str]:
    """Where a broker stores what the request has, and where the archive sends it later."""
    fields = command.ext_fields
    is_lettered = command.code in (R.SEND_MESSAGE_V2, R.SEND_BATCH_MESSAGE, R.SEND_REPLY_MESSAGE_V2)
    text = fields.get("i" if is_lettered else "properties", "")
    pairs = dict(pair.split("\x01", 1) for pair in text.split("\x02") if "\x01" in pair)
    topic = fields.get("b" if is_lettered else "topic", "")
    if command.code in TARGETED:
        if topic == GATEWAY:
            yield pairs.get("TIERED_TOPIC", "nowhere")
        else:
            yield topic
        yield from filter(None, pairs.get("INNER_MULTI_DISPATCH", "").split(","))
    elif command.code in (R.UPDATE_AND_CREATE_TOPIC, R.RECALL_MESSAGE):
        yield topic
        if command.code == R.RECALL_MESSAGE:
            words = base64.urlsafe_b64decode(fields["recallHandle"] + "==").decode()
            yield from [OTHERS] if "\x02" in words or f" {OTHERS} " in words else []


class _Upstream:
    async def call(self, command: RemotingCommand, _timeout_s: float) -> RemotingCommand:
        body = (
            b"timerWheelEnable=true\ntimerMaxDelaySec=259200\n"
            if command.code == R.GET_BROKER_CONFIG
            else b""
        )
        return RemotingCommand(0, 0, flag=1, body=body)


def reached(directory: Path, rules: str, seed: int, count: int, now_ms: int) -> tuple[int, dict[str, int]]:
    """How many of ``count`` requests a broker got, and how often each topic was reached."""
    path = directory / "rules.yml"
    path.write_text(yaml.safe_dump(RULES[rules]))
    path.chmod(0o600)
    return asyncio.run(
        _reached(RulesAuthorizer(rules_in_file(path), 60.0), random.Random(seed), count, now_ms)
    )


async def _reached(
    authorizer: RulesAuthorizer, draw: random.Random, count: int, now_ms: int
) -> tuple[int, dict[str, int]]:
    config, got = GatewayConfig(GATEWAY, 730 * 86_400_000, 3_600_000), list[RemotingCommand]()
    gateway = TimerGateway(config, "b", new_counts(), Clock(wall_ms=lambda: now_ms))
    gateway.key = KEY

    async def send(request: Request) -> Response:
        got.append(request.command)
        return Response(0, {"msgId": "M", "queueId": "1", "queueOffset": "2"})

    async def handle(request: Request) -> Response | None:
        if request.code in CODES:
            upstream: Any = _Upstream()
            found = await gateway.answer(request, upstream, send)
            if found is not None:
                return found[0]
        return await send(request)

    dispatcher, peer = Dispatcher(HandlerTable(default=handle), authorizer), RecordingPeer()
    for frame in changed_requests(draw, count, now_ms, Credentials("producer1", SECRET)):
        with suppress(ProtocolError):
            await dispatcher.answer(Request(decode(frame), peer), is_authorized=False)
    topics: dict[str, int] = {}
    for command in got:
        for topic in stored_topics(command):
            topics[topic] = topics.get(topic, 0) + 1
    return len(got), topics
