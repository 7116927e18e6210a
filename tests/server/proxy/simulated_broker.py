"""A queue's life as a value that changes: what was sent, what the broker still has, what the uploader has archived
of it, and which catalog version is known.

Owns what is true. Does not own how broker, files and archive tell it (simulated_sides.py).
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from fetcher.policy.read_policy import HeldOffsets
from fetcher.policy.read_router import ArchivedQueue
from tests.kernels.record_builder import Message, encode

RECORD_BYTES, FILE_RECORDS = 200, 8
FILE_BYTES = RECORD_BYTES * FILE_RECORDS
QUEUE_FILE_UNITS = 10


@dataclass(frozen=True)
class Row:
    """A message of the queue at physical offset ``phys``."""

    phys: int
    is_tagged: bool
    record: bytes


@dataclass(frozen=True)
class Version:
    """What one catalog version says of the queue, and of the log."""

    number: int
    low: int = 0
    high: int = 0
    end_phys: int = 0
    dispatched: int = 0
    first_phys: int = 0
    gaps: tuple[tuple[int, int], ...] = ()

    def existing(self, offset: int) -> int:
        """See QueueView.existing."""
        for begin, end in self.gaps:
            if begin <= offset < end:
                offset = end
        return offset


@dataclass(frozen=True)
class PlayedPath:
    """A commitlog file's."""

    world: World
    begin: int

    def exists(self) -> bool:
        """Whether the broker still has it."""
        return self.begin >= self.world.oldest


@dataclass(frozen=True)
class PlayedFile:
    """As LogFile."""

    begin_phys: int
    path: PlayedPath

    @property
    def end_phys(self) -> int:
        return self.begin_phys + FILE_BYTES


@dataclass(eq=False)
class World:
    """``rows``: every message ever sent, by offset. ``oldest``: where the broker's log begins; ``queue_low``: what its
    consume queue says is the first, which learns of deletions late. ``is_pinned``: the uploader keeps what is deleted.
    ``tells``: the broker answers more than pulls."""

    rand: random.Random
    begins_late: bool = False
    is_pinned: bool = True
    rows: list[Row] = field(default_factory=list)
    phys: int = 0
    oldest: int = 0
    queue_low: int = 0
    versions: list[Version] = field(default_factory=lambda: [Version(0)])
    known: int = 0
    time_s: float = 0.0
    is_broker_away: bool = False
    is_store_away: bool = False
    is_quiet: bool = False
    deletes: bool = True
    tells: bool = True

    # -- what happens -----------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Perhaps something happens; time goes by."""
        if self.is_quiet:
            return
        rand = self.rand
        self.time_s += rand.choice([0.0, 0.001, 0.05, 0.3])
        happens = rand.random()
        if happens < 0.25:
            self.send(rand.randrange(1, 6))
        elif happens < 0.40 and self.deletes:
            self.delete(rand.choice([1, 1, 1, 2, 4]))
        elif happens < 0.50:
            self.queue_low = self.true_low()
        elif happens < 0.68:
            self.offload()
        elif happens < 0.72:
            self.expire()
        elif happens < 0.80:
            self.known = rand.randrange(self.known, len(self.versions))
        elif happens < 0.83:
            self.is_broker_away = rand.random() < 0.5
        elif happens < 0.86:
            self.is_store_away = rand.random() < 0.5

    def send(self, count: int) -> None:
        """Some messages, and some of other queues between them."""
        for _ in range(count):
            if self.rand.random() < 0.4:
                self.phys += RECORD_BYTES * self.rand.choice([1, 1, 3, 2 * FILE_RECORDS])
            number = len(self.rows)
            record = encode(Message(b"t", 0, number, b"%d" % number), self.phys)
            self.rows.append(Row(self.phys, self.rand.random() < 0.5, record))
            self.phys += RECORD_BYTES

    def delete(self, count: int) -> None:
        """The broker lets go of its oldest files, but never of the last."""
        last = max(0, self.phys - 1) // FILE_BYTES * FILE_BYTES
        self.oldest = min(last, self.oldest + count * FILE_BYTES)

    def offload(self, is_all: bool = False) -> None:
        """The uploader gets on: what the broker has deleted it has by its pins, or records as a gap."""
        before = self.versions[-1]
        begin = before.dispatched
        if before.number == 0 and self.begins_late:
            begin = max(begin, self.oldest)
        files = self.rand.randrange(1, 12)
        end = self.phys if is_all else min(self.phys, begin + files * RECORD_BYTES)
        rows = [(number, row) for number, row in enumerate(self.rows) if begin <= row.phys < end]
        if not rows:
            self.versions.append(replace(before, number=before.number + 1, dispatched=max(begin, end)))
            return
        is_first = before.high == before.low == 0
        low = rows[0][0] if is_first else before.low
        gaps = list(before.gaps)
        for number, row in rows:
            if row.phys < self.oldest and not self.is_pinned:
                if gaps and gaps[-1][1] == number:
                    gaps[-1] = gaps[-1][0], number + 1
                else:
                    gaps.append((number, number + 1))
        first_phys = rows[0][1].phys if is_first else before.first_phys
        last, row = rows[-1]
        end_phys = row.phys + RECORD_BYTES
        self.versions.append(
            Version(before.number + 1, low, last + 1, end_phys, end, first_phys, tuple(gaps))
        )

    def expire(self) -> None:
        """The archive's retention, which never takes what the broker has."""
        before = self.versions[-1]
        low = min(before.high, self.true_low(), before.low + self.rand.randrange(0, 5))
        if low > before.low:
            self.versions.append(replace(before, number=before.number + 1, low=low))

    # -- what is true -----------------------------------------------------------------------------------------

    def true_low(self) -> int:
        """The first offset whose record the broker has."""
        return next((n for n, row in enumerate(self.rows) if row.phys >= self.oldest), len(self.rows))

    def is_to_come(self, number: int) -> bool:
        """Whether archive or broker has the message, or will."""
        newest, row = self.versions[-1], self.rows[number]
        in_gap = newest.existing(number) != number
        if row.phys >= self.oldest or (newest.low <= number < newest.high and not in_gap):
            return True
        was_before = self.begins_late and (newest.number == 0 or row.phys < newest.first_phys)
        return not was_before and row.phys >= newest.dispatched  # pinned, or about to be recorded as lost

    # -- as the proxy sees it --------------------------------------------------------------------------------

    @property
    def state(self) -> Version:
        """See KnownCatalog."""
        return self.versions[self.known]

    def refresh_if_due(self) -> None:
        """See KnownCatalog."""


def archived_queue(version: Version, topic: str, queue_id: int) -> ArchivedQueue:
    """See archived_queues.archived_queue."""
    if version.high == 0:
        return ArchivedQueue(None, 0, version.dispatched)
    return ArchivedQueue(
        HeldOffsets(version.low, version.high), version.end_phys, version.dispatched, version.first_phys
    )
