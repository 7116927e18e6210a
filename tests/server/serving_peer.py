"""A peer that records what is pushed to it, and requests made by hand."""

import json
from collections.abc import Mapping
from typing import Any

from rocketmq_tiered.server.wire.request import Request
from tiered.remoting.command import RemotingCommand


class RecordingPeer:
    """See rocketmq_tiered.server.wire.request.Peer."""

    def __init__(self, number: int = 1) -> None:
        self.id = number
        self.address = f"127.0.0.1:{40_000 + number}"
        self.pushed: list[tuple[int, dict[str, str], bytes]] = []

    def push(self, code: int, ext: Mapping[str, str], body: bytes = b"") -> None:
        """Record it."""
        self.pushed.append((int(code), dict(ext), body))


def request(code: int, peer: RecordingPeer | None = None, body: Any = None, **ext: object) -> Request:
    """A request with these fields; ``body`` is a JSON document."""
    fields = {name: str(value) for name, value in ext.items()}
    data = b"" if body is None else json.dumps(body).encode()
    return Request(RemotingCommand(code, 1, ext_fields=fields, body=data), peer or RecordingPeer())
