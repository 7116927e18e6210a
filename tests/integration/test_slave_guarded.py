"""A broker that checks signatures, and `tiered run` as its slave: what it asks in its own name is signed, too, by an
account that is allowed nothing at all. Moving a group takes rights on that group and topic."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.integration.client_scene import (
    begins_and_ends,
    everything,
    need_clients,
    until,
    wait_for,
)
from tests.integration.slave_scene import Slave, standing
from tests.servers.rocketmq import CLUSTER, checking_signatures, judging_permissions
from tests.servers.running_store import RunningStore
from tiered.catalog.catalog_reader import load
from tiered.remoting.client import BrokerClient, is_refusal
from tiered.remoting.codes import RequestCode
from tiered.remoting.credentials import Credentials

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSIONS = ["5.3.3", pytest.param("4.9.7", marks=pytest.mark.soak)]
CLIENT = Credentials("the-clients", "a secret of theirs")
OWN = Credentials("the-sidecar", "its own secret")
TOOLS_YML = 'accessKey: {0.access_key}\nsecretKey: "{0.secret_key}"\n'
GROUP = "G-pinned"
PLAIN_ACL = f"""globalWhiteRemoteAddresses:
accounts:
- {{accessKey: {CLIENT.access_key}, secretKey: "{CLIENT.secret_key}", admin: true}}
- {{accessKey: {OWN.access_key}, secretKey: "{OWN.secret_key}", defaultTopicPerm: DENY, defaultGroupPerm: DENY}}
"""


@pytest.fixture(params=VERSIONS)
def slave(
    request: pytest.FixtureRequest, tmp_path: Path, minio_url: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Slave]:
    """Beside a broker that was filled before it began to check; what tests ask it is signed."""
    need_clients(request.param)
    with standing(request.param, tmp_path, minio_url, messages=800) as found:
        (tmp_path / "mq" / "conf" / "plain_acl.yml").write_text(PLAIN_ACL)
        checks = checking_signatures(request.param, CLIENT.access_key, CLIENT.secret_key)
        found.broker.restart_with(checks | judging_permissions(request.param))
        add_account(found)
        rules = tmp_path / "rules.yml"
        rules.write_text(PLAIN_ACL)
        rules.chmod(0o600)
        found.sidecar.settings = {**found.sidecar.settings, "TIERED_SERVE__ACL_FILE": rules}
        for user in ("client_scene", "live"):
            monkeypatch.setattr(
                f"tests.integration.{user}.BrokerClient", partial(BrokerClient, credentials=CLIENT)
            )
        yield found


def add_account(slave: Slave) -> None:
    """The sidecar's, of a user who is not Super; 4.9 has it from plain_acl.yml."""
    (slave.directory / "conf").mkdir(exist_ok=True)
    (slave.directory / "conf" / "tools.yml").write_text(TOOLS_YML.format(CLIENT))
    if slave.broker.version.startswith("5"):
        words = ("createUser", "-c", CLUSTER, "-u", OWN.access_key, "-p", OWN.secret_key, "-t", "Normal")
        until(lambda: "success" in slave.mqadmin(*words), "no account for the sidecar")


def allow_moving(slave: Slave) -> None:
    """Give the sidecar's account what moving the group takes."""
    if slave.broker.version.startswith("5"):
        words = f"-c {CLUSTER} -s User:{OWN.access_key} -r Topic:live0,Group:{GROUP} -a Get,Update -d Allow"
        assert "success" in slave.mqadmin("createAcl", *words.split())
        return
    perms = f"topicPerms: [live0=SUB], groupPerms: [{GROUP}=SUB]"
    text = PLAIN_ACL.replace("defaultGroupPerm: DENY}", f"defaultGroupPerm: DENY, {perms}}}")
    (slave.directory / "mq" / "conf" / "plain_acl.yml").write_text(text)


def moved(slave: Slave, account: Path) -> subprocess.CompletedProcess[str]:
    """`tiered reset-offset` of the group to the broker's first messages, by the sidecar's account."""
    return slave.sidecar.tiered(
        "reset-offset",
        "--serve",
        slave.broker.name_server_address,
        "--group",
        GROUP,
        "--topic",
        "live0",
        "--earliest",
        "--set",
        f"broker.credentials_file={account}",
    )


def test_an_acl_enabled_broker_is_followed_and_relieved(slave: Slave, tmp_path: Path) -> None:
    sidecar = slave.sidecar
    sidecar.start()
    wait_for(sidecar.log, "broker.credentials_file")
    assert "refuses the request" in sidecar.log.read_text()
    assert sidecar.stop() == 0
    assert load(sidecar.open_archive()).cursor.phys == 0, "it does not know how far the log may be read"
    account = tmp_path / "tools.yml"
    account.write_text(TOOLS_YML.format(OWN))
    sidecar.settings = {**sidecar.settings, "TIERED_BROKER__CREDENTIALS_FILE": account}
    sidecar.start()
    slave.wait_until_listed()
    sidecar.wait_until_archived(60)
    ends = begins_and_ends(slave, "live0")[1]
    signs = (f"-Dacl.key={CLIENT.access_key}", f"-Dacl.secret={CLIENT.secret_key}")
    assert set(slave.pinned("pull", "G-pulled", 0, flags=signs).finish()) == everything(ends)
    assigned = slave.pinned("assign", GROUP, 10**6, idle_s=60, flags=signs)
    assigned.wait_for_all(everything(ends))
    until(lambda: slave.answered(GROUP)[0] > 0, "not from the archive, or no heartbeat", 45)
    until(lambda: slave.committed(GROUP) == ends, "the offsets did not reach the master", 20)
    assigned.kill()
    assert sorted(assigned.lines()) == sorted(everything(ends))
    stranger = BrokerClient(slave.address, 5)
    answer = stranger.call(
        RequestCode.PULL_MESSAGE,
        {
            "consumerGroup": "G-other",
            "topic": "live0",
            "queueId": "0",
            "queueOffset": "0",
            "maxMsgNums": "32",
            "sysFlag": "4",
            "subscription": "*",
            "expressionType": "TAG",
            "commitOffset": "0",
            "subVersion": "0",
            "suspendTimeoutMillis": "0",
        },
    )
    assert is_refusal(answer) and not answer.body, answer
    stranger.close()
    assert moved(slave, account).returncode == 4, "it is allowed nothing"
    allow_moving(slave)
    until(lambda: moved(slave, account).returncode == 0, "not moved", 20)
    assert slave.committed(GROUP) == begins_and_ends(slave, "live0")[0]
    assert OWN.secret_key not in sidecar.log.read_text()
