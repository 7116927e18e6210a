"""A client of the proxy service and the route it sees."""

from tests.server.connection_scene import Client as RawClient
from tiered.remoting.command import RemotingCommand

ADVERTISED = "127.0.0.1:9876"


ROUTE = {"brokerDatas": [{"brokerAddrs": {"0": "127.0.0.1:10911"}, "brokerName": "b", "cluster": "C"}]}


class Client(RawClient):
    """A raw client that sends requests of a code."""

    async def ask(self, code: int, body: bytes = b"", opaque: int = 7, **fields: str) -> RemotingCommand:
        await self.send(RemotingCommand(code, opaque, ext_fields=fields, body=body))
        return await self.receive()
