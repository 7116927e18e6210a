"""A server with a few handlers, and a raw client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rocketmq_tiered.server.wire.listener import Listener, ServerOptions
from rocketmq_tiered.server.wire.request import HandlerTable, Request, Response
from tiered.errors import CorruptionError, ThrottledError
from tiered.remoting.command import FrameDecoder, RemotingCommand, encode
from tiered.settings.sections import ServeSettings

LOOPBACK = ServeSettings(proxy_from=("127.0.0.1",)).proxy_networks()
ECHO, LARGE, BROKEN, BUSY, SILENT, SLOW, WHO, INSTANT = range(1, 9)


LARGE_BYTES = 1024 * 1024


def handlers(gate: asyncio.Event) -> HandlerTable:
    table = HandlerTable()

    @table.register(ECHO)
    async def echo(request: Request) -> Response:
        return Response(
            ext=request.command.ext_fields, body=(request.command.body[:5], request.command.body[5:])
        )

    @table.register(LARGE)
    async def large(request: Request) -> Response:
        return Response(body=(bytes(LARGE_BYTES),))

    @table.register(BROKEN)
    async def broken(request: Request) -> Response:
        raise CorruptionError("data/x.so: block 3 fails its CRC32C")

    @table.register(BUSY)
    async def busy(request: Request) -> Response:
        raise ThrottledError("503")

    @table.register(SILENT)
    async def silent(request: Request) -> None:
        return None

    @table.register(SLOW)
    async def slow(request: Request) -> Response:
        await gate.wait()
        return Response(ext={"n": str(request.number("n"))})

    @table.register(WHO)
    async def who(request: Request) -> Response:
        return Response(ext={"peer": request.peer.address})

    async def later(request: Request) -> None:
        raise AssertionError("it was answered at once")

    table.register(INSTANT, at_once=lambda request: Response(body=(bytes(200_000),)))(later)
    return table


class Client:
    """A raw client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self._decoder = FrameDecoder()
        self._found: list[RemotingCommand] = []

    async def send(self, *commands: RemotingCommand) -> None:
        self.writer.write(b"".join(map(encode, commands)))
        await self.writer.drain()

    async def receive(self) -> RemotingCommand:
        while not self._found:
            async with asyncio.timeout(10):
                data = await self.reader.read(1 << 16)
            if not data:
                raise EOFError
            self._found += self._decoder.feed(data)
        return self._found.pop(0)

    async def ask(self, command: RemotingCommand) -> RemotingCommand:
        await self.send(command)
        return await self.receive()


class Scene:
    """A server and any number of clients."""

    def __init__(self, server: Listener, port: int, gate: asyncio.Event) -> None:
        self.server, self.port, self.gate = server, port, gate
        self._clients: list[Client] = []

    async def client(self) -> Client:
        client = Client(*await asyncio.open_connection("127.0.0.1", self.port))
        self._clients.append(client)
        return client

    async def close(self) -> None:
        for client in self._clients:
            client.writer.close()
        await self.server.close(drain_s=0)
        await asyncio.sleep(0)


@asynccontextmanager
async def scene(options: ServerOptions | None = None) -> AsyncIterator[Scene]:
    gate = asyncio.Event()
    server = Listener(handlers(gate), options or ServerOptions())
    _, port = await server.start()
    made = Scene(server, port, gate)
    try:
        yield made
    finally:
        await made.close()
