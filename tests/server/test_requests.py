"""One decoder: what access rules judge is what handlers execute, the audit log shows and a broker gets.

Bodies that a broker's JSON parser reads otherwise than the access rules: nothing in them gets past the rules.

Whatever a request says, it is answered or is an error of its client: nothing of it ends a connection.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from rocketmq_tiered.server.backend.route_handlers import PROXY_TOPIC
from rocketmq_tiered.server.security.authorizer import RulesAuthorizer
from rocketmq_tiered.server.security.permissions import BODIES, NEEDS, OPAQUE, Kind, permissions_for
from rocketmq_tiered.server.security.rules import rules_in_file
from rocketmq_tiered.server.wire.request import BadRequestError, Request
from rocketmq_tiered.server.wire.request_fields import COMMON, FIELDS, LETTERED, encoded_fields, undeclared
from tests.integration.access_attempts import codes
from tests.server.request_fuzz import RULES, allowed, frame_of, reached
from tests.server.serving_peer import RecordingPeer
from tests.server.small_archive import small_service
from tests.server.spelled_bodies import ACL_1, ACL_5, OWN_FIELDS, SECRET, VICTIM, own, places, respelled
from tests.sweeps import examples
from tiered.errors import TieredError
from tiered.remoting.command import (
    ProtocolError,
    RemotingCommand,
    SerializeType,
    decode,
    encode,
)
from tiered.remoting.command import RequestCode as Code
from tiered.remoting.command import RequestCode as R
from tiered.remoting.credentials import signature_of

NAMED = sorted(code for code, names in FIELDS.items() if "topic" in names or code in LETTERED)
NOW_MS = 1_800_000_000_000


def request_of(code: int, **others: str) -> Request:
    """Every field of the code with a value of its own."""
    names = FIELDS[code] - COMMON
    values = {name: f"v-{name}" for name in names} | {name: text for name, text in others.items() if text}
    return Request(RemotingCommand(code, 1, ext_fields=values), RecordingPeer())


@pytest.mark.parametrize("code", NAMED, ids=lambda code: R(code).name)
def test_the_judged_executed_and_relayed_topic_is_one(code: int) -> None:
    written = "b" if code in LETTERED else "topic"
    request = request_of(code, **{written: "orders"}, **({"i": "KEYS\x01k\x02"} if code in LETTERED else {}))
    judged = {one.name for one in permissions_for(request) or () if one.kind is Kind.TOPIC}
    assert judged >= {"orders"} and not judged & {"v-topic", "v-defaultTopic"}
    assert request.text("topic") == request.fields["topic"] == "orders"
    assert encoded_fields(code, request.fields) == request.command.ext_fields
    other = "topic" if code in LETTERED else "b"
    odd = Request(
        RemotingCommand(code, 1, ext_fields={**request.command.ext_fields, other: "secret"}), RecordingPeer()
    )
    assert undeclared(odd.command) == other and odd.text("topic") == "orders"
    assert [one for one in permissions_for(odd) or () if one.name == "secret"] == []


@pytest.mark.parametrize("code", sorted(NEEDS), ids=lambda code: R(code).name)
def test_fields_in_other_cases_and_of_other_codes_are_undeclared(code: int) -> None:
    assert undeclared(request_of(code).command) is None
    for name in (*(n.swapcase() for n in FIELDS[code] - COMMON), "zz"):
        if name not in FIELDS[code]:
            assert undeclared(RemotingCommand(code, 1, ext_fields={name: "x"})) == name


@pytest.mark.parametrize(
    "pairs",
    [
        [("topic", "a"), ("topic", "b")],
        [("topic", "a"), ("x", 'quotes " in it'), ("topic", "a")],
        [("topic", "a\x01\x02"), ("topic", "a")],
    ],
)
def test_a_name_that_is_there_twice_is_no_request(pairs: list[tuple[str, str]]) -> None:
    with pytest.raises(ProtocolError, match="twice"):
        decode(frame_of(11, pairs, b""))
    assert decode(frame_of(11, pairs[:-1], b"x")).ext_fields == dict(pairs[:-1])
    binary = encode(
        RemotingCommand(11, 1, ext_fields={"topic": "a", "topiC": "b"}, serialize_type=SerializeType.ROCKETMQ)
    )
    with pytest.raises(ProtocolError, match="twice"):
        decode(binary[4:].replace(b"topiC", b"topic"))


@pytest.mark.parametrize("rules", RULES)
def test_no_request_reaches_a_topic_that_its_account_lacks(tmp_path: Path, rules: str) -> None:
    count, topics = reached(tmp_path, rules, seed=61, count=4_000, now_ms=NOW_MS)
    assert count > 100 and topics["own"] > 100
    assert [topic for topic in topics if not allowed(topic, rules)] == []


@pytest.fixture(params=["ACL 1.0", "ACL 5.x"])
def authorizer(request: pytest.FixtureRequest, tmp_path: Path) -> RulesAuthorizer:
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(ACL_1 if request.param == "ACL 1.0" else ACL_5))
    path.chmod(0o600)
    return RulesAuthorizer(rules_in_file(path), 60.0)


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
    authorizer = RulesAuthorizer(rules_in_file(path), 60.0, keeps_bodies=True)
    body = f'{{ "consumerGroup":"own", {LOCK} }}'.encode()
    assert sent_on(authorizer, Code.LOCK_BATCH_MQ, body) == body
    assert sent_on(authorizer, Code.LOCK_BATCH_MQ, body.replace(b"consumerGroup", b"ConsumerGroup")) is None


NAMES = st.sampled_from(["t", "g", "%RETRY%g", "%DLQ%g", PROXY_TOPIC, "", "x" * 2000, "\ud800"])
NUMBERS = st.sampled_from(["0", "1", "-1", "777", "2147483648", str(2**63 - 1), str(-(2**63)), "1e3", ""])
WORDS = st.sampled_from(
    ["TAG", "SQL92", "a > 1", "((", "*", "true", "UPPER", "0 1 2 3 4 b 0 1", "AAAA", "POP"]
)
FIELD_NAMES = """
    topic consumerGroup group queueId queueOffset maxMsgNums sysFlag commitOffset subVersion subscription expressionType
    offset timestamp boundaryType key maxNum index count clientID originTopic delayLevel invisibleTime exp expType order
    extraInfo isForce readQueueNums b e f g h i
