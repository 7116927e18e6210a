"""The proxy between real connections: clients on one side, a broker and name servers of the test on the other."""

import asyncio
import json
from pathlib import Path

import pytest

from fetcher.policy.read_policy import ReadPolicies, ReadPolicy
from rocketmq_tiered.server.proxy.proxy_handlers import Upstream, relayed
from rocketmq_tiered.server.proxy.proxy_service import ProxyConfig, ProxyService
from rocketmq_tiered.server.wire.request import Request, Response
from tests.server.proxy.proxy_client import ADVERTISED, ROUTE, Client
from tests.server.proxy.service_scene import BROKER_VERSION, Peer, scene, until
from tiered.remoting.command import RemotingCommand, SerializeType
from tiered.settings.sections import ServeSettings


def addresses(answer: RemotingCommand) -> dict[str, str]:
    found: dict[str, str] = json.loads(answer.body)["brokerDatas"][0]["brokerAddrs"]
    return found


@pytest.mark.parametrize("kind", list(SerializeType))
async def test_a_relayed_request_arrives_whole_and_its_answer_too(kind: SerializeType) -> None:
    async with scene() as made:
        client = await made.client()
        sent = RemotingCommand(
            310,
            4711,
            language="GO",
            version=441,
            ext_fields={"a": "T", "i": "p\x01q"},
            body=b"hello",
            serialize_type=kind,
        )
        await client.send(sent)
        answer = await client.receive()
        assert (answer.code, answer.opaque, answer.flag & 1, answer.serialize_type) == (0, 4711, 1, kind)
        assert (answer.ext_fields, answer.body, answer.remark) == ({"code": "310"}, b"hello", "said so")
        assert answer.version == BROKER_VERSION
        (seen,) = made.broker.seen
        assert (seen.ext_fields, seen.body, seen.language, seen.version) == (
            sent.ext_fields,
            sent.body,
            "GO",
            441,
        )


async def test_every_client_has_its_own_connection_to_the_broker_and_it_ends_with_it() -> None:
    async with scene() as made:
        one, two = await made.client(), await made.client()
        for client in (one, two, one):
            assert (await client.ask(38, consumerGroup="g")).code == 0
        assert len(made.broker.connections) == 2
        assert made.service.status().broker_connections == 2
        one.writer.close()
        assert made.broker.server is not None
        await until(lambda: len(made.broker.server.connections) == 1)  # type: ignore[union-attr]
        assert (await two.ask(38, consumerGroup="g")).code == 0


async def test_one_way_requests_go_up_once_and_unanswered() -> None:
    async with scene() as made:
        client = await made.client()
        await client.send(RemotingCommand(15, 3, flag=2, ext_fields={"commitOffset": "5"}))
        assert (await client.ask(14)).opaque == 7
        assert made.broker.codes() == [15, 14]
        assert made.broker.seen[0].is_oneway


async def test_requests_of_the_broker_go_down_and_their_answers_up() -> None:
    async with scene() as made:
        one, two = await made.client(), await made.client()
        for client in (one, two):
            await client.ask(38)
        answers: list[RemotingCommand] = []
        for number, connection in enumerate(made.broker.connections):
            connection.on_answer = answers.append
            connection.forward(RemotingCommand(307, 900, ext_fields={"for": str(number)}))
            connection.push(40, {"consumerGroup": "g"})
        for number, client in enumerate((one, two)):
            asked, notice = await client.receive(), await client.receive()
            assert (asked.code, asked.ext_fields) == (307, {"for": str(number)})
            assert (notice.code, notice.is_oneway) == (40, True)
            await client.send(RemotingCommand(0, asked.opaque, flag=1, body=b"%d" % number))
            await client.send(RemotingCommand(0, asked.opaque + 50, flag=1, body=b"nobody asked"))
        await until(lambda: len(answers) == 2)
        assert sorted((answer.opaque, answer.body) for answer in answers) == [(900, b"0"), (900, b"1")]


