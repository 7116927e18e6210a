"""Timers beyond the broker's limit, sent through the proxy: what the broker gets, and what the client gets."""

import asyncio
import base64
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rocketmq_tiered.server.proxy.timer_gateway import GatewayConfig
from rocketmq_tiered.server.wire.request import Response
from tests.server.proxy.proxy_client import Client
from tests.server.proxy.service_scene import Scene, scene
from tiered.formats.record import parse_properties
from tiered.model.queue import SYSTEM_TOPICS
from tiered.model.timer import Handle, TimerPlace, handle_words, own_handle, sender_of
from tiered.remoting.command import RemotingCommand

DAY_MS = 86_400_000
HOUR_MS = 3_600_000
CONFIG = GatewayConfig("TIERED_TIMERS", 730 * DAY_MS, HOUR_MS)
WHEEL = b"timerWheelEnable=true\ntimerMaxDelaySec=259200\n"
STORED = Response(0, {"msgId": "M", "queueId": "3", "queueOffset": "9"})
KEY = b"k" * 32


def properties(**values: object) -> str:
    return "".join(f"{name}\x01{value}\x02" for name, value in values.items())


def at(days: float) -> int:
    return int(time.time() * 1000) + int(days * DAY_MS)


async def sent(
    client: Client, text: str, code: int = 310, body: bytes = b"hello", **more: str
) -> RemotingCommand:
    fields = {
        "a": "P",
        "b": "T",
        "c": "TBW102",
        "d": "4",
        "e": "2",
        "f": "0",
        "g": "11",
        "h": "7",
        "i": text,
        "j": "0",
        "k": "false",
        "m": "false",
    }
    return await client.ask(code, body, **{**fields, **more})


def gateway_sends(made: Scene) -> list[RemotingCommand]:
    return [
        one
        for one in made.broker.seen
        if one.ext_fields.get("b", one.ext_fields.get("topic")) == CONFIG.topic and one.code in (10, 310, 320)
    ]


@pytest.fixture
async def made() -> AsyncIterator[Scene]:
    """A proxy with a gateway, beside a broker that takes messages."""
    async with scene(timers=CONFIG) as made:
        made.broker.answers |= {26: Response(body=(WHEEL,)), 310: STORED, 10: STORED, 202: Response()}
        assert made.service.timers is not None
        made.service.timers.key = KEY
        yield made


@pytest.fixture
async def client(made: Scene) -> Client:
    return await made.client()


@pytest.mark.parametrize("name", ["TIMER_DELIVER_MS", "TIMER_DELAY_SEC", "TIMER_DELAY_MS"])
async def test_a_timer_beyond_the_limit_goes_to_the_gateway_topic_and_the_answer_is_the_brokers(
    made: Scene, client: Client, name: str
) -> None:
    value = {"TIMER_DELIVER_MS": at(60), "TIMER_DELAY_SEC": 60 * 86_400, "TIMER_DELAY_MS": 60 * DAY_MS}[name]
    answer = await sent(client, properties(UNIQ_KEY="U1", KEYS="k", color="red", **{name: value}))
    assert (answer.code, answer.ext_fields["queueOffset"]) == (0, "9")
    (gateway,) = gateway_sends(made)
    found = parse_properties(gateway.ext_fields["i"].encode())
    assert sender_of(KEY, found, gateway.body) == "@127.0.0.1"
    assert sender_of(KEY, found, b"another") is None
    deliver_ms = int(found.pop("TIERED_DELIVER_MS"))
    assert abs(deliver_ms - at(60)) < 5000
    del found["TIERED_SENDER"], found["TIERED_SEAL"]
    assert found == {
        "UNIQ_KEY": "U1",
        "KEYS": "k",
        "color": "red",
        "TIERED_TOPIC": "T",
        "TIERED_QUEUE": "2",
    }
    kept = {key: gateway.ext_fields[key] for key in "aefghm"}
    assert kept == {"a": "P", "e": "-1", "f": "0", "g": "11", "h": "7", "m": "false"}
    assert gateway.body == b"hello"
    words = handle_words(answer.ext_fields["recallHandle"]) or []
    recall_ms = (deliver_ms - 1) // 1000 * 1000 + 1
    assert words[:-1] == ["v1", "T", "b", str(recall_ms), "U1", str(deliver_ms), "3:9"]


