"""Candidates for compaction from the objects of an archive, and the contents of queues, without a catalog."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tiered.archive.rewrite.plan import Candidates, RewritePlan
from tiered.archive.rewrite.result import RewriteResult
from tiered.archive.segment_reader import SegmentReader
from tiered.formats.segment_index import SegmentIndex
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, RunKind, Table
from tiered.object_store.interface import ObjectStore


class Row(NamedTuple):
    """One row as a reader finds it. ``record``: its bytes, or of an LMQ its parent."""

    offset: int
    inner_num: int
    record: bytes | tuple[QueueKey, int]
    tags_code: int
    store_timestamp: int
    phys: int
    keys: tuple[int, ...]


def archived_candidates(store: ObjectStore) -> Candidates:
    """All data objects below ``store``; each cycle is a version."""
    indexes = []
    for prefix in ("data/", "sets/"):
        for info in store.list(prefix):
            indexes.append(
                SegmentIndex(info.key, info.size_bytes, store.get_range(info.key, 0, info.size_bytes))
            )
    cycles = sorted({index.meta.from_phys for index in indexes})
    queues = sorted({index.queue_of(run) for index in indexes for run in range(len(index.runs))})
    tables = []
    for number, index in enumerate(indexes):
        runs = np.zeros(len(index.runs), RUN_DTYPE)
        for name in RUN_DTYPE.names or ():
            runs[name] = index.runs[name]
        runs["queue"] = [queues.index(index.queue_of(run)) for run in range(len(runs))]
        runs["object"] = number
        runs["version"] = cycles.index(index.meta.from_phys) + 1
        tables.append(runs)
    return Candidates(
        queues=queues,
        runs=np.concatenate(tables),
        objects=np.concatenate([_object(number, index) for number, index in enumerate(indexes)]),
        object_keys=[index.key for index in indexes],
        is_set=np.array([index.key.startswith("sets/") for index in indexes]),
        floors=np.zeros(len(queues), np.int64),
        is_fixed=np.zeros(len(indexes), bool),
        share=np.ones(len(indexes)),
    )


def _object(number: int, index: SegmentIndex) -> Table:
    row = np.zeros(1, OBJECT_DTYPE)
    row["key"], row["size_bytes"] = number, index.size_bytes
    row["tail_bytes"] = index.size_bytes - index.tail_offset
    row["rows"] = int(index.runs["rows"].sum())
    row["raw_bytes"] = int(index.runs["byte_count"].sum())
    row["min_phys"], row["end_phys"] = index.runs["min_phys"].min(), index.runs["end_phys"].max()
    return row


def after(candidates: Candidates, plan: RewritePlan, result: RewriteResult) -> Candidates:
    """What the catalog has when the compaction is committed."""
    kept = candidates.runs[plan.kept].copy()
    new, objects = result.runs.copy(), result.objects.copy()
    new["object"] += len(candidates.objects)
    objects["key"] += len(candidates.object_keys)
    count = len(objects)
    return Candidates(
        queues=candidates.queues,
        runs=np.concatenate([kept, new]),
        objects=np.concatenate([candidates.objects, objects]),
        object_keys=[*candidates.object_keys, *result.object_keys],
        is_set=np.append(candidates.is_set, [key.startswith("sets/") for key in result.object_keys]),
        floors=candidates.floors,
        is_fixed=np.append(candidates.is_fixed, np.zeros(count, bool)),
        share=np.ones(len(candidates.objects) + count),
    )


def contents(store: ObjectStore, candidates: Candidates) -> dict[QueueKey, list[Row]]:
    """Every row of every queue, through footers, blocks and key sections."""
    found: dict[QueueKey, list[Row]] = {}
    for number in np.unique(candidates.runs["object"]).tolist():
        row = candidates.objects[number]
        key = candidates.object_keys[int(row["key"])]
        size, tail = int(row["size_bytes"]), int(row["tail_bytes"])
        reader = SegmentReader.open(store, key, size_bytes=size, tail_bytes=tail)
        keys = reader.key_hashes()
        key_ends = np.cumsum(keys.counts, dtype=np.int64)
        for run in candidates.runs[candidates.runs["object"] == number]:
            ordinal = int(run["ordinal"])
            assert reader.index.queue_of(ordinal) == candidates.queues[int(run["queue"])]
            for name in (
                "base_queue_offset",
                "end_queue_offset",
                "rows",
                "base_byte",
                "byte_count",
                "min_phys",
                "end_phys",
                "min_store_timestamp",
                "max_store_timestamp",
                "kind",
            ):
                assert run[name] == reader.index.runs[name][ordinal], name
            rows = _rows(reader, ordinal, keys.hashes, key_ends, keys.counts)
            found.setdefault(candidates.queues[int(run["queue"])], []).extend(rows)
    return {queue: sorted(rows, key=lambda row: row.offset) for queue, rows in sorted(found.items())}


def _rows(
    reader: SegmentReader, run: int, hashes: np.ndarray, key_ends: np.ndarray, counts: np.ndarray
) -> Sequence[Row]:
    columns = reader.row_columns(run)
    first = int(reader.index.first_row[run])
    is_lmq = int(reader.index.runs["kind"][run]) == RunKind.LMQ
    records = None if is_lmq else reader.read_blocks(run, 0, len(columns))
    for at in range(len(columns)):
        if records is None:
            record: bytes | tuple[QueueKey, int] = (
                reader.queues[int(columns.parent[at])],
                int(columns.parent_queue_offset[at]),
            )
        else:
            begin = int(records.starts[at])
            record = records.data[begin : begin + int(records.sizes[at])].tobytes()
        end = int(key_ends[first + at])
        yield Row(
            int(columns.queue_offset[at]),
            int(columns.inner_num[at]),
            record,
            int(columns.tags_code[at]),
            int(columns.store_timestamp[at]),
            int(columns.phys[at]),
            tuple(hashes[end - int(counts[first + at]) : end].tolist()),
        )
