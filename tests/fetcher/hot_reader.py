"""The broker's side of a pull for tests of the read router: its messages by its own files, as it would answer."""

import numpy as np

from fetcher.policy.broker_files import BrokerFiles
from fetcher.policy.read_policy import HeldOffsets
from fetcher.rows.message import MessageBatch
from fetcher.rows.pull import PullResult, PullStatus
from tiered.errors import UnavailableError


class RecordGoneError(UnavailableError):
    """The consume queue names a record that the commitlog no longer has."""


class HotReader(BrokerFiles):
    """BrokerFiles with pulls."""

    def get(
        self, topic: str, queue_id: int, offset: int, *, count: int, max_bytes: int, queue: HeldOffsets | None
    ) -> PullResult:
        """Up to ``count`` messages (those of an inner batch count each) and ``max_bytes``, at least one record.

        ``queue``: its bounds; None: the broker does not have it. Raises RecordGoneError without a record at ``offset``.
        """
        queues = self._queues()
        if queues is None:
            raise UnavailableError("the broker does not show its consume queues in RocksDB")
        if queue is None:
            return PullResult(PullStatus.NO_MATCHED_LOGIC_QUEUE, offset, 0, 0)
        outside = _outside(offset, queue)
        if outside is not None:
            return PullResult(*outside, queue.min_offset, queue.max_offset)
        units = queues.units(topic, queue_id, offset, count)
        by_count = np.searchsorted(np.cumsum(units["inner_num"]), count, side="right")
        by_bytes = np.searchsorted(np.cumsum(units["size"]), max_bytes, side="right")
        records: list[bytes] = []
        for unit in units[: max(1, int(min(by_count, by_bytes)))]:
            record = self._store.commit_log.read(int(unit["phys"]), int(unit["size"]))
            if len(record) < unit["size"]:
                break
            records.append(record)
        if not records:
            raise RecordGoneError(f"{topic} queue {queue_id}: no record at offset {offset} of the broker")
        units = units[: len(records)]
        batch = MessageBatch(
            [memoryview(record) for record in records],
            np.arange(len(records), dtype=np.int32),
            np.zeros(len(records), np.int64),
            *(units[name] for name in ("size", "queue_offset", "inner_num", "phys", "tags_code")),
            store_timestamp=np.zeros(len(records), np.int64),
        )
        after = int(units["queue_offset"][-1] + units["inner_num"][-1])
        found = (queue.min_offset, queue.max_offset, (), len(batch), batch)
        return PullResult(PullStatus.FOUND, after, *found)


def _outside(offset: int, queue: HeldOffsets) -> tuple[PullStatus, int] | None:
    """Status and next offset of an offset outside ``queue``, None inside."""
    if queue.max_offset <= 0:
        return PullStatus.NO_MESSAGE_IN_QUEUE, offset
    if offset < queue.min_offset:
        return PullStatus.OFFSET_TOO_SMALL, queue.min_offset
    if offset == queue.max_offset:
        return PullStatus.OFFSET_OVERFLOW_ONE, queue.max_offset
    return (PullStatus.OFFSET_OVERFLOW_BADLY, queue.max_offset) if offset > queue.max_offset else None
