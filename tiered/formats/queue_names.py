"""Queues as a table, in segment footers, commits and pages: each topic name once, then numbers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiered.model.queue import QueueKey
from tiered.model.queue_roster import QueueSelection
from tiered.model.tables import QUEUE_DTYPE, Table


def queue_table(queues: Sequence[QueueKey]) -> tuple[list[str], Table]:
    """The topics of ``queues``, each once in order of appearance, and a QUEUE_DTYPE table of the queues, whose
    ``topic`` is an index into these topics."""
    if isinstance(queues, QueueSelection):
        return queues.table()
    table = np.zeros(len(queues), QUEUE_DTYPE)
    if not queues:
        return [], table
    topics, queue_ids, generations = zip(*queues, strict=True)
    number = {topic: index for index, topic in enumerate(dict.fromkeys(topics))}
    table["topic"] = np.fromiter(map(number.__getitem__, topics), np.int64, len(queues))
    table["queue_id"] = queue_ids
    table["generation"] = generations
    return list(number), table
