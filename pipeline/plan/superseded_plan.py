"""The messages of one catalog version, found at a later one: what is merged or compacted is garbage in time.

A stream that was down for days runs its last batch again, and a DataFrame may be days old: the version they were
planned from is still there, its pages of runs may not be. Which messages are meant is then what the old version says,
and where they are what the newest says. Owns that translation; not planning (archive_plan.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pipeline.plan.filled_gaps import Layer, gaps_in, layers, without
from pipeline.plan.partitions import OffsetRange
from tiered.catalog.reading import load
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError
from tiered.model.queue import QueueKey
from tiered.object_store.protocol import ObjectStore

OnExpired = Callable[[QueueKey, OffsetRange], None]
"""Told of offsets that were deleted since; raises, or returns to go on without them."""
PLAN_AGAIN = "run the job again: it plans from the newest version"


def later_layers(
    store: ObjectStore,
    before: CatalogState,
    newest: CatalogState,
    wanted: Iterable[Layer],
    on_expired: OnExpired,
) -> list[Layer]:
    """The ranges of ``newest`` that hold what ``wanted`` held at ``before``: without what was filled into gaps since.

    Raises NotFoundError for what a replaced log took back, and what ``on_expired`` raises.
    """
    gaps, ends = gaps_in(before), KeptEnds(store, newest, before.version)
    pieces: dict[QueueKey, list[OffsetRange]] = {}
    for layer in wanted:
        for queue, one in layer.items():
            found = list(without(one, gaps.get(queue, ())))
            if not found:
                continue
            row = newest.queue(queue)
            floor = found[-1].end if row is None else int(row["min_queue_offset"])
            if found[0].begin < floor:
                on_expired(queue, OffsetRange(found[0].begin, min(floor, found[-1].end)))
                found = [
                    OffsetRange(max(piece.begin, floor), piece.end) for piece in found if piece.end > floor
                ]
            if found and found[-1].end > ends.of(queue):
                raise taken_back(queue, found[-1].end, before.version)
            pieces.setdefault(queue, []).extend(found)
    return list(layers(pieces))


class KeptEnds:
    """Up to where queues still have at ``newest`` the messages they had at ``version``."""

    def __init__(self, store: ObjectStore, newest: CatalogState, version: int) -> None:
        self.newest = newest
        self._commons = [
            load(store, version=line.common_version)
            for line in newest.log_histories
            if line.version > version and line.common_version > 0
        ]

    def of(self, queue: QueueKey) -> int:
        """A queue offset."""
        states = (self.newest, *self._commons)
        rows = [state.queue(queue) for state in states]
        return min(0 if row is None else int(row["end_queue_offset"]) for row in rows)


def taken_back(queue: QueueKey, end: int, version: int) -> NotFoundError:
    """What a log that another replaced had up to offset ``end``."""
    return NotFoundError(
        f"{queue} before offset {end} was taken back by a replaced log since catalog version {version}",
        hint=PLAN_AGAIN,
    )


def expired(queue: QueueKey, offsets: OffsetRange, version: int) -> NotFoundError:
    """What retention deleted."""
    return NotFoundError(
        f"{queue}: offsets [{offsets.begin}, {offsets.end}) have expired since catalog version {version}",
        hint=PLAN_AGAIN,
    )
