"""Sends archived messages to another broker or topic: which queues go where, and the run, which continues.

A queue's messages are sent one after another, each when the one before is stored, so that their order stays; up to
QUEUES_MAX queues are sent at once. Owns no connection (sender.py), no file (position.py), no reading (fetcher).
"""

import asyncio
import fnmatch
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from fetcher.access import ArchiveAccess
from fetcher.io.waiting import run_async
from fetcher.queries.queue_listing import QueueListing
from fetcher.queries.time_search import Boundary
from fetcher.rows.message import Message
from fetcher.walk import Span, Walk, messages_of
from rocketmq_tiered.sending.outgoing import outgoing_messages
from rocketmq_tiered.sending.position import REPEATS_MAX, Position, Sending
from rocketmq_tiered.sending.sender import RefusedMessageError, Sender
from rocketmq_tiered.sending.target import Target, TargetQueue
from tiered.archive.unreadable import UnreadableMessagesError
from tiered.console import counted
from tiered.errors import CorruptionError, NotFoundError, UsageError
from tiered.model.queue import DEAD_PREFIX, LMQ_PREFIX, RETRY_PREFIX, QueueKey, TopicFilter
from tiered.model.tables import Table
from tiered.model.timer import CANCEL, CANCEL_PLACE, DELIVER_MS

logger = logging.getLogger(__name__)

QUEUES_MAX = 32
BATCH_MESSAGES, BATCH_BYTES = 512, 1024 * 1024
SAVE_EVERY_S = 1.0
STOP_S = 3.0
"""Time for what is in flight when the run ends early."""
_NAMED_ONLY = (RETRY_PREFIX, DEAD_PREFIX, LMQ_PREFIX)


@dataclass(frozen=True)
class Selection:
    """Which messages: of topics by name or pattern, ``names`` maps topics to other ones; stored in [since, until).
    ``pending``: of queues of timers, those that are not delivered, with their times; others are not sent."""

    topics: Sequence[str] = ("*",)
    names: Mapping[str, str] = field(default_factory=dict)
    since_ms: int | None = None
    until_ms: int | None = None
    skip_refused: bool = False
    pending: Mapping[QueueKey, Table] = field(default_factory=dict)


@dataclass
class SendingJob:
    """One queue to send. ``messages``: an estimate of what is left, from offset ``start`` on."""

    sending: Sending
    to: TargetQueue
    start: int = 0
    messages: int = 0


@dataclass
class Report:
    """What a run did; ``sent`` by target topic."""

    sent: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    unreadable: int = 0
    unanswered: int = 0
    elapsed_s: float = 0.0
    is_complete: bool = False

    @property
    def count(self) -> int:
        """Messages sent."""
        return sum(self.sent.values())


def chosen_queues(access: ArchiveAccess, selection: Selection) -> list[QueueListing]:
    """Return the archived queues to send: those of topics that ``selection`` names or whose names match its patterns.
    Raises NotFoundError for a topic that is not archived, and UsageError if a topic to rename is not selected."""
    topic_filter = TopicFilter(cluster=access.cluster, broker=access.broker)
    listed = access.queues(None, hidden=False)
    archived = {queue.topic for queue in listed}

    def is_chosen(topic: str) -> bool:
        if topic in selection.topics:
            return True
        # A pattern such as * does not mean system topics, retry topics, dead letters and LMQs: these must be named.
        is_ordinary = not topic_filter.is_system(topic) and not topic.startswith(_NAMED_ONLY)
        return is_ordinary and any(fnmatch.fnmatchcase(topic, pattern) for pattern in selection.topics)

    chosen = {topic for topic in archived if is_chosen(topic)}
    for pattern in selection.topics:
        if pattern not in archived and not any(fnmatch.fnmatchcase(topic, pattern) for topic in chosen):
            raise NotFoundError(
                f"the archive {access.title} has no topic {pattern}",
                hint="tiered ls lists the topics of an archive",
            )
    for name in selection.names:
        if name not in chosen:
            raise UsageError(f"--topic-map {name}=…: topic {name} is not among those that --topics selects")
    return [queue for queue in listed if queue.topic in chosen]


