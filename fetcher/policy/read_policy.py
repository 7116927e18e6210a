"""Decides the source of a pull: the archive, the broker, or neither yet. Pure.

Owns the read policies, the rule for the broker's system topics, the fallbacks and the joined offsets. Unlike the Java
tiered store (TieredMessageStore.fetchFromCurrentStore, getMessageAsync) it never loses or skips messages:

- Offsets between the archive's end and the broker's minimum that are not a recorded gap are retried: their messages
  are about to be archived, or their loss is about to be recorded.
- A consumer of a generation that ended is moved to the minimum of the next one.
- An archive that begins later than the broker's files, or ends earlier, never moves a consumer past messages the
  broker still has, whatever the policy. Beyond both ends nothing is served, and the larger one is the maximum.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Final, NamedTuple

from fetcher.rows.pull import PullResult, PullStatus
from tiered.settings.sections import Settings


class ReadPolicy(Enum):
    """When the archive is read even if the broker may have the message (tieredStorageLevel)."""

    DISABLE = "DISABLE"
    """Never."""
    NOT_IN_DISK = "NOT_IN_DISK"
    """When the broker's files no longer have it."""
    NOT_IN_MEM = "NOT_IN_MEM"
    """The archive answers also when the broker would read from disk."""
    FORCE = "FORCE"
    """Always."""


@dataclass(frozen=True)
class ReadPolicies:
    """The policy of every topic: the first pattern that fits, else ``default``."""

    default: ReadPolicy = ReadPolicy.NOT_IN_DISK
    patterns: Sequence[tuple[str, ReadPolicy]] = ()

    @staticmethod
    def of(settings: Settings) -> ReadPolicies:
        """The read policies that the settings give to topics: the default one, and one for each topic rule, which is
        the default where the rule names none."""
        default = settings.read.default_policy()
        rules = settings.topics.rules
        return ReadPolicies(
            ReadPolicy(default),
            tuple((rule.pattern, ReadPolicy(rule.read_policy or default)) for rule in rules),
        )

    def of_topic(self, topic: str) -> ReadPolicy:
        """The policy of ``topic``."""
        return next(
            (policy for pattern, policy in self.patterns if fnmatchcase(topic, pattern)), self.default
        )

    def for_slave(self) -> ReadPolicies:
        """The policies of slave mode: archived messages come from the archive, because redirected consumers load the
        broker; topics with DISABLE stay at the broker."""
        return ReadPolicies(
            _for_slave(self.default),
            tuple((pattern, _for_slave(policy)) for pattern, policy in self.patterns),
        )

    @property
    def reads_anything(self) -> bool:
        """Whether any topic may be read from the archive. Routes are not per topic: clients keep one address table per
        broker, so pulls of other topics arrive there too and are relayed."""
        policies = (self.default, *(policy for _, policy in self.patterns))
        return any(policy is not ReadPolicy.DISABLE for policy in policies)


def _for_slave(policy: ReadPolicy) -> ReadPolicy:
    return policy if policy is ReadPolicy.DISABLE else ReadPolicy.FORCE


@dataclass(frozen=True)
class HeldOffsets:
    """Offsets [min_offset, max_offset) of one queue, in the archive or in the broker's files."""

    min_offset: int
    max_offset: int

    def __contains__(self, offset: int) -> bool:
        return self.min_offset <= offset < self.max_offset


class BrokerSide(Enum):
    """Whether the broker's files can answer."""

    READABLE = "readable"
    UNREADABLE = "unreadable"
    """The files exist but cannot be read now: consume queues in the RocksDB of a live broker, no permission."""
    AWAY = "away"
    """The broker is unreachable; its messages will be available again."""
    UNREPORTED = "unreported"
    """The broker answers pulls but does not report its offsets."""


class Residency(Enum):
    """Whether the bytes wanted are in the page cache."""

    NOT_CHECKED = "not checked"
    RESIDENT = "resident"
    COLD = "cold"
    UNKNOWN = "unknown"
    """The kernel does not report it: NOT_IN_MEM then acts as NOT_IN_DISK."""


