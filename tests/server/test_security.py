"""Signatures, ACL 1.0 and 5.x rules, reloading, what is never logged, and the audit log."""

import asyncio
import base64
import json
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_tiered.server.security import addresses
from rocketmq_tiered.server.security.authorizer import RulesAuthorizer, is_signed
from rocketmq_tiered.server.security.rules import read_rules, rules_in_file
from rocketmq_tiered.server.wire.request import BadRequestError, Dispatcher, HandlerTable, Request, Response
from tests.server.original_record import original
from tests.server.serving_peer import RecordingPeer
from tiered.clock import Clock
from tiered.remoting.command import RemotingCommand
from tiered.remoting.command import RequestCode as Code
from tiered.remoting.credentials import signature_of

SECRET = "12345678-secret"
PLAIN: dict[str, Any] = {
    "globalWhiteRemoteAddresses": ["10.10.*.*", "192.168.0.{7,9}"],
    "accounts": [
        {
            "accessKey": "RocketMQ",
            "secretKey": SECRET,
            "whiteRemoteAddress": None,
            "admin": False,
            "defaultTopicPerm": "DENY",
            "defaultGroupPerm": "SUB",
            "topicPerms": ["t_a=SUB", "t_pub=PUB"],
            "groupPerms": ["g_no=DENY"],
        },
        {
            "accessKey": "rocketmq2",
            "secretKey": 987654321,
            "whiteRemoteAddress": "172.16.0.1-9",
            "admin": True,
        },
        {
            "accessKey": "bound-admin",
            "secretKey": SECRET,
            "admin": True,
            "defaultGroupPerm": "SUB",
            "topicPerms": ["t_a=SUB"],
        },
    ],
}
UNDECLARED = 9999
USERS: dict[str, Any] = {
    "users": [
        {"username": "root", "password": "root-password", "userType": "Super"},
        {"username": "reader", "password": SECRET, "userType": "Normal", "userStatus": "enable"},
        {"username": "left", "password": SECRET, "userType": "Normal", "userStatus": "disable"},
    ],
    "acls": [
        {
            "subject": "User:reader",
            "policies": [
                {
                    "policyType": "Custom",
                    "entries": [
                        {"resource": "Topic:*", "actions": ["Sub", "Get"], "decision": "Allow"},
                        {"resource": "Topic:secret*", "actions": ["All"], "decision": "Deny"},
                        {"resource": "Topic:secret-but-open", "actions": ["Sub"], "decision": "Allow"},
                        {"resource": "Topic:no-pulls", "actions": ["Sub"], "decision": "Deny"},
                        {
                            "resource": "Group:g_*",
                            "actions": ["Sub"],
                            "sourceIps": ["127.0.0.0/8"],
                            "decision": "Allow",
                        },
                    ],
                }
            ],
        }
    ],
}


def asked(
    code: int,
    key: str | None,
    secret: str = "",
    address: str = "127.0.0.1:5",
    version: int = 479,
    **fields: str,
) -> Request:
    """A request, signed with ``secret`` when a key is given."""
    peer = RecordingPeer()
    peer.address = address
    if key is not None:
        fields = {"AccessKey": key, **fields}
        fields["Signature"] = signature_of(fields, b"", secret)
    return Request(RemotingCommand(code, 1, version=version, ext_fields=fields), peer)


def authorizer_of(tmp_path: Path, document: Any, **options: Any) -> RulesAuthorizer:
    path = tmp_path / "acl.yml"
    path.write_text(yaml.safe_dump(document))
    return RulesAuthorizer(rules_in_file(path), 60, **options)


def test_the_signature_is_what_openssl_makes_of_the_sorted_values() -> None:
    fields = {"topic": "t_a", "consumerGroup": "g", "queueId": "0", "AccessKey": "RocketMQ"}
    assert signature_of(fields, b"", SECRET) == signature_of(dict(reversed(fields.items())), b"", SECRET)
    made = subprocess.run(
        ["openssl", "dgst", "-sha1", "-hmac", SECRET, "-binary"],
        input=b"RocketMQg0t_abody",
        capture_output=True,
        check=True,
    ).stdout
    assert signature_of(fields, b"body", SECRET) == base64.b64encode(made).decode()


@given(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=6), st.binary(max_size=30))
def test_whatever_changes_breaks_the_signature(fields: dict[str, str], body: bytes) -> None:
    fields.pop("Signature", None)
    signed = fields | {"Signature": signature_of(fields, body, SECRET)}
    assert is_signed(signed, body, SECRET)
    assert not is_signed(signed, body + b"x", SECRET)
    assert not is_signed(signed, body, SECRET + "x")
    assert not is_signed(fields, body, SECRET)


