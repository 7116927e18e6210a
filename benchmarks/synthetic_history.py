"""A synthetic history of an archive: the real CatalogWriter with drafts as the uploader makes them, without data
objects. Owns the drafts."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np

from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.state import LogCheck
from tiered.catalog.writer_limits import CatalogLimits
from tiered.formats.keys import set_key
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE, RunKind
from tiered.object_store.interface import ObjectStore

START_MS = 1_700_000_000_000
CYCLE_MS = 5_000
RECORD_BYTES = 300
ACTIVE_MAX = 50
"""Queues with messages in one cycle."""


class SyntheticHistory:
    """An archive of ``queues`` queues, of which up to ``active`` have messages in a cycle."""

    def __init__(
        self,
        store: ObjectStore,
        queues: int,
        *,
        active: int = ACTIVE_MAX,
        limits: CatalogLimits | None = None,
    ) -> None:
        self.keys = [QueueKey(f"topic_{number // 8:05d}", number % 8, 0) for number in range(queues)]
        self.now_ms = START_MS
        self.stored_bytes = 0
        """Of the data objects that were not written."""
        self.merge_s = self.longest_merge_s = 0.0
        self._active = min(queues, active)
        self._random = np.random.default_rng(1)
        self.writer = CatalogWriter(
            store, cluster="DefaultCluster", broker="broker-a", instance="run-0123456789abcdef", kind="run",
            clock_ms=lambda: self.now_ms, limits=limits, random=random.Random(1), background=self._merge,
        )  # fmt: skip
        self.writer.claim()

    def cycle(self) -> float:
        """One commit; returns its seconds, without those of a merge that began after it."""
        self.now_ms += CYCLE_MS
        draft = self._draft()
        before_s, start_s = self.merge_s, time.perf_counter()
        self.writer.append(draft)
        return time.perf_counter() - start_s - (self.merge_s - before_s)

    def _merge(self, work: Callable[[], None]) -> None:
        start_s = time.perf_counter()
        work()
        spent_s = time.perf_counter() - start_s
        self.merge_s += spent_s
        self.longest_merge_s = max(self.longest_merge_s, spent_s)

    def _draft(self) -> CommitDraft:
        state, rand = self.writer.state, self._random
        if state.queue_count < len(self.keys):  # every queue once, in the first cycles
            begin = state.queue_count
            chosen = list(range(begin, min(begin + self._active, len(self.keys))))
        else:
            chosen = sorted(rand.choice(len(self.keys), self._active, replace=False).tolist())
        begin = end = state.cursor.phys
        runs = np.zeros(len(chosen), RUN_DTYPE)
        rows = rand.integers(1, 20, len(chosen)).tolist()
        for index, number in enumerate(chosen):
            known = state.queue(self.keys[number])
            offset, byte = (
                (0, 0) if known is None else (int(known["end_queue_offset"]), int(known["end_byte"]))
            )
            size = rows[index] * RECORD_BYTES + int(rand.integers(0, 200))
            first, early, late = begin + int(rand.integers(0, 500)), *rand.integers(0, 100, 2).tolist()
            runs[index] = (
                index, 0, index, RunKind.PLAIN, 0, offset, offset + rows[index], rows[index], byte, size,
                self.now_ms + early, self.now_ms + CYCLE_MS - late, first, first + size,
            )  # fmt: skip
            end = max(end, first + size)
        raw = int(runs["byte_count"].sum())
        end = max(end, begin + raw)
        stored = raw // 3 + int(rand.integers(0, 500))
        self.stored_bytes += stored
        objects = np.zeros(1, OBJECT_DTYPE)
        crcs = rand.integers(0, 1 << 32, 2).tolist()
        objects[0] = (
            0, sum(rows), stored, 1500 + len(chosen) * 40, crcs[0], state.epoch, begin, end, raw, 0,
        )  # fmt: skip
        return CommitDraft(
            CommitKind.APPEND, history=state.cursor.history, from_phys=begin, to_phys=end,
            check=LogCheck(end - 64, end, crcs[1]), queues=[self.keys[number] for number in chosen],
            runs=runs, objects=objects, object_keys=(set_key(f"{begin:020d}", state.epoch, state.version),),
            created_ms=self.now_ms,
        )  # fmt: skip
