"""A mistyped rule is refused with file, line and suggestion, or means what was meant; files as brokers have them load,
and are explained by account."""

import asyncio
import json
from pathlib import Path

import pytest

from rocketmq_tiered.cli import main
from rocketmq_tiered.server.listen.options import server_options
from rocketmq_tiered.server.security.rules import RulesError, read_rules
from rocketmq_tiered.server.wire.listener import Listener
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RequestCode, ResponseCode
from tiered.remoting.credentials import Credentials
from tiered.settings.sections import ServeSettings

ACCOUNT = Credentials("reader12", "secret12")
MEANT = {
    "ACL 1.0": """accounts:
- accessKey: reader12
  secretKey: secret12
  defaultTopicPerm: SUB
  defaultGroupPerm: SUB
  topicPerms: [secret=DENY]
""",
    "ACL 2.0": """users:
- {username: reader12, password: secret12}
acls:
- subject: User:reader12
  policies:
  - policyType: Custom
    entries:
    - {resource: "*", actions: [All], decision: Allow}
    - {resource: "Topic:secret", actions: [Sub], decision: Deny}
""",
}
TABLE = [
    line.split(" :: ")
    for line in (Path(__file__).parent / "mistyped_rules.txt").read_text().splitlines()
    if not line.startswith("#")
]
FILES = {
    "4.9": """globalWhiteRemoteAddresses:
  - 10.11.12.*
accounts:
  - accessKey: orders-reader
    secretKey: 87654321
    whiteRemoteAddress:
    admin: false
    defaultTopicPerm: DENY
    defaultGroupPerm: SUB
    topicPerms:
      # a comment
      - orders=DENY
      - payments=PUB|SUB
    groupPerms:
      - billing=SUB

  - accessKey: operators
    secretKey: 87654321
    whiteRemoteAddress: 10.11.13.*
    admin: true
    defaultTopicPerm: PUB|SUB
dataVersion:
  - counter: 1
    timestamp: 1700000000000
""",
    "5.x": json.dumps(
        {
            "users": [
                {"username": "root", "password": "1", "userType": "Super", "userStatus": "enable"},
                {"username": "u", "password": "2", "userType": "Normal", "userStatus": "disable"},
            ],
            "acls": [
                {
                    "subject": "User:u",
                    "policies": [
                        {
                            "policyType": "Custom",
                            "entries": [
                                {"resource": "Topic:s*", "actions": ["Pub", "Sub"], "decision": "Allow"},
                                {
                                    "resource": "Cluster:c",
                                    "actions": ["Update"],
                                    "sourceIps": ["10.0.0.0/8", "::1"],
                                    "decision": "Deny",
                                },
                            ],
                        }
                    ],
                }
            ],
        }
    ),
}
EXPLAINED = {
    "4.9": [
        ("every client", "trusted from 10.11.12.*"),
        ("orders-reader", "account"),
        ("orders-reader", "topic orders: deny"),
        ("orders-reader", "topic payments: Pub, Sub"),
        ("orders-reader", "topic *: deny"),
        ("orders-reader", "group billing: Sub"),
        ("orders-reader", "group *: Sub"),
        ("operators", "administrator"),
        ("operators", "trusted from 10.11.13.*"),
        ("operators", "*: allow everything"),
    ],
    "5.x": [
        ("root", "administrator"),
        ("root", "*: allow everything"),
        ("u", "disabled"),
        ("u", "topic s*: allow Pub, Sub"),
        ("u", "cluster *: deny Update from 10.0.0.0/8, ::1"),
    ],
}


def pull_codes(rules: Path) -> list[int]:
    """What a server with these rules answers the account's pulls of topics ``open`` and ``secret``."""

    async def pulled(_: Request) -> Response:
        return Response()

    def asked(address: str, topic: str) -> int:
        client = BrokerClient(address, 5, ACCOUNT)
        try:
            return client.call(RequestCode.PULL_MESSAGE, {"topic": topic, "consumerGroup": "g"}).code
        finally:
            client.close()

    async def codes() -> list[int]:
        table = HandlerTable()
        table.register(RequestCode.PULL_MESSAGE)(pulled)
        settings = ServeSettings(bind="127.0.0.1:0", acl_file=str(rules))
        listener = Listener(table, server_options(settings))
        host, port = await listener.start()
        try:
            return [await asyncio.to_thread(asked, f"{host}:{port}", topic) for topic in ("open", "secret")]
        finally:
            await listener.close(0)

    return asyncio.run(codes())


def written(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(("kind", "right", "typed", "said"), TABLE)
def test_a_mistyped_rule_is_refused_with_file_line_and_suggestion_or_denies_what_was_meant(
    tmp_path: Path, kind: str, right: str, typed: str, said: str
) -> None:
    assert right in MEANT[kind]
    typed = typed.replace("\\n", "\n").replace("\\t", "\t")
    path = written(tmp_path / "rules.yml", MEANT[kind].replace(right, typed, 1))
    if said == "holds":
        assert pull_codes(path)[1] == ResponseCode.NO_PERMISSION
        return
    with pytest.raises(RulesError) as refused:
        read_rules(path)
    assert refused.value.message.startswith(f"{path}: {said}") and refused.value.hint


@pytest.mark.parametrize("kind", MEANT)
def test_the_rules_that_were_meant_refuse_one_topic(tmp_path: Path, kind: str) -> None:
    codes = pull_codes(written(tmp_path / "rules.yml", MEANT[kind]))
    assert codes == [ResponseCode.SUCCESS, ResponseCode.NO_PERMISSION]


@pytest.mark.parametrize("version", FILES)
def test_rules_as_brokers_have_them_are_explained_by_account(
    tmp_path: Path, version: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path / "rules", FILES[version])
    assert main(["config", "check", "--json", "--set", f"serve.acl_file={path}"]) == 0
    explained = json.loads(capsys.readouterr().out)["serve.acl_file"]["rules"]
    assert [tuple(rule) for rule in explained] == EXPLAINED[version]
