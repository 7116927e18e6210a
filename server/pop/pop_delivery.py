"""Which messages a POP request gets: first what was not acknowledged in time, then what nobody had yet.

Owns that order and its limits. Does not own waiting or the requests (pop_handlers.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from fetcher.rows.pull import PullRequest, PullStatus
from server.backend.backend import Backend
from server.groups.client_table import TAG
from server.pop.pop_messages import records, redelivered
from server.pop.pop_queues import PlaceKey, PopPlace, PopPlaces

UNACKED_MAX = 2_000
"""Messages of a queue that a group may have in hand; more are given out when some are acknowledged."""
EMPTY_STEPS_MAX = 64
"""Steps over messages that the filter does not want, in one request and queue."""


@dataclass(frozen=True)
class PopRequest:
    """What one request asks for. ``in_order``: nothing of a queue while something of it is in hand."""

    group: str
    topic: str
    count: int
    invisible_ms: int
    expression: str
    expression_type: str
    in_order: bool


@dataclass
class Given:
    """What was found so far: records in order, and their offsets by queue."""

    body: list[bytes] = field(default_factory=list)
    offsets: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    rest: int = 0
    size: int = 0

    def add(self, queue_id: int, offset: int, data: bytes) -> None:
        """One record more."""
        self.body.append(data)
        self.offsets[queue_id].append(offset)
        self.size += len(data)


class PopDelivery:
    """Reads ``archive`` for groups. ``clock_ms``: the time of day."""

    def __init__(
        self, archive: Backend, places: PopPlaces, bytes_max: int, clock_ms: Callable[[], int]
    ) -> None:
        self._archive, self._places = archive, places
        self._bytes_max, self._clock_ms = bytes_max, clock_ms

    async def given(self, wish: PopRequest, queues: list[int]) -> Given:
        """What of ``queues``, in their order, goes out now. Raises UsageError for a filter or messages that cannot be
        popped, and what reading raises."""
        answer = Given()
        for queue_id in queues:
            bounds = self._archive.bounds(wish.topic, queue_id)
            if bounds is None:
                continue
            key = wish.group, wish.topic, queue_id
            place = self._places.taken(key)
            async with place.lock:
                if len(answer.body) < wish.count:
                    await self._repeat(wish, queue_id, place, answer)
                    await self._give(wish, key, place, answer)
                self._places.note(key, place)
                answer.rest += max(0, bounds.maximum - place.state.next_offset)
        return answer

    async def _repeat(self, wish: PopRequest, queue_id: int, place: PopPlace, answer: Given) -> None:
        """What was not acknowledged in time."""
        visible = place.state.visible(self._clock_ms())
        if wish.in_order and len(visible) < len(place.state.unacked):
            return
        for offset in visible:
            if len(answer.body) >= wish.count or answer.size >= self._bytes_max:
                return
            found = await self._archive.pull(self._pull(wish, queue_id, offset, 1, "*", TAG))
            popped = (
                next(iter(records(found.body, wish.topic)), None)
                if found.status is PullStatus.FOUND
                else None
            )
            if popped is None or popped.offset != offset:
                place.state.acknowledge(offset)  # it is gone: nobody can get it any more
                continue
            unacked = place.state.give(offset, self._clock_ms(), wish.invisible_ms)
            answer.add(queue_id, offset, redelivered(popped.data, unacked.times))

    async def _give(self, wish: PopRequest, key: PlaceKey, place: PopPlace, answer: Given) -> None:
        """What nobody had yet."""
        state, queue_id = place.state, key[2]
        for _ in range(EMPTY_STEPS_MAX):
            room = min(UNACKED_MAX - len(state.unacked), self._places.room())
            count = min(wish.count - len(answer.body), room)
            if count <= 0 or answer.size >= self._bytes_max or (wish.in_order and state.unacked):
                return
            pull = self._pull(wish, queue_id, state.next_offset, count, wish.expression, wish.expression_type)
            found = await self._archive.pull(pull)
            if found.status is PullStatus.FOUND:
                for popped in records(found.body, wish.topic):
                    if not self._places.room():
                        return  # others were given messages while this was read
                    state.give(popped.offset, self._clock_ms(), wish.invisible_ms)
                    answer.add(queue_id, popped.offset, popped.data)
                    self._places.count(key, place)
                state.skip_to(found.next_offset)
                return
            if found.status not in (PullStatus.NO_MATCHED_MESSAGE, PullStatus.OFFSET_TOO_SMALL):
                return
            if found.next_offset <= state.next_offset:
                return
            state.skip_to(found.next_offset)

    def _pull(
        self, wish: PopRequest, queue_id: int, offset: int, count: int, expression: str, kind: str
    ) -> PullRequest:
        return PullRequest(wish.topic, queue_id, offset, count, self._bytes_max, wish.group, expression, kind)
