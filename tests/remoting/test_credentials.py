"""Accounts for requests to brokers: their file, their signature, and that neither shows a secret."""

from pathlib import Path

import pytest

from rocketmq_tiered.server.security.authorizer import is_signed
from tests.remoting.scripted_peer import peer, reply
from tiered.errors import UnavailableError, UsageError
from tiered.remoting.client import BrokerClient
from tiered.remoting.command import RemotingCommand, encode
from tiered.remoting.credentials import Credentials, read_credentials

SECRET = "not to be seen"
OWN = Credentials("the-sidecar", SECRET)


def written(directory: Path, text: str) -> Path:
    path = directory / "tools.yml"
    path.write_text(text)
    return path


def test_a_file_as_mqadmin_has_it(tmp_path: Path) -> None:
    text = "accessKey: the-sidecar\nsecretKey: 12345678\n"
    assert read_credentials(written(tmp_path, text)) == Credentials("the-sidecar", "12345678")
    found = read_credentials(written(tmp_path, text + "securityToken: t\n"))
    assert found.signed({})["SecurityToken"] == "t"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "accessKey: a",
        f"accessKey: a\nsecretKey: [{SECRET}]",
        f"accessKey: a\nsecretKey: {SECRET}: x",
        "\0",
        "accessKey: a\nsecretKey: ''",
    ],
)
def test_what_names_no_account_is_an_error_that_quotes_nothing(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match=r"broker\.credentials_file") as raised:
        read_credentials(written(tmp_path, text))
    assert SECRET not in str(raised.value)
    assert raised.value.__cause__ is None


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read"):
        read_credentials(tmp_path / "none.yml")


def test_a_signature_is_what_servers_verify() -> None:
    signed = OWN.signed({"topic": "t", "queueId": "3"}, b"body")
    assert is_signed(signed, b"body", SECRET)
    assert not is_signed(signed, b"other", SECRET) and not is_signed(signed, b"body", "another")
    assert is_signed(OWN.signed({}), b"", SECRET)


def test_nothing_shows_the_secret() -> None:
    assert (
        SECRET not in repr(OWN) and SECRET not in str(OWN) and SECRET not in repr(BrokerClient("h:1", 1, OWN))
    )


def test_every_question_is_signed() -> None:
    def checked(request: RemotingCommand) -> bytes:
        is_right = is_signed(request.ext_fields, request.body, SECRET)
        return reply(request, b'{"table":{}}') if is_right else reply(request, code=16)

    with peer(checked) as address:
        client = BrokerClient(address, 5, OWN)
        assert client.runtime_info() == {}
        client.close()


@pytest.mark.parametrize(
    ("code", "remark"), [(16, "no"), (1, "org.apache.rocketmq.acl.common.AclException: No accessKey")]
)
def test_a_refusal_names_what_to_set(code: int, remark: str) -> None:
    def refused(request: RemotingCommand) -> bytes:
        return encode(RemotingCommand(code, request.opaque, flag=1, remark=remark))

    with peer(refused) as address:
        client = BrokerClient(address, 5)
        with pytest.raises(
            UnavailableError, match=r"refuses to report its offsets.*broker\.credentials_file"
        ):
            client.runtime_info()
        client.close()
