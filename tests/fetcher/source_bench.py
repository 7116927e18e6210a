"""A SegmentSource over a virtual store, for tests: everything in one thread, by one clock."""

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from fetcher.blocks.block_cache import Block, DroppedUnread
from fetcher.blocks.budget import ByteBudget
from fetcher.blocks.disk_cache import DiskCache
from fetcher.blocks.segment_source import SegmentSource
from fetcher.io.request_scheduler import Priority
from fetcher.io.waiting import Executor, InlineExecutor
from tests.fetcher.segments import Segment
from tests.fetcher.virtual import VirtualClock, VirtualReader
from tiered.clock import Clock
from tiered.formats.segment_index import SegmentIndex
from tiered.settings.sections import FetchSettings

MIB = 1024 * 1024


class SourceBench:
    """``settings`` are FetchSettings; the store holds ``segments``."""

    def __init__(
        self,
        segments: Iterable[Segment],
        *,
        disk: Path | None = None,
        clock: VirtualClock | None = None,
        decode_pool: Executor | None = None,
        **settings: Any,
    ) -> None:
        self.settings = FetchSettings(**settings)
        self.clock = clock or VirtualClock()
        self.segments = {item.key: item for item in segments}
        self.reader = VirtualReader(self.clock, {key: item.content for key, item in self.segments.items()})
        self.budget = ByteBudget(self.settings.memory_bytes)
        self.disk = None if disk is None else DiskCache(disk, self.settings.disk_cache_bytes)
        self.dropped: list[DroppedUnread] = []
        self.source = SegmentSource(
            self.reader,
            self.settings,
            self.budget,
            clock=Clock(monotonic_s=self.clock.now_s),
            decode_pool=decode_pool or InlineExecutor(),
            timer=self.clock,
            disk=self.disk,
            on_unread_dropped=self.dropped.extend,
        )

    def index(self, key: str, priority: Priority = Priority.USER) -> SegmentIndex:
        """Open an object, now."""
        item = self.segments[key]
        return self.clock.run_one(self.source.index(key, len(item.content), item.tail_bytes, priority))

    def begin(
        self, index: SegmentIndex, first: int, end: int, priority: Priority = Priority.USER
    ) -> Future[list[Block]]:
        """Start reading blocks."""
        return self.clock.start(self.source.blocks_at(index, 0, range(first, end), priority))

    def read(
        self, index: SegmentIndex, first: int, end: int, priority: Priority = Priority.USER
    ) -> list[bytes]:
        """Read blocks now."""
        blocks = self.clock.run_one(self.source.blocks_at(index, 0, range(first, end), priority))
        return [block.tobytes() for block in blocks]

    def expected(self, index: SegmentIndex, first: int, end: int) -> list[bytes]:
        """What the blocks hold."""
        return [self.segments[index.key].block(number) for number in range(first, end)]

    def check_at_rest(self, *held: SegmentIndex) -> None:
        """Nothing in flight, and every charge is a block or a tail that the caches hold, or the test (``held``)."""
        found = self.source.statistics()
        assert found.blocks_loading == 0 and self.reader.in_flight == 0
        cached = [entry.index for _, entry in self.source._indexes._entries]
        outside = sum(index.nbytes for index in held if index not in cached)
        assert found.charged_bytes == found.cached_bytes + found.index_bytes + outside
