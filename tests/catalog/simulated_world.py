"""The log, a writer's drafts and a compactor, of objects that are JSON: for simulations, seeded and single-threaded."""

from __future__ import annotations

import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.catalog.drafts import NOW_MS, ROW_PHYS, small_limits
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitInvalidError, CommitKind
from tiered.catalog.pages import RunIndex, living_runs
from tiered.catalog.run_cuts import RunCuts
from tiered.catalog.state import REMOVED_DTYPE, UNKNOWN_OFFSET, CatalogState, LogCheck
from tiered.errors import UnavailableError
from tiered.formats.keys import data_key, set_key
from tiered.formats.segment import RowTable
from tiered.model.queue import QueueKey
from tiered.model.tables import OBJECT_DTYPE, RUN_DTYPE
from tiered.object_store.interface import ObjectStore
from tiered.object_store.memory import MemoryStore

QUEUES = 5
Rows = list[list[int]]
"""[identity, physical offset] of each."""


@dataclass(frozen=True)
class Record:
    """One message: ``identity`` is unique over all lines of the log."""

    identity: int
    queue: int
    offset: int


class BrokerLog:
    """The commitlog: every record takes ROW_PHYS. May be replaced above any point."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._made = 0
        self.records: list[Record] = []

    def grow(self, count: int) -> None:
        for _ in range(count):
            queue = self._source.randrange(QUEUES)
            offset = sum(record.queue == queue for record in self.records)
            self.records.append(Record(self._made, queue, offset))
            self._made += 1

    def replace_above(self, count: int) -> None:
        del self.records[count:]

    @property
    def end_phys(self) -> int:
        return len(self.records) * ROW_PHYS

    def check(self, end_phys: int) -> LogCheck:
        begin = max(0, end_phys // ROW_PHYS - 3)
        said = json.dumps([record.identity for record in self.records[begin : end_phys // ROW_PHYS]])
        return LogCheck(begin * ROW_PHYS, end_phys, zlib.crc32(said.encode()))

    def agrees(self, check: LogCheck) -> bool:
        is_empty = check.begin_phys == check.end_phys
        return check.end_phys <= self.end_phys and (is_empty or self.check(check.end_phys) == check)


class Uploader:
    """One sidecar: claims, checks the log history, ships ranges. Loses its memory when it dies."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.attempts = 0
        self.writer: CatalogWriter | None = None
        self.pending_deletions: list[str] = []

    def _attempt(self) -> int:
        self.attempts += 1
        return self.attempts

    def draft(self, state: CatalogState, records: list[Record]) -> CommitDraft | None:
        """Objects put, each under a new key until one is acknowledged; runs planned from the catalog's ends."""
        tails = {(key.topic, key.queue_id): (key, row) for key, row in state.current_queues()}
        queues: list[QueueKey] = []
        runs = []
        contents: list[Rows] = []
        by_queue: dict[int, list[Record]] = {}
        for record in records:
            by_queue.setdefault(record.queue, []).append(record)
        for number, mine in by_queue.items():
            key, row = tails.get((f"t{number}", 0), (QueueKey(f"t{number}", 0, 0), None))
            end_byte = 0 if row is None else int(row["end_byte"])
            if row is not None and int(row["end_queue_offset"]) != UNKNOWN_OFFSET:
                assert int(row["end_queue_offset"]) == mine[0].offset, (
                    "the uploader would see a gap or a recreation"
                )
            phys = [state.cursor.phys + records.index(record) * ROW_PHYS for record in mine]
            # One run for each object of the commit that holds records of the queue.
            queues.append(key)
            runs.append(
                (
                    len(queues) - 1,
                    0,
                    len(runs),
                    0,
                    0,
                    mine[0].offset,
                    mine[-1].offset + 1,
                    0,
                    len(mine),
                    end_byte,
                    len(mine) * ROW_PHYS,
                    NOW_MS,
                    NOW_MS,
                    phys[0],
                    phys[-1] + ROW_PHYS,
                )
            )
            contents.append([[record.identity, at] for record, at in zip(mine, phys, strict=True)])
        table = np.array(runs, RUN_DTYPE) if runs else np.zeros(0, RUN_DTYPE)
        alone = bool(runs) and self.world.source.random() < 0.5
        groups = (
            [[0], list(range(1, len(runs)))]
            if alone and len(runs) > 1
            else [list(range(len(runs)))]
            if runs
            else []
        )
        objects = np.zeros(len(groups), OBJECT_DTYPE)
        keys = []
        for number, group in enumerate(groups):
            table["object"][group] = number
            body = json.dumps([contents[index] for index in group]).encode()
            table["ordinal"][group] = np.arange(len(group))
            base = int(table["base_queue_offset"][group[0]])
            named = queues[group[0]] if len(group) == 1 else None
            key = self.put(
                lambda epoch, attempt, named=named, base=base: (  # type: ignore[misc]
                    set_key(f"{state.cursor.phys:020d}", epoch, attempt)
                    if named is None
                    else data_key(named, base, epoch, attempt)
                ),
                state.epoch,
                body,
            )
            if key is None:
                return None
            objects[number]["key"], objects[number]["epoch"] = number, state.epoch
            keys.append(key)
        to_phys = state.cursor.phys + len(records) * ROW_PHYS
        return CommitDraft(
            CommitKind.APPEND,
            history=state.cursor.history,
            from_phys=state.cursor.phys,
            to_phys=to_phys,
            check=self.world.log.check(to_phys),
            queues=queues,
            runs=table,
            objects=objects,
            object_keys=keys,
            pending_deletions=list(self.pending_deletions),
            created_ms=NOW_MS,
        )

    def put(self, name: Callable[[int, int], str], epoch: int, body: bytes) -> str | None:
        """NonStopWrite: never ask about an attempt, never use its key again."""
        for _ in range(20):
            key = name(epoch, self._attempt())
            try:
                self.world.store.put_if_absent(key, [body])
                return key
            except UnavailableError:
                self.pending_deletions.append(key)
                self.world.while_waiting(0)
        return None


