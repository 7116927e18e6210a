"""The slave's port between clients, a master and a name server: who answers what, and what is said without a master."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rocketmq_tiered.server.backend.pull_handlers import pull_response
from rocketmq_tiered.server.proxy.proxy_handlers import Upstream
from rocketmq_tiered.server.proxy.upstream import InflightLimit, LinkEvents, RemotingUpstream
from rocketmq_tiered.server.slave.registration import RegistrationState, SlaveConfig
from rocketmq_tiered.server.slave.slave_service import (
    ACKNOWLEDGED,
    MEMBERS_COMPLETE_S,
    READ_ONLY,
    RELAYED,
    SlaveOptions,
    SlaveService,
)
from rocketmq_tiered.server.wire.request import Request, Response
from tests.server.slave.master_double import VERSION, MasterDouble
from tests.server.slave.name_server_double import BROKER, CLUSTER, NameServerDouble
from tests.server.slave.until import until
from tests.server.spelled_bodies import ACL_1, ACL_5, SECRET, respelled
from tiered.clock import Clock
from tiered.errors import UnansweredError
from tiered.remoting.command import RemotingCommand, RequestCode
from tiered.remoting.credentials import signature_of
from tiered.settings.sections import ServeSettings

ADVERTISED = "127.0.0.1:10931"
HEARTBEAT = {
    "clientID": "c1",
    "consumerDataSet": [{"groupName": "g", "subscriptionDataSet": [{"topic": "t"}]}],
    "producerDataSet": [],
}


async def pulled(request: Request, upstream: Upstream) -> Response:
    return pull_response(0, 5, 0, 9, "FOUND", (b"body",))


@dataclass
class Client:
    """A connection to the slave; ``pushed``: requests from the slave."""

    link: RemotingUpstream
    pushed: list[RemotingCommand] = field(default_factory=list)

    async def ask(self, code: int, document: object = None, **fields: str) -> RemotingCommand:
        body = b"" if document is None else json.dumps(document).encode()
        return await self.link.call(RemotingCommand(code, 0, ext_fields=fields, body=body), 5)


@dataclass
class Stage:
    """``at_s``: the service's clock, moved by hand."""

    master: MasterDouble
    name_server: NameServerDouble
    service: SlaveService
    address: str
    at: list[float]
    clients: list[Client] = field(default_factory=list)

    def client(self) -> Client:
        pushed: list[RemotingCommand] = []
        made = Client(
            RemotingUpstream(self.address, InflightLimit(), LinkEvents(on_request=pushed.append)), pushed
        )
        self.clients.append(made)
        return made

    async def without_master(self) -> None:
        await until(lambda: self.service.master.is_available)
        await self.master.stop()
        await until(lambda: not self.service.master.is_available)


@asynccontextmanager
async def on_stage(
    master: MasterDouble | None = None,
    file: dict[str, str] | None = None,
    *,
    is_open: bool = True,
    acl_file: str = "",
) -> AsyncIterator[Stage]:
    name_server, master = NameServerDouble(), master or MasterDouble()
    await master.start()
    await name_server.start()
    place = SlaveConfig(BROKER, master.address, (name_server.address,), ADVERTISED, 7)
    at = [1000.0]
    side = SlaveOptions(place, CLUSTER, ServeSettings(bind="127.0.0.1:0", acl_file=acl_file), 0.05, file)
    service = SlaveService(side, Clock(monotonic_s=lambda: at[0]))
    host, port = await service.start()
    if is_open:
        service.open_archive({11: pulled})
    stage = Stage(master, name_server, service, f"{host}:{port}", at)
    try:
        yield stage
    finally:
        for client in stage.clients:
            client.link.close()
        await service.close(0.1)
        assert name_server.addresses.get(7) is None
        await name_server.stop()
        await master.stop()


@pytest.fixture
async def stage() -> AsyncIterator[Stage]:
    async with on_stage() as made:
        yield made


def stand(stage: Stage) -> tuple[RegistrationState, str]:
    ((_, text),) = stage.service.status().name_servers
    state, _, why = text.partition(": ")
    return RegistrationState(state), why


async def test_it_registers_when_the_archive_is_open_and_not_before() -> None:
    async with on_stage(is_open=False) as stage:
        await until(lambda: stage.service.master.is_available)
        await asyncio.sleep(0.1)
        assert stage.name_server.seen == []
        assert (await stage.client().ask(11)).code == 2, "come again"
        stage.service.open_archive({11: pulled})
        await until(lambda: stage.name_server.addresses.get(7) == ADVERTISED)


