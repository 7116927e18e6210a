"""Blocking client of one broker: its log offsets, replicas and tables, and any other request.

Every call ends within its timeout or raises UnavailableError, after which the next call connects again. A code that
the broker does not support returns None. Its own requests change nothing at the broker.

Sources: RequestCode, AdminBrokerProcessor, HARuntimeInfo.
"""

import itertools
import socket
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tiered.errors import AccessDeniedError, CorruptionError, NotFoundError, UnavailableError, UsageError
from tiered.formats import fastjson
from tiered.remoting.command import FrameDecoder, RemotingCommand, RequestCode, ResponseCode, encode
from tiered.remoting.credentials import Credentials
from tiered.remoting.tls import TLS_WANTED, ClientTls, closed

ADMIN_HINT = "set broker.credentials_file to a file with an administrator's account"
_RECEIVE_BYTES = 256 * 1024
IN_FLIGHT, WRITE_BYTES = 256, 1 << 20
"""At most so many requests of one call wait for their responses, and so many bytes are written at once; a single larger
request is written alone."""


class BrokerClient:
    """One connection to ``host:port``, opened by the first call. Not thread-safe. ``credentials`` sign the requests;
    without ``tls`` the connection is plain."""

    def __init__(
        self,
        address: str,
        timeout_s: float,
        credentials: Credentials | None = None,
        tls: ClientTls | None = None,
    ) -> None:
        """``address``: ``host:port`` of the broker; ``timeout_s``: of a whole call, connecting included. No connection
        is made before the first call."""
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

    def close(self) -> None:
        """Close the connection. The next call connects again."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def call(
        self, code: int, ext_fields: Mapping[str, str] | None = None, body: bytes = b""
    ) -> RemotingCommand:
        """Send the request ``code`` with its fields and body, and return the response, whatever its code. Raises
        UnavailableError if there is none in time, and UsageError if one side refuses TLS, so that a retry cannot
        help."""
        answers: list[RemotingCommand] = []
        request = RemotingCommand(code, 0, ext_fields=ext_fields or {}, body=body)
        self.call_many(
            [request], lambda _, answer: answers.append(answer), time.monotonic() + self._timeout_s
        )
        return answers[0]

    def request(
        self,
        code: RequestCode,
        ext_fields: Mapping[str, str] | None = None,
        body: bytes = b"",
        *,
        accepted: Collection[int] = (),
    ) -> RemotingCommand:
        """As ``call``, but the response has to be a success, or its code one of ``accepted``. Raises AccessDeniedError
        if the account has no right to the request, NotFoundError for an unknown topic, and UnavailableError for any
        other failure, which a retry may cure."""
        answer = self.call(code, ext_fields, body)
        words = f"{code.name}: {answer.remark or answer.code}"
        if is_refusal(answer):
            raise AccessDeniedError(f"the broker refuses {words}", hint=ADMIN_HINT)
        if answer.code == ResponseCode.SUCCESS or answer.code in accepted:
            return answer
        if answer.code == ResponseCode.TOPIC_NOT_EXIST:
            raise NotFoundError(answer.remark or words)
        raise UnavailableError(f"the broker failed on {words}")

    def call_many(
        self,
        requests: Sequence[RemotingCommand],
        answered: Callable[[int, RemotingCommand], None],
        deadline_s: float,
    ) -> None:
        """Send ``requests`` in their order without waiting for each response. ``answered`` is called with each
        request's index and its response, in any order. Raises as ``call``, also if responses are missing at
        ``deadline_s`` of the monotonic clock."""
        waiting: dict[
            int, int
        ] = {}  # the index of each unanswered request by the number that its response repeats
        sent = 0
        try:
            connection = self._connected(deadline_s)
            while waiting or sent < len(requests):
                if sent < len(requests) and len(waiting) <= IN_FLIGHT // 2:
                    frames = self._frames(requests, sent, waiting)
                    sent += len(frames)
                    self._send(connection, b"".join(frames), deadline_s)
                else:
                    for answer in self._received(connection, deadline_s):
                        index = waiting.pop(answer.opaque, None)
                        if index is not None:
                            self._has_answered = True
                            answered(index, answer)
        except (OSError, UnicodeError) as error:  # UnicodeError: an invalid host name
            self.close()
            raise self._error_of_call(error) from error
        except BaseException:
            self.close()
            raise

    def _frames(
        self, requests: Sequence[RemotingCommand], first: int, waiting: dict[int, int]
    ) -> list[bytes]:
        """The encoded and signed requests from the index ``first`` on that are sent together, as far as their number
        and bytes allow. They are added to ``waiting``, the index of each unanswered request by its number."""
        frames: list[bytes] = []
        byte_count = 0
        for index in range(first, min(len(requests), first + IN_FLIGHT - len(waiting))):
            request, opaque = requests[index], next(self._opaques) & 0x7FFFFFFF
            fields = request.ext_fields
            if self._credentials is not None:
                fields = self._credentials.signed(fields, request.body)
            frames.append(encode(replace(request, opaque=opaque, ext_fields=fields)))
            waiting[opaque] = index
            byte_count += len(frames[-1])
            if byte_count >= WRITE_BYTES:
                break
        return frames

    def _connected(self, deadline_s: float) -> socket.socket:
        """The connection to the broker, which is opened if there is none, with TLS if that is configured. Raises
        OSError, also if it is not open at ``deadline_s``."""
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
        """Send ``frame``. Raises OSError; if a TLS server has closed a new connection, with the server's reason."""
        connection.settimeout(_left(deadline_s))
        try:
            connection.sendall(frame)
        except OSError:
            if self._tls is not None and not self._has_answered:
                # The reason may have been sent before the close: read it.
                connection.recv(_RECEIVE_BYTES)
            raise

    def _error_of_call(self, error: OSError | UnicodeError) -> UnavailableError | UsageError:
        """The error to raise for a call that ended with ``error``. Before the first response of a connection TLS is a
        likely cause, which the hint then names. It is a UsageError only if a retry cannot help."""
        words = f"broker {self._address} does not answer: {error}"
        if self._has_answered:
            return UnavailableError(words)
        if self._tls is None:
            has_hung_up = isinstance(error, ConnectionResetError | BrokenPipeError)
            return UnavailableError(words, hint=TLS_WANTED if has_hung_up else "")
        failure = self._tls.explain(error, self._endpoint[0])
        if failure is None:
            return UnavailableError(words)
        error_type = UsageError if failure.is_lasting else UnavailableError
        return error_type(f"broker {self._address} is unreachable: {failure.words}", hint=failure.hint)

    def _received(self, connection: socket.socket, deadline_s: float) -> Iterator[RemotingCommand]:
        """Wait for bytes of the broker and return the responses that are complete then. Raises UnavailableError if it
        has closed the connection, and OSError at ``deadline_s``."""
        connection.settimeout(_left(deadline_s))
        data = connection.recv(_RECEIVE_BYTES)
        if not data:
            raise UnavailableError(f"broker {self._address} closed the connection", hint=self._why_closed())
        return (command for command in self._decoder.feed(data) if command.is_response)

    def _why_closed(self) -> str:
        if self._has_answered:
            return ""
        if self._tls is not None:
            return closed(self._tls.options).hint
        return TLS_WANTED

    # -- requests --------------------------------------------------------------------------------------------

    def runtime_info(self) -> dict[str, str]:
        """The broker's runtime information as text by name, such as commitLogMaxOffset, commitLogMinOffset,
        dispatchBehindBytes. Raises UnavailableError also if the broker refuses the request or fails on it."""
        answer = self.call(RequestCode.GET_BROKER_RUNTIME_INFO)
        if is_refusal(answer):
            raise UnavailableError(
                f"broker {self._address} refuses to report its offsets: {answer.remark or answer.code}",
                hint="set broker.credentials_file to a file with an account of the broker",
            )
        if answer.code != ResponseCode.SUCCESS:
            raise UnavailableError(
                f"broker {self._address} failed to report its offsets: {answer.remark or answer.code}"
            )
        table = _part(document_of(answer), "table") or {}
        return {str(name): str(value) for name, value in table.items()}

    def confirm_offset(self) -> int | None:
        """The lowest physical offset that the master and all its in-sync replicas have; None if the broker is no
        master, or older than 5.x. Raises UnavailableError for a malformed response."""
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

    def broker_config(self) -> dict[str, str] | None:
        """The broker's configuration, as text."""
        answer = self._asked(RequestCode.GET_BROKER_CONFIG)
        if answer.code != ResponseCode.SUCCESS:
            return None
        return config_of(answer.body)

    def _ask(self, code: RequestCode) -> dict[str, Any] | None:
        answer = self._asked(code)
        return document_of(answer) if answer.code == ResponseCode.SUCCESS else None

    def _asked(self, code: RequestCode) -> RemotingCommand:
        answer = self.call(code)
        if answer.code == ResponseCode.SYSTEM_BUSY:  # in every version: the code is supported, but not now
            raise UnavailableError(f"broker {self._address} is busy: {answer.remark or answer.code}")
        return answer


