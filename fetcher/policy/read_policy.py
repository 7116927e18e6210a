"""Where a pull is answered from: the archive, the broker's own files, or nowhere yet. Pure.

Owns the read policies, the rule for the broker's own topics, the fall-backs and the next offsets of one continuous
line. Does not read anything. Where the Java tiered store (TieredMessageStore.fetchFromCurrentStore, getMessageAsync)
loses or skips messages this does not:

- Offsets between the archive's end and the broker's minimum that are not a recorded gap are held: the same offset is
  to be asked again, as the messages are on their way into the archive or their loss is about to be recorded.
- An archive that begins later than the broker's files, or ends earlier, never moves a consumer past what the broker
  still has, whatever the policy; beyond the end of both nothing is served, at the larger of the two ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from fetcher.rows.batch import GetStatus
from tiered.settings.sections import ReadSettings


class ReadPolicy(Enum):
    """When the archive is read although the broker may have the message (tieredStorageLevel)."""

    DISABLE = "DISABLE"
    """Never."""
    NOT_IN_DISK = "NOT_IN_DISK"
    """When the broker's files no longer have it."""
    NOT_IN_MEM = "NOT_IN_MEM"
    """Also when reading it would make the broker's disk work."""
    FORCE = "FORCE"
    """Always."""


@dataclass(frozen=True)
class ReadPolicies:
    """The policy of every topic: the first pattern that fits, else ``default``."""

    default: ReadPolicy = ReadPolicy.NOT_IN_DISK
    patterns: Sequence[tuple[str, ReadPolicy]] = ()

    @staticmethod
    def of(settings: ReadSettings) -> ReadPolicies:
        """As configured; the values were checked when the settings were read."""
        patterns = tuple((pattern, ReadPolicy(name)) for pattern, name in settings.patterns())
        return ReadPolicies(ReadPolicy(settings.default_policy()), patterns)

    def of_topic(self, topic: str) -> ReadPolicy:
        """The policy in force for ``topic``."""
        return next(
            (policy for pattern, policy in self.patterns if fnmatchcase(topic, pattern)), self.default
        )


@dataclass(frozen=True)
class OffsetRange:
    """Offsets [min_offset, max_offset) of one queue, in the archive or in the broker's files."""

    min_offset: int
    max_offset: int

    def __contains__(self, offset: int) -> bool:
        return self.min_offset <= offset < self.max_offset


class BrokerSide(Enum):
    """Whether the broker's files can answer."""

    READABLE = "readable"
    UNREADABLE = "unreadable"
    """They exist, but not for us now: consume queues in the RocksDB of a live broker, no permission."""
    AWAY = "away"
    """The broker does not answer now, and what it has beside the archive will be there again."""
    UNTOLD = "untold"
    """The broker answers pulls, but does not tell this reader what it has."""
    ABSENT = "absent"
    """There is no broker: the archive is all there is."""


class Residency(Enum):
    """Whether the bytes wanted are in the page cache."""

    NOT_ASKED = "not asked"
    RESIDENT = "resident"
    COLD = "cold"
    UNKNOWN = "unknown"
    """The kernel does not tell this process: NOT_IN_MEM is NOT_IN_DISK then."""


class LocalView(NamedTuple):
    """One queue of the broker as seen for one offset. ``queue`` is None when the broker does not have it."""

    side: BrokerSide
    queue: OffsetRange | None = None
    is_record: bool = False
    """Whether the record at the offset can still be read, from a pin if the reader sees pins."""
    phys: int = -1
    """Physical offset of that record, -1 without."""
    oldest_phys: int = 0
    """Physical offset of the broker's oldest file."""
    last_phys: int = -1
    """Physical offset of the queue's last record, where the one at the offset is not there; -1 without any."""
    is_leaving: bool = False
    """Whether the broker may have deleted that record before it is asked for it."""


@dataclass(frozen=True)
class Situation:
    """What is known about one pull. ``archived`` and ``local``: None for a queue that is not there."""

    offset: int
    is_system: bool = False
    """A topic of the broker's own: always read from its files."""
    archived: OffsetRange | None = None
    broker: BrokerSide = BrokerSide.READABLE
    local: OffsetRange | None = None
    is_local_record: bool = False
    """Whether the broker's files hold the very record at ``offset`` (checkInStoreByConsumeOffset)."""
    is_archive_behind: bool = False
    """Whether the archive has not reached the broker's oldest file, for a topic that it should have."""
    residency: Residency = Residency.NOT_ASKED
    is_leaving: bool = False
    """Whether the broker's record may be deleted before it is read: the archive is asked first, if it has it."""
    is_admitted: bool = False
    """Whether its topic is archived: a queue that the archive does not know may be on its way there."""
    is_broker_older: bool = True
    """Whether the broker's log begins before the first message that was ever archived: it may have earlier ones."""