@pytest.mark.parametrize("is_answered", [True, False])
async def test_it_stays_out_of_clusters_with_acting_masters(is_answered: bool) -> None:
    """As the master tells, or else its file."""

    master = MasterDouble(enableSlaveActingMaster="true")
    file = None
    if not is_answered:
        master.answers[26] = RemotingCommand(1, 0, remark="AclException")
        file = {"enableSlaveActingMaster": "true"}
    async with on_stage(master, file) as stage:
        await until(lambda: stand(stage)[0] is RegistrationState.REFUSED)
        assert "enableSlaveActingMaster" in stand(stage)[1] and stage.name_server.codes() == []


async def test_without_any_word_of_the_configuration_it_stays_out_and_says_what_to_do() -> None:
    master = MasterDouble()
    master.answers[26] = RemotingCommand(1, 0, remark="AclException")
    async with on_stage(master) as stage:
        await until(lambda: stand(stage)[0] is RegistrationState.REFUSED)
        assert "broker.conf_path" in stand(stage)[1]


@pytest.mark.parametrize("is_answered", [True, False])
async def test_a_master_that_waits_for_it_as_a_replica_gets_it_out_of_the_way(is_answered: bool) -> None:
    """Where it does not tell its configuration its file may be out of date."""

    master = MasterDouble()
    if not is_answered:
        master.answers[26] = RemotingCommand(1, 0, remark="AclException")
    async with on_stage(master, None if is_answered else {"brokerRole": "ASYNC_MASTER"}) as stage:
        await until(lambda: stage.name_server.addresses.get(7) == ADVERTISED)
        if is_answered:
            stage.master.answers[26] = RemotingCommand(0, 0, body=b"enableSlaveActingMaster=true\n")
        assert (await stage.client().ask(906)).code == 3
        await until(lambda: 7 not in stage.name_server.addresses)
        await asyncio.sleep(0.2)
        assert stand(stage)[0] is RegistrationState.REFUSED and 7 not in stage.name_server.addresses


async def test_only_the_master_ends_slave_mode(stage: Stage) -> None:
    """Any process that reaches the port can send such a request, at any rate."""

    await until(lambda: stage.name_server.addresses.get(7) == ADVERTISED)
    client, looks = stage.client(), len(stage.name_server.seen)
    for _ in range(200):
        assert (await client.ask(906)).code == 3
    await until(lambda: sum(command.code == 26 for command in stage.master.seen) >= 2)
    await asyncio.sleep(0.1)
    assert stage.service.master.refusal() is None
    assert stand(stage)[0] is RegistrationState.REGISTERED and stage.name_server.addresses[7] == ADVERTISED
    assert sum(command.code == 26 for command in stage.master.seen) <= 4
    assert len(stage.name_server.seen) - looks < 200, "only what every round asks"


async def test_pulls_are_answered_heartbeats_noted_and_neither_reaches_the_master(stage: Stage) -> None:
    await until(lambda: stage.service.master.is_available)
    client = stage.client()
    found = await client.ask(34, HEARTBEAT)
    assert (found.code, found.version) == (0, VERSION), "consumers refuse SQL92 to an old version"
    assert (await client.ask(11, topic="t", queueId="0", consumerGroup="g")).body == b"body"
    assert [group.name for group in stage.service.clients.groups()] == ["g"]
    (reading,) = stage.service.status().groups
    assert (reading.name, reading.archive_pulls) == ("g", 1)
    assert (await client.ask(35, clientID="c1", consumerGroup="g")).code == 0
    assert stage.service.clients.group("g") is None
    assert stage.master.codes() == [] and client.pushed == []


async def test_what_is_the_master_s_is_its_answer(stage: Stage) -> None:
    for code in sorted(RELAYED):
        stage.master.answers[code] = RemotingCommand(0, 0, ext_fields={"offset": "17"})
        found = await stage.client().ask(code, consumerGroup="g")
        assert (found.code, found.ext_fields, found.version) == (0, {"offset": "17"}, VERSION)
    assert stage.master.codes() == sorted(RELAYED)


async def test_nothing_is_written_through_it(stage: Stage) -> None:
    client = stage.client()
    for change in sorted(READ_ONLY):
        assert (await client.ask(change, {})).code == 16, change
    for change in sorted(ACKNOWLEDGED):
        assert (await client.ask(change)).code == 0, "or mqadmin would not continue with the next broker"
    for code in (41, 42, 60, 103, 104, 105, 106, 400, 401, 907, 200_050, 12_345):
        assert (await client.ask(code)).code == 3, code
    assert json.loads((await client.ask(43)).body) == {"offsetTable": {}}
    assert stage.master.codes() == []


async def test_tools_see_a_slave(stage: Stage) -> None:
    client = stage.client()
    assert b"brokerRole=SLAVE\n" in (await client.ask(26)).body
    assert b"brokerId=7\n" in (await client.ask(26)).body
    assert json.loads((await client.ask(28)).body)["table"]["putTps"] == "0.0 0.0 0.0"


