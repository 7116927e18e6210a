"""Delivers timers: a task of the archive's owner.

    claim rows by a commit → read their messages → send them → the next claim says that they are over

Timers of an unfinished claim may have been sent: by a process that ended, or without an answer. Each is first searched
for at the broker, by its place, once the broker has dispatched all that it stored. The same is done for timers that an
earlier log history may have had, or that are older than a repair. A claim ends after CLAIM_S: a process that paused for
longer sends nothing. Timers that the broker refuses are written to an object of their own, which is read again after
RETRY_S; so are their cancellations, as both must be read together. After timers.refused_ttl_ms they are only listed.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from fetcher.rows.message import Message
from rocketmq_tiered.sending.timer_broker import RemoteTimerBroker
from rocketmq_tiered.sending.timer_send import Judge, TimerSend, everyone, is_entry_of, timer_send
from rocketmq_tiered.sending.timer_status import TimerStatus
from tiered.archive.task import TIMER_DELIVERY, Due
from tiered.archive.timers import NEVER_MS, Entries, Slice, TimerCounts, TimerFiles, joined, sort_out
from tiered.catalog.catalog_reader import read_commit
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.requirements import Requirements
from tiered.catalog.state import CatalogState
from tiered.catalog.timer_refs import TimerRef
from tiered.clock import MACHINE_CLOCK, Clock
from tiered.errors import UnavailableError
from tiered.formats.timer_object import ENTRY_DTYPE, Rows, encode_timers, sorted_entries
from tiered.model.queue import QueueKey
from tiered.model.tables import Table, concatenated
from tiered.model.timer import HOUR_MS, EntryKind, Refusal
from tiered.settings.sections import TimerSettings

logger = logging.getLogger(__name__)

CLAIM_S = 6.0
SETTLE_S = 2.0
"""After a connection ends, the broker may still store what it had received."""
CLOCK_SKEW_MS_MAX = 300_000
"""The clocks of the broker and of the writer may differ by so much."""
BATCH = 4096
PENDING_EVERY_S = 10.0
LATE_MS = 60_000
"""A warning names timers delivered later than this."""
PROBLEM_CHARS = 400
"""Characters of the text of one timer's problem in the log and the status: it has names that clients choose."""
COUNT_PART_S, COUNT_SHARE = 0.2, 20
"""Timers are counted for COUNT_PART_S at a time. The next count begins after COUNT_SHARE times as long as a whole one
takes."""
LATE_SAMPLES = 10_000
AHEAD_BYTES, AHEAD_FIRST, MESSAGE_BYTES = 64 << 20, 64, 512
"""Memory for messages, which are read for several claims at once, as they lie in the same blocks; how many are read
first; and the bytes that one takes beside its record."""
CHUNK_S, CHUNK_MAX, DOUBT_CHUNK = 1.0, 1024, 256
"""Messages are sent in chunks, after which the claim is renewed: as many as CHUNK_S allows, and at most CHUNK_MAX, or
DOUBT_CHUNK if each must be searched for at the broker."""
Place = tuple[QueueKey, int]
_NONE = Entries(np.zeros(0, ENTRY_DTYPE), (), ())


FAN_IN = 16
"""So many objects of about one size are merged into one."""
MERGED_MAX = 1 << 22
"""Entries of a merged object: 80 MB."""
STEP_MS = 60_000
RETRY_S = 600.0
"""A timer that the broker refuses is tried again after this long."""


