"""Asks one broker about itself: where its log ends, what its replicas have, its tables. Blocking, one at a time.

Every answer comes within the time limit or is an UnavailableError, after which the connection is made anew. A code
the broker does not know is None, not an error. Sends nothing that changes the broker.
Sources: RequestCode, AdminBrokerProcessor, HARuntimeInfo.
"""

from __future__ import annotations

import itertools
import socket
import time
from collections.abc import Mapping
from enum import IntEnum
from typing import Any

from tiered.errors import CorruptionError, UnavailableError
from tiered.formats import fastjson
from tiered.remoting.command import FrameDecoder, RemotingCommand, encode
from tiered.remoting.credentials import Credentials

SUCCESS = 0
NOT_SUPPORTED = 3
NO_PERMISSION = 16
_RECEIVE_BYTES = 256 * 1024


class RequestCode(IntEnum):
    """The codes this client sends."""

    PULL_MESSAGE = 11
    GET_ALL_TOPIC_CONFIG = 21
    GET_BROKER_CONFIG = 26
    GET_BROKER_RUNTIME_INFO = 28
    GET_MAX_OFFSET = 30
    GET_MIN_OFFSET = 31
    GET_ALL_CONSUMER_OFFSET = 43
    GET_ALL_DELAY_OFFSET = 45
    GET_ALL_SUBSCRIPTIONGROUP_CONFIG = 201
    GET_BROKER_HA_STATUS = 907


class BrokerClient:
    """One connection to ``host:port``, made when first needed. Not thread-safe. ``credentials`` sign what is asked."""

    def __init__(self, address: str, timeout_s: float, credentials: Credentials | None = None) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        self._endpoint = (host.strip("[]"), int(port))
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._opaques = itertools.count(1)
        self._socket: socket.socket | None = None
        self._decoder = FrameDecoder()
        self._has_answered = False

    def __repr__(self) -> str:
        return f"BrokerClient({self._address})"

    def close(self) -> None:
        """Hang up. The next call connects again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def call(
        self, code: int, ext_fields: Mapping[str, str] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        """One request and its answer, whatever its code. Raises UnavailableError."""
        deadline_s = time.monotonic() + self._timeout_s
        opaque = next(self._opaques) & 0x7FFFFFFF
        fields = ext_fields or {}
        if self._credentials is not None:
            fields = self._credentials.signed(fields, body)
        try:
            connection = self._connected(deadline_s)
            connection.settimeout(_left(deadline_s))
            connection.sendall(encode(RemotingCommand(code, opaque, ext_fields=fields, body=body)))
            return self._answer(connection, opaque, deadline_s)
        except OSError as error:
            self.close()
            raise UnavailableError(f"broker {self._address} does not answer: {error}") from error
        except UnavailableError:
            self.close()
            raise

    def _connected(self, deadline_s: float) -> socket.socket:
        if self._socket is None:
            self._decoder, self._has_answered = FrameDecoder(), False
            self._socket = socket.create_connection(self._endpoint, _left(deadline_s))
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return self._socket

    def _answer(self, connection: socket.socket, opaque: int, deadline_s: float) -> RemotingCommand:
        while True:
            connection.settimeout(_left(deadline_s))
            data = connection.recv(_RECEIVE_BYTES)
            if not data:
                raise UnavailableError(
                    f"broker {self._address} closed the connection",
                    hint=""
                    if self._has_answered
                    else "one that takes TLS only does so: it is dialled without",
                )
            for command in self._decoder.feed(data):
                if command.is_response and command.opaque == opaque:
                    self._has_answered = True
                    return command

    # -- questions --------------------------------------------------------------------------------------------

    def runtime_info(self) -> dict[str, str]:
        """Everything the broker tells of its running, such as commitLogMaxOffset, commitLogMinOffset,
        dispatchBehindBytes. Raises UnavailableError also where the broker fails to put it together."""
        answer = self.call(RequestCode.GET_BROKER_RUNTIME_INFO)
        if is_refusal(answer):
            raise UnavailableError(
                f"broker {self._address} does not let us ask: {answer.remark or answer.code}",
                hint="name an account of it in broker.credentials_file",
            )
        if answer.code != SUCCESS:
            raise UnavailableError(
                f"broker {self._address} has no runtime information: {answer.remark or answer.code}"
            )
        table = _document(answer).get("table") or {}
        return {str(name): str(value) for name, value in table.items()}

    def confirm_offset(self) -> int | None:
        """Lowest physical offset that the master and every replica in sync have; None from brokers before 5.x."""
        status = self._ask(RequestCode.GET_BROKER_HA_STATUS)
        if status is None or not status.get("master", True):
            return None
        known = [status.get("masterCommitLogMaxOffset")]
        known += [
            replica.get("slaveAckOffset")
            for replica in status.get("haConnectionInfo") or []
            if replica.get("inSync") and replica.get("slaveAckOffset", -1) > 0
        ]
        offsets = [int(offset) for offset in known if offset is not None and int(offset) > 0]
        return min(offsets) if offsets else None

    def topics(self) -> dict[str, Any] | None:
        """Topic name to its configuration."""
        return _part(self._ask(RequestCode.GET_ALL_TOPIC_CONFIG), "topicConfigTable")

    def subscription_groups(self) -> dict[str, Any] | None:
        """Group name to its configuration."""
        return _part(self._ask(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG), "subscriptionGroupTable")

    def consumer_offsets(self) -> dict[str, Any] | None:
        """ "topic@group" to the next offset per queue id."""
        return _part(self._ask(RequestCode.GET_ALL_CONSUMER_OFFSET), "offsetTable")

    def delay_offsets(self) -> dict[str, Any] | None:
        """Delay level to its progress."""
        return _part(self._ask(RequestCode.GET_ALL_DELAY_OFFSET), "offsetTable")

    def broker_config(self) -> dict[str, str] | None:
        """The broker's whole configuration, as text."""
        answer = self.call(RequestCode.GET_BROKER_CONFIG)
        if answer.code != SUCCESS:
            return None
        lines = (line.partition("=") for line in answer.body.decode().splitlines() if "=" in line)
        return {name.strip(): value.strip() for name, _, value in lines}

    def _ask(self, code: RequestCode) -> dict[str, Any] | None:
        answer = self.call(code)
        return _document(answer) if answer.code == SUCCESS else None


def is_refusal(answer: RemotingCommand) -> bool:
    """Whether the broker refuses who asks: a code of 5.x; 4.9 says it in words only."""
    return answer.code == NO_PERMISSION or (
        answer.code != SUCCESS and "AclException" in (answer.remark or "")
    )


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("time limit reached")
    return left_s


def _document(answer: RemotingCommand) -> dict[str, Any]:
    try:
        document = fastjson.loads(answer.body)
    except CorruptionError as error:
        raise UnavailableError(f"the broker's answer does not parse: {error}") from error
    return document if isinstance(document, dict) else {}


def _part(document: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    return None if document is None else dict(document.get(name) or {})
