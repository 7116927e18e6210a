"""The master beside a slave, where it checks requests for its configuration."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from rocketmq_tiered.server.security.authorizer import is_signed
from rocketmq_tiered.server.slave.master_monitor import MasterMonitor
from rocketmq_tiered.server.slave.registration import SlaveConfig
from tests.server.slave.master_double import MasterDouble
from tiered.remoting.command import RemotingCommand, encode
from tiered.remoting.credentials import Credentials

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
def test_requests_to_it_are_signed(credentials: Credentials | None, refusal: str | None) -> None:
    async def story() -> None:
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

    asyncio.run(story())