class Compactor:
    """Joins neighbouring runs of a queue; an actor of the writer's epoch who may find its delta void."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.attempts = 1_000_000
        self.joined = self.void = 0

    def step(self) -> None:
        memory, source = self.world.memory, self.world.source
        state = load(memory)
        index = RunIndex(memory)
        queues = [key for key, row in state.queues() if row["row_count"]]
        if not queues:
            return
        key = source.choice(queues)
        chunk = index.runs_of(state, key)
        first = source.randrange(len(chunk.runs))
        runs = chunk.runs[first : first + source.randrange(1, 4)]
        names = [chunk.object_keys[int(chunk.objects["key"][run["object"]])] for run in runs]
        parts = [rows_of(memory, name, run) for name, run in zip(names, runs, strict=True)]
        self.attempts += 1
        name = data_key(key, int(runs[0]["base_queue_offset"]), state.epoch, self.attempts)
        memory.put_if_absent(name, [json.dumps([[row for part in parts for row in part]]).encode()])
        removed = np.zeros(len(runs), REMOVED_DTYPE)
        for field in ("rows", "base_queue_offset", "end_queue_offset", "version"):
            removed[field] = runs[field]
        made = runs[:1].copy()
        made["object"], made["ordinal"], made["first_row"] = 0, 0, 0
        for field in ("rows", "byte_count"):
            made[field] = runs[field].sum()
        for field in ("end_queue_offset", "end_phys"):
            made[field] = runs[field][-1]
        objects = np.zeros(1, OBJECT_DTYPE)
        objects["epoch"] = state.epoch
        draft = CommitDraft(
            CommitKind.MAINTENANCE,
            queues=[key],
            runs=made,
            removed=removed,
            objects=objects,
            object_keys=[name],
            pending_deletions=self.unneeded(state, key, runs, set(names)),
            created_ms=NOW_MS,
        )
        self.world.while_waiting(
            0
        )  # the catalog may move on: the delta is checked against what is there then
        writer = CatalogWriter(
            self.world.store,
            cluster="c",
            broker="b",
            instance="compactor",
            kind="maintenance",
            clock_ms=lambda: NOW_MS,
            random=random.Random(source.random()),
            wait=self.world.while_waiting,
        )
        tried: list[int] = []

        def build(newest: CatalogState) -> CommitDraft | None:
            tried.append(newest.version)
            return draft if len(tried) < 10 else None

        try:
            writer.maintain(build)
            self.joined += 1
        except CommitInvalidError:
            self.void += 1
            memory.delete([name])  # no other actor knows it

    def unneeded(self, state: CatalogState, key: QueueKey, runs: Any, names: set[str]) -> list[str]:
        """Which of the objects ``names`` hold no other living run."""
        bases = set(runs["base_queue_offset"].tolist())
        needed = set()
        for page in living_runs(RunIndex(self.world.memory), state):
            for run in page.chunk.runs:
                if page.queues[int(run["queue"])] != key or int(run["base_queue_offset"]) not in bases:
                    needed.add(page.chunk.object_keys[int(page.chunk.objects["key"][run["object"]])])
        return sorted(names - needed)


class World:
    """All actors, the log, the store, and who goes next."""

    def __init__(self, seed: int) -> None:
        self.source = random.Random(seed)
        self.log = BrokerLog(self.source)
        self.memory = MemoryStore(clock_ms=lambda: NOW_MS)
        self.store = self.memory
        self.compactor = Compactor(self)
        self.limits = small_limits(
            spill_deletions=6,
            spill_runs=25,
            page_runs_max=20,
            pack_bytes_max=4_000,
        )

    def while_waiting(self, seconds: float) -> None:
        """No waiting."""


def rows_of(store: ObjectStore, name: str, run: np.void) -> Rows:
    """The rows of ``run`` (RUN_DTYPE) of the object ``name``."""
    first = int(run["first_row"])
    found: Rows = json.loads(store.get(name))[int(run["ordinal"])][first : first + int(run["rows"])]
    return found


class SimulatedCuts(RunCuts):
    """Cuts of runs in objects that are JSON."""

    def rows(self, key: str, place: np.void, queue: QueueKey, run: np.void) -> RowTable:
        found = rows_of(self._store, key, run)
        phys = np.array([at for _, at in found], np.int64)
        ones, offsets = np.ones(len(found), np.int64), int(run["base_queue_offset"]) + np.arange(len(found))
        sizes, stamps = ones * ROW_PHYS, ones * NOW_MS
        return RowTable(phys * 0, sizes, ones, stamps, phys, offsets, ones, ones * 0, -ones, -ones)


def archived(store: MemoryStore, state: CatalogState, key: QueueKey) -> list[tuple[int, int]]:
    """(offset, identity) of every visible record of a queue, from the objects themselves."""
    chunk = RunIndex(store).runs_of(state, key)
    found = []
    end_byte = None
    for run in chunk.runs:
        name = chunk.object_keys[int(chunk.objects["key"][run["object"]])]
        identities = [identity for identity, _ in rows_of(store, name, run)]
        found += list(
            zip(range(int(run["base_queue_offset"]), int(run["end_queue_offset"])), identities, strict=True)
        )
        assert end_byte in (None, int(run["base_byte"]))
        end_byte = int(run["base_byte"] + run["byte_count"])
    return found
