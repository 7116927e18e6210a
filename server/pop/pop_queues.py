"""The queues that groups pop from: what of each is in hand, and how far the group's offset follows.

A group's offset follows the messages acknowledged without a gap. A new group begins with the first archived message: a
proxy always asks for the end (initMode), where an archive has nothing to give. A group that was moved begins anew.

What is in somebody's hands weighs more than the offsets of groups: all of it has a bound of its own. Above it no more
is given out, and queues that nobody uses are forgotten first.

Owns which queues are known, forgetting them, and that bound. What is in somebody's hands is pop_state.py's.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field

from server.backend.backend import Backend
from server.groups.group_offsets import GroupOffsets
from server.pop.pop_state import PopQueue
from server.wire.request import BadRequestError

PlaceKey = tuple[str, str, int]
"""Group, topic, queue id."""
BYTES_MAX = 64 * 1024 * 1024
SWEEP_S = 1.0
"""Where there is no room, queues that nobody uses are looked for so often."""
PLACE_BYTES, IN_HAND_BYTES = 1_200, 250
"""A queue with its lock and its tables, without the group's name; a message in somebody's hands. Measured."""


@dataclass(slots=True)
class PopPlace:
    """A queue of a group, taken by one request at a time. ``noted``: the offset last told to the group's.
    ``counted_bytes``: what it last was in the sum of all."""

    state: PopQueue
    noted: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used_s: float = 0.0
    counted_bytes: int = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is in anybody's hands, and nobody is about it: its group goes on from its offset."""
        return not self.state.unacked and not self.lock.locked()


class PopPlaces:
    """All of them. Belongs to one event loop."""

    def __init__(self, archive: Backend, offsets: GroupOffsets, *, bytes_max: int = BYTES_MAX) -> None:
        self._archive, self._offsets = archive, offsets
        self._bytes_max = bytes_max
        self._places: dict[PlaceKey, PopPlace] = {}
        self.held_bytes = 0
        """Memory of all of them, about."""
        self._swept_s = float("-inf")

    def __len__(self) -> int:
        return len(self._places)

    def find(self, key: PlaceKey) -> PopPlace | None:
        """A queue that was popped from, as long as it is known."""
        return self._places.get(key)

    def taken(self, key: PlaceKey) -> PopPlace:
        """The queue, to pop from it: as it is known, or from the group's offset on. Raises BadRequestError where no
        offset of it could be kept."""
        known = self._offsets.find(*key)
        if known is None:
            known = self._archive.archived_offset(*key)
        place = self._places.get(key)
        if not self._offsets.has_room(*key):  # its offset would be lost, and everything come again
            raise BadRequestError("group offsets are at their memory limit (serve.memory_bytes)")
        if place is None or known != place.noted:  # new, or the group was moved, or the topic made anew
            if known is None:
                bounds = self._archive.bounds(key[1], key[2])
                known = 0 if bounds is None else bounds.minimum
            if place is None and not self._has_room(_bytes_of(key, 0)):
                raise BadRequestError("popped messages are at their memory limit (serve.memory_bytes)")
            counted_bytes = 0 if place is None else place.counted_bytes
            place = self._places[key] = PopPlace(PopQueue(known), known, counted_bytes=counted_bytes)
            self._offsets.note(*key, known)
        place.used_s = time.monotonic()
        self.count(key, place)
        return place

    def room(self) -> int:
        """Messages that may be given out before too many are in hand."""
        if not self._has_room(IN_HAND_BYTES):
            return 0
        return (self._bytes_max - self.held_bytes) // IN_HAND_BYTES

    def _has_room(self, more_bytes: int) -> bool:
        if self.held_bytes + more_bytes > self._bytes_max and time.monotonic() - self._swept_s >= SWEEP_S:
            self._swept_s = time.monotonic()
            self.expire(0.0)
        return self.held_bytes + more_bytes <= self._bytes_max

    def count(self, key: PlaceKey, place: PopPlace) -> None:
        """What is in hand of the queue may have changed."""
        if self._places.get(key) is place:
            now_bytes = _bytes_of(key, len(place.state.unacked))
            self.held_bytes += now_bytes - place.counted_bytes
            place.counted_bytes = now_bytes

    def note(self, key: PlaceKey, place: PopPlace) -> None:
        """Have the group's offset follow, and the count of what is in hand."""
        self.count(key, place)
        done = place.state.done_offset
        if done > place.noted and self._places.get(key) is place:
            place.noted = done
            self._offsets.note(*key, done)

    def expire(self, idle_s: float = 600.0) -> None:
        """Forget queues that nobody uses and where nothing is in hand."""
        limit_s = time.monotonic() - idle_s
        self._places = {
            key: place for key, place in self._places.items() if place.used_s > limit_s or not place.is_idle
        }
        self.held_bytes = sum(place.counted_bytes for place in self._places.values())


def _bytes_of(key: PlaceKey, unacked: int) -> int:
    return PLACE_BYTES + sys.getsizeof(key[0]) + IN_HAND_BYTES * unacked
