"""Reads the messages of timers: each block once for all that are in it."""

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
        """Return the messages at ``places``, pairs of queue and queue offset, as far as the archive has them. Raises
        UnavailableError and CorruptionError if the archive cannot be read."""
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
            sorted_offsets, is_batch = np.unique(np.array(offsets, np.int64)), access.is_batch(queue)
            # Offsets that lie close together are read at once, with the messages between them.
            for close in np.split(sorted_offsets, np.flatnonzero(np.diff(sorted_offsets) > NEAR) + 1):
                first, last = int(close[0]), int(close[-1])
                walk = run_sync(access.walk(queue, Span(first, None, last - first + 1), None))
                while walk.offset <= last and (batch := run_sync(walk.next_batch())) is not None:
                    wanted = batch.select(np.isin(batch.queue_offsets, close))
                    for message in messages_of(wanted, queue, is_batch=is_batch):
                        # A copy, so that the block does not stay in memory.
                        message.data = memoryview(bytes(message.data))
                        found[queue, message.queue_offset] = message
        return found
