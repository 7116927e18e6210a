"""Reading what was delivered into queues that grow here, beside those of the archive.

Owns nothing but a state (retry_state.py), which others change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from fetcher.rows.pull import PullRequest, PullResult, PullStatus
from server.backend.backend import Bounds
from server.groups.subscription_filter import filter_of
from server.retries.retry_state import RetryMessage, RetryQueue, RetryState


class DeliveredQueues:
    """Queue 0 of some topics. Belongs to one event loop."""

    def __init__(self) -> None:
        self.state = RetryState()
        self._grown = asyncio.Event()
        self.free_from: Callable[[str], int] = lambda topic: 0
        """The first offset of a topic's queue 0 behind what is archived and what was consumed at the broker."""

    def announce(self) -> None:
        """Wake who waits for messages."""
        grown, self._grown = self._grown, asyncio.Event()
        grown.set()

    def delivered(self) -> Coroutine[Any, Any, object]:
        """To be awaited: ends at the next delivery after this call."""
        return self._grown.wait()

    def topics(self) -> list[str]:
        """Topics with queues here."""
        return list(self.state.queues)

    def queue(self, topic: str) -> RetryQueue | None:
        """Queue 0 of a topic, where messages are or were."""
        return self.state.queues.get(topic)

    def message(self, number: int) -> RetryMessage | None:
        """One that is kept."""
        return self.state.messages.get(number)

    def messages_from(self, topic: str, offset: int, count: int) -> list[RetryMessage]:
        """Up to ``count`` delivered ones at ``offset`` and after it."""
        queue = self.state.queues.get(topic)
        if queue is None:
            return []
        at = queue.at(offset)
        return [self.state.messages[number] for number in queue.numbers[at : at + count]]

    def pull(self, request: PullRequest, bounds: Bounds) -> PullResult:
        """Messages of our part of a queue; ``bounds`` are the whole queue's."""
        queue = self.state.queues[request.topic]
        if request.offset >= queue.next_offset:
            is_end = request.offset == queue.next_offset
            status = PullStatus.OFFSET_OVERFLOW_ONE if is_end else PullStatus.OFFSET_OVERFLOW_BADLY
            return PullResult(status, request.offset if is_end else queue.next_offset, *bounds)
        wanted = filter_of(request.expression, request.expression_type)
        body: list[bytes] = []
        size, following = 0, queue.next_offset if not queue.offsets else max(request.offset, queue.min_offset)
        for message in self.messages_from(request.topic, request.offset, request.count):
            if wanted is None or wanted.keep(memoryview(message.data)):
                if body and size + len(message.data) > request.max_bytes:
                    break
                body.append(message.data)
                size += len(message.data)
            following = message.queue_offset + 1
        status = PullStatus.FOUND if body else PullStatus.NO_MATCHED_MESSAGE
        return PullResult(status, following, *bounds, body, len(body))
