"""Reads the messages of timers: each block once for all that are in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np

from fetcher.access import ArchiveAccess
from fetcher.io.waiting import run_sync
from fetcher.rows.message import Message
from fetcher.walk import Span, messages_of
from rocketmq_tiered.sending.timer_delivery import Place
from tiered.model.queue import QueueKey

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
        """Those that exist, without what lies beside them. Raises what reading raises."""
        if self._access is None:
            self._access = self._open()
        access, found = self._access, dict[Place, Message]()
        run_sync(access.refresh())
        by_queue: dict[QueueKey, list[int]] = {}
        for queue, offset in places:
            by_queue.setdefault(queue, []).append(offset)
        for queue, offsets in by_queue.items():
            if access.state.queue(queue) is None:
                continue
            every, is_batch = np.unique(np.array(offsets, np.int64)), access.is_batch(queue)
            for near in np.split(every, np.flatnonzero(np.diff(every) > NEAR) + 1):
                first, last = int(near[0]), int(near[-1])
                walk = run_sync(access.walk(queue, Span(first, None, last - first + 1), None))
                while walk.offset <= last and (batch := run_sync(walk.next_batch())) is not None:
                    wanted = batch.select(np.isin(batch.queue_offsets, near))
                    for message in messages_of(wanted, queue, is_batch=is_batch):
                        message.data = memoryview(bytes(message.data))
                        found[queue, message.queue_offset] = message
        return found
