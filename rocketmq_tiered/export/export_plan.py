"""Plans the rows of an export's batch and their parts. Reads catalogs only.

A batch has the messages of every queue since the batch before, up to one catalog version of each archive, and those
that filled gaps since. The same intent after the same batch gives the same parts, on any machine at any time.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from rocketmq_tiered.export.export_progress import ArchiveEnds, Intent, ends_of
from rocketmq_tiered.message_table.options.predicate import Predicate
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.archive_plan import (
    Gaps,
    Layer,
    archive_store,
    filled,
    gaps_by_queue,
    gaps_in,
    opened,
    require_topics,
    slices,
    wanted_queues,
)
from rocketmq_tiered.message_table.plan.partitions import (
    SLICE_DTYPE,
    ArchiveRef,
    ObjectRef,
    OffsetRange,
    Slices,
    cut,
)
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import UNKNOWN_OFFSET, CatalogState
from tiered.errors import UsageError
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore

LAYOUT = SLICE_DTYPE.descr
"""Columns of a part's table. With other columns, from another version of this program, the batch is planned again."""


def plan_document(plan: BatchPlan) -> dict[str, Any]:
    """The plan of a batch as the JSON document that is recorded in the target."""
    return {
        "layout": [list(column) for column in LAYOUT],
        "parts": [_part_document(part) for part in plan.parts],
        "ends": [asdict(one) for one in plan.ends],
        "expired": plan.expired,
    }


def plan_of(document: Mapping[str, Any]) -> BatchPlan | None:
    """The recorded plan, or None if its layout is unknown."""
    if [tuple(column) for column in document["layout"]] != LAYOUT:
        return None
    parts = [_part(one) for one in document["parts"]]
    return BatchPlan(parts, list(ends_of(document)), int(document["expired"]))


def _part_document(part: Slices) -> dict[str, Any]:
    return {
        "archive": [part.archive.cluster, part.archive.broker, part.archive.version],
        "queues": [list(queue) for queue in part.queues],
        "objects": [[one.key, one.size_bytes, one.tail_bytes] for one in part.objects],
        "table": b64encode(part.table.tobytes()).decode(),
    }


def _part(document: Mapping[str, Any]) -> Slices:
    return Slices(
        ArchiveRef(*document["archive"]),
        np.frombuffer(b64decode(document["table"]), SLICE_DTYPE),
        tuple(QueueKey(*queue) for queue in document["queues"]),
        tuple(ObjectRef(*one) for one in document["objects"]),
    )


def without_expired(options: SourceOptions, plan: BatchPlan) -> BatchPlan:
    """A recorded plan without the messages that have expired since, which its ``expired`` counts. Parts that become
    empty stay, because parts are known by their numbers."""
    names = {(part.archive.cluster, part.archive.broker) for part in plan.parts}
    with opened(options) as store:
        states = {name: load(archive_store(store, *name)) for name in names}
    parts, expired = [], plan.expired
    for part in plan.parts:
        table = part.table.copy()
        floors = _floors(part, states[part.archive.cluster, part.archive.broker])[table["queue"]]
        begin = np.clip(floors, table["begin"], table["end"])
        expired += int((begin - table["begin"]).sum())
        table["begin"] = begin
        parts.append(replace(part, table=table[table["begin"] < table["end"]]))
    return replace(plan, parts=parts, expired=expired)


def _floors(part: Slices, state: CatalogState) -> np.ndarray[Any, np.dtype[np.int64]]:
    """The minimum offset of each queue."""
    rows = [state.queue(queue) for queue in part.queues]
    return np.array([0 if row is None else int(row["min_queue_offset"]) for row in rows], np.int64)


LARGE_TOPIC_SHARE = 8
"""A topic with at least partition_bytes / LARGE_TOPIC_SHARE gets its own parts, so that it has few files."""


@dataclass(frozen=True)
class BatchPlan:
    """Parts to write, the ends of all queues after them, and the number of offsets that expired unexported."""

    parts: list[Slices]
    ends: list[ArchiveEnds]
    expired: int


def plan_batch(options: SourceOptions, intent: Intent, before: Iterable[ArchiveEnds]) -> BatchPlan:
    """Plan the batch that ``intent`` announced: all messages behind the ends ``before``, where the batch in front of it
    ended, and those of gaps that were filled since. Raises UsageError if exported messages are no longer in the archive
    because the broker's log was replaced."""
    known = {(one.cluster, one.broker): one for one in before}
    found: list[Slices] = []
    ends: list[ArchiveEnds] = []
    expired = 0
    with opened(options) as store:
        for one in intent.archives:
            archive = archive_store(store, one.cluster, one.broker)
            state = load(archive, version=one.version)
            ref = ArchiveRef(one.cluster, one.broker, one.version)
            last = known.pop((one.cluster, one.broker), ArchiveEnds(one.cluster, one.broker, one.log_history))
            _refuse_superseded(archive, state, last)
            ended = {QueueKey(*queue[:3]): queue[3] for queue in last.queues}
            wanted = _begun(state, options, ended) | wanted_queues(state, options)
            fresh = _fresh(wanted, ended)
            expired += sum(max(0, wanted[queue].begin - ended[queue]) for queue in wanted if queue in ended)
            for layer in (fresh, *filled(state, _gaps(last), _below(wanted, ended))):
                found += slices(RunIndex(archive), state, ref, layer, Predicate(), is_header_only=False)
            ends.append(_ends(state, last, ended, wanted))
    require_topics(options, {queue[0] for one in ends for queue in one.queues})
    ends += known.values()
    return BatchPlan(_parts(found, intent.partition_bytes), ends, expired)