def config_of(body: bytes) -> dict[str, str]:
    """The configuration in the body of a response to GET_BROKER_CONFIG."""
    lines = (line.partition("=") for line in body.decode("utf-8", "replace").splitlines() if "=" in line)
    return {name.strip(): value.strip() for name, _, value in lines}


def is_refusal(answer: RemotingCommand) -> bool:
    """Whether the broker refuses access: a code of 5.x; 4.9 says so only in the remark."""
    return answer.code == ResponseCode.NO_PERMISSION or (
        answer.code != ResponseCode.SUCCESS and "AclException" in (answer.remark or "")
    )


def _left(deadline_s: float) -> float:
    left_s = deadline_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError("timed out")
    return left_s


def _lowest_offset(status: Mapping[str, Any]) -> int | None:
    """The lowest offset in ``status``, the broker's report on its replicas, of the master and of every in-sync replica
    that has acknowledged any; None if it has none."""
    known = [status.get("masterCommitLogMaxOffset")]
    known += [
        replica.get("slaveAckOffset")
        for replica in status.get("haConnectionInfo") or []
        if replica.get("inSync") and replica.get("slaveAckOffset", -1) > 0
    ]
    offsets = [int(offset) for offset in known if offset is not None and int(offset) > 0]
    return min(offsets) if offsets else None


def _nonsense(why: object) -> UnavailableError:
    """A malformed response; the next one may be valid, and the uploader continues without it."""
    return UnavailableError(f"malformed response of the broker: {why}")


def document_of(answer: RemotingCommand) -> dict[str, Any]:
    """The JSON object in the body of a response; empty for an empty body, or one with other JSON. Raises
    UnavailableError for a body that is no JSON."""
    try:
        document = fastjson.loads(answer.body or b"{}")
    except (CorruptionError, RecursionError) as error:
        raise _nonsense(error) from error
    return document if isinstance(document, dict) else {}


def _part(document: dict[str, Any] | None, name: str) -> dict[str, Any] | None:
    found = {} if document is None else document.get(name) or {}
    if not isinstance(found, dict):
        raise _nonsense(f"{name} is not a JSON object")
    return None if document is None else dict(found)
