"""Which rows of a cycle are of the gateway topic of timers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tiered.kernels.queue_table import QueueTable
from tiered.model.queue import QueueKey

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
    """Queues of ``topic`` in a ``table`` that grows; none without a topic."""

    def __init__(self, table: QueueTable, topic: str) -> None:
        self._table, self._topic = table, topic
        self._ordinals: list[int] = []
        self._searched = 0

    def among(self, ordinals: Ints) -> Ints:
        """The places of its queues in ``ordinals``."""
        if self._topic:
            for ordinal in range(self._searched, len(self._table)):
                if self._table.topic(ordinal) == self._topic:
                    self._ordinals.append(ordinal)
                self._searched = ordinal + 1
        return np.flatnonzero(np.isin(ordinals, self._ordinals)) if self._ordinals else np.empty(0, np.int64)
