"""Random histories of commits against a slow, obvious model of what they should lead to."""

from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.catalog.drafts import NOW_MS, RECORD_BYTES, ROW_PHYS, append_draft, at, claim_draft
from tests.sweeps import examples
from tiered.catalog.apply import apply
from tiered.catalog.commit import (
    CommitDraft,
    CommitInvalidError,
    CommitKind,
    decode_root,
    describe,
    encode_root,
)
from tiered.catalog.state import REMOVED_DTYPE, CatalogState, LogCheck
from tiered.model.queue import QueueKey
from tiered.model.tables import GAP_DTYPE, OBJECT_DTYPE, QUEUE_HIDDEN, RUN_DTYPE

TOPICS = st.sampled_from(["a", "b", "c", "d"])
IDS = st.integers(0, 1)


@dataclass
class Life:
    """One generation: every offset it ever held, in order, and what became of it."""

    offsets: list[int] = field(default_factory=list)
    gaps: set[int] = field(default_factory=set)
    expired: set[int] = field(default_factory=set)
    bytes: int = 0
    end: int = 0
    hidden: bool = False


class CatalogMachine(RuleBasedStateMachine):
    """Every rule that should be accepted is, every mutation is refused, and the state is what the model says."""

    def __init__(self) -> None:
        super().__init__()
        self.state = CatalogState()
        self.lives: dict[QueueKey, Life] = {}
        self.phys = 0
        self.attempt = 0
        self.older: list[tuple[CatalogState, dict[str, object]]] = []

    @initialize()
    def begin(self) -> None:
        self.step(claim_draft())

    def step(self, draft: CommitDraft) -> None:
        self.state = apply(self.state, at(self.state, draft))
        # Round trips through a root page change nothing.
        if self.state.version % 3 == 0:
            read = decode_root(encode_root(self.state), source="root")
            assert describe(read) == describe(self.state)
            self.state = read

    def newest(self, topic: str, queue_id: int) -> QueueKey | None:
        lives = [key for key in self.lives if key[:2] == (topic, queue_id)]
        return max(lives, default=None)

    @rule(
        pieces=st.lists(
            st.tuples(
                TOPICS,
                IDS,
                st.integers(1, 4),
                st.sampled_from([0, 0, 0, 3]),
                st.sampled_from([0, 0, 0, 0, 1]),
            ),
            max_size=8,
        ),
        objects=st.integers(1, 3),
        mutation=st.integers(0, 30),
        spot=st.integers(0, 100),
    )
    def append(
        self, pieces: list[tuple[str, int, int, int, int]], objects: int, mutation: int, spot: int
    ) -> None:
        lives = {
            key: replace(life, offsets=[*life.offsets], gaps={*life.gaps}) for key, life in self.lives.items()
        }
        runs, gaps, queues = [], [], []
        phys = self.phys
        for topic, queue_id, rows, lost, reborn in pieces:
            known = [key for key in lives if key[:2] == (topic, queue_id)]
            key = max(known, default=None)
            if key is None or reborn:
                if key is not None:
                    lives[key].hidden = True
                key = QueueKey(topic, queue_id, 0 if key is None else key.generation + 1)
                lives[key] = Life(end=rows * 10 if not reborn else 0)
                lost = 0  # noqa: PLW2901
            life = lives[key]
            if key not in queues:
                queues.append(key)
            index = queues.index(key)
            if lost:
                gaps.append((index, 1, life.end, life.end + lost))
                life.gaps |= set(range(life.end, life.end + lost))
                life.end += lost
            runs.append(
                (
                    index,
                    len(runs) % objects,
                    0,
                    0,
                    0,
                    life.end,
                    life.end + rows,
                    0,
                    rows,
                    life.bytes,
                    rows * RECORD_BYTES,
                    NOW_MS,
                    NOW_MS,
                    phys,
                    phys + rows * ROW_PHYS,
                )
            )
            life.offsets += range(life.end, life.end + rows)
            life.end += rows
            life.bytes += rows * RECORD_BYTES
            life.hidden = False
            phys += rows * ROW_PHYS
        self.attempt += 1
        used = min(objects, len(runs))
        table = np.zeros(used, OBJECT_DTYPE)
        table["key"], table["epoch"] = np.arange(used), self.state.epoch
        draft = CommitDraft(
            CommitKind.APPEND,
            history=1,
            from_phys=self.phys,
            to_phys=phys,
            check=LogCheck(phys, phys, 0),
            queues=queues,
            runs=np.array(runs, RUN_DTYPE),
            objects=table,
            object_keys=[f"o{self.attempt}-{n}" for n in range(used)],
            gaps=np.array(gaps, GAP_DTYPE) if gaps else np.zeros(0, GAP_DTYPE),
            created_ms=NOW_MS,
        )
        self.refuse_mutated(draft, mutation, spot)
        self.older = [*self.older[-4:], (self.state, describe(self.state))]
        self.step(draft)
        self.lives, self.phys = lives, phys

    def refuse_mutated(self, draft: CommitDraft, mutation: int, spot: int) -> None:
        """The same draft with one thing wrong; must be refused and change nothing."""
        runs = draft.runs.copy()
        wrong = draft
        at_run = spot % max(1, len(runs))
        # A queue that is new may begin at any offset: only its continuation is checked.
        fields = {
            1: ("base_byte", 1),
            2: ("min_phys", -1),
            3: ("end_phys", 10**9),
            4: ("rows", 99),
            5: ("byte_count", -(10**6)),
        }
        if mutation in fields and len(runs):
            name, change = fields[mutation]
            if name == "min_phys":
                runs[name][at_run] = draft.from_phys - 1
            else:
                runs[name][at_run] += change
            wrong = replace(draft, runs=runs)
        elif mutation == 6 and self.state.started:
            wrong = replace(draft, from_phys=draft.from_phys - 1)
        elif mutation == 7 and len(runs):
            objects = draft.objects.copy()
            objects["epoch"] += 1
            wrong = replace(draft, objects=objects)
        elif mutation == 8 and len(draft.gaps):
            gaps = draft.gaps.copy()
            gaps["end_queue_offset"][spot % len(gaps)] += 1
            wrong = replace(draft, gaps=gaps)
        elif mutation == 9 and len(runs):
            known = [
                i for i, run in enumerate(runs) if self.state.row_of(draft.queues[run["queue"]]) is not None
            ]
            if known:
                runs["base_queue_offset"][known[0]] -= 1
                wrong = replace(draft, runs=runs)
        if wrong is not draft:
            before = describe(self.state)
            with pytest.raises(CommitInvalidError):
                apply(self.state, at(self.state, wrong))
            assert describe(self.state) == before

    @rule()
    def claim_again(self) -> None:
        if self.state.version % 2:
            self.step(CommitDraft(CommitKind.RELEASE, created_ms=NOW_MS))
        self.step(claim_draft())

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 100), hidden=st.booleans())
    def hide(self, number: int, hidden: bool) -> None:
        key = sorted(self.lives)[number % len(self.lives)]
        draft = CommitDraft(CommitKind.MAINTENANCE, **{"hide" if hidden else "unhide": [key]})  # type: ignore[arg-type]
        self.step(draft)
        self.lives[key].hidden = hidden

    def removal(self, key: QueueKey, first: int, count: int) -> CommitDraft | None:
        row = self.state.row_of(key)
        assert row is not None
        found = self.state.memory_runs_of(row).runs[first : first + count]
        bounds = found["base_queue_offset"][1:] != found["end_queue_offset"][:-1]
        if not len(found) or (first and bounds.any()):
            return None
        removed = np.zeros(len(found), REMOVED_DTYPE)
        for name in ("rows", "base_queue_offset", "end_queue_offset", "version"):
            removed[name] = found[name]
        return CommitDraft(CommitKind.MAINTENANCE, queues=[key], removed=removed, created_ms=NOW_MS)

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 100), first=st.integers(0, 3), count=st.integers(1, 3))
    def compact(self, number: int, first: int, count: int) -> None:
        key = sorted(self.lives)[number % len(self.lives)]
        draft = self.removal(key, first, count)
        if (
            draft is None
            or (draft.removed["base_queue_offset"][1:] != draft.removed["end_queue_offset"][:-1]).any()
        ):
            return
        self.attempt += 1
        made = append_draft(self.state, {key: 1}, keys=[f"c{self.attempt}"])
        runs = made.runs.copy()
        runs["base_queue_offset"] = draft.removed["base_queue_offset"][0]
        runs["end_queue_offset"] = draft.removed["end_queue_offset"][-1]
        runs["rows"] = draft.removed["rows"].sum()
        self.step(replace(draft, runs=runs, objects=made.objects, object_keys=made.object_keys))

    @precondition(lambda self: self.lives)
    @rule(number=st.integers(0, 100), count=st.integers(1, 3))
    def expire(self, number: int, count: int) -> None:
        key = sorted(self.lives)[number % len(self.lives)]
        draft = self.removal(key, 0, count)
        if draft is None:
            return
        self.step(draft)
        life = self.lives[key]
        for removed in draft.removed:
            life.expired |= set(range(int(removed["base_queue_offset"]), int(removed["end_queue_offset"])))

    @invariant()
    def every_queue_is_what_the_model_says(self) -> None:
        assert {key for key, _ in self.state.queues()} == set(self.lives)
        for key, row in self.state.queues():
            life = self.lives[key]
            living = [offset for offset in life.offsets if offset not in life.expired]
            runs = self.state.memory_runs_of(self.state.row_of(key) or 0).runs
            covered = [
                o for run in runs for o in range(int(run["base_queue_offset"]), int(run["end_queue_offset"]))
            ]
            assert covered == living
            gaps = self.state.gaps_of(key)
            lost = [
                o for gap in gaps for o in range(int(gap["begin_queue_offset"]), int(gap["end_queue_offset"]))
            ]
            assert set(lost) <= life.gaps
            low, high = int(row["min_queue_offset"]), int(row["end_queue_offset"])
            assert sorted(covered + lost) == list(range(low, high))
            assert (high, int(row["end_byte"])) == (life.end, life.bytes)
            assert int(row["row_count"]) == len(living)
            assert bool(row["flags"] & QUEUE_HIDDEN) == life.hidden
            assert self.newest(key.topic, key.queue_id) is not None

    @invariant()
    def older_versions_never_change(self) -> None:
        for state, said in self.older:
            assert describe(state) == said


TestCatalogMachine = CatalogMachine.TestCase
TestCatalogMachine.settings = settings(
    max_examples=examples(60), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
