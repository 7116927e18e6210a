"""The dispatch loop never waits for the object store."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from tests.end_to_end.offloading import BROKER, CLUSTER, FILTER, SMALL
from tests.end_to_end.test_ground_truth import check_against_truth
from tiered.broker_store.store import open_broker_store
from tiered.object_store.faults import Fault, FaultRule, FaultStore
from tiered.object_store.memory import MemoryStore
from uploader.bound_source import no_word
from uploader.offload import Offloader, OffloadIdentity

PATIENCE_S = 30.0


def test_messages_do_not_wait_for_the_brokers_tables(real_store: Callable[[str], Path]) -> None:
    stop, released = threading.Event(), threading.Event()
    memory = MemoryStore("memory://tables-stall")
    stalling = FaultStore(
        memory, [FaultRule(Fault.STALLED, keys="*/state/*")], wait=lambda _s: released.wait(PATIENCE_S)
    )
    with open_broker_store(real_store("F") / "store") as store:
        offloader = Offloader(
            store, stalling, OffloadIdentity(CLUSTER, BROKER, "test", "run"), SMALL,
            topic_filter=FILTER, word_source=no_word,
        )  # fmt: skip
        thread = threading.Thread(target=offloader.run, args=(stop,), kwargs={"follow": True})
        thread.start()
        deadline_s = time.monotonic() + PATIENCE_S / 2
        committed = 0
        while time.monotonic() < deadline_s:
            status = offloader.status()
            if status is not None and 0 < status.committed_phys == status.read_phys:
                committed = status.committed_phys
                break
            time.sleep(0.02)
        assert not released.is_set()
        released.set()
        stop.set()
        thread.join()
    assert committed > 0, "the last batch was not closed by age while a table's PUT stalled"
    assert check_against_truth(memory, real_store("F"), "F") > 10_000
