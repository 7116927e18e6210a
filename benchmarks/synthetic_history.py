"""A synthetic history of an archive: the real CatalogWriter with drafts as the uploader makes them, without data
objects. Owns the drafts."""

import random
import time
import tracemalloc
from collections.abc import Callable

import numpy as np

from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.state import LogCheck
from tiered.catalog.writer_limits import CatalogLimits
from tiered.clock import Clock
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
        broker: str = "broker-a",
    ) -> None:
        self.keys = [QueueKey(f"topic_{number // 8:05d}", number % 8, 0) for number in range(queues)]
        self.now_ms = START_MS
        self.stored_bytes = 0
        """Of the data objects that were not written."""
        self.merge_s = self.longest_merge_s = self._merge_cpu_s = 0.0
        self.merge_peak_bytes = 0
        """Of memory allocated by a merge, while ``is_traced``."""
        self.is_traced = False
        self._active = min(queues, active)
        self._random = np.random.default_rng(1)
        self._ends = np.zeros((2, queues), np.int64)
        """Queue offset and byte at which each queue ends."""
        self.writer = CatalogWriter(
            store,
            cluster="DefaultCluster",
            broker=broker,
            instance="run-0123456789abcdef",
            kind="run",
            clock=Clock(wall_ms=lambda: self.now_ms),
            limits=limits,
            random=random.Random(1),
            background=self._merge,
        )
        state = self.writer.claim()
        known = state.queue_count  # of a history that was kept
        self._ends[:, :known] = state.table["end_queue_offset"], state.table["end_byte"]
        self.now_ms = max(self.now_ms, state.created_ms)

    def cycle(self) -> tuple[float, float]:
        """One commit; returns its seconds and those of the processor, without those of a merge that began after it."""
        self.now_ms += CYCLE_MS
        draft = self._draft()
        before_s, before_cpu_s = self.merge_s, self._merge_cpu_s
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        self.writer.append(draft)
        spent_s = time.perf_counter() - start_s - (self.merge_s - before_s)
        return spent_s, time.thread_time() - start_cpu_s - (self._merge_cpu_s - before_cpu_s)

    def _merge(self, work: Callable[[], None]) -> None:
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        if self.is_traced:
            tracemalloc.start()
        work()
        if self.is_traced:
            self.merge_peak_bytes = max(self.merge_peak_bytes, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        spent_s = time.perf_counter() - start_s
        self.merge_s += spent_s
        self._merge_cpu_s += time.thread_time() - start_cpu_s
        self.longest_merge_s = max(self.longest_merge_s, spent_s)

    def _draft(self) -> CommitDraft:
        state, rand = self.writer.state, self._random
        known = state.queue_count
        if known < len(self.keys):  # every queue once, in the first cycles
            chosen = np.arange(known, min(known + self._active, len(self.keys)))
        else:
            chosen = np.sort(rand.choice(len(self.keys), self._active, replace=False))
        count = len(chosen)
        begin = state.cursor.phys
        rows, extra, gap = rand.integers([[1], [0], [0]], [[20], [200], [500]], (3, count))
        size = rows * RECORD_BYTES + extra
        early, late = rand.integers(0, 100, (2, count))
        runs = np.zeros(count, RUN_DTYPE)
        runs["queue"] = runs["ordinal"] = np.arange(count)
        runs["kind"] = RunKind.PLAIN
        runs["base_queue_offset"], runs["base_byte"] = self._ends[:, chosen]
        runs["end_queue_offset"] = runs["base_queue_offset"] + rows
        runs["rows"], runs["byte_count"] = rows, size
        runs["min_store_timestamp"] = self.now_ms + early
        runs["max_store_timestamp"] = self.now_ms + CYCLE_MS - late
        runs["min_phys"] = begin + gap
        runs["end_phys"] = runs["min_phys"] + size
        self._ends[:, chosen] += rows, size
        end = int(runs["end_phys"].max())
        raw = int(runs["byte_count"].sum())
        end = max(end, begin + raw)
        stored = raw // 3 + int(rand.integers(0, 500))
        self.stored_bytes += stored
        objects = np.zeros(1, OBJECT_DTYPE)
        crcs = rand.integers(0, 1 << 32, 2).tolist()
        objects[0] = (
            0,
            int(rows.sum()),
            stored,
            1500 + count * 40,
            crcs[0],
            state.epoch,
            begin,
            end,
            raw,
            0,
        )
        return CommitDraft(
            CommitKind.APPEND,
            history=state.cursor.history,
            from_phys=begin,
            to_phys=end,
            check=LogCheck(end - 64, end, crcs[1]),
            queues=[self.keys[number] for number in chosen.tolist()],
            runs=runs,
            objects=objects,
            object_keys=(set_key(f"{begin:020d}", state.epoch, state.version),),
            created_ms=self.now_ms,
        )
