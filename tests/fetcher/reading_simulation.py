"""The whole read path in one thread, by a virtual clock: a slow, failing, reordering store and consumers of all kinds.

Real are: archive, catalog, segment source with its caches and budget, fetcher, prefetcher. Not real are time and the
network. Owns the consumers and what they check; tests say what must hold at the end.
"""

import random
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import lru_cache, partial

from fetcher.blocks.block_cache import DroppedUnread
from fetcher.blocks.budget import ByteBudget
from fetcher.blocks.segment_source import SegmentSource
from fetcher.io.waiting import InlineExecutor, Wait, new_future
from fetcher.pulls.message_fetcher import TieredMessageFetcher
from fetcher.rows.catalog_view import CatalogView
from fetcher.rows.pull import PullRequest, PullStatus
from tests.archive.archive_builder import ArchiveBuilder, Sent, Stored
from tests.fetcher.virtual import VirtualClock, VirtualReader
from tiered.catalog.catalog_reader import load
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
from tiered.errors import TieredError, UnansweredError
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore
from tiered.settings.sections import FetchSettings, PrefetchSettings

BLOCK_BYTES = 8 * 1024
COUNT = 32
QUEUES = [QueueKey(f"topic-{number}", number % 3, 0) for number in range(8)]
LMQ = QueueKey("%LMQ%light", 0, 0)

FETCH = FetchSettings(
    memory_bytes=4 << 20,
    cache_bytes=2 << 20,
    index_cache_bytes=1 << 20,
    unread_expiry_ms=20_000,
    piece_bytes=64 << 10,
    get_max_bytes=256 << 10,
    memory_wait_ms=5_000,
)
PREFETCH = PrefetchSettings(window_max_bytes=256 << 10, memory_bytes=1 << 20, buffered_bytes=1 << 20)


@lru_cache
def archive(*, with_sets: bool = True) -> ArchiveBuilder:
    """Eight queues of 1,200 messages in twelve cycles, some cycles as set objects; an LMQ over the first; a gap
    in the second."""
    rand = random.Random(1)
    limits = CatalogLimits(root_every=5, spill_runs=40, page_runs_max=20)
    builder = ArchiveBuilder(MemoryStore(), limits=limits, codec=BlockCodec(block_bytes=BLOCK_BYTES))
    for cycle in range(12):
        sent = []
        for number in range(100):
            for queue in QUEUES:
                lmq = [LMQ] if queue == QUEUES[0] and number % 3 == 0 else []
                skip = cycle == 6 and number == 0 and queue == QUEUES[1]
                offset = builder.truth[queue].end + 50 if skip else None
                sent.append(Sent(queue, rand.randbytes(rand.randrange(40, 200)), offset=offset, lmq=lmq))
        builder.commit(sent, as_set=with_sets and cycle % 3 == 0)
    return builder


class HardStore(VirtualReader):
    """Answers late, in any order, sometimes not at all."""

    def __init__(self, clock: VirtualClock, store: MemoryStore, rand: random.Random, failing: float) -> None:
        super().__init__(clock, {info.key: store.get(info.key) for info in store.list("")})
        self._rand = rand
        self._failing = failing

    def submit(self, key: str, offset: int, length: int) -> Future[bytes]:
        """As VirtualReader, with a latency and a fate of its own."""
        self.latency_s = (
            self._rand.uniform(0.01, 0.08) if self._rand.random() < 0.97 else self._rand.uniform(0.3, 2)
        )
        if self._rand.random() < self._failing:
            self.failures[len(self.gets)] = UnansweredError("no answer")
        return super().submit(key, offset, length)


class WrongAnswerError(AssertionError):
    """A consumer got something else than the queue holds."""


@dataclass(eq=False)
class Consumer:
    """One reader of ``queue``. ``think_s(pull number)``: seconds from one pull to the next."""

    name: str
    queue: QueueKey
    think_s: Callable[[int], float]
    start: int = 0
    pulls_max: int = 1 << 30
    count: int = COUNT
    got: list[Stored] = field(default_factory=list)
    pulls: int = 0
    errors: int = 0
    is_done: bool = False