class LocalView(NamedTuple):
    """One queue of the broker, for one offset. ``queue`` is None if the broker does not have it."""

    side: BrokerSide
    queue: HeldOffsets | None = None
    is_record: bool = False
    """Whether the record at the offset can be read, from a pin if pins are visible."""
    phys: int = -1
    """Physical offset of that record, or -1."""
    oldest_phys: int = 0
    """Physical offset of the broker's oldest file."""
    last_phys: int = -1
    """Physical offset of the queue's last record if there is none at the offset, or -1."""
    is_expiring: bool = False
    """Whether the broker may delete that record before it is read."""


@dataclass(frozen=True)
class Situation:
    """The state of both sides for one pull. ``archived`` and ``local``: None for a missing queue."""

    offset: int
    is_system: bool = False
    """A system topic: always read from the broker."""
    archived: HeldOffsets | None = None
    broker: BrokerSide = BrokerSide.READABLE
    local: HeldOffsets | None = None
    is_local_record: bool = False
    """Whether the broker's files hold the record at ``offset`` (checkInStoreByConsumeOffset)."""
    is_archive_behind: bool = False
    """Whether the archive has not reached the broker's oldest file, for an archived topic."""
    residency: Residency = Residency.NOT_CHECKED
    is_expiring: bool = False
    """Whether the broker may delete the record before it is read: then the archive is read first, if it has it."""
    is_admitted: bool = False
    """Whether its topic is archived: then a queue missing in the archive may still be added."""
    is_broker_older: bool = True
    """Whether the broker's log begins before the first archived message: it may have earlier ones."""
    is_recreated: bool = False
    """Whether the broker's queue is a later generation than the archived one, which then is not in ``archived``."""
    generation: int = 0
    """The archived generation."""
    earlier_end: int = 0
    """The largest end of its earlier generations."""
    first_phys: int = -1
    """Position of the first archived record of the queue."""

    def has_replaced(self, before: Situation) -> bool:
        """Whether the generation that was archived ``before`` has ended since."""
        return before.archived is not None and (self.is_recreated or self.generation > before.generation)

    @property
    def is_of_earlier_generation(self) -> bool:
        """Whether a consumer at ``offset``, which is beyond the broker's end, read an earlier generation. Without an
        archived one nothing disproves it."""
        if self.archived is None:
            return self.is_recreated or self.is_admitted
        return self.archived.max_offset < self.offset <= self.earlier_end


class ReadSource(Enum):
    """Where a pull is read."""

    LOCAL = "local"
    TIERED = "tiered"
    RETRY = "retry"
    """Neither side has the offset yet: the client retries it."""
    CHECK_MEMORY = "check memory"
    """Check the page cache, then decide again."""


@dataclass(frozen=True)
class ReadDecision:
    """The source and the reason, for logs."""

    source: ReadSource
    why: str


_UNREACHABLE: Final = frozenset({BrokerSide.UNREADABLE, BrokerSide.AWAY})


def decide_read(policy: ReadPolicy, situation: Situation) -> ReadDecision:
    """Where a pull is read from first, the broker's files (LOCAL) or the archive (TIERED), and why. RETRY: neither has
    the message at present, and the client is to ask for the same offset again."""
    is_local_only = situation.is_system or policy is ReadPolicy.DISABLE
    if situation.broker in _UNREACHABLE:
        return _decide_without_broker_files(policy, situation, is_local_only)
    if is_local_only:
        return ReadDecision(ReadSource.LOCAL, "system topic" if situation.is_system else "DISABLE")
    if situation.archived is None:
        # With FORCE as well: an earlier generation of the topic may have been archived, which must not answer.
        if situation.is_archive_behind and not situation.is_local_record and _is_below_local(situation):
            return ReadDecision(ReadSource.RETRY, "the archive has not reached this offset")
        return ReadDecision(ReadSource.LOCAL, "the queue is not archived")
    if policy is ReadPolicy.FORCE:
        return ReadDecision(ReadSource.TIERED, "FORCE")
    if situation.offset >= situation.archived.max_offset:
        if not situation.is_local_record and _is_below_local(situation):
            return ReadDecision(ReadSource.RETRY, "between the archive's end and the broker's minimum")
        return ReadDecision(ReadSource.LOCAL, "beyond the archive's end")
    if not situation.is_local_record:
        return ReadDecision(ReadSource.TIERED, "not on the broker's disk")
    if situation.is_expiring:
        return ReadDecision(ReadSource.TIERED, "about to be deleted by the broker")
    if policy is ReadPolicy.NOT_IN_DISK:
        return ReadDecision(ReadSource.LOCAL, "on the broker's disk")
    return _MEMORY[situation.residency]


