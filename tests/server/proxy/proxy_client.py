"""A client of the proxy service and the route it sees."""

import asyncio

from tiered.remoting.command import FrameDecoder, RemotingCommand, encode

ADVERTISED = "127.0.0.1:9876"


ROUTE = {"brokerDatas": [{"brokerAddrs": {"0": "127.0.0.1:10911"}, "brokerName": "b", "cluster": "C"}]}


class Client:
    """A raw client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder = FrameDecoder()
        self._found: list[RemotingCommand] = []

    async def send(self, command: RemotingCommand) -> None:
        self.writer.write(encode(command))
        await self.writer.drain()

    async def receive(self) -> RemotingCommand:
        while not self._found:
            async with asyncio.timeout(10):
                data = await self.reader.read(1 << 16)
            if not data:
                raise EOFError
            self._found += self._decoder.feed(data)
        return self._found.pop(0)

    async def ask(self, code: int, body: bytes = b"", opaque: int = 7, **fields: str) -> RemotingCommand:
        await self.send(RemotingCommand(code, opaque, ext_fields=fields, body=body))
        return await self.receive()
