"""A broker that checks signatures, and `tiered run` as its slave: what it asks in its own name is signed, too."""

from __future__ import annotations

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
from tests.servers.rocketmq import checking_signatures
from tests.servers.running_store import RunningStore
from tiered.catalog.protocol import load
from tiered.remoting.client import BrokerClient, RequestCode, is_refusal
from tiered.remoting.credentials import Credentials

pytestmark = [pytest.mark.integration, pytest.mark.timeout(300)]

VERSIONS = ["5.3.3", pytest.param("4.9.7", marks=pytest.mark.soak)]
OWN = Credentials("the-sidecar", "its own secret")
TOOLS_YML = f'accessKey: {OWN.access_key}\nsecretKey: "{OWN.secret_key}"\n'
PLAIN_ACL = f"""globalWhiteRemoteAddresses:
accounts:
- {{accessKey: {OWN.access_key}, secretKey: "{OWN.secret_key}", admin: true}}
"""
AUTHORIZATION = "org.apache.rocketmq.auth.authorization.provider."
ALLOWS = {
    "4.9.7": {},
    "5.3.3": {
        "authorizationEnabled": "true",
        "authorizationProvider": f"{AUTHORIZATION}DefaultAuthorizationProvider",
        "authorizationMetadataProvider": f"{AUTHORIZATION}LocalAuthorizationMetadataProvider",
    },
}
"""How each version is told to look also what an account may do; 4.9 always does."""


@pytest.fixture(params=VERSIONS)
def slave(
    request: pytest.FixtureRequest, tmp_path: Path, minio_url: RunningStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Slave]:
    """Beside a broker that was filled before it began to check; what tests ask it is signed."""
    need_clients(request.param)
    with standing(request.param, tmp_path, minio_url, messages=800) as found:
        (tmp_path / "mq" / "conf" / "plain_acl.yml").write_text(PLAIN_ACL)
        checks = checking_signatures(request.param, OWN.access_key, OWN.secret_key)
        found.broker.restart_with(checks | ALLOWS[request.param])
        for user in ("client_scene", "live"):
            monkeypatch.setattr(
                f"tests.integration.{user}.BrokerClient", partial(BrokerClient, credentials=OWN)
            )
        yield found


def test_a_broker_that_checks_who_asks_is_followed_and_relieved(slave: Slave, tmp_path: Path) -> None:
    sidecar = slave.sidecar
    sidecar.start()
    wait_for(sidecar.log, "broker.credentials_file")
    assert "does not let us ask" in sidecar.log.read_text()
    assert sidecar.stop() == 0
    assert load(sidecar.open_archive()).cursor.phys == 0, "it does not know how far the log may be read"
    account = tmp_path / "tools.yml"
    account.write_text(TOOLS_YML)
    sidecar.settings = {**sidecar.settings, "TIERED_BROKER__CREDENTIALS_FILE": account}
    sidecar.start()
    slave.wait_until_listed()
    sidecar.wait_until_archived(60)
    ends = begins_and_ends(slave, "live0")[1]
    signs = (f"-Dacl.key={OWN.access_key}", f"-Dacl.secret={OWN.secret_key}")
    assert set(slave.pinned("pull", "G-pulled", 0, flags=signs).finish()) == everything(ends)
    assigned = slave.pinned("assign", "G-pinned", 10**6, idle_s=60, flags=signs)
    assigned.wait_for_all(everything(ends))
    until(lambda: slave.answered("G-pinned")[0] > 0, "not from the archive, or no heartbeat", 45)
    until(lambda: slave.committed("G-pinned") == ends, "the master was not told", 20)
    assigned.kill()
    assert sorted(assigned.lines()) == sorted(everything(ends))
    stranger = BrokerClient(slave.address, 5)
    answer = stranger.call(RequestCode.PULL_MESSAGE, {
        "consumerGroup": "G-other", "topic": "live0", "queueId": "0", "queueOffset": "0", "maxMsgNums": "32",
        "sysFlag": "4", "subscription": "*", "expressionType": "TAG", "commitOffset": "0", "subVersion": "0",
        "suspendTimeoutMillis": "0",
    })  # fmt: skip
    assert is_refusal(answer) and not answer.body, answer
    stranger.close()
    assert OWN.secret_key not in sidecar.log.read_text()
