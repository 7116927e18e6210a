"""A master that answers by a table, over real frames."""

import asyncio
from dataclasses import replace

from tests.server.slave.remoting_double import RemotingDouble
from tiered.remoting.command import RemotingCommand, encode

VERSION = 479


class MasterDouble(RemotingDouble):
    """``answers`` by request code, code 3 for the others; ``seen``: the requests."""

    def __init__(self, **config: str) -> None:
        super().__init__()
        text = "".join(
            f"{name}={value}\n" for name, value in {"brokerRole": "ASYNC_MASTER", **config}.items()
        )
        self.answers: dict[int, RemotingCommand] = {26: RemotingCommand(0, 0, body=text.encode())}

    def codes(self) -> list[int]:
        """The requests, in order, without those for its configuration."""
        return self.codes_but(26)

    def asked(self, command: RemotingCommand, writer: asyncio.StreamWriter) -> None:
        """See RemotingDouble."""
        found = self.answers.get(command.code, RemotingCommand(3, 0, remark="not supported"))
        if not command.is_oneway:
            writer.write(encode(replace(found, opaque=command.opaque, flag=1, version=VERSION)))