"""
KEYS = """
    clientID consumerDataSet groupName subscriptionDataSet topic subString expressionType subVersion mqSet brokerName
    queueId consumerGroup clientId acks so b c t q mode strategyName subscriptionData
"""
ODD_FIELDS = st.dictionaries(st.sampled_from(FIELD_NAMES.split()), NAMES | NUMBERS | WORDS)
LIKELY = st.fixed_dictionaries(
    {
        "topic": NAMES,
        "queueId": st.sampled_from("01"),
        "consumerGroup": NAMES,
        "group": NAMES,
        "offset": NUMBERS,
    }
)
VALUES: Any = st.recursive(
    st.none() | st.integers(-1, 2**64) | NAMES | WORDS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS.split()), inner, max_size=6)
    ),
    max_leaves=12,
)


@settings(max_examples=examples(25), deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 1 << 16), LIKELY | st.just({}), ODD_FIELDS, VALUES), min_size=40, max_size=80
    )
)
def test_no_request_fails_unexpectedly(sent: list[tuple[int, dict[str, str], dict[str, str], Any]]) -> None:
    async def scene() -> None:
        service = small_service()
        await service.start()
        table = service.table
        codes = sorted(table.codes())
        for number, likely, fields, document in sent:
            code = codes[number % len(codes)]
            command = RemotingCommand(
                code, number, ext_fields=likely | fields, body=json.dumps(document).encode()
            )
            handler = table.find(code)
            assert handler is not None
            working = asyncio.ensure_future(handler(Request(command, RecordingPeer(number % 3))))
            done, _ = await asyncio.wait({working}, timeout=0.5)
            if not done:
                working.cancel()  # waits for what only the next flush brings
                continue
            error = working.exception()
            assert error is None or isinstance(error, TieredError | UnicodeEncodeError), (code, error)
        assert not any(task.done() for task in service._tasks)
        await service.close(0)

    asyncio.run(scene())
