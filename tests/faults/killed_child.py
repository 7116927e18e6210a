"""A backfill that kills itself with SIGKILL at a chosen moment; run by test_kill_nine.

usage: killed_child.py STORE URL MOMENT NTH
"""

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER
from tiered.broker_store.commit_log import CommitLog
from tiered.broker_store.store import open_broker_store
from tiered.catalog import catalog_writer, page_merge, page_writer
from tiered.catalog.pages import PutPage, RunIndex
from tiered.catalog.state import CatalogState, PageRef
from tiered.catalog.writer_limits import CatalogLimits
from tiered.object_store.interface import Body, ObjectStore, S3Credentials, StoreOptions
from tiered.object_store.open_store import open_store
from tiered.settings.sections import IndexSettings, ObjectStoreSettings, OffloadSettings
from tiered.settings.topic_rules import TopicRules
from uploader.bound_source import no_offsets
from uploader.offload import ObjectOptions, Offloader, OffloadIdentity

MOMENTS = (
    "scan",
    "data put",
    "between put and commit",
    "commit sent",
    "reply lost",
    "page merge",
    "index build",
)
INSIDE_S = 0.002


def die() -> None:
    """Die as by `kill -9`: nothing is flushed, no handler runs."""
    os.kill(os.getpid(), signal.SIGKILL)


class Countdown:
    """Dies at the n-th call."""

    def __init__(self, count: int) -> None:
        self._left = count
        self._lock = threading.Lock()

    def strike(self, how: Callable[[], object] = die) -> None:
        """One step nearer."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                how()


class DyingStore:
    """Forwards everything; dies around PUTs."""

    def __init__(self, inner: ObjectStore, moment: str, countdown: Countdown) -> None:
        self._inner = inner
        self._moment = moment
        self._countdown = countdown

    def __getattr__(self, name: str) -> object:
        return getattr(self._inner, name)

    def put_if_absent(self, key: str, body: Body, *, timeout_s: float | None = None) -> None:
        """As the inner store, if it lives."""
        is_commit = "/catalog/" in key
        if is_commit and self._moment == "between put and commit":
            self._countdown.strike()
        is_index = "/index/" in key and self._moment == "index build"
        is_sent = is_commit and self._moment == "commit sent"
        if is_sent or is_index or (not is_commit and self._moment == "data put"):
            self._countdown.strike(lambda: threading.Timer(INSIDE_S, die).start())
        self._inner.put_if_absent(key, body, timeout_s=timeout_s)
        if is_commit and self._moment == "reply lost":
            self._countdown.strike()


def die_in_merges(countdown: Countdown) -> None:
    """Merges of pages are frequent, and the process dies before one puts a page."""

    def dying_merge(
        index: RunIndex,
        state: CatalogState,
        sequences: Sequence[Sequence[PageRef]],
        runs_max: int,
        put: PutPage,
    ) -> list[PageRef]:
        def dying_put(version: int, data: bytes) -> str:
            countdown.strike()
            return put(version, data)

        return page_merge.merge(index, state, sequences, runs_max, dying_put)

    page_writer.merge = dying_merge  # type: ignore[attr-defined]
    catalog_writer.CatalogLimits = partial(  # type: ignore[assignment,attr-defined]
        CatalogLimits, root_runs_max=8, page_runs_max=16, merge_sequences=2, merge_spills=2
    )


def main(store: str, url: str, moment: str, nth: str) -> None:
    """Archive until the moment, or to the end."""
    countdown = Countdown(int(nth))
    if moment == "page merge":
        die_in_merges(countdown)
    if moment == "scan":
        read_into = CommitLog.read_into

        def dying_read(log: CommitLog, dest: memoryview, phys: int) -> int:
            countdown.strike()
            return read_into(log, dest, phys)

        CommitLog.read_into = dying_read  # type: ignore[method-assign,assignment]
    settings = ObjectStoreSettings(
        endpoint_url=os.environ["TIERED_OBJECT_STORE__ENDPOINT_URL"], region=os.environ["AWS_DEFAULT_REGION"]
    )
    credentials = S3Credentials(os.environ["AWS_ACCESS_KEY_ID"], os.environ["AWS_SECRET_ACCESS_KEY"])
    archive = DyingStore(open_store(url, StoreOptions(settings, credentials)), moment, countdown)
    with open_broker_store(Path(store)) as broker_store:
        Offloader(
            broker_store,
            archive,  # type: ignore[arg-type]
            OffloadIdentity(CLUSTER, BROKER, "kill-nine", "backfill"),
            OffloadSettings(batch_bytes=256 << 10, split_bytes=128 << 10, block_bytes=32 << 10, root_every=4),
            topic_filter=FILTER,
            offsets_source=no_offsets,
            options=ObjectOptions(IndexSettings(unindexed_objects_max=4), TopicRules()),
        ).run(threading.Event(), follow=False)


if __name__ == "__main__":
    main(*sys.argv[1:])