def jobs_for(
    access: ArchiveAccess, queues: Sequence[QueueListing], names: Mapping[str, str], target: Target
) -> list[SendingJob]:
    """Return a job for each archived queue, which says where its messages go: those of queue n to queue n of the target
    topic, counted modulo its number of queues. ``names`` gives archived topics other names at the target. Raises
    NotFoundError and UsageError for a target topic that cannot take messages."""
    queue_counts: Counter[str] = Counter()
    for queue in queues:
        queue_counts[queue.topic] = max(queue_counts[queue.topic], queue.queue_id + 1)
    own = [
        broker
        for broker in target.brokers
        if (broker.cluster, broker.name) == (access.cluster, access.broker)
    ]
    target_queues: dict[str, list[TargetQueue]] = {}
    for topic, queue_count in queue_counts.items():
        target_topic = names.get(topic, topic)
        if own and target_topic == topic:  # the sidecar there would archive these messages once more
            raise UsageError(
                f"topic {topic} would be sent to the broker that it was archived from, {own[0].address}",
                hint=f"name another topic: --topic-map {topic}=NEW",
            )
        target_queues[topic] = target.queues(target_topic, queue_count)
    return [
        SendingJob(
            Sending(queue.key, names.get(queue.topic, queue.topic)),
            target_queues[queue.topic][queue.queue_id % len(target_queues[queue.topic])],
        )
        for queue in queues
    ]


