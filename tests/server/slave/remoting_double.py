"""A remoting server of a test's own: it records requests, and ends as a killed process does."""

import asyncio
import ssl

from tiered.remoting.command import FrameDecoder, RemotingCommand


class RemotingDouble:
    """Subclasses answer in ``asked``."""

    def __init__(self) -> None:
        self.seen: list[RemotingCommand] = []
        self.address = ""
        self.tls: ssl.SSLContext | None = None
        """Speaks nothing else, when set before the start."""
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    def codes_but(self, looks: int) -> list[int]:
        """The requests, in order, without the code ``looks``."""
        return [command.code for command in self.seen if command.code != looks]

    async def start(self, port: int = 0) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port, ssl=self.tls)
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
                    self.asked(command, writer)
        except ConnectionError:
            pass
        finally:
            self._writers.discard(writer)
            self.gone(writer)
            writer.close()

    def asked(self, command: RemotingCommand, writer: asyncio.StreamWriter) -> None:
        """One request came."""
        raise NotImplementedError

    def gone(self, writer: asyncio.StreamWriter) -> None:
        """A connection ended."""