class Source(Enum):
    """Who answers."""

    LOCAL = "local"
    TIERED = "tiered"
    HOLD = "hold"
    """Nobody yet: the same offset is to be asked again."""
    ASK_MEMORY = "ask memory"
    """Ask the kernel first, then decide again with its answer."""


@dataclass(frozen=True)
class Decision:
    """Who answers, and why, in words for logs and counters."""

    source: Source
    why: str


_SILENT: Final = frozenset({BrokerSide.UNREADABLE, BrokerSide.AWAY})
_LOCAL_ABSENT: Final = Decision(Source.TIERED, "there is no broker")


def decide(policy: ReadPolicy, situation: Situation) -> Decision:
    """Where a pull goes first."""
    if situation.broker is BrokerSide.ABSENT:
        return (
            Decision(Source.HOLD, "DISABLE and no broker") if policy is ReadPolicy.DISABLE else _LOCAL_ABSENT
        )
    is_local_only = situation.is_system or policy is ReadPolicy.DISABLE
    if situation.broker in _SILENT:
        return _decide_without_broker_files(policy, situation, is_local_only)
    if is_local_only:
        return Decision(Source.LOCAL, "a topic of the broker's own" if situation.is_system else "DISABLE")
    if situation.archived is None:
        # FORCE too: what the archive has under this name may be an earlier life of the queue.
        if situation.is_archive_behind and not situation.is_local_record and _is_below_local(situation):
            return Decision(Source.HOLD, "the archive has not come this far")
        return Decision(Source.LOCAL, "the archive does not know the queue")
    if policy is ReadPolicy.FORCE:
        return Decision(Source.TIERED, "FORCE")
    if situation.offset >= situation.archived.max_offset:
        if not situation.is_local_record and _is_below_local(situation):
            return Decision(Source.HOLD, "between the archive's end and the broker's minimum")
        return Decision(Source.LOCAL, "beyond the archive's end")
    if not situation.is_local_record:
        return Decision(Source.TIERED, "not on the broker's disk")
    if situation.is_leaving:
        return Decision(Source.TIERED, "about to leave the broker's disk")
    if policy is ReadPolicy.NOT_IN_DISK:
        return Decision(Source.LOCAL, "on the broker's disk")
    return _MEMORY[situation.residency]


_MEMORY: Final = {
    Residency.NOT_ASKED: Decision(Source.ASK_MEMORY, "NOT_IN_MEM"),
    Residency.RESIDENT: Decision(Source.LOCAL, "in the broker's memory"),
    Residency.COLD: Decision(Source.TIERED, "not in the broker's memory"),
    Residency.UNKNOWN: Decision(Source.LOCAL, "on the broker's disk, and nobody tells whether in memory"),
}


def _decide_without_broker_files(policy: ReadPolicy, situation: Situation, is_local_only: bool) -> Decision:
    if is_local_only:
        return Decision(Source.HOLD, "the broker's files cannot be read")
    if policy is ReadPolicy.FORCE:
        return Decision(Source.TIERED, "FORCE")
    if situation.archived is None or situation.offset >= situation.archived.max_offset:
        return Decision(Source.HOLD, "not archived yet, and the broker's files cannot be read")
    return Decision(Source.TIERED, "the broker's files cannot be read")


def _is_below_local(situation: Situation) -> bool:
    return situation.local is not None and situation.offset < situation.local.min_offset


_NOT_THERE: Final = frozenset({
    GetStatus.NO_MATCHED_LOGIC_QUEUE, GetStatus.NO_MESSAGE_IN_QUEUE, GetStatus.OFFSET_OVERFLOW_ONE,
    GetStatus.OFFSET_OVERFLOW_BADLY,
})  # fmt: skip
"""What the archive says of an offset it does not have (yet)."""


class Follow(Enum):
    """What becomes of an answer."""

    KEEP = "keep"
    LOCAL = "local"
    TIERED = "tiered"
    HOLD = "hold"


_BEFORE_THE_ARCHIVE: Final = {
    BrokerSide.AWAY: Follow.HOLD, BrokerSide.UNREADABLE: Follow.HOLD, BrokerSide.UNTOLD: Follow.LOCAL,
}  # fmt: skip