async def test_the_old_form_of_a_send_too_and_a_message_without_a_unique_key_gets_one(
    made: Scene, client: Client
) -> None:
    text = properties(TIMER_DELIVER_MS=at(60))
    answer = await client.ask(
        10,
        b"x",
        producerGroup="P",
        topic="T",
        defaultTopic="TBW102",
        queueId="0",
        defaultTopicQueueNums="4",
        sysFlag="0",
        bornTimestamp="1",
        flag="0",
        reconsumeTimes="0",
        properties=text,
    )
    assert answer.code == 0
    (gateway,) = gateway_sends(made)
    found = parse_properties(gateway.ext_fields["i"].encode())
    assert len(found["UNIQ_KEY"]) == 32
    handle = own_handle(KEY, handle_words(answer.ext_fields["recallHandle"]) or [])
    assert handle is not None and handle.unique_key == found["UNIQ_KEY"]


@pytest.mark.parametrize(
    "text",
    [
        properties(TIMER_DELAY_SEC=3 * 86_400),
        properties(TIMER_DELIVER_MS=at(-1)),
        properties(color="TIMER_DELAY_SEC"),
        properties(DELAY=3, TIMER_DELIVER_MS=at(60)),
        properties(TIMER_OUT_MS=5, TIMER_DELIVER_MS=at(60)),
        properties(TIMER_DELAY_SEC=5, TIMER_DELIVER_MS=at(60)),
    ],
    ids=["near", "past", "a value", "a delay level", "TIMER_OUT_MS", "two times"],
)
async def test_what_the_broker_takes_is_relayed_unchanged(made: Scene, client: Client, text: str) -> None:
    assert (await sent(client, text)).code == 0
    assert gateway_sends(made) == []
    assert [one.ext_fields["i"] for one in made.broker.seen if one.code == 310] == [text]


@pytest.mark.parametrize("config", [b"brokerName=b\n", b"timerWheelEnable=false\ntimerMaxDelaySec=259200\n"])
async def test_a_broker_without_timers_gets_none(made: Scene, client: Client, config: bytes) -> None:
    made.broker.answers[26] = Response(body=(config,))
    assert (await sent(client, properties(TIMER_DELAY_SEC=5))).code == 0
    assert (await sent(client, properties(DELAY=5))).code == 0
    assert len(gateway_sends(made)) == 1
    assert made.broker.codes().count(26) == 1, "asked once"


@pytest.mark.parametrize(
    ("text", "sys_flag", "remark"),
    [
        (
            properties(TIMER_DELIVER_MS=at(800)),
            "0",
            "the timer's time lies too far ahead: 730 days are allowed (timers.max_delay_ms)",
        ),
        (properties(TIMER_DELIVER_MS="soon"), "0", "TIMER_DELIVER_MS = soon is not a number of ms"),
        (properties(TIMER_DELAY_SEC="9" * 30), "0", f"TIMER_DELAY_SEC = {'9' * 30} is not a number of s"),
        (
            properties(TIMER_DELAY_SEC=5),
            "4",
            "a message of a transaction cannot be a timer: send it without a delivery time, or outside a transaction",
        ),
    ],
    ids=["too far", "no number", "too large", "transaction"],
)
async def test_what_cannot_be_delivered_is_refused_in_one_line(
    made: Scene, client: Client, text: str, sys_flag: str, remark: str
) -> None:
    answer = await sent(client, text, f=sys_flag)
    assert (answer.code, answer.remark) == (13, remark)
    assert 310 not in made.broker.codes()


async def test_a_batch_with_a_timer_is_refused_and_one_without_is_relayed(
    made: Scene, client: Client
) -> None:
    body = b"\0\0\0\x30" + b"TIMER_DELIVER_MS\x01%d\x02" % at(60)
    answer = await sent(client, properties(UNIQ_KEY="B"), 320, body, m="true")
    assert (answer.code, answer.remark) == (13, "timers cannot be sent in a batch: send them one by one")
    assert (await sent(client, properties(UNIQ_KEY="B"), 320, b"plain", m="true")).code == 0
    assert made.broker.codes() == [320]