async def test_without_the_master_no_offset_is_returned_and_none_taken(stage: Stage) -> None:
    """A 4.9 client takes each error code for "no offset yet" and begins at the start; it retries closed connections."""

    await stage.without_master()
    client = stage.client()
    with pytest.raises(UnansweredError):
        await client.ask(14, consumerGroup="g", topic="t", queueId="0")
    client = stage.client()
    commit = RemotingCommand(
        15,
        0,
        flag=2,
        ext_fields={"consumerGroup": "g", "topic": "t", "queueId": "0", "commitOffset": "5"},
    )
    await client.link.send(commit)
    await until(lambda: stage.service.counters.commits_dropped == 1)
    assert (await client.ask(351, topic="t")).code == 2
    await stage.master.start(int(stage.master.address.rpartition(":")[2]))
    await until(lambda: stage.service.master.is_available)
    assert 15 not in stage.master.codes(), "an old offset would move the group back"


async def test_without_the_master_members_are_listed_once_all_are_known(stage: Stage) -> None:
    """An incomplete list would give one member the queues of others."""

    client, other = stage.client(), stage.client()
    await until(lambda: stage.name_server.addresses.get(7) == ADVERTISED)
    await client.ask(34, HEARTBEAT)
    await stage.without_master()
    assert (await client.ask(38, consumerGroup="g")).code != 0
    await until(lambda: stage.service._registered_s is not None, 10)
    stage.at[0] += MEMBERS_COMPLETE_S
    assert json.loads((await client.ask(38, consumerGroup="g")).body) == {"consumerIdList": ["c1"]}
    await other.ask(34, {**HEARTBEAT, "clientID": "c2"})
    await until(lambda: [command.code for command in client.pushed] == [40])
    listed = await client.ask(38, consumerGroup="g")
    assert json.loads(listed.body) == {"consumerIdList": ["c1", "c2"]}
    assert (await client.ask(38, consumerGroup="unknown")).code == 1


async def test_a_master_s_restart_is_noticed_and_its_slave_stays_listed(stage: Stage) -> None:
    await until(lambda: stage.name_server.addresses.get(7) == ADVERTISED)
    await stage.without_master()
    before = stage.name_server.codes().count(103)
    await until(lambda: stage.name_server.codes().count(103) > before + 1)
    assert stage.name_server.addresses[7] == ADVERTISED
    assert stage.service.status().redirects is None
    stage.master.answers[26] = replace(stage.master.answers[26], body=b"slaveReadEnable=true\n")
    await stage.master.start(int(stage.master.address.rpartition(":")[2]))
    await until(lambda: stage.service.status().redirects is True)


async def test_an_unforeseen_error_does_not_end_the_watch(stage: Stage) -> None:
    watch, errors = stage.service.master, [RuntimeError("unforeseen")]
    await until(lambda: watch.is_available)

    def fails() -> None:
        if errors:
            raise errors.pop()

    watch.on_refusal = fails
    stage.master.answers[26] = RemotingCommand(0, 0, body=b"brokerRole=SLAVE\n")
    watch.suspect("look again")
    await until(lambda: not watch.is_available)
    await until(lambda: watch.is_available)


@pytest.mark.parametrize("rules", [ACL_1, ACL_5], ids=["ACL 1.0", "ACL 5.x"])
async def test_the_master_gets_no_body_that_it_reads_otherwise_and_copies_nothing_by_offset(
    tmp_path: Path, rules: dict[str, Any]
) -> None:
    path = tmp_path / "rules.yml"
    path.write_text(yaml.safe_dump(rules))
    path.chmod(0o600)

    async with on_stage(acl_file=str(path)) as stage:
        link = stage.client().link

        async def signed(code: int, body: bytes = b"", **fields: str) -> RemotingCommand:
            found = {"AccessKey": "reader1", **fields}
            found["Signature"] = signature_of(found, body, SECRET)
            return await link.call(RemotingCommand(code, 0, ext_fields=found, body=body), 5)

        for code in (RequestCode.CHECK_CLIENT_CONFIG, RequestCode.HEART_BEAT):
            for body in list(respelled(code))[::25]:
                reply = await signed(code, body)
                assert reply.code == 1 and "unknown name" in (reply.remark or "")
        assert not list(stage.service.clients.groups())
        back = {"group": "own", "offset": "777", "delayLevel": "1"}
        assert (await signed(RequestCode.CONSUMER_SEND_MSG_BACK, **back)).code == 16
        assert (await signed(RequestCode.END_TRANSACTION, commitLogOffset="777")).code == 16
        assert not {34, 36, 37, 46} & set(stage.master.codes())
        known = b'{"group":"own","clientId":"c","subscriptionData":{"topic":"own","subString":"*"}}'
        await signed(RequestCode.CHECK_CLIENT_CONFIG, b" " + known)
        assert [one.body for one in stage.master.seen if one.code == 46] == [known]
