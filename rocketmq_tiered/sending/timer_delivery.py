"""Delivers timers: a task of the archive's owner.

    claim rows by a commit → read their messages → send them → the next claim says that they are over

What a claim covers may have been sent by a process that ended, or without an answer: the broker is searched for the
place of each first, once it has nothing to dispatch. A claim ends after CLAIM_S: a process that pauses sends nothing
afterwards. What the broker refuses becomes an object of its own, which is held for RETRY_S, and so does its
cancellation: they are read together. After timers.refused_ttl_ms it becomes an entry that is only listed.
"""

from __future__ import annotations

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
BATCH = 4096
PENDING_EVERY_S = 10.0
LATE_MS = 60_000
"""A warning names timers delivered later than this."""
PROBLEM_CHARS = 400
"""Of what a message, the log and the status say about one timer: clients choose names."""
COUNT_PART_S, COUNT_SHARE = 0.2, 20
"""Timers are counted for so long at once, and again after so many times as long as it took in all."""
LATE_SAMPLES = 10_000
AHEAD_BYTES, AHEAD_FIRST, MESSAGE_BYTES = 64 << 20, 64, 512
"""Of messages in memory, which are read for several claims: others lie between them. How many at first, and what one
takes beside its record."""
CHUNK_S, CHUNK_MAX, DOUBT_CHUNK = 1.0, 1024, 256
"""Messages that are sent before the claim is renewed; those in doubt are searched, one after the other."""
Place = tuple[QueueKey, int]
_NONE = Entries(np.zeros(0, ENTRY_DTYPE), (), ())


FAN_IN = 16
"""Objects of about one size that are merged into one: so many are read for each hour, times the number of sizes."""
MERGED_MAX = 1 << 22
"""Entries of a merged object: 80 MB."""
STEP_MS = 60_000
RETRY_S = 600.0
"""A timer that the broker refuses is tried again after this long."""


