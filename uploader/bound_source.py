"""Gathers the facts of the upload bound in the required order: liveness, broker offsets, frontier, end of log.

The decision is tiered.broker_store.bound. Owns the previous bound; reads the broker's offsets through
``offsets_source``, which returns None when the broker does not answer.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from threading import Thread

from tiered.broker_store.bound import Bound, BoundFacts, BoundReason, BrokerOffsets, decide_bound
from tiered.broker_store.damage import accepted_size, find_next_record, proven_phys
from tiered.broker_store.store import BrokerStore
from tiered.consume_queue.index import ConsumeQueueIndex
from tiered.errors import UnavailableError
from uploader.log_feed import FeedBound

NO_ADDRESS = "its address is unknown"
OffsetsSource = Callable[[], BrokerOffsets | None]
Silence = Callable[[], str]
"""Returns why the broker's offsets are unknown, as the text of an error."""
Queues = set[tuple[str, int]]
"""(topic, queue id)"""


def no_offsets() -> BrokerOffsets | None:
    """The source for a store whose broker has no address."""
    return None


class BoundSource:
    """The bound of one store. Not thread-safe."""

    def __init__(
        self, store: BrokerStore, offsets_source: OffsetsSource, silence: Silence = lambda: NO_ADDRESS
    ) -> None:
        """``offsets_source`` requests the broker's offsets; ``silence`` says why it gives none, for errors."""
        self._store = store
        self._offsets_source = offsets_source
        self._silence = silence
        self.last: Bound | None = None
        """The bound found last; None before the first."""
        self._facts: BoundFacts
        """What ``last`` was decided from."""
        self._shown: Future[Queues] | None = None
        """The queues of a broker proven dead, which a thread lists."""
        self._unproven: ConsumeQueueIndex | None = None
        """The index of a broker proven dead, until the ends of its queues have been read."""
        self.feed = FeedBound(0, 0)
        """``last`` as a bound of the feed; read by all threads."""
        self.config: Mapping[str, str] = {}
        """The configuration the broker last reported; read by all threads."""
        self.version = ""
        """The version the broker last reported; empty: none."""

    def ask(self, cursor_phys: int) -> Bound:
        """Find the bound now. Takes a check of the broker's lock, one request to a live broker, and, unless its answer
        says what its consume queues contain, a read of these."""
        bound = self._gather(cursor_phys)
        return self.settle() or bound

    def ask_early(self, cursor_phys: int) -> Bound:
        """The bound for the begin of a backfill: like ``ask``, but the ends of a dead broker's consume queues, each of
        which costs a disk access, are read only by ``settle``.

        Until then no part of the log is proven to be written: records are read up to the first invalid one. A thread
        lists the broker's queues in the background.
        """
        bound = self._gather(cursor_phys)
        if self._unproven is not None:
            self._shown = Future()
            arguments = (self._shown, self._store.shown_queues)
            Thread(target=_fill, args=arguments, name="queues-shown", daemon=True).start()
        return bound

    @property
    def written_phys(self) -> int:
        """Where the log ends, as the broker last reported it, or without a report where its files end: records below
        that may be above the bound, as replicas do not have them yet. 0 before the first bound."""
        if self.last is None:
            return 0
        offsets, log_end_phys = self._facts.offsets, self._facts.log_end_phys
        reported_phys = -1 if offsets is None or offsets.max_phys is None else offsets.max_phys
        return log_end_phys if reported_phys < 0 else min(reported_phys, log_end_phys)

    def reported_end_phys(self) -> int | None:
        """Request where the broker's log ends; None if the broker does not run or does not answer. ``written_phys``
        uses the answer too."""
        if self._store.liveness().is_dead:
            return None
        offsets = self._offsets_source()
        if offsets is None or offsets.max_phys is None or offsets.max_phys < 0:
            return None
        if self.last is not None:
            end_phys = self._store.commit_log.max_file_end
            self._facts = replace(self._facts, offsets=offsets, log_end_phys=end_phys)
        return offsets.max_phys

    def settle(self) -> Bound | None:
        """Read what ``ask_early`` skipped; None when nothing was. Raises what reading the queues raises."""
        if self._unproven is None:
            return None
        index, self._unproven = self._unproven, None
        return self._decide(replace(self._facts, proven_phys=proven_phys(self._store.commit_log, index)))

    def refuse_started_broker(self) -> None:
        """Raise UnavailableError if the broker was not running when the bound was found, and has been started since:
        what it appends is not confirmed by its replicas."""
        if self.last is not None and self.last.why is BoundReason.DEAD:
            now = self._store.liveness()
            if not now.is_dead:
                raise UnavailableError(
                    f"a broker was started on {self._store.path} during the backfill: {now.why}",
                    hint="the archive keeps what it has; beside a running broker, use tiered run",
                )

    def refuse_silent_broker(self) -> None:
        """Raise UnavailableError if a broker runs on the store and its offsets are unknown, so that it is not known
        which of its records are confirmed by its replicas."""
        if self.last is not None and self.last.frozen:
            raise UnavailableError(
                f"a broker runs on {self._store.path}, and {self._silence()}: nothing above commitlog offset "
                f"{self.last.phys:,} was archived",
                hint="set broker.address or pass --broker-conf, or stop the broker",
            )

    def proven_phys(self) -> int:
        """Up to where a dead broker has certainly written its log and the units of its records. Calls ``settle``."""
        self.settle()
        return self.feed.proven_phys

    def shown_queues(self) -> Queues | None:
        """Queues with units at the broker; None where no consume queue is visible."""
        if self._shown is not None:
            return self._shown.result()
        return None if self._store.consume_queues() is None else self._store.shown_queues()

    def _gather(self, cursor_phys: int) -> Bound:
        """Find the bound from what the broker reports and its files show. ``cursor_phys``: up to where the log was
        read. The broker's offsets are read before the end of the log, so that all bytes below the bound were confirmed
        before they are read."""
        liveness = self._store.liveness()
        offsets = None if liveness.is_dead else self._offsets_source()
        if offsets is not None and offsets.config:
            self.config = offsets.config
            self.version = offsets.version
        index = self._store.consume_queues()
        frontier = None
        if index is not None and not liveness.is_dead and (offsets is None or not offsets.counts_dispatch):
            # A broker that says itself what its consume queues contain spares up to 320 reads, each of which would wait
            # for the interpreter's lock.
            reported_phys = offsets.max_phys if offsets is not None else None
            frontier = index.frontier_phys(at_least=reported_phys)
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
        """Where reading continues after damage: see tiered.broker_store.damage."""
        return find_next_record(
            self._store.commit_log, damaged_phys, limit_phys, index=self._store.consume_queues()
        )

    def accepted_size(self, phys: int) -> int | None:
        """Size of a record that the broker accepted with a wrong checksum: see tiered.broker_store.damage."""
        return accepted_size(self._store.commit_log, phys, index=self._store.consume_queues())


def _fill(outcome: Future[Queues], work: Callable[[], Queues]) -> None:
    try:
        outcome.set_result(work())
    except BaseException as error:  # raised by the waiting thread
        outcome.set_exception(error)