def after_tiered(status: GetStatus | None, situation: Situation) -> Follow:
    """What follows an answer of the archive; None: it failed with an error, KEEP then means to raise it."""
    if situation.broker is BrokerSide.ABSENT or status in (GetStatus.FOUND, GetStatus.NO_MATCHED_MESSAGE):
        return Follow.KEEP
    if situation.is_local_record:
        return Follow.LOCAL
    if status is GetStatus.OFFSET_TOO_SMALL and situation.broker in _BEFORE_THE_ARCHIVE:
        # The archive may begin later than the broker. Of one whose queues are hidden at least the log's begin is seen.
        if situation.broker is BrokerSide.UNREADABLE and not situation.is_broker_older:
            return Follow.KEEP
        return _BEFORE_THE_ARCHIVE[situation.broker]
    is_hole = situation.local is not None and situation.offset in situation.local
    if status is GetStatus.OFFSET_TOO_SMALL and is_hole:
        return Follow.HOLD  # a file in the middle is missing, and what is behind it is the broker's alone
    if status not in _NOT_THERE:
        return Follow.KEEP
    if situation.broker in _SILENT or _is_below_local(situation):
        # The broker may be further than the archive: no reason to send anybody back to the archive's end.
        return Follow.HOLD
    may_be_local = situation.local is not None or situation.broker is BrokerSide.UNTOLD
    return Follow.LOCAL if may_be_local else Follow.KEEP


def after_local(policy: ReadPolicy, status: GetStatus | None, situation: Situation) -> Follow:
    """What follows an answer of the broker's files; None: the record could not be read, or was not what it should be.

    ``situation`` is as it was before: the files may have been deleted since.
    """
    may_use_archive = not situation.is_system and policy is not ReadPolicy.DISABLE
    if status is None or (status is GetStatus.OFFSET_TOO_SMALL and may_use_archive):
        if may_use_archive and situation.archived is not None and situation.offset in situation.archived:
            return Follow.TIERED
        # Whatever was there at the look may be on its way into the archive: how far that has come, the next look tells.
        is_unknown = situation.archived is None and not situation.is_archive_behind
        # What the broker did not have at the look it may have got, and lost, since.
        was_gone = situation.broker is BrokerSide.UNTOLD or _is_below_local(situation)
        is_gone = status is not None and is_unknown and was_gone
        return Follow.KEEP if is_gone or _is_before_both(status, situation) else Follow.HOLD
    if status in _NOT_THERE and situation.archived is not None and situation.offset in situation.archived:
        return Follow.TIERED  # its log was cut back since the look
    return Follow.KEEP


def _is_before_both(status: GetStatus | None, situation: Situation) -> bool:
    """Whether a broker that tells its bounds by such answers only said that the offset is before them, too."""
    if status is None or situation.archived is None or situation.broker is not BrokerSide.UNTOLD:
        return False
    return situation.offset < situation.archived.min_offset


@dataclass(frozen=True)
class Line:
    """The offsets a reader is told. ``next_offset`` never passes a message that the archive or the broker has."""

    status: GetStatus
    next_offset: int
    min_offset: int
    max_offset: int


def joined_line(answer: Line, source: Source, situation: Situation) -> Line:
    """``answer`` of ``source``, without messages or with, on the one line that archive and broker make together.

    The minimum is the smaller one. The maximum of an archive's answer stays the archive's: told the broker's,
    a reader at the archive's end would go round in circles. The broker's is raised where its log ends earlier.
    """
    other = situation.local if source is Source.TIERED else situation.archived
    if source is Source.LOCAL and situation.is_system:
        return answer
    if other is None:
        return _led_on(answer, source, situation)
    has_messages = other.max_offset > other.min_offset
    lowest = min(answer.min_offset, other.min_offset) if has_messages else answer.min_offset
    status, next_offset, max_offset = answer.status, answer.next_offset, answer.max_offset
    # Behind the end of an archive whose messages have all expired more may be on their way.
    is_ahead = has_messages or (source is Source.LOCAL and situation.offset < other.min_offset)
    leads_past = is_ahead and situation.offset <= other.min_offset < next_offset
    if status is GetStatus.OFFSET_TOO_SMALL and leads_past:
        next_offset = other.min_offset
    if source is Source.LOCAL and other.max_offset > max_offset:
        # The broker's log was cut back or replaced below what is archived.
        max_offset = other.max_offset
        if status in _NOT_THERE and situation.offset < other.min_offset:
            status, next_offset = GetStatus.OFFSET_TOO_SMALL, other.min_offset
        elif status in _NOT_THERE:
            at_end = situation.offset == max_offset
            status = GetStatus.OFFSET_OVERFLOW_ONE if at_end else GetStatus.OFFSET_OVERFLOW_BADLY
            next_offset = max_offset
    return Line(status, next_offset, lowest, max_offset)


def _led_on(answer: Line, source: Source, situation: Situation) -> Line:
    """An answer about a queue that the archive does not know (yet): what the broker had at the look and has deleted
    since may be on its way there."""
    local, is_too_small = situation.local, answer.status is GetStatus.OFFSET_TOO_SMALL
    if source is Source.TIERED or not is_too_small or local is None or not situation.is_admitted:
        return answer
    is_past = situation.offset < local.min_offset < answer.next_offset
    return replace(answer, next_offset=local.min_offset) if is_past else answer
