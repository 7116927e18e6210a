"""A compaction that kills itself with SIGKILL at a chosen moment; run by test_kill_compaction.

usage: killed_compaction.py URL SPOOL MOMENT
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from rocketmq_tiered.maintenance.compaction_round import plan_rounds
from tests.archive.archive_builder import NOW_MS
from tests.catalog.collection import run_gc
from tests.faults.killed_child import Countdown, die
from tests.maintenance.compaction_scene import EVERYTHING, a_round
from tests.maintenance.compaction_scene import LIMITS as SCENE_LIMITS
from tiered.catalog.catalog_reader import load
from tiered.catalog.catalog_writer import CatalogWriter
from tiered.catalog.writer_limits import CatalogLimits
from tiered.object_store.interface import Body, ObjectStore, Piece, S3Credentials, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.object_store.wrapper import StoreWrapper
from tiered.settings.sections import ObjectStoreSettings

LIMITS = replace(SCENE_LIMITS, split_bytes=2000)
"""Each queue gets an object."""
MERGE = "while the owner merges pages"
MOMENTS: dict[str, tuple[str, str, int, bool]] = {
    "after the intent": ("put", "catalog/", 1, True),
    "amid reading": ("get_range", "sets/", 5, True),
    "after two outputs": ("compose", "", 2, True),
    "after the page": ("put", "pages/", 1, True),
    "before the commit": ("put", "catalog/", 2, False),
    "the commit's reply is lost": ("put", "catalog/", 2, True),
    "after the commit": ("put", "catalog/", 3, False),
    MERGE: ("put", "pages/runs", 1, True),
    "before sources are deleted": ("delete", "", 1, False),
    "amid the deletion of sources": ("delete", "", 1, True),
}
"""Moment -> request, prefix of its key, the how manieth, and whether it takes effect before the process dies: of a
deletion, for half of the keys."""


class DyingStore(StoreWrapper):
    """Forwards everything; dies before or after the n-th request of a kind."""

    def __init__(self, store: ObjectStore, moment: str) -> None:
        super().__init__(store)
        self._operation, self._prefix, count, self._is_after = MOMENTS[moment]
        self._countdown = Countdown(count)

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        self._around("put", key, lambda: self._store.put_if_absent(key, body, timeout_s=timeout_s))

    def compose_if_absent(self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None) -> None:
        self._around("compose", key, lambda: self._store.compose_if_absent(key, pieces, timeout_s=timeout_s))

    def get_range(self, key: str, offset: int, length: int) -> bytes:
        return self._around("get_range", key, lambda: self._store.get_range(key, offset, length))

    def delete(self, keys: Sequence[str]) -> None:
        some = keys[: len(keys) // 2] if self._operation == "delete" and self._is_after else keys
        self._around("delete", "", lambda: self._store.delete(some))

    def _around(self, operation: str, key: str, act: Callable[[], object]) -> object:
        is_hit = operation == self._operation and key.startswith(self._prefix)
        if is_hit and not self._is_after:
            self._countdown.strike()
        found = act()
        if is_hit and self._is_after:
            self._countdown.strike()
        return found


def main(url: str, spool: str, moment: str) -> None:
    """Compact until nothing is left to do, and collect garbage; or until the moment."""
    settings = ObjectStoreSettings(
        endpoint_url=os.environ["TIERED_OBJECT_STORE__ENDPOINT_URL"], region=os.environ["AWS_DEFAULT_REGION"]
    )
    credentials = S3Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    plain = open_store(url, StoreOptions(settings, credentials))
    store: ObjectStore = MergedBeside(plain) if moment == MERGE else DyingStore(plain, moment)
    while True:
        state = load(store)
        planned = next(plan_rounds(store, state, LIMITS, before_version=EVERYTHING), None)
        if planned is None:
            break
        a_round(store, state, planned, Path(spool))
        if moment == "after the commit":
            die()
    run_gc(store, load(store), apply=True, grace_ms=0, clock=lambda: store.clock_ms() + 1500)


class MergedBeside(StoreWrapper):
    """The archive's owner merges pages once the round has put an output, and dies after the first page."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        limits = CatalogLimits(root_every=64, page_runs_max=9, merge_sequences=2, merge_spills=2)
        self._owner = CatalogWriter(
            DyingStore(store, MERGE),
            cluster="cluster",
            broker="broker",
            instance="test",
            kind="run",
            clock_ms=lambda: NOW_MS,
            limits=limits,
        )
        self._owner.claim(take_over=True)
        self._work = threading.Thread(target=self._merge, daemon=True)

    def compose_if_absent(self, key: str, pieces: Sequence[Piece], *, timeout_s: float | None = None) -> None:
        super().compose_if_absent(key, pieces, timeout_s=timeout_s)
        if self._work.ident is None:
            self._work.start()
            self._work.join()

    def _merge(self) -> None:
        self._owner._merge_pages()


if __name__ == "__main__":
    main(*sys.argv[1:])
