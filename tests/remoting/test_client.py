"""The broker client against a scripted peer on a real socket: answers, silence, nonsense, restarts."""

import socket
from collections.abc import Callable

import pytest

from tests.remoting.scripted_peer import peer, reply
from tiered.errors import UnavailableError
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand, RequestCode


def test_runtime_information_and_tables_in_fastjsons_dialect() -> None:
    bodies = {
        RequestCode.GET_BROKER_RUNTIME_INFO: b'{"table":{"commitLogMaxOffset":"123","dispatchBehindBytes":"0"}}',
        RequestCode.GET_BROKER_CONFIG: b"brokerRole=ASYNC_MASTER\nlistenPort=1\n",
    }
    with peer(lambda request: reply(request, bodies[RequestCode(request.code)])) as address:
        client = BrokerClient(address, 5)
        assert client.runtime_info()["commitLogMaxOffset"] == "123"
        assert client.broker_config() == {"brokerRole": "ASYNC_MASTER", "listenPort": "1"}
        client.close()


def test_the_confirm_offset_is_the_low_water_mark_over_replicas_in_sync() -> None:
    body = (
        b'{"master":true,"masterCommitLogMaxOffset":900,"haConnectionInfo":['
        b'{"inSync":true,"slaveAckOffset":700},{"inSync":false,"slaveAckOffset":10},{"inSync":true,"slaveAckOffset":800}]}'
    )
    with peer(lambda request: reply(request, body)) as address:
        client = BrokerClient(address, 5)
        assert client.confirm_offset() == 700
        client.close()


def test_a_code_the_broker_does_not_know_is_none() -> None:
    with peer(lambda request: reply(request, code=3)) as address:
        client = BrokerClient(address, 5)
        assert client.confirm_offset() is None
        assert client.topics() is None
        client.close()


@pytest.mark.parametrize("bad", [b"", b"\xff\xff\xff\xff", b"\x00\x00\x00\x08\x00\x00\x00\x02{}xx"])
def test_hang_ups_and_nonsense_are_unavailable_and_the_next_call_connects_again(bad: bytes) -> None:
    answers = [bad, None]

    def answer(request: RemotingCommand) -> bytes:
        scripted = answers.pop(0)
        return reply(request, b'{"table":{}}') if scripted is None else scripted

    with peer(answer) as address:
        client = BrokerClient(address, 5)
        with pytest.raises(UnavailableError):
            client.runtime_info()
        assert client.runtime_info() == {}
        client.close()


@pytest.mark.parametrize(
    ("ask", "body"),
    [
        (BrokerClient.runtime_info, b'{"table":[1]}'),
        (BrokerClient.topics, b'{"topicConfigTable":"x"}'),
        (BrokerClient.confirm_offset, b'{"masterCommitLogMaxOffset":"x"}'),
        (BrokerClient.confirm_offset, b'{"masterCommitLogMaxOffset":1,"haConnectionInfo":5}'),
        (BrokerClient.confirm_offset, b'{"haConnectionInfo":["x"]}'),
        (BrokerClient.confirm_offset, b'{"haConnectionInfo":[{"inSync":true,"slaveAckOffset":"9"}]}'),
    ],
)
def test_documents_of_another_form_are_unavailable(
    ask: Callable[[BrokerClient], object], body: bytes
) -> None:
    """Whatever server answers there: another exception would end the uploader as an internal error."""
    with peer(lambda request: reply(request, body)) as address:
        client = BrokerClient(address, 5)
        with pytest.raises(UnavailableError, match="malformed response"):
            ask(client)
        client.close()


def test_a_configuration_is_read_whatever_its_encoding() -> None:
    with peer(lambda request: reply(request, b"brokerName=a\nowner=M\xfcller\n")) as address:
        client = BrokerClient(address, 5)
        config = client.broker_config() or {}
        assert config["brokerName"] == "a"
        client.close()


def test_silence_ends_at_the_time_limit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = BrokerClient(f"127.0.0.1:{server.getsockname()[1]}", 0.2)
        with pytest.raises(UnavailableError, match="does not answer"):
            client.runtime_info()


@pytest.mark.parametrize("host", ["broker..example", "b" * 64, ".example"])
def test_a_name_that_none_can_have_is_unavailable(host: str) -> None:
    """Anything else would end the uploader as an internal error."""
    with pytest.raises(UnavailableError, match="does not answer"):
        BrokerClient(f"{host}:10911", 1).runtime_info()


def test_a_broker_that_hangs_up_at_once_may_want_tls_and_one_that_answered_does_not() -> None:
    answers = [b"", reply(RemotingCommand(1, 2), b'{"table":{}}'), b""]
    with peer(lambda request: answers.pop(0)) as address:
        client = BrokerClient(address, 5)
        with pytest.raises(UnavailableError, match=r"closed the connection; .*require TLS"):
            client.runtime_info()
        assert client.runtime_info() == {}
        with pytest.raises(UnavailableError) as raised:
            client.runtime_info()
        assert "TLS" not in str(raised.value)


def test_a_busy_broker_knows_the_code_and_does_not_answer_now() -> None:
    """Else one of 5.x counted as one that keeps no replicas, or that has no configuration."""
    with peer(lambda request: reply(request, code=2)) as address:
        client = BrokerClient(address, 5)
        for ask in (client.confirm_offset, client.topics, client.broker_config):
            with pytest.raises(UnavailableError, match="busy"):
                ask()
        client.close()
