"""Queues that are read together: the same messages and errors as of queues that are read alone, in fewer steps."""

import random
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from fetcher.archive import Archive
from fetcher.blocks.budget import ByteBudget
from fetcher.io.waiting import gather, run_sync
from fetcher.rows.pull import PullRequest
from fetcher.rows.tag_filter import TagFilter
from fetcher.walk import Span, Walk
from rocketmq_tiered.maintenance.key_job import compact_keys
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tests.fetcher.reading_fakes import PlainSource, plain_fetcher
from tests.sweeps import examples
from tiered.archive.rewrite.result import RewriteOptions
from tiered.catalog.catalog_reader import load
from tiered.errors import TieredError
from tiered.formats.segment import BlockCodec
from tiered.model.queue import QueueKey
from tiered.object_store.file import FileStore
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import Settings

BATCHED, LMQ = QueueKey("batched", 0, 0), QueueKey("%LMQ%light", 0, 0)
SMALL = [QueueKey(f"topic-{number % 7}", number // 7, 0) for number in range(40)]
Found = tuple[QueueKey, list[tuple[int, bytes, int, int]] | str]


@lru_cache
def many_queues(seed: int) -> ArchiveBuilder:
    """Objects of many small queues, with some batched ones, LMQs, gaps and expired runs; most pages are spilled."""
    rand = random.Random(seed)
    builder = ArchiveBuilder(MemoryStore(), codec=BlockCodec(block_bytes=rand.choice([300, 3000])))
    for _ in range(rand.randrange(2, 5)):
        sent = [
            Sent(queue, rand.randbytes(rand.randrange(200)), tags=rand.choice(["", "a", "b"]))
            for queue in rand.choices(SMALL, k=100)
        ]
        sent += [Sent(BATCHED, inner_num=3), Sent(SMALL[5], lmq=[LMQ])]
        builder.commit(sent, as_set=rand.random() < 0.8)
    ended = builder.truth[SMALL[9]].end
    builder.commit([Sent(SMALL[9], offset=ended + 4), Sent(SMALL[11])])
    builder.expire_first_run(SMALL[13])
    return builder


def walked(
    builder: ArchiveBuilder, *, together: bool, tag: str | None = None, memory_bytes: int = 1 << 26
) -> tuple[list[Found], PlainSource, ByteBudget]:
    """What walks over all queues find, or the error that ends them."""
    source, budget = PlainSource(builder.store), ByteBudget(memory_bytes)
    fetcher = plain_fetcher(builder.store, source, budget=budget if together else None)

    def of_queue(queue: QueueKey) -> Iterator[tuple[int, bytes, int, int]]:
        view = fetcher.catalog.view(fetcher.catalog.state, queue)
        assert view is not None
        walk = Walk(fetcher, queue, view.min_offset, Span(), None if tag is None else TagFilter([tag]))
        while (batch := run_sync(walk.next_batch())) is not None:
            assert b"".join(batch.buffers()) == b"".join(batch.records())
            columns = batch.phys.tolist(), batch.tags_code.tolist()
            yield from zip(batch.queue_offsets.tolist(), map(bytes, batch.records()), *columns, strict=True)

    found: list[Found] = []
    for queue in fetcher.catalog.state.visible_queues():
        try:
            found.append((queue, list(of_queue(queue))))
        except TieredError as error:
            found.append((queue, error.message))
    return found, source, budget


@settings(max_examples=examples(8))
@given(
    seed=st.integers(0, 5), tag=st.sampled_from([None, "a"]), memory_bytes=st.sampled_from([3000, 1 << 26])
)
def test_queues_read_together_have_the_messages_of_queues_read_alone(
    seed: int, tag: str | None, memory_bytes: int
) -> None:
    builder = many_queues(seed)
    found, _, budget = walked(builder, together=True, tag=tag, memory_bytes=memory_bytes)
    assert found == walked(builder, together=False, tag=tag)[0]
    assert budget.charged_bytes == 0


@settings(max_examples=examples(8))
@given(seed=st.integers(0, 5), data=st.data())
def test_damage_is_found_as_in_queues_read_alone(seed: int, data: st.DataObject) -> None:
    builder = many_queues.__wrapped__(seed)
    key = data.draw(st.sampled_from(builder.keys))
    content = bytearray(builder.store.get(key, 1 << 20))
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    builder.store.delete([key])
    builder.store.put_if_absent(key, [content])
    assert walked(builder, together=True)[0] == walked(builder, together=False)[0]


def test_the_steps_of_reading_many_queues_follow_objects() -> None:
    builder = ArchiveBuilder(MemoryStore())
    for _ in range(5):
        builder.commit([Sent(queue, bytes(40)) for queue in SMALL])
    _, source, _ = walked(builder, together=True)
    _, alone, _ = walked(builder, together=False)
    assert len(alone.fetched) == 5 * len(SMALL)
    assert len(source.fetched) < 45


def pulled(builder: ArchiveBuilder, *, together: bool, count: int, consumers: int) -> tuple[list[Found], int]:
    """What consumers find that share all queues, and how many requests that took."""
    source, budget = PlainSource(builder.store), ByteBudget(1 << 26)
    fetcher = plain_fetcher(builder.store, source, budget=budget if together else None)
    views = [
        fetcher.catalog.view(fetcher.catalog.state, one) for one in fetcher.catalog.state.visible_queues()
    ]
    left, found = deque(view for view in views if view is not None), list[Found]()

    async def consume() -> None:
        while left:
            view = left.popleft()
            messages, offset = [], view.min_offset
            while offset < view.max_offset:
                request = PullRequest(view.queue.topic, view.queue.queue_id, offset, count, 1 << 20, "group")
                result = await fetcher.pull(request)
                if result.batch is not None:
                    assert len(result.batch) <= count
                    columns = result.batch.phys.tolist(), result.batch.tags_code.tolist()
                    records = map(bytes, result.batch.records())
                    messages += zip(result.batch.queue_offsets.tolist(), records, *columns, strict=True)
                assert result.next_offset > offset
                offset = result.next_offset
            found.append((view.queue, messages))

    run_sync(gather([consume() for _ in range(consumers)]))
    return sorted(found), len(source.fetched)


@settings(max_examples=examples(8))
@given(seed=st.integers(0, 5), count=st.integers(1, 40), consumers=st.integers(1, 5))
def test_consumers_of_many_queues_get_the_messages_of_queues_read_alone(
    seed: int, count: int, consumers: int
) -> None:
    builder = many_queues(seed)
    together, requests = pulled(builder, together=True, count=count, consumers=consumers)
    alone, requests_alone = pulled(builder, together=False, count=count, consumers=consumers)
    assert together == alone
    assert requests < requests_alone


def test_messages_that_key_compaction_drops_are_not_given_to_readers_of_many_queues(tmp_path: Path) -> None:
    builder = ArchiveBuilder(MemoryStore())
    for body in (b"oldest", b"older", b"new"):
        builder.commit([Sent(queue, body, keys=["key"]) for queue in SMALL])
    fetcher = plain_fetcher(builder.store, budget=ByteBudget(1 << 26))

    def count_of(queue: QueueKey) -> int:
        view = fetcher.catalog.view(fetcher.catalog.state, queue)
        assert view is not None
        walk = Walk(fetcher, queue, view.min_offset, Span())
        return sum(len(batch) for batch in iter(lambda: run_sync(walk.next_batch()), None))

    queues = sorted(SMALL)
    before = [count_of(queue) for queue in queues[:20]]
    settings = replace(Settings(), key_compaction=replace(Settings().key_compaction, min_age_ms=-(10**15)))
    options = RewriteOptions(tmp_path, 10**8, BlockCodec(), wait=lambda _: None)
    compact_keys(builder.store, load(builder.store), settings, options, lambda topic: True, apply=True)
    run_sync(fetcher.catalog.refreshed())
    assert before + [count_of(queue) for queue in queues[20:]] == [3] * 20 + [2] * (len(queues) - 20)


def test_a_limit_holds_for_queues_that_are_read_together(tmp_path: Path) -> None:
    builder = ArchiveBuilder(PrefixedStore(FileStore(tmp_path), "cluster/broker"))
    builder.commit([Sent(queue) for queue in SMALL for _ in range(20)])
    for start in (None, 5):
        with Archive.open(tmp_path) as archive:
            queues = [archive.queue(queue.topic, queue.queue_id) for queue in sorted(SMALL)]
            assert {len(list(queue.messages(start, limit=3))) for queue in queues} == {3}