def horizon_ms(now_ms: int, ahead_ms: int, longest_ms: int) -> int:
    """Return the time of delivery, in ms, before which timers are handed over to the broker now: ``ahead_ms`` ahead of
    their time, if the broker's own timers, which take delays up to ``longest_ms``, allow it. A broker without timers
    (``longest_ms`` 0) gets those that are due."""
    ahead_ms = min(ahead_ms, longest_ms * 9 // 10)
    step_ms = max(1, min(STEP_MS, ahead_ms // 4))  # in steps, so that one commit covers many timers
    return max(now_ms + 1, (now_ms + ahead_ms) // step_ms * step_ms)


def to_merge(refs: Sequence[TimerRef]) -> list[TimerRef]:
    """Return the timer objects to be replaced by one: FAN_IN of about one size, or a large one most of whose entries
    are finished. Empty: none is to be replaced."""
    idle = [ref for ref in refs if ref.done == ref.claimed]  # no delivery is at work on its entries
    by_size: dict[int, list[TimerRef]] = {}
    for ref in idle:
        if 2 * ref.done > ref.entries > FAN_IN**3:
            return [ref]
        # Sizes differ by less than the factor 16 within a class: the power of 16 below the number of entries.
        by_size.setdefault((ref.entries.bit_length() - 1) // 4, []).append(ref)
    for size in sorted(by_size):
        group = by_size[size][:FAN_IN]
        if len(group) == FAN_IN and sum(ref.entries for ref in group) <= MERGED_MAX:
            return group
    return []


@dataclass(frozen=True)
class TimerPlan:
    """What the next step does: merge the objects ``merge`` into one; hand over ``entries``, which another process may
    have handed over already if ``is_doubt``; or, without both, commit which entries are finished."""

    entries: Entries | None = None
    is_doubt: bool = False
    merge: Sequence[TimerRef] = ()


class TimerDelivery:
    """The task. ``read``: messages by place, without those that are not in the archive; raises for unreadable ones.
    ``judge`` may raise UnavailableError."""

    name = TIMER_DELIVERY
    due = Due(every_s=1.0, first_s=1.0, retry_s=2.0)

    def __init__(
        self,
        commits: MaintenanceCommit,
        settings: TimerSettings,
        broker: RemoteTimerBroker,
        read: Callable[[Sequence[Place]], Mapping[Place, Message]],
        judge: Judge = everyone,
        *,
        clock: Clock = MACHINE_CLOCK,
    ) -> None:
        """``commits``: of the archive's owner; ``read`` returns the messages that set timers, by queue and queue
        offset; ``judge`` says why a sender may not have its timer delivered, or None."""
        self._commits, self._settings, self._broker, self._read = commits, settings, broker, read
        self._judge = judge
        self._clock = clock
        self.files = TimerFiles(commits.store)
        self.counts = TimerStatus()
        """What is counted as it happens; ``status`` adds figures of what is pending."""
        self._lateness_ms = deque[int](maxlen=LATE_SAMPLES)
        self.problem = ""
        self._due_ms = NEVER_MS
        """Time of delivery of the first timer that is not handed over."""
        # Pending timers are counted in short turns: the count in progress, the time it took until now, when the next
        # one begins, and the result of the last one.
        self._counting: Iterator[TimerCounts | None] | None = None
        self._counting_s, self._count_s = 0.0, 0.0
        self._pending, self._objects = TimerCounts(), 0
        self._finished: dict[str, TimerRef] = {}
        """Objects whose entries were dealt with since the last commit: object key -> the reference that the next commit
        is to contain."""
        self._postponed = _NONE
        """Entries that the broker refused, which the next commit puts into an object of their own."""
        self._held: set[str] = set()
        """Keys of objects with refused entries, which are not read before ``_retry_s``. A restart reads all at once."""
        self._retry_s = 0.0
        self._settled_s: float | None = None
        """When the broker can be queried about entries that another process may have handed over."""
        self._messages: dict[Place, Message | None] = {}
        """Messages that set the next timers; None: the archive does not have it."""
        self._messages_history = 0
        """The log history of which they were read."""
        self._messages_max = AHEAD_FIRST
        self._claim_s: float
        """When the entries that are being handed over were claimed by a commit."""
        self._repaired = 0, -CLOCK_SKEW_MS_MAX
        """The version of the last repair, and when it was."""
        self._sent: set[str] = set()
        """Places of the entries in doubt that the broker has."""
        self._batch = (
            min(BATCH, max(1, int(settings.rate_per_s * CLAIM_S / 4))) if settings.rate_per_s else BATCH
        )

    # -- plan -------------------------------------------------------------------------------------------------

    def plan(self, state: CatalogState) -> TimerPlan | None:
        """Decide what the next step does with the timers of ``state``. None: nothing is due. An object's entries are in
        order of delivery: the first ``done`` are finished, those up to ``claimed`` are being handed over."""
        refs = [self._finished.get(ref.key, ref) for ref in state.timers]
        self._note_pending(state)
        in_doubt = [Slice(ref, ref.done, ref.claimed) for ref in refs if ref.done < ref.claimed]
        if in_doubt:  # a process claimed these and ended, or got no answer
            return TimerPlan(joined(list(self.files.merged(in_doubt))), is_doubt=True)
        self._settled_s = None
        self._sent.clear()
        if len(self._postponed.table):
            return TimerPlan()  # commit them before others are handed over
        if self._clock.monotonic_s() >= self._retry_s:
            self._held.clear()
        held = [ref for ref in refs if ref.key in self._held]
        refs = [ref for ref in refs if ref.key not in self._held]
        due_ms = self._due_ms = min(map(self.files.next_ms, refs), default=NEVER_MS)
        # The broker is only queried for its longest delay when a timer may have to be handed over.
        if due_ms < self._clock.wall_ms() + self._settings.ahead_ms + 1:
            before_ms = horizon_ms(self._clock.wall_ms(), self._settings.ahead_ms, self._broker.longest_ms())
            if due_ms < before_ms:
                return TimerPlan(self._next(refs, before_ms))
        if self._finished:
            return TimerPlan()
        group = to_merge(refs) or to_merge(held)
        return TimerPlan(merge=group) if group else None

    def _next(self, refs: Sequence[TimerRef], before_ms: int) -> Entries:
        """Return the first entries of the objects ``refs`` that are delivered before a time and not claimed yet: about
        as many as one commit is to claim."""
        pages: list[Entries] = []
        for page in self.files.merged([Slice(ref, ref.claimed, ref.entries) for ref in refs], before_ms):
            pages.append(page)
            if sum(len(read.table) for read in pages) >= self._batch:
                break
        return joined(pages)

    # -- steps ------------------------------------------------------------------------------------------------

    def step(self, state: CatalogState, plan: TimerPlan) -> bool:
        """Carry out ``plan``: entries are claimed by a commit before they are handed over. Returns whether to plan
        again at once. Raises UnavailableError while the broker is away."""
        if plan.merge:
            return self._merge(plan.merge)
        if plan.entries is None:
            return self._commit(state, ())
        if plan.is_doubt and not (self._is_due(plan.entries) and self._is_settled()):
            return False
        claims = _claims(plan.entries, is_doubt=plan.is_doubt)
        self._claim_s = self._clock.monotonic_s()
        if not self._commit(state, claims, plan.entries):
            return True  # other timers came in between: plan again
        try:
            postponed = self._hand_over(plan.entries, claims, is_doubt=plan.is_doubt)
        finally:
            self._settled_s = self._clock.monotonic_s() + SETTLE_S
        self._finished = {ref.key: ref.moved(ref.claimed, ref.claimed) for ref in claims}
        self._postponed = postponed
        return True

    def _is_due(self, entries: Entries) -> bool:
        """Whether none is sent early: the clock may have been set back since they were claimed."""
        last_ms = int(entries.table["deliver_ms"].max())
        return last_ms <= self._clock.wall_ms() or self._broker.longest_ms() > 0

    def _is_settled(self) -> bool:
        """Return whether the broker can be queried about entries that another process may have handed over: what was
        sent has been stored by now and can be found."""
        now_s = self._clock.monotonic_s()
        if self._settled_s is None:  # another process claimed them: it may send until its claim ends
            self._settled_s = now_s + CLAIM_S + SETTLE_S
        return now_s >= self._settled_s and self._broker.is_settled()

    def _commit(
        self, state: CatalogState, claims: Sequence[TimerRef], entries: Entries | None = None
    ) -> bool:
        """Commit which entries are claimed (``claims``, objects whose ``entries`` are handed over next), finished and
        refused. Returns False and commits nothing if timer objects of ``state`` were changed, or new ones have an entry
        of the same times, such as a cancellation."""
        last_ms = -1 if entries is None or not len(entries.table) else int(entries.table["deliver_ms"][-1])
        known = set(state.timers)
        changed = {**self._finished, **{ref.key: ref for ref in claims}}
        refused: list[TimerRef] = []
        if len(self._postponed.table):
            refused.append(put_timers(self._commits, [self._postponed[:3]], state.epoch))

        def change(newest: CatalogState) -> CommitDraft | None:
            new = set(newest.timers) - known
            if known - set(newest.timers) or any(ref.begin_ms <= last_ms for ref in new):
                return None
            return CommitDraft(CommitKind.MAINTENANCE, timers=[*changed.values(), *refused])

        is_committed = self._commits.commit(change, Requirements(epoch=state.epoch))
        if is_committed:
            self._finished.clear()
            self._postponed = _NONE
            self._hold(refused)
        return is_committed

    def _hold(self, refs: Sequence[TimerRef]) -> None:
        """Do not read these objects until all that hold refused timers are read again together, RETRY_S after the
        first."""
        if not self._held:
            self._retry_s = self._clock.monotonic_s() + RETRY_S
        self._held.update(ref.key for ref in refs)

    def _renew(self, claims: Sequence[TimerRef]) -> None:
        """Commit ``claims`` again once half of CLAIM_S is over: after that time this process may not send the claimed
        timers any more, as another one may. Raises UnavailableError if another writer owns the archive."""
        now_s = self._clock.monotonic_s()
        if now_s - self._claim_s < CLAIM_S / 2:
            return
        draft = CommitDraft(CommitKind.MAINTENANCE, timers=claims)
        if not self._commits.commit(lambda _newest: draft, Requirements(epoch=self._commits.state.epoch)):
            raise UnavailableError(
                "this process stops delivering timers, as another writer now owns the archive and delivers them"
            )
        self._claim_s = now_s

    def _merge(self, group: Sequence[TimerRef]) -> bool:
        """Replace the timer objects ``group`` by one object without the finished entries. Returns False if another
        commit changed one of them first."""
        epoch = self._commits.state.epoch
        merged = self.files.merged([Slice(ref, ref.done, ref.entries) for ref in group])
        ref = put_timers(self._commits, (page[:3] for page in merged), epoch)

        def change(newest: CatalogState) -> CommitDraft | None:
            if not set(group) <= set(newest.timers):
                return None
            return CommitDraft(CommitKind.MAINTENANCE, timers=[*(replaced.over for replaced in group), ref])

        is_committed = self._commits.commit(change, Requirements(epoch=epoch))
        if is_committed and group[0].key in self._held:  # the new object holds refused timers as well
            self._held.add(ref.key)
        return is_committed

    # -- messages ---------------------------------------------------------------------------------------------

    def _hand_over(self, entries: Entries, claims: Sequence[TimerRef], *, is_doubt: bool) -> Entries:
        """Send the timers of ``entries`` that are not cancelled to the broker, in chunks that take about CHUNK_S, and
        return the entries to be tried again: those that the broker refuses, and cancellations of such ones.
        ``is_doubt``: the broker may have them already. Raises UnavailableError while the broker is away."""
        sorted_out, postponed, refused_count, size, begin = sort_out(entries), list[Table](), 0, 64, 0
        # In another log history others are at these places, and what was missing may have been archived since.
        is_same = self._messages_history == (history := self._commits.state.cursor.history)
        self._messages = {place: one for place, one in self._messages.items() if is_same and one is not None}
        self._messages_history = history
        every_place, before = _places(entries, sorted_out.timers), replace(self.counts)
        while begin < len(sorted_out.timers):
            self._renew(claims)
            begun_s = self._clock.monotonic_s()
            size = min(size, self._messages_max)
            rows, places = sorted_out.timers[begin : begin + size], every_place[begin : begin + size]
            if not self._messages.keys() >= set(places):
                # With them messages of timers that are due soon are read; of timers that the broker may have, none.
                before_ms = 0 if is_doubt else int(entries.table["deliver_ms"][-1]) + STEP_MS
                self._read_next(every_place[begin:], before_ms)
            sends, send_rows = self._sends(rows, places, entries.topics, is_doubt=is_doubt)
            # Another process may claim these timers afterwards: nothing is sent then.
            refused = self._broker.send(sends, self._note, self._claim_s + CLAIM_S)
            refused_count += sum(rows["kind"][send_rows[number]] == EntryKind.TIMER for number in refused)
            postponed += [
                self._postpone(rows[send_rows[number]], why, places[send_rows[number]])
                for number, why in refused.items()
            ]
            begin += len(rows)
            seconds = max(self._clock.monotonic_s() - begun_s, 0.001)
            size = max(16, min(DOUBT_CHUNK if is_doubt else CHUNK_MAX, int(len(rows) * CHUNK_S / seconds)))
        postponed += self._cancels_of_refused(sorted_out.cancels)
        self.counts.cancelled += len(sorted_out.cancelled)
        self._log_results(refused_count, before)
        return entries._replace(table=concatenated(postponed, ENTRY_DTYPE))

    def _log_results(self, refused_count: int, before: TimerStatus) -> None:
        """Log what an operator should know of a hand-over: timers that the broker refused for the first time, those
        whose messages were lost, and those that are late. ``before``: the counts when it began."""
        if refused_count:
            logger.warning(
                "the broker refuses %d timers, which are sent again every ten minutes; the last refusal: %s",
                refused_count,
                self.counts.problem,
            )
        if dropped := self.counts.dropped - before.dropped:
            logger.error(
                "%d timers will not be delivered, as the archive no longer has their messages: send them again; the"
                " last one: %s",
                dropped,
                self.counts.problem,
            )
        sent = self.counts.delivered - before.delivered
        if sent and (late_ms := max(islice(reversed(self._lateness_ms), sent))) > LATE_MS:
            logger.warning(
                "%d timers were handed over to the broker, the latest of them %d s after its time",
                sent,
                late_ms // 1000,
            )

    def _postpone(self, row: np.void, why: str, place: Place) -> Table:
        """Return the new entry of a timer that the broker refused because of ``why``. It says that the timer is sent
        again, or, once the broker has refused it for refused_ttl_ms, that it is only listed. ``row``: its present
        entry."""
        entry, now_ms = np.array([row], ENTRY_DTYPE), self._clock.wall_ms()
        self.counts.problem = f"{_name(place)}: {why}"[:PROBLEM_CHARS]
        late_ms = now_ms - int(row["deliver_ms"])
        if row["kind"] == EntryKind.TIMER:  # refused for the first time: so many hours late, rounded up
            entry["kind"] = EntryKind.POSTPONED
            entry["late_hours"] = -(-max(late_ms, 0) // HOUR_MS)
        elif late_ms - int(row["late_hours"]) * HOUR_MS >= self._settings.refused_ttl_ms:
            entry["kind"], entry["key_hash"] = EntryKind.REFUSED, Refusal.BROKER
            entry["deliver_ms"], entry["late_hours"] = now_ms + self._settings.listed_ms, 0
        return entry

    def _read_next(self, places: Sequence[Place], before_ms: int) -> None:
        """Read the messages at ``places``, the queue offsets where timers were set, and of unclaimed timers that are
        delivered before ``before_ms``, as many as fit into AHEAD_BYTES. ``before_ms`` 0: only those at ``places``."""
        self._messages = {}  # old messages do not take memory beside the new ones
        refs = [ref for ref in self._commits.state.timers if ref.key not in self._held and before_ms]
        later = self.files.merged([Slice(ref, ref.claimed, ref.entries) for ref in refs], before_ms)
        every = chain(places, chain.from_iterable(_places(page, sort_out(page).timers) for page in later))
        wanted = list(islice(every, self._messages_max))
        found = self._read(wanted)
        self._messages = {**dict.fromkeys(wanted), **found}
        byte_count = sum(len(message.data) + MESSAGE_BYTES for message in found.values())
        self._messages_max = max(16, len(found) * AHEAD_BYTES // byte_count) if found else AHEAD_FIRST

    def _sends(
        self, timers: Table, places: Sequence[Place], topics: Sequence[str], *, is_doubt: bool
    ) -> tuple[list[TimerSend], list[int]]:
        """Return what to send for ``timers``, whose messages are at ``places``, and for each send its row in
        ``timers``. Timers whose message the archive no longer has are counted and skipped, and so are those that the
        broker already has, if ``is_doubt`` says that it may."""
        sends: dict[str, TimerSend] = {}
        rows: list[int] = []
        has_timers, is_settled = self._broker.longest_ms() > 0, is_doubt
        for row, (place, timer) in enumerate(zip(places, timers, strict=True)):
            message = self._messages[place]
            if message is None or not is_entry_of(message, timer, topics[timer["topic"]]):
                self.counts.dropped += 1
                self.counts.problem = f"{_name(place)}: the archive no longer has this timer's message"
                continue
            send = timer_send(message, int(timer["deliver_ms"]), self._judge, has_timers=has_timers)
            is_again = self._may_be_over(message)
            if is_again and not is_settled and not (is_settled := self._broker.is_settled()):
                raise UnavailableError(
                    "timers are delivered once the broker has dispatched all that it received"
                )
            # A message is there twice if its log was put back and archived again in a later generation of the topic.
            if not (send.place in sends or ((is_doubt or is_again) and self._was_sent(send))):
                sends[send.place] = send
                rows.append(row)
        return [*sends.values()], rows

    def _may_be_over(self, message: Message) -> bool:
        """Return whether the timer of ``message`` may have been handed over although its entry does not say so. An
        earlier log history may have had it: it is in the part of the log that was replaced, and as old. Or it is older
        than a repair, which may have lost what commits said of it."""
        record, state = message.record, self._commits.state
        if state.repaired_version != self._repaired[0]:
            commit = read_commit(self._commits.store, state.repaired_version)
            self._repaired = state.repaired_version, commit.draft.created_ms
        stored_ms = record.store_timestamp - CLOCK_SKEW_MS_MAX
        return stored_ms <= self._repaired[1] or any(
            record.physical_offset >= history.begin_phys and stored_ms <= history.created_ms
            for history in state.log_histories
        )

    def _was_sent(self, send: TimerSend) -> bool:
        """Return whether the broker already has a timer that another process may have handed over. Such a timer is
        counted once as delivered."""
        if send.place in self._sent:
            return True
        if not self._broker.has(send):
            return False
        self.counts.found += 1
        self._note(send)
        return True

    def _note(self, send: TimerSend) -> None:
        """Count a message that was handed over."""
        self._sent.add(send.place)
        self.counts.delivered += 1
        self._lateness_ms.append(max(0, self._clock.wall_ms() - send.deliver_ms))

    def _cancels_of_refused(self, cancels: Table) -> Iterator[Table]:
        """Yield those of ``cancels`` that must be kept: of timers that the broker refused, perhaps to another process,
        and that wait in other objects to be sent again. The cancellation and its timer are later read together."""
        for row in cancels:
            if waiting := [ref for ref in self._commits.state.timers if self._waits(ref, row)]:
                self._hold(waiting)
                yield np.array([row], ENTRY_DTYPE)

    def _waits(self, ref: TimerRef, cancel: np.void) -> bool:
        """Whether ``ref`` has a refused timer of this time and key that is not claimed. Other timers are claimed beside
        their cancellations: to hold them would part the two."""
        deliver_ms = int(cancel["deliver_ms"])
        is_near = self.files.next_ms(ref) <= deliver_ms <= ref.end_ms
        alike = ("key_hash", cancel["key_hash"]), ("deliver_ms", deliver_ms), ("kind", EntryKind.POSTPONED)
        return is_near and any(
            np.all([page.table[name] == value for name, value in alike], axis=0).any()
            for page in self.files.merged([Slice(ref, ref.claimed, ref.entries)], deliver_ms + 1)
        )

    def _note_pending(self, state: CatalogState) -> None:
        """Count pending timers for the status, for COUNT_PART_S at a time so that no timer is delivered late because of
        it. The next count begins after COUNT_SHARE times as long as the last one took."""
        begun_s = time.perf_counter()
        if self._counting is None:
            if self._clock.monotonic_s() < self._count_s:
                return
            self._counting, self._counting_s, self._objects = (
                self.files.counting(state),
                0.0,
                len(state.timers),
            )
        counting, self._counting, counts = self._counting, None, None  # a read that fails ends this count
        while counts is None and time.perf_counter() - begun_s < COUNT_PART_S:
            counts = next(counting)
        self._counting_s += time.perf_counter() - begun_s
        if counts is None:
            self._counting = counting
        else:
            refused, self._pending = self._pending.refused, counts
            self._count_s = self._clock.monotonic_s() + max(PENDING_EVERY_S, COUNT_SHARE * self._counting_s)
            if counts.refused > refused:
                logger.warning(
                    "%d timers are refused for good and are not delivered: tiered timers ls --refused lists them",
                    counts.refused,
                )

    def status(self, problem: str = "") -> TimerStatus:
        """Return the figures of the delivery; may be called from any thread. ``problem``: why the last pass failed; if
        it did not, the status names the last problem of a single timer."""
        counts, pending, now_ms = self.counts, self._pending, self._clock.wall_ms()
        next_hour = now_ms // HOUR_MS + 1  # in hours since the epoch
        late_ms = sorted(self._lateness_ms.copy())
        return replace(
            counts,
            pending=pending.pending,
            postponed=pending.postponed,
            refused=pending.refused,
            next_hour=sum(count for hour, count in pending.hours.items() if hour <= next_hour),
            objects=self._objects,
            overdue_seconds=max(0, now_ms - self._due_ms) / 1000,
            late_p99_seconds=late_ms[int(0.99 * len(late_ms))] / 1000 if late_ms else 0.0,
            problem=problem or counts.problem,
        )


def put_timers(commits: MaintenanceCommit, tables: Iterable[Rows], epoch: int) -> TimerRef:
    """Put a timer object with the entries of ``tables`` into the store, and return its reference, which becomes visible
    with the next commit that names it. The entries of a table may be in any order."""
    encoded = encode_timers((sorted_entries(table), *names) for table, *names in tables)  # type: ignore[misc]
    ref = TimerRef.of(encoded, epoch, secrets.randbits(40) | 1 << 40)
    commits.put(ref.key, encoded.body)
    return ref


def _places(entries: Entries, table: Table) -> list[Place]:
    """Where the messages of ``table`` are."""
    queues, offsets = table["queue"].tolist(), table["queue_offset"].tolist()
    return [(entries.queues[queue], offset) for queue, offset in zip(queues, offsets, strict=True)]


def _name(place: Place) -> str:
    return f"{place[0]} offset {place[1]}"


def _claims(entries: Entries, *, is_doubt: bool) -> list[TimerRef]:
    """Return the references of the objects that hold ``entries``, with these entries claimed. Entries in doubt have
    been claimed before."""
    return [ref if is_doubt else ref.moved(ref.done, end) for ref, end in entries.ends.items()]
