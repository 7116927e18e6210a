"""Finds the messages of an old catalog version at the newest one.

A stream that was down for days runs its last batch again, and a DataFrame may be days old. The catalog version of
their plan still exists, but its pages of runs may be deleted after a merge or compaction. The old version then
determines which messages are read, and the newest where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rocketmq_tiered.message_table.plan.filled_gaps import Layer, gaps_in, layers, without
from rocketmq_tiered.message_table.plan.partitions import OffsetRange
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.errors import NotFoundError, SnapshotExpiredError
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore

OnExpired = Callable[[QueueKey, OffsetRange], None]
"""Handles offsets that expired since: raises, or returns to skip them."""
PLAN_AGAIN = "run the job again at the newest version"


def later_layers(
    store: ObjectStore,
    before: CatalogState,
    newest: CatalogState,
    wanted: Iterable[Layer],
    on_expired: OnExpired,
) -> list[Layer]:
    """The ranges of ``newest`` with the messages that ``wanted`` had at ``before``; gaps filled since are excluded.

    Raises NotFoundError for messages that a replaced log took back, and what ``on_expired`` raises.
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
    """The offsets up to which queues have the same messages at ``newest`` as at ``version``."""

    def __init__(self, store: ObjectStore, newest: CatalogState, version: int) -> None:
        self.newest = newest
        self._commons = [
            load(store, version=history.common_version)
            for history in newest.log_histories
            if history.version > version and history.common_version > 0
        ]

    def of(self, queue: QueueKey) -> int:
        """The end of the common messages of ``queue``."""
        return min(_end(state, queue) for state in (self.newest, *self._commons))

    def before_divergence(self, queue: QueueKey) -> int | None:
        """The end of ``queue`` at the earliest divergence of the log since ``version``; None without one."""
        return min((_end(state, queue) for state in self._commons), default=None)


def _end(state: CatalogState, queue: QueueKey) -> int:
    row = state.queue(queue)
    return 0 if row is None else max(0, int(row["end_queue_offset"]))


def taken_back(queue: QueueKey, end: int, version: int) -> NotFoundError:
    """The error for messages of a log that was replaced."""
    return NotFoundError(
        f"{queue}: messages before offset {end} were superseded by a replaced log after catalog version {version}",
        hint=PLAN_AGAIN,
    )


def expired(queue: QueueKey, offsets: OffsetRange, version: int) -> SnapshotExpiredError:
    """The error for messages that retention deleted."""
    return SnapshotExpiredError(
        f"{queue}: offsets [{offsets.begin}, {offsets.end}) have expired since catalog version {version}",
        hint=PLAN_AGAIN,
    )
