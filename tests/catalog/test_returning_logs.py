"""Logs that are truncated, replaced and put back, two owners, expiry, compaction and collection, on one archive.

Seeded. After every step: what is visible is the broker's log; and no message younger than its grace is both hidden and
unlisted, nor lost.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest

from tests.catalog.collection import run_gc
from tests.catalog.drafts import NOW_MS, ROW_PHYS, log_checks
from tests.catalog.simulated_world import Record, SimulatedCuts, Uploader, World, archived, rows_of
from tests.sweeps import sweep
from tiered.catalog import catalog_reader as reading
from tiered.catalog import catalog_writer
from tiered.catalog.catalog_reader import history_spans, load, read_commit
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.commit import CommitDraft, CommitInvalidError, CommitKind
from tiered.catalog.hidden_history import history_state, list_histories
from tiered.catalog.pages import RunIndex
from tiered.catalog.state import CatalogState
from tiered.model.tables import FLOOR_DTYPE
from tiered.object_store.memory import MemoryStore

DAY_MS = 86_400_000
GRACE_MS = 30 * DAY_MS
Ids = set[int]


class LogWorld(World):
    """Without faults: tests/world has them. ``saved``: disks that may be put back."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.now_ms = NOW_MS
        self.memory = MemoryStore(clock_ms=lambda: self.now_ms)
        self.store = self.memory
        self.saved: list[list[Record]] = []
        self.archived: Ids = set()
        self.expired: Ids = set()
        """In some log history: in another one they may be visible."""
        self.hidden_since: dict[int, int] = {}
        """Or earlier, but after the check before."""
        self.checked_ms = NOW_MS
        self.returned = self.begun_inside = 0
        self.twice: Ids = set()
        """Uploaded while an earlier upload was hidden and listed."""
        self.owners = [LogOwner(self, "master"), LogOwner(self, "slave")]
        self.owner = self.owners[0]

    def step(self) -> None:
        """One event."""
        source, choice = self.source, self.source.random()
        self.log.grow(source.randrange(5))
        if choice < 0.06:
            self.saved.append(list(self.log.records))
        elif choice < 0.10:
            self.log.replace_above(source.randrange(len(self.log.records) + 1))
        elif choice < 0.13:
            self.log.records = []
        elif choice < 0.22 and self.saved:
            self.saved.append(list(self.log.records))
            self.log.records = list(source.choice(self.saved[:-1]))
        elif choice < 0.30:
            self.owner.writer = None
            self.owner = source.choice(self.owners)
        elif choice < 0.34:
            if self.archived:
                self.expire()
        elif choice < 0.46:
            for _ in range(4 if self.archived else 0):
                self.compactor.step()
        elif choice < 0.54:
            self.now_ms += source.randrange(20) * DAY_MS
            run_gc(
                self.memory,
                load(self.memory),
                apply=True,
                grace_ms=3 * DAY_MS,
                diverged_grace_ms=GRACE_MS,
                clock=lambda: self.now_ms,
            )
        self.owner.act()

    def expire(self) -> None:
        """The oldest runs of a queue."""
        state = load(self.memory)
        for key in self.source.sample(state.visible_queues(), min(1, len(state.visible_queues()))):
            chunk, row = RunIndex(self.memory).runs_of(state, key), state.queue(key)
            assert row is not None
            if not len(chunk.runs):
                continue
            last = self.source.randrange(len(chunk.runs))
            gone = chunk.runs[: last + 1]
            floor = int(gone["end_queue_offset"][-1])
            self.expired |= {
                identity for offset, identity in archived(self.memory, state, key) if offset < floor
            }
            names = {chunk.object_keys[int(chunk.objects["key"][run["object"]])] for run in gone}
            floors = np.zeros(1, FLOOR_DTYPE)
            floors[0] = (0, floor, gone["rows"].sum())
            garbage = self.compactor.unneeded(state, key, gone, names)
            draft = CommitDraft(
                CommitKind.MAINTENANCE,
                queues=[key],
                floors=floors,
                pending_deletions=garbage,
                reason="expired",
                created_ms=self.now_ms,
            )
            writer = CatalogWriter(
                self.memory,
                cluster="c",
                broker="b",
                instance="expiry",
                kind="maintenance",
                clock_ms=lambda: self.now_ms,
            )
            writer.maintain(once(draft))

    # -- what must hold ---------------------------------------------------------------------------------------

    def check(self) -> None:
        state = load(self.memory)
        shown = self.identities(state)
        log = {record.identity for record in self.log.records[: state.cursor.phys // ROW_PHYS]}
        assert shown <= log, f"visible, but not in the log: {sorted(shown - log)[:9]}"
        missing = (log & self.archived) - self.expired - shown
        assert not missing, f"in the log, and not visible: {sorted(missing)[:9]}"
        hidden = self.archived - shown - self.expired
        self.hidden_since = {i: self.hidden_since.get(i, self.checked_ms) for i in hidden}
        self.checked_ms = self.now_ms
        listings = list_histories(self.memory, state)
        listed: Ids = set()
        for listing in listings[:-1]:
            if listing.messages:
                listed |= self.identities(history_state(self.memory, state, listing.number), lenient=True)
        young = {i for i, since_ms in self.hidden_since.items() if self.now_ms - since_ms < GRACE_MS}
        assert young <= listed, f"hidden and not listed: {sorted(young - listed)[:9]}"

    def placed(self, state: CatalogState) -> Iterator[tuple[int, int]]:
        """(physical offset, identity) of all visible messages of ``state``."""
        for key in state.visible_queues():
            chunk = RunIndex(self.memory).runs_of(state, key)
            for run in chunk.runs:
                name = chunk.object_keys[int(chunk.objects["key"][run["object"]])]
                yield from ((at, identity) for identity, at in rows_of(self.memory, name, run))

    def identities(self, state: CatalogState, *, lenient: bool = False) -> Ids:
        """Of all visible messages of ``state``. ``lenient``: objects may be deleted."""
        found: Ids = set()
        for key in state.visible_queues():
            row = state.queue(key)
            assert row is not None
            with suppress(*((Exception,) if lenient else ())):
                found |= {
                    i for offset, i in archived(self.memory, state, key) if offset >= row["min_queue_offset"]
                }
        return found


def once(draft: CommitDraft) -> Callable[[CatalogState], CommitDraft | None]:
    """Builds ``draft`` for the first state only."""
    left = [draft]
    return lambda _state: left.pop() if left else None


class LogOwner(Uploader):
    """One sidecar, which chooses a log history as ArchiveOwner does."""

    world: LogWorld

    def act(self) -> None:
        if self.writer is None:
            self.begin()
        assert self.writer is not None
        if not self.world.log.agrees(self.writer.state.cursor.check):
            self.begin()
        state = self.writer.state
        begin = state.cursor.phys // ROW_PHYS
        records = self.world.log.records[begin : begin + self.world.source.randrange(1, 9)]
        draft = self.draft(state, records)
        if draft is not None and records:
            self.writer.append(replace(draft, created_ms=self.world.now_ms))
            sent = {record.identity for record in records}
            self.world.twice |= sent & self.world.hidden_since.keys()
            self.world.archived |= sent

    def begin(self) -> None:
        world = self.world
        self.attempts = 0
        self.writer = writer = CatalogWriter(
            world.memory,
            cluster="c",
            broker="b",
            instance=self.name,
            kind="run",
            clock_ms=lambda: world.now_ms,
            limits=world.limits,
            random=random.Random(world.source.random()),
            wait=lambda _: None,
        )
        writer.load()
        writer.claim(take_over=True)
        state = writer.state
        if not state.started:
            return
        has_grown = not state.log_histories or state.cursor.phys > state.log_histories[-1].begin_phys
        if world.log.agrees(state.cursor.check) and state.cursor.check.end_phys and has_grown:
            return
        present = next(
            (
                (version, to_phys)
                for version, check, to_phys in log_checks(world.memory, state)
                if check.end_phys and world.log.agrees(check)
            ),
            (0, 0),
        )
        best = max(self.elsewhere(state), default=(0, 0))
        if best[0] > present[1]:
            with suppress(CommitInvalidError):
                writer.return_to(best[1])
                world.returned += 1
                return
        if not (world.log.agrees(state.cursor.check) and present[1] == state.cursor.phys):
            self.diverge(writer, *present)

    def diverge(self, writer: CatalogWriter, version: int, phys: int) -> None:
        """At the last record that log and archive have in common: where a commit ends, or inside the next one."""
        world, state = self.world, writer.state
        end = phys
        for at, identity in sorted((at, i) for at, i in world.placed(state) if at >= phys):
            if at >= world.log.end_phys or world.log.records[at // ROW_PHYS].identity != identity:
                break
            end = at + ROW_PHYS
        if end == phys:
            writer.append_history(common_version=version, phys=phys)
            return
        above = [found for found, _, to_phys in log_checks(world.memory, state) if to_phys > phys]
        world.begun_inside += 1
        common = above[-1] - 1
        if load(world.memory, version=common).cursor.phys > end:
            is_first = history_spans(state)[-1][0] == 1
            common = version or (1 if is_first else 0)
            end = end if common else phys
        writer.append_history(common_version=common, phys=end, check=world.log.check(end) if common else None)

    def elsewhere(self, state: CatalogState) -> list[tuple[int, int]]:
        """(physical end, version) of commits of any history that the log holds."""
        found = []
        for version in range(1, state.version + 1):
            draft = read_commit(self.world.memory, version).draft
            moved = draft.kind == CommitKind.APPEND and draft.to_phys > draft.from_phys
            if moved and draft.check.end_phys and self.world.log.agrees(draft.check):
                found.append((draft.to_phys, version))
        return found


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small reads are not worth a thread; and objects are JSON."""
    monkeypatch.setattr(reading, "READ_THREADS", 1 << 30)
    monkeypatch.setattr(catalog_writer, "RunCuts", SimulatedCuts)


@pytest.mark.parametrize("seed", sweep(range(8), fast=[3]))
def test_no_young_message_is_hidden_and_unlisted_and_none_is_lost(seed: int) -> None:
    world = LogWorld(seed)
    for step in range(120):
        world.step()
        if step % 4 == 3:  # what is lost stays lost
            world.check()
    assert len(load(world.memory).log_histories) > 2
