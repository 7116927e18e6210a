"""Both kinds of consume queues at once, as brokers with ``rocksdbCQDoubleWriteEnable`` keep them before they change.

An interruption leaves the two at different places, and RocksDB without what was not flushed. ``recover`` makes them
equal: what one has more of a queue is copied to the other, and where they contradict each other the later records win.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tiered.consume_queue.index import BrokerQueue
from tiered.consume_queue.store import UNITS_AT_ONCE, ConsumeQueueStore, copy_queue
from tiered.model.tables import Table

_COMPARED: Final = ("queue_offset", "phys", "size", "tags_code", "inner_num")
_Key = tuple[str, int]


class DoubleWriteStore:
    """ConsumeQueueStore over two others. Reads come from ``first``. Call ``recover`` after an interruption."""

    def __init__(self, first: ConsumeQueueStore, second: ConsumeQueueStore) -> None:
        self._first, self._second = first, second
        self._stores = (first, second)
        self._bounds = (
            [store.min_offset for store in self._stores],
            [store.max_offset for store in self._stores],
        )

    def recover(self) -> list[_Key]:
        """Make both equal; returns the queues that were not."""
        keys = {(queue.topic, queue.queue_id) for store in self._stores for queue in store.queues()}
        return [key for key in sorted(keys) if self._make_equal(key)]

    def queues(self) -> list[BrokerQueue]:
        """See ConsumeQueueStore."""
        return self._first.queues()

    def min_offset(self, topic: str, queue_id: int) -> int:
        """See ConsumeQueueStore."""
        return self._first.min_offset(topic, queue_id)

    def max_offset(self, topic: str, queue_id: int) -> int:
        """See ConsumeQueueStore."""
        return self._first.max_offset(topic, queue_id)

    def units(self, topic: str, queue_id: int, from_offset: int, count: int) -> Table:
        """See ConsumeQueueStore."""
        return self._first.units(topic, queue_id, from_offset, count)

    def offset_by_time(self, topic: str, queue_id: int, timestamp_ms: int) -> int:
        """See ConsumeQueueStore."""
        return self._first.offset_by_time(topic, queue_id, timestamp_ms)

    def put(self, topic: str, queue_id: int, units: Table) -> None:
        """See ConsumeQueueStore."""
        for store in self._stores:
            store.put(topic, queue_id, units)

    def put_ended(self, topic: str, queue_id: int, end_offset: int) -> None:
        """See ConsumeQueueStore."""
        for store in self._stores:
            store.put_ended(topic, queue_id, end_offset)

    def delete_queue(self, topic: str, queue_id: int) -> None:
        """See ConsumeQueueStore."""
        for store in self._stores:
            store.delete_queue(topic, queue_id)

    def delete_topic(self, topic: str) -> None:
        """See ConsumeQueueStore."""
        for store in self._stores:
            store.delete_topic(topic)

    def truncate(self, phys: int) -> None:
        """See ConsumeQueueStore."""
        for store in self._stores:
            store.truncate(phys)

    def expire(self) -> None:
        """See ConsumeQueueStore."""
        for store in self._stores:
            store.expire()

    def flush(self, dispatched_phys: int) -> None:
        """See ConsumeQueueStore."""
        for store in self._stores:
            store.flush(dispatched_phys)

    def close(self) -> None:
        """See ConsumeQueueStore."""
        for store in self._stores:
            store.close()

    def _make_equal(self, key: _Key) -> bool:
        """Whether the stores differed in the queue."""
        begins, ends = ([ask(*key) for ask in asked] for asked in self._bounds)
        at = max(begins)
        if at > min(ends) > 0:  # nothing in common: the longer one is the later one
            self._replace(key, is_first_right=ends[0] > ends[1])
            return True
        while at < min(ends):
            first, second = (store.units(*key, at, UNITS_AT_ONCE) for store in self._stores)
            first, second = (units[units["queue_offset"] < min(ends)] for units in (first, second))
            if len(first) != len(second) or any((first[name] != second[name]).any() for name in _COMPARED):
                self._replace(key, is_first_right=_last_phys(first) >= _last_phys(second))
                return True
            if len(first) == 0:
                break
            at = int(first["queue_offset"][-1] + first["inner_num"][-1])
        if ends[0] != ends[1]:
            longer, shorter = self._stores if ends[0] > ends[1] else self._stores[::-1]
            copy_queue(key, longer, shorter, min(ends))
        if begins[0] != begins[1] and min(ends) > 0:
            self._replace(key, is_first_right=begins[0] < begins[1])
        return ends[0] != ends[1] or begins[0] != begins[1]

    def _replace(self, key: _Key, *, is_first_right: bool) -> None:
        source, target = self._stores if is_first_right else self._stores[::-1]
        target.delete_queue(*key)
        copy_queue(key, source, target, 0)


def _last_phys(units: Table) -> int:
    return int(np.max(units["phys"], initial=-1))