_MEMORY: Final = {
    Residency.NOT_CHECKED: ReadDecision(ReadSource.CHECK_MEMORY, "NOT_IN_MEM"),
    Residency.RESIDENT: ReadDecision(ReadSource.LOCAL, "in the broker's memory"),
    Residency.COLD: ReadDecision(ReadSource.TIERED, "not in the broker's memory"),
    Residency.UNKNOWN: ReadDecision(ReadSource.LOCAL, "on the broker's disk, page cache unknown"),
}


def _decide_without_broker_files(
    policy: ReadPolicy, situation: Situation, is_local_only: bool
) -> ReadDecision:
    """Where a pull is read from while the broker's files cannot be read: the archive if it has the offset and the
    policy allows it; otherwise nowhere, and the client retries."""
    if is_local_only:
        return ReadDecision(ReadSource.RETRY, "broker's files unreadable")
    if policy is ReadPolicy.FORCE:
        return ReadDecision(ReadSource.TIERED, "FORCE")
    if situation.archived is None or situation.offset >= situation.archived.max_offset:
        return ReadDecision(ReadSource.RETRY, "not archived yet, broker's files unreadable")
    return ReadDecision(ReadSource.TIERED, "broker's files unreadable")


def _is_below_local(situation: Situation) -> bool:
    return situation.local is not None and situation.offset < situation.local.min_offset


_NOT_THERE: Final = frozenset(
    {
        PullStatus.NO_MATCHED_LOGIC_QUEUE,
        PullStatus.NO_MESSAGE_IN_QUEUE,
        PullStatus.OFFSET_OVERFLOW_ONE,
        PullStatus.OFFSET_OVERFLOW_BADLY,
    }
)
"""Statuses of an offset that a side does not have (yet)."""


class NextStep(Enum):
    """What follows a result: it is kept, or another source is read."""

    KEEP = "keep"
    LOCAL = "local"
    TIERED = "tiered"
    RETRY = "retry"


_BELOW_ARCHIVE: Final = {
    BrokerSide.AWAY: NextStep.RETRY,
    BrokerSide.UNREADABLE: NextStep.RETRY,
    BrokerSide.UNREPORTED: NextStep.LOCAL,
}


def after_tiered(status: PullStatus | None, situation: Situation) -> NextStep:
    """What to do after the archive answered a pull with ``status``: keep its result, read the broker's files instead,
    or let the client retry. ``status`` is None if reading the archive failed; KEEP then means to raise the error."""
    if status in (PullStatus.FOUND, PullStatus.NO_MATCHED_MESSAGE):
        return NextStep.KEEP
    if situation.is_local_record:
        return NextStep.LOCAL
    if status is PullStatus.OFFSET_TOO_SMALL and situation.broker in _BELOW_ARCHIVE:
        # The archive may begin later than the broker's log, whose begin is known even where the consume queues cannot
        # be read.
        if situation.broker is BrokerSide.UNREADABLE and not situation.is_broker_older:
            return NextStep.KEEP
        return _BELOW_ARCHIVE[situation.broker]
    is_missing_file = situation.local is not None and situation.offset in situation.local
    if status is PullStatus.OFFSET_TOO_SMALL and is_missing_file:
        return NextStep.RETRY  # a file inside the log is missing, and only the broker has what follows
    if status not in _NOT_THERE:
        return NextStep.KEEP
    if situation.broker in _UNREACHABLE or _is_below_local(situation):
        # The broker may be ahead of the archive: consumers must not move back to the archive's end.
        return NextStep.RETRY
    may_be_local = situation.local is not None or situation.broker is BrokerSide.UNREPORTED
    return NextStep.LOCAL if may_be_local else NextStep.KEEP


