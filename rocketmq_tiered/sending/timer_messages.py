"""Reads the messages of timers: each block once for all that are in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fetcher.access import ArchiveAccess
from fetcher.io.waiting import run_sync
from fetcher.rows.message import Message
from fetcher.walk import Span, messages_of
from rocketmq_tiered.sending.timer_delivery import Place

NEAR = 64
"""Messages between two wanted ones that are read as well."""


class TimerMessages:
    """Messages of an archive, which is opened at the first use."""

    def __init__(self, open_access: Callable[[], ArchiveAccess]) -> None:
        self._open = open_access
        self._access: ArchiveAccess | None = None

    def close(self) -> None:
        """Close the archive."""
        if self._access is not None:
            self._access.close()

    def read(self, places: Sequence[Place]) -> Mapping[Place, Message]:
        """Those that exist. Raises what reading raises."""
        if self._access is None:
            self._access = self._open()
        access, found = self._access, dict[Place, Message]()
        run_sync(access.refresh())
        for spans in _spans(sorted(places)):
            queue, offsets = spans[0][0], {offset for _, offset in spans}
            if access.state.queue(queue) is None:
                continue
            first, last = min(offsets), max(offsets)
            walk = run_sync(access.walk(queue, Span(first, None, last - first + 1), None))
            is_batch = access.is_batch(queue)
            while walk.offset <= last and (batch := run_sync(walk.next_batch())) is not None:
                for message in messages_of(batch, queue, is_batch=is_batch):
                    if message.queue_offset in offsets:
                        found[queue, message.queue_offset] = message
        return found


def _spans(places: Sequence[Place]) -> list[list[Place]]:
    """Sorted ``places`` in parts that are near each other."""
    parts: list[list[Place]] = []
    for queue, offset in places:
        if parts and parts[-1][-1][0] == queue and offset - parts[-1][-1][1] <= NEAR:
            parts[-1].append((queue, offset))
        else:
            parts.append([(queue, offset)])
    return parts