@pytest.mark.parametrize("code", [310, 14])
async def test_a_request_lost_with_the_broker_is_not_repeated_and_its_client_is_cut_off(code: int) -> None:
    async with scene(waits=frozenset({code})) as made:
        client, other = await made.client(), await made.client()
        await other.ask(38)
        await client.send(RemotingCommand(code, 1))
        await until(lambda: code in made.broker.codes())
        await made.broker.stop()
        with pytest.raises((EOFError, ConnectionError)):
            await client.receive()
        await made.broker.start()
        await asyncio.sleep(0.6)
        assert (await other.ask(38)).code == 0, "nothing of this one was lost: it continues"
        assert made.broker.codes().count(code) == 1


async def test_without_a_broker_clients_get_a_retryable_error_and_never_an_offset() -> None:
    async with scene() as made:
        await made.broker.stop()
        client = await made.client()
        assert (await client.ask(38)).code == 2
        assert (await client.ask(310, b"m")).code == 14, "it was not sent: producers send again"
        await client.send(RemotingCommand(15, 3, flag=2, ext_fields={"commitOffset": "5"}))
        assert (await client.ask(105)).code == 0
        await client.send(RemotingCommand(14, 5))
        with pytest.raises((EOFError, ConnectionError)):
            await client.receive()
        assert set(made.service.counters.failed) == {"BUSY", "NOT_AVAILABLE", "CLOSE"}


async def test_routes_name_us_until_nothing_is_read_from_the_archive() -> None:
    async with scene() as made:
        client = await made.client()
        assert addresses(await client.ask(105, topic="T")) == {"0": ADVERTISED, "1": "127.0.0.1:10911"}
        made.service.apply(ReadPolicies(ReadPolicy.DISABLE))
        assert addresses(await client.ask(105, topic="T")) == {"0": "127.0.0.1:10911"}
        made.names[0].answers[105] = Response(17, remark="No topic route info")
        missing = await client.ask(105, topic="U")
        assert (missing.code, missing.remark, missing.body) == (17, "No topic route info", b"")


