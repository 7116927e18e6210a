"""Seeded runs of many readers over a slow store that fails, damages and reorders: right bytes or a typed error.

Whatever happens: the budget holds, no error is cached, and when all is over nothing is left behind.
"""

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fetcher.blocks.budget import MemoryShortError
from fetcher.io.request_scheduler import Priority
from tests.fetcher.segments import segment
from tests.fetcher.source_bench import SourceBench
from tests.sweeps import examples
from tiered.errors import CorruptionError, ThrottledError, TieredError, UnansweredError, UnavailableError
from tiered.formats.segment_index import SegmentIndex

OBJECTS = [
    segment(f"data/{name}.so", blocks=16, block_bytes=8 * 1024, noise=noise)
    for name, noise in (("a", 0.3), ("b", 0.9), ("c", 1.0))
]
TIGHT = {"memory_bytes": 340 * 1024, "cache_bytes": 200 * 1024, "index_cache_bytes": 64 * 1024}


class Run:
    """One seeded run."""

    def __init__(self, seed: int, *, failing: float, damaging: float, disk: Path | None = None) -> None:
        self.rng = rng = random.Random(seed)
        self.bench = SourceBench(
            OBJECTS,
            disk=disk,
            disk_cache_bytes=100_000,
            piece_bytes=64 * 1024,
            user_requests=3,
            prefetch_requests=2,
            background_requests=1,
            read_expiry_ms=500,
            unread_expiry_ms=3000,
            memory_wait_ms=1000,
            bytes_per_s=rng.choice([0, 0, 2_000_000]),
            **{**TIGHT, "cache_bytes": rng.choice([0, 20, 100, 200]) * 1024},
        )
        self._failing, self._damaging = failing, damaging
        self.errors: set[type[TieredError]] = set()
        self.answers = 0
        submit = self.bench.reader.submit

        def unsteady(key: str, offset: int, length: int) -> Any:
            self.bench.reader.latency_s = rng.choice([0.001, 0.02, 0.3])
            if rng.random() < self._failing:
                self.bench.reader.failures[len(self.bench.reader.gets)] = UnansweredError(f"{key} lost")
            return submit(key, offset, length)

        self.bench.reader.submit = unsteady  # type: ignore[method-assign]
        self.bench.reader.damage = self._damage

    def _damage(self, key: str, offset: int, data: bytes) -> bytes:
        if self.rng.random() >= self._damaging:
            return data
        at = self.rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ (1 << self.rng.randrange(8))]) + data[at + 1 :]

    def check_budget(self) -> None:
        assert self.bench.budget.charged_bytes <= self.bench.budget.total_bytes

    async def read(self, priority: Priority) -> None:
        item = self.rng.choice(OBJECTS)
        try:
            index: SegmentIndex = await self.bench.source.index(
                item.key, len(item.content), item.tail_bytes, priority
            )
            first = self.rng.randrange(len(index.blocks))
            end = min(len(index.blocks), first + self.rng.choice([1, 1, 2, 5]))
            blocks = await self.bench.source.blocks_at(index, 0, range(first, end), priority)
        except TieredError as error:
            self.errors.add(type(error))
            return
        self.answers += 1
        self.check_budget()
        assert [block.tobytes() for block in blocks] == [item.block(number) for number in range(first, end)]

    def reader(self) -> None:
        coroutine = self.read(
            self.rng.choice([Priority.USER, Priority.USER, Priority.PREFETCH, Priority.BACKGROUND])
        )
        if self.rng.random() < 0.1:  # one that is cancelled at its first wait
            try:
                coroutine.send(None)
            except StopIteration:
                return
            self.bench.clock.call_at(self.bench.clock.time_s + self.rng.random(), coroutine.close)
        else:
            self.bench.clock.start(coroutine)

    def go(self, readers: int) -> None:
        for _ in range(readers):
            self.bench.clock.call_at(self.rng.random() * readers / 40, self.reader)
        self.bench.clock.run()
        self.check_budget()
        assert self.bench.budget.peak_bytes <= self.bench.budget.total_bytes
        self.bench.check_at_rest()


@settings(max_examples=examples(25))
@given(st.integers(0, 1 << 32))
def test_readers_of_a_failing_store_get_the_truth_or_a_typed_error(seed: int) -> None:
    run = Run(seed, failing=0.1, damaging=0.05)
    run.go(120)
    assert run.errors <= {
        UnansweredError,
        ThrottledError,
        MemoryShortError,
        CorruptionError,
        UnavailableError,
    }
    assert run.answers > 20


@settings(max_examples=examples(10))
@given(st.integers(0, 1 << 32))
def test_a_store_that_neither_fails_nor_damages_gives_no_such_error(seed: int) -> None:
    run = Run(seed, failing=0, damaging=0)
    run.go(120)
    assert run.errors <= {MemoryShortError}
    assert run.bench.source.statistics().corrupt_fetched == 0


@pytest.mark.parametrize("seed", range(4))
def test_runs_share_a_disk_and_the_same_seed_does_the_same(tmp_path: Path, seed: int) -> None:
    first = Run(seed, failing=0.1, damaging=0.05, disk=tmp_path / "x")
    first.go(100)
    same = Run(seed, failing=0.1, damaging=0.05, disk=tmp_path / "y")
    same.go(100)
    assert first.bench.reader.gets == same.bench.reader.gets
    assert first.bench.source.statistics() == same.bench.source.statistics()
    again = Run(seed + 100, failing=0.1, damaging=0.05, disk=tmp_path / "x")
    again.go(100)
    assert again.bench.source.statistics().disk_hits > 0


@pytest.mark.soak
def test_thousands_of_seeds() -> None:
    for seed in range(2000):
        Run(seed, failing=0.1, damaging=0.05).go(150)
