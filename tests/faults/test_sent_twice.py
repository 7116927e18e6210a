"""A proxy between us and the store that sends a PUT twice: the answer to the second says that the name is taken."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.archive_check import check_against_truth
from tests.end_to_end.offloading import BROKER, CLUSTER, backfill
from tiered.archive.verify import verify_archive
from tiered.errors import AlreadyExistsError
from tiered.formats.keys import archive_prefix
from tiered.object_store.interface import Body
from tiered.object_store.memory import MemoryStore
from tiered.object_store.prefixed import PrefixedStore


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
