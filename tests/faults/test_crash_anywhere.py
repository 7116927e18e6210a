"""The writer dies at any request, before or after its effect; the next one continues from the bucket alone.

A proxy between us and the store that sends a PUT twice: the answer to the second says that the name is taken.
"""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tests.faults.crashing_store import CrashError, CrashingStore
from tests.sweeps import sweep
from tiered.archive.verify import verify_archive
from tiered.errors import AlreadyExistsError
from tiered.formats.keys import archive_prefix
from tiered.object_store.interface import Body
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore
from tiered.settings.sections import OffloadSettings

SETTINGS = OffloadSettings(batch_bytes=512 << 10, split_bytes=128 << 10, block_bytes=64 << 10, root_every=3)


@pytest.mark.parametrize("step", sweep([1, 8], fast=[8]))
@pytest.mark.parametrize("after_effect", [False, True])
def test_a_crash_at_each_request_loses_and_repeats_nothing(
    after_effect: bool, step: int, real_store: Callable[[str], Path]
) -> None:
    """The fast tests crash at every eighth request, others before and after its effect."""
    directory = real_store("F")
    clean = CrashingStore(MemoryStore("memory://clean"), 1 << 60, after_effect=False)
    whole = backfill(directory / "store", clean, settings=SETTINGS)
    for crash_at in range(1 + 2 * after_effect * (step > 1), clean.requests + 1, step):
        memory = MemoryStore(f"memory://crash-{after_effect}-{crash_at}")
        store = CrashingStore(memory, crash_at, after_effect=after_effect)
        try:
            backfill(directory / "store", store, settings=SETTINGS)
        except CrashError:
            pass
        else:
            # Batch boundaries depend on threads: a run may need a request or two fewer than the clean one.
            assert store.requests < crash_at, "the crash was swallowed"
        backfill(directory / "store", memory, settings=SETTINGS)
        report = verify_archive(PrefixedStore(memory, archive_prefix(CLUSTER, BROKER)))
        assert report.anomalies == [], crash_at
        if crash_at % (12 * step) < step:
            assert check_against_truth(memory, directory, "F") > 400
    assert whole.messages > 1000


class TwiceStore(MemoryStore):
    """Stores what is put, and often says that it was there."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self._random = random.Random(7)
        self.taken: list[str] = []

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        super().put_if_absent(key, body, timeout_s=timeout_s)
        if self._random.random() < 0.3:
            self.taken.append(key)
            raise AlreadyExistsError(f"{key} exists")


def test_own_puts_that_were_sent_twice_neither_end_nor_repeat_anything(
    real_store: Callable[[str], Path],
) -> None:
    store = TwiceStore("memory://twice")
    backfill(real_store("B") / "store", store)
    kinds = {key.split("/")[2] for key in store.taken}
    assert kinds >= {"catalog", "data", "sets"}
    assert check_against_truth(store, real_store("B"), "B") > 1000
    found = verify_archive(PrefixedStore(store, archive_prefix(CLUSTER, BROKER)), depth="full")
    assert found.anomalies == []
    unknown = [key for key in found.leftovers if not key.startswith("state/")]
    assert unknown == [], "what was abandoned is known to be garbage"
