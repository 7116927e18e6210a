"""Bodies that a broker's JSON parser reads otherwise than the access rules: nothing in them gets past the rules."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rocketmq_tiered.server.security.authorizer import RulesAuthorizer
from rocketmq_tiered.server.security.bodies import BODIES, OPAQUE
from rocketmq_tiered.server.security.rules_file import RulesFile
from rocketmq_tiered.server.wire.codes import RequestCode as Code
from rocketmq_tiered.server.wire.request import BadRequestError, Request
from tests.integration.access_attempts import codes
from tests.server.serving_peer import RecordingPeer
from tiered.remoting.command import RemotingCommand
from tiered.remoting.credentials import signature_of

SECRET, VICTIM = "12345678-secret", "victim"
ACL_1 = {"accounts": [{
    "accessKey": "reader1", "secretKey": SECRET, "defaultTopicPerm": "DENY", "defaultGroupPerm": "DENY",
    "topicPerms": ["own=PUB|SUB"], "groupPerms": ["own=SUB"],
}]}  # fmt: skip
ACL_5 = {
    "users": [{"username": "reader1", "password": SECRET}],
    "acls": [{"subject": "User:reader1", "policies": [{"entries": [
        {"resource": f"{kind}:own", "actions": ["All"], "decision": "Allow"} for kind in ("Topic", "Group")
    ]}]}],
}  # fmt: skip
OWN_FIELDS = dict.fromkeys(
    ("topic", "b", "consumerGroup", "group", "groupName", "originTopic", "producerGroup"), "own"
)


@pytest.fixture(params=["ACL 1.0", "ACL 5.x"])
def authorizer(request: pytest.FixtureRequest, tmp_path: Path) -> RulesAuthorizer:
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(ACL_1 if request.param == "ACL 1.0" else ACL_5))
    path.chmod(0o600)
    return RulesAuthorizer(RulesFile(path), 60.0)


def sent_on(authorizer: RulesAuthorizer, code: int, body: bytes) -> bytes | None:
    """The body that a broker or handler gets; None if the request is refused."""
    fields = {"AccessKey": "reader1", **OWN_FIELDS}
    fields["Signature"] = signature_of(fields, body, SECRET)
    request = Request(RemotingCommand(code, 1, version=479, ext_fields=fields, body=body), RecordingPeer())
    try:
        return request.command.body if authorizer.refusal(request) is None else None
    except BadRequestError:
        return None


def own(shape: Any) -> Any:
    """A body of ``shape`` about the account's own topic and group."""
    if isinstance(shape, dict):
        return {name: own(one) for name, one in shape.items()}
    return [own(shape[0])] if isinstance(shape, list) else "own" if shape == "text" else 0


def spellings(name: str) -> Iterator[str]:
    """Those that fastjson 1 or 2 take for ``name``, and some that none takes."""
    words = "".join(f"_{char.lower()}" if char.isupper() else char for char in name)
    capital = name[0].upper() + name[1:]
    for form in {
        name,
        words,
        words.replace("_", "-"),
        words.replace("_", ""),
        capital,
        name.upper(),
        words.upper(),
    }:
        yield from (
            form,
            f"_{form}",
            f"-{form}",
            f"{form}_",
            f"is{form}",
            f"is_{form}",
            f"{form} ",
            f"${form}",
        )


def places(document: Any) -> Iterator[tuple[dict[str, Any], str]]:
    """Every object in ``document`` with each of its names."""
    for child in (
        document.values() if isinstance(document, dict) else document if isinstance(document, list) else ()
    ):
        yield from places(child)
    if isinstance(document, dict):
        yield from ((document, name) for name in list(document))


def respelled(code: int) -> Iterator[bytes]:
    """Bodies of ``code`` with the victim under another spelling of one name, beside the name or in its place."""
    count = len(list(places(own(BODIES[code]))))
    for at in range(count):
        for is_added in (True, False):
            for spelling in spellings(list(places(own(BODIES[code])))[at][1]):
                document = own(BODIES[code])
                place, name = list(places(document))[at]
                if spelling == name:
                    continue
                value = place[name] if is_added else place.pop(name)
                place[spelling] = json.loads(
                    json.dumps(value).replace("own", VICTIM).replace("0", f'"{VICTIM}"')
                )
                yield json.dumps(document).encode()


