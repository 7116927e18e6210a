"""Verifies objects of timers: undamaged, in order, and each pending entry's message is in the archive."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tiered.archive.timers import TimerFiles
from tiered.archive.verify_segment import Anomaly, AnomalyKind
from tiered.catalog.state import CatalogState
from tiered.catalog.timer_refs import TimerRef
from tiered.errors import CorruptionError, NotFoundError
from tiered.formats.timer_object import HOUR_DTYPE, hours_of, joined_hours, sorted_entries
from tiered.model.queue import QueueKey
from tiered.model.tables import Table, picked
from tiered.model.timer import EntryKind
from tiered.object_store.interface import ObjectStore

TIMERS = (EntryKind.TIMER, EntryKind.POSTPONED)


def check_timers(store: ObjectStore, state: CatalogState, *, full: bool) -> tuple[list[Anomaly], int]:
    """(anomalies, entries in all objects). Footers are always read; ``full`` reads every entry. Raises the store's
    errors, except for a single object."""
    files, anomalies = TimerFiles(store), list[Anomaly]()
    for ref in state.timers:
        try:
            files.footer(ref)
            if full:
                _check_entries(files, state, ref)
        except NotFoundError:
            continue  # reported with everything else that is named and does not exist
        except CorruptionError as error:
            anomalies.append(Anomaly(AnomalyKind.DAMAGED, ref.key, None, error.message))
    return anomalies, sum(ref.entries for ref in state.timers)


def _check_entries(files: TimerFiles, state: CatalogState, ref: TimerRef) -> None:
    footer, hours, row, last = files.footer(ref), [np.zeros(0, HOUR_DTYPE)], 0, None
    for number in range(len(footer.pages)):
        page = files.page(ref, number)
        joined = page if last is None else np.concatenate([last, page])
        if not (sorted_entries(joined) == joined).all():
            raise CorruptionError(f"{ref.key}: entries are not in order")
        hours.append(hours_of(page))
        _check_messages(state, ref, footer.queues, page[max(ref.done - row, 0) :])
        row, last = row + len(page), page[-1:]
    if not np.array_equal(joined_hours(hours), footer.hours):
        raise CorruptionError(f"{ref.key}: hours of the footer are not those of the entries")


def _check_messages(state: CatalogState, ref: TimerRef, queues: Sequence[QueueKey], page: Table) -> None:
    """A message that another log history replaced may lie beyond the end: its timer is dropped when it is due."""
    for number in np.unique(page["queue"]).tolist():
        of_queue = picked(page, (page["queue"] == number) & np.isin(page["kind"], TIMERS))
        row = state.queue(queues[number])
        if row is None:
            raise CorruptionError(f"{ref.key}: timers of {queues[number]}, which is not in the archive")
        expired = of_queue[of_queue["queue_offset"] < row["min_queue_offset"]]
        if len(expired):
            offset = int(expired["queue_offset"][0])
            raise CorruptionError(
                f"{ref.key}: {queues[number]} has expired to {int(row['min_queue_offset'])}, but a timer needs {offset}"
            )
