"""Delivers timers: a task of the archive's owner.

    claim rows by a commit → read their messages → send them → the next claim says that they are over

What a claim covers may have been sent by a process that ended, or without an answer: the broker is queried by each key
first, once it has nothing to dispatch. A claim is good for CLAIM_S: a process that pauses sends nothing afterwards.
What the broker refuses becomes an object of its own, which is held for RETRY_S, and so does its cancellation: they are
read together.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from fetcher.rows.message import Message
from rocketmq_tiered.sending.timer_plan import RETRY_S, STEP_MS, horizon_ms, to_merge
from rocketmq_tiered.sending.timer_send import TimerBroker, TimerSend, timer_send
from rocketmq_tiered.sending.timer_status import TimerStatus
from tiered.archive.task import TIMER_DELIVERY, Due
from tiered.archive.timers import NEVER_MS, Entries, Slice, TimerFiles, sort_out
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.maintenance_commit import MaintenanceCommit
from tiered.catalog.requirements import Requirements
from tiered.catalog.state import CatalogState
from tiered.catalog.timer_refs import TimerRef
from tiered.errors import UnavailableError
from tiered.formats.timer_object import ENTRY_DTYPE, EncodedTimers, encode_timers, sorted_entries
from tiered.model.queue import QueueKey
from tiered.model.tables import Table, concatenated
from tiered.model.timer import Refusal, hour_of
from tiered.settings.timer_section import TimerSettings
from tiered.timestamps import wall_ms

logger = logging.getLogger(__name__)

CLAIM_S = 6.0
SETTLE_S = 2.0
"""After a connection ends, the broker may still store what it had received."""
BATCH = 4096
PENDING_EVERY_S = 10.0
REFUSED_LOGGED = 100
"""Of a batch: a producer that is wrong sends many."""
LATE_MS = 60_000
"""Timers that are later are said."""
LATE_SAMPLES = 10_000
AHEAD_BYTES, AHEAD_FIRST, MESSAGE_BYTES = 64 << 20, 64, 512
"""Of messages in memory, which are read for several claims: others lie between them. How many at first, and what one
takes beside its record."""
CHUNK_S, CHUNK_MAX, DOUBT_CHUNK = 1.0, 1024, 256
"""Messages that are sent before the claim is renewed; those in doubt are queried by key, one after the other."""
Place = tuple[QueueKey, int]
Postponed = tuple[Table, Sequence[QueueKey]]
"""An entry, and what its ``queue`` indexes."""


@dataclass(frozen=True)
class TimerPlan:
    """``doubt``: rows that may have been sent. ``merge``: objects that become one. Otherwise rows to hand over, none:
    only what is over is committed."""

    entries: Entries | None = None
    is_doubt: bool = False
    merge: Sequence[TimerRef] = ()


class TimerDelivery:
    """The task. ``read``: messages by place, without those that are not in the archive; raises for unreadable ones."""

    name = TIMER_DELIVERY
    due = Due(every_s=1.0, first_s=1.0, retry_s=2.0)

    def __init__(
        self,
        commits: MaintenanceCommit,
        settings: TimerSettings,
        broker: TimerBroker,
        read: Callable[[Sequence[Place]], Mapping[Place, Message]],
        *,
        clock_ms: Callable[[], int] = wall_ms,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._commits, self._settings, self._broker, self._read = commits, settings, broker, read
        self._clock_ms, self._monotonic_s = clock_ms, monotonic_s
        self.files = TimerFiles(commits.store)
        self.counts = TimerStatus()
        """What is counted as it happens; ``status`` has the rest."""
        self._lateness_ms = deque[int](maxlen=LATE_SAMPLES)
        self._due_ms, self._noted_s = NEVER_MS, -PENDING_EVERY_S
        self._hours: Mapping[int, int] = {}
        self._objects = 0
        self.problem = ""
        self._over: dict[str, TimerRef] = {}
        """Rows that are over, which no commit says yet: objects as the next commit has them."""
        self._postponed: list[Postponed] = []
        self._held: set[str] = set()
        """Objects that are not read before ``_retry_s``. After a restart all are read at once."""
        self._retry_s = 0.0
        self._settled_s: float | None = None
        """When the broker can be queried about rows in doubt."""
        self._ahead: dict[Place, Message | None] = {}
        """Messages of this claim and the next ones; None: it is not in the archive."""
        self._ahead_max = AHEAD_FIRST
        self._claim_s = 0.0
        """When the present claim was begun."""
        self._sent: set[tuple[int, str]] = set()
        """Of the rows in doubt, those that were answered for."""
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
            return TimerPlan(_all(self.files, doubt), is_doubt=True)
        self._settled_s = None
        self._sent.clear()
        if self._postponed:
            return TimerPlan()
        self._due_ms = min(map(self.files.next_ms, refs), default=NEVER_MS)
        if self._monotonic_s() >= self._retry_s:
            self._held.clear()
        held = [ref for ref in refs if ref.key in self._held]
        refs = [ref for ref in refs if ref.key not in self._held]
        due_ms = min(map(self.files.next_ms, refs), default=NEVER_MS)
        if due_ms < self._clock_ms() + self._settings.ahead_ms + 1:
            before_ms = horizon_ms(self._clock_ms(), self._settings.ahead_ms, self._broker.timers())
            if due_ms < before_ms:
                return TimerPlan(self._next(refs, before_ms))
        if self._over:
            return TimerPlan()
        group = to_merge(refs) or to_merge(held)
        return TimerPlan(merge=group) if group else None

    def _next(self, refs: Sequence[TimerRef], before_ms: int) -> Entries:
        """The first rows before a time."""
        parts: list[Entries] = []
        for some in self.files.merged([Slice(ref, ref.claimed, ref.entries) for ref in refs], before_ms):
            parts.append(some)
            if sum(len(part.table) for part in parts) >= self._batch:
                break
        return _joined(parts)

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
        self._claim_s = self._monotonic_s()
        if not self._commit(state, claims, plan.entries):
            return True  # other timers came in between: plan again
        try:
            postponed = self._hand_over(plan.entries, claims, is_doubt=plan.is_doubt)
        finally:
            self._settled_s = self._monotonic_s() + SETTLE_S
        self._over = {ref.key: ref.moved(ref.claimed, ref.claimed) for ref in claims}
        self._postponed = postponed
        return True

    def _is_due(self, entries: Entries) -> bool:
        """Whether none is sent early: the clock may have been set back since they were claimed."""
        last_ms = int(entries.table["deliver_ms"].max())
        return last_ms <= self._clock_ms() or self._broker.timers().max_delay_ms > 0

    def _is_settled(self) -> bool:
        """Whether the broker can be queried about rows in doubt: what others had sent is stored by now."""
        now_s = self._monotonic_s()
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
        encoded = self._put_postponed(state.epoch)

        def change(newest: CatalogState) -> CommitDraft | None:
            new = set(newest.timers) - known
            if known - set(newest.timers) or any(ref.begin_ms <= last_ms for ref in new):
                return None
            return CommitDraft(CommitKind.MAINTENANCE, timers=[*changed.values(), *encoded])

        is_committed = self._commits.commit(change, Requirements(epoch=state.epoch))
        if is_committed:
            self._over.clear()
            self._postponed.clear()
            self._hold(encoded)
        return is_committed

    def _hold(self, refs: Sequence[TimerRef]) -> None:
        if not self._held:
            self._retry_s = self._monotonic_s() + RETRY_S
        self._held.update(ref.key for ref in refs)

    def _renew(self, claims: Sequence[TimerRef]) -> None:
        """Commit ``claims`` again before they end: sending takes long."""
        now_s = self._monotonic_s()
        if now_s - self._claim_s < CLAIM_S / 2:
            return
        draft = CommitDraft(CommitKind.MAINTENANCE, timers=claims)
        if not self._commits.commit(lambda _newest: draft, Requirements(epoch=self._commits.state.epoch)):
            raise UnavailableError("another writer owns the archive")
        self._claim_s = now_s

    def _put_postponed(self, epoch: int) -> list[TimerRef]:
        if not self._postponed:
            return []
        queues = list(dict.fromkeys(queue for _, some in self._postponed for queue in some))
        parts = []
        for table, some in self._postponed:
            part = table.copy()
            part["queue"] = np.array([queues.index(queue) for queue in some], np.uint32)[table["queue"]]
            parts.append(part)
        return [put_timers(self._commits, sorted_entries(concatenated(parts, ENTRY_DTYPE)), queues, epoch)]

    def _merge(self, group: Sequence[TimerRef]) -> bool:
        places = list(dict.fromkeys(queue for ref in group for queue in self.files.footer(ref).queues))
        epoch = self._commits.state.epoch
        merged = self.files.merged([Slice(ref, ref.done, ref.entries) for ref in group])
        encoded = encode_timers((some.table for some in merged), places)
        ref = _put(self._commits, encoded, epoch)

        def change(newest: CatalogState) -> CommitDraft | None:
            if not set(group) <= set(newest.timers):
                return None
            return CommitDraft(CommitKind.MAINTENANCE, timers=[*(one.over for one in group), ref])

        is_committed = self._commits.commit(change, Requirements(epoch=epoch))
        if is_committed and group[0].key in self._held:
            self._held.add(ref.key)
        return is_committed

    # -- messages ---------------------------------------------------------------------------------------------

    def _hand_over(self, entries: Entries, claims: Sequence[TimerRef], *, is_doubt: bool) -> list[Postponed]:
        """Send what is to be sent; what the broker refuses. Raises UnavailableError."""
        found, postponed, counts, size, at = sort_out(entries.table), list[Postponed](), self.counts, 64, 0
        every = _places(entries, found.timers)
        counts.refused += len(found.refused)
        for row in found.refused[:REFUSED_LOGGED]:
            (place,), reason = _places(entries, row), Refusal(int(row["key_hash"])).text
            counts.problem = f"{_name(place)} is not delivered: {reason}"
            logger.error("timer refused: %s", counts.problem)
        if len(found.refused) > REFUSED_LOGGED:
            logger.error("%d more timers refused", len(found.refused) - REFUSED_LOGGED)
        while at < len(found.timers):
            self._renew(claims)
            begun_s = self._monotonic_s()
            size = min(size, self._ahead_max)
            rows, places = found.timers[at : at + size], every[at : at + size]
            if not self._ahead.keys() >= set(places):
                self._read_next(every[at:], 0 if is_doubt else int(entries.table["deliver_ms"][-1]) + STEP_MS)
            sends, chosen = self._sends(rows, places, is_doubt=is_doubt)
            refused = self._broker.send(sends, self._note, self._claim_s + CLAIM_S)
            for number, why in refused.items():
                row = chosen[number]
                postponed.append((rows[row : row + 1], entries.queues))
                counts.postponed += 1
                counts.problem = f"{_name(places[row])} waits, the broker refuses it: {why}"
                logger.error("timer postponed: %s", counts.problem)
            at += len(rows)
            seconds = max(self._monotonic_s() - begun_s, 0.001)
            size = max(16, min(DOUBT_CHUNK if is_doubt else CHUNK_MAX, int(len(rows) * CHUNK_S / seconds)))
        postponed += [(table, entries.queues) for table in map(self._holding, found.late) if len(table)]
        counts.cancelled += len(found.cancelled)
        counts.repeated += len(found.repeated)
        if len(found.timers) and (late_ms := self._clock_ms() - int(found.timers["deliver_ms"][0])) > LATE_MS:
            logger.warning("%d timers handed over, the first %d s late", len(found.timers), late_ms // 1000)
        return postponed

    def _read_next(self, places: Sequence[Place], before_ms: int) -> None:
        """The messages of ``places``, and of what comes before a time after the claims, as memory allows."""
        self._ahead = {}  # not beside the new ones
        refs = [ref for ref in self._commits.state.timers if ref.key not in self._held and before_ms]
        later = self.files.merged([Slice(ref, ref.claimed, ref.entries) for ref in refs], before_ms)
        every = chain(places, chain.from_iterable(_places(some, some.table) for some in later))
        wanted = list(islice(every, self._ahead_max))
        found = self._read(wanted)
        self._ahead = {**dict.fromkeys(wanted), **found}
        byte_count = sum(len(message.data) + MESSAGE_BYTES for message in found.values())
        self._ahead_max = max(16, len(found) * AHEAD_BYTES // byte_count) if found else AHEAD_FIRST

    def _sends(
        self, timers: Table, places: Sequence[Place], *, is_doubt: bool
    ) -> tuple[list[TimerSend], list[int]]:
        """What to send, without what the broker has, and the row of each."""
        sends: list[TimerSend] = []
        rows: list[int] = []
        has_timers = self._broker.timers().max_delay_ms > 0
        times, hashes = timers["deliver_ms"].tolist(), timers["key_hash"].tolist()
        for row, (place, deliver_ms) in enumerate(zip(places, times, strict=True)):
            message = self._ahead[place]
            send = None if message is None else timer_send(message, deliver_ms, has_timers=has_timers)
            if send is None or send.key_hash != hashes[row]:
                self.counts.dropped += 1
                self.counts.problem = f"{_name(place)} is not in the archive any more"
                logger.error("timer dropped: %s", self.counts.problem)
            elif not (is_doubt and self._was_sent(send)):
                sends.append(send)
                rows.append(row)
        return sends, rows

    def _was_sent(self, send: TimerSend) -> bool:
        if (send.deliver_ms, send.key) in self._sent:
            return True
        if not self._broker.has(send.message.topic, send.key):
            return False
        self.counts.found += 1
        self._note(send)
        return True

    def _note(self, send: TimerSend) -> None:
        """A message was handed over."""
        self._sent.add((send.deliver_ms, send.key))
        self.counts.delivered += 1
        self._lateness_ms.append(max(0, self._clock_ms() - send.deliver_ms))

    def _holding(self, row: np.void) -> Table:
        """A cancellation without a timer, if its timer waits, as the broker had refused it; else none."""
        at_ms = int(row["deliver_ms"])
        waiting = [
            ref for ref in self._commits.state.timers if self.files.next_ms(ref) <= at_ms <= ref.end_ms
        ]
        slices = [Slice(ref, ref.claimed, ref.entries) for ref in waiting]
        for some in self.files.merged(slices, at_ms + 1):
            same = (some.table["deliver_ms"] == at_ms) & (some.table["key_hash"] == row["key_hash"])
            if same.any():
                self._hold(waiting)
                return np.array([row], ENTRY_DTYPE)
        return np.zeros(0, ENTRY_DTYPE)

    def _note_pending(self, state: CatalogState) -> None:
        now_s = self._monotonic_s()
        if now_s - self._noted_s >= PENDING_EVERY_S:
            self._noted_s, self._hours, self._objects = now_s, self.files.hours(state), len(state.timers)

    def status(self, problem: str = "") -> TimerStatus:
        """Figures, from any thread. ``problem``: of the last pass."""
        counts, hours, now_ms = self.counts, self._hours, self._clock_ms()
        last = hour_of(now_ms) + 1
        late_ms = sorted(self._lateness_ms.copy())
        return replace(
            counts,
            pending=sum(hours.values()),
            next_hour=sum(count for hour, count in hours.items() if hour <= last),
            objects=self._objects,
            overdue_seconds=max(0, now_ms - self._due_ms) / 1000,
            late_p99_seconds=late_ms[int(0.99 * len(late_ms))] / 1000 if late_ms else 0.0,
            problem=problem or counts.problem,
        )


def put_timers(
    commits: MaintenanceCommit, entries: Table, queues: Sequence[QueueKey], epoch: int
) -> TimerRef:
    """Put an object of ``entries`` for the next commit."""
    return _put(commits, encode_timers(iter([entries]), queues), epoch)


def _put(commits: MaintenanceCommit, encoded: EncodedTimers, epoch: int) -> TimerRef:
    ref = TimerRef.of(encoded, epoch, secrets.randbits(40) | 1 << 40)
    commits.put(ref.key, encoded.body)
    return ref


def _places(entries: Entries, table: Table) -> list[Place]:
    """Where the messages of ``table``, or of one row, are."""
    queues, offsets = np.atleast_1d(table["queue"]).tolist(), np.atleast_1d(table["queue_offset"]).tolist()
    return [(entries.queues[queue], offset) for queue, offset in zip(queues, offsets, strict=True)]


def _name(place: Place) -> str:
    return f"{place[0]} offset {place[1]}"


def _all(files: TimerFiles, slices: Sequence[Slice]) -> Entries:
    return _joined(list(files.merged(slices)))


def _joined(parts: Sequence[Entries]) -> Entries:
    """All of ``parts``; of each object one slice."""
    spans: dict[TimerRef, tuple[int, int]] = {}
    for ref, first, last in (found for part in parts for found in part.slices):
        spans[ref] = spans.get(ref, (first, last))[0], last
    slices = [Slice(ref, *span) for ref, span in spans.items()]
    return Entries(concatenated((part.table for part in parts), ENTRY_DTYPE), parts[-1].queues, slices)


def _claims(entries: Entries, *, is_doubt: bool) -> list[TimerRef]:
    """The objects with the rows of ``entries`` claimed; rows in doubt are."""
    return [ref if is_doubt else ref.moved(ref.done, last) for ref, _, last in entries.slices]