def test_old_clients_add_a_field_after_signing() -> None:
    fields = {"AccessKey": "RocketMQ", "key": "k"}
    signed = fields | {"Signature": signature_of(fields, b"", SECRET), "_UNIQUE_KEY_QUERY": "true"}
    assert is_signed(signed, b"", SECRET)


@pytest.mark.parametrize(
    ("pattern", "host", "expected"),
    [
        ("", "1.2.3.4", False),
        ("*", "1.2.3.4", True),
        ("1.2.3.4", "1.2.3.4", True),
        ("1.2.*.*", "1.2.9.9", True),
        ("1.2.*.*", "1.3.9.9", False),
        ("1.2.3.{4,6}", "1.2.3.6", True),
        ("1.2.3.{4,6}", "1.2.3.5", False),
        ("1.2.3.4-9", "1.2.3.7", True),
        ("1.2.3.4-9", "1.2.3.10", False),
        ("9.9.9.9,1.2.3.4", "1.2.3.4", True),
        ("10.0.0.0/8", "10.200.1.1", True),
        ("10.0.0.0/8", "11.0.0.1", False),
        ("::1", "::1", True),
        ("fe80:*:*:*:*:*:*:1-f", "fe80::7", True),
        ("*.*.*.*", "fe80::7", True),
        ("*", "no address", True),
        ("1.2.3.4", "no address", False),
    ],
)
def test_address_patterns(pattern: str, host: str, expected: bool) -> None:
    assert addresses.is_valid(pattern) or pattern == ""
    assert addresses.matches(pattern, host) is expected


@pytest.mark.parametrize(
    ("code", "fields", "refused"),
    [
        (Code.PULL_MESSAGE, {"topic": "t_a", "consumerGroup": "g"}, False),
        (Code.LITE_PULL_MESSAGE, {"topic": "t_b", "consumerGroup": "g"}, True),
        (Code.PULL_MESSAGE, {"topic": "t_pub", "consumerGroup": "g"}, True),
        (Code.PULL_MESSAGE, {"topic": "t_a", "consumerGroup": "g_no"}, True),
        (Code.PULL_MESSAGE, {"topic": "%RETRY%g", "consumerGroup": "g"}, False),
        (Code.PULL_MESSAGE, {"topic": "%RETRY%g_no", "consumerGroup": "g"}, True),
        (Code.UPDATE_AND_CREATE_TOPIC, {"topic": "t_a"}, True),
        (Code.GET_MAX_OFFSET, {"topic": "t_a"}, False),
        (Code.GET_MAX_OFFSET, {"topic": "t_b"}, True),
        (Code.SEND_MESSAGE_V2, {"b": "t_a"}, True),
        (Code.SEND_MESSAGE_V2, {"b": "t_pub"}, False),
        (Code.GET_ROUTEINFO_BY_TOPIC, {"topic": "t_pub"}, False),
        (Code.GET_ROUTEINFO_BY_TOPIC, {"topic": "t_b"}, True),
        (Code.GET_ALL_TOPIC_CONFIG, {}, True),
        (Code.GET_ALL_TOPIC_LIST_FROM_NAMESERVER, {}, True),
        (Code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, {}, True),
        (UNDECLARED, {}, True),
        (Code.POP_MESSAGE, {"topic": "t_b", "consumerGroup": "g"}, True),
    ],
)
def test_acl_1_permissions(tmp_path: Path, code: int, fields: dict[str, Any], refused: bool) -> None:
    authorizer = authorizer_of(tmp_path, PLAIN)
    answer = authorizer.refusal(asked(code, "RocketMQ", SECRET, **fields))
    assert (answer is not None) is refused
    if answer is not None:
        assert answer.code == 16
        assert SECRET not in (answer.remark or "")
    assert authorizer.refusal(asked(code, "rocketmq2", "987654321", **fields)) is None  # an administrator


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (True, True),
        ("true", True),
        ("TRUE", True),
        (1, True),
        (False, False),
        ("false", False),
        (None, False),
    ],
)
def test_an_administrator_is_who_a_broker_takes_for_one(tmp_path: Path, value: Any, expected: bool) -> None:
    """As the PlainAccessConfig that 4.9.7 makes of the file says."""
    authorizer = authorizer_of(
        tmp_path, {"accounts": [{"accessKey": "RocketMQ", "secretKey": SECRET, "admin": value}]}
    )
    fields = {"topic": "t_a", "consumerGroup": "g"}
    assert (authorizer.refusal(asked(11, "RocketMQ", SECRET, **fields)) is None) is expected


