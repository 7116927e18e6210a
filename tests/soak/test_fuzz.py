"""Decoders and bytes that are not what they should be: a typed error or the truth, in bounded memory.

A slice runs with the fast tests, the same cases each time; `make soak` runs as many as are claimed, other ones each
time. A failure prints the case.
"""

from __future__ import annotations

import time
import tracemalloc
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.soak.fuzz_mutations import Mutation
from tests.soak.fuzz_subjects import Subject, subjects
from tests.soak.results import knob, limits, publish
from tiered.errors import TieredError

FAST_CASES = 40
CASES = knob("FUZZ_CASES", 130_000)
STORE = "F"
NUMBER = st.one_of(st.integers(0, 255), st.integers(0, (1 << 64) - 1))
MUTATIONS = st.lists(st.builds(Mutation, st.integers(0, 7), NUMBER, NUMBER), min_size=1, max_size=5)
MEMORY_BYTES = 4 << 20
"""For inputs of some kilobytes."""
MEASURED_EVERY = 8
"""Tracing memory makes everything many times slower."""


class Fuzzer:
    """Runs cases of one subject and counts what came of them."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._truths: list[Any] = []
        self._count = 0
        self.outcomes: Counter[str] = Counter()
        self.peak_bytes = 0

    def run(self, cases: int, *, same_each_time: bool) -> None:
        """So many; raises what a case shows."""
        phases = [Phase.explicit, Phase.generate, Phase.shrink]

        @settings(
            max_examples=cases,
            deadline=None,
            database=None,
            derandomize=same_each_time,
            phases=phases,
            suppress_health_check=list(HealthCheck),
        )
        @given(st.integers(0, len(self._subject.samples) - 1), MUTATIONS)
        def check(number: int, mutations: list[Mutation]) -> None:
            self._check(number, mutations)

        check()

    def _check(self, number: int, mutations: list[Mutation]) -> None:
        subject = self._subject
        data = subject.change(subject.samples, number, mutations)
        if subject.is_checked and not self._truths:
            self._truths = [subject.decode(*sample) for sample in enumerate(subject.samples)]
        self._count += 1
        is_measured = self._count % MEASURED_EVERY == 0
        if is_measured:
            tracemalloc.start()
        try:
            found = subject.decode(number, data)
        except TieredError as error:
            self.outcomes[type(error).__name__] += 1
        else:
            self.outcomes["decoded"] += 1
            # Of a whole other object it says that object's truth: what belongs where is the catalog's to say.
            assert not subject.is_checked or found in self._truths, "damaged bytes were believed"
        finally:
            peak_bytes = tracemalloc.get_traced_memory()[1] if is_measured else 0
            tracemalloc.stop()
        self.peak_bytes = max(self.peak_bytes, peak_bytes)
        assert peak_bytes <= MEMORY_BYTES, f"{peak_bytes} bytes for {len(data)}"


NAMES = [
    "container",
    "container, resealed",
    "commit",
    "commit, resealed",
    "page, resealed",
    "root page, resealed",
    "deletion list, resealed",
    "catalog, resealed",
    "catalog of every commit, resealed",
    "segment",
    "index file",
    "record",
    "fastjson",
    "remoting frame",
    "remoting frame, odd header",
]
SHARE = -(-CASES // len(NAMES))


def fuzzer_of(name: str, real_store: Callable[[str], Path]) -> Fuzzer:
    """The subject with this name."""
    (subject,) = [found for found in subjects(real_store(STORE) / "store") if found.name == name]
    return Fuzzer(subject)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_bytes(name: str, real_store: Callable[[str], Path]) -> None:
    fuzzer = fuzzer_of(name, real_store)
    fuzzer.run(FAST_CASES, same_each_time=True)
    assert fuzzer.outcomes.total() >= FAST_CASES


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("name", NAMES)
def test_very_many_damaged_bytes(name: str, real_store: Callable[[str], Path]) -> None:
    began_s = time.monotonic()
    fuzzer = fuzzer_of(name, real_store)
    fuzzer.run(SHARE, same_each_time=False)
    cases, decoded = fuzzer.outcomes.total(), fuzzer.outcomes["decoded"]
    publish(
        f"damaged bytes, {name}",
        missed=limits(enough_cases=cases >= SHARE, some_were_refused=decoded < cases),
        cases=cases,
        decoded=decoded,
        refused=cases - decoded,
        peak_kib=fuzzer.peak_bytes >> 10,
        seconds=round(time.monotonic() - began_s),
    )
