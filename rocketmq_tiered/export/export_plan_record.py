"""The recorded plan of a batch, and its messages that expired since.

A killed export may continue days later, when pages of its catalog version are deleted and rows have expired. Parts keep
their numbers, which are in file names.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from rocketmq_tiered.export.export_plan import BatchPlan
from rocketmq_tiered.export.export_progress import ends_of
from rocketmq_tiered.message_table.options.source_options import SourceOptions
from rocketmq_tiered.message_table.plan.archive_plan import archive_store, opened
from rocketmq_tiered.message_table.plan.partitions import SLICE_DTYPE, ArchiveRef, ObjectRef, Slices
from tiered.catalog.catalog_reader import load
from tiered.catalog.state import CatalogState
from tiered.model.queue import QueueKey

LAYOUT = SLICE_DTYPE.descr
"""Columns of a part's table. With other columns, from another version of this program, the batch is planned again."""


def plan_document(plan: BatchPlan) -> dict[str, Any]:
    """``plan`` in its recorded form."""
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
    """``plan`` without messages that expired since, which ``expired`` counts. All parts stay, even empty ones."""
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
