"""Gathers the facts of the upload bound in the required order: liveness, broker offsets, frontier, end of log.

The decision is tiered.broker_store.bound. Owns the previous bound; reads the broker's offsets through
``offsets_source``, which returns None when the broker does not answer.
"""

from __future__ import annotations

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
"""Why the broker's offsets are unknown."""
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
        """``silence`` says why the broker does not answer, for the reason shown with the bound."""
        self._store = store
        self._offsets_source = offsets_source
        self._silence = silence
        self.last: Bound | None = None
        self._facts: BoundFacts
        self._shown: Future[Queues] | None = None
        self._unproven: ConsumeQueueIndex | None = None
        """The index of a broker proven dead, until the ends of its queues have been read."""
        self.feed = FeedBound(0, 0)
        """``last`` as a bound of the feed; read by all threads."""
        self.config: Mapping[str, str] = {}
        """The configuration the broker last reported; read by all threads."""
        self.version = ""
        """The version the broker last reported; empty: none."""

    def ask(self, cursor_phys: int) -> Bound:
        """The bound now. Costs a lock query, one request to a live broker, and a read of the consume queues unless that
        counts the dispatch."""
        bound = self._gather(cursor_phys)
        return self.settle() or bound

    def ask_early(self, cursor_phys: int) -> Bound:
        """Like ``ask``, without the ends of a dead broker's queues, each of which costs a disk access.

        Until ``settle`` no byte is proven: records are read up to the first invalid one. The broker's queues are listed
        in the background.
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
        """The end of its log that a live broker reports, also for ``written_phys``; None from a dead or silent one."""
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
        """Raises UnavailableError when the broker was proven dead for the bound and has been started since: what it
        appends is not confirmed."""
        if self.last is not None and self.last.why is BoundReason.DEAD:
            now = self._store.liveness()
            if not now.is_dead:
                raise UnavailableError(
                    f"a broker was started on {self._store.path} during the backfill: {now.why}",
                    hint="the archive keeps what it has; use tiered run for a running broker",
                )

    def refuse_silent_broker(self) -> None:
        """Raises UnavailableError when a broker runs on the store and its offsets are unknown: what it appended is not
        confirmed."""
        if self.last is not None and self.last.frozen:
            raise UnavailableError(
                f"a broker runs on {self._store.path}, and {self._silence()}: nothing above physical offset "
                f"{self.last.phys:,} was archived",
                hint="set broker.address or --broker-conf, or stop the broker",
            )

    def proven_phys(self) -> int:
        """End of the log whose units a dead broker has all written. Calls ``settle``."""
        self.settle()
        return self.feed.proven_phys

    def shown_queues(self) -> Queues | None:
        """Queues with units at the broker; None where no consume queue is visible."""
        if self._shown is not None:
            return self._shown.result()
        return None if self._store.consume_queues() is None else self._store.shown_queues()

    def _gather(self, cursor_phys: int) -> Bound:
        """Read the broker's offsets before the log's end: what the bound lets through was confirmed before it was
        read."""
        liveness = self._store.liveness()
        offsets = None if liveness.is_dead else self._offsets_source()
        if offsets is not None and offsets.config:
            self.config = offsets.config
            self.version = offsets.version
        index = self._store.consume_queues()
        frontier = None
        if index is not None and not liveness.is_dead and (offsets is None or not offsets.counts_dispatch):
            # Not where the broker counts: each of up to 320 reads waits for the interpreter's lock.
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
