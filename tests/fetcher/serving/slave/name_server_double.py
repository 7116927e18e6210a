"""A name server's table of brokers, over real frames, with the habits of 4.9 or 5.x (RouteInfoManager)."""

from __future__ import annotations

import asyncio
import zlib

import orjson

from tests.fetcher.serving.slave.remoting_double import RemotingDouble
from tiered.remoting.command import RemotingCommand, encode

BROKER, CLUSTER = "broker-a", "C"
Writer = asyncio.StreamWriter


class NameServerDouble(RemotingDouble):
    """Lists what registers; forgets it when the connection ends."""

    def __init__(self, *, is_5: bool = True, master: str | None = "10.0.0.1:10911") -> None:
        super().__init__()
        self.is_5 = is_5
        self.names = BROKER, CLUSTER
        self.addresses: dict[int, str] = {} if master is None else {0: master}
        self.extra: dict[str, object] = {}
        """Other members of the broker's data."""
        self.ignores = False
        """Answers registrations with success and lists nobody, as 5.x does for an older stateVersion."""
        self.is_silent = False
        self.takes_s = 0.0
        """How long a registration takes; it is done whether its sender still waits or not."""
        self._channels: dict[str, Writer] = {}
        """By what connection an address registered last."""

    def codes(self) -> list[int]:
        """What was asked, in order, without looks at the cluster."""
        return self.codes_but(106)

    def asked(self, command: RemotingCommand, writer: Writer) -> None:
        """See RemotingDouble."""
        if command.code == 103 and self.takes_s:
            asyncio.get_running_loop().call_later(self.takes_s, self._late, command, writer)
        elif not self.is_silent:
            writer.write(encode(self._answer(command, writer)))

    def gone(self, writer: Writer) -> None:
        """It forgets who registered by this connection, but not the brokers put in by hand."""
        gone = {at for at, channel in self._channels.items() if channel is writer}
        self.addresses = {number: at for number, at in self.addresses.items() if at not in gone}

    def _late(self, command: RemotingCommand, writer: Writer) -> None:
        writer.write(encode(self._answer(command, writer)))

    def _answer(self, command: RemotingCommand, writer: Writer) -> RemotingCommand:
        code, remark, body, fields = 0, None, b"", command.ext_fields
        if command.code == 103:
            code, remark = self._register(command, writer)
        elif command.code == 104:
            number = int(fields["brokerId"])
            if not self.is_5 or self.addresses.get(number) == fields["brokerAddr"]:
                self.addresses.pop(number, None)
        elif command.code == 106:
            body = self._cluster()
        return RemotingCommand(code, command.opaque, flag=1, remark=remark, body=body)

    def _register(self, command: RemotingCommand, writer: Writer) -> tuple[int, str | None]:
        fields = command.ext_fields
        if int(fields["bodyCrc32"]) != zlib.crc32(command.body) & 0x7FFFFFFF:
            return 1, "crc32 not match"
        table = orjson.loads(command.body)["topicConfigSerializeWrapper"]["topicConfigTable"]
        if self.is_5 and len(table) == 1:
            return 1, "register broker failed"
        if self.ignores:
            return 0, None
        assert (fields["brokerName"], fields["clusterName"]) == self.names
        address = fields["brokerAddr"]
        self.addresses = {number: at for number, at in self.addresses.items() if at != address}
        self.addresses[int(fields["brokerId"])] = address
        self.extra["enableActingMaster"] = fields.get("enableActingMaster") == "true"
        self.extra["zoneName"] = fields.get("__ZONE_NAME")
        self._channels[address] = writer
        return 0, None

    def _cluster(self) -> bytes:
        if not self.addresses:
            return b'{"brokerAddrTable":{},"clusterAddrTable":{}}'
        addresses = ",".join(f'{number}:"{at}"' for number, at in self.addresses.items())
        others = "".join(f',"{name}":{orjson.dumps(value).decode()}' for name, value in self.extra.items())
        name, cluster = self.names
        data = f'{{"brokerAddrs":{{{addresses}}},"brokerName":"{name}","cluster":"{cluster}"{others}}}'
        return f'{{"brokerAddrTable":{{"{name}":{data}}},"clusterAddrTable":{{"{cluster}":["{name}"]}}}}'.encode()