async def test_a_missing_gateway_topic_is_created_and_one_that_cannot_be_is_said(
    made: Scene, client: Client
) -> None:
    made.broker.answers |= {
        202: Response(17, remark="no such topic"),
        17: Response(1, remark="disk full"),
    }
    answer = await sent(client, properties(TIMER_DELIVER_MS=at(60)))
    assert answer.code == 16 and answer.remark == (
        "the timer is refused, as topic TIERED_TIMERS, which takes timers, cannot be created: disk full; create it with"
        " mqadmin updateTopic"
    )
    made.broker.answers[17] = Response()
    assert (await sent(client, properties(TIMER_DELIVER_MS=at(60)))).code == 0
    assert (await sent(client, properties(TIMER_DELIVER_MS=at(60)))).code == 0
    created = [one for one in made.broker.seen if one.code == 17]
    assert len(created) == 2
    assert (created[1].ext_fields["topic"], created[1].ext_fields["writeQueueNums"]) == (
        "TIERED_TIMERS",
        "8",
    )


async def test_it_is_ok_only_when_the_broker_has_it(made: Scene, client: Client) -> None:
    made.broker.answers[310] = Response(1, remark="put message failed")
    answer = await sent(client, properties(TIMER_DELIVER_MS=at(60)))
    assert (answer.code, answer.remark) == (
        1,
        "put message failed",
    ) and "recallHandle" not in answer.ext_fields
    await made.broker.stop()
    await asyncio.sleep(0.05)
    with pytest.raises(ConnectionError):
        assert (await sent(await made.client(), properties(TIMER_DELIVER_MS=at(60)))).code == 14
        raise ConnectionError


async def test_a_recall_of_ours_cancels_its_place_and_one_of_the_brokers_is_relayed(
    made: Scene, client: Client
) -> None:
    deliver_ms = at(60)
    handle = (await sent(client, properties(UNIQ_KEY="U", TIMER_DELIVER_MS=deliver_ms))).ext_fields[
        "recallHandle"
    ]
    answer = await client.ask(370, producerGroup="P", topic="T", recallHandle=handle)
    assert (answer.code, answer.ext_fields["msgId"]) == (0, "U")
    found = parse_properties(gateway_sends(made)[-1].ext_fields["i"].encode())
    del found["UNIQ_KEY"]
    assert found == {
        "TIERED_TOPIC": "T",
        "TIERED_CANCEL": f"{deliver_ms} U",
        "TIERED_CANCEL_PLACE": "3:9",
    }
    assert 370 not in made.broker.codes()
    answer = await client.ask(370, producerGroup="P", topic="other", recallHandle=handle)
    assert (answer.code, answer.remark) == (
        13,
        "no timer is recalled: the recall handle is not one of the request's topic",
    )
    theirs = base64.urlsafe_b64encode(b"v1 T b 1700000000001 U").decode()
    assert (await client.ask(370, producerGroup="P", topic="T", recallHandle=theirs)).remark == "said so"
    assert made.broker.seen[-1].ext_fields["recallHandle"] == theirs


def forged_handles() -> dict[str, bytes]:
    right = base64.urlsafe_b64decode(Handle("T", "b", at(60), "U", TimerPlace(3, 9)).text(KEY))
    return {
        "another place": right.replace(b"3:9", b"3:8"),
        "another key": base64.urlsafe_b64decode(
            Handle("T", "b", at(60), "U", TimerPlace(3, 9)).text(b"x" * 32)
        ),
        "no code": right.rpartition(b" ")[0],
        "separators": b"v1 T b 1 U\x02TIERED_TOPIC\x01secret\x02",
        "separators behind it": right + b"\x01\x02",
        "no handle": b"v2 T b 1 U",
    }


