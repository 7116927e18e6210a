"""Offsets of a stream in Spark's checkpoint, and the sharing of a batch's limit. Pure.

    {"<cluster>/<broker>": {"version": 17, "queues": {"<topic>": {"<queueId>.<generation>": 4711}}}}

An offset is the next queue offset to read. ``version`` is the catalog version from which the batch was planned, so that
a repeated batch reads the same messages; gaps below an offset are those of that version. ``from`` has the shape of
``queues``, for queues where the stream started above a gap: messages that fill it later are not part of the stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote, unquote

import numpy as np

from tiered.errors import CorruptionError
from tiered.model.queue import QueueKey
from tiered.model.tables import Table

Names = tuple[str, str]


@dataclass(frozen=True)
class ArchiveOffset:
    """A stream's position in one archive. ``origins``: where it started, for queues with gaps below that."""

    version: int
    queues: Mapping[QueueKey, int]
    origins: Mapping[QueueKey, int] = field(default_factory=dict)


StreamOffset = Mapping[Names, ArchiveOffset]

QUEUES_MAX = 4_000_000
"""Limit of an offset in a checkpoint, over all its archives."""
NAME_CHARACTERS_MAX = 1024
OFFSET_MAX = (1 << 63) - 1


def to_json(offset: StreamOffset) -> dict[str, Any]:
    """The checkpoint's form. Equal offsets give equal documents."""
    document: dict[str, Any] = {}
    for (cluster, broker), one in sorted(offset.items()):
        origins = {"from": _by_topic(one.origins)} if one.origins else {}
        document[f"{quote(cluster, safe='')}/{quote(broker, safe='')}"] = {
            "version": one.version,
            "queues": _by_topic(one.queues),
            **origins,
        }
    return document


def _by_topic(offsets: Mapping[QueueKey, int]) -> dict[str, dict[str, int]]:
    queues: dict[str, dict[str, int]] = {}
    for queue in sorted(offsets):
        queues.setdefault(queue.topic, {})[f"{queue.queue_id}.{queue.generation}"] = offsets[queue]
    return queues


def from_json(document: Mapping[str, Any]) -> dict[Names, ArchiveOffset]:
    """Parse the checkpoint's form. Raises CorruptionError."""
    try:
        _check_size(document)
        return {_names(name): _archive_offset(one) for name, one in document.items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptionError(f"offset in the checkpoint does not parse: {error}") from error


def _check_size(document: Mapping[str, Any]) -> None:
    """Check the size before anything is allocated for ``document``. Raises ValueError."""
    left = QUEUES_MAX
    for name, one in document.items():
        for topics in (one["queues"], one.get("from", {})):
            left -= len(topics) + sum(map(len, topics.values()))
            if left < 0:
                raise ValueError(f"more than {QUEUES_MAX} queues")
            if max(map(len, (name, *topics))) > NAME_CHARACTERS_MAX:
                raise ValueError(f"a name of more than {NAME_CHARACTERS_MAX} characters")


def _names(text: str) -> Names:
    cluster, broker = (unquote(part) for part in text.split("/"))
    return cluster, broker


def _archive_offset(one: Mapping[str, Any]) -> ArchiveOffset:
    return ArchiveOffset(_whole(one["version"]), _offsets(one["queues"]), _offsets(one.get("from", {})))


def _offsets(topics: Mapping[str, Mapping[str, Any]]) -> dict[QueueKey, int]:
    queues = {}
    for topic, numbers in topics.items():
        for name, offset in numbers.items():
            queue_id, generation = (_whole(int(number)) for number in name.split("."))
            queues[QueueKey(topic, queue_id, generation)] = _whole(offset)
    return queues


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value <= OFFSET_MAX:
        raise ValueError("a number does not fit into 63 bits")
    return value


def share(available: Sequence[int], limit: int) -> list[int]:
    """``limit`` divided in proportion to ``available``. The sum is at least 1 if anything is available."""
    total = sum(available)
    limit = min(max(limit, 1), total)
    if total == 0:
        return [0] * len(available)
    shares = [amount * limit // total for amount in available]
    left = limit - sum(shares)
    by_remainder = sorted(range(len(available)), key=lambda i: (-(available[i] * limit % total), i))
    for i in by_remainder[:left]:
        shares[i] += 1
    return shares


def bytes_between(runs: Table, begin: int, end: int) -> int:
    """Approximate message bytes of queue offsets [begin, end): messages of a run count as equally large."""
    low = np.clip(begin, runs["base_queue_offset"], runs["end_queue_offset"])
    high = np.clip(end, runs["base_queue_offset"], runs["end_queue_offset"])
    span = np.maximum(runs["end_queue_offset"] - runs["base_queue_offset"], 1)
    return int((_weights(runs) * (np.maximum(high - low, 0) / span)).sum())


def offset_after(runs: Table, begin: int, end: int, byte_count: int) -> int:
    """The offset in [begin, end] reached by ``byte_count`` bytes from ``begin``; at least one message if any."""
    low, high = min(begin + 1, end), end
    while low < high:
        middle = (low + high + 1) // 2
        if bytes_between(runs, begin, middle) <= byte_count:
            low = middle
        else:
            high = middle - 1
    return low


def _weights(runs: Table) -> Any:
    """Bytes of each run; for LMQs, whose bytes are in other runs, a number proportional to rows."""
    return np.where(runs["byte_count"] > 0, runs["byte_count"], runs["rows"] * 1024)
