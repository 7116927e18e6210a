"""The golden catalog: every object that a fixed history of commits writes, of every kind and with every field in use.

``python -m tests.catalog.golden_catalog`` writes ``tests/data/golden/1.0/catalog``, see golden_archive.py.
"""

import random
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np

from tests.archive.archive_builder import removed_of
from tests.catalog.collection import run_gc
from tests.catalog.drafts import NOW_MS, append_draft, queue, small_limits, writer
from tests.formats.golden_archive import GOLDEN
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitKind
from tiered.catalog.deletions import DeletionChange, PendingDeletion, Reason, encode_list, list_of
from tiered.catalog.index_refs import UNINDEXED, IndexChange, IndexRef
from tiered.catalog.pages import RunIndex
from tiered.clock import Clock
from tiered.formats.keys import index_key, state_key
from tiered.model.queue import QueueKey
from tiered.model.tables import FLOOR_DTYPE
from tiered.object_store.interface import Body
from tiered.object_store.memory import MemoryStore

DIRECTORY = GOLDEN / "1.0" / "catalog"
A, B, BIG, LATE = queue("a"), queue("%RETRY%b/日", 3), queue("big", 2), queue("late", 1)
HOUR_MS = 3_600_000


class _Recorder(MemoryStore):
    """Keeps what was put, whether it is deleted later or not."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS
        self.written: dict[str, bytes] = {}
        super().__init__(clock=Clock(wall_ms=lambda: self.now_ms))

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        content = b"".join(body)
        super().put_if_absent(key, [content], timeout_s=timeout_s)
        self.written[key] = content


class _History:
    """Commits of one archive, a second apart."""

    def __init__(self) -> None:
        self.store = _Recorder()
        self._seed = 0
        self.writer = self._claimed("w1", "run")

    def _clock_ms(self) -> int:
        return self.store.now_ms

    def _claimed(self, instance: str, kind: str, *, take_over: bool = False) -> CatalogWriter:
        self._seed += 1
        made = writer(
            self.store,
            instance,
            kind,
            limits=small_limits(spill_deletions=4),
            clock=Clock(wall_ms=self._clock_ms),
            random=random.Random(self._seed),
        )
        made.claim(take_over=take_over)
        return made

    def append(
        self, rows: dict[QueueKey, int], *, gap: dict[QueueKey, int] | None = None, **more: object
    ) -> None:
        self.store.now_ms += 1000
        draft = append_draft(self.writer.state, rows, gap=gap, objects=2)
        self.writer.append(replace(draft, created_ms=self.store.now_ms, **more))  # type: ignore[arg-type]

    def maintain(self, **content: object) -> None:
        self.store.now_ms += 1000
        draft = CommitDraft(CommitKind.MAINTENANCE, created_ms=self.store.now_ms, **content)  # type: ignore[arg-type]
        self.writer.append(draft)

    def replace_run(self, key: QueueKey, number: int) -> None:
        """A run moves to an object of its own."""
        state = self.writer.state
        chunk = RunIndex(self.store).runs_of(state, key)
        runs, run = chunk.runs, chunk.runs[[number]]
        objects = chunk.objects[run["object"]].copy()
        objects["key"], objects["epoch"], run["object"] = 0, state.epoch, 0
        self.maintain(
            queues=[key],
            runs=run,
            removed=removed_of(runs[[number]]),
            objects=objects,
            object_keys=[f"sets/01/moved{state.version}-{state.epoch}-1.sso"],
        )

    def expire(self, key: QueueKey, count: int) -> None:
        runs = RunIndex(self.store).runs_of(self.writer.state, key).runs
        self.maintain(queues=[key], removed=removed_of(runs[:count]))

    def expire_below(self, key: QueueKey, count: int) -> None:
        """A floor above the oldest runs; a list of pending deletions."""
        runs = RunIndex(self.store).runs_of(self.writer.state, key).runs[:count]
        floors = np.array([(0, runs["end_queue_offset"][-1], runs["rows"].sum())], FLOOR_DTYPE)
        version = self.writer.state.version + 1
        gone = PendingDeletion(self.store.now_ms, version, Reason.EXPIRED)
        entries = {f"sets/03/{number}-1-1.sso": gone for number in range(3)}
        name, data = f"pages/deletions-{version:020d}-1-x", encode_list(entries)
        self.store.put_if_absent(name, [data])
        listed = list_of(name, entries, len(data))
        self.maintain(queues=[key], floors=floors, deletions=DeletionChange(added=[listed]))

    def collect(self) -> None:
        """The grace period of 72 hours is over."""
        self.store.now_ms += 80 * HOUR_MS
        with mock.patch("random.SystemRandom", lambda: random.Random(99)):
            plan = run_gc(
                self.store, load(self.store), apply=True, grace_ms=72 * HOUR_MS, clock=self._clock_ms
            )
        assert plan.purge
        self.writer.load()

    def take_over(self, instance: str, kind: str = "run") -> None:
        self.store.now_ms += HOUR_MS
        self.writer = self._claimed(instance, kind, take_over=True)

    def release(self, *garbage: str) -> None:
        self.store.now_ms += 1000
        self.writer.release(pending_deletions=garbage)


def _index(first: int, last: int, epoch: int) -> IndexRef:
    key = index_key(NOW_MS, NOW_MS + last, epoch, f"golden_{first}_{last}")
    return IndexRef(
        key, 1, first, last, NOW_MS, NOW_MS + last, 100, 900, 12, 4, (1, 2, 1, 0), 3, 700 + last, 90
    )


def _written() -> dict[str, bytes]:
    history = _History()
    topics, later_topics = (state_key("topics", 1, n, f"{n:016x}") for n in (1, 2))
    history.append({A: 3, B: 2}, state_objects={"topics": topics})
    history.append({A: 1, BIG: 70_000}, gap={A: 4})
    for number in range(6):
        history.append({A: 2, B: 1 + number}, gap={B: number % 2})
    history.append({B: 1}, state_objects={"topics": later_topics}, settings={UNINDEXED: {"sets/x": [2, 3]}})
    history.maintain(hide=[BIG])
    history.maintain(unhide=[BIG], pending_deletions=["sets/02/attempt-1-7.sso", "sets/02/attempt-1-8.sso"])
    history.maintain(restored=["sets/02/attempt-1-8.sso"])
    one, two = _index(1, 4, 1), _index(5, 8, 1)
    history.maintain(index=IndexChange([one, two]))
    history.maintain(index=IndexChange([_index(1, 8, 1)], [one.key, two.key]), settings={UNINDEXED: {}})
    history.replace_run(A, 0)
    history.expire(B, 2)
    history.expire_below(A, 3)
    for _ in range(8):
        history.append({A: 1, B: 1})
    history.replace_run(A, -1)
    history.collect()
    common = history.writer.state
    for _ in range(4):
        history.append({A: 2, LATE: 1})
    history.release("sets/02/attempt-1-9.sso")
    history.take_over("w2")
    history.append({LATE: 2, A: 1})
    history.writer.append_history(common_version=common.version, phys=common.cursor.phys)
    for _ in range(5):
        history.append({A: 1, LATE: 3})
    history.take_over("b1", "backfill")
    history.writer.append_history(common_version=0, phys=8192)
    for _ in range(6):
        history.append({QueueKey("a", 0, 1): 2, queue("fresh"): 1})
    history.release()
    _check(history)
    return history.store.written


def _check(history: _History) -> None:
    """The history has what it is meant to have."""
    state = load(history.store)
    assert (
        state.log_histories
        and state.indexes
        and state.pending_deletions
        and len(state.gaps)
        and len(state.pages) > 2
    )
    kinds = {key.split("/")[1].split("-")[0] for key in history.store.written if key.startswith("pages/")}
    assert kinds >= {"history"}
    for key, _ in state.queues():
        RunIndex(history.store).runs_of(state, key)


def write(directory: Path) -> None:
    """The catalog as files named by their keys."""
    for key, content in _written().items():
        path = directory / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)


if __name__ == "__main__":
    write(DIRECTORY)