@pytest.mark.parametrize("case", forged_handles())
async def test_a_handle_that_was_not_given_recalls_nothing(made: Scene, client: Client, case: str) -> None:
    handle = base64.urlsafe_b64encode(forged_handles()[case]).decode()
    answer = await client.ask(370, producerGroup="P", topic="T", recallHandle=handle)
    assert answer.code == 13 and (answer.remark or "").startswith("no timer is recalled: the recall handle ")
    assert not made.broker.codes()


async def test_a_recall_within_the_hand_over_goes_to_the_broker_too(made: Scene, client: Client) -> None:
    deliver_ms = at(1 / 48)
    handle = Handle("T", "b", deliver_ms, "U", TimerPlace(3, 9)).text(KEY)
    await sent(client, properties(TIMER_DELAY_SEC=5))  # it asks for the limit
    answer = await client.ask(370, producerGroup="P", topic="T", recallHandle=handle)
    assert answer.remark == "said so"
    assert len(gateway_sends(made)) == 1
    words = base64.urlsafe_b64decode(made.broker.seen[-1].ext_fields["recallHandle"]).decode().split(" ")
    assert words == ["v1", "T", "b", str((deliver_ms - 1) // 1000 * 1000 + 1), "U"]


TARGETS = [*sorted(SYSTEM_TOPICS), "rmq_sys_wheel_timer", "c_REPLY_TOPIC", "%RETRY%g", "%DLQ%g", CONFIG.topic]


@pytest.mark.parametrize("topic", [*TARGETS, "", "T\x01x\x02TIERED_TOPIC\x01secret", "a b", "a" * 128])
async def test_a_timer_to_a_topic_of_brokers_or_to_no_topic_is_refused_by_name(
    made: Scene, client: Client, topic: str
) -> None:
    answer = await sent(client, properties(TIMER_DELIVER_MS=at(60)), b=topic)
    assert answer.code == 13 and (answer.remark or "").startswith("a timer cannot be sent to this topic: ")
    assert topic[:20].isprintable() is False or topic[:20] in (answer.remark or "")
    assert not gateway_sends(made)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"TIMER_DELIVER_MS": at(60) // 1000}, "looks like seconds: give milliseconds"),
        ({"TIMER_DELIVER_MS": 5}, "is not a time of the years 2000 to 2099 in ms since 1970"),
        ({"TIMER_DELIVER_MS": at(60), "TIERED_TOPIC": "secret"}, "property TIERED_TOPIC has a reserved name"),
        ({"TIMER_DELIVER_MS": at(60), "TIERED_SEAL": "x"}, "property TIERED_SEAL has a reserved name"),
        ({"TIMER_DELIVER_MS": at(60), "color": "a\x01b"}, "the control characters that separate properties"),
        ({"TIMER_DELIVER_MS": at(60), "co\0lor": "a"}, "the control characters that separate properties"),
    ],
)
async def test_what_only_the_archive_may_say_and_times_in_seconds_are_refused(
    made: Scene, client: Client, values: dict[str, Any], words: str
) -> None:
    answer = await sent(client, properties(**values))
    assert answer.code == 13 and words in (answer.remark or "")
    assert not gateway_sends(made)


@pytest.mark.parametrize(
    ("days", "wanted"), [(60, ["TIERED_TIMERS"]), (2, ["TIERED_TIMERS", "T"]), (0.01, ["T"])]
)
async def test_a_mark_that_deletes_a_timer_goes_where_it_may_be(
    made: Scene, client: Client, days: float, wanted: list[str]
) -> None:
    deliver_ms = at(days)
    text = properties(UNIQ_KEY="M", TIMER_DELIVER_MS=deliver_ms, TIMER_DEL_UNIQKEY="T+U")
    assert (await sent(client, text)).code == 0
    sends = [one for one in made.broker.seen if one.code == 310]
    assert [one.ext_fields["b"] for one in sends] == wanted
    found = parse_properties(sends[0].ext_fields["i"].encode())
    assert days < 1 or found == {
        "UNIQ_KEY": "M",
        "TIERED_TOPIC": "T",
        "TIERED_CANCEL": f"{deliver_ms} U",
    }
