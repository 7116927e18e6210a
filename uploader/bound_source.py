"""Gathers what the upload bound depends on, in the order the rule demands: liveness, offsets, frontier, end of log.

The decision itself is tiered.broker_store.bound. Owns the previous bound; asks the broker through ``offsets_source``,
which answers None when the broker does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread

from tiered.broker_store.bound import Bound, BoundFacts, BoundReason, BrokerOffsets, decide_bound
from tiered.broker_store.consume_queue_index import ConsumeQueueIndex
from tiered.broker_store.damage import accepted_size, find_next_record, proven_phys
from tiered.broker_store.store import BrokerStore
from tiered.errors import UnavailableError
from uploader.log_feed import FeedBound

OffsetsSource = Callable[[], BrokerOffsets | None]
Queues = set[tuple[str, int]]
"""(topic, queue id)"""


def no_offsets() -> BrokerOffsets | None:
    """For a store whose broker cannot be asked."""
    return None


class BoundSource:
    """One store's bound, asked again and again. Not thread-safe."""

    def __init__(self, store: BrokerStore, offsets_source: OffsetsSource) -> None:
        self._store = store
        self._word_source = offsets_source
        self.last: Bound | None = None
        self._facts: BoundFacts
        self._shown: Future[Queues] | None = None
        self._unproven: ConsumeQueueIndex | None = None
        """Of a broker proven dead, until the ends of its queues have been looked at."""
        self.feed = FeedBound(0, 0)
        """``last`` as the reader of the log wants it; read by all threads."""
        self.config: Mapping[str, str] = {}
        """What the broker last said its configuration is; read by all threads."""

    def ask(self, cursor_phys: int) -> Bound:
        """The bound now. Costs a lock query, one request to a live broker, and a look at the consume queues."""
        bound = self._gather(cursor_phys)
        return self.settle() or bound

    def ask_early(self, cursor_phys: int) -> Bound:
        """As ``ask``, but the ends of a dead broker's queues, a disk access each, are not yet looked at.

        Until ``settle`` no byte counts as proven: valid records are taken, up to the first that is not one. Which
        queues the broker shows is looked up meanwhile.
        """
        bound = self._gather(cursor_phys)
        if self._unproven is not None:
            self._shown = Future()
            arguments = (self._shown, self._store.shown_queues)
            Thread(target=_fill, args=arguments, name="queues-shown", daemon=True).start()
        return bound

    @property
    def written_phys(self) -> int:
        """End of the log that the broker last reported, else of its files: records below it may be above the bound. 0
        before the first check."""
        if self.last is None:
            return 0
        offsets, log_end_phys = self._facts.offsets, self._facts.log_end_phys
        said = -1 if offsets is None or offsets.max_phys is None else offsets.max_phys
        return log_end_phys if said < 0 else min(said, log_end_phys)

    def reported_end_phys(self) -> int | None:
        """Where a live broker says its log ends; None from one that is dead or silent."""
        if self._store.liveness().is_dead:
            return None
        offsets = self._word_source()
        return (
            None if offsets is None or offsets.max_phys is None or offsets.max_phys < 0 else offsets.max_phys
        )

    def settle(self) -> Bound | None:
        """Look at what ``ask_early`` left open; None when nothing was. Raises what the look at the queues raises."""
        if self._unproven is None:
            return None
        index, self._unproven = self._unproven, None
        return self._decide(replace(self._facts, proven_phys=proven_phys(self._store.commit_log, index)))

    def refuse_started_broker(self) -> None:
        """Raises UnavailableError when the broker was proven dead for the bound and no longer is: what it appends has
        the bytes of records, but not its offsets."""
        if self.last is not None and self.last.why is BoundReason.DEAD:
            now = self._store.liveness()
            if not now.is_dead:
                raise UnavailableError(
                    f"a broker was started on {self._store.path} meanwhile: {now.why}",
                    hint="what is archived stays; tiered run archives a live broker",
                )

    def proven_phys(self) -> int:
        """Below it a broker proven dead has written all its units. Costs ``settle`` if that was left open."""
        self.settle()
        return self.feed.proven_phys

    def shown_queues(self) -> Queues | None:
        """Queues with units at the broker; None where no consume queue is visible."""
        if self._shown is not None:
            return self._shown.result()
        return None if self._store.consume_queues() is None else self._store.shown_queues()

    def _gather(self, cursor_phys: int) -> Bound:
        liveness = self._store.liveness()
        offsets = None if liveness.is_dead else self._word_source()
        if offsets is not None and offsets.config:
            self.config = offsets.config
        index = self._store.consume_queues()
        frontier = None
        if index is not None and not liveness.is_dead:
            # Finds new queues by itself; a refresh would cost a stat per queue at every look.
            said = offsets.max_phys if offsets is not None else None
            frontier = index.frontier_phys(at_least=said)
        log = self._store.commit_log
        log.refresh()
        self._unproven = index if liveness.is_dead else None
        self._facts = BoundFacts(
            liveness=liveness.liveness,
            offsets=offsets,
            frontier_phys=frontier,
            log_end_phys=log.max_file_end,
            cursor_phys=cursor_phys,
            previous=self.last,
        )
        return self._decide(self._facts)

    def _decide(self, facts: BoundFacts) -> Bound:
        self._facts = facts
        self.last = decide_bound(facts)
        self.feed = FeedBound(self.last.phys, self.last.proven_phys)
        return self.last

    def next_record(self, damaged_phys: int, limit_phys: int) -> int | None:
        """Where reading goes on after damage: see tiered.broker_store.damage."""
        return find_next_record(
            self._store.commit_log, damaged_phys, limit_phys, index=self._store.consume_queues()
        )

    def accepted_size(self, phys: int) -> int | None:
        """Size of a record whose own checksum is wrong but which the broker took: see tiered.broker_store.damage."""
        return accepted_size(self._store.commit_log, phys, index=self._store.consume_queues())


def _fill(outcome: Future[Queues], work: Callable[[], Queues]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # raised again where it is waited for
        outcome.set_exception(error)
