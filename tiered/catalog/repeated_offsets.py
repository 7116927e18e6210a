"""Queues whose broker used an offset twice: their rows are where its consume queue has them, which a record's header
may contradict (uploader/repeated_offsets.py)."""

from collections.abc import Mapping
from typing import Any

from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey

REPEATED = "repeated_offsets"
"""Archive-wide setting: [topic, queue id, generation, messages of the log that the broker's queue does not have]."""


def repeated_offsets(state: CatalogState) -> dict[QueueKey, int]:
    """Queues in which the broker used an offset for two messages, with the number of those that its consume queue does
    not have and that are therefore not archived."""
    recorded = state.settings.get(REPEATED)
    rows = recorded if isinstance(recorded, list) else []
    return {
        QueueKey(str(topic), int(queue), int(generation)): int(count)
        for topic, queue, generation, count in rows
    }


def set_aside_messages(state: CatalogState) -> int:
    """How many messages of the archive's queues were set aside."""
    return sum(repeated_offsets(state).values())


def with_repeated(state: CatalogState, added: Mapping[QueueKey, int]) -> dict[str, Any]:
    """The setting after ``added`` messages of queues were set aside; empty if nothing changes."""
    before = repeated_offsets(state)
    after = before | {key: before.get(key, 0) + count for key, count in added.items()}
    return {} if after == before else {REPEATED: [[*key, count] for key, count in after.items()]}
