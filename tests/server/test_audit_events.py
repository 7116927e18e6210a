"""Refusals, resets, commits by clients that are no members, and reloads: audit lines, their bound, and counts."""

import asyncio
import logging
import os
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from rocketmq_tiered.server.groups.client_table import ClientTable
from rocketmq_tiered.server.listen.options import server_options
from rocketmq_tiered.server.security.audit import INTERVAL_S, LINES_MAX, AuditEvents
from rocketmq_tiered.server.security.authorizer import RulesAuthorizer
from rocketmq_tiered.server.wire.listener import ServerOptions
from rocketmq_tiered.server.wire.request import Dispatcher, HandlerTable, Request, Response
from tests.server.connection_scene import ECHO, INSTANT, scene
from tests.server.serving_peer import RecordingPeer, request
from tiered.clock import Clock
from tiered.remoting.command import RemotingCommand, RequestCode, ResponseCode
from tiered.remoting.credentials import signature_of
from tiered.settings.sections import ServeSettings

SECRET = "12345678-secret"
RULES = f"accounts:\n- {{accessKey: RocketMQ, secretKey: {SECRET}, defaultTopicPerm: DENY, defaultGroupPerm: SUB}}\n"
FIELDS = ("client", "account", "code", "request", "group", "topic", "result")


def events_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [vars(one) for one in caplog.records if one.name == "rocketmq_tiered.audit"]


def answered(authorizer: RulesAuthorizer, sent: Request, response: Response | None = None) -> Response | None:
    """The reply of a server whose handlers reply with ``response``."""
    table = HandlerTable()

    async def handler(_: Request) -> Response | None:
        return response

    table.register(sent.code)(handler)
    return asyncio.run(Dispatcher(table, authorizer).answer(sent, is_authorized=False))


def heartbeat(client: RecordingPeer, group: str) -> Request:
    body = {
        "clientID": f"id{client.id}",
        "consumerDataSet": [{"groupName": group, "subscriptionDataSet": []}],
    }
    return request(RequestCode.HEART_BEAT, client, body)


@pytest.fixture(autouse=True)
def _level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.fixture
def authorizer(tmp_path: Path) -> RulesAuthorizer:
    """With rules that refuse all topics."""
    path = tmp_path / "acl.yml"
    path.write_text(RULES)
    found = server_options(ServeSettings(bind="127.0.0.1:0", acl_file=str(path))).authorizer
    assert isinstance(found, RulesAuthorizer)
    return found


def test_a_refusal_is_one_line_with_account_address_request_and_result(
    authorizer: RulesAuthorizer, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"AccessKey": "RocketMQ", "topic": "t_no", "consumerGroup": "g"}
    client = RecordingPeer()
    client.address = "10.9.0.7:4711"
    answered(authorizer, request(11, client, **fields, Signature=signature_of(fields, b"", SECRET)))
    (line,) = events_of(caplog)
    assert line["message"] == "refused" and line["levelno"] == logging.WARNING
    assert {name: line[name] for name in FIELDS} == {
        "client": "10.9.0.7:4711",
        "account": "RocketMQ",
        "code": 11,
        "request": "PULL_MESSAGE",
        "group": "g",
        "topic": "t_no",
        "result": "NO_PERMISSION",
    }
    assert "t_no" in line["reason"] and SECRET not in str(line)
    assert authorizer.audited == {
        "refused": 1,
        "reset": 0,
        "commit": 0,
        "timer": 0,
        "reload": 0,
        "reload_failed": 0,
    }


async def test_over_the_wire_the_address_is_the_one_a_load_balancer_names(
    authorizer: RulesAuthorizer, caplog: pytest.LogCaptureFixture
) -> None:
    balancers = ServeSettings(proxy_from=("127.0.0.0/8",)).proxy_networks()

    async with scene(ServerOptions(proxy_from=balancers, authorizer=authorizer)) as made:
        direct, balanced = await made.client(), await made.client()
        balanced.writer.write(b"PROXY TCP4 10.1.2.3 10.9.9.9 5555 9876\r\n")
        for client, code in ((direct, ECHO), (balanced, INSTANT), (balanced, INSTANT)):
            assert (await client.ask(RemotingCommand(code, 1, ext_fields={"topic": "t"}))).code == 16
    first, second, repeated = events_of(caplog)
    assert first["client"].startswith("127.0.0.1:")
    assert (second["client"], second["count"]) == ("10.1.2.3:5555", 1)
    assert (repeated["client"], repeated["count"]) == ("10.1.2.3", 1), "written when the server stopped"


