"""Reads messages delivered into queues that grow here, in addition to archived ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from fetcher.io.waiting import SLICE_S
from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from rocketmq_tiered.server.backend.backend import Bounds
from rocketmq_tiered.server.retries.retry_state import RetryMessage, RetryQueue, RetryState


class DeliveredQueues:
    """Queue 0 of some topics. Belongs to one event loop; subclasses change ``state``."""

    def __init__(self) -> None:
        self.state = RetryState()
        self._grown = asyncio.Event()
        self.first_free_offset: Callable[[str], int] = lambda topic: 0
        """Topic -> first offset of its queue 0 past the archived messages and those consumed at the broker."""

    def announce(self) -> None:
        """Wake waiting readers."""
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def delivered(self) -> Coroutine[Any, Any, object]:
        """Awaitable: ends at the next delivery after this call."""
        return self._grown.wait()

    def topics(self) -> list[str]:
        """Topics with queues here."""
        return list(self.state.queues)

    def queue(self, topic: str) -> RetryQueue | None:
        """Queue 0 of a topic, if it ever had messages here."""
        return self.state.queues.get(topic)

    def message(self, number: int) -> RetryMessage | None:
        """A stored message."""
        return self.state.messages.get(number)

    def messages_from(self, topic: str, offset: int, count: int) -> list[RetryMessage]:
        """Up to ``count`` delivered messages from ``offset`` on."""
        queue = self.state.queues.get(topic)
        if queue is None:
            return []
        at = queue.at(offset)
        return [self.state.messages[number] for number in queue.numbers[at : at + count]]

    def pull(self, request: PullRequest, bounds: Bounds) -> PullResult:
        """Messages of the part that grows here, as many as the request's filter examines in one slice. ``bounds``: of
        the whole queue."""
        queue = self.state.queues[request.topic]
        if request.offset >= queue.next_offset:
            is_end = request.offset == queue.next_offset
            status = PullStatus.OFFSET_OVERFLOW_ONE if is_end else PullStatus.OFFSET_OVERFLOW_BADLY
            return PullResult(status, request.offset if is_end else queue.next_offset, *bounds)
        wanted, ends_s = request.filter, time.perf_counter() + SLICE_S
        body: list[bytes] = []
        size, following = 0, queue.next_offset if not queue.offsets else max(request.offset, queue.min_offset)
        for message in self.messages_from(request.topic, request.offset, request.count):
            if wanted is None or wanted.keep(memoryview(message.data)):
                if body and size + len(message.data) > request.max_bytes:
                    break
                body.append(message.data)
                size += len(message.data)
            following = message.queue_offset + 1
            if wanted is not None and time.perf_counter() >= ends_s:
                break
        status = PullStatus.FOUND if body else PullStatus.NO_MATCHED_MESSAGE
        return PullResult(status, following, *bounds, body, len(body))