class Simulation:
    """``run`` lets everything happen."""

    def __init__(
        self,
        builder: ArchiveBuilder,
        seed: int,
        *,
        failing: float = 0.0,
        fetch: FetchSettings = FETCH,
        prefetch: PrefetchSettings = PREFETCH,
    ) -> None:
        self.builder = builder
        self.clock = VirtualClock()
        self.store = HardStore(self.clock, builder.store, random.Random(seed), failing)  # type: ignore[arg-type]
        executor = InlineExecutor()
        self.budget = ByteBudget(fetch.memory_bytes)
        self.source = SegmentSource(
            self.store,
            fetch,
            self.budget,
            clock=Clock(monotonic_s=self.clock.now_s),
            decode_pool=executor,
            timer=self.clock,
            on_unread_dropped=self._unread_dropped,
        )
        state = load(builder.store)
        catalog = CatalogView(
            builder.store, state, executor=executor, clock=Clock(monotonic_s=self.clock.now_s)
        )
        self.fetcher = TieredMessageFetcher(
            self.source,
            catalog,
            prefetch,
            executor=executor,
            clock=Clock(monotonic_s=self.clock.now_s),
            unread_ms=fetch.unread_expiry_ms,
        )
        self.budget.add_reclaimer(self.fetcher.readers.reclaim)
        self.consumers: list[Consumer] = []

    def _unread_dropped(self, gone: list[DroppedUnread]) -> None:
        self.fetcher.prefetcher.dropped(gone)

    def add(self, consumer: Consumer) -> Consumer:
        """A consumer that begins now."""
        self.consumers.append(consumer)
        self.clock.start(self._consume(consumer))
        return consumer

    def run(self, until_s: float = float("inf")) -> None:
        """Run until ``until_s``, or until nothing is left to happen."""
        self.clock.run(until_s)

    async def sleep(self, seconds: float) -> None:
        """Virtual time passes."""
        woken: Future[None] = new_future()
        self.clock.call_at(self.clock.time_s + seconds, partial(woken.set_result, None))
        await Wait(woken)

    async def _consume(self, consumer: Consumer) -> None:
        topic, queue_id, _ = consumer.queue
        rows = self.builder.truth[consumer.queue].rows
        offset = consumer.start
        at = next(number for number, row in enumerate(rows) if row.offset + row.inner_num > offset)
        while consumer.pulls < consumer.pulls_max:
            try:
                result = await self.fetcher.pull(
                    PullRequest(
                        topic, queue_id, offset, count=consumer.count, max_bytes=1 << 30, group=consumer.name
                    )
                )
            except TieredError:
                consumer.errors += 1
                await self.sleep(0.2)
                continue
            consumer.pulls += 1
            if result.status is not PullStatus.FOUND:
                break
            at = self._check(consumer, rows, at, result.batch.queue_offsets.tolist(), result.batch.records())
            offset = result.next_offset
            await self.sleep(consumer.think_s(consumer.pulls))
        consumer.is_done = True

    def _check(
        self, consumer: Consumer, rows: Sequence[Stored], at: int, offsets: Sequence[int], records: object
    ) -> int:
        """What came is what the queue holds from row ``at`` on, and as many as requested."""
        expected = rows[at : at + len(offsets)]
        found = [bytes(record) for record in records]  # type: ignore[attr-defined]
        if offsets != [row.offset for row in expected] or found != [row.record for row in expected]:
            raise WrongAnswerError(f"{consumer.name} at row {at}: {offsets[:3]}…")
        end = at + len(offsets)
        is_cut = end == len(rows) or rows[end].offset != rows[end - 1].offset + rows[end - 1].inner_num
        if len(offsets) != consumer.count and not is_cut:
            raise WrongAnswerError(f"{consumer.name} at row {at}: {len(offsets)} rows of {consumer.count}")
        consumer.got += expected
        return end
