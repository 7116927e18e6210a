"""Gaps that were filled: offsets that held nothing at one catalog version, and hold messages at a later one.

What follows the end of a queue is new anyway; a gap below it is filled by a commit of its own, whenever what was lost
is found. Owns that arithmetic for exports and streams, which must neither miss these messages nor read them twice.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter

from pipeline.plan.partitions import OffsetRange
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey

Gaps = Mapping[QueueKey, Sequence[OffsetRange]]
"""Ascending and apart, of the queues that have any."""
Layer = dict[QueueKey, OffsetRange]
"""One range of each of some queues."""
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
    """``gaps`` in any order."""
    found: dict[QueueKey, list[OffsetRange]] = {}
    for queue, gap in gaps:
        found.setdefault(queue, []).append(gap)
    return {queue: sorted(mine, key=lambda gap: gap.begin) for queue, mine in found.items()}


def filled(state: CatalogState, gaps: Gaps, within: Mapping[QueueKey, OffsetRange]) -> list[Layer]:
    """What of ``gaps``, as they were once, is none in ``state``: only ``within``, and nothing that has expired."""
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
    """``wanted`` without ``gaps``, which are ascending and apart."""
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
    """The ranges of every queue, one of each at a time."""
    for number in range(max(map(len, pieces.values()), default=0)):
        yield {queue: ranges[number] for queue, ranges in pieces.items() if number < len(ranges)}


class GapsByVersion:
    """The gaps of the versions of one archive that were seen last: a stream asks what was filled since the version it
    had come to, and the whole state of that one would have to be loaded again."""

    def __init__(self, load: Callable[[int], CatalogState]) -> None:
        self._load = load
        self._known: OrderedDict[int, Gaps] = OrderedDict()

    def note(self, state: CatalogState) -> None:
        """Remember those of ``state``."""
        if state.version not in self._known:
            self._known[state.version] = gaps_in(state)
        self._known.move_to_end(state.version)
        while len(self._known) > VERSIONS_KEPT:
            self._known.popitem(last=False)

    def at(self, version: int) -> Gaps:
        """Those of ``version``. Raises what loading it raises."""
        if version not in self._known:
            self.note(self._load(version))
        self._known.move_to_end(version)
        return self._known[version]