@pytest.mark.parametrize(
    ("code", "fields", "refused"),
    [
        (Code.UPDATE_AND_CREATE_TOPIC, {"topic": "t_b"}, False),
        (Code.PULL_MESSAGE, {"topic": "t_a", "consumerGroup": "g"}, False),
        (Code.PULL_MESSAGE, {"topic": "t_b", "consumerGroup": "g"}, True),
        (Code.GET_MAX_OFFSET, {"topic": "t_b"}, True),
    ],
)
def test_an_administrator_with_named_resources_is_bound_by_them(
    tmp_path: Path, code: int, fields: dict[str, Any], refused: bool
) -> None:
    """As PlainPermissionManager.checkPerm: only one without any is let in unasked."""
    authorizer = authorizer_of(tmp_path, PLAIN)
    assert (authorizer.refusal(asked(code, "bound-admin", SECRET, **fields)) is not None) is refused


@pytest.mark.parametrize(
    ("document", "key", "secret", "address", "topic", "refused"),
    [
        (PLAIN, "RocketMQ", SECRET, "127.0.0.1:5", "t_a", False),
        (PLAIN, "RocketMQ", SECRET, "127.0.0.1:5", "t_b", True),
        (PLAIN, "RocketMQ", SECRET, "127.0.0.1:5", "%RETRY%g", False),
        (PLAIN, "RocketMQ", SECRET, "127.0.0.1:5", "%RETRY%g_no", True),
        (PLAIN, "RocketMQ", SECRET, "10.10.1.1:5", "t_b", False),
        (PLAIN, "rocketmq2", "987654321", "127.0.0.1:5", "t_b", False),
        (PLAIN, "bound-admin", SECRET, "127.0.0.1:5", "t_b", True),
        (PLAIN, None, "", "10.10.1.1:5", "t_b", False),
        (USERS, "reader", SECRET, "127.0.0.1:5", "open", False),
        (USERS, "reader", SECRET, "127.0.0.1:5", "secret1", True),
        (USERS, "root", "root-password", "127.0.0.1:5", "secret1", False),
    ],
)
def test_a_message_named_by_its_place_is_shown_to_who_may_read_its_own_topic(
    tmp_path: Path, document: Any, key: str | None, secret: str, address: str, topic: str, refused: bool
) -> None:
    """Whatever topic is named with it: physical offsets are those of one log of all topics."""
    authorizer = authorizer_of(tmp_path, document)
    named = asked(Code.VIEW_MESSAGE_BY_ID, key, secret, address, topic="t_a", offset="777")
    assert authorizer.refusal(named) is None
    found = Response(body=(original(topic=topic.encode()),))
    answer = authorizer.filtered(named, found)
    assert (answer.code == 16 and not answer.body) if refused else (answer is found)
    assert (authorizer.refusal_of_record(named, found.body[0], 777) is not None) is refused
    nothing = Response(1)
    assert authorizer.filtered(named, nothing) is nothing


def test_a_message_that_may_not_be_shown_does_not_leave_the_server(tmp_path: Path) -> None:
    table = HandlerTable()

    async def view(request: Request) -> Response:
        return Response(body=(memoryview(original(topic=b"secret1")),))

    table.register(Code.VIEW_MESSAGE_BY_ID)(view)
    answerer = Dispatcher(table, authorizer_of(tmp_path, USERS))
    named = asked(Code.VIEW_MESSAGE_BY_ID, "reader", SECRET, topic="open", offset="777")
    answer = asyncio.run(answerer.answer(named, is_authorized=False))
    assert answer is not None
    assert (answer.code, answer.body) == (16, ())


def test_a_refused_request_reaches_no_handler(tmp_path: Path) -> None:
    table = HandlerTable()

    def at_once(request: Request) -> Response:
        pytest.fail("it was handled")

    @table.register(Code.PULL_MESSAGE, at_once=at_once)
    async def pull(request: Request) -> Response:
        pytest.fail("it was handled")

    dispatcher = Dispatcher(table, authorizer_of(tmp_path, USERS))
    fields = {"consumerGroup": "none", "topic": "none", "subscription": "x || " * 1_000}
    named = asked(Code.PULL_MESSAGE, "reader", SECRET, **fields)
    for answer in (
        asyncio.run(dispatcher.answer(named, is_authorized=False)),
        dispatcher.at_once(at_once, named),
    ):
        assert answer is not None and answer.code == 16