def test_no_spelling_of_a_name_gets_past_the_rules(authorizer: RulesAuthorizer) -> None:
    tried = 0
    for code in codes():
        if code in BODIES:
            bodies = [*respelled(code)]
        else:
            names = {name for shape in BODIES.values() for _, name in places(own(shape))}
            bodies = [
                json.dumps({one: VICTIM}).encode() for name in sorted(names) for one in (name, f"_{name}")
            ]
        for body in bodies:
            found = sent_on(authorizer, code, body)
            assert found is None or code in OPAQUE, (code, body)
        tried += len(bodies)
    assert tried > 10_000


@pytest.mark.parametrize("code", sorted(BODIES))
def test_a_body_of_known_names_is_sent(authorizer: RulesAuthorizer, code: int) -> None:
    """With every name that clients of any version send, and encoded as they do not."""
    document = own(BODIES[code])
    found = sent_on(authorizer, code, json.dumps(document, indent=3).encode())
    if code == Code.SET_MESSAGE_REQUEST_MODE and found is None:
        pytest.skip("these rules leave it to administrators")
    assert found == json.dumps(document, separators=(",", ":")).encode()


LOCK = '"clientId":"c","mqSet":[{"topic":"own","brokerName":"b","queueId":0}]'
DIALECTS = {
    "twice": f'{{"consumerGroup":"victim","consumerGroup":"own",{LOCK}}}',
    "twice, escaped": f'{{"consumerGroup":"own","consumer\\u0047roup":"victim",{LOCK}}}',
    "single quotes": f"{{'consumerGroup':'own',{LOCK}}}",
    "no quotes": f'{{consumerGroup:"own",{LOCK}}}',
    "comment": f'{{/*"*/"consumerGroup":"own",{LOCK}}}',
    "stray comma": f'{{"consumerGroup":"own",,{LOCK}}}',
    "hexadecimal escape": f'{{"consumer\\x47roup":"own",{LOCK}}}',
    "more after it": f'{{"consumerGroup":"own",{LOCK}}} {{"consumerGroup":"victim"}}',
    "a type": f'{{"@type":"java.util.HashMap","consumerGroup":"own",{LOCK}}}',
    "a reference": '{"consumerGroup":"own","mqSet":[{"$ref":"$"}],"clientId":"c"}',
    "an object as a name": f'{{"consumerGroup":{{"consumerGroup":"own"}},{LOCK}}}',
    "a list as a name": f'{{"consumerGroup":["own"],{LOCK}}}',
    "a number as a name": f'{{"consumerGroup":1.50,{LOCK}}}',
    "a list in text": '{"consumerGroup":"own","clientId":"c","mqSet":"[]"}',
    "an object for a list": '{"consumerGroup":"own","clientId":"c","mqSet":{"topic":"own"}}',
    "no number": f'{{"consumerGroup":"own","onlyThisBroker":NaN,{LOCK}}}',
    "half a surrogate pair": '{"consumerGroup":"own","clientId":"\\ud800","mqSet":[]}',
    "byte order mark": f'\ufeff{{"consumerGroup":"own",{LOCK}}}',
    "control character": f'{{"consumerGroup":"own\t",{LOCK}}}',
    "list": '["own"]',
    "deep": "[" * 5_000,
}  # fmt: skip


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
def test_what_is_not_strict_json_is_refused(authorizer: RulesAuthorizer, dialect: str, encoding: str) -> None:
    assert sent_on(authorizer, Code.LOCK_BATCH_MQ, f'{{"consumerGroup":"own",{LOCK}}}'.encode()) is not None
    assert sent_on(authorizer, Code.LOCK_BATCH_MQ, DIALECTS[dialect].encode(encoding)) is None


def test_a_null_is_no_value(authorizer: RulesAuthorizer) -> None:
    body = b'{"clientID":"c","consumerDataSet":[{"groupName":"own","subscriptionDataSet":null}],"producerDataSet":null}'
    found = sent_on(authorizer, Code.HEART_BEAT, body)
    assert found == b'{"clientID":"c","consumerDataSet":[{"groupName":"own"}]}'


def test_a_body_whose_signature_is_checked_again_is_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(ACL_5))
    path.chmod(0o600)
    authorizer = RulesAuthorizer(RulesFile(path), 60.0, keeps_bodies=True)
    body = f'{{ "consumerGroup":"own", {LOCK} }}'.encode()
    assert sent_on(authorizer, Code.LOCK_BATCH_MQ, body) == body
    assert sent_on(authorizer, Code.LOCK_BATCH_MQ, body.replace(b"consumerGroup", b"ConsumerGroup")) is None