def horizon_ms(now_ms: int, ahead_ms: int, longest_ms: int) -> int:
    """Timers before this time are handed over now: in steps, so that one commit covers many; to a broker that takes no
    timers (``longest_ms`` 0) those that are due."""
    ahead_ms = min(ahead_ms, longest_ms * 9 // 10)
    step_ms = max(1, min(STEP_MS, ahead_ms // 4))
    return max(now_ms + 1, (now_ms + ahead_ms) // step_ms * step_ms)


def to_merge(refs: Sequence[TimerRef]) -> list[TimerRef]:
    """FAN_IN objects of about one size, or one of which most is over: they become one. Empty: nothing to merge."""
    idle = [ref for ref in refs if ref.done == ref.claimed]
    by_size: dict[int, list[TimerRef]] = {}
    for ref in idle:
        if 2 * ref.done > ref.entries > FAN_IN**3:
            return [ref]
        by_size.setdefault((ref.entries.bit_length() - 1) // 4, []).append(ref)
    for size in sorted(by_size):
        group = by_size[size][:FAN_IN]
        if len(group) == FAN_IN and sum(ref.entries for ref in group) <= MERGED_MAX:
            return group
    return []


@dataclass(frozen=True)
class TimerPlan:
    """``doubt``: rows that may have been sent. ``merge``: objects that become one. Otherwise rows to hand over, none:
    only what is over is committed."""

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
        """``commits``: of the archive's owner; ``judge`` says which timers their senders may have delivered."""
        self._commits, self._settings, self._broker, self._read = commits, settings, broker, read
        self._judge = judge
        self._clock = clock
        self.files = TimerFiles(commits.store)
        self.counts = TimerStatus()
        """What is counted as it happens; ``status`` has the rest."""
        self._lateness_ms = deque[int](maxlen=LATE_SAMPLES)
        self._due_ms, self._count_s, self._counting_s = NEVER_MS, 0.0, 0.0
        self._pending, self._objects = TimerCounts(), 0
        self.problem = ""
        self._counting: Iterator[TimerCounts | None] | None = None
        self._over: dict[str, TimerRef] = {}
        """Rows that are over, which no commit says yet: objects as the next commit has them."""
        self._postponed = _NONE
        self._held: set[str] = set()
        """Objects that are not read before ``_retry_s``. After a restart all are read at once."""
        self._retry_s = 0.0
        self._settled_s: float | None = None
        """When the broker can be queried about rows in doubt."""
        self._ahead: dict[Place, Message | None] = {}
        """Messages of this claim and the next ones; None: it is not in the archive."""
        self._ahead_max = AHEAD_FIRST
        self._claim_s: float
        """When the present claim was begun."""
        self._sent: set[str] = set()
        """Places of the rows in doubt that were answered for."""
        self._batch = (
            min(BATCH, max(1, int(settings.rate_per_s * CLAIM_S / 4))) if settings.rate_per_s else BATCH
        )

    # -- plan -------------------------------------------------------------------------------------------------

    def plan(self, state: CatalogState) -> TimerPlan | None:
        """What is next, None: nothing is due."""
        refs = [self._over.get(ref.key, ref) for ref in state.timers]
        self._note_pending(state)
        doubt = [Slice(ref, ref.done, ref.claimed) for ref in refs if ref.done < ref.claimed]
        if doubt:
            return TimerPlan(joined(list(self.files.merged(doubt))), is_doubt=True)
        self._settled_s = None
        self._sent.clear()
        if len(self._postponed.table):
            return TimerPlan()
        if self._clock.monotonic_s() >= self._retry_s:
            self._held.clear()
        held = [ref for ref in refs if ref.key in self._held]
        refs = [ref for ref in refs if ref.key not in self._held]
        due_ms = self._due_ms = min(map(self.files.next_ms, refs), default=NEVER_MS)
        if due_ms < self._clock.wall_ms() + self._settings.ahead_ms + 1:
            before_ms = horizon_ms(self._clock.wall_ms(), self._settings.ahead_ms, self._broker.longest_ms())
            if due_ms < before_ms:
                return TimerPlan(self._next(refs, before_ms))
        if self._over:
            return TimerPlan()
        group = to_merge(refs) or to_merge(held)
        return TimerPlan(merge=group) if group else None

    def _next(self, refs: Sequence[TimerRef], before_ms: int) -> Entries:
        """The first entries before a time that no delivery has claimed yet, about a batch of them."""
        parts: list[Entries] = []
        for some in self.files.merged([Slice(ref, ref.claimed, ref.entries) for ref in refs], before_ms):
            parts.append(some)
            if sum(len(part.table) for part in parts) >= self._batch:
                break
        return joined(parts)

    # -- steps ------------------------------------------------------------------------------------------------

    def step(self, state: CatalogState, plan: TimerPlan) -> bool:
        """Carry it out. Raises UnavailableError while the broker is away."""
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
        self._over = {ref.key: ref.moved(ref.claimed, ref.claimed) for ref in claims}
        self._postponed = postponed
        return True

    def _is_due(self, entries: Entries) -> bool:
        """Whether none is sent early: the clock may have been set back since they were claimed."""
        last_ms = int(entries.table["deliver_ms"].max())
        return last_ms <= self._clock.wall_ms() or self._broker.longest_ms() > 0

    def _is_settled(self) -> bool:
        """Whether the broker can be queried about rows in doubt: what others had sent is stored by now."""
        now_s = self._clock.monotonic_s()
        if self._settled_s is None:  # another process claimed them: it may send until its claim ends
            self._settled_s = now_s + CLAIM_S + SETTLE_S
        return now_s >= self._settled_s and self._broker.is_settled()

    def _commit(
        self, state: CatalogState, claims: Sequence[TimerRef], entries: Entries | None = None
    ) -> bool:
        """Commit ``claims``, and what is over. False: timers are not those of ``state`` any more, or there are others
        among ``entries``, such as a cancellation."""
        last_ms = -1 if entries is None or not len(entries.table) else int(entries.table["deliver_ms"][-1])
        known = set(state.timers)
        changed = {**self._over, **{ref.key: ref for ref in claims}}
        again = (
            [put_timers(self._commits, [self._postponed[:3]], state.epoch)]
            if len(self._postponed.table)
            else []
        )

        def change(newest: CatalogState) -> CommitDraft | None:
            new = set(newest.timers) - known
            if known - set(newest.timers) or any(ref.begin_ms <= last_ms for ref in new):
                return None
            return CommitDraft(CommitKind.MAINTENANCE, timers=[*changed.values(), *again])

        is_committed = self._commits.commit(change, Requirements(epoch=state.epoch))
        if is_committed:
            self._over.clear()
            self._postponed = _NONE
            self._hold(again)
        return is_committed

    def _hold(self, refs: Sequence[TimerRef]) -> None:
        if not self._held:
            self._retry_s = self._clock.monotonic_s() + RETRY_S
        self._held.update(ref.key for ref in refs)

    def _renew(self, claims: Sequence[TimerRef]) -> None:
        """Commit ``claims`` again before they end: sending takes long."""
        now_s = self._clock.monotonic_s()
        if now_s - self._claim_s < CLAIM_S / 2:
            return
        draft = CommitDraft(CommitKind.MAINTENANCE, timers=claims)
        if not self._commits.commit(lambda _newest: draft, Requirements(epoch=self._commits.state.epoch)):
            raise UnavailableError("no timer is delivered here: another writer owns the archive")
        self._claim_s = now_s

    def _merge(self, group: Sequence[TimerRef]) -> bool:
        """Replace small timer objects by one, without the rows that are over. False if another commit changed one of
        them first."""
        epoch = self._commits.state.epoch
        merged = self.files.merged([Slice(ref, ref.done, ref.entries) for ref in group])
        ref = put_timers(self._commits, (some[:3] for some in merged), epoch)

        def change(newest: CatalogState) -> CommitDraft | None:
            if not set(group) <= set(newest.timers):
                return None
            return CommitDraft(CommitKind.MAINTENANCE, timers=[*(one.over for one in group), ref])

        is_committed = self._commits.commit(change, Requirements(epoch=epoch))
        if is_committed and group[0].key in self._held:
            self._held.add(ref.key)
        return is_committed

    # -- messages ---------------------------------------------------------------------------------------------

    def _hand_over(self, entries: Entries, claims: Sequence[TimerRef], *, is_doubt: bool) -> Entries:
        """Send what is to be sent; what the broker refuses. Raises UnavailableError."""
        found, postponed, fresh, size, at = sort_out(entries), list[Table](), 0, 64, 0
        every, before = _places(entries, found.timers), replace(self.counts)
        while at < len(found.timers):
            self._renew(claims)
            begun_s = self._clock.monotonic_s()
            size = min(size, self._ahead_max)
            rows, places = found.timers[at : at + size], every[at : at + size]
            if not self._ahead.keys() >= set(places):
                self._read_next(every[at:], 0 if is_doubt else int(entries.table["deliver_ms"][-1]) + STEP_MS)
            sends, chosen = self._sends(rows, places, entries.topics, is_doubt=is_doubt)
            refused = self._broker.send(sends, self._note, self._claim_s + CLAIM_S)
            fresh += sum(rows["kind"][chosen[number]] == EntryKind.TIMER for number in refused)
            postponed += [
                self._postpone(rows[chosen[number]], why, places[chosen[number]])
                for number, why in refused.items()
            ]
            at += len(rows)
            seconds = max(self._clock.monotonic_s() - begun_s, 0.001)
            size = max(16, min(DOUBT_CHUNK if is_doubt else CHUNK_MAX, int(len(rows) * CHUNK_S / seconds)))
        if fresh:
            logger.warning(
                "the broker refuses %d timers, which are sent again every ten minutes; the last refusal: %s",
                fresh,
                self.counts.problem,
            )
        postponed += self._holding(found.cancels)
        self.counts.cancelled += len(found.cancelled)
        if dropped := self.counts.dropped - before.dropped:
            logger.error(
                "%d timers are dropped, as other messages are at their places: send them again; the last: %s",
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
        return entries._replace(table=concatenated(postponed, ENTRY_DTYPE))

    def _postpone(self, row: np.void, why: str, place: Place) -> Table:
        """The entry of a timer that the broker refused: it is sent again, or only listed if that took too long."""
        found, now_ms = np.array([row], ENTRY_DTYPE), self._clock.wall_ms()
        self.counts.problem = f"{_name(place)}: {why}"[:PROBLEM_CHARS]
        late_ms = now_ms - int(row["deliver_ms"])
        if row["kind"] == EntryKind.TIMER:
            found["kind"] = EntryKind.POSTPONED
            found["late_hours"] = -(-max(late_ms, 0) // HOUR_MS)
        elif late_ms - int(row["late_hours"]) * HOUR_MS >= self._settings.refused_ttl_ms:
            found["kind"], found["key_hash"] = EntryKind.REFUSED, Refusal.BROKER
            found["deliver_ms"], found["late_hours"] = now_ms + self._settings.listed_ms, 0
        return found

    def _read_next(self, places: Sequence[Place], before_ms: int) -> None:
        """The messages of ``places``, and of what comes before a time after the claims, as memory allows."""
        self._ahead = {}  # not beside the new ones
        refs = [ref for ref in self._commits.state.timers if ref.key not in self._held and before_ms]
        later = self.files.merged([Slice(ref, ref.claimed, ref.entries) for ref in refs], before_ms)
        every = chain(places, chain.from_iterable(_places(some, sort_out(some).timers) for some in later))
        wanted = list(islice(every, self._ahead_max))
        found = self._read(wanted)
        self._ahead = {**dict.fromkeys(wanted), **found}
        byte_count = sum(len(message.data) + MESSAGE_BYTES for message in found.values())
        self._ahead_max = max(16, len(found) * AHEAD_BYTES // byte_count) if found else AHEAD_FIRST

    def _sends(
        self, timers: Table, places: Sequence[Place], topics: Sequence[str], *, is_doubt: bool
    ) -> tuple[list[TimerSend], list[int]]:
        """What to send, without what the broker has, and the row of each."""
        sends: list[TimerSend] = []
        rows: list[int] = []
        has_timers = self._broker.longest_ms() > 0
        for row, (place, timer) in enumerate(zip(places, timers, strict=True)):
            message, deliver_ms = self._ahead[place], int(timer["deliver_ms"])
            made_of = int(timer["order"]), int(timer["key_hash"]), topics[timer["topic"]]
            if message is None or not is_entry_of(message, deliver_ms, *made_of):
                self.counts.dropped += 1
                self.counts.problem = f"{_name(place)} is not in the archive any more"
                continue
            send = timer_send(message, deliver_ms, self._judge, has_timers=has_timers)
            if not (is_doubt and self._was_sent(send)):
                sends.append(send)
                rows.append(row)
        return sends, rows

    def _was_sent(self, send: TimerSend) -> bool:
        """Whether a timer in doubt was handed over before: the broker has it."""
        if send.place in self._sent:
            return True
        if not self._broker.has(send):
            return False
        self.counts.found += 1
        self._note(send)
        return True

    def _note(self, send: TimerSend) -> None:
        """A message was handed over."""
        self._sent.add(send.place)
        self.counts.delivered += 1
        self._lateness_ms.append(max(0, self._clock.wall_ms() - send.deliver_ms))

    def _holding(self, cancels: Table) -> Iterator[Table]:
        """Cancellations of timers that wait, as the broker had refused them, perhaps to another process."""
        for row in cancels:
            if waiting := [ref for ref in self._commits.state.timers if self._waits(ref, row)]:
                self._hold(waiting)
                yield np.array([row], ENTRY_DTYPE)

    def _waits(self, ref: TimerRef, cancel: np.void) -> bool:
        """Whether ``ref`` has a refused timer of this time and key that is not claimed. Other timers are claimed beside
        their cancellations: to hold them would part the two."""
        at_ms = int(cancel["deliver_ms"])
        is_near = self.files.next_ms(ref) <= at_ms <= ref.end_ms
        alike = ("key_hash", cancel["key_hash"]), ("deliver_ms", at_ms), ("kind", EntryKind.POSTPONED)
        return is_near and any(
            np.all([some.table[name] == value for name, value in alike], axis=0).any()
            for some in self.files.merged([Slice(ref, ref.claimed, ref.entries)], at_ms + 1)
        )

    def _note_pending(self, state: CatalogState) -> None:
        """Count what is pending: a part at a time, so that no timer is late."""
        begun_s = time.perf_counter()
        if self._counting is None:
            if self._clock.monotonic_s() < self._count_s:
                return
            self._counting, self._counting_s, self._objects = (
                self.files.counting(state),
                0.0,
                len(state.timers),
            )
        counts = None
        while counts is None and time.perf_counter() - begun_s < COUNT_PART_S:
            counts = next(self._counting)
        self._counting_s += time.perf_counter() - begun_s
        if counts is not None:
            refused, self._pending, self._counting = self._pending.refused, counts, None
            self._count_s = self._clock.monotonic_s() + max(PENDING_EVERY_S, COUNT_SHARE * self._counting_s)
            if counts.refused > refused:
                logger.warning(
                    "%d messages are not delivered: see tiered timers ls --refused", counts.refused
                )

    def status(self, problem: str = "") -> TimerStatus:
        """Figures, from any thread. ``problem``: of the last pass."""
        counts, pending, now_ms = self.counts, self._pending, self._clock.wall_ms()
        last = now_ms // HOUR_MS + 1
        late_ms = sorted(self._lateness_ms.copy())
        return replace(
            counts,
            pending=pending.pending,
            postponed=pending.postponed,
            refused=pending.refused,
            next_hour=sum(count for hour, count in pending.hours.items() if hour <= last),
            objects=self._objects,
            overdue_seconds=max(0, now_ms - self._due_ms) / 1000,
            late_p99_seconds=late_ms[int(0.99 * len(late_ms))] / 1000 if late_ms else 0.0,
            problem=problem or counts.problem,
        )


def put_timers(commits: MaintenanceCommit, parts: Iterable[Rows], epoch: int) -> TimerRef:
    """Put an object of ``parts``, each in any order, for the next commit."""
    encoded = encode_timers((sorted_entries(table), *names) for table, *names in parts)  # type: ignore[misc]
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
    """The objects with the rows of ``entries`` claimed; rows in doubt are."""
    return [ref if is_doubt else ref.moved(ref.done, end) for ref, end in entries.ends.items()]
