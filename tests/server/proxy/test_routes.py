"""Routes of a real name server as clients of the proxy see them."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fetcher.policy.read_policy import ReadPolicies, ReadPolicy
from rocketmq_tiered.server.proxy.name_servers import (
    Published,
    may_dial,
    published_addresses,
    rewritten,
)
from rocketmq_tiered.server.proxy.proxy_handlers import REAL_BROKER_ID
from tiered.errors import CorruptionError
from tiered.formats import fastjson

SIDECAR = "192.0.2.9:9876"
OURS = Published("broker-a", SIDECAR)

# As name servers wrote them: 5.3.3 to a 4.9.4+ client, and to an older one.
STRICT = (
    b'{"brokerDatas":[{"brokerAddrs":{"0":"10.0.0.1:10911","1":"10.0.0.2:10911"},"brokerName":"broker-a",'
    b'"cluster":"C","enableActingMaster":false},{"brokerAddrs":{"0":"10.0.1.1:10911"},"brokerName":"broker-b",'
    b'"cluster":"C","enableActingMaster":false}],"filterServerTable":{},"queueDatas":[{"brokerName":"broker-a",'
    b'"perm":6,"readQueueNums":8,"topicSysFlag":0,"writeQueueNums":8},{"brokerName":"broker-b","perm":6,'
    b'"readQueueNums":4,"topicSysFlag":0,"writeQueueNums":4}]}'
)
BARE = STRICT.replace(b'"0":', b"0:").replace(b'"1":', b"1:")
CLUSTER = (
    b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":{0:"10.0.0.1:10911"},"brokerName":"broker-a","cluster":"C"},'
    b'"broker-b":{"brokerAddrs":{0:"10.0.1.1:10911"},"brokerName":"broker-b","cluster":"C"}},'
    b'"clusterAddrTable":{"C":["broker-a","broker-b"]}}'
)


def test_only_our_broker_is_rewritten_and_nothing_else_changes() -> None:
    before, after = json.loads(STRICT), json.loads(rewritten(STRICT, OURS))
    assert after["brokerDatas"][0]["brokerAddrs"] == {
        "0": SIDECAR,
        "1": "10.0.0.1:10911",
        "2": "10.0.0.2:10911",
    }
    before["brokerDatas"][0]["brokerAddrs"] = after["brokerDatas"][0]["brokerAddrs"]
    assert after == before


def test_proxies_of_two_brokers_can_stand_one_before_the_other() -> None:
    other = Published("broker-b", "192.0.2.10:9876")
    brokers = json.loads(rewritten(rewritten(STRICT, OURS), other))["brokerDatas"]
    assert [broker["brokerAddrs"]["0"] for broker in brokers] == [SIDECAR, "192.0.2.10:9876"]
    assert [broker["brokerAddrs"]["1"] for broker in brokers] == ["10.0.0.1:10911", "10.0.1.1:10911"]


def test_the_dialect_of_the_name_server_is_kept() -> None:
    bare = rewritten(BARE, OURS)
    assert b'{0:"192.0.2.9:9876",1:"10.0.0.1:10911",2:"10.0.0.2:10911"}' in bare
    assert b'"brokerAddrs":{0:"10.0.1.1:10911"}' in bare
    assert fastjson.loads(bare) == json.loads(rewritten(STRICT, OURS))


def test_cluster_information_agrees_with_the_routes() -> None:
    cluster = fastjson.loads(rewritten(CLUSTER, OURS))
    assert cluster["brokerAddrTable"]["broker-a"]["brokerAddrs"] == {"0": SIDECAR, "1": "10.0.0.1:10911"}
    assert cluster["brokerAddrTable"]["broker-b"]["brokerAddrs"] == {"0": "10.0.1.1:10911"}
    assert cluster["clusterAddrTable"] == {"C": ["broker-a", "broker-b"]}


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b'{"brokerDatas":null}',
        b'{"brokerDatas":[null,3]}',
        b'{"brokerDatas":[{"brokerName":"broker-a"}]}',
    ],
)
def test_unexpected_documents_pass_unchanged(body: bytes) -> None:
    assert fastjson.loads(rewritten(body, OURS)) == fastjson.loads(body)


def test_a_body_that_is_no_json_is_an_error() -> None:
    with pytest.raises(CorruptionError):
        rewritten(b"<html>", OURS)


ids = st.dictionaries(
    st.integers(0, 2**40), st.integers(1, 250).map(lambda n: f"10.0.0.{n}:10911"), max_size=6
)


@given(ids)
def test_real_brokers_come_after_us_in_the_same_order(real: dict[int, str]) -> None:
    found = published_addresses({str(number): address for number, address in real.items()}, SIDECAR)
    if not real:
        assert found == {}
        return
    assert found["0"] == SIDECAR
    assert {int(number) - 1: address for number, address in found.items() if number != "0"} == real
    if 0 in real:
        assert found[str(REAL_BROKER_ID)] == real[0]


@given(ids)
def test_publishing_twice_is_publishing_once_more(real: dict[int, str]) -> None:
    """A proxy before a proxy, or a sidecar that also registers as a slave: we are in it once."""
    once = published_addresses({str(number): address for number, address in real.items()}, SIDECAR)
    assert list(published_addresses(once, SIDECAR).values()).count(SIDECAR) == bool(real)


names = st.text(st.characters(blacklist_categories=["Cs"]), min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | names,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner, max_size=3),
)


@given(st.dictionaries(names, values, max_size=4), ids, st.booleans())
def test_foreign_members_survive(others: dict[str, Any], real: dict[int, str], is_strict: bool) -> None:
    table = {str(number): address for number, address in real.items()}
    other = {name: value for name, value in others.items() if name not in ("brokerAddrTable", "brokerDatas")}
    document = {**other, "brokerDatas": [{"brokerName": "broker-b", "brokerAddrs": table}]}
    text = json.dumps(document, ensure_ascii=False)
    if not is_strict:
        for number in real:
            text = text.replace(f'"{number}": "10.', f'{number}:"10.')
    assert fastjson.loads(rewritten(text.encode(), OURS)) == document


def test_a_loopback_address_goes_to_this_host_only() -> None:
    for loopback in ("127.0.0.1:9876", "127.9.9.9:1", "localhost:9876", "[::1]:9876"):
        assert may_dial(loopback, "127.0.0.1:5000")
        assert may_dial(loopback, "::1:5000") and may_dial(loopback, "[::ffff:127.0.0.1]:5000")
        assert not may_dial(loopback, "10.1.1.1:5000") and not may_dial(loopback, "[2001:db8::1]:5000")
    assert may_dial("archive.example:9876", "10.1.1.1:5000") and may_dial(SIDECAR, "127.0.0.1:1")


def test_routes_are_left_alone_only_when_no_topic_is_read_from_the_archive() -> None:
    assert ReadPolicies().reads_anything
    assert not ReadPolicies(ReadPolicy.DISABLE).reads_anything
    assert not ReadPolicies(ReadPolicy.DISABLE, (("a*", ReadPolicy.DISABLE),)).reads_anything
    assert ReadPolicies(ReadPolicy.DISABLE, (("a*", ReadPolicy.FORCE),)).reads_anything
    assert ReadPolicies(patterns=(("a*", ReadPolicy.DISABLE),)).reads_anything
