"""Decides whether a broker's log continues an archive. Pure.

Bytes that cannot be compared prove nothing. Archiving continues only where checked bytes agree, or where the broker
deleted all that could agree and the rest fits: every queue's offsets continue, times are later, and the store host is
one that the archive knows. Anything else stops, and asks for archive.replace_log; where only the rest does not fit, for
archive.same_broker too.

    what log and archive share        the rest fits   →
    the archive's end                 -               continue
    no bytes left to compare          yes             continue
    no bytes left to compare          no              stop; the same broker's: continue
    an earlier commit                 -               new log history there, within the limits; else stop
    an earlier one, bytes deleted     yes             as an earlier commit
    an earlier one, bytes deleted     no              stop; the same broker's: as an earlier commit
    nothing                           -               stop
    the end of an earlier log history -               make that one current again
"""

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum

from tiered.console import counted


class Shared(Enum):
    """What log and archive share."""

    END = "the archive's end"
    END_DELETED = "the archive's end, of which the broker deleted the bytes"
    EARLIER = "an earlier commit"
    EARLIER_DELETED = "an earlier commit, of which the broker deleted the bytes"
    NOTHING = "nothing"
    EARLIER_HISTORY = "a log history that another one replaced"


@dataclass(frozen=True)
class LogFacts:
    """What was found of a log. ``misfit``: why it does not fit where bytes were deleted; empty if it does."""

    shared: Shared
    misfit: str = ""
    lost_bytes: int = 0
    """Bytes of the archive's log above what is shared."""
    is_older_copy: bool = False
    """Whether the log ends before the archive does, and has nothing that the archive lacks."""


@dataclass(frozen=True)
class LogLimits:
    """What the operator allows. ``replace_log``: a log history may begin, whatever it hides. ``truncate_max_bytes``: so
    many bytes may be missing at the log's end; None for a backfill, which refuses older copies instead.
    ``same_broker``: a log of which no bytes can be compared is the same broker's, although the rest does not fit."""

    replace_log: bool = False
    truncate_max_bytes: float | None = None
    same_broker: bool = False


class LogStep(Enum):
    """What a writer does."""

    CONTINUE = "continue"
    NEW_HISTORY = "start a log history where log and archive diverge"
    RETURN = "make an earlier log history current again"
    STOP = "stop"


@dataclass(frozen=True)
class LogDecision:
    """``why`` it stops; empty otherwise. ``is_foreign``: nothing shows that the log is of the archive's owner."""

    step: LogStep
    why: str = ""
    is_foreign: bool = False


def decide_log(facts: LogFacts, limits: LogLimits) -> LogDecision:
    """What a writer does with a log of which ``facts`` are known, within the ``limits`` that the operator sets:
    continue the archive, start a log history in it, make an earlier one current again, or stop."""
    if limits.same_broker:
        facts = replace(facts, misfit="")
    if facts.shared is Shared.END or (facts.shared is Shared.END_DELETED and not facts.misfit):
        return LogDecision(LogStep.CONTINUE)
    if facts.shared is Shared.EARLIER_HISTORY:
        return LogDecision(LogStep.RETURN, is_foreign=True)
    why, is_foreign = _objection(facts, limits)
    if limits.replace_log or not why:
        return LogDecision(LogStep.NEW_HISTORY, is_foreign=is_foreign)
    return LogDecision(LogStep.STOP, why, is_foreign)


def _objection(facts: LogFacts, limits: LogLimits) -> tuple[str, bool]:
    """Why a log that does not continue the archive may not start a log history, as the text after "the broker's log";
    empty if it may. And whether it may be another broker's log."""
    if facts.shared is Shared.NOTHING:
        return "shares nothing with the archive: it is another broker's, or its disk was replaced", True
    if facts.misfit:
        return f"has no bytes in common with the archive, and {facts.misfit}", True
    if facts.is_older_copy:
        return "ends before the archive and matches it until there: an older copy, or a truncated log", False
    maximum = limits.truncate_max_bytes
    if maximum is not None and facts.lost_bytes > maximum:
        why = f"was truncated by {facts.lost_bytes} bytes, more than {maximum:.0f} bytes"
        return why, False
    return "", False


@dataclass(frozen=True)
class ArchivedEnd:
    """Where an archive ends. ``ends``: the next offset of each visible queue."""

    ends: Mapping[tuple[str, int], int]
    newest_ms: int
    hosts: Set[str]


@dataclass(frozen=True)
class LogHead:
    """The oldest records of a log. ``begins``: the lowest offset of each queue that has records in it, or its next
    offset if it has none."""

    begins: Mapping[tuple[str, int], int] = field(default_factory=dict)
    oldest_ms: int | None = None
    """Store timestamp of the first record; None without one."""
    host: str = ""
    """The store host of the first record."""


def recreated(archived: ArchivedEnd, head: LogHead) -> list[tuple[str, int]]:
    """Queues whose offsets go back: of topics that were deleted and created again, or of another broker."""
    common = archived.ends.keys() & head.begins.keys()
    return sorted(queue for queue in common if head.begins[queue] < archived.ends[queue])


def misfit(archived: ArchivedEnd, head: LogHead) -> str:
    """Why a log, of which nothing can be compared with the archive as the broker deleted it, does not continue the
    archive; empty if its first records fit: known store host, later times, queue offsets that do not go back."""
    if head.oldest_ms is None:
        return "has no record that could be compared"
    if head.host not in archived.hosts:
        hosts = ", ".join(sorted(archived.hosts)) or "none"
        return f"its records are of {head.host}, but those of the archive of {hosts}"
    if head.oldest_ms < archived.newest_ms:
        return "its first record is older than the archive's newest"
    if archived.ends and not archived.ends.keys() & head.begins.keys():
        return "it has none of the archive's queues"
    if back := recreated(archived, head):
        topic, queue_id = back[0]
        return (
            f"offsets go back in {counted(len(back), 'queue')}: {topic} queue {queue_id} begins at "
            f"{head.begins[back[0]]} there, and ends at {archived.ends[back[0]]} in the archive"
        )
    return ""
