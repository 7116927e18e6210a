"""Timers that a cycle archives: which rows are of the gateway topic, and their entries for an object of their own."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.formats.timer_object import ENTRY_DTYPE, EncodedTimers, Rows, encode_timers, sorted_entries
from tiered.kernels.queue_table import QueueTable
from tiered.kernels.timers import find_timers, same_texts, time_order
from tiered.model.queue import QueueKey
from tiered.model.tables import Table, concatenated
from tiered.model.timer import EntryKind, Refusal
from tiered.model.topic_names import refused_target
from tiered.object_store.interface import Body
from tiered.settings.sections import TimerSettings

Ints = NDArray[Any]


@dataclass(frozen=True)
class TimerRows:
    """Rows of the gateway topic: ``queue`` indexes ``queues``; the others are columns of the scan."""

    queues: Sequence[QueueKey]
    queue: Ints
    queue_offset: Ints
    position: Ints
    size: Ints
    phys: Ints


class TimerQueues:
    """Finds the queues of ``topic``, the gateway topic, in a ``table`` that grows; none if ``topic`` is empty."""

    def __init__(self, table: QueueTable, topic: str) -> None:
        self._table, self._topic = table, topic
        self._ordinals: list[int] = []
        self._searched = 0

    def among(self, ordinals: Ints) -> Ints:
        """Which of ``ordinals`` (numbers of queues) are of the gateway topic, as indexes. Looks at each queue of the
        table once."""
        if self._topic:
            for ordinal in range(self._searched, len(self._table)):
                if self._table.topic(ordinal) == self._topic:
                    self._ordinals.append(ordinal)
                self._searched = ordinal + 1
        return np.flatnonzero(np.isin(ordinals, self._ordinals)) if self._ordinals else np.empty(0, np.int64)


def timer_entries(rows: TimerRows, arena: NDArray[np.uint8], settings: TimerSettings, now_ms: int) -> Rows:
    """The entries of a timer object for the messages ``rows`` of the gateway topic, whose records are in ``arena``:
    each is a timer (a message to be delivered later), cancels one by key or by place, or is refused. Returns the
    entries with the queues and the target topics to which they refer."""
    fields = find_timers(
        arena, rows.position.astype(np.int64), rows.size.astype(np.int64), max_delay_ms=settings.max_delay_ms
    )
    deliver_ms, key_hash, _, refusal, cancelled_ms, cancelled_hash, cancels, *place = fields
    queues = list(rows.queues)
    topic, topics = _targets(arena, fields, queues[0].topic)
    # A timer without a key cannot be cancelled by key: its place in the log, which no other has, stands for it.
    key_hash = np.where(key_hash == 0, rows.phys, key_hash)
    is_refused, parts = refusal != 0, []
    # Refused ones are listed for some time. ``cancels``: 1 by key, 2 by place, which is queue id and offset.
    until_ms = np.full_like(refusal, now_ms + settings.listed_ms)
    for is_chosen, kind, ms, hashes in (
        (~is_refused & (deliver_ms > 0), EntryKind.TIMER, deliver_ms, key_hash),
        (~is_refused & (cancels == 1), EntryKind.CANCEL, cancelled_ms, cancelled_hash),
        (~is_refused & (cancels == 2), EntryKind.CANCEL_PLACE, cancelled_ms, cancelled_hash),
        (is_refused, EntryKind.REFUSED, until_ms, refusal),
    ):
        if not (count := int(is_chosen.sum())):
            continue
        chosen = slice(None) if count == len(refusal) else is_chosen  # copies less
        entries = np.zeros(count, ENTRY_DTYPE)
        entries["deliver_ms"], entries["key_hash"] = ms[chosen], hashes[chosen].view(np.uint64)
        entries["physical_offset"], entries["queue_offset"] = rows.phys[chosen], rows.queue_offset[chosen]
        entries["queue"], entries["topic"], entries["kind"] = rows.queue[chosen], topic[chosen], kind
        if kind == EntryKind.CANCEL_PLACE:
            _name_places(entries, place[0][chosen], place[1][chosen], queues)
        parts.append(entries)
    return concatenated(parts, ENTRY_DTYPE), queues, topics


def _targets(
    arena: NDArray[np.uint8], fields: NDArray[np.int64], gateway_topic: str
) -> tuple[Ints, Sequence[str]]:
    """The topics to which timers are to be delivered: the number of each row's topic, and the topics by number. Rows
    whose topic takes no timers are marked as refused, in place. ``fields``: as ``find_timers`` returns them, with the
    place of the topic's name in ``arena``. Each topic is judged once."""
    _, _, topic_hash, refusal, *_, at, length = fields
    _, first, number = np.unique(topic_hash, return_index=True, return_inverse=True)
    # Two topics may have one hash: rows whose name is another one's are judged one by one.
    others = np.flatnonzero(~same_texts(arena.ctypes.data, at, length, first[number]))
    number[others] = len(first) + np.arange(len(others))
    topics, numbers = {"": 0}, list[int]()
    for row in (*first, *others):
        text = arena[at[row] : at[row] + length[row]].tobytes().decode("utf-8", "replace")
        numbers.append(0 if refused_target(text, gateway_topic) else topics.setdefault(text, len(topics)))
    topic = np.array(numbers)[number]
    refusal[(refusal == 0) & (topic == 0)] = Refusal.BAD_TARGET
    return topic, list(topics)


def _name_places(entries: Table, queue_ids: Ints, offsets: Ints, queues: list[QueueKey]) -> None:
    """Set, in ``entries`` that cancel timers by place, the queue and offset of the cancelled timer's message in place
    of those of the message that cancels it. Queues that are new are added to ``queues``."""
    entries["queue_offset"] = offsets
    numbers = {queue: number for number, queue in enumerate(queues)}
    for row, queue_id in enumerate(queue_ids.tolist()):
        queue = queues[int(entries["queue"][row])]._replace(queue_id=queue_id)
        entries["queue"][row] = numbers.setdefault(queue, len(numbers))
    queues[:] = numbers


def encoded_body(rows: Rows, encoded: list[EncodedTimers]) -> Body:
    """The object of ``rows``, which is added to ``encoded``: a thread's work, beside the next cycle."""
    encoded.append(encode_timers(iter([(sorted_entries(rows[0], time_order), *rows[1:])])))
    return encoded[-1].body
