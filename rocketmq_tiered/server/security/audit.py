"""Audit log: one line per interval for each reader of a queue, with client host, account, group, topic, queue, offset
range, reads and bytes. Lookups of single messages have no queue.
"""

from __future__ import annotations

import logging

from rocketmq_tiered.server.security.addresses import host_of
from rocketmq_tiered.server.wire.codes import RequestCode
from rocketmq_tiered.server.wire.request import NUMBER_CHARS_MAX, Request, Response

logger = logging.getLogger(__name__)

ENTRIES_MAX = 20_000
NAME_CHARS = 262
"""Limit of one name: the retry topic of the longest group has so many."""
_READS = frozenset({
    RequestCode.PULL_MESSAGE, RequestCode.LITE_PULL_MESSAGE, RequestCode.POP_MESSAGE, RequestCode.QUERY_MESSAGE,
    RequestCode.VIEW_MESSAGE_BY_ID,
})  # fmt: skip


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
        """Count a reply, if it has messages."""
        command = request.command
        if not self._interval_s or not body_bytes or response.code != 0 or command.code not in _READS:
            return
        get = command.ext_fields.get
        host = host_of(request.peer.address)
        reader = host, account, get("consumerGroup", ""), get("topic", ""), get("queueId", "")
        sums = self._sums.get(reader) or self._added(reader, get("queueOffset", ""))
        sums.reads += 1
        sums.body_bytes += body_bytes
        sums.next_offset = response.ext.get("nextBeginOffset", "")

    def _added(self, reader: tuple[str, str, str, str, str], first_offset: str) -> _Sums:
        """The sums of a new reader, with names cut to a bounded length: requests may carry any text."""
        host, account, group, topic, queue_id = reader
        names = (account[:NAME_CHARS], group[:NAME_CHARS], topic[:NAME_CHARS])
        short = host, *names, queue_id[:NUMBER_CHARS_MAX]
        if short not in self._sums:
            if len(self._sums) >= ENTRIES_MAX:
                self.write()
            self._sums[short] = _Sums(first_offset[:NUMBER_CHARS_MAX])
        return self._sums[short]

    def tick(self, now_s: float) -> None:
        """Write the log if the interval is over."""
        if now_s - self._written_s >= self._interval_s:
            self._written_s = now_s
            self.write()

    def write(self) -> None:
        """One line for each reader."""
        sums, self._sums = self._sums, {}
        for (host, account, group, topic, queue_id), sum_ in sums.items():
            offsets = f"{sum_.first_offset}-{sum_.next_offset}" if sum_.next_offset else ""
            logger.info(
                "read",
                extra={
                    "client": host, "account": account, "group": group, "topic": topic, "queue": queue_id,
                    "offsets": offsets, "reads": sum_.reads,
                    "bytes": sum_.body_bytes,
                },
            )  # fmt: skip
