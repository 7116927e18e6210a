"""Who may have a timer handed over, by the rules of then and the seal that proxy mode put on it."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from rocketmq_tiered.server.security.authorizer import hand_over_refusal, sender_rights
from rocketmq_tiered.server.security.rules import Rules, read_rules
from tiered.archive.private_key import KEY_BYTES, private_key
from tiered.errors import CorruptionError
from tiered.formats.keys import PRIVATE_KEY
from tiered.model.timer import DELIVER_MS, SENDER, TOPIC, sealed
from tiered.object_store.memory import MemoryStore

KEY, BODY = b"k" * KEY_BYTES, b"hello"


def acl_1(*others: dict[str, Any]) -> dict[str, Any]:
    account = {"accessKey": "producer1", "secretKey": "secret-1", "topicPerms": ["orders=PUB"]}
    trusted = {"accessKey": "trusted", "secretKey": "secret-1", "whiteRemoteAddress": "10.1.0.7"}
    return {"globalWhiteRemoteAddresses": ["10.2.*.*"], "accounts": [account, trusted, *others]}


def acl_2(*users: dict[str, Any], status: str = "enable") -> dict[str, Any]:
    entry = {"resource": "Topic:orders", "actions": ["Pub"], "decision": "Allow", "sourceIps": ["10.0.0.0/8"]}
    return {
        "users": [{"username": "producer1", "password": "secret-1", "userStatus": status}, *users],
        "acls": [{"subject": "User:producer1", "policies": [{"entries": [entry]}]}],
    }


def rules_of(path: Path, document: dict[str, Any]) -> Rules:
    path.write_text(yaml.safe_dump(document))
    path.chmod(0o600)
    return read_rules(path)


def timer(sender: str = "producer1@10.0.0.1", topic: str = "orders") -> dict[str, str]:
    return sealed(KEY, sender, {TOPIC: topic, DELIVER_MS: "1800000000000"}, BODY)


@pytest.mark.parametrize(
    ("document", "properties", "why"),
    [
        (acl_1(), timer(), None),
        (acl_1(), timer(topic="secret"), "account producer1 has no permission for topic secret"),
        (acl_1(), timer("gone@10.0.0.1"), "account gone does not exist"),
        (acl_1(), timer("@10.2.0.1", "secret"), None),
        (acl_1(), timer("trusted@10.1.0.7", "secret"), None),
        (acl_1(), timer("trusted@10.1.0.8"), "account trusted has no permission for topic orders"),
        (acl_1(), timer() | {SENDER: "trusted@10.1.0.7"}, "account anonymous does not exist"),
        (acl_1(), timer() | {TOPIC: "secret"}, "account anonymous does not exist"),
        (acl_1(), timer() | {DELIVER_MS: "1800000000001"}, "account anonymous does not exist"),
        (acl_1(), {TOPIC: "orders"}, "account anonymous does not exist"),
        (
            acl_1({"accessKey": "anonymous", "secretKey": "secret-1", "topicPerms": ["orders=PUB"]}),
            {TOPIC: "orders"},
            None,
        ),
        (acl_2(), timer(), None),
        (
            acl_2(),
            timer("producer1@11.0.0.1"),
            "account producer1 has no permission for topic orders from 11.0.0.1",
        ),
        (acl_2(status="disable"), timer(), "account producer1 is disabled"),
    ],
)
def test_a_sender_is_judged_by_the_rules_and_its_seal(
    tmp_path: Path, document: dict[str, Any], properties: dict[str, str], why: str | None
) -> None:
    assert hand_over_refusal(rules_of(tmp_path / "rules.yml", document), KEY, properties, BODY) == why


def test_another_body_or_another_archives_key_is_no_seal(tmp_path: Path) -> None:
    rules = rules_of(tmp_path / "rules.yml", acl_1())
    for key, body in ((KEY, b"other"), (b"x" * KEY_BYTES, BODY)):
        assert hand_over_refusal(rules, key, timer(), body) == "account anonymous does not exist"


def test_an_archive_has_one_key_for_all_servers(tmp_path: Path) -> None:
    store = MemoryStore()
    key = private_key(store)
    assert len(key) == KEY_BYTES and private_key(store) == key != private_key(MemoryStore())
    rules_of(tmp_path / "rules.yml", acl_1())
    judge = sender_rights(tmp_path / "rules.yml", store)
    properties = sealed(key, "producer1@10.0.0.1", {TOPIC: "orders", DELIVER_MS: "1800000000000"}, BODY)
    assert judge(properties, BODY) is None and judge(properties, b"other") is not None
    damaged = MemoryStore()
    damaged.put_if_absent(PRIVATE_KEY, [b"short"])
    with pytest.raises(CorruptionError, match="5 bytes"):
        private_key(damaged)
