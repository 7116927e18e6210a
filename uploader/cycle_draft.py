"""Keys of a cycle's objects, and its commit. Pure."""

from collections.abc import Sequence

import numpy as np

from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.state import CatalogState
from tiered.formats.keys import batch_id, data_key, set_key
from tiered.formats.segment import EncodedSegment
from tiered.model.queue_roster import united
from tiered.model.tables import GAP_DTYPE, OBJECT_DTYPE, RUN_DTYPE, GapReason, concatenated
from uploader.cycle_plan import CyclePlan, ObjectPlan
from uploader.log_batch import LogBatch
from uploader.log_evidence import hosts_setting
from uploader.skipped_log import skipped_settings


def gap_reason(*, is_lost: bool, is_damaged: bool, was_damaged: bool, was_lost: bool) -> GapReason:
    """The reason to record for queue offsets that are missing in a cycle. ``is_lost``, ``is_damaged``: its own range of
    the log has missing or damaged parts; ``was_lost``, ``was_damaged``: that of an earlier cycle had."""
    if is_lost:
        return GapReason.BROKER_DELETED
    if is_damaged or was_damaged:
        return GapReason.DAMAGED
    return GapReason.BROKER_DELETED if was_lost else GapReason.NEVER_WRITTEN


def object_key(plan: ObjectPlan, from_phys: int, epoch: int, attempt: int) -> str:
    """The key of one attempt at an object of the cycle that begins at ``from_phys``."""
    if plan.is_set:
        return set_key(batch_id(from_phys, plan.ttl_class_days), epoch, attempt)
    queue = plan.queues[int(plan.runs["queue"][0])]
    return data_key(queue, int(plan.runs["base_queue_offset"][0]), epoch, attempt)


def draft_in_place(state: CatalogState, created_ms: int) -> CommitDraft:
    """A commit for ``state`` that archives no part of the log: its range is empty, at the archive's end. The caller
    adds what it changes."""
    cursor = state.cursor
    return CommitDraft(
        CommitKind.APPEND,
        history=cursor.history,
        from_phys=cursor.phys,
        to_phys=cursor.phys,
        check=cursor.check,
        created_ms=created_ms,
    )


def cycle_draft(
    plan: CyclePlan,
    keys: Sequence[str],
    encoded: Sequence[EncodedSegment],
    batch: LogBatch,
    state: CatalogState,
) -> CommitDraft:
    """The commit after ``state`` of one cycle, whose objects are stored under ``keys``: their runs, gaps, and settings
    that record what was skipped in ``batch``, from which the cycle was planned. The caller adds the time, tables of the
    broker and garbage."""
    gap_queues = [gap.queue for gap in plan.gaps]
    queues_of_objects = [item.queues for item in plan.objects]
    queues, numbers = united([*queues_of_objects, gap_queues] if gap_queues else queues_of_objects)
    run_tables = []
    objects = np.zeros(len(keys), OBJECT_DTYPE)
    for number, (item, segment) in enumerate(zip(plan.objects, encoded, strict=True)):
        runs = item.runs.copy()
        runs["queue"] = numbers[number][item.runs["queue"]]
        runs["object"] = number
        run_tables.append(runs)
        objects[number] = (
            number,
            segment.rows,
            segment.size_bytes,
            segment.tail_bytes,
            segment.tail_crc32c,
            state.epoch,
            segment.min_phys,
            segment.end_phys,
            segment.raw_bytes,
            item.ttl_class_days,
        )
    gaps = np.zeros(len(plan.gaps), GAP_DTYPE)
    for i, gap in enumerate(plan.gaps):
        gaps[i] = (numbers[-1][i], gap.reason, gap.begin_queue_offset, gap.end_queue_offset)
    return CommitDraft(
        kind=CommitKind.APPEND,
        history=state.cursor.history,
        from_phys=batch.from_phys,
        to_phys=batch.to_phys,
        check=batch.log_check() or state.cursor.check,
        queues=queues,
        runs=concatenated(run_tables, RUN_DTYPE),
        objects=objects,
        object_keys=list(keys),
        gaps=gaps,
        settings=skipped_settings(batch, state.cursor.history) | hosts_setting(batch),
    )