def _begun(state: CatalogState, options: SourceOptions, ended: Iterable[QueueKey]) -> Layer:
    """The bounds of the queues that earlier batches exported. They may have messages that were not exported and are
    hidden now, because their topic was deleted or created again."""
    rows = {queue: state.queue(queue) for queue in ended if options.wants(queue.topic)}
    return {
        queue: OffsetRange(int(row["min_queue_offset"]), int(row["end_queue_offset"]))
        for queue, row in rows.items()
        if row is not None
    }


def _fresh(wanted: Layer, ended: dict[QueueKey, int]) -> Layer:
    """The offsets after the last batch."""
    ranges = {
        queue: OffsetRange(max(one.begin, ended.get(queue, one.begin)), one.end)
        for queue, one in wanted.items()
    }
    return {queue: one for queue, one in ranges.items() if one.begin < one.end}


def _gaps(last: ArchiveEnds) -> Gaps:
    return gaps_by_queue((QueueKey(*gap[:3]), OffsetRange(*gap[3:])) for gap in last.gaps)


def _below(wanted: Layer, ended: dict[QueueKey, int]) -> Layer:
    """The offsets that the last batch had passed."""
    return {queue: OffsetRange(one.begin, ended[queue]) for queue, one in wanted.items() if queue in ended}


def _ends(state: CatalogState, last: ArchiveEnds, ended: dict[QueueKey, int], wanted: Layer) -> ArchiveEnds:
    """Up to which offset each queue is exported after this batch, and its gaps. ``last``: the same after the batch
    before; ``ended``: its ends by queue; ``wanted``: the offsets of this batch by queue."""
    after = ended | {queue: max(one.end, ended.get(queue, 0)) for queue, one in wanted.items()}
    # A queue that is not in this batch keeps the gaps of the last batch with it.
    kept = {queue: gaps for queue, gaps in _gaps(last).items() if queue not in wanted}
    now = {queue: gaps for queue, gaps in gaps_in(state).items() if queue in wanted}
    gaps = [(*queue, gap.begin, gap.end) for queue, mine in sorted((kept | now).items()) for gap in mine]
    queues = [(*queue, end) for queue, end in sorted(after.items())]
    return ArchiveEnds(last.cluster, last.broker, state.cursor.history, queues, gaps)


def _refuse_superseded(archive: ObjectStore, state: CatalogState, last: ArchiveEnds) -> None:
    """Raise UsageError if exported messages are no longer in the archive because the broker's log was replaced by one
    that does not have them."""
    for history in state.log_histories:
        if history.number <= last.log_history or history.common_version == 0:
            continue  # nothing in common: queues have a new generation, and exported rows stay valid
        common = load(archive, version=history.common_version)
        for topic, queue_id, generation, end in last.queues:
            row = common.queue(QueueKey(topic, queue_id, generation))
            kept = UNKNOWN_OFFSET if row is None else int(row["end_queue_offset"])
            if end > kept and state.row_of(QueueKey(topic, queue_id, generation)) is not None:
                raise UsageError(
                    f"{topic}/{queue_id} was exported to offset {end}, but the broker's log was replaced and its "
                    f"messages after offset {max(kept, 0)} are no longer in it",
                    hint="export to another target",
                )


# -- parts ----------------------------------------------------------------------------------------------------


def _parts(found: list[Slices], partition_bytes: int) -> list[Slices]:
    """Cut the messages of a batch into parts of about ``partition_bytes``: first each large topic alone, so that its
    files hold no other topic, then all small topics together."""
    weights: dict[str, int] = {}
    for part in found:
        for number, queue in enumerate(part.queues):
            mine = part.table["weight"][part.table["queue"] == number]
            weights[queue.topic] = weights.get(queue.topic, 0) + int(mine.sum())
    large = sorted(
        topic for topic, weight in weights.items() if weight * LARGE_TOPIC_SHARE >= partition_bytes
    )
    groups = [{topic} for topic in large] + [weights.keys() - set(large)]
    parts: list[Slices] = []
    for topics in groups:
        chosen = [one for part in found if (one := _of_topics(part, set(topics))) is not None]
        if chosen:
            parts += cut(chosen, partition_bytes)
    return parts


def _of_topics(part: Slices, topics: set[str]) -> Slices | None:
    mine = np.array([queue.topic in topics for queue in part.queues], bool)[part.table["queue"]]
    if not mine.any():
        return None
    return Slices(part.archive, part.table[mine], part.queues, part.objects)
