"""What Offloader.status says at the edges of a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.offloading import BROKER, CLUSTER, SMALL
from tiered.broker_store.store import open_broker_store
from tiered.model.queue import TopicFilter
from tiered.object_store.memory import MemoryStore
from uploader.bound_source import no_offsets
from uploader.offload import Offloader, OffloadIdentity


def test_a_writer_without_messages_says_that_it_owns_the_archive(real_store: Callable[[str], Path]) -> None:
    stop = threading.Event()
    with open_broker_store(real_store("F") / "store") as store:
        offloader = Offloader(
            store,
            MemoryStore("memory://no-messages"),
            OffloadIdentity(CLUSTER, BROKER, "test", "run"),
            SMALL,
            topic_filter=TopicFilter(include=("no such topic",), cluster=CLUSTER, broker=BROKER),
            offsets_source=no_offsets,
        )
        assert offloader.status() is None
        thread = threading.Thread(target=offloader.run, args=(stop,), kwargs={"follow": True})
        thread.start()
        deadline_s = time.monotonic() + 60
        while (status := offloader.status()) is None and time.monotonic() < deadline_s:
            time.sleep(0.01)
        stop.set()
        thread.join()
    assert status is not None
    assert status.epoch == 1, "the epoch is claimed before anything is followed"
