"""Filled gaps: offsets without messages at one catalog version and with messages at a later one.

Exports and streams must neither miss these messages nor read them twice. A commit of its own fills a gap, at any time.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from rocketmq_tiered.message_table.plan.partitions import OffsetRange
from tiered.catalog.state import CatalogState
from tiered.model.lru import Lru
from tiered.model.queue import QueueKey

Gaps = Mapping[QueueKey, Sequence[OffsetRange]]
"""Ascending disjoint gaps, of the queues that have any."""
Layer = dict[QueueKey, OffsetRange]
"""One range for each of some queues."""
VERSIONS_KEPT = 8


def gaps_in(state: CatalogState) -> Gaps:
    """The gaps of all queues."""
    return by_queue(
        (state.key_of(queue), OffsetRange(begin, end))
        for queue, begin, end in zip(
            state.gaps["queue"].tolist(),
            state.gaps["begin_queue_offset"].tolist(),
            state.gaps["end_queue_offset"].tolist(),
            strict=True,
        )
    )


def by_queue(gaps: Iterable[tuple[QueueKey, OffsetRange]]) -> Gaps:
    """``gaps``, in any order, as Gaps."""
    found: dict[QueueKey, list[OffsetRange]] = {}
    for queue, gap in gaps:
        found.setdefault(queue, []).append(gap)
    return {queue: sorted(mine, key=lambda gap: gap.begin) for queue, mine in found.items()}


def filled(state: CatalogState, gaps: Gaps, within: Mapping[QueueKey, OffsetRange]) -> list[Layer]:
    """The parts of earlier ``gaps`` that are no gap in ``state``, are inside ``within`` and have not expired."""
    if not gaps:
        return []
    now = gaps_in(state)
    pieces: dict[QueueKey, list[OffsetRange]] = {}
    for queue, before in gaps.items():
        row, limits = state.queue(queue), within.get(queue)
        if row is None or limits is None:
            continue
        low = max(limits.begin, int(row["min_queue_offset"]))
        pieces[queue] = [
            piece
            for gap in before
            for piece in without(
                OffsetRange(max(gap.begin, low), min(gap.end, limits.end)), now.get(queue, ())
            )
        ]
    return list(layers(pieces))


def without(wanted: OffsetRange, gaps: Sequence[OffsetRange]) -> Iterator[OffsetRange]:
    """``wanted`` without ``gaps``, which are ascending and disjoint."""
    begin = wanted.begin
    for number in range(bisect_right(gaps, begin, key=attrgetter("end")), len(gaps)):
        gap = gaps[number]
        if gap.begin >= wanted.end:
            break
        if begin < gap.begin:
            yield OffsetRange(begin, gap.begin)
        begin = gap.end
    if begin < wanted.end:
        yield OffsetRange(begin, wanted.end)


def layers(pieces: Mapping[QueueKey, Sequence[OffsetRange]]) -> Iterator[Layer]:
    """The ranges of all queues, one range of each queue at a time."""
    for number in range(max(map(len, pieces.values()), default=0)):
        yield {queue: ranges[number] for queue, ranges in pieces.items() if number < len(ranges)}


class GapsByVersion:
    """Caches the gaps of the latest versions of one archive. A stream needs those of the version it has reached, whose
    state would have to be loaded again."""

    def __init__(self, load: Callable[[int], CatalogState]) -> None:
        self._load = load
        self._cached: Lru[int, Gaps] = Lru(VERSIONS_KEPT)

    def add(self, state: CatalogState) -> None:
        """Cache the gaps of ``state``."""
        if self._cached.get(state.version) is None:
            self._cached.add(state.version, gaps_in(state))

    def at(self, version: int) -> Gaps:
        """The gaps of ``version``. Raises what loading it raises."""
        found = self._cached.get(version)
        if found is None:
            state = self._load(version)
            found = gaps_in(state)
            self._cached.add(version, found)
        return found
