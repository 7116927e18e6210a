"""What compaction rounds save and cost, before they run: objects, GETs, bytes, money. Pure.

Objects and bytes of sources that several rounds share are counted in parts.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import numpy as np

from rocketmq_tiered.maintenance.compaction_round import PlannedRound
from rocketmq_tiered.maintenance.prices import Prices
from rocketmq_tiered.maintenance.reader_gets import moved_bytes, reader_gets
from tiered.archive.rewrite.sources import WHOLE_BYTES_MAX, readings_of

MIB = 1 << 20
SOURCE_READ_BYTES = 16 * MIB
WINDOW_BYTES = 3584 * MIB
"""The default of compaction.spool_bytes without outputs."""
PART_BYTES = 16 * MIB
COMMIT_PUTS = 3
"""PUTs of a round for its intent, its pages and its commit."""


@dataclass(frozen=True)
class CompactionForecast:
    """Sums of rounds. ``message_bytes``: before compression. ``read_bytes``: fetched and sent again by rewriting;
    ``copied_bytes``: copied inside the store by joining. ``source_bytes`` stay until gc deletes them. ``estimated``:
    rounds that were not planned, but are taken for the like of another one."""

    rounds: int = 0
    estimated: int = 0
    objects: int = 0
    new_objects: int = 0
    message_bytes: int = 0
    source_bytes: int = 0
    read_bytes: int = 0
    copied_bytes: int = 0
    gets: int = 0
    puts: int = 0
    reader_gets: int = 0
    new_reader_gets: int = 0

    def __add__(self, other: CompactionForecast) -> CompactionForecast:
        return CompactionForecast(
            *(getattr(self, one.name) + getattr(other, one.name) for one in fields(self))
        )

    def times(self, factor: float) -> CompactionForecast:
        """So many rounds of this kind, about."""
        found = CompactionForecast(*(round(getattr(self, one.name) * factor) for one in fields(self)))
        return replace(found, estimated=found.rounds - self.rounds)

    @property
    def gets_saved(self) -> int:
        """Each time that every queue is read."""
        return self.reader_gets - self.new_reader_gets

    def price(self, prices: Prices, grace_days: float) -> float:
        """Price of the compaction: its requests and reads, and the sources kept for ``grace_days``."""
        requests = prices.requests(puts=self.puts, gets=self.gets)
        return requests + prices.reads(self.read_bytes) + prices.storage(self.source_bytes, grace_days)

    def saving(self, prices: Prices) -> float:
        """Each time that every queue is read."""
        return prices.requests(gets=self.gets_saved)


def forecast(rounds: Iterable[PlannedRound]) -> CompactionForecast:
    """The sum over ``rounds``, each with the later ones that are its like."""
    # Not a loop, whose variable would keep a round while the next one is planned.
    return sum(map(_of_its_like, rounds), CompactionForecast())


def _of_its_like(planned: PlannedRound) -> CompactionForecast:
    return of_round(planned).times(1 / planned.range.share)


def of_round(planned: PlannedRound) -> CompactionForecast:
    """Forecast of ``planned`` alone."""
    candidates, plan = planned.candidates, planned.plan
    before, after = reader_gets(candidates, plan)
    output, _, size = moved_bytes(candidates, plan)
    all_bytes = candidates.objects["size_bytes"][plan.sources]
    source_bytes = int((all_bytes * candidates.share[plan.sources]).sum())
    read_bytes = 0 if plan.copies else int(size.sum())
    output_bytes = np.bincount(output, weights=size, minlength=len(plan.outputs))
    if plan.copies:
        gets = len(plan.sources)  # tails and key sections
    else:
        passes = len(readings_of(candidates, plan.iterations, WINDOW_BYTES)[0])
        is_whole = int(all_bytes.sum()) <= WHOLE_BYTES_MAX * len(plan.sources)
        gets = len(plan.sources) * passes * (1 if is_whole else 2) + read_bytes // SOURCE_READ_BYTES
    return CompactionForecast(
        rounds=1, objects=round(planned.objects), new_objects=len(plan.outputs),
        message_bytes=planned.message_bytes, source_bytes=source_bytes,
        read_bytes=read_bytes, copied_bytes=source_bytes if plan.copies else 0, gets=gets,
        puts=COMMIT_PUTS + int(sum(_puts(size) for size in output_bytes.tolist())),
        reader_gets=before, new_reader_gets=after,
    )  # fmt: skip


def carried_out(planned: PlannedRound) -> CompactionForecast:
    """Forecast of ``planned`` with only the sources that no later round needs: sums over all rounds are exact."""
    gone = planned.candidates.objects["size_bytes"][planned.gone]
    return replace(of_round(planned), objects=len(gone), source_bytes=int(gone.sum()))


def _puts(size_bytes: float) -> int:
    return 1 if size_bytes <= PART_BYTES else 2 + int(-(-size_bytes // PART_BYTES))
