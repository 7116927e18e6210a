"""Names and bounds of a queue, shared by the blocking and the asynchronous API."""

from __future__ import annotations

from collections.abc import Iterator

from fetcher.access import ArchiveAccess
from fetcher.rows.batch import MessageBatch
from fetcher.rows.message import Message
from fetcher.walk import messages_of
from tiered.model.queue import QueueKey


class QueueHandle:
    """One queue of an archive. Its bounds are those of the archive's version."""

    def __init__(self, access: ArchiveAccess, key: QueueKey) -> None:
        self._access = access
        self.key = key

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.topic!r}, {self.queue_id}, [{self.min_offset}, {self.max_offset}))"
        )

    @property
    def topic(self) -> str:
        """The topic's name."""
        return self.key.topic

    @property
    def queue_id(self) -> int:
        """Number of the queue in its topic."""
        return self.key.queue_id

    @property
    def generation(self) -> int:
        """Generation of a deleted and recreated topic, from 0."""
        return self.key.generation

    @property
    def min_offset(self) -> int:
        """First archived offset."""
        return self._access.bounds(self.key)[0]

    @property
    def max_offset(self) -> int:
        """One past the last archived offset."""
        return self._access.bounds(self.key)[1]

    @property
    def has_expired(self) -> bool:
        """Whether messages before ``min_offset`` have expired."""
        return self._access.has_expired(self.key)

    def _messages_of(self, batch: MessageBatch) -> Iterator[Message]:
        return messages_of(batch, self.key, is_batch=self._access.is_batch(self.key))