@pytest.mark.parametrize(
    ("code", "body"),
    [
        (34, {"consumerDataSet": [1]}),
        (34, {"consumerDataSet": 5}),
        (200151, {"acks": [1]}),
        (200151, {"acks": 5}),
    ],
)
def test_a_body_that_is_none_of_its_codes_is_an_error_of_the_client(
    tmp_path: Path, code: int, body: Any
) -> None:
    data = json.dumps(body).encode()
    for document, key in ((PLAIN, "RocketMQ"), (USERS, "reader")):
        fields = {"AccessKey": key, "Signature": ""}
        fields["Signature"] = signature_of({"AccessKey": key}, data, SECRET)
        sent = Request(RemotingCommand(code, 1, ext_fields=fields, body=data), RecordingPeer())
        if document is USERS or code == 34:
            with pytest.raises(BadRequestError):
                authorizer_of(tmp_path, document).refusal(sent)


def test_which_clients_need_a_signature(tmp_path: Path) -> None:
    authorizer = authorizer_of(tmp_path, PLAIN)
    pull: dict[str, Any] = {"topic": "t_a", "consumerGroup": "g"}
    assert authorizer.refusal(asked(11, None, **pull)) is not None
    assert authorizer.refusal(asked(11, "RocketMQ", "wrong", **pull)) is not None
    assert authorizer.refusal(asked(11, "nobody12", SECRET, **pull)) is not None
    assert authorizer.refusal(asked(11, None, address="10.10.3.4:1", **pull)) is None
    assert authorizer.refusal(asked(11, None, address="192.168.0.8:1", **pull)) is not None
    assert authorizer.refusal(asked(11, "rocketmq2", "wrong", address="172.16.0.5:1", **pull)) is None


def test_a_heartbeat_needs_every_topic_and_group(tmp_path: Path) -> None:
    authorizer = authorizer_of(tmp_path, PLAIN)
    for topics, refused in ((["t_a"], False), (["t_a", "t_b"], True)):
        subscriptions = [{"topic": topic} for topic in topics]
        consumer = {"groupName": "g", "subscriptionDataSet": subscriptions}
        body = json.dumps({"clientID": "c", "consumerDataSet": [consumer]}).encode()
        fields = {"AccessKey": "RocketMQ"}
        fields["Signature"] = signature_of(fields, body, SECRET)
        heartbeat = Request(RemotingCommand(34, 1, ext_fields=fields, body=body), RecordingPeer())
        assert (authorizer.refusal(heartbeat) is not None) is refused


@pytest.mark.parametrize(
    ("user", "secret", "code", "fields", "refused"),
    [
        ("root", "root-password", 11, {"topic": "secret1", "consumerGroup": "x"}, False),
        ("reader", SECRET, 11, {"topic": "open", "consumerGroup": "g_1"}, False),
        ("reader", SECRET, 11, {"topic": "secret1", "consumerGroup": "g_1"}, True),
        ("reader", SECRET, 11, {"topic": "secret-but-open", "consumerGroup": "g_1"}, False),
        ("reader", SECRET, 11, {"topic": "open", "consumerGroup": "other"}, True),
        ("reader", SECRET, 361, {"topic": "secret1", "consumerGroup": "g_1"}, True),
        ("reader", SECRET, 33, {"topic": "secret1"}, True),
        ("reader", SECRET, 33, {"topic": "no-pulls"}, True),
        ("reader", SECRET, 14, {"topic": "no-pulls", "consumerGroup": "g_1"}, True),
        ("reader", SECRET, 105, {"topic": "open"}, False),
        ("reader", SECRET, 17, {"topic": "open"}, True),
        ("reader", SECRET, 10, {"topic": "open"}, True),
        ("reader", SECRET, 310, {"b": "open"}, True),
        ("reader", SECRET, 206, {}, True),
        ("reader", SECRET, 201, {}, True),
        ("root", "root-password", UNDECLARED, {}, False),
        ("reader", SECRET, UNDECLARED, {}, True),
        ("left", SECRET, 105, {"topic": "open"}, True),
        ("reader", "no", 105, {"topic": "open"}, True),
    ],
)
def test_users_and_policies(
    tmp_path: Path, user: str, secret: str, code: int, fields: dict[str, Any], refused: bool
) -> None:
    authorizer = authorizer_of(tmp_path, USERS)
    assert (authorizer.refusal(asked(code, user, secret, **fields)) is not None) is refused