def after_local(policy: ReadPolicy, status: PullStatus | None, situation: Situation) -> NextStep:
    """What to do after a read of the broker's files ended with ``status``: keep its result, read the archive instead,
    or let the client retry. ``status`` is None if the record could not be read, or another one was in its place.

    ``situation`` was taken before the read, and the broker may have deleted files since.
    """
    may_use_archive = not situation.is_system and policy is not ReadPolicy.DISABLE
    if status is None or (status is PullStatus.OFFSET_TOO_SMALL and may_use_archive):
        if may_use_archive and situation.archived is not None and situation.offset in situation.archived:
            return NextStep.TIERED
        # The message may be on its way into the archive: a retry shows whether it has arrived.
        is_unknown = situation.archived is None and not situation.is_archive_behind
        # The broker may have received and deleted the message since ``situation`` was taken.
        was_gone = situation.broker is BrokerSide.UNREPORTED or _is_below_local(situation)
        is_gone = status is not None and is_unknown and was_gone
        return NextStep.KEEP if is_gone or _is_before_both(status, situation) else NextStep.RETRY
    if status in _NOT_THERE and situation.archived is not None and situation.offset in situation.archived:
        return NextStep.TIERED  # the broker's log was truncated since ``situation`` was taken
    return NextStep.KEEP


def _is_before_both(status: PullStatus | None, situation: Situation) -> bool:
    """Whether the offset is below the minimum of both sides, for a broker whose only report is this result."""
    if status is None or situation.archived is None or situation.broker is not BrokerSide.UNREPORTED:
        return False
    return situation.offset < situation.archived.min_offset


def join_offsets(result: PullResult, source: ReadSource, situation: Situation) -> PullResult:
    """Adapt the result that one source gave to the queue that archive and broker make together: its status, its bounds
    and the next offset, which never passes a message that either of them has.

    The minimum is the smaller one of both. The maximum of the archive's result stays as it is, because with the
    broker's a reader at the archive's end would ask the archive again for ever. The broker's maximum is raised where
    its log ends before the archive.
    """
    other = situation.local if source is ReadSource.TIERED else situation.archived
    if source is ReadSource.LOCAL and situation.is_system:
        return result  # system topics are not archived: the broker's answer is the whole one
    if result.status is PullStatus.OFFSET_OVERFLOW_BADLY and situation.is_of_earlier_generation:
        return result._replace(next_offset=result.min_offset)
    if other is None:
        return _with_unarchived(result, source, situation)
    has_messages = other.max_offset > other.min_offset
    lowest = min(result.min_offset, other.min_offset) if has_messages else result.min_offset
    status, next_offset, max_offset = result.status, result.next_offset, result.max_offset
    # An archive whose messages have all expired has none now, but those at its end may be on their way into it.
    other_may_have_some = has_messages or (source is ReadSource.LOCAL and situation.offset < other.min_offset)
    would_skip_them = other_may_have_some and situation.offset <= other.min_offset < next_offset
    if status is PullStatus.OFFSET_TOO_SMALL and would_skip_them:
        next_offset = other.min_offset
    if source is ReadSource.LOCAL and other.max_offset > max_offset:
        # The broker's log was truncated or replaced: it ends before the archive.
        max_offset = other.max_offset
        if status in _NOT_THERE and situation.offset < other.min_offset:
            status, next_offset = PullStatus.OFFSET_TOO_SMALL, other.min_offset
        elif status in _NOT_THERE:
            at_end = situation.offset == max_offset
            status = PullStatus.OFFSET_OVERFLOW_ONE if at_end else PullStatus.OFFSET_OVERFLOW_BADLY
            next_offset = max_offset
    return result._replace(status=status, next_offset=next_offset, min_offset=lowest, max_offset=max_offset)


def _with_unarchived(result: PullResult, source: ReadSource, situation: Situation) -> PullResult:
    """Adapt the result of the broker for a queue that is not archived yet. The next offset does not pass messages that
    the broker deleted since ``situation`` was taken, because they may be archived at this moment."""
    local, is_too_small = situation.local, result.status is PullStatus.OFFSET_TOO_SMALL
    if source is ReadSource.TIERED or not is_too_small or local is None or not situation.is_admitted:
        return result
    is_past = situation.offset < local.min_offset < result.next_offset
    return result._replace(next_offset=local.min_offset) if is_past else result
