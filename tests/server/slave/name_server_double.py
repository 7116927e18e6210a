"""A name server's table of brokers, over real frames, with the habits of 4.9 or 5.x (RouteInfoManager)."""

import asyncio
import zlib

import orjson

from tests.server.slave.remoting_double import RemotingDouble
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
        self.others: dict[str, dict[int, str]] = {}
        """Brokers of other names, by name and id."""
        self.extra: dict[str, object] = {}
        """Other members of the broker's data."""
        self.ignores = False
        """Answers registrations with success and lists no broker, as 5.x does for an older stateVersion."""
        self.is_silent = False
        self.takes_s = 0.0
        """How long a registration takes; it is done whether its sender still waits or not."""
        self._channels: dict[str, Writer] = {}
        """By what connection an address registered last."""

    def codes(self) -> list[int]:
        """The requests, in order, without those for the cluster."""
        return self.codes_but(106)

    def asked(self, command: RemotingCommand, writer: Writer) -> None:
        """See RemotingDouble."""
        if command.code == 103 and self.takes_s:
            asyncio.get_running_loop().call_later(self.takes_s, self._late, command, writer)
        elif not self.is_silent:
            writer.write(encode(self._answer(command, writer)))

    def gone(self, writer: Writer) -> None:
        """It forgets who registered by this connection, but not the brokers put in by hand. It knows them by address
        alone: of two names that have one, it takes the first it finds."""
        for gone in [at for at, channel in self._channels.items() if channel is writer]:
            del self._channels[gone]
            for table in (*self.others.values(), self.addresses):
                numbers = [number for number, at in table.items() if at == gone]
                if numbers:
                    del table[numbers[0]]
                    break

    def _late(self, command: RemotingCommand, writer: Writer) -> None:
        writer.write(encode(self._answer(command, writer)))

    def _answer(self, command: RemotingCommand, writer: Writer) -> RemotingCommand:
        code, remark, body, fields = 0, None, b"", command.ext_fields
        if command.code == 103:
            code, remark = self._register(command, writer)
        elif command.code == 104:
            number = int(fields["brokerId"])
            self._channels.pop(fields["brokerAddr"], None)
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
        name, cluster = self.names
        tables = {name: self.addresses, **self.others} if self.addresses else self.others
        rows = []
        for broker, table in tables.items():
            addresses = ",".join(f'{number}:"{at}"' for number, at in table.items())
            more = self.extra.items() if broker == name else ()
            others = "".join(f',"{key}":{orjson.dumps(value).decode()}' for key, value in more)
            rows.append(
                f'"{broker}":{{"brokerAddrs":{{{addresses}}},"brokerName":"{broker}","cluster":"{cluster}"{others}}}'
            )
        names = orjson.dumps({cluster: list(tables)} if tables else {}).decode()
        return f'{{"brokerAddrTable":{{{",".join(rows)}}},"clusterAddrTable":{names}}}'.encode()
