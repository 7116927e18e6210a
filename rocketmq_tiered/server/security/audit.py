"""The audit logs: reads of each queue, and events: refusals, resets of offsets, commits by clients outside the group
(their heartbeats do not name it).

Reads: one line per interval for each reader of a queue, with client host, account, group, topic, queue, offset range,
reads and bytes. Lookups of single messages have no queue. Events: the first requests of a kind in an interval are
logged at once. Equal later ones are counted and logged at its end, all others as one sum. So a flood of refusals
neither fills the disk nor hides a reset. Reloads are logged where they happen and counted here. The account is the one
that the request names: of a refused request it proves nothing.
"""

import logging
from collections.abc import Callable
from enum import StrEnum

from rocketmq_tiered.server.security.addresses import host_of
from rocketmq_tiered.server.wire.request import NUMBER_CHARS_MAX, Peer, Request, Response
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.remoting.command import RequestCode, ResponseCode
from tiered.remoting.credentials import ACCESS_KEY

logger = logging.getLogger(__name__)

ENTRIES_MAX = 20_000
NAME_CHARS = 262
"""Limit of one name: the retry topic of the longest group has so many."""
_READS = frozenset(
    {
        RequestCode.PULL_MESSAGE,
        RequestCode.LITE_PULL_MESSAGE,
        RequestCode.POP_MESSAGE,
        RequestCode.QUERY_MESSAGE,
        RequestCode.VIEW_MESSAGE_BY_ID,
    }
)


class _Sums:
    __slots__ = ("body_bytes", "first_offset", "next_offset", "reads")

    def __init__(self, first_offset: str) -> None:
        self.first_offset, self.next_offset = first_offset, ""
        self.reads = self.body_bytes = 0


class Audit:
    """Sums of the current interval. ``interval_s`` 0: no audit log. Times are monotonic."""

    def __init__(self, interval_s: float, now_s: float) -> None:
        self._interval_s, self._written_s = interval_s, now_s
        self._sums: dict[tuple[str, str, str, str, str], _Sums] = {}
        """Keyed by client host, account, group, topic and queue id."""

    def note(self, request: Request, response: Response, body_bytes: int, account: str) -> None:
        """Count a reply with messages for the client that read them. ``body_bytes``: of the reply's body; ``account``:
        of the client. Replies without messages, and to other requests, are not counted."""
        if not self._interval_s or not body_bytes or response.code != 0 or request.code not in _READS:
            return
        get = request.fields.get
        host = host_of(request.peer.address)
        reader = host, account, get("consumerGroup", ""), get("topic", ""), get("queueId", "")
        sums = self._sums.get(reader) or self._added(reader, get("queueOffset", ""))
        sums.reads += 1
        sums.body_bytes += body_bytes
        sums.next_offset = response.ext.get("nextBeginOffset", "")

    def _added(self, reader: tuple[str, str, str, str, str], first_offset: str) -> _Sums:
        """Return the sums of a reader that is not known by its full names: those of its shortened names, as requests
        may carry any text. A new entry is made if needed; if there are too many, all are logged first."""
        host, account, group, topic, queue_id = reader
        names = (account[:NAME_CHARS], group[:NAME_CHARS], topic[:NAME_CHARS])
        shortened = host, *names, queue_id[:NUMBER_CHARS_MAX]
        if shortened not in self._sums:
            if len(self._sums) >= ENTRIES_MAX:
                self.write()
            self._sums[shortened] = _Sums(first_offset[:NUMBER_CHARS_MAX])
        return self._sums[shortened]

    def tick(self, now_s: float) -> None:
        """Write the log if the interval is over."""
        if now_s - self._written_s >= self._interval_s:
            self._written_s = now_s
            self.write()

    def write(self) -> None:
        """Log one line for each reader of a queue with its sums since the last call."""
        sums, self._sums = self._sums, {}
        for (host, account, group, topic, queue_id), sum_ in sums.items():
            offsets = f"{sum_.first_offset}-{sum_.next_offset}" if sum_.next_offset else ""
            logger.info(
                "read",
                extra={
                    "client": host,
                    "account": account,
                    "group": group,
                    "topic": topic,
                    "queue": queue_id,
                    "offsets": offsets,
                    "reads": sum_.reads,
                    "bytes": sum_.body_bytes,
                },
            )


event_log = logging.getLogger("rocketmq_tiered.audit")

INTERVAL_S = 60.0
LINES_MAX = 20
"""Different requests of each kind that are logged in an interval."""
ACCOUNT_CHARS, REASON_CHARS = 64, 200
_UPDATE, _RESET = int(RequestCode.UPDATE_CONSUMER_OFFSET), int(RequestCode.INVOKE_BROKER_TO_RESET_OFFSET)
_COMMITS = frozenset({int(RequestCode.PULL_MESSAGE), int(RequestCode.LITE_PULL_MESSAGE), _UPDATE})
"""As numbers: an enum member lookup costs as much as a call, for every pull."""
_COMMIT_FLAG = 1
"""A bit of a pull's sysFlag: the pull commits an offset."""
_NO_PERMISSION = int(ResponseCode.NO_PERMISSION)


class AuditEvent(StrEnum):
    """Values are labels of the metric."""

    REFUSED = "refused"
    RESET = "reset"
    COMMIT = "commit"
    TIMER = "timer"
    RELOAD = "reload"
    RELOAD_FAILED = "reload_failed"


_MESSAGES = {
    AuditEvent.REFUSED: "refused",
    AuditEvent.RESET: "reset",
    AuditEvent.COMMIT: "commit by a client outside the group",
    AuditEvent.TIMER: "timer kept or recalled",
}
_Seen = tuple[str, str, int, str, str, str]
"""Client host, account, request code, group, topic, result."""


