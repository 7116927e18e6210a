"""Which rows a batch of an export holds, and how they are cut into parts. Reads catalogs only.

A batch is what every queue got since the batch before, up to one catalog version of each archive, and what was filled
into gaps since. The same intent after the same batch gives the same parts, on any machine at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pipeline.jobs.export_progress import ArchiveEnds, Intent
from pipeline.options.predicate import Predicate
from pipeline.options.source_options import SourceOptions
from pipeline.plan.archive_plan import opened, require_topics, slices, wanted_queues
from pipeline.plan.filled_gaps import Gaps, Layer, by_queue, filled, gaps_in
from pipeline.plan.partitions import ArchiveRef, OffsetRange, Slices, cut
from tiered.catalog.catalog_reader import load
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import UNKNOWN_OFFSET, CatalogState
from tiered.errors import UsageError
from tiered.formats.keys import archive_prefix
from tiered.model.queue import QueueKey
from tiered.object_store.interface import ObjectStore
from tiered.object_store.prefixed import PrefixedStore

LARGE_TOPIC_SHARE = 8
"""A topic with at least partition_bytes / this gets parts of its own, so that it has few files."""


@dataclass(frozen=True)
class BatchPlan:
    """Parts to write, where every queue ends after them, and offsets that expired before they were exported."""

    parts: list[Slices]
    ends: list[ArchiveEnds]
    expired: int


def plan_batch(options: SourceOptions, intent: Intent, before: Iterable[ArchiveEnds]) -> BatchPlan:
    """The batch of ``intent`` after one that ended at ``before``. Raises UsageError when exported rows are no more."""
    known = {(one.cluster, one.broker): one for one in before}
    found: list[Slices] = []
    ends: list[ArchiveEnds] = []
    expired = 0
    with opened(options) as store:
        for one in intent.archives:
            archive = PrefixedStore(store, archive_prefix(one.cluster, one.broker))
            state = load(archive, version=one.version)
            ref = ArchiveRef(one.cluster, one.broker, one.version)
            last = known.pop((one.cluster, one.broker), ArchiveEnds(one.cluster, one.broker, one.line))
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
    """Queues that earlier batches hold a part of: those that are hidden by now, as their topic was deleted or made
    anew, may have a rest."""
    rows = {queue: state.queue(queue) for queue in ended if options.wants(queue.topic)}
    return {
        queue: OffsetRange(int(row["min_queue_offset"]), int(row["end_queue_offset"]))
        for queue, row in rows.items()
        if row is not None
    }


def _fresh(wanted: Layer, ended: dict[QueueKey, int]) -> Layer:
    """What came after the last batch."""
    ranges = {
        queue: OffsetRange(max(one.begin, ended.get(queue, one.begin)), one.end)
        for queue, one in wanted.items()
    }
    return {queue: one for queue, one in ranges.items() if one.begin < one.end}


def _gaps(last: ArchiveEnds) -> Gaps:
    return by_queue((QueueKey(*gap[:3]), OffsetRange(*gap[3:])) for gap in last.gaps)


def _below(wanted: Layer, ended: dict[QueueKey, int]) -> Layer:
    """What the last batch had passed: what is above is new, filled gaps too."""
    return {queue: OffsetRange(one.begin, ended[queue]) for queue, one in wanted.items() if queue in ended}


def _ends(state: CatalogState, last: ArchiveEnds, ended: dict[QueueKey, int], wanted: Layer) -> ArchiveEnds:
    after = ended | {queue: max(one.end, ended.get(queue, 0)) for queue, one in wanted.items()}
    # A queue that this batch leaves out keeps the gaps of the last batch that did not: it is as far as it was then.
    kept = {queue: gaps for queue, gaps in _gaps(last).items() if queue not in wanted}
    now = {queue: gaps for queue, gaps in gaps_in(state).items() if queue in wanted}
    gaps = [(*queue, gap.begin, gap.end) for queue, mine in sorted((kept | now).items()) for gap in mine]
    queues = [(*queue, end) for queue, end in sorted(after.items())]
    return ArchiveEnds(last.cluster, last.broker, state.cursor.history, queues, gaps)


def _refuse_superseded(archive: ObjectStore, state: CatalogState, last: ArchiveEnds) -> None:
    """A new log line takes back what came after its beginning: it must not have been exported."""
    for history in state.log_histories:
        if history.number <= last.line or history.common_version == 0:
            continue  # from nothing in common on, queues have a new generation: old rows stay what they were
        common = load(archive, version=history.common_version)
        for topic, queue_id, generation, end in last.queues:
            row = common.queue(QueueKey(topic, queue_id, generation))
            kept = UNKNOWN_OFFSET if row is None else int(row["end_queue_offset"])
            if end > kept and state.row_of(QueueKey(topic, queue_id, generation)) is not None:
                raise UsageError(
                    f"{topic}/{queue_id} was exported to offset {end}, but the broker's log was replaced and "
                    f"log line {history.number} took back what followed {max(kept, 0)}",
                    hint="export into another place",
                )


# -- parts ----------------------------------------------------------------------------------------------------


def _parts(found: list[Slices], partition_bytes: int) -> list[Slices]:
    """Large topics apart, the small ones of an object together."""
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
    wanted = np.array([queue.topic in topics for queue in part.queues], bool)
    mine = wanted[part.table["queue"]]
    if not mine.any():
        return None
    return Slices(part.archive, part.table[mine], part.queues, part.objects)