class Republish:
    """A run over ``jobs``, whose queues continue at ``position``."""

    def __init__(
        self,
        access: ArchiveAccess,
        position: Position,
        selection: Selection,
        progress: Callable[[int, int], object] = lambda _done, _total: None,
    ) -> None:
        """``position``: the file that says how far each queue was sent; ``selection``: which messages are sent;
        ``progress`` is called with the number of messages sent so far and an estimate of all."""
        self._access, self._position, self._selection = access, position, selection
        self._progress = progress
        self._total = 0
        self._left: list[SendingJob] = []
        self._stop = asyncio.Event()
        self._is_save_due = asyncio.Event()
        self._saved = asyncio.Condition()
        self._is_over = False
        self.report = Report()

    async def prepare(self, jobs: Sequence[SendingJob], listed: Mapping[QueueKey, QueueListing]) -> None:
        """Find for each queue the offset to start at, and an estimate of the messages to send from there. ``listed``
        has the archived queues by name. Raises UnavailableError and CorruptionError if the archive cannot be read."""
        for job in jobs:
            queue, until_ms = job.sending.queue, self._selection.until_ms
            walk = await self._walk(queue)
            first, end = self._access.bounds(queue)
            if until_ms is not None:
                end = await run_async(self._access.offset_by_time(queue, until_ms, Boundary.LOWER))
            job.start = self._position.begin(job.sending, walk.offset)
            job.messages = max(0, end - job.start)
            # Gaps and key compaction leave fewer messages than offsets.
            if listed[queue].messages < listed[queue].max_offset - first:
                job.messages = min(job.messages, listed[queue].messages)
            if (pending := self._selection.pending.get(queue)) is not None:
                job.messages = int(np.count_nonzero(pending["queue_offset"] >= job.start))
        self._total = sum(job.messages for job in jobs)
        self._left = list(reversed(jobs))  # the end is popped first

    async def run(self, sender: Sender) -> Report:
        """Send the prepared queues until all is sent or ``stop`` is called, and return what was done. The first failure
        of sending or reading ends the run and is raised, after the position file was written."""
        begun_s = time.monotonic()
        await self._save()  # a file that cannot be written is found out before anything is sent
        saving = asyncio.create_task(self._keep_saving())
        workers = [asyncio.create_task(self._work(sender)) for _ in range(min(QUEUES_MAX, len(self._left)))]
        stopped = asyncio.create_task(self._stop.wait())
        try:
            await self._first_end(workers, saving, stopped)
        finally:
            self._stop.set()
            if workers:
                await asyncio.wait(workers, timeout=STOP_S)
            # cancel() is true for a worker that was still sending: the broker may have stored its message.
            interrupted = [worker for worker in workers if worker.cancel()]
            self._is_over = True
            self._is_save_due.set()
            # ``saving`` is not cancelled: its thread would write the file beside the last write below.
            ended = await asyncio.gather(*workers, saving, stopped, return_exceptions=True)
            await self._save(is_exact=not interrupted)
            self.report.unanswered, self.report.elapsed_s = sender.unanswered, time.monotonic() - begun_s
        for failure in ended:
            if isinstance(failure, Exception):
                raise failure
        return self.report

    def stop(self) -> None:
        """End the run soon; what was sent is in the position."""
        self._stop.set()

    async def _first_end(
        self, workers: list[asyncio.Task[None]], saving: asyncio.Task[None], stopped: asyncio.Task[bool]
    ) -> None:
        """Wait until all workers have ended, which makes the run complete, or until one of the tasks failed or the run
        was stopped. ``saving`` ends early only by a failure; ``stopped`` ends when ``stop`` is called."""
        pending: set[asyncio.Task[None]] = set(workers)
        while pending:
            done, _ = await asyncio.wait({*pending, saving, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if saving in done or stopped in done or any(task.exception() for task in done & pending):
                return
            pending -= done
        self.report.is_complete = True

    async def _work(self, sender: Sender) -> None:
        while self._left and not self._stop.is_set():
            await self._send_queue(self._left.pop(), sender)

    async def _send_queue(self, job: SendingJob, sender: Sender) -> None:
        """Send one queue in order of its offsets, from ``job.start`` on. Unreadable messages are counted, logged and
        skipped. Of a queue of timers only the pending ones are sent, each with its time of delivery."""
        walk = await self._walk(job.sending.queue)
        walk.offset = max(walk.offset, job.start)
        is_batch = self._access.is_batch(job.sending.queue)
        pending = self._selection.pending.get(job.sending.queue)
        while True:
            try:
                batch = await run_async(walk.next_batch())
            except UnreadableMessagesError as error:
                walk.offset = error.range.end
                self.report.unreadable += error.range.end - error.range.begin
                logger.error("%s", error.range.text)
                continue
            if batch is None:
                return
            for message in messages_of(batch, job.sending.queue, is_batch=is_batch):
                deliver_ms = None if pending is None else _time_of(pending, message.queue_offset)
                if pending is None or deliver_ms is not None:
                    await self._send(message, job, sender, deliver_ms)
                if self._stop.is_set():
                    return

    async def _walk(self, queue: QueueKey) -> Walk:
        chosen = self._selection
        span = Span(None, chosen.since_ms, None, BATCH_MESSAGES, BATCH_BYTES, chosen.until_ms)
        return await run_async(self._access.walk(queue, span, None))

    async def _send(self, message: Message, job: SendingJob, sender: Sender, deliver_ms: int | None) -> None:
        """Send one archived message, or each message of the batch that it holds, and note in the position what was
        sent. ``deliver_ms``: the time of delivery of a timer, which may have been moved since it was sent; None: no
        timer."""
        try:
            numbered = list(outgoing_messages(message, job.sending.to))
        except CorruptionError as error:
            self.report.unreadable += 1
            logger.error(
                "%s offset %d is damaged and is not sent: %s", job.sending.queue, message.queue_offset, error
            )
            return
        for offset, outgoing in numbered:
            if offset < job.start:  # an earlier run was interrupted within this batch
                continue
            if deliver_ms is not None:
                outgoing.properties[DELIVER_MS] = str(deliver_ms)
                # These properties name a timer to cancel, which the target does not have.
                for name in (CANCEL, CANCEL_PLACE):
                    outgoing.properties.pop(name, None)
            await self._wait_for_saving(job.sending)
            try:
                await sender.send(job.to, outgoing)
            except RefusedMessageError as error:
                refusal = f"{job.sending.queue} offset {offset} is refused: {error.message}"
                if not self._selection.skip_refused:
                    raise RefusedMessageError(
                        refusal, hint=error.hint or "--skip-refused skips such messages"
                    ) from error
                logger.error("%s", refusal)
                self.report.refused += 1
            else:
                self.report.sent[job.sending.to] += 1
            if self._position.sent(job.sending, offset + 1) >= REPEATS_MAX // 2:
                self._is_save_due.set()
            if self._stop.is_set():
                return

    async def _wait_for_saving(self, sending: Sending) -> None:
        """Wait until all but REPEATS_MAX sent messages of a queue are noted in the position file: after a crash no more
        than these are sent twice."""
        async with self._saved:
            await self._saved.wait_for(lambda: self._position.unsaved(sending) < REPEATS_MAX - 1)

    async def _keep_saving(self) -> None:
        """Write the position file after each interval, or earlier when senders will soon have to wait for that, until
        the run is over."""
        while not self._is_over:
            with suppress(TimeoutError):
                async with asyncio.timeout(SAVE_EVERY_S):
                    await self._is_save_due.wait()
            self._is_save_due.clear()
            await self._save()
            self._progress(self.report.count, max(self._total, self.report.count))

    async def _save(self, *, is_exact: bool = False) -> None:
        """Write the position file in a thread, and wake the senders that wait for it. ``is_exact``: nothing is sent any
        more, so that the file will say exactly what was sent."""
        snapshot, document = self._position.snapshot(), self._position.document(is_exact=is_exact)
        await asyncio.to_thread(self._position.write, document)
        self._position.written(snapshot)
        async with self._saved:
            self._saved.notify_all()


def _time_of(pending: Table, offset: int) -> int | None:
    at = int(np.searchsorted(pending["queue_offset"], offset))
    is_there = at < len(pending) and pending["queue_offset"][at] == offset
    return int(pending["deliver_ms"][at]) if is_there else None


def repeats_text(position: Position) -> str:
    """Return a sentence on which messages a run that continues at ``position`` may send a second time."""
    if position.is_exact:
        return f"continues where {position.path} says: nothing is sent twice"
    return (
        f"continues where {position.path} says, after an interruption: of each queue up to"
        f" {counted(REPEATS_MAX, 'message')} may be sent again, with the same UNIQ_KEY"
    )
