"""When to register, as what, and how soon again.

The master beside a slave, where it checks requests for its configuration.
"""

import asyncio
import json
import zlib
from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rocketmq_tiered.server.security.authorizer import is_signed
from rocketmq_tiered.server.slave.master_monitor import MasterMonitor
from rocketmq_tiered.server.slave.registration import (
    RETRY_MAX_S,
    Claims,
    Listing,
    RegistrationProgress,
    RegistrationState,
    SlaveConfig,
    claims_in,
    claims_refusal,
    listing_refusal,
    master_refusal,
    parse_listing,
    register_command,
    unregister_command,
    wait_s,
)
from tests.server.slave.master_double import MasterDouble
from tests.server.slave.name_server_double import BROKER, CLUSTER
from tiered.errors import CorruptionError
from tiered.remoting.command import RemotingCommand, encode
from tiered.remoting.credentials import Credentials

OURS = "10.0.0.5:10931"
PLACE = SlaveConfig(BROKER, "10.0.0.1:10911", ("10.0.0.9:9876",), OURS, 7)
MASTER = Listing({0: "10.0.0.1:10911"}, CLUSTER)


def test_it_registers_beside_a_master_under_a_free_id_and_again_under_its_own() -> None:
    for addresses in (
        {},
        {1: "10.0.0.2:1", 6: "10.0.0.3:1"},
        {7: OURS},
        {7: OURS, 8: "10.0.0.4:1"},
    ):
        listed = replace(MASTER, addresses={**MASTER.addresses, **addresses})
        assert listing_refusal(listed, PLACE, was_registered=False) is None, addresses


@pytest.mark.parametrize(
    ("listed", "why"),
    [
        (Listing({0: "10.0.0.1:10911", 7: "10.0.0.2:1"}, CLUSTER), "belongs to 10.0.0.2:1"),
        (Listing({0: "10.0.0.1:10911", 8: "10.0.0.2:1"}, CLUSTER), "a slave with id 8"),
        (Listing({0: "10.0.0.1:10911"}, CLUSTER, is_acting=True), "enableSlaveActingMaster"),
        (Listing({0: OURS}, CLUSTER), "is listed as id 0"),
        (Listing({0: "10.0.0.1:10911", 2: OURS}, CLUSTER), "is listed as id 2"),
        (Listing({0: "10.0.0.1:10911", 7: OURS, 9: OURS}, CLUSTER), "is listed as id 9"),
        (
            Listing({0: "10.0.0.1:10911"}, CLUSTER, others={OURS: "id 0 of z"}),
            f"{OURS} is listed as id 0 of z",
        ),
        (Listing(others={OURS: "id 2 of z"}), f"{OURS} is listed as id 2 of z"),
        (Listing({1: "10.0.0.2:1"}, CLUSTER), "no master"),
        (Listing(), "no master"),
    ],
)
def test_it_stays_out_where_it_would_do_harm(listed: Listing, why: str) -> None:
    refusal = listing_refusal(listed, PLACE, was_registered=False)
    assert refusal is not None and why in refusal


def test_what_is_another_s_at_one_name_server_is_registered_at_none() -> None:
    """But an id that is ours here stays so: its owner there finds us."""
    fresh, ours = MASTER, replace(MASTER, addresses={**MASTER.addresses, 7: OURS})
    assert claims_refusal(fresh, PLACE, [Claims(), Claims()]) is None
    holder = claims_in(Listing({7: "10.0.0.2:1"}), PLACE)
    assert "belongs to 10.0.0.2:1" in (claims_refusal(fresh, PLACE, [Claims(), holder]) or "")
    assert claims_refusal(ours, PLACE, [holder]) is None and claims_in(ours, PLACE) == Claims()
    namesake = claims_in(Listing(others={OURS: "id 0 of z"}), PLACE)
    for listed in (fresh, ours):
        assert f"{OURS} is id 0 of z" in (claims_refusal(listed, PLACE, [namesake]) or "")


def test_a_name_server_that_has_just_started_need_not_know_the_master_yet() -> None:
    assert listing_refusal(Listing(), PLACE, was_registered=True) is None


@given(
    st.dictionaries(st.integers(0, 20), st.sampled_from([OURS, "a:1", "b:1", "c:1"])),
    st.integers(1, 20),
    st.booleans(),
    st.dictionaries(st.sampled_from([OURS, "d:1"]), st.just("id 0 of z")),
)
def test_the_id_or_address_of_another_process_is_never_taken(
    addresses: dict[int, str], broker_id: int, was_registered: bool, others: dict[str, str]
) -> None:
    place, listed = replace(PLACE, broker_id=broker_id), Listing(addresses, CLUSTER, others=others)
    if listing_refusal(listed, place, was_registered=was_registered) is None:
        assert OURS not in others
        assert addresses.get(broker_id, OURS) == OURS
        assert all(number == broker_id for number, at in addresses.items() if at == OURS), (
            "it would lose that one"
        )
    if unregister_command(place, listed) is not None:
        assert addresses[broker_id] == OURS