@pytest.mark.parametrize(
    ("host", "acl_file", "has_plain_accounts"),
    [("0.0.0.0", "acl.yml", True), ("127.0.0.1", "acl.yml", False), ("0.0.0.0", "", False)],
)
async def test_accounts_without_tls_are_a_warning_unless_clients_are_on_this_host(
    host: str, acl_file: str, has_plain_accounts: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = tmp_path / "acl.yml"
    rules.write_text("accounts: [{accessKey: RocketMQ, secretKey: '12345678'}]")

    settings = ServeSettings(bind=f"{host}:0", acl_file=str(rules) if acl_file else "")
    service = ProxyService(
        ProxyConfig("b", "127.0.0.1:1", ["127.0.0.1:2"], ADVERTISED), settings, ReadPolicies()
    )
    await service.start()
    assert service.status().has_plain_accounts is has_plain_accounts
    await service.close(drain_s=0)
    assert ("set serve.tls_certificate" in caplog.text) is has_plain_accounts


async def test_another_name_server_answers_and_changes_go_to_all() -> None:
    async with scene(name_servers=2) as made:
        client = await made.client()
        assert (await client.ask(216, topic="T")).code == 0
        assert [name.codes() for name in made.names] == [[216], [216]]
        await made.names[0].stop()
        assert addresses(await client.ask(105, topic="T"))["0"] == ADVERTISED
        assert (await client.ask(216, topic="T")).code == 2
        await made.names[1].stop()
        assert (await client.ask(105, topic="T")).code == 2
        await made.names[0].start()
        await asyncio.sleep(0.6)
        assert (await client.ask(206)).code == 0


async def test_brokers_cannot_register_through_us() -> None:
    async with scene() as made:
        client = await made.client()
        for code in (103, 104, 904, 906):
            assert (await client.ask(code)).code == 16
        assert made.broker.codes() == made.names[0].codes() == []


def heartbeat(consumers: bool) -> bytes:
    subscription = {"topic": "T", "subString": "a>1", "expressionType": "SQL92", "subVersion": 5}
    groups = [{"groupName": "g", "subscriptionDataSet": [subscription]}] if consumers else []
    return json.dumps(
        {"clientID": "c1", "consumerDataSet": groups, "producerDataSet": [{"groupName": "p"}]}
    ).encode()


async def test_heartbeats_of_consumers_are_noted_those_of_producers_relayed() -> None:
    async with scene() as made:
        consumer, producer = await made.client(), await made.client()
        answer = await consumer.ask(34, heartbeat(consumers=True))
        assert (answer.code, answer.version) == (0, BROKER_VERSION)
        assert 34 not in made.broker.codes()
        (group,) = made.service.clients.groups()
        found = group.subscriptions["T"]
        assert (found.expression, found.expression_type) == ("a>1", "SQL92")
        assert [(group.name, group.members) for group in made.service.status().groups] == [("g", 1)]
        assert (await producer.ask(34, heartbeat(consumers=False))).code == 0
        assert made.broker.codes().count(34) == 1
        consumer.writer.close()
        await until(lambda: made.service.status().groups == ())
        await made.broker.stop()
        with pytest.raises((EOFError, ConnectionError)):
            await producer.receive()


async def test_merged_codes_wait_for_the_archive_and_are_then_answered_by_their_handlers() -> None:
    async def pull(request: Request, upstream: Upstream) -> Response:
        asked = RemotingCommand(31, 99, ext_fields={"topic": request.text("topic")})
        return relayed(await upstream.call(asked, 5))

    async with scene() as made:
        client = await made.client()
        assert (await client.ask(11, topic="T")).code == 2
        assert made.broker.seen == []
        made.service.open_archive({11: pull})
        assert (await client.ask(11, topic="T")).ext_fields == {"code": "31"}
        assert (await client.ask(361, topic="T")).ext_fields == {"code": "361"}, (
            "relayed: only the broker answers it"
        )
        await made.broker.stop()
        assert (await client.ask(11, topic="T")).code == 2


async def test_status_tells_what_each_group_reads() -> None:
    async def pull(request: Request, upstream: Upstream) -> Response:
        is_archived = request.number("queueOffset") < 100
        ext = {"nextBeginOffset": "32", "maxOffset": "100", "minOffset": "0", "suggestWhichBrokerId": "0"}
        return Response(0, ext, (b"m",), version=None if is_archived else BROKER_VERSION)

    async with scene(handlers={11: pull}) as made:
        client = await made.client()
        await client.ask(34, heartbeat(consumers=True))
        for offset in ("0", "32", "100"):
            await client.ask(11, topic="T", consumerGroup="g", queueId="3", queueOffset=offset)
        (reading,) = made.service.status().groups
        assert (reading.name, reading.members) == ("g", 1)
        assert (reading.archive_pulls, reading.broker_pulls, reading.behind_messages) == (2, 1, 68)


async def test_the_logs_first_message_is_not_returned_through_the_broker() -> None:
    """A broker without its first file takes offset 0 for the first message it has: another one would come again."""
    async with scene() as made:
        client = await made.client()
        assert (await client.ask(36, group="g", originTopic="T", offset="0")).code == 1
        assert (await client.ask(36, group="g", originTopic="T", offset="180")).code == 0
        assert [command.ext_fields["offset"] for command in made.broker.seen] == ["180"]


async def test_a_loopback_address_is_not_given_to_other_hosts() -> None:
    settings = ServeSettings(bind="127.0.0.1:0", proxy_from=("127.0.0.1",))
    names = Peer({105: Response(body=(json.dumps(ROUTE).encode(),))})
    place = ProxyConfig("b", "127.0.0.1:1", [await names.start()], ADVERTISED)
    service = ProxyService(place, settings, ReadPolicies())
    _, port = await service.start()
    client = Client(*await asyncio.open_connection("127.0.0.1", port))
    client.writer.write(b"PROXY TCP4 10.1.2.3 10.9.9.9 5555 9876\r\n")
    assert addresses(await client.ask(105, topic="T")) == {"0": "127.0.0.1:10911"}
    client.writer.close()
    await service.close(drain_s=0)
    await names.stop()