class AuditEvents:
    """Belongs to one event loop; ``counts`` may be read from any thread."""

    def __init__(
        self,
        is_member: Callable[[str, Peer], bool] = lambda *_: True,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        """``is_member``: whether the client at a connection belongs to a group by its heartbeats. Commits of others are
        logged."""
        self._is_member = is_member
        self.counts = {event.value: 0 for event in AuditEvent}
        """Since the start."""
        self._repeats: dict[AuditEvent, dict[_Seen, int]] = {event: {} for event in _MESSAGES}
        """Requests logged in the current interval, and how often each came again."""
        self._unlisted = dict.fromkeys(_MESSAGES, 0)
        self._written_s = clock.monotonic_s()

    def is_outside(self, request: Request) -> bool:
        """Return whether a request commits an offset of a group to which its client does not belong: no heartbeat on
        the connection has named the group."""
        code, fields = request.code, request.fields
        if code not in _COMMITS or not _commits(
            code, fields.get("sysFlag", ""), fields.get("commitOffset", "-1")
        ):
            return False
        return not self._is_member(fields.get("consumerGroup", ""), request.peer)

    def record(self, request: Request, response: Response | None, *, was_outside: bool = True) -> None:
        """Log and count a request that is an event for the audit: it was refused, kept or recalled a timer, reset
        offsets, or committed for a group that its client is not in. ``response`` None: there is none, as to a relayed
        commit. ``was_outside``: what `is_outside` said when the request came; since then the client may have joined the
        group."""
        code = request.command.code
        if response is not None and response.code == _NO_PERMISSION:
            self._add(AuditEvent.REFUSED, request, response)
        elif request.place:
            self._add(AuditEvent.TIMER, request, response)
        elif code in _COMMITS:
            if was_outside and self.is_outside(request):
                self._add(AuditEvent.COMMIT, request, response)
        elif code == _RESET:
            self._add(AuditEvent.RESET, request, response)

    def reloaded(self, is_loaded: bool) -> None:
        """Rules or a certificate changed, and were loaded or not."""
        self.counts[AuditEvent.RELOAD if is_loaded else AuditEvent.RELOAD_FAILED] += 1

    def _add(self, event: AuditEvent, request: Request, response: Response | None) -> None:
        """Log a request as an event when it is the first of its kind in the interval. Equal ones are counted, and
        logged at the end of the interval; different ones beyond LINES_MAX are only counted."""
        self.counts[event] += 1
        get = request.fields.get
        group = get("consumerGroup") or get("group") or get("groupName", "")
        seen = (
            host_of(request.peer.address),
            request.command.ext_fields.get(ACCESS_KEY, "")[:ACCOUNT_CHARS],
            request.code,
            group[:NAME_CHARS],
            (get("topic") or get("originTopic", ""))[:NAME_CHARS],
            "" if response is None else _result(response.code),
        )
        repeats = self._repeats[event]
        if seen in repeats:
            repeats[seen] += 1
        elif len(repeats) < LINES_MAX:
            repeats[seen] = 0
            details = {"place": request.place} if request.place else {"offset": _offset(request)}
            if event == AuditEvent.REFUSED:
                details = {}  # nothing was read, so no message is concerned
            if response is not None and response.remark:
                details["reason"] = response.remark[:REASON_CHARS]
            _log(event, seen, 1, client=request.peer.address, **details)
        else:
            self._unlisted[event] += 1

    def tick(self, now_s: float) -> None:
        """Write the counts if the interval is over."""
        if now_s - self._written_s >= INTERVAL_S:
            self._written_s = now_s
            self.write()

    def write(self) -> None:
        """Log one line for each request that came again since the last call, and one line with the number of all that
        were not logged."""
        for event, message in _MESSAGES.items():
            for seen, count in self._repeats[event].items():
                if count:
                    _log(event, seen, count, client=seen[0])
            if self._unlisted[event]:
                event_log.warning(
                    "%s: more requests of this kind came, which are not listed",
                    message,
                    extra={"count": self._unlisted[event]},
                )
            self._repeats[event], self._unlisted[event] = {}, 0


def _commits(code: int, flags: str, offset: str) -> bool:
    if offset.startswith("-"):
        return False
    if code == _UPDATE:
        return True
    return len(flags) <= NUMBER_CHARS_MAX and flags.isdecimal() and bool(int(flags) & _COMMIT_FLAG)


def _offset(request: Request) -> str:
    """Return the offset that a request commits or resets to as text: ``7``, or for a reset by time ``time 7``."""
    get = request.fields.get
    offset = get("commitOffset") or get("offset", "")
    if not offset or offset.startswith("-"):
        return f"time {get('timestamp', '')[:NUMBER_CHARS_MAX]}"
    return offset[:NUMBER_CHARS_MAX]


def _result(code: int) -> str:
    return ResponseCode(code).name if code in _RESULTS else str(code)


_RESULTS = frozenset(map(int, ResponseCode))
_REQUESTS = {int(code): code.name for code in RequestCode}


def _log(event: AuditEvent, seen: _Seen, count: int, *, client: str, **details: str) -> None:
    """Log one line for ``count`` equal requests. ``seen``: what they have in common; ``client``: address or host of the
    client; ``details``: more fields."""
    _, account, code, group, topic, result = seen
    event_log.log(
        logging.WARNING if event == AuditEvent.REFUSED else logging.INFO,
        _MESSAGES[event],
        extra={
            "client": client,
            "account": account,
            "code": code,
            "request": _REQUESTS.get(code, ""),
            "group": group,
            "topic": topic,
            "result": result,
            "count": count,
            **details,
        },
    )