def test_a_policy_asks_where_from(tmp_path: Path) -> None:
    authorizer = authorizer_of(tmp_path, USERS)
    pull: dict[str, Any] = {"topic": "open", "consumerGroup": "g_1"}
    assert authorizer.refusal(asked(11, "reader", SECRET, **pull)) is None
    assert authorizer.refusal(asked(11, "reader", SECRET, address="10.0.0.1:9", **pull)) is not None


def test_old_clients_get_no_refusal_of_an_offset_query(tmp_path: Path) -> None:
    authorizer = authorizer_of(tmp_path, USERS)
    for version, is_withheld in ((407, True), (479, False)):
        answer = authorizer.refusal(asked(14, "reader", "no", version=version, topic="t", consumerGroup="g"))
        assert answer is not None
        assert answer.is_withheld is is_withheld


def test_a_changed_file_is_read_and_a_bad_one_is_not_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authorizer = authorizer_of(tmp_path, PLAIN)
    path = tmp_path / "acl.yml"
    pull: dict[str, Any] = {"topic": "t_b", "consumerGroup": "g"}
    caplog.set_level(logging.INFO)

    def write(text: str, step: int) -> None:
        path.write_text(text)
        os.utime(path, ns=(step, step))

    assert authorizer.refusal(asked(11, "RocketMQ", SECRET, **pull)) is not None
    changed = yaml.safe_dump(PLAIN).replace("t_a=SUB", "t_b=SUB")
    write(changed, 1)
    assert authorizer.refusal(asked(11, "RocketMQ", SECRET, **pull)) is None
    for step, bad in enumerate((changed.replace("DENY", "DENNY"), f"accounts: [{SECRET}: {{", "{}", ""), 2):
        write(bad, step)
        assert authorizer.refusal(asked(11, "RocketMQ", SECRET, **pull)) is None
        assert "the changed access rules cannot be loaded" in caplog.text
    path.unlink()
    assert authorizer.refusal(asked(11, "RocketMQ", SECRET, **pull)) is None
    assert SECRET not in caplog.text
    assert SECRET not in repr(read_rules_of(tmp_path).accounts)


def read_rules_of(tmp_path: Path) -> Any:
    path = tmp_path / "again.yml"
    path.write_text(yaml.safe_dump(PLAIN))
    return read_rules(path)


def test_the_audit_log_sums_pulls(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    authorizer = RulesAuthorizer(None, 60, clock=Clock(monotonic_s=lambda: 0.0))
    for offset in range(0, 320, 32):
        pull = asked(11, None, topic="t", consumerGroup="g", queueId="1", queueOffset=str(offset))
        authorizer.note(pull, Response(0, {"nextBeginOffset": str(offset + 32)}), 1000)
    authorizer.note(asked(11, None, topic="t", consumerGroup="g", queueId="2"), Response(19), 0)
    authorizer.tick(59.0)
    assert caplog.records == []
    authorizer.tick(60.0)
    (record,) = caplog.records
    said = {
        name: getattr(record, name)
        for name in ("client", "group", "topic", "queue", "offsets", "reads", "bytes")
    }
    assert said == {
        "client": "127.0.0.1",
        "group": "g",
        "topic": "t",
        "queue": "1",
        "offsets": "0-320",
        "reads": 10,
        "bytes": 10_000,
    }
    authorizer.close()
    assert len(caplog.records) == 1


def test_a_request_has_the_account_that_was_verified_and_no_other(tmp_path: Path) -> None:
    """Limits are per account: a name that a client only claims would be another one's."""
    pull = {"topic": "t_a", "consumerGroup": "g"}
    known = asked(11, "RocketMQ", SECRET, **pull)
    assert authorizer_of(tmp_path, PLAIN).refusal(known) is None and known.account == "RocketMQ"
    for forged in (asked(11, "RocketMQ", "wrong", **pull), asked(11, "RocketMQ", "", "10.10.1.1:5", **pull)):
        authorizer_of(tmp_path, PLAIN).refusal(forged)
        assert not forged.account
    without_rules = asked(11, "RocketMQ", SECRET, **pull)
    assert RulesAuthorizer(None, 60.0).refusal(without_rules) is None and not without_rules.account
