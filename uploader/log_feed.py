"""Reads and scans the commitlog into a batch, up to a bound; skips damaged and missing parts.

Below ``proven_phys`` an invalid record is damage: the feed continues at the next provable record (by consume queue,
or a header whose PHYSICALOFFSET matches). At or above it an invalid record is the end of what was written: the feed
stops.

Finds the next record behind unreadable places of a pinned commitlog file.

Each place is read a few times only: a disk may take seconds to fail. So the end of an unreadable range is found by
bisection, and readable bytes between several close ranges may be skipped. Which record is valid is decided in
damage.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final

from numpy.typing import NDArray

from tiered.broker_store.commit_log import CommitLog, LogFile
from tiered.broker_store.damage import do_lengths_add_up, find_cut_record, find_next_record
from tiered.errors import UnreadableError
from tiered.kernels.queue_table import ADMITTED, QueueTable
from tiered.kernels.record_checks import END_OF_FILE_BYTES, RESERVED_CRC_BYTES
from tiered.kernels.scan import InvalidReason, ScanStop, StopReason, scan_log
from tiered.model.queue import TopicFilter
from tiered.residency import PAGE_BYTES
from uploader.log_batch import DamagedRange, LogBatch, LostRange

READ_BYTES: Final = 4 * 1024 * 1024


def next_readable_record(
    log: CommitLog,
    file: LogFile,
    bad_phys: int,
    limit_phys: int,
    next_record: Callable[[int, int], int | None],
) -> int | None:
    """The commitlog offset of the next record of ``file`` that is surely one, between ``bad_phys``, which the disk
    cannot read, and ``limit_phys``; None when there is none. ``next_record`` finds it behind a damaged offset.

    Raises what reading the log raises, except for this file.
    """
    limit_phys = min(limit_phys, file.end_phys)
    unreadable_phys: int | None = bad_phys
    while unreadable_phys is not None:
        readable_phys = _next_readable_phys(log, file, unreadable_phys)
        if readable_phys is None or readable_phys >= limit_phys:
            return None
        try:
            return next_record(readable_phys - 1, limit_phys)
        except UnreadableError as error:
            if error.path != file.path:
                raise
            # No record begins before the next unreadable place.
            unreadable_phys = first_unreadable_phys(log, readable_phys, limit_phys)
    return None


def first_unreadable_phys(log: CommitLog, phys: int, limit_phys: int) -> int | None:
    """The first commitlog offset from ``phys`` on, below ``limit_phys``, that the disk cannot read, in one file; None
    when all can be read."""
    data = memoryview(bytearray(min(READ_BYTES, max(0, limit_phys - phys))))
    while phys < limit_phys:
        got, failure = log.read_readable_part(data[: limit_phys - phys], phys)
        phys += got
        if failure is not None:
            return phys
        if got == 0:
            return None
    return None


def _next_readable_phys(log: CommitLog, file: LogFile, bad_phys: int) -> int | None:
    """The commitlog offset of a readable page of ``file`` behind the unreadable one at ``bad_phys``; None if there is
    none. Reads few pages, as each may take seconds to fail: the distance is doubled until a page can be read, then the
    range between is halved."""
    last = (file.size_bytes - 1) // PAGE_BYTES
    bad = (bad_phys - file.begin_phys) // PAGE_BYTES
    step = 1
    while not _is_readable_page(log, file, min(bad + step, last)):
        if bad + step >= last:
            return None
        bad, step = bad + step, 2 * step
    good = min(bad + step, last)
    while good - bad > 1:
        middle = (bad + good) // 2
        bad, good = (bad, middle) if _is_readable_page(log, file, middle) else (middle, good)
    return file.begin_phys + good * PAGE_BYTES if good > bad else None


def _is_readable_page(log: CommitLog, file: LogFile, page: int) -> bool:
    try:
        log.read(file.begin_phys + page * PAGE_BYTES, PAGE_BYTES)
    except UnreadableError:
        return False
    return True


class FeedOutcome(Enum):
    """Why ``advance`` returned."""

    MORE = "more"
    """Bytes were added and more may follow."""
    FULL = "full"
    """The next record does not fit into the batch."""
    OVERSIZE = "oversize"
    """The next record does not fit into an empty batch."""
    CAUGHT_UP = "caught up"
    """The bound, or the end of what is written, is reached."""


@dataclass(frozen=True)
class FeedBound:
    """``limit_phys``: nothing at or above it is read. ``proven_phys``: the broker has certainly written the log up to
    here, so that invalid bytes below are damage; at or above it, the log may end."""

    limit_phys: int
    proven_phys: int


@dataclass(frozen=True)
class _Read:
    """One read of ``file`` where the batch ends: ``got`` of ``wanted`` bytes, of which the first ``scanned`` are whole
    records. ``available``: how many bytes the file has from there to its end, or to the bound."""

    file: LogFile
    available: int
    wanted: int
    got: int
    scanned: int


NextRecord = Callable[[int, int], int | None]
"""(damaged position, limit) → position of the next provable record, or None: see broker_store.damage."""


AcceptedSize = Callable[[int], int | None]
"""Position of a record with a wrong checksum → its size if the broker accepted it: see broker_store.damage."""


class LogFeed:
    """Reads one commitlog. Not thread-safe; callers serialise."""

    def __init__(
        self,
        log: CommitLog,
        table: QueueTable,
        topic_filter: TopicFilter,
        *,
        delay_levels_ms: NDArray[Any] | None,
        next_record: NextRecord | None = None,
        accepted_size: AcceptedSize = lambda _phys: None,
    ) -> None:
        """``next_record`` finds where to continue behind damage. ``accepted_size`` returns the size of a record that
        is archived although its properties' CRC differs, else None."""
        self._log = log
        self._table = table
        self._filter = topic_filter
        self._delay_levels_ms = delay_levels_ms
        self._next_record = next_record or (lambda phys, limit: find_next_record(log, phys, limit))
        self._accepted_size = accepted_size
        self._decided = 0
        """How many queues of the table were decided to be archived or not."""
        self.excluded: set[str] = set()
        """Topics that are not archived, by the selection; without the broker's own."""
        self.oversize_bytes = 0
        """Size of the record for which the last outcome was OVERSIZE."""

    def advance(self, batch: LogBatch, bound: FeedBound, max_bytes: int) -> FeedOutcome:
        """Read the log from ``batch.to_phys`` on, at most ``max_bytes``, and add its records to ``batch``; the outcome
        says why it ended. Nothing at or above ``bound`` is read.

        Raises UnreadableError where the disk cannot read the next record; what precedes it is added. Where the broker
        has deleted the file, and the pin (hard link) that kept it cannot be read either, the range is lost.
        """
        try:
            return self._advance(batch, bound, max_bytes)
        except UnreadableError as failure:
            if not self._skip_broken_pin(batch, bound, failure):
                raise
        return FeedOutcome.MORE

    def _advance(self, batch: LogBatch, bound: FeedBound, max_bytes: int) -> FeedOutcome:
        """Read and scan a piece of the log once, for ``advance``. An error of the disk is raised only if no record
        before the unreadable place could be scanned."""
        phys = batch.to_phys
        if phys >= bound.limit_phys:
            return FeedOutcome.CAUGHT_UP
        file = self._log.file_at(phys)
        if file is None:
            return self._skip_missing(batch, bound)
        available = min(bound.limit_phys, file.end_phys) - phys
        # The marker at a file's end needs this many bytes.
        wanted = min(max(max_bytes, END_OF_FILE_BYTES), batch.room, available)
        if wanted < min(END_OF_FILE_BYTES, available):
            return FeedOutcome.FULL
        begin = batch.filled
        got, failure = self._log.read_readable_part(batch.arena.data[begin : begin + wanted], phys)
        stop = scan_log(
            batch.arena,
            begin,
            begin + got,
            phys,
            file.end_phys,
            self._table,
            batch.columns,
            delay_levels_ms=self._delay_levels_ms,
        )
        self._decide_new_queues()
        batch.is_wanted = batch.is_wanted or self._has_admitted_row(batch)
        scanned = stop.position - begin
        if scanned:
            batch.extend(scanned, phys)
        elif failure is not None and stop.reason == StopReason.INPUT_END:
            raise failure
        return self._after_stop(stop, batch, bound, _Read(file, available, wanted, got, scanned))

    def _after_stop(self, stop: ScanStop, batch: LogBatch, bound: FeedBound, read: _Read) -> FeedOutcome:
        """Decide what follows after the scan of ``read`` has ended at ``stop``: the end of a file, the bound, a record
        that was not read as a whole, or damage, which is skipped."""
        phys, reason, detail = batch.to_phys, stop.reason, stop.detail
        if reason == StopReason.FILE_END:
            batch.to_phys = read.file.end_phys
            return FeedOutcome.MORE
        if reason == StopReason.INPUT_END:
            if phys >= bound.limit_phys:
                return FeedOutcome.CAUGHT_UP
            return FeedOutcome.MORE if read.scanned else self._record_larger_than_read(batch, bound, read)
        if phys >= bound.proven_phys:
            return FeedOutcome.CAUGHT_UP  # not proven to be written: the log may end here
        if (
            reason == StopReason.INVALID
            and detail == InvalidReason.RECORD_CRC
            and self._take_accepted(batch, read.file)
        ):
            return FeedOutcome.MORE
        damage = "no record" if reason == StopReason.NO_RECORD else detail.name.lower()
        return self._skip_damage(batch, bound, read.file, damage)

    def _take_accepted(self, batch: LogBatch, file: LogFile) -> bool:
        """Add the record at ``batch.to_phys``, whose bytes are in the arena already, if the broker has accepted it
        although its checksum is wrong. Returns whether it was added."""
        phys, begin = batch.to_phys, batch.filled
        size = self._accepted_size(phys)
        if size is None:
            return False
        # The scan checks the property __CRC32#: rename it during the scan of this record.
        name_at = begin + size - RESERVED_CRC_BYTES
        name = int(batch.arena[name_at])
        batch.arena[name_at] = 0
        stop = scan_log(
            batch.arena,
            begin,
            begin + size,
            phys,
            file.end_phys,
            self._table,
            batch.columns,
            delay_levels_ms=self._delay_levels_ms,
        )
        batch.arena[name_at] = name
        if stop.position != begin + size:
            return False
        self._decide_new_queues()
        batch.is_wanted = batch.is_wanted or self._has_admitted_row(batch)
        batch.extend(size, phys)
        return True

    def _record_larger_than_read(self, batch: LogBatch, bound: FeedBound, read: _Read) -> FeedOutcome:
        """Decide what follows where the record at ``batch.to_phys`` is larger than what was read of it: read more,
        close the batch, wait for the rest of the record, or skip it as damaged."""
        phys = batch.to_phys
        if read.got < read.wanted:
            return self._after_short_read(phys, read.file)
        size = self._log.record_size_at(phys)
        if size is None:
            # Too short for a marker. Cut by the bound: wait for the rest. Cut by the file's end: damage.
            is_cut = read.file.end_phys - phys < END_OF_FILE_BYTES and phys < bound.proven_phys
            return (
                self._skip_damage(batch, bound, read.file, "cut short") if is_cut else FeedOutcome.CAUGHT_UP
            )
        if size <= min(batch.room, read.available):
            return self._advance(batch, bound, size) if read.got < size else FeedOutcome.CAUGHT_UP
        if size <= read.available and batch.filled:
            return FeedOutcome.FULL
        if self._is_disproved(phys, size, bound):
            return self._skip_damage(batch, bound, read.file, InvalidReason.SIZE.name.lower())
        if size > read.available:
            # The size fits the file, so only the bound cuts it: wait for the rest.
            return FeedOutcome.CAUGHT_UP
        self.oversize_bytes = size
        return FeedOutcome.OVERSIZE

    def _after_short_read(self, phys: int, file: LogFile) -> FeedOutcome:
        """Decide what follows where ``file`` had fewer bytes at ``phys`` than its listed size says: list the files of
        the log again, and read again if the file has changed or is gone."""
        self._log.refresh()
        return FeedOutcome.CAUGHT_UP if self._log.file_at(phys) == file else FeedOutcome.MORE

    def _is_disproved(self, phys: int, size: int, bound: FeedBound) -> bool:
        """Whether the ``size`` that the record at ``phys`` claims is wrong, as another record surely begins inside it.
        Reads about ``size`` bytes. A body may contain what looks like records, so a record whose lengths add up is
        believed."""
        if phys >= bound.proven_phys or do_lengths_add_up(self._log, phys, size):
            return False
        following = self._next_record(phys, min(bound.proven_phys, bound.limit_phys))
        return following is not None and following < phys + size

    def _skip_missing(self, batch: LogBatch, bound: FeedBound) -> FeedOutcome:
        """Decide what follows where no file has the offset ``batch.to_phys``: if a later file is below the bound, the
        range up to that is lost and skipped, as the broker has deleted its file; otherwise it is not written yet.

        Raises UnavailableError if a directory may not be mounted.
        """
        following = self._next_file_phys(batch.to_phys)
        if following is None or following >= bound.limit_phys:
            return FeedOutcome.CAUGHT_UP
        self._skip_lost(batch, following, "no commitlog file has this range: the broker has deleted it")
        return FeedOutcome.MORE

    def _skip_broken_pin(self, batch: LogBatch, bound: FeedBound, failure: UnreadableError) -> bool:
        """After ``failure``: if only a pin (a hard link that keeps a file which the broker has deleted) has the log at
        ``batch.to_phys``, and it cannot be read there, skip it up to its next record, or its end. Returns whether
        something was skipped; not if the failure is of another file, or may pass."""
        file = self._log.file_at(batch.to_phys)
        if file is None or file.path != failure.path or not self._log.is_broken_pin(file):
            return False
        next_file = self._next_file_phys(batch.to_phys)
        if next_file is None or next_file > bound.limit_phys:
            return False  # the log may end in this file
        bad_phys = first_unreadable_phys(self._log, batch.to_phys, file.end_phys)
        if bad_phys is None:
            return False  # readable now
        limit = min(bound.proven_phys, bound.limit_phys)
        following = next_readable_record(self._log, file, bad_phys, limit, self._next_record)
        self._skip_lost(batch, next_file if following is None else following, failure.message)
        return True

    def _skip_lost(self, batch: LogBatch, following: int, why: str) -> None:
        """Note that the log is lost from the batch's end to ``following``, because of ``why``, and continue there.
        Raises UnavailableError if a directory may not be mounted."""
        self._log.refuse_unmounted()
        batch.lost.append(LostRange(batch.to_phys, following, why))
        batch.to_phys = following

    def _next_file_phys(self, phys: int) -> int | None:
        return min((file.begin_phys for file in self._log.files if file.begin_phys > phys), default=None)

    def _skip_damage(self, batch: LogBatch, bound: FeedBound, file: LogFile, damage: str) -> FeedOutcome:
        """Continue behind the invalid bytes at ``batch.to_phys``, and note them as damaged; ``damage`` says how.
        CAUGHT_UP instead where the log may only end here, or a record may not be written to its end yet."""
        phys = batch.to_phys
        limit = min(bound.proven_phys, bound.limit_phys)
        size = self._log.record_size_at(phys)
        # Lengths that add up delimit one record, whatever its bytes look like.
        is_whole = size is not None and do_lengths_add_up(self._log, phys, size)
        end_phys = phys + size if size is not None and is_whole else phys + 1
        following = self._next_record(end_phys - 1, limit)
        if following is None and bound.proven_phys < bound.limit_phys:
            # A dead broker's recovery would end here too.
            return FeedOutcome.CAUGHT_UP
        if following is None:
            # A sound record may cross the bound: wait for its rest.
            following = find_cut_record(self._log, end_phys - 1, limit) or (end_phys if is_whole else None)
        following = limit if following is None else min(following, limit)
        batch.damaged.append(DamagedRange(phys, following, str(file.path), damage))
        batch.to_phys = following
        return FeedOutcome.MORE

    def _has_admitted_row(self, batch: LogBatch) -> bool:
        columns = batch.columns
        return columns.lmq_rows > 0 or bool(
            (self._table.admitted[columns.queue[: columns.rows]] == ADMITTED).any()
        )

    def _decide_new_queues(self) -> None:
        """Decide for queues that were scanned for the first time whether their topic is archived, by the selection.
        This does not change while the process runs."""
        count = len(self._table)
        if self._decided == count:
            return
        topics = [self._table.topic(ordinal) for ordinal in range(self._decided, count)]
        admits = {topic: int(self._filter.admits(topic)) for topic in dict.fromkeys(topics)}
        self.excluded |= {
            topic
            for topic, is_archived in admits.items()
            if not (is_archived or self._filter.is_system(topic))
        }
        self._table.admitted[self._decided : count] = [admits[topic] for topic in topics]
        self._decided = count
