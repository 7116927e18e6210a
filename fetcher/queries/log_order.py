"""All records of an archive in the order of the broker's log.

An upload cycle is a range of the log spread over a few objects: one cycle at a time is read and sorted, so memory holds
one cycle, whatever the archive's size. Not for pulls: nothing is cached.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from fetcher.queries.source import Place
from tiered.archive.segment_reader import SegmentReader
from tiered.catalog.living_runs import living_runs
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey
from tiered.model.tables import QUEUE_SUPERSEDED, RunKind
from tiered.object_store.interface import ObjectStore


@dataclass
class _Object:
    place: Place
    min_phys: int
    end_phys: int
    runs: list[tuple[np.void, QueueKey]] = field(default_factory=list)


def records_in_log_order(store: ObjectStore, state: CatalogState) -> Iterator[bytes]:
    """Every archived record of the commitlog once, by physical offset; except those of superseded log histories.

    Raises CorruptionError or what the store raises.
    """
    objects = _objects(store, state)
    group: list[_Object] = []
    end_phys = 0
    for item in objects:
        if group and item.min_phys >= end_phys:
            yield from _records(store, group)
            group = []
        group.append(item)
        end_phys = max(end_phys, item.end_phys)
    yield from _records(store, group)


def _objects(store: ObjectStore, state: CatalogState) -> list[_Object]:
    """Objects with their living runs that have bytes, by physical offset."""
    found: dict[str, _Object] = {}
    for page in living_runs(RunIndex(store), state):
        chunk = page.chunk
        superseded = []
        for queue in page.queues:
            row = state.queue(queue)
            superseded.append(row is None or bool(row["flags"] & QUEUE_SUPERSEDED))
        for run in chunk.runs:
            is_of_log = int(run["kind"]) != RunKind.LMQ and int(run["min_phys"]) >= 0
            if not is_of_log or superseded[int(run["queue"])]:
                continue
            row = chunk.objects[int(run["object"])]
            key = chunk.object_keys[int(row["key"])]
            item = found.setdefault(
                key, _Object(Place.of(key, row), int(row["min_phys"]), int(row["end_phys"]))
            )
            item.runs.append((run.copy(), page.queues[int(run["queue"])]))
    return sorted(found.values(), key=lambda item: (item.min_phys, item.place.key))


def _records(store: ObjectStore, group: list[_Object]) -> Iterator[bytes]:
    physical, pieces = [], []
    for item in group:
        reader = SegmentReader.open(
            store, item.place.key, size_bytes=item.place.size_bytes, tail_bytes=item.place.tail_bytes
        )
        for run, queue in item.runs:
            part = reader.index.check_run(run, queue)
            records = reader.read_blocks(part, 0, part.rows)
            physical.append(reader.row_columns(part).phys)
            pieces.append(records)
    if not physical:
        return
    number = np.repeat(np.arange(len(pieces)), [len(phys) for phys in physical])
    row = np.concatenate([np.arange(len(phys)) for phys in physical])
    whole = np.concatenate(physical)
    order = np.argsort(whole, kind="stable")
    last = -1
    for at in order.tolist():
        if int(whole[at]) == last:
            continue  # an LMQ of an excluded parent has a copy of its own
        last = int(whole[at])
        piece, index = pieces[int(number[at])], int(row[at])
        start = int(piece.starts[index])
        yield piece.data[start : start + int(piece.sizes[index])].tobytes()
