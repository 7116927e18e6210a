"""Decides the bound: the physical offset below which the log may be uploaded. Pure.

While a broker runs, only the offsets it reports count, read *before* the bytes: confirm offset and end of log, never
above what its consume queues contain. If a running broker does not answer, the bound freezes. Without a broker proven
dead, bytes decide nothing; with one, its own recovery scan sets the bound, including the last record.

Sources: org.apache.rocketmq.store.DefaultMessageStore (getConfirmOffset, recover), CommitLog.recoverAbnormally.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from tiered.broker_store.liveness import Liveness


class BoundReason(Enum):
    """What set the bound."""

    BROKER = "broker offsets"
    CONSUME_QUEUE = "consume queues"
    LOG_END = "end of the log files"
    FROZEN = "as before: the broker runs and does not answer"
    DEAD = "end of the log: the broker does not run"


@dataclass(frozen=True)
class BrokerOffsets:
    """Physical offsets that the broker reported; None where it reported none.

    ``max_phys``: commitLogMaxOffset of the runtime info. ``confirm_phys``: its confirm offset.
    ``dispatch_behind_bytes``: lag of its consume queues behind its confirm offset, of the same response.
    ``is_dispatch_certain``: false if it may count this lag from an offset below the other two
    (``CommitLog.getConfirmOffset``), or without records that are being dispatched. ``config``: its configuration;
    ``version``: the name of its version; both are empty if it did not report them.
    """

    max_phys: int | None = None
    confirm_phys: int | None = None
    dispatch_behind_bytes: int | None = None
    is_dispatch_certain: bool = True
    config: Mapping[str, str] = field(default_factory=dict, compare=False)
    version: str = field(default="", compare=False)

    @property
    def counts_dispatch(self) -> bool:
        """Whether these offsets tell exactly what the consume queues contain."""
        return self.dispatch_behind_bytes is not None and self.is_dispatch_certain


@dataclass(frozen=True)
class Bound:
    """``phys``: nothing at or above it is uploaded. ``proven_phys``: the broker has certainly written the log up to
    here, so that an invalid record below it is damage; one at or above it is the end of the log. ``has_retreated``: the
    bound is lower than before, or the log ends below the read position, so that the log may have been replaced."""

    phys: int
    proven_phys: int
    why: BoundReason
    frozen: bool = False
    has_retreated: bool = False


@dataclass(frozen=True)
class BoundFacts:
    """Inputs of the bound, gathered in this order: liveness, broker offsets, frontier, log end.

    ``frontier_phys``: physical end of the newest record in the consume queues; None if they cannot be read (RocksDB of
    a running broker), or ``offsets`` tell what they contain. ``log_end_phys``: end of the last file. ``cursor_phys``:
    read position. ``proven_phys``: of a dead broker, how far its log was certainly written (damage.proven_phys).
    ``previous``: the bound before this one.
    """

    liveness: Liveness
    offsets: BrokerOffsets | None
    frontier_phys: int | None
    log_end_phys: int
    cursor_phys: int
    proven_phys: int = 0
    previous: Bound | None = None


def decide_bound(facts: BoundFacts) -> Bound:
    """The bound that ``facts`` allow: the physical offset below which the log may be uploaded. The broker's offsets set
    it if it reports some, else the end of its log if it is proven dead; else the bound stays as it was, as the broker
    runs but does not answer."""
    reported = _reported_phys(facts.offsets)
    if reported is not None:
        bound = _bound_by_broker(facts, reported)
    elif facts.liveness is Liveness.DEAD:
        bound = Bound(facts.log_end_phys, min(facts.proven_phys, facts.log_end_phys), BoundReason.DEAD)
    else:
        return _frozen(facts)
    retreated = (
        facts.previous is not None and not _was_scan(facts.previous) and bound.phys < facts.previous.phys
    )
    # Everything read was below an earlier bound: a log that ends below the read position was truncated.
    is_truncated = (
        facts.offsets is not None
        and facts.offsets.max_phys is not None
        and facts.offsets.max_phys < facts.cursor_phys
    )
    return Bound(bound.phys, bound.proven_phys, bound.why, has_retreated=retreated or is_truncated)


def _reported_phys(offsets: BrokerOffsets | None) -> int | None:
    """The lower one of the two physical offsets that the broker reported; None if it reported none."""
    if offsets is None:
        return None
    reported = [phys for phys in (offsets.max_phys, offsets.confirm_phys) if phys is not None and phys >= 0]
    return min(reported) if reported else None


def _bound_by_broker(facts: BoundFacts, reported: int) -> Bound:
    """The smallest of the offset that the broker has ``reported``, the end of the log files, and the physical offset up
    to which consume queues are written, if that is known."""
    limits = [(reported, BoundReason.BROKER), (facts.log_end_phys, BoundReason.LOG_END)]
    frontier = _frontier(facts)
    if frontier is not None:
        limits.append((frontier, BoundReason.CONSUME_QUEUE))
    phys, why = min(limits, key=lambda limit: limit[0])
    return Bound(phys, phys, why)


def _frontier(facts: BoundFacts) -> int | None:
    """The physical offset up to which records are in the consume queues: by the dispatch lag that the broker reports,
    else as its queue files show; None if neither is known.

    The lag goes before the files, as it also counts records at the end of the log that no queue gets (half messages,
    deleted topics).
    """
    offsets, reported = facts.offsets, _reported_phys(facts.offsets)
    if offsets is None or reported is None or offsets.dispatch_behind_bytes is None:
        return facts.frontier_phys
    if facts.frontier_phys is not None and not offsets.is_dispatch_certain:
        return facts.frontier_phys
    # The lag may have grown since the end of the log was read, but what was dispatched before stays dispatched.
    previous = facts.previous
    dispatched = 0 if previous is None or _was_scan(previous) else min(previous.phys, reported)
    return max(reported - offsets.dispatch_behind_bytes, dispatched)


def _frozen(facts: BoundFacts) -> Bound:
    """The bound of a running broker that does not answer: the bound before. It is the read position if there was no
    bound, or if it was set while the broker was dead: the restarted broker now writes again what was its log's end."""
    previous = facts.previous
    if previous is None or _was_scan(previous):
        return Bound(facts.cursor_phys, facts.cursor_phys, BoundReason.FROZEN, frozen=True)
    return Bound(previous.phys, previous.proven_phys, BoundReason.FROZEN, frozen=True)


def _was_scan(bound: Bound) -> bool:
    """Whether the end of a dead broker's log set ``bound``."""
    return bound.why is BoundReason.DEAD
