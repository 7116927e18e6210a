"""The queues that groups pop from: what of each is in hand, and how far the group's offset follows.

A group's offset follows the messages acknowledged without a gap. A new group begins with the first archived message: a
proxy always asks for the end (initMode), where an archive has nothing to give. A group that was moved begins anew.

Owns which queues are known, and forgetting them. What is in somebody's hands is pop_state.py's.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field

from fetcher.serving.archive_side import ArchiveSide
from fetcher.serving.group_offsets import GroupOffsets
from fetcher.serving.pop.pop_state import PopQueue
from fetcher.serving.wire.request import BadRequestError

PlaceKey = tuple[str, str, int]
"""Group, topic, queue id."""


@dataclass
class PopPlace:
    """A queue of a group, taken by one request at a time. ``noted``: the offset last told to the group's."""

    state: PopQueue
    noted: int
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    used_s: float = 0.0


class PopPlaces:
    """All of them. Belongs to one event loop."""

    def __init__(self, archive: ArchiveSide, offsets: GroupOffsets) -> None:
        self._archive, self._offsets = archive, offsets
        self._places: dict[PlaceKey, PopPlace] = {}

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
            raise BadRequestError("no offsets of new groups are kept (serve.offsets_bytes_max)")
        if place is None or known != place.noted:  # new, or the group was moved, or the topic made anew
            if known is None:
                bounds = self._archive.bounds(key[1], key[2])
                known = 0 if bounds is None else bounds.minimum
            place = self._places[key] = PopPlace(PopQueue(known), known)
            self._offsets.note(*key, known)
        place.used_s = time.monotonic()
        return place

    def note(self, key: PlaceKey, place: PopPlace) -> None:
        """Have the group's offset follow."""
        done = place.state.done_offset
        if done > place.noted and self._places.get(key) is place:
            place.noted = done
            self._offsets.note(*key, done)

    def expire(self, idle_s: float = 600.0) -> None:
        """Forget queues that nobody uses and where nothing is in hand."""
        limit_s = time.monotonic() - idle_s
        self._places = {
            key: place
            for key, place in self._places.items()
            if place.used_s > limit_s or place.state.in_hand or place.lock.locked()
        }
