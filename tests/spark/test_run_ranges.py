"""Runs of offset ranges from a catalog of many pages: all of them, and few pages of an old history."""

from __future__ import annotations

import numpy as np

from rocketmq_tiered.message_table.plan.archive_plan import pages_of, runs_of
from rocketmq_tiered.message_table.plan.partitions import OffsetRange
from tests.archive.archive_builder import ArchiveBuilder, Sent
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex
from tiered.catalog.writer_limits import CatalogLimits
from tiered.model.queue import QueueKey
from tiered.object_store.memory import MemoryStore

QUEUES = [QueueKey("t", number, 0) for number in range(3)]


def test_only_pages_from_the_begin_of_a_range_on_are_read() -> None:
    store = MemoryStore()
    limits = CatalogLimits(root_every=4, root_runs_max=4, page_runs_max=5, merge_sequences=4, merge_spills=4)
    archive = ArchiveBuilder(store, limits=limits)
    for number in range(120):
        archive.commit([Sent(queue, b"%d" % number) for queue in QUEUES[: 2 + number % 2]])
    state, index = load(store), RunIndex(store)
    assert len(state.pages) > 30 and state.memory_runs
    random = np.random.default_rng(1)
    whole = {queue: index.runs_of(state, queue).runs for queue in QUEUES}
    for _ in range(30):
        wanted = {queue: OffsetRange(*sorted(random.integers(0, 121, 2).tolist())) for queue in QUEUES}
        found = runs_of(index, state, wanted)
        for queue, one in wanted.items():
            runs = whole[queue]
            inside = (runs["end_queue_offset"] > one.begin) & (runs["base_queue_offset"] < one.end)
            expected = runs["base_queue_offset"][inside].tolist() if one.begin < one.end else []
            assert found[queue]["base_queue_offset"].tolist() == expected
    news = {QUEUES[0]: OffsetRange(110, 120), QUEUES[1]: OffsetRange(118, 120)}
    assert len(list(pages_of(index, state, news))) <= 8
    nothing = {queue: OffsetRange(5, 5) for queue in QUEUES}
    assert list(pages_of(index, state, nothing)) == []
