"""One decoder: what access rules judge is what handlers execute, the audit log shows and a broker gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from rocketmq_tiered.server.security.permissions import NEEDS, Kind, permissions_for
from rocketmq_tiered.server.wire.request import Request
from rocketmq_tiered.server.wire.request_fields import COMMON, FIELDS, LETTERED, encoded_fields, undeclared
from tests.server.request_fuzz import RULES, allowed, frame_of, reached
from tests.server.serving_peer import RecordingPeer
from tiered.remoting.codes import RequestCode as R
from tiered.remoting.command import (
    ProtocolError,
    RemotingCommand,
    SerializeType,
    decode,
    encode,
)

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
