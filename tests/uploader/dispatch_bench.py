"""A dispatcher over a written commitlog, step by step."""

from pathlib import Path

from tests.kernels.record_builder import Message, blank, build_log
from tiered.broker_store.commit_log import CommitLog
from tiered.clock import Clock
from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import TopicFilter
from uploader.dispatcher import TieredDispatcher
from uploader.double_buffer import DoubleBuffer
from uploader.log_batch import LogBatch, LogBatchPool
from uploader.log_feed import FeedBound, LogFeed

FILE_BYTES = 64 * 1024


class Bench:
    """A log that grows, and a dispatcher on it. Time is a number."""

    def __init__(
        self, directory: Path, *, batch_bytes: int = 4096, count: int = 3, age_ms: int = 1000
    ) -> None:
        self.directory = directory
        self.log = CommitLog([directory])
        self.end = 0
        self.now_ms = 0
        self.pool = LogBatchPool(batch_bytes=batch_bytes + batch_bytes // 4, count=count)
        self.closed: DoubleBuffer[LogBatch] = DoubleBuffer(capacity=count)
        self.feed = LogFeed(self.log, QueueTable(), TopicFilter(), delay_levels_ms=None)
        self.dispatcher = TieredDispatcher(
            self.feed,
            self.pool,
            self.closed,
            start_phys=0,
            batch_bytes=batch_bytes,
            batch_age_ms=age_ms,
            range_bytes_max=FILE_BYTES,
            clock=Clock(wall_ms=lambda: self.now_ms),
        )

    def write(self, count: int, *, topic: bytes = b"t", body_bytes: int = 100) -> None:
        """Append records; a full file ends with the blank marker."""
        for number in range(count):
            message = Message(topic=topic, queue_offset=number, body=bytes(body_bytes))
            size = len(build_log([message], self.end))
            room = FILE_BYTES - self.end % FILE_BYTES
            if size + 8 > room:
                self._put(blank(room))
            self._put(build_log([message], self.end))
        self.log.refresh()

    def _put(self, data: bytes) -> None:
        begin = self.end // FILE_BYTES * FILE_BYTES
        path = self.directory / f"{begin:020d}"
        if not path.exists():
            path.write_bytes(bytes(FILE_BYTES))
        with path.open("r+b") as file:
            file.seek(self.end - begin)
            file.write(data)
        self.end += len(data)

    def bound(self) -> FeedBound:
        """What a live broker would say."""
        return FeedBound(self.end, self.end)
