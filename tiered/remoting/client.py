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

from tiered.errors import CorruptionError, UnavailableError, UsageError
from tiered.formats import fastjson
from tiered.remoting.command import FrameDecoder, RemotingCommand, encode
from tiered.remoting.credentials import Credentials
from tiered.remoting.tls import TLS_WANTED, ClientTls, closed

SUCCESS = 0
SYSTEM_BUSY = 2
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
    """One connection to ``host:port``, made when first needed. Not thread-safe. ``credentials`` sign what is asked;
    without ``tls`` it is dialled plain."""

    def __init__(
        self,
        address: str,
        timeout_s: float,
        credentials: Credentials | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        host, _, port = address.rpartition(":")
        self._address = address
        self._endpoint = (host.strip("[]"), int(port))
        self._timeout_s = timeout_s
        self._credentials = credentials
        self._tls = tls
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
        """One request and its answer, whatever its code. Raises UnavailableError, and UsageError where TLS is refused
        by either side for good."""
        deadline_s = time.monotonic() + self._timeout_s
        opaque = next(self._opaques) & 0x7FFFFFFF
        fields = ext_fields or {}
        if self._credentials is not None:
            fields = self._credentials.signed(fields, body)
        try:
            connection = self._connected(deadline_s)
            self._send(
                connection, encode(RemotingCommand(code, opaque, ext_fields=fields, body=body)), deadline_s
            )
            return self._answer(connection, opaque, deadline_s)
        except (OSError, UnicodeError) as error:  # the latter of a name that none can have
            self.close()
            raise self._failed(error) from error
        except UnavailableError:
            self.close()
            raise

    def _connected(self, deadline_s: float) -> socket.socket:
        if self._socket is None:
            self._decoder, self._has_answered = FrameDecoder(), False
            connection = socket.create_connection(self._endpoint, _left(deadline_s))
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is not None:
                connection = self._secured(connection, self._tls, deadline_s)
            self._socket = connection
        return self._socket

    def _secured(self, connection: socket.socket, tls: ClientTls, deadline_s: float) -> socket.socket:
        try:
            connection.settimeout(_left(deadline_s))
            return tls.context().wrap_socket(connection, server_hostname=self._endpoint[0])
        except BaseException:
            connection.close()
            raise

    def _send(self, connection: socket.socket, frame: bytes, deadline_s: float) -> None:
        connection.settimeout(_left(deadline_s))
        try:
            connection.sendall(frame)
        except OSError:
            if self._tls is not None and not self._has_answered:
                # It may have said why before it hung up, which reading tells.
                connection.recv(_RECEIVE_BYTES)
            raise

    def _failed(self, error: OSError | UnicodeError) -> UnavailableError | UsageError:
        words = f"broker {self._address} does not answer: {error}"
        if self._has_answered:
            return UnavailableError(words)
        if self._tls is None:
            has_hung_up = isinstance(error, ConnectionResetError | BrokenPipeError)
            return UnavailableError(words, hint=TLS_WANTED if has_hung_up else "")
        failure = self._tls.explained(error, self._endpoint[0])
        if failure is None:
            return UnavailableError(words)
        kind = UsageError if failure.is_lasting else UnavailableError
        return kind(f"broker {self._address} cannot be asked: {failure.words}", hint=failure.hint)

    def _answer(self, connection: socket.socket, opaque: int, deadline_s: float) -> RemotingCommand:
        while True:
            connection.settimeout(_left(deadline_s))
            data = connection.recv(_RECEIVE_BYTES)
            if not data:
                raise UnavailableError(
                    f"broker {self._address} closed the connection", hint=self._why_closed()
                )
            for command in self._decoder.feed(data):
                if command.is_response and command.opaque == opaque:
                    self._has_answered = True
                    return command

    def _why_closed(self) -> str:
        if self._has_answered:
            return ""
        if self._tls is not None:
            return closed(self._tls.options).hint
        return TLS_WANTED

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
        table = _part(_document(answer), "table") or {}
        return {str(name): str(value) for name, value in table.items()}

    def confirm_offset(self) -> int | None:
        """Lowest physical offset that the master and every replica in sync have; None from brokers before 5.x."""
        status = self._ask(RequestCode.GET_BROKER_HA_STATUS)
        if status is None or not status.get("master", True):
            return None
        try:
            return _lowest_offset(status)
        except (AttributeError, TypeError, ValueError) as error:
            raise _nonsense(error) from error

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
        answer = self._asked(RequestCode.GET_BROKER_CONFIG)
        if answer.code != SUCCESS:
            return None
        text = answer.body.decode("utf-8", "replace")
        lines = (line.partition("=") for line in text.splitlines() if "=" in line)
        return {name.strip(): value.strip() for name, _, value in lines}

    def _ask(self, code: RequestCode) -> dict[str, Any] | None:
        answer = self._asked(code)
        return _document(answer) if answer.code == SUCCESS else None

    def _asked(self, code: RequestCode) -> RemotingCommand:
        answer = self.call(code)
        if answer.code == SYSTEM_BUSY:  # of every version; it knows the code, and will answer later
            raise UnavailableError(f"broker {self._address} is busy: {answer.remark or answer.code}")
        return answer


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


def _lowest_offset(status: Mapping[str, Any]) -> int | None:
    """Of the master's and of every replica in sync that has acknowledged any."""
    known = [status.get("masterCommitLogMaxOffset")]
    known += [
        replica.get("slaveAckOffset")
        for replica in status.get("haConnectionInfo") or []
        if replica.get("inSync") and replica.get("slaveAckOffset", -1) > 0
    ]
    offsets = [int(offset) for offset in known if offset is not None and int(offset) > 0]
    return min(offsets) if offsets else None


def _nonsense(why: object) -> UnavailableError:
    """What it answers may be right the next time; the uploader goes on without its word until then."""
    return UnavailableError(f"the broker's answer does not parse: {why}")


def _document(answer: RemotingCommand) -> dict[str, Any]:
    try:
        document = fastjson.loads(answer.body)
    except (CorruptionError, RecursionError) as error:
        raise _nonsense(error) from error
    return document if isinstance(document, dict) else {}


def _part(document: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    found = {} if document is None else document.get(name) or {}
    if not isinstance(found, dict):
        raise _nonsense(f"{name} is no object")
    return None if document is None else dict(found)
