"""Bodies that a broker's JSON parser reads otherwise than the access rules: nothing in them gets past the rules."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from rocketmq_tiered.server.security.authorizer import RulesAuthorizer
from rocketmq_tiered.server.security.permissions import BODIES, OPAQUE
from rocketmq_tiered.server.security.rules import RulesFile
from rocketmq_tiered.server.wire.request import BadRequestError, Request
from rocketmq_tiered.server.wire.request_fields import FIELDS
from tests.integration.access_attempts import codes
from tests.server.serving_peer import RecordingPeer
from tests.server.spelled_bodies import ACL_1, ACL_5, OWN_FIELDS, SECRET, VICTIM, own, places, respelled
from tiered.remoting.codes import RequestCode as Code
from tiered.remoting.command import RemotingCommand
from tiered.remoting.credentials import signature_of


@pytest.fixture(params=["ACL 1.0", "ACL 5.x"])
def authorizer(request: pytest.FixtureRequest, tmp_path: Path) -> RulesAuthorizer:
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(ACL_1 if request.param == "ACL 1.0" else ACL_5))
    path.chmod(0o600)
    return RulesAuthorizer(RulesFile(path), 60.0)


def sent_on(authorizer: RulesAuthorizer, code: int, body: bytes) -> bytes | None:
    """The body that a broker or handler gets; None if the request is refused."""
    known = FIELDS.get(code, ())
    fields = {"AccessKey": "reader1"} | {name: text for name, text in OWN_FIELDS.items() if name in known}
    fields["Signature"] = signature_of(fields, body, SECRET)
    request = Request(RemotingCommand(code, 1, version=479, ext_fields=fields, body=body), RecordingPeer())
    try:
        return request.command.body if authorizer.refusal(request) is None else None
    except BadRequestError:
        return None


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
}


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
