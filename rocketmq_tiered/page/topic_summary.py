"""Sums up the queues of a catalog by topic, with arrays: the page is rendered beside an event loop. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.catalog.queue_directory import QueueDirectory
from tiered.catalog.state import CatalogState
from tiered.model.tables import QUEUE_BATCH, QUEUE_HIDDEN, QUEUE_SUPERSEDED

ORDERS = ("topic", "queues", "messages", "bytes", "newest")


class TopicNumbers:
    """A number for each topic of a directory, which only grows: known rows are not counted again."""

    def __init__(self) -> None:
        self._directory: QueueDirectory | None = None
        self.names: list[str] = []
        self._numbers: dict[str, int] = {}
        self._of_row: list[int] = []

    def of_rows(self, state: CatalogState) -> NDArray[np.int64]:
        """The topic's number of each row of ``state``; ``names`` has their names."""
        if self._directory is not state.directory:
            self._directory = state.directory
            self.names, self._numbers, self._of_row = [], {}, []
        for key in state.directory.keys[len(self._of_row) : state.queue_count]:
            number = self._numbers.setdefault(key.topic, len(self.names))
            if number == len(self.names):
                self.names.append(key.topic)
            self._of_row.append(number)
        return np.array(self._of_row[: state.queue_count], np.int64)


@dataclass(frozen=True)
class TopicRow:
    """One topic. ``rows``: of its shown queues in the catalog; ``bytes``: before compression."""

    topic: str
    queues: int
    messages: int
    bytes: int
    newest_ms: int
    gaps: int


@dataclass(frozen=True)
class TopicSummary:
    """Topics with at least one shown queue, each array with one entry a topic. ``hidden``: messages of deleted topics
    and earlier generations."""

    names: tuple[str, ...]
    queues: NDArray[np.int64]
    messages: NDArray[np.int64]
    bytes: NDArray[np.int64]
    newest_ms: NDArray[np.int64]
    gaps: NDArray[np.int64]
    hidden: int

    def row(self, i: int) -> TopicRow:
        """The topic at ``i``."""
        return TopicRow(
            self.names[i], int(self.queues[i]), int(self.messages[i]), int(self.bytes[i]),
            int(self.newest_ms[i]), int(self.gaps[i]),
        )  # fmt: skip

    def chosen(self, pattern: str, order: str) -> list[int]:
        """The topics whose name contains ``pattern``, in any case: by name, or the largest value first."""
        wanted = pattern.casefold()
        numbers: Iterable[int] = range(len(self.names))
        if order in ORDERS[1:]:
            column: NDArray[Any] = self.newest_ms if order == "newest" else getattr(self, order)
            numbers = np.argsort(-column, kind="stable").tolist()
        return [i for i in numbers if wanted in self.names[i].casefold()]

    def message_bytes(self) -> dict[str, tuple[int, int]]:
        """Topic to messages and their bytes before compression, as maintenance.cost.topic_costs takes them."""
        return {name: (int(self.messages[i]), int(self.bytes[i])) for i, name in enumerate(self.names)}


def summarize(
    state: CatalogState, numbers: TopicNumbers, expired_bytes: NDArray[np.int64] | int = 0
) -> TopicSummary:
    """The topics of ``state``, by name. Deleted ones and earlier generations are not included. ``expired_bytes``: by
    row of the table, message bytes that are not counted."""
    of_row, table = numbers.of_rows(state), state.table
    is_batch = (table["flags"] & QUEUE_BATCH) != 0
    offsets = table["end_queue_offset"] - table["min_queue_offset"]
    messages = np.where(is_batch, offsets, table["row_count"])
    living_bytes = table["end_byte"] - expired_bytes
    is_deleted = table["flags"] & (QUEUE_HIDDEN | QUEUE_SUPERSEDED) == QUEUE_HIDDEN
    shown = np.flatnonzero((table["flags"] & QUEUE_HIDDEN) == 0)
    rows, topics = table[shown], of_row[shown]
    count = len(numbers.names)
    newest = np.zeros(count, np.int64)
    np.maximum.at(newest, topics, rows["max_store_timestamp"])
    queues = np.bincount(topics, minlength=count)
    is_shown = np.zeros(state.queue_count, np.bool_)
    is_shown[shown] = True
    with_gap = state.gaps["queue"][is_shown[state.gaps["queue"]]]
    gaps = np.bincount(of_row[with_gap], minlength=count)
    present = sorted(np.flatnonzero(queues).tolist(), key=lambda number: numbers.names[number])
    order = np.array(present, np.int64)
    return TopicSummary(
        tuple(numbers.names[number] for number in present),
        queues[order],
        _sums(topics, messages[shown], count)[order],
        _sums(topics, living_bytes[shown], count)[order],
        newest[order],
        gaps[order],
        int(messages[is_deleted].sum()),
    )


def _sums(topics: NDArray[np.int64], values: NDArray[Any], count: int) -> NDArray[np.int64]:
    total = np.zeros(count, np.int64)
    np.add.at(total, topics, values)
    return total
