"""Consume queue stores against a dictionary, in any order of calls."""

import shutil
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from tests.consume_queue.stores import FakeLog, opened, units_of
from tests.sweeps import examples
from tiered.consume_queue.index import UNIT_DTYPE
from tiered.consume_queue.store import ConsumeQueueStore, StoreKind
from tiered.model.tables import Table

QUEUES = st.sampled_from([("t", 0), ("t", 1), ("%LMQ%t", 0), ("\x01\x02", 0)])
SIZE = 10
_Key = tuple[str, int]


class Model:
    """What a store holds: by queue, its end and its units by offset."""

    def __init__(self) -> None:
        self.ends: dict[_Key, int] = {}
        self.units: dict[_Key, dict[int, tuple[int, int]]] = {}

    def put(self, key: _Key, units: Table) -> None:
        its_units = self.units.setdefault(key, {})
        for offset, phys, code in zip(
            *(units[name].tolist() for name in ("queue_offset", "phys", "tags_code")), strict=True
        ):
            its_units[offset] = phys, code
        self.ends[key] = max(its_units) + 1

    def delete(self, key: _Key) -> None:
        self.ends.pop(key, None)
        self.units.pop(key, None)

    def truncate(self, phys: int) -> None:
        for key, its_units in list(self.units.items()):
            if not any(unit[0] >= phys for unit in its_units.values()):
                continue
            kept = {offset: unit for offset, unit in its_units.items() if unit[0] < phys}
            first = min(its_units)
            if not kept and first == 0:
                self.delete(key)
            else:
                self.units[key], self.ends[key] = kept, max(kept) + 1 if kept else first


class StoreMachine(RuleBasedStateMachine):
    """Both kinds get the same calls."""

    def __init__(self) -> None:
        super().__init__()
        self.log, self.model, self.phys = FakeLog(), Model(), 1000
        self.log.min_phys = 2
        self.directory = Path(tempfile.mkdtemp())
        self.stores = [self.open(kind) for kind in StoreKind]

    def open(self, kind: StoreKind) -> ConsumeQueueStore:
        (self.directory / kind.value).mkdir(exist_ok=True)
        return opened(self.directory / kind.value, kind, self.log)

    @rule(key=QUEUES, count=st.integers(1, 25), again=st.integers(0, 3), first=st.integers(0, 45))
    def put(self, key: _Key, count: int, again: int, first: int) -> None:
        """At the end of a queue, the last units perhaps once more; or anywhere in a new one."""
        its_units = self.model.units.get(key, {})
        end = self.model.ends.get(key, first)
        again = min(again, sum(offset < end for offset in its_units))
        units = units_of(end, count, self.phys, size=SIZE)
        self.phys += SIZE * count
        old = np.zeros(again, UNIT_DTYPE)
        for row, offset in enumerate(range(end - again, end)):
            old[row] = (its_units[offset][0], SIZE, its_units[offset][1], offset, 1, 0)
        units = np.concatenate([old, units])
        self.model.put(key, units)
        for store in self.stores:
            store.put(*key, units)

    @rule(key=QUEUES, end=st.integers(1, 45))
    def put_empty_queue(self, key: _Key, end: int) -> None:
        self.model.delete(key)
        self.model.ends[key] = end
        for store in self.stores:
            store.put_empty_queue(*key, end)

    @rule(key=QUEUES)
    def delete_queue(self, key: _Key) -> None:
        self.model.delete(key)
        for store in self.stores:
            store.delete_queue(*key)

    @rule(share=st.floats(0, 1))
    def truncate(self, share: float) -> None:
        phys = 1000 + int(share * (self.phys - 1000))
        self.model.truncate(phys)
        for store in self.stores:
            store.truncate(phys)

    @rule()
    def reopen(self) -> None:
        for number, kind in enumerate(StoreKind):
            self.stores[number].flush(self.phys)
            self.stores[number].close()
            self.stores[number] = self.open(kind)

    @invariant()
    def equal(self) -> None:
        for store in self.stores:
            assert {(queue.topic, queue.queue_id) for queue in store.queues()} == set(self.model.ends)
            for key, end in self.model.ends.items():
                its_units = self.model.units.get(key, {})
                assert store.max_offset(*key) == end
                assert store.min_offset(*key) == min(its_units, default=end)
                found = store.units(*key, min(its_units, default=end), 1000)
                assert found["queue_offset"].tolist() == sorted(its_units)
                assert found["phys"].tolist() == [its_units[offset][0] for offset in sorted(its_units)]

    def teardown(self) -> None:
        for store in self.stores:
            store.close()
        shutil.rmtree(self.directory)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(max_examples=examples(30), stateful_step_count=20, deadline=None)
