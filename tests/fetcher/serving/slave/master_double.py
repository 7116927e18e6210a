"""A master that answers by a table, over real frames."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from tiered.remoting.command import FrameDecoder, RemotingCommand, encode

VERSION = 479


class MasterDouble:
    """``answers`` by request code, code 3 for the others; ``seen``: what was asked."""

    def __init__(self, **config: str) -> None:
        text = "".join(
            f"{name}={value}\n" for name, value in {"brokerRole": "ASYNC_MASTER", **config}.items()
        )
        self.answers: dict[int, RemotingCommand] = {26: RemotingCommand(0, 0, body=text.encode())}
        self.seen: list[RemotingCommand] = []
        self.address = ""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def codes(self) -> list[int]:
        """What was asked, in order, without questions for its configuration."""
        return [command.code for command in self.seen if command.code != 26]

    async def start(self, port: int = 0) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """As kill -9."""
        assert self._server is not None
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0.02)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        decoder = FrameDecoder()
        try:
            while data := await reader.read(1 << 16):
                for command in decoder.feed(data):
                    self.seen.append(command)
                    found = self.answers.get(command.code, RemotingCommand(3, 0, remark="not supported"))
                    if not command.is_oneway:
                        writer.write(encode(replace(found, opaque=command.opaque, flag=1, version=VERSION)))
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            writer.close()