def test_refusals_of_handlers_and_of_the_broker_are_seen_without_rules(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refused = Response(ResponseCode.NO_PERMISSION, remark="account x has no permission\x1b[2J")
    answered(RulesAuthorizer(None, 60), request(987_654, topic="t", AccessKey="x"), refused)
    (line,) = events_of(caplog)
    assert (line["account"], line["code"], line["request"], line["topic"]) == ("x", 987_654, "", "t")


def test_a_reset_is_seen_with_its_result(caplog: pytest.LogCaptureFixture) -> None:
    authorizer = RulesAuthorizer(None, 60)
    sent = request(
        RequestCode.INVOKE_BROKER_TO_RESET_OFFSET, topic="t", group="g", timestamp=7, AccessKey="admin"
    )
    answered(authorizer, sent, Response())
    answered(authorizer, sent, Response(ResponseCode.TOPIC_NOT_EXIST))
    first, second = events_of(caplog)
    assert (first["message"], first["account"], first["group"], first["result"]) == (
        "reset",
        "admin",
        "g",
        "SUCCESS",
    )
    assert first["offset"] == "time 7"
    assert second["result"] == "TOPIC_NOT_EXIST"
    assert authorizer.audited["reset"] == 2


@pytest.mark.parametrize(
    ("code", "fields"),
    [
        (RequestCode.UPDATE_CONSUMER_OFFSET, {"commitOffset": 9}),
        (RequestCode.PULL_MESSAGE, {"commitOffset": 9, "sysFlag": 3}),
        (RequestCode.LITE_PULL_MESSAGE, {"commitOffset": 9, "sysFlag": 1}),
    ],
)
def test_commits_of_others_than_members_are_seen(
    caplog: pytest.LogCaptureFixture, code: int, fields: dict[str, int]
) -> None:
    clients = ClientTable(Clock())
    member, other = RecordingPeer(1), RecordingPeer(2)
    clients.heartbeat(heartbeat(member, "g"))
    clients.heartbeat(heartbeat(other, "other group"))
    authorizer = RulesAuthorizer(None, 60, events=AuditEvents(clients.names_group))
    place = {"consumerGroup": "g", "topic": "t", "queueId": 0}
    answered(authorizer, request(code, member, **place, **fields), Response())
    assert events_of(caplog) == []
    answered(authorizer, request(code, other, **place, **fields), None)
    (line,) = events_of(caplog)
    assert (line["message"], line["client"], line["group"]) == (
        "commit by a client outside the group",
        other.address,
        "g",
    )
    assert (line["offset"], line["result"]) == ("9", "")
    assert authorizer.audited["commit"] == 1


def test_a_pull_that_commits_nothing_is_no_commit(caplog: pytest.LogCaptureFixture) -> None:
    authorizer = RulesAuthorizer(None, 60, events=AuditEvents(lambda *_: False))
    place = {"consumerGroup": "g", "topic": "t", "queueId": 0}
    for fields in (
        {"sysFlag": 2, "commitOffset": 5},
        {"sysFlag": 1, "commitOffset": -1},
        {"sysFlag": "x"},
        {},
    ):
        answered(authorizer, request(RequestCode.PULL_MESSAGE, **place, **fields), Response())
    assert events_of(caplog) == []


def test_a_flood_is_counted_in_few_lines_and_little_time(caplog: pytest.LogCaptureFixture) -> None:
    now_s = 0.0
    events = AuditEvents(lambda *_: True, Clock(monotonic_s=lambda: now_s))
    refused = Response(ResponseCode.NO_PERMISSION, remark="r" * 10_000)
    sent = [
        request(11, RecordingPeer(number % 3), topic=f"t{number}" + "x" * 1000, consumerGroup="g" * 5000)
        for number in range(2000)
    ]
    begun_s = time.process_time()
    for _ in range(10):
        for one in sent:
            events.record(one, refused)
    used_s = time.process_time() - begun_s
    assert len(events_of(caplog)) == LINES_MAX
    now_s = INTERVAL_S - 1
    events.tick(now_s)
    assert len(events_of(caplog)) == LINES_MAX
    now_s = INTERVAL_S
    events.tick(now_s)
    lines = events_of(caplog)
    assert len(lines) == 2 * LINES_MAX + 1
    assert sum(line["count"] for line in lines) == events.counts["refused"] == 20_000
    assert all(
        len(str(line[name])) < 300 for line in lines for name in ("topic", "group", "reason") if name in line
    )
    assert used_s / 20_000 < 50e-6
    events.record(request(222, topic="t", group="g"), Response())
    assert events_of(caplog)[-1]["message"] == "reset", "a flood of refusals hides no reset"


def test_reloads_are_counted_with_their_result(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rules, certificate, key = tmp_path / "acl.yml", tmp_path / "cert.pem", tmp_path / "key.pem"
    rules.write_text(RULES)
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "ec",
            "-pkeyopt",
            "ec_paramgen_curve:P-256",
            "-nodes",
            "-subj",
            "/CN=x",
            "-keyout",
            key,
            "-out",
            certificate,
        ],
        check=True,
        capture_output=True,
    )
    options = server_options(
        ServeSettings(
            bind="127.0.0.1:0", acl_file=str(rules), tls_certificate=str(certificate), tls_key=str(key)
        )
    )
    assert isinstance(options.authorizer, RulesAuthorizer) and options.tls is not None
    os.utime(certificate, (1, 1))
    options.tls()
    rules.write_text(RULES.replace("DENY", "PUB"))
    options.authorizer.refusal(request(11, topic="t"))
    certificate.write_text("")
    options.tls()
    counts = options.authorizer.audited
    assert (counts["reload"], counts["reload_failed"]) == (2, 1)
    assert [text.split(": ")[0] for text in caplog.messages if "certificate" in text or "rules" in text] == [
        "certificates for clients reloaded",
        "access rules reloaded",
        "the changed certificates for clients cannot be loaded, so that the old ones stay in use",
    ]