@pytest.mark.parametrize("name", ["enableSlaveActingMaster", "enableControllerMode", "enableDLegerCommitLog"])
def test_clusters_whose_slaves_can_become_master_have_no_place(name: str) -> None:
    assert name in (master_refusal({name: "true"}, BROKER) or "")
    assert master_refusal({name: "false", "brokerRole": "SYNC_MASTER"}, BROKER) is None
    assert "is a slave" in (master_refusal({"brokerRole": "SLAVE"}, BROKER) or "")


def test_another_broker_s_master_is_none_to_stand_beside() -> None:
    assert master_refusal({"brokerName": BROKER}, BROKER) is None
    assert "is broker-z, not" in (master_refusal({"brokerName": "broker-z"}, BROKER) or "")


def test_a_registration_has_no_topics_a_right_checksum_and_says_nothing_of_acting_masters() -> None:
    command = register_command(PLACE, replace(MASTER, zone="z1"))
    wrapper = orjson.loads(command.body)["topicConfigSerializeWrapper"]
    assert wrapper["topicConfigTable"] == {}
    assert wrapper["dataVersion"] == {"counter": 0, "stateVersion": 0, "timestamp": 0}
    assert command.ext_fields == {
        "brokerName": BROKER,
        "brokerAddr": OURS,
        "clusterName": CLUSTER,
        "brokerId": "7",
        "haServerAddr": "10.0.0.5:10932",
        "bodyCrc32": str(zlib.crc32(command.body) & 0x7FFFFFFF),
        "compressed": "false",
        "__ZONE_NAME": "z1",
    }
    assert "__ZONE_NAME" not in register_command(PLACE, MASTER).ext_fields


def test_what_name_servers_of_both_lines_list_is_understood() -> None:
    old = b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":{0:"m:1",7:"s:1"},"brokerName":"broker-a","cluster":"C"}}}'
    assert parse_listing(old, BROKER) == Listing({0: "m:1", 7: "s:1"}, "C")
    new = old.replace(b'"cluster":"C"', b'"cluster":"C","enableActingMaster":true,"zoneName":"z"')
    assert parse_listing(new, BROKER) == Listing({0: "m:1", 7: "s:1"}, "C", "z", True)
    assert parse_listing(b"{}", BROKER) == parse_listing(b"", BROKER) == Listing()
    assert parse_listing(old, "other") == Listing(
        others={"m:1": "id 0 of broker-a", "s:1": "id 7 of broker-a"}
    )
    for broken in (b"[1]", b'{"brokerAddrTable":{"broker-a":{"brokerAddrs":{"x":"m"}}}}', b"{"):
        with pytest.raises(CorruptionError):
            parse_listing(broken, BROKER)


names = st.sampled_from([BROKER, "brokerAddrs", "0", "x"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(names, inner),
    max_leaves=8,
)


@given(
    st.binary(max_size=40) | st.builds(lambda table: json.dumps({"brokerAddrTable": table}).encode(), values)
)
def test_whatever_a_name_server_says_is_a_listing_or_a_corruption(body: bytes) -> None:
    try:
        found = parse_listing(body, BROKER)
    except CorruptionError:
        return
    assert all(isinstance(number, int) and isinstance(at, str) for number, at in found.addresses.items())


def test_after_the_first_registration_comes_a_second_soon_then_one_a_period() -> None:
    once = RegistrationProgress().registered()
    assert wait_s(once, 30) == 10 and wait_s(once.registered(), 30) == 30
    assert wait_s(once, 2) == wait_s(once.registered(), 2) == 2
    lost = once.registered().failed("gone")
    assert wait_s(lost, 30) == 0.5 and wait_s(lost.registered(), 30) == 10
    assert wait_s(RegistrationProgress().refused("taken"), 30) == 10


@given(st.integers(1, 10_000), st.floats(1, 60))
def test_a_name_server_that_is_away_gets_a_request_every_few_seconds(failures: int, period_s: float) -> None:
    assert (
        0.5
        <= wait_s(RegistrationProgress(RegistrationState.UNREACHABLE, failures=failures), period_s)
        <= RETRY_MAX_S
    )


OWN = Credentials("the-sidecar", "a secret")


class GuardedMaster(MasterDouble):
    """Answers only who signs with the secret of OWN."""

    def asked(self, command: RemotingCommand, writer: asyncio.StreamWriter) -> None:
        if is_signed(command.ext_fields, command.body, OWN.secret_key):
            super().asked(command, writer)
        else:
            writer.write(encode(replace(RemotingCommand(16, 0), opaque=command.opaque, flag=1)))


@pytest.mark.parametrize(
    ("credentials", "refusal"),
    [
        (OWN, None),
        (None, "broker.credentials_file"),
        (Credentials(OWN.access_key, "another"), "broker.credentials_file"),
    ],
)
async def test_requests_to_it_are_signed(credentials: Credentials | None, refusal: str | None) -> None:
    master = GuardedMaster(brokerName="b", slaveReadEnable="true")
    await master.start()
    place = SlaveConfig("b", master.address, ("127.0.0.1:1",), "127.0.0.1:2", 7)
    watch = MasterMonitor(place, None, credentials)
    watch.start()
    async with asyncio.timeout(5):
        await watch.answered()
    found = watch.refusal()
    assert found is None if refusal is None else refusal in str(found)
    assert watch.redirects() is (True if refusal is None else None)
    await watch.close()
    await master.stop()
