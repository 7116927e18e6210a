"""Up to where the log may be uploaded (3a, Bound). Pure: facts in, bound out.

While a broker runs, only the offsets it reports count, read *before* the bytes: confirm offset and end of log, and
never above what its consume queues show. If it runs and does not answer, the bound freezes. Bytes alone
decide only for a broker proven dead: then its own recovery scan, last record included.

Sources: org.apache.rocketmq.store.DefaultMessageStore (getConfirmOffset, recover),
CommitLog.recoverAbnormally.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tiered.broker_store.liveness import Liveness


class BoundReason(Enum):
    """What set the bound."""

    BROKER = "reported by the broker"
    CONSUME_QUEUE = "the consume queues"
    LOG_END = "the end of the files seen"
    FROZEN = "frozen: the broker runs but does not answer"
    DEAD = "the broker is dead: its recovery scan"


@dataclass(frozen=True)
class BrokerOffsets:
    """What the broker answered, in physical offsets; None where it did not say.

    ``max_phys``: commitLogMaxOffset of the runtime info. ``confirm_phys``: low-water mark over its replicas.
    ``dispatch_behind_bytes``: how far its consume queues lag behind its own confirm offset, of the same answer.
    ``is_confirm_certain``: that offset is not below both of these, which it may be (``CommitLog.getConfirmOffset``).
    ``config``: its whole configuration, empty where it does not tell.
    """

    max_phys: int | None = None
    confirm_phys: int | None = None
    dispatch_behind_bytes: int | None = None
    is_confirm_certain: bool = True
    config: Mapping[str, str] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class Bound:
    """``phys``: nothing at or above is uploaded. ``proven_phys``: below it an invalid record is damage, at
    or above it the end of what is written. ``has_retreated``: lower than before, or the log ends below what was
    read of it, so it may have been replaced."""

    phys: int
    proven_phys: int
    why: BoundReason
    frozen: bool = False
    has_retreated: bool = False


@dataclass(frozen=True)
class BoundFacts:
    """Everything the bound depends on, gathered in this order: liveness, offsets, frontier, log end.

    ``frontier_phys``: physical end of what the consume queues show, None where none is visible (RocksDB of a
    running broker). ``log_end_phys``: end of the last file. ``cursor_phys``: how far the log was read.
    ``proven_phys``: for a dead broker, see damage.proven_phys. ``previous``: the bound before this one.
    """

    liveness: Liveness
    offsets: BrokerOffsets | None
    frontier_phys: int | None
    log_end_phys: int
    cursor_phys: int
    proven_phys: int = 0
    previous: Bound | None = None


def decide_bound(facts: BoundFacts) -> Bound:
    """The bound that ``facts`` allow."""
    said = _reported_phys(facts.offsets)
    if said is not None:
        bound = _bound_by_word(facts, said)
    elif facts.liveness is Liveness.DEAD:
        bound = Bound(facts.log_end_phys, min(facts.proven_phys, facts.log_end_phys), BoundReason.DEAD)
    else:
        return _frozen(facts)
    retreated = (
        facts.previous is not None and not _was_scan(facts.previous) and bound.phys < facts.previous.phys
    )
    # What was read lay below the bound of its time: a log that ends below it now was cut.
    cut = (
        facts.offsets is not None
        and facts.offsets.max_phys is not None
        and facts.offsets.max_phys < facts.cursor_phys
    )
    return Bound(bound.phys, bound.proven_phys, bound.why, has_retreated=retreated or cut)


def _reported_phys(offsets: BrokerOffsets | None) -> int | None:
    if offsets is None:
        return None
    said = [phys for phys in (offsets.max_phys, offsets.confirm_phys) if phys is not None and phys >= 0]
    return min(said) if said else None


def _bound_by_word(facts: BoundFacts, said: int) -> Bound:
    limits = [(said, BoundReason.BROKER), (facts.log_end_phys, BoundReason.LOG_END)]
    frontier = _frontier(facts)
    if frontier is not None:
        limits.append((frontier, BoundReason.CONSUME_QUEUE))
    phys, why = min(limits, key=lambda limit: limit[0])
    return Bound(phys, phys, why)


def _frontier(facts: BoundFacts) -> int | None:
    """What is in consume queues: seen there, or by the broker's own count of what is not yet in them.

    The count is needed because the last records of a log may belong to no queue (half messages, deleted
    topics)."""
    offsets, said = facts.offsets, _reported_phys(facts.offsets)
    counted = None
    if offsets is not None and said is not None and offsets.dispatch_behind_bytes is not None:
        counted = said - max(offsets.dispatch_behind_bytes, 0)
    if facts.frontier_phys is None:
        return counted
    if counted is None or offsets is None or not offsets.is_confirm_certain:
        return facts.frontier_phys
    return max(facts.frontier_phys, counted)


def _frozen(facts: BoundFacts) -> Bound:
    previous = facts.previous
    if previous is None or _was_scan(previous):
        # The scan of a dead broker's log reached to the end of the file, which it now writes: stop where we
        # are.
        return Bound(facts.cursor_phys, facts.cursor_phys, BoundReason.FROZEN, frozen=True)
    return Bound(previous.phys, previous.proven_phys, BoundReason.FROZEN, frozen=True)


def _was_scan(bound: Bound) -> bool:
    return bound.why is BoundReason.DEAD
